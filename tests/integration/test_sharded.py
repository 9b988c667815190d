"""Several processes that share a model get the numbers of one: real gloo processes on the CPU."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fisher_lit.callbacks.analysis import read_records
from integration.helpers import scalars

TIME_LIMIT_S = 100
TESTS = Path(__file__).parents[1]


def start(world, case, folder, **environment):
    """Start the processes of a case; a world of 0 is one process without a process group."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    shared = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | environment
    if world:
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    processes = []
    for rank in range(world or 1):
        own = {"LOCAL_RANK": str(rank)} if world else {}
        log = (folder / f"log_{rank}.txt").open("w")
        args = [sys.executable, "-m", "integration.sharded_worker", case, str(folder)]
        processes.append(subprocess.Popen(args, env=shared | own, stdout=log, stderr=subprocess.STDOUT))
    return processes


def finish(processes, folder, time_limit_s=TIME_LIMIT_S):
    """Wait for all of them. A rank that fails or hangs is named, and none is left behind."""
    deadline = time.monotonic() + time_limit_s
    hung = []
    for rank, process in enumerate(processes):
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            hung.append(rank)
    for rank in hung:
        processes[rank].kill()
        processes[rank].wait()
    tails = {r: (folder / f"log_{r}.txt").read_text()[-1500:] for r, p in enumerate(processes) if p.returncode}
    assert not hung, f"ranks {hung} did not end within {time_limit_s} s: {tails}"
    assert not tails, f"ranks {list(tails)} failed: {tails}"


def run(world, case, folder, **environment):
    finish(start(world, case, folder, **environment), folder)
    return folder


def same_files(one, other, *names, rtol=1e-5):
    for name in names:
        want, got = load_file(one / f"{name}.safetensors"), load_file(other / f"{name}.safetensors")
        assert want.keys() == got.keys()
        for key, value in want.items():
            if value.dtype == torch.uint8:
                assert torch.equal(got[key], value), (name, key)
            else:
                torch.testing.assert_close(got[key], value, rtol=0, atol=rtol * float(value.abs().max()))


def same_training(one, other, tags, steps):
    """Same curves and final weights, up to the order in which gradients are added up."""
    for tag in tags:
        want, got = scalars(one / "run", tag), scalars(other / "run", tag)
        assert [step for step, _ in got] == [step for step, _ in want], tag
        assert [v for _, v in got] == pytest.approx([v for _, v in want], rel=1e-4, abs=1e-6), tag
    name = f"run/hf/step_{steps:06d}/model"
    same_files(one, other, name, rtol=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def one_process(folder):
    return run(0, "train", folder / "train_0")


TAGS = ("train/loss", "train/reward", "train/gradient_norm", "train/entropy", "train/zero_advantage_groups",
        "train/response_length", "val/accuracy", "val/accuracy_stderr", "val/pass@4")  # fmt: skip


@pytest.mark.parametrize("world", [2, 4])
def test_vectors_and_sets_of_given_responses(folder, world):
    if not (whole := folder / "maths_0").exists():
        run(0, "maths", whole)
    shared = run(world, "maths", folder / f"maths_{world}")
    same_files(whole, shared, "fisher", "gradient", "ties", "top", "random")
    want = json.loads((whole / "norms_0.json").read_text())
    for rank in range(world):
        assert json.loads((shared / f"norms_{rank}.json").read_text()) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_training_and_evaluation(folder, one_process, world):
    shared = run(world, "train", folder / f"train_{world}")
    same_training(one_process, shared, TAGS, 5)
    completions = Path("run", "completions", "val_step_000005.jsonl")
    assert (shared / completions).read_text() == (one_process / completions).read_text()
    assert len((shared / completions).read_text().splitlines()) == 7 * 4
    assert [v for _, v in scalars(shared / "run", "train/logprob_gap_max")] == pytest.approx([0.0] * 5, abs=1e-4)


def test_analyses(folder):
    whole = run(0, "analyses", folder / "analyses_0")
    shared = run(2, "analyses", folder / "analyses_2")
    for name in ("fisher", "recall", "retention", "token_fisher", "bound"):
        want, got = (read_records(f / "run" / "analyses" / f"{name}.jsonl") for f in (whole, shared))
        assert [r["step"] for r in got] == [r["step"] for r in want] == [0, 2]
        assert got[0]["values"] == pytest.approx(want[0]["values"], rel=1e-5)
        # Two updates later the weights differ in their last digits.
        assert got[1]["values"] == pytest.approx(want[1]["values"], rel=1e-2, abs=0.2)
    same_files(whole / "run" / "analyses", shared / "run" / "analyses", "fisher_step_000000", "mask")
    same_training(whole, shared, ("mask/gradient_norm_all", "mask/gradient_norm_trained"), 2)


def test_checkpoint_of_two_processes_is_continued_by_any_number(folder, one_process):
    cut = run(2, "checkpoint", folder / "cut", STEPS="3")
    checkpoint = str(cut / "checkpoints" / "step=2.ckpt")
    for world in (0, 1):
        resumed = run(world, "checkpoint", folder / f"resumed_{world}", RESUME=checkpoint)
        same_files(one_process, resumed, "run/hf/step_000005/model", rtol=1e-4)
        assert [s for s, _ in scalars(resumed / "run", "train/loss")] == [2, 3, 4]


def test_death_of_one_process_stops_the_other_and_the_run_goes_on(folder, one_process):
    killed = folder / "killed"
    processes = start(2, "checkpoint", killed, STEPS="2000")
    deadline = time.monotonic() + 60
    while not (killed / "checkpoints" / "step=2.ckpt").exists():
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGKILL)
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] failed"):
        finish(processes, killed, 60)
    assert "Error" in (killed / "log_0.txt").read_text()
    resumed = run(2, "checkpoint", folder / "continued", RESUME=str(killed / "checkpoints" / "step=2.ckpt"))
    same_files(one_process, resumed, "run/hf/step_000005/model", rtol=1e-4)
