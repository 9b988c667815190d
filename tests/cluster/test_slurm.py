"""The scripts of `cluster/` on a real Slurm: they run, stop, requeue and end with the numbers of a run left alone."""

import time

import pytest
import torch
import yaml
from safetensors.torch import load_file

from cluster.slurm import Slurm
from fisher_lit.cli import main
from integration.helpers import QUICKSTART, ROOT, scalars

TAGS = ("train/loss", "train/reward", "train/gradient_norm", "train/entropy", "val/accuracy", "val/response_length")
UPDATES = 40
TINY_BASE = ROOT / "src" / "fisher_lit" / "tiny_base" / "model.safetensors"


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
    steps = ("--trainer.max_steps", str(UPDATES), "--trainer.val_check_interval", "15")
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
    urgent = "sbatch --partition=urgent --nodelist=n2 --exclusive --output=/dev/null --wrap true"
    stops = {"notice": "scancel --batch --signal=USR1 {}", "cancel": "scancel {}", "preempted": urgent}
    jobs = {}
    for name in ("notice", "cancel", "whole"):
        jobs[name] = slurm.submit("one_node.sbatch", *short_run(tmp_path, name), options=("--nodelist=n1",))
    # One node of one task: sharded fits have tests of their own.
    options = ("--nodelist=n2", "--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=1")
    jobs["preempted"] = slurm.submit("many_nodes.sbatch", *short_run(tmp_path, "preempted"), options=options)
    for name, command in stops.items():
        slurm.until_printed(jobs[name], "step 0 val")
        # A few updates more.
        time.sleep(0.3)
        slurm.call(command.format(jobs[name]))
    slurm.finish(jobs["cancel"], "CANCELLED")
    slurm.finish(jobs["whole"])
    for name in ("notice", "preempted"):
        output = slurm.finish(jobs[name])
        assert slurm.field(jobs[name], "Restarts") == "1"
        assert "Restored all states" in output
        assert output.count("step 0 val") == 1
        assert_same_run(tmp_path / name, tmp_path / "whole")
    # A user who cancels a job does not want it back.
    assert slurm.field(jobs["cancel"], "JobState") == "CANCELLED"
    assert slurm.field(jobs["cancel"], "Restarts") == "0"
    assert (tmp_path / "cancel" / "checkpoints" / "last.ckpt").exists()


def test_grid_covers_every_condition_budget_and_seed_once(slurm):
    listed = [line.split("\t") for line in slurm.call("cluster/grid.sh").splitlines()]
    assert [int(index) for index, _ in listed] == list(range(64))
    budgets, seeds = ("0.05", "0.1", "0.5", "1", "5"), range(4)
    masked = {f"{c}_q{q}_seed{seed}" for c in ("fisher", "r0", "r1") for q in budgets for seed in seeds}
    assert {name for _, name in listed} == masked | {f"full_seed{seed}" for seed in seeds}
    runs = [slurm.call(["cluster/grid.sh", index]).splitlines() for index, _ in listed]
    assert [option(run, "trainer.logger.init_args.name") for run in runs] == [name for _, name in listed]
    assert len({tuple(run[:-2]) for run in runs}) == 64
    header = (ROOT / "cluster" / "grid.sbatch").read_text()
    assert "--array=0-63%" in header
    with pytest.raises(AssertionError, match="no run has the index '64'; they go from 0 to 63"):
        slurm.call("cluster/grid.sh 64")


def option(arguments, name):
    return arguments[arguments.index(f"--{name}") + 1]


@pytest.mark.parametrize("index", [0, 12, 27, 62])
def test_command_line_takes_the_runs_of_the_grid(slurm, capsys, monkeypatch, tmp_path, index):
    monkeypatch.chdir(ROOT)
    arguments = slurm.call(["cluster/grid.sh", str(index)], RUNS=str(tmp_path)).splitlines()
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", "cluster/stop_on_signal.yaml", *arguments, "--print_config"])
    assert stop.value.code == 0
    config = yaml.safe_load(capsys.readouterr().out)
    condition, *middle, seed = option(arguments, "trainer.logger.init_args.name").split("_")
    assert config["seed_everything"] == int(seed.removeprefix("seed"))
    assert config["trainer"]["logger"]["init_args"]["save_dir"] == str(tmp_path)
    classes = [callback["class_path"].rsplit(".", 1)[1] for callback in config["trainer"]["callbacks"]]
    assert classes[0] == "StopOnSignal"
    assert "ModelCheckpoint" in classes
    if condition == "full":
        assert "ParameterMask" not in classes
        return
    mask = config["trainer"]["callbacks"][-1]["init_args"]
    assert mask["q"] == float(middle[0].removeprefix("q"))
    if condition == "fisher":
        path = str(tmp_path / "initial" / "analyses" / "fisher_step_000000.safetensors")
        assert (mask["source"], mask["path"]) == ("fisher_file", path)
    else:
        assert (mask["source"], mask["seed"]) == ("random", int(condition[1]))


def test_array_task_trains_on_the_fisher_that_a_first_job_has_measured(slurm, tmp_path):
    settings = {"CONFIG": str(QUICKSTART), "RUNS": str(tmp_path), "BUDGETS": "0.5 5", "SEEDS": "0 3"}
    initial = slurm.call("cluster/grid.sh initial", **settings).splitlines()
    few = ("--data.init_args.analysis.fisher_prompts", "16")
    first = slurm.submit("one_node.sbatch", *initial, *few)
    # Full at two seeds, then Fisher at 0.5 and at 5 percent.
    options = ("--array=5", f"--dependency=afterok:{first}")
    steps = ("--trainer.max_steps", "2", "--trainer.limit_val_batches", "0")
    array = slurm.submit("grid.sbatch", *steps, options=options, **settings)
    slurm.finish(first)
    slurm.finish(f"{array}_5")
    run = tmp_path / "fisher_q5_seed3"
    assert [step for step, _ in scalars(run, "train/loss")] == [0, 1]
    fisher = load_file(tmp_path / "initial" / "analyses" / "fisher_step_000000.safetensors")
    before, after = load_file(TINY_BASE), load_file(run / "hf" / "step_000002" / "model.safetensors")
    moved = sum(int((before[name] != after[name]).sum()) for name in before)
    total = sum(value.numel() for value in fisher.values())
    assert 0 < moved <= 0.05 * total
