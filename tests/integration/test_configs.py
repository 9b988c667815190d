"""Every shipped YAML is accepted by the command line, alone and composed."""

import itertools
import re
import subprocess
import sys

import pytest
import yaml

from fisher_lit.cli import main
from integration.helpers import QUICKSTART, ROOT

ENGINES = {"VLLMEngine": ROOT / "configs" / "vllm.yaml", "VLLMServerEngine": ROOT / "configs" / "vllm_server.yaml"}
# A file without a DataModule of its own is an overlay of the config that its comment names.
CONFIGS = [p for p in sorted((ROOT / "configs").glob("*.yaml")) if "max_steps" in p.read_text()]
VARIANTS = sorted(set((ROOT / "configs").glob("*.yaml")) - set(CONFIGS))
OVERLAYS = sorted((ROOT / "callbacks").glob("*.yaml"))


def printed(capsys, *paths):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["fit", *(arg for path in paths for arg in ("-c", str(path))), "--print_config"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def classes(text):
    return [callback["class_path"].rsplit(".", 1)[-1] for callback in yaml.safe_load(text)["trainer"]["callbacks"]]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_config_round_trips(capsys, tmp_path, config):
    text = printed(capsys, config)
    saved = tmp_path / "config.yaml"
    saved.write_text(text)
    assert printed(capsys, saved) == text
    assert {"ModelCheckpoint", "UpdateProgressBar"} <= set(classes(text))
    assert yaml.safe_load(text)["trainer"]["logger"]["class_path"].endswith("TensorBoardLogger")


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda path: path.stem)
def test_variant_composes_with_the_config_it_names(capsys, variant):
    base = re.search(r"-c (configs/\w+\.yaml) -c configs/" + variant.name, variant.read_text())[1]
    text = printed(capsys, ROOT / base, variant)
    assert text != printed(capsys, ROOT / base)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_overlay_adds_one_callback_and_says_what_it_asks(capsys, overlay):
    first = overlay.read_text().splitlines()[0]
    assert first.startswith("# ")
    assert "?" in first
    (added,) = yaml.safe_load(overlay.read_text())["trainer"]["callbacks+"]
    base = classes(printed(capsys, QUICKSTART))
    assert classes(printed(capsys, QUICKSTART, overlay)) == [*base, added["class_path"].rsplit(".", 1)[-1]]


def test_overlays_compose_in_any_order(capsys):
    paths = [QUICKSTART, ROOT / "callbacks" / "fisher.yaml", ROOT / "callbacks" / "mask_random.yaml"]
    found = {frozenset(classes(printed(capsys, *order))) for order in itertools.permutations(paths)}
    assert len(found) == 1
    assert {"FisherEstimation", "ParameterMask", "ModelCheckpoint"} <= found.pop()


@pytest.mark.parametrize("config", [QUICKSTART, ROOT / "configs" / "rl_math500.yaml"], ids=lambda path: path.stem)
@pytest.mark.parametrize("engine_class", ENGINES)
def test_engine_overlay_replaces_the_engine_only(capsys, config, engine_class):
    """It needs no vllm, and settings of another engine do not stay behind."""
    base, composed = (yaml.safe_load(printed(capsys, *paths)) for paths in ([config], [config, ENGINES[engine_class]]))
    engine = composed["data"]["init_args"].pop("engine")
    base["data"]["init_args"].pop("engine")
    assert composed == base
    assert engine["class_path"] == f"fisher_lit.rollout.{engine_class}"
    assert "max_batch_size" not in engine["init_args"]


def test_help_explains_every_setting():
    def help_of(*args):
        return subprocess.run(
            [sys.executable, "-m", "fisher_lit", "fit", *args], capture_output=True, text=True, check=True
        ).stdout

    assert "usage: fisher-lit fit -c CONFIG" in help_of("--help")
    text = help_of("--model.help", "fisher_lit.modules.DrGRPO")
    for phrase in (
        "ε of the clipped surrogate",
        "largest global gradient norm",
        "the optimizer; the default is the paper's",
    ):
        assert phrase in " ".join(text.split())


def test_rl_config_has_the_papers_values(capsys):
    """arXiv 2609.36262, Table 6, column RL."""
    config = yaml.safe_load(printed(capsys, ROOT / "configs" / "rl_math500.yaml"))
    model, data, trainer = config["model"]["init_args"], config["data"]["init_args"], config["trainer"]
    assert model["model"] == "Qwen/Qwen3-1.7B-Base"
    assert model["optimizer"]["class_path"] == "torch.optim.AdamW"
    optimizer = model["optimizer"]["init_args"]
    assert (optimizer["lr"], optimizer["betas"], optimizer["eps"]) == (5e-7, [0.9, 0.999], 1e-8)
    assert (optimizer["weight_decay"], model["lr_scheduler"]) == (0, None)
    assert (model["clip_range"], model["gradient_clip"], model["micro_batch_responses"]) == (0.2, 1.0, 4)
    assert (data["prompts_per_update"], data["responses_per_prompt"]) == (4, 8)
    assert (data["max_prompt_tokens"], data["max_response_tokens"]) == (1024, 4096)
    full = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "min_p": 0.0}
    assert data["sampling"] == data["eval_sampling"] == full
    assert (data["eval_responses_per_prompt"], data["eval_seed"]) == (4, 300)
    assert data["prompt_format"]["class_path"].endswith("PlainPrompt")
    assert (trainer["max_steps"], trainer["precision"]) == (1000, "bf16-mixed")
    analysis = data["analysis"]
    assert analysis == {
        "fisher_prompts": 800, "gradient_prompts": 300, "gradient_responses": 8,
        "prompt_seed": 800, "fisher_seed": 100, "gradient_seed": 200,
    }  # fmt: skip


def test_distillation_config_has_the_papers_values(capsys):
    """arXiv 2609.36262, Table 6, column OPD."""
    config = yaml.safe_load(printed(capsys, ROOT / "configs" / "opd_aime24.yaml"))
    model, data, trainer = config["model"]["init_args"], config["data"]["init_args"], config["trainer"]
    assert config["model"]["class_path"] == "fisher_lit.modules.K2Distillation"
    assert (model["model"], model["teacher"]["model"]) == ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B-Instruct-2507")
    optimizer = model["optimizer"]["init_args"]
    assert (optimizer["lr"], optimizer["betas"], optimizer["eps"]) == (5e-6, [0.9, 0.999], 1e-8)
    assert (optimizer["weight_decay"], model["lr_scheduler"], model["gradient_clip"]) == (0, None, 1.0)
    assert (model["micro_batch_responses"], data["prompts_per_update"], data["responses_per_prompt"]) == (2, 512, 1)
    assert (data["max_prompt_tokens"], data["max_response_tokens"]) == (2048, 8192)
    assert data["sampling"] == {"temperature": 1.0, "top_p": 1.0, "top_k": None, "min_p": 0.0}
    assert data["eval_sampling"] == {"temperature": 1.0, "top_p": 0.7, "top_k": None, "min_p": 0.0}
    assert (data["eval_responses_per_prompt"], data["eval_seed"]) == (8, 300)
    assert data["prompt_format"]["init_args"]["enable_thinking"] is False
    assert data["stop_tokens"] == ["<|endoftext|>", "<|im_end|>"]
    assert (trainer["max_steps"], trainer["precision"]) == (20, "bf16-mixed")
