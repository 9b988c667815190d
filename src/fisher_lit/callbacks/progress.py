"""A progress bar that counts optimizer updates."""

from lightning.pytorch.callbacks import TQDMProgressBar
from typing_extensions import override


class UpdateProgressBar(TQDMProgressBar):
    """Lightning's bar with the number of updates that are left by `max_steps`, not only by the epoch's length."""

    @property
    @override
    def total_train_batches(self) -> int | float:
        per_epoch = super().total_train_batches
        if self.trainer.max_steps < 0:
            return per_epoch
        return min(per_epoch, self.trainer.max_steps - self.trainer.current_epoch * per_epoch)
