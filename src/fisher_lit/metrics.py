"""Evaluation metrics over k sampled responses per problem."""

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors


class AvgAtK(Metric):
    """Mean response accuracy in percent, 100/(N·k) Σ_nj r_nj (arXiv 2609.36262, Appendix B.2), with its standard error.

    The standard error takes problems as the independent units: the k responses to one problem are correlated.
    """

    full_state_update = False
    total: Tensor
    total_of_squares: Tensor
    num_problems: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("total_of_squares", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_problems", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, rewards: Tensor) -> None:
        """Add the rewards [problems, k] of some problems."""
        means = rewards.double().mean(-1)
        self.total += means.sum()
        self.total_of_squares += means.square().sum()
        self.num_problems += len(means)

    def compute(self) -> Tensor:
        """Percent."""
        return 100 * self.total / self.num_problems

    def standard_error(self) -> Tensor:
        """Standard error in percentage points; NaN for a single problem."""
        with self.sync_context(dist_sync_fn=gather_all_tensors):
            n = self.num_problems
            variance = (self.total_of_squares - self.total.square() / n).clamp_min(0) / (n - 1)
            return 100 * (variance / n).sqrt()


class PassAtK(Metric):
    """Share of problems, in percent, with at least one correct response among the k."""

    full_state_update = False
    num_solved: Tensor
    num_problems: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("num_solved", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("num_problems", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, rewards: Tensor) -> None:
        """Add the rewards [problems, k] of some problems."""
        self.num_solved += (rewards > 0.5).any(-1).sum()
        self.num_problems += len(rewards)

    def compute(self) -> Tensor:
        """Percent."""
        return 100 * self.num_solved / self.num_problems
