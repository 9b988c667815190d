"""A fit that a signal stops exits with its status and continues to the numbers of a fit that was left alone."""

import os
import signal

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

from fisher_lit.callbacks import BoundaryEvaluation, StopOnSignal
from fisher_lit.errors import UserError
from fisher_lit.problems import ArithmeticProblems
from integration.helpers import data, fit, policy, scalars

TAGS = ("train/loss", "train/reward", "val/accuracy")


class Signal(Callback):
    """Sends this process a signal in the update after `step`, or in the evaluation at `step`."""

    def __init__(self, signum, step, in_evaluation=False):
        self.signum, self.step, self.in_evaluation = signum, step, in_evaluation

    def on_train_batch_start(self, trainer, *_):
        if not self.in_evaluation and trainer.global_step == self.step:
            os.kill(os.getpid(), self.signum)

    def on_validation_batch_start(self, trainer, *_):
        if self.in_evaluation and trainer.global_step == self.step:
            os.kill(os.getpid(), self.signum)


def run(folder, *callbacks, checkpoint_every=100, **kwargs):
    """Six updates, evaluated in two batches at the start, after three and at the end."""
    checkpoint = ModelCheckpoint(every_n_train_steps=checkpoint_every, save_top_k=0, save_last=True)
    module = policy()
    torch.manual_seed(0)
    datamodule = data(
        val=ArithmeticProblems(num_problems=8, seed=1), prompts_per_update=2, responses_per_prompt=4,
        eval_responses_per_prompt=2, eval_prompts_per_batch=4,
    )  # fmt: skip
    settings = {"max_steps": 6, "val_check_interval": 3, "check_val_every_n_epoch": None, "limit_val_batches": 1.0}
    settings |= {"num_sanity_val_steps": 0, "log_every_n_steps": 1, "enable_checkpointing": True}
    logger = TensorBoardLogger(folder, name="", version="")
    callbacks = [StopOnSignal(), *callbacks, checkpoint, BoundaryEvaluation()]
    fit(module, datamodule, *callbacks, logger=logger, **settings | kwargs)
    return module.model.state_dict()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder)


@pytest.mark.parametrize(
    ("signum", "step", "in_evaluation"),
    [
        (signal.SIGUSR1, 1, False),
        (signal.SIGTERM, 1, False),
        # An evaluation is due after the update that the signal comes in.
        (signal.SIGUSR1, 2, False),
        (signal.SIGTERM, 3, True),
        (signal.SIGUSR1, 0, True),
    ],
)
def test_stopped_fit_continues_to_the_same_numbers(whole, tmp_path, signum, step, in_evaluation):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, Signal(signum, step, in_evaluation), checkpoint_every=1 if in_evaluation else 100)
    assert stop.value.code == 128 + signum
    model = run(tmp_path, ckpt_path="last")
    folder, want = whole
    for tag in TAGS:
        assert scalars(tmp_path, tag) == scalars(folder, tag), tag
    assert all(torch.equal(model[name], want[name]) for name in want)


@pytest.mark.parametrize("in_evaluation", [False, True])
def test_signal_after_the_last_update_lets_the_run_end(whole, tmp_path, in_evaluation):
    handlers = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)
    step = 6 if in_evaluation else 5
    run(tmp_path, Signal(signal.SIGUSR1, step, in_evaluation))
    assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)) == handlers
    assert scalars(tmp_path, "val/accuracy") == scalars(whole[0], "val/accuracy")


def test_stop_without_a_checkpoint_to_continue_from_is_refused():
    with pytest.raises(UserError, match="save_last: true"):
        fit(policy(), data(), StopOnSignal(), enable_checkpointing=True)
