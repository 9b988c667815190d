"""Weights in Hugging Face form."""

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from fisher_lit.callbacks.schedule import Schedule
from fisher_lit.models import save_hf


class HFExport(Callback):
    """Write weights and tokenizer to `<log_dir>/hf/step_<n>`, loadable by `AutoModelForCausalLM.from_pretrained`.

    Args:
        steps: optimizer steps to export at.
        every_n_steps: in its place, export every n steps.
        at_end: export when training ends too.
    """

    def __init__(self, steps: list[int] | None = None, every_n_steps: int | None = None, at_end: bool = True) -> None:
        self.schedule = Schedule("HFExport", steps, every_n_steps)
        self.at_end = at_end

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 0 and self.schedule.is_due(0):
            self._export(trainer, pl_module)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs, batch, batch_idx) -> None:
        if self.schedule.is_due(trainer.global_step):
            self._export(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.at_end and not self.schedule.is_due(trainer.global_step):
            self._export(trainer, pl_module)

    def _export(self, trainer: Trainer, pl_module: LightningModule) -> None:
        directory = Path(trainer.log_dir or trainer.default_root_dir) / "hf" / f"step_{trainer.global_step:06d}"
        save_hf(pl_module.model, pl_module.tokenizer, directory)  # type: ignore[arg-type]
