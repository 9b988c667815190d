"""Why is the Fisher small on-policy?"""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor
from typing_extensions import override

from fisher_lit.callbacks.analysis import PAPER_QS, Analysis, chart
from fisher_lit.callbacks.measurements import Measurements
from fisher_lit.errors import UserError
from fisher_lit.fisher.token_fisher import token_fisher
from fisher_lit.rollout.exchange import gather_rollouts


class _Complement(Mapping[str, Tensor]):
    """The coordinates that are not in a set."""

    def __init__(self, masks: Mapping[str, Tensor]) -> None:
        self.masks = masks

    def __getitem__(self, name: str) -> Tensor:
        return ~self.masks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.masks)

    def __len__(self) -> int:
        return len(self.masks)


class TokenFisherProbe(Analysis):
    """Token Fisher for next-token pairs from the model against uniform pairs (equations 9 and 11, Table 7).

    The prefixes come from the first response to each of the first `num_prompts` gradient prompts. Groups are all
    coordinates and the current policy's low-Fisher ones, all but the top q percent. Curves: `token_fisher/real/…`,
    `token_fisher/uniform/…` and `token_fisher/ratio/…` for each group; the reference of the ratio is 1.

    Args:
        steps: optimizer steps to measure at; null is 0, 250, 500, 750, 1000.
        every_n_steps: in its place, measure every n steps, 0 included.
        qs: the low-Fisher groups leave out the top q percent.
        num_prompts: prompts, at most as many as `analysis.gradient_prompts` of the data.
        num_positions: positions per response.
        num_pairs: token pairs per position and condition.
        seed: seed of positions and pairs.
    """

    def __init__(
        self,
        steps: list[int] | None = None,
        every_n_steps: int | None = None,
        qs: Sequence[float] = PAPER_QS,
        num_prompts: int = 200,
        num_positions: int = 8,
        num_pairs: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__("token_fisher", steps, every_n_steps, sorted(qs))
        for name, value in (("num_prompts", num_prompts), ("num_positions", num_positions), ("num_pairs", num_pairs)):
            if value < 1:
                raise UserError(f"TokenFisherProbe: `{name}` must be at least 1, got {value}")
        self.num_prompts = num_prompts
        self.num_positions = num_positions
        self.num_pairs = num_pairs
        self.seed = seed

    @override
    def measure(self, measurements: Measurements) -> dict[str, float]:
        batch = measurements.gradient_rollouts()
        firsts = [r for r in gather_rollouts(batch) if r.sample == 0]
        if len(firsts) < self.num_prompts:
            raise UserError(
                f"TokenFisherProbe: `num_prompts` is {self.num_prompts}, but the data's `analysis.gradient_prompts` is "
                f"{len(firsts)}; lower the first or raise the second"
            )
        low = [_Complement(high) for high in measurements.fisher_sets(self.qs)]
        with (
            measurements.progress("token Fisher", self.num_prompts) as advance,
            measurements.trainer.precision_plugin.forward_context(),
        ):
            result = token_fisher(
                measurements.module.model,  # type: ignore[arg-type]
                firsts[: self.num_prompts],
                seed=self.seed,
                masks=low,
                num_positions=self.num_positions,
                num_pairs=self.num_pairs,
                progress=advance,
            )
        values: dict[str, float] = {}
        groups = ["all", *(f"low={_percent_left(q)}" for q in self.qs)]
        for i, group in enumerate(groups):
            real, uniform = result.real[:, i], result.uniform[:, i]
            values |= {f"real/{group}": float(real.mean()), f"uniform/{group}": float(uniform.mean())}
            values |= {f"ratio/{group}": float(real.mean() / uniform.mean())}
            values |= {
                f"real_stderr/{group}": _standard_error(real),
                f"uniform_stderr/{group}": _standard_error(uniform),
            }
        return values

    @override
    def settings(self, measurements: Measurements) -> dict:
        own = {k: getattr(self, k) for k in ("num_prompts", "num_positions", "num_pairs", "seed")}
        return super().settings(measurements) | own

    def scalar_layout(self) -> dict:
        """Charts for TensorBoard's custom-scalars page."""
        charts = chart("real / uniform", "token_fisher/ratio/.*")
        charts |= chart("all coordinates", "token_fisher/real/all", "token_fisher/uniform/all")
        return {"Token Fisher": charts}


def _percent_left(q: float) -> str:
    """What is left when the top q percent are taken out, as the paper writes it: 0.05 gives 99.95."""
    return f"{round(100 - q, 6):g}"


def _standard_error(means: Tensor) -> float:
    return float(means.std() / len(means) ** 0.5)
