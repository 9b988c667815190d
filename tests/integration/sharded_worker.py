"""One process of a sharded run: `python -m integration.sharded_worker CASE FOLDER`, started by `test_sharded.py`."""

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

from fisher_lit.callbacks import (
    FisherBound,
    FisherEstimation,
    GradientRecall,
    HFExport,
    ParameterMask,
    Retention,
    TokenFisherProbe,
)
from fisher_lit.problems import ArithmeticProblems
from fisher_lit.rollout.analysis_samples import AnalysisSamples
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


def main():
    torch.set_num_threads(1)
    case, folder = sys.argv[1], Path(sys.argv[2])
    globals()[f"case_{case}"](folder)


if __name__ == "__main__":
    main()
