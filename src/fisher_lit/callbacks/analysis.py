"""What all analyses have in common: when they fire, and how they report."""

import json
import os
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from fisher_lit.callbacks.measurements import Measurements
from fisher_lit.callbacks.schedule import Schedule
from fisher_lit.errors import UserError
from fisher_lit.fisher.selection import budget

# Steps of the paper's RL suite (Table 5).
PAPER_STEPS = (0, 250, 500, 750, 1000)
# Selection percentages q (Table 5).
PAPER_QS = (0.05, 0.1, 0.5, 1.0, 5.0)


class Analysis(Callback):
    """Measures the current policy at configured steps and leaves training as it is.

    A measurement goes to the logger and, as one JSON line, to `<log_dir>/analyses/<name>.jsonl`. Lines are written
    whole; a measurement that a kill cut off is taken again when the run is resumed.

    Args:
        name: name of the file and first part of the tags.
        steps: optimizer steps to measure at; 0 is before the first update.
        every_n_steps: in place of `steps`, measure every n steps, 0 included.
        qs: selection percentages.
    """

    def __init__(
        self, name: str, steps: Sequence[int] | None, every_n_steps: int | None, qs: Sequence[float] = ()
    ) -> None:
        if steps is None and every_n_steps is None:
            steps = PAPER_STEPS
        self.name = name
        self.schedule = Schedule(type(self).__name__, steps, every_n_steps)
        self.qs = list(qs)
        for q in self.qs:
            # Refuses what is not a percentage; the model's size does not matter for that.
            budget(q, 10**9)

    @abstractmethod
    def measure(self, measurements: Measurements) -> dict[str, float]:
        """Take the measurement. Returns values by tag, without the analysis' name."""

    def settings(self, measurements: Measurements) -> dict:
        """What the JSON line says about how it was measured."""
        samples = measurements.data.analysis
        return {"qs": self.qs, "samples": vars(samples)}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.schedule.is_due(trainer.global_step) and not self._is_recorded(trainer, pl_module):
            self._run(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch, batch_idx: int) -> None:
        Measurements.of(trainer, pl_module).forget_step()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs, batch, batch_idx: int) -> None:
        if self.schedule.is_due(trainer.global_step):
            self._run(trainer, pl_module)

    def _run(self, trainer: Trainer, pl_module: LightningModule) -> None:
        measurements = Measurements.of(trainer, pl_module)
        values = self.measure(measurements)
        step = trainer.global_step
        if trainer.logger is not None:
            trainer.logger.log_metrics({f"{self.name}/{tag}": value for tag, value in values.items()}, step)
            trainer.logger.save()
        record: dict = {"step": step, "num_coordinates": measurements.coordinates.num_coordinates}
        record |= {"values": values, "settings": self.settings(measurements)}
        if trainer.is_global_zero:
            write_record(measurements.directory / f"{self.name}.jsonl", record)

    def _is_recorded(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        records = read_records(Measurements.of(trainer, pl_module).directory / f"{self.name}.jsonl")
        found = any(record["step"] == trainer.global_step for record in records)
        # A shared disk may show the file to some processes only.
        return trainer.strategy.broadcast(found)


def read_records(path: Path) -> list[dict]:
    """The lines of an analysis' file, oldest step first; empty if there is no file.

    Raises:
        UserError: if the file is damaged.
    """
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except json.JSONDecodeError as error:
        raise UserError(f"'{path}' line {error.lineno} is not JSON; delete the line or the file") from error


def write_record(path: Path, record: dict) -> None:
    """Put a record into an analysis' file in place of an earlier one of the same step. The file changes as a whole."""
    records = [r for r in read_records(path) if r["step"] != record["step"]] + [record]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    lines = [json.dumps(r) for r in sorted(records, key=lambda r: r["step"])]
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    temporary.replace(path)


def chart(title: str, *tags: str) -> dict:
    """One chart of TensorBoard's custom-scalars page: several tags together."""
    return {title: ["Multiline", list(tags)]}
