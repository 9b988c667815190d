"""The scripts of `cluster/` on a real Slurm: they run, stop, requeue and end with the numbers of a run left alone."""

import time

import pytest
import torch
from safetensors.torch import load_file

from cluster.slurm import Slurm
from integration.helpers import QUICKSTART, scalars

TAGS = ("train/loss", "train/reward", "train/gradient_norm", "train/entropy", "val/accuracy", "val/response_length")
UPDATES = 60


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


def short_run(folder, name):
    """A quickstart of a few seconds, which writes no checkpoint of its own accord."""
    logger = ("--trainer.logger.init_args.save_dir", str(folder), "--trainer.logger.init_args.name", name)
    problems = ("--data.init_args.val.init_args.num_problems", "4")
    steps = ("--trainer.max_steps", str(UPDATES), "--trainer.val_check_interval", "25")
    return ("-c", str(QUICKSTART), *logger, *problems, *steps)


def assert_same_run(got, want):
    for tag in TAGS:
        assert scalars(got, tag), tag
        assert scalars(got, tag) == scalars(want, tag), tag
    name = f"hf/step_{UPDATES:06d}/model.safetensors"
    got, want = load_file(got / name), load_file(want / name)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)


def test_stopped_jobs_continue_by_themselves_and_end_with_the_same_numbers(slurm, tmp_path):
    jobs = {name: slurm.submit("one_node.sbatch", *short_run(tmp_path, name)) for name in ("whole", "usr1", "requeue")}
    for name, command in (("usr1", "scancel --batch --signal=USR1"), ("requeue", "scontrol requeue")):
        slurm.until_printed(jobs[name], "step 0 val")
        time.sleep(0.5)
        slurm.call(f"{command} {jobs[name]}")
    slurm.finish(jobs["whole"])
    for name in ("usr1", "requeue"):
        output = slurm.finish(jobs[name])
        assert slurm.field(jobs[name], "Restarts") == "1"
        assert "Restored all states" in output
        assert output.count("step 0 val") == 1
        assert_same_run(tmp_path / name, tmp_path / "whole")
