"""Short fits of the shipped tiny model, and what they wrote."""

from pathlib import Path

import torch
import yaml
from lightning.pytorch import Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fisher_lit.modules import DrGRPO
from fisher_lit.problems import ArithmeticProblems
from fisher_lit.prompts import PlainPrompt
from fisher_lit.rollout import RolloutDataModule

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
OVERLAYS = sorted((ROOT / "callbacks").glob("*.yaml"))


def sgd(lr):
    return lambda params: torch.optim.SGD(params, lr=lr)


def policy(model="tiny-base", **kwargs):
    return DrGRPO(model, **{"micro_batch_responses": 8, "optimizer": sgd(0.1)} | kwargs)


def data(kind=RolloutDataModule, **kwargs):
    settings = {
        "train": ArithmeticProblems(num_problems=40, seed=0),
        "prompt_format": PlainPrompt("{question}="),
        "max_prompt_tokens": 8,
        "max_response_tokens": 8,
    }
    return kind(**settings | kwargs)


def fit(module, datamodule, *callbacks, ckpt_path=None, **kwargs):
    settings = {
        "accelerator": "cpu", "devices": 1, "max_steps": 3, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0,
    }  # fmt: skip
    trainer = Trainer(**settings | kwargs, callbacks=list(callbacks))
    trainer.fit(module, datamodule, ckpt_path=ckpt_path)
    return trainer


def scalars(run_dir, tag):
    """(step, value) pairs of a TensorBoard scalar, oldest first; a later file replaces the steps that it repeats."""
    found = {}
    for file in sorted(Path(run_dir).glob("events.out.tfevents.*"), key=lambda f: f.stat().st_mtime_ns):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        if tag in events.Tags()["scalars"]:
            found |= {e.step: e.value for e in events.Scalars(tag)}
    return sorted(found.items())


def small_quickstart(folder):
    """The quickstart with few samples, so that overlays with the paper's steps measure at step 0 only."""
    config = yaml.safe_load(QUICKSTART.read_text())
    config["data"]["init_args"]["analysis"] = {"fisher_prompts": 20, "gradient_prompts": 200, "gradient_responses": 2}
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
