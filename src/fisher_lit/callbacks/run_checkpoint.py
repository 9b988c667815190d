"""The checkpoint that a run continues from."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from fisher_lit.errors import UserError


class RunCheckpoint(ModelCheckpoint):
    """Keeps `<log_dir>/checkpoints/last.ckpt`, replaced as a whole, for `--ckpt_path last`.

    After the last update it is written when everything else is done, the final evaluation included: Lightning does not
    enter a fit whose updates are all done, so what a kill cut off after such a checkpoint would be missing for good.

    Args:
        every_n_steps: optimizer steps from one checkpoint to the next.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        if every_n_steps < 1:
            raise UserError(f"RunCheckpoint: `every_n_steps` must be at least 1, got {every_n_steps}")
        super().__init__(every_n_train_steps=every_n_steps, save_top_k=0, save_last=True)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs, batch, batch_idx: int) -> None:
        if not _is_last_update(trainer):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning calls checkpoint callbacks after the others.
        self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))


def _is_last_update(trainer: Trainer) -> bool:
    if trainer.global_step >= trainer.max_steps >= 0:
        return True
    last_epoch = trainer.max_epochs is not None and trainer.current_epoch + 1 >= trainer.max_epochs >= 0
    return last_epoch and trainer.is_last_batch
