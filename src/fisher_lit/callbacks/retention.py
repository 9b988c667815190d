"""Does the initial Fisher pattern persist?"""

from collections.abc import Sequence

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from fisher_lit.callbacks.analysis import PAPER_QS, Analysis, chart
from fisher_lit.callbacks.measurements import Measurements
from fisher_lit.fisher.measures import FisherSums, fisher_sums, magnitude_ratio, overlap, retention
from fisher_lit.fisher.vectors import PackedMasks
from fisher_lit.sharding import all_reduce


class Retention(Analysis):
    """How much of the initial high- and low-Fisher sets is left (equation 12), and the low set's Fisher (equation 13).

    Curves: `retention/high/q=…` and `retention/low/q=…`, percent, beside their random values;
    `retention/magnitude/q=…` and `retention/magnitude/all`, M_k / M_0.

    Args:
        steps: optimizer steps to measure at; null is 0, 250, 500, 750, 1000.
        every_n_steps: in its place, measure every n steps, 0 included.
        qs: selection percentages.
        initial_fisher: file with the initial Fisher of another run of the same model; null measures it at step 0.
    """

    def __init__(
        self,
        steps: list[int] | None = None,
        every_n_steps: int | None = None,
        qs: Sequence[float] = PAPER_QS,
        initial_fisher: str | None = None,
    ) -> None:
        super().__init__("retention", steps, every_n_steps, qs)
        self.initial_fisher = initial_fisher
        self._initial: list[tuple[PackedMasks, FisherSums]] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        measurements = Measurements.of(trainer, pl_module)
        fisher = measurements.initial_fisher(self.initial_fisher)
        if self.initial_fisher is None and trainer.global_step == 0:
            # A resumed run needs it again.
            measurements.save_fisher()
        sets = measurements.top(fisher, self.qs)
        self._initial = [(PackedMasks.pack(high), fisher_sums(fisher, high, all_reduce)) for high in sets]
        super().on_train_start(trainer, pl_module)

    @override
    def measure(self, measurements: Measurements) -> dict[str, float]:
        values: dict[str, float] = {}
        fisher = measurements.fisher().mean()
        sets = zip(self.qs, measurements.fisher_sets(self.qs), self._initial, strict=True)
        for q, high, (initial_high, initial_sums) in sets:
            kept = retention(overlap(initial_high, high, all_reduce))
            ratio = magnitude_ratio(fisher_sums(fisher, initial_high, all_reduce), initial_sums)
            for side, score in (("high", kept.high), ("low", kept.low)):
                values |= {f"{side}/q={q:g}": score.value, f"{side}/q={q:g}/random": score.random}
            values |= {f"magnitude/q={q:g}": ratio.low, "magnitude/all": ratio.all}
        return values

    def scalar_layout(self) -> dict:
        """Charts for TensorBoard's custom-scalars page."""
        charts: dict[str, list] = {}
        for q in self.qs:
            for side in ("high", "low"):
                tag = f"retention/{side}/q={q:g}"
                charts |= chart(f"{side}-Fisher set at q={q:g}% (%)", tag, f"{tag}/random")
        return {"Retention": charts | chart("M_k / M_0", "retention/magnitude/.*")}
