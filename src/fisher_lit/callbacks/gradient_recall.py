"""Does the Fisher say where the gradient is?"""

from collections.abc import Sequence

from typing_extensions import override

from fisher_lit.callbacks.analysis import PAPER_QS, Analysis, chart
from fisher_lit.callbacks.measurements import Measurements
from fisher_lit.fisher.measures import jaccard, overlap, recall
from fisher_lit.sharding import all_reduce


class GradientRecall(Analysis):
    """Gradient-support recall (equation 7): how many of the largest-gradient coordinates have the largest Fisher.

    The gradient is that of the module's own objective, estimated on prompts of its own (equation 6). Curves:
    `recall/q=…` and `recall/jaccard/q=…`, percent, beside their random values.

    Args:
        steps: optimizer steps to measure at; null is 0, 250, 500, 750, 1000.
        every_n_steps: in its place, measure every n steps, 0 included.
        qs: selection percentages.
        save: write the gradient to `<log_dir>/analyses/gradient_step_<n>.safetensors`.
    """

    def __init__(
        self,
        steps: list[int] | None = None,
        every_n_steps: int | None = None,
        qs: Sequence[float] = PAPER_QS,
        save: bool = False,
    ) -> None:
        super().__init__("recall", steps, every_n_steps, qs)
        self.save = save

    @override
    def measure(self, measurements: Measurements) -> dict[str, float]:
        values: dict[str, float] = {}
        sets = zip(self.qs, measurements.fisher_sets(self.qs), measurements.gradient_sets(self.qs), strict=True)
        for q, high_fisher, large_gradient in sets:
            both = overlap(high_fisher, large_gradient, all_reduce)
            for tag, score in ((f"q={q:g}", recall(both)), (f"jaccard/q={q:g}", jaccard(both))):
                values |= {tag: score.value, f"{tag}/random": score.random}
        if self.save:
            step = measurements.trainer.global_step
            path = measurements.directory / f"gradient_step_{step:06d}.safetensors"
            metadata = {"source": "GradientRecall", "step": str(step)}
            measurements.save(path, measurements.gradient(), metadata)
        return values

    def scalar_layout(self) -> dict:
        """Charts for TensorBoard's custom-scalars page."""
        charts: dict[str, list] = {}
        for q in self.qs:
            charts |= chart(f"recall at q={q:g}% (%)", f"recall/q={q:g}", f"recall/q={q:g}/random")
        return {"Gradient-support recall": charts}
