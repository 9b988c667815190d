"""Does the Fisher bound hold, and how tight is it?"""

import logging

import torch
from typing_extensions import override

from fisher_lit.callbacks.analysis import Analysis, chart
from fisher_lit.callbacks.measurements import Measurements
from fisher_lit.fisher.bound import check_bound
from fisher_lit.fisher.layout import where
from fisher_lit.sharding import all_reduce, gather_lists

log = logging.getLogger(__name__)
# Scores computed in bfloat16 differ between two passes by more than float32 rounding.
BF16_TOLERANCE = 1e-2


class FisherBound(Analysis):
    """Check |g_i| ≤ √E[a²] · √F_i (Proposition 1, equation 4) with the objective's own effective signal a (Table 2).

    Gradient, Fisher and signal are means over the same gradient responses, so the inequality holds for every coordinate
    up to rounding; a violation is a bug and is warned about. Curves: `bound/violations`, `bound/signal_scale` (√E[a²]),
    `bound/tightness/mean`, `…/median` and `…/p99` of |g_i| / bound_i, and `bound/max/<module type>`.

    Args:
        steps: optimizer steps to measure at; null is 0, 250, 500, 750, 1000.
        every_n_steps: in its place, measure every n steps, 0 included.
    """

    def __init__(self, steps: list[int] | None = None, every_n_steps: int | None = None) -> None:
        super().__init__("bound", steps, every_n_steps)

    @override
    def measure(self, measurements: Measurements) -> dict[str, float]:
        batch = measurements.objective_batch()
        signal = measurements.module.effective_signal(batch)  # type: ignore[operator]
        signals = torch.tensor([a for part in gather_lists(list(signal)) for a in part], dtype=torch.float64)
        squared_scale = float(signals.square().mean())
        values = {"signal_scale": squared_scale**0.5}
        if squared_scale == 0:
            # Every response of every group has the same reward: both sides are 0.
            return values
        fisher = measurements.score(measurements.fisher_estimator(batch), batch.rollouts, "Fisher of the bound")
        tolerance = BF16_TOLERANCE if measurements.trainer.precision == "bf16-mixed" else None
        check = check_bound(
            measurements.weighted_scores(batch, signal),
            fisher.mean(),
            squared_scale,
            tolerance=tolerance,
            all_reduce=all_reduce,
        )
        if check.num_violations:
            log.warning(
                "step %d: %d of %d coordinates violate the Fisher bound; one of the estimators is wrong",
                measurements.trainer.global_step,
                check.num_violations,
                check.num_coordinates,
            )
        values |= {"violations": float(check.num_violations), "tightness/mean": check.mean_tightness}
        values |= {"tightness/median": check.tightness_quantile(0.5), "tightness/p99": check.tightness_quantile(0.99)}
        for name, ratio in check.max_ratio.items():
            tag = f"max/{where(name).module}"
            values[tag] = max(ratio, values.get(tag, 0.0))
        return values

    def scalar_layout(self) -> dict:
        """Charts for TensorBoard's custom-scalars page."""
        charts = chart("violations", "bound/violations") | chart("|g| / bound", "bound/tightness/.*")
        return {"Fisher bound": charts | chart("largest |g| / bound", "bound/max/.*")}
