"""Bad input stops with one line that names the argument, its value and the way out, and leaves nothing half-written."""

import os
import resource
import subprocess
import sys

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from fisher_lit.cli import main
from fisher_lit.errors import NonFiniteError
from integration.helpers import QUICKSTART, data, fit, policy

SMALL = ["--trainer.max_steps", "2", "--trainer.limit_val_batches", "0"]


def fails(run, capsys, *args, config=QUICKSTART):
    """The one line that the command prints when it stops."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run("fit", *SMALL, *args, config=config)
    assert stop.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fisher-lit: error: ")]
    assert len(lines) == 1
    return lines[0].removeprefix("fisher-lit: error: ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model.init_args.model", "./nowhere"], "model: there is no directory './nowhere'"),
        (["--model.init_args.micro_batch_responses", "33"], "`micro_batch_responses` (33) is more than the 32"),
        (["--model.init_args.micro_batch_tokens", "100"], "exactly one of `micro_batch_responses` (32)"),
        (["--model.init_args.clip_range", "0"], "`clip_range` must be in (0, 1), got 0"),
        (["--data.init_args.responses_per_prompt", "1", "--model.init_args.micro_batch_responses", "1"],
         "`responses_per_prompt` is 1, so every response is its own group mean"),
        (["--data.init_args.eval_responses_per_prompt", "0"], "`eval_responses_per_prompt` must be at least 1, got 0"),
        (["--data.init_args.max_response_tokens", "0"], "`max_response_tokens` must be at least 1, got 0"),
        (["--data.init_args.max_response_tokens", "512"], "is more than the model's 512 positions"),
        (["--data.init_args.stop_tokens", "['<|end|>']"], "`stop_tokens` ['<|end|>']"),
        (["--data.init_args.sampling.top_p", "0.9"], "DrGRPO needs responses from the full softmax"),
        (["--data.init_args.train.init_args.num_problems", "3"], "`train` gives 3 prompts, fewer than the 4"),
        (["--trainer.precision", "bf16-true"], "precision 'bf16-true' does not keep fp32 parameters"),
        (["--trainer.devices", "2", "--trainer.strategy", "ddp_spawn"], "DDPStrategy with 2 processes is not"),
        (["--trainer.strategy", "fsdp"], "strategy 'fsdp' flattens parameters; set `strategy: fsdp2`"),
        (["--trainer.devices", "3", "--trainer.strategy", "fsdp2"], "`prompts_per_update` is 4, which 3 processes"),
    ],
)  # fmt: skip
def test_bad_settings(run, capsys, args, message):
    assert message in fails(run, capsys, *args)


def test_tokenizer_without_stop_token(run, capsys, tmp_path, tokenizer, tiny_model):
    tiny_model.save_pretrained(tmp_path / "model")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "model")
    assert "no end-of-sequence token" in fails(run, capsys, "--model.init_args.model", tmp_path / "model")


def test_tokenizer_without_pad_token_trains(run, tmp_path, tokenizer, tiny_model):
    tiny_model.save_pretrained(tmp_path / "model")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "model")
    run("fit", *SMALL, "--model.init_args.model", tmp_path / "model")
    assert (tmp_path / "run" / "hf" / "step_000002" / "model.safetensors").exists()


def test_directory_that_is_no_model(run, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in fails(run, capsys, "--model.init_args.model", tmp_path / "empty")


def test_weights_that_cannot_be_read(run, capsys, tmp_path, tokenizer, tiny_model):
    tiny_model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "cannot be loaded" in fails(run, capsys, "--model.init_args.model", tmp_path / "model")


def test_log_directory_that_cannot_be_written(run, capsys, tmp_path):
    (tmp_path / "run").write_text("a file where the directory should be")
    assert "cannot be written" in fails(run, capsys)


def test_a_used_directory_is_not_written_over(run, capsys, tmp_path):
    run("fit", *SMALL)
    before = sorted((tmp_path / "run").rglob("*"))
    assert "already holds a run; continue it with --ckpt_path last" in fails(run, capsys)
    assert sorted((tmp_path / "run").rglob("*")) == before


class Poison(Callback):
    """Puts a NaN into a weight before update 2, or into a gradient before its step."""

    def __init__(self, what):
        self.what = what

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.what == "loss" and trainer.global_step == 2:
            pl_module.model.model.norm.weight.data[0] = float("nan")

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if self.what == "gradient norm" and trainer.global_step == 2:
            pl_module.model.model.norm.weight.grad[0] = float("inf")


@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_non_finite_numbers_stop_before_the_update(tmp_path, what):
    checkpoint = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=0, save_last=True)
    with pytest.raises(
        NonFiniteError, match=f"the {what} of update 2 is (nan|inf); training stopped before this update"
    ):
        fit(policy(), data(), Poison(what), checkpoint, max_steps=5, enable_checkpointing=True)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    assert all(torch.isfinite(value).all() for value in saved["state_dict"].values())


def test_full_disk_keeps_the_previous_checkpoint(tmp_path):
    """A first run saves its checkpoint (1.8 MB); for the second no file may grow past 1 MB."""
    logger = ["--trainer.logger.init_args.save_dir", str(tmp_path), "--trainer.logger.init_args.name", "run"]
    args = [
        sys.executable,
        "-m",
        "fisher_lit",
        "fit",
        "-c",
        str(QUICKSTART),
        "--trainer.limit_val_batches",
        "0",
        *logger,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*args, "--trainer.max_steps", "50"], check=True, env=environment)
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    before = checkpoint.read_bytes()

    def no_space():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    stopped = subprocess.run(
        [*args, "--trainer.max_steps", "150", "--ckpt_path", "last"],
        env=environment, preexec_fn=no_space, capture_output=True, text=True,
    )  # fmt: skip
    assert stopped.returncode == 2
    assert "fisher-lit: error: no space to write" in stopped.stderr
    assert checkpoint.read_bytes() == before
    assert [f.name for f in checkpoint.parent.iterdir()] == ["last.ckpt"]


def test_unknown_setting_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "-c", str(QUICKSTART), "--model.init_args.learning_rate", "1"])
    error = capsys.readouterr().err
    assert "learning_rate" in error
    assert len(error.splitlines()) < 15
