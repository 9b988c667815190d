"""How the diagonal Fisher is spread over the model."""

from collections.abc import Sequence

import torch
from typing_extensions import override

from fisher_lit.callbacks.analysis import PAPER_QS, Analysis, chart
from fisher_lit.callbacks.heat_map import log_heat_map
from fisher_lit.callbacks.measurements import Measurements
from fisher_lit.fisher.measures import by_module, density, fisher_share, fisher_sums, share
from fisher_lit.sharding import all_reduce, gather_lists


class FisherEstimation(Analysis):
    """Estimate the diagonal model Fisher (equation 6) and show where it lies.

    Curves: `fisher/share/q=…`, the percentage of the total Fisher that the top q percent hold, beside its random value;
    `fisher/trace`, the sum over all coordinates, with its standard error. Pictures: share of the Fisher and density of
    the top q, layers × module types.

    Args:
        steps: optimizer steps to measure at; null is 0, 250, 500, 750, 1000.
        every_n_steps: in its place, measure every n steps, 0 included.
        qs: selection percentages.
        save: write the Fisher to `<log_dir>/analyses/fisher_step_<n>.safetensors`.
    """

    def __init__(
        self,
        steps: list[int] | None = None,
        every_n_steps: int | None = None,
        qs: Sequence[float] = PAPER_QS,
        save: bool = True,
    ) -> None:
        super().__init__("fisher", steps, every_n_steps, qs)
        self.save = save

    @override
    def measure(self, measurements: Measurements) -> dict[str, float]:
        estimator = measurements.fisher()
        fisher = estimator.mean()
        parts = gather_lists(estimator.squared_norms().tolist())
        norms = torch.tensor([norm for part in parts for norm in part], dtype=torch.float64)
        values = {"trace": float(norms.mean()), "trace_stderr": float(norms.std() / len(norms) ** 0.5)}
        log_heat_map(measurements, "fisher_share", "Share of the Fisher (%)", share(by_module(fisher, all_reduce)))
        for q, top in zip(self.qs, measurements.fisher_sets(self.qs), strict=True):
            score = fisher_share(fisher_sums(fisher, top, all_reduce))
            values |= {f"share/q={q:g}": score.value, f"share/q={q:g}/random": score.random}
            title = f"Density of the {q:g}% with the largest Fisher (%)"
            log_heat_map(measurements, f"fisher_top_{q:g}", title, density(by_module(top, all_reduce)))
        if self.save:
            measurements.save_fisher()
        return values

    def scalar_layout(self) -> dict:
        """Charts for TensorBoard's custom-scalars page."""
        charts = chart("trace", "fisher/trace")
        for q in self.qs:
            charts |= chart(f"share of the top {q:g}% (%)", f"fisher/share/q={q:g}", f"fisher/share/q={q:g}/random")
        return {"Fisher": charts}
