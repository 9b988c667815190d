"""A clean end when a cluster's scheduler asks for one."""

import signal
from types import FrameType

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from fisher_lit.errors import UserError


class StopOnSignal(Checkpoint):
    """On SIGUSR1 or SIGTERM finish the update, write the last checkpoint, and exit with status 128 + signal.

    `--ckpt_path last` then continues to the numbers of a run that was never stopped. During an evaluation the run exits
    at once: the evaluation is made again from the last checkpoint. After the last update signals wait until the run has
    ended. It suffices that one rank gets the signal.

    Raises:
        UserError: no `ModelCheckpoint` keeps a last checkpoint.
    """

    # A Checkpoint, because Lightning calls these last: what the other callbacks do at this step is done and saved.

    def __init__(self) -> None:
        self._received = 0
        self._previous: signal._HANDLER = signal.SIG_DFL

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not any(isinstance(c, ModelCheckpoint) and c.save_last for c in trainer.checkpoint_callbacks):
            raise UserError(
                "StopOnSignal: no checkpoint to continue from; add a ModelCheckpoint with `save_last: true`"
            )
        # Lightning leaves a handler that it finds here; its own would save in the middle of an update and requeue.
        self._previous = signal.signal(signal.SIGUSR1, self._receive)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning's handler starts a collective wherever each rank happens to be.
        signal.signal(signal.SIGTERM, self._receive)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs, batch, batch_idx) -> None:
        if self._must_stop(trainer):
            for checkpoint in trainer.checkpoint_callbacks:
                if isinstance(checkpoint, ModelCheckpoint):
                    checkpoint._save_last_checkpoint(trainer, {})
            self._stop(trainer)

    @override
    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs, batch, batch_idx, dataloader_idx=0
    ) -> None:
        if self._must_stop(trainer):
            self._stop(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):
            exception.code = 128 + (self._received or signal.SIGTERM)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            signal.signal(signal.SIGUSR1, self._previous)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self._received = signum

    def _must_stop(self, trainer: Trainer) -> bool:
        # Lightning does not enter a fit whose updates are all done: what follows the last one could not be made up.
        if trainer.received_sigterm or trainer.global_step >= trainer.max_steps >= 0:
            return False
        return trainer.strategy.reduce_boolean_decision(self._received > 0, all=False)

    def _stop(self, trainer: Trainer) -> None:
        """Let Lightning exit where it is done with the batch, its curves included."""
        trainer._signal_connector.received_sigterm = True
