"""One process of a sharded run: `python -m integration.sharded_worker CASE FOLDER`, started by `test_sharded.py`."""

import json
import os
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch.distributed.device_mesh import init_device_mesh

from fisher_lit.callbacks import (
    FisherBound,
    FisherEstimation,
    GradientRecall,
    HFExport,
    ParameterMask,
    Retention,
    TokenFisherProbe,
)
from fisher_lit.fisher.coordinates import Coordinates
from fisher_lit.fisher.estimators import FisherEstimator, GradientEstimator
from fisher_lit.fisher.random_sets import random_masks
from fisher_lit.fisher.selection import top_masks
from fisher_lit.fisher.vectors import load_masks, save_masks, save_vectors
from fisher_lit.models import load_config, load_model, resolve_model
from fisher_lit.problems import ArithmeticProblems
from fisher_lit.rollout.analysis_samples import AnalysisSamples
from fisher_lit.rollout.batch import Rollout
from fisher_lit.sharding import Shards, all_reduce, gather_lists, rank, shard_model, share_of
from integration.helpers import data, fit, policy

ADAM = {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0)}


def sharded_fit(folder, *callbacks, module=None, datamodule=None, **kwargs):
    """A fit on as many processes as the environment says; plain Lightning without any."""
    world = int(os.environ.get("WORLD_SIZE", 0))
    settings = {"strategy": "fsdp2", "devices": world} if world else {}
    logger = TensorBoardLogger(folder, "run", version="")
    callbacks = [*callbacks, HFExport()]
    settings |= {"logger": logger, "log_every_n_steps": 1, "max_steps": 5, "limit_val_batches": 1.0}
    settings |= {"check_val_every_n_epoch": None, "val_check_interval": 5, "num_sanity_val_steps": 0}
    module = module or policy(**ADAM)
    fit(module, datamodule or train_data(), *callbacks, **settings | kwargs)
    return module


def train_data(**kwargs):
    return data(val=ArithmeticProblems(num_problems=7, seed=1), eval_prompts_per_batch=3, **kwargs)


def case_train(folder):
    sharded_fit(folder)


def case_checkpoint(folder):
    kwargs = {"enable_checkpointing": True}
    save = ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    path = os.environ.get("RESUME")
    sharded_fit(folder, save, max_steps=int(os.environ.get("STEPS", 5)), ckpt_path=path, **kwargs)


QS = [0.1, 1.0, 5.0]
SAMPLES = AnalysisSamples(fisher_prompts=9, gradient_prompts=5, gradient_responses=4)


def case_analyses(folder):
    """At step 0 the responses are the same on any number of processes, and so must be every measurement."""
    when = {"steps": [0, 2]}
    analyses = [
        FisherEstimation(qs=QS, **when),
        GradientRecall(qs=QS, save=True, **when),
        Retention(qs=QS, **when),
        TokenFisherProbe(qs=QS, num_prompts=3, num_positions=2, num_pairs=3, **when),
        FisherBound(**when),
        ParameterMask(source=os.environ.get("MASK", "initial_fisher"), q=5.0),
    ]
    module = policy(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1))
    sharded_fit(folder, *analyses, module=module, datamodule=train_data(analysis=SAMPLES), max_steps=2)


def rollouts(count):
    """Made-up responses of uneven lengths."""
    chance = random.Random(0)
    return [
        Rollout(f"{i}", "", "", 0, tuple(chance.choices(range(3, 12), k=4)), ids, (0.0,) * len(ids), "length", "")
        for i in range(count)
        for ids in [tuple(chance.choices(range(3, 12), k=chance.randint(1, 6)))]
    ]


def case_maths(folder):
    """Fisher, gradient and sets of given responses, written to files; 7 responses are uneven on 2 and 4 processes."""
    path = resolve_model("tiny-base")
    model = load_model(path, load_config(path))
    if "WORLD_SIZE" in os.environ:
        os.environ["RANK"] = os.environ["LOCAL_RANK"]
        dist.init_process_group("gloo")
        shard_model(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    coordinates = Coordinates.from_model(model)
    shards = Shards.of(model, coordinates)
    mine = share_of(rollouts(7))
    weights = [0.0 if r.problem_id == "3" else float(len(r.response_ids) - 3) for r in mine]
    gradient = GradientEstimator(model, batch_tokens=16)
    gradient.add(mine, weights)
    fisher = FisherEstimator(model)
    fisher.add(mine)
    assert all(p.grad is None for p in model.parameters())
    save_vectors(folder / "gradient.safetensors", gradient.mean(), coordinates, {}, shards)
    save_vectors(folder / "fisher.safetensors", fisher.mean(), coordinates, {}, shards)
    # Many equal values, so that ties are split between processes.
    rounded = {name: (f * 20).round() for name, f in fisher.mean().items()}
    (ties,) = top_masks(rounded, [5000], coordinates, parts=shards.parts, all_reduce=all_reduce)
    (top,) = top_masks(fisher.mean(), [1000], coordinates, parts=shards.parts, all_reduce=all_reduce)
    (chance,) = random_masks(coordinates, [1000], 1, parts=shards.parts, all_reduce=all_reduce)
    for name, masks in (("ties", ties), ("top", top), ("random", chance)):
        file = folder / f"{name}.safetensors"
        save_masks(file, masks, coordinates, {}, shards)
        gather_lists([])
        again, _ = load_masks(file, coordinates, shards=shards)
        assert all(torch.equal(again[n], masks[n]) for n in coordinates.names)
    norms = [norm for part in gather_lists(fisher.squared_norms().tolist()) for norm in part]
    (folder / f"norms_{rank()}.json").write_text(json.dumps(norms))


def main():
    torch.set_num_threads(1)
    case, folder = sys.argv[1], Path(sys.argv[2])
    globals()[f"case_{case}"](folder)


if __name__ == "__main__":
    main()
