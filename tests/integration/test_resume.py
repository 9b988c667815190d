"""A run killed with SIGKILL and continued ends with the weights and the numbers of a run that was left alone."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from safetensors.torch import load_file

from integration.helpers import QUICKSTART, scalars

TAGS = ("train/loss", "train/reward", "train/gradient_norm", "train/entropy", "val/accuracy", "val/response_length")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def command(folder, *, checkpoint_every):
    """A fit of 22 updates with 20 problems, 4 per update: an epoch ends every 5 updates."""
    config = yaml.safe_load(QUICKSTART.read_text())
    source = {"class_path": "fisher_lit.problems.ArithmeticProblems", "init_args": {"seed": 0}}
    data = config["data"]["init_args"]
    data["train"] = source | {"init_args": {"num_problems": 20}}
    data["val"] = source | {"init_args": {"num_problems": 4}}
    trainer = config["trainer"]
    trainer |= {"max_steps": 22, "val_check_interval": 6, "enable_progress_bar": False}
    trainer["logger"]["init_args"] |= {"save_dir": str(folder), "name": "run"}
    trainer["callbacks+"][0]["init_args"]["every_n_steps"] = checkpoint_every
    trainer["callbacks+"] = [c for c in trainer["callbacks+"] if "ProgressBar" not in c["class_path"]]
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return [sys.executable, "-m", "fisher_lit", "fit", "-c", str(path)]


def kill_after_saves(process, checkpoint, saves, delay=0.1):
    """SIGKILL some seconds, about an update, after the checkpoint was written so many times."""
    deadline, seen = time.monotonic() + 120, set()
    while len(seen) < saves:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, "the run made no progress"
        if checkpoint.exists():
            seen.add(checkpoint.stat().st_mtime_ns)
        time.sleep(0.005)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    subprocess.run(command(folder, checkpoint_every=5), check=True, env=ENVIRONMENT)
    return folder / "run"


@pytest.mark.parametrize(("checkpoint_every", "saves"), [(5, 2), (4, 2)], ids=["epoch boundary", "mid-epoch"])
def test_killed_run_ends_with_the_same_numbers(whole, tmp_path, checkpoint_every, saves):
    args = command(tmp_path, checkpoint_every=checkpoint_every)
    process = subprocess.Popen(args, env=ENVIRONMENT)
    kill_after_saves(process, tmp_path / "run" / "checkpoints" / "last.ckpt", saves)
    assert not (tmp_path / "run" / "hf").exists()
    subprocess.run([*args, "--ckpt_path", "last"], check=True, env=ENVIRONMENT)
    for tag in TAGS:
        assert scalars(tmp_path / "run", tag) == scalars(whole, tag), tag
    name = "hf/step_000022/model.safetensors"
    got, want = load_file(tmp_path / "run" / name), load_file(whole / name)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)


def test_run_killed_after_its_last_update_still_gets_its_final_score(whole, tmp_path):
    """Killed in the final evaluation, which waits for a file that is not there the first time."""
    args = command(tmp_path, checkpoint_every=11)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    config["trainer"]["callbacks+"].append({"class_path": "wait_for_file.WaitForFile", "init_args": {"step": 22}})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "wait_for_file.py").write_text(WAIT)
    environment = ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(args, env=environment, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not (tmp_path / "waiting").exists():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, "the run made no progress"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    subprocess.run([*args, "--ckpt_path", "last"], check=True, env=environment, cwd=tmp_path)
    for tag in TAGS:
        assert scalars(tmp_path / "run", tag) == scalars(whole, tag), tag
    assert (tmp_path / "run" / "hf" / "step_000022" / "model.safetensors").exists()


WAIT = """
import time
from pathlib import Path
from lightning.pytorch import Callback

class WaitForFile(Callback):
    def __init__(self, step: int):
        self.step = step

    def on_validation_start(self, trainer, pl_module):
        if trainer.global_step == self.step and not Path("waiting").exists():
            Path("waiting").touch()
            time.sleep(600)
"""
