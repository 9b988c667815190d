"""Evaluation of the model as it starts and as it ends."""

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class BoundaryEvaluation(Callback):
    """Evaluate before the first update and after the last one.

    The evaluations between them are the Trainer's: every `val_check_interval` steps, where `check_val_every_n_epoch` is
    null. A checkpoint is written between an update and its evaluation; a run that ended there and is continued from it
    makes that evaluation first.

    Args:
        at_start: evaluate at step 0, the score of the initial model.
        at_end: evaluate after the last update, unless the Trainer has just done so.
    """

    def __init__(self, at_start: bool = True, at_end: bool = True) -> None:
        self.at_start = at_start
        self.at_end = at_end
        self._evaluated_step = -1

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 0:
            if self.at_start:
                _evaluate(trainer)
        elif self._evaluated_step != trainer.global_step and _is_due(trainer):
            _evaluate(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluated_step = trainer.global_step

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.at_end and self._evaluated_step != trainer.global_step:
            _evaluate(trainer)

    @override
    def state_dict(self) -> dict[str, int]:
        return {"evaluated_step": self._evaluated_step}

    @override
    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._evaluated_step = state_dict["evaluated_step"]


def _is_due(trainer: Trainer) -> bool:
    """Whether the Trainer evaluates after the update that a checkpoint was written at."""
    interval = trainer.val_check_interval
    by_steps = trainer.check_val_every_n_epoch is None and isinstance(interval, int)
    return by_steps and trainer.global_step % interval == 0


def _evaluate(trainer: Trainer) -> None:
    """Run the validation loop inside a fit, as the Trainer does between two training batches."""
    results = trainer._logger_connector._first_loop_iter
    trainer.validating = True
    # From its first batch, also in a run that is continued.
    trainer.fit_loop.epoch_loop.val_loop.restarting = False
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.training = True
    trainer._logger_connector._first_loop_iter = results
