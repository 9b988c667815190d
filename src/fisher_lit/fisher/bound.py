"""The common Fisher bound on expected gradients, checked on samples (arXiv 2609.36262, Proposition 1 and Table 2).

Every objective's expected gradient is g_i = E[a h_i], with the score h and an effective signal a(x, y), so

    |g_i| ≤ √E[a²] · √F_i.

With g, E[a²] and F taken as means over the same samples the inequality holds for the samples themselves.

The signals of Table 2, from log-probabilities in nats:

    on-policy RL            r − r̄         `objectives.group_advantages` of the rewards
    SFT                     w_ν − 1        `demonstration_signal`
    PG-style distillation   R_T − R̄_T     `objectives.group_advantages` of `teacher_return`
    full-vocabulary dist.   A_T            `full_vocabulary_signal`

Shapes: N = response tokens, M = responses.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fisher_lit.errors import UserError
from fisher_lit.fisher.batched_scores import block_elements

NUM_BINS = 1000
# Combines a tensor over the processes, in place.
Reduce = Callable[[Tensor, dist.ReduceOp.RedOpType], None]


def sum_by_response(terms_N: Tensor, row_N: Tensor, num_responses: int) -> Tensor:
    """Sum token terms within each response, [M].

    Args:
        terms_N: a number per token.
        row_N: the response that each token belongs to.
        num_responses: M.
    """
    return terms_N.new_zeros(num_responses).index_add(0, row_N, terms_N)


def demonstration_signal(logprobs_M: Tensor, demonstration_logprobs_M: Tensor) -> Tensor:
    """Effective signal of SFT for responses drawn from the policy: a = ν(y|x)/π_θ(y|x) − 1.

    Args:
        logprobs_M: log π_θ(y|x) of whole responses.
        demonstration_logprobs_M: log ν(y|x) of the same responses under the demonstrations' distribution.
    """
    return torch.expm1(demonstration_logprobs_M - logprobs_M)


def teacher_return(logprobs_N: Tensor, teacher_logprobs_N: Tensor, row_N: Tensor, num_responses: int) -> Tensor:
    """Sequence signal of PG-style distillation, before its baseline: R_T = Σ_t log[π_T(y_t|s_t)/p_θ(y_t|s_t)].

    Args:
        logprobs_N: log p_θ of the response tokens.
        teacher_logprobs_N: the teacher's.
        row_N: the response that each token belongs to.
        num_responses: M.

    Returns:
        [M].
    """
    return sum_by_response(teacher_logprobs_N - logprobs_N, row_N, num_responses)


def full_vocabulary_signal(logprobs_N: Tensor, teacher_logprobs_N: Tensor, row_N: Tensor, num_responses: int) -> Tensor:
    """Effective signal of full-vocabulary distillation: A_T = Σ_t (π_T(y_t|s_t)/p_θ(y_t|s_t) − 1).

    Args:
        logprobs_N: log p_θ of the response tokens.
        teacher_logprobs_N: the teacher's.
        row_N: the response that each token belongs to.
        num_responses: M.

    Returns:
        [M].
    """
    return sum_by_response(torch.expm1(teacher_logprobs_N - logprobs_N), row_N, num_responses)


@dataclass(frozen=True)
class BoundCheck:
    """How a gradient compares with its Fisher bound.

    Attributes:
        max_ratio: for each parameter the largest |g_i| / (bound_i + tolerance · largest bound of the parameter).
        num_violations: coordinates where that ratio is above 1; any is a bug in one of the estimators.
        num_coordinates: coordinates with a positive Fisher, which the rest describes.
        mean_tightness: mean of |g_i| / bound_i.
        tightness_counts: [1000] int64, coordinates with |g_i| / bound_i in each of 1000 equal bins from 0 to 1.
    """

    max_ratio: dict[str, float]
    num_violations: int
    num_coordinates: int
    mean_tightness: float
    tightness_counts: Tensor

    def tightness_quantile(self, q: float) -> float:
        """|g_i| / bound_i at quantile q in [0, 1], rounded up to a multiple of 0.001."""
        cumulative = self.tightness_counts.cumsum(0)
        rank = max(1.0, q * float(cumulative[-1]))
        return (int((cumulative < rank).sum()) + 1) / NUM_BINS


def check_bound(
    gradient: Mapping[str, Tensor],
    fisher: Mapping[str, Tensor],
    squared_scale: float,
    *,
    tolerance: float | None = None,
    all_reduce: Reduce | None = None,
) -> BoundCheck:
    """Compare |g_i| with √E[a²] · √F_i (arXiv 2609.36262, eq. 4).

    Args:
        gradient: g = mean of a·h, by parameter name.
        fisher: F = mean of h² over the same samples.
        squared_scale: mean of a² over the same samples.
        tolerance: rounding error allowed in scores, relative to the largest bound of a parameter. None allows 1e-5, or
            1e-10 in float64; scores computed in bfloat16 need 1e-2.
        all_reduce: sums, or with the second argument MAX takes the largest, over processes that hold parts.

    Raises:
        UserError: if the names differ, the scale is not above 0, or there is no positive Fisher.
    """
    if gradient.keys() != fisher.keys():
        raise UserError("check_bound: gradient and Fisher are of different parameters")
    if not squared_scale > 0:
        raise UserError(f"check_bound: the squared scale must be above 0, got {squared_scale}; is every signal 0?")
    reduce: Reduce = all_reduce or (lambda tensor, op: None)
    max_ratio: dict[str, float] = {}
    num_violations, num_coordinates, total = 0, 0, 0.0
    counts = torch.zeros(NUM_BINS, dtype=torch.int64)
    for name, values in fisher.items():
        allowed = tolerance if tolerance is not None else 1e-10 if values.dtype == torch.float64 else 1e-5
        largest = values.max() if values.numel() else values.new_zeros(())
        reduce(largest, dist.ReduceOp.MAX)
        slack = allowed * float(largest) ** 0.5 * squared_scale**0.5
        max_ratio[name] = 0.0
        block = block_elements(values.device)
        for f, g in zip(values.flatten().split(block), gradient[name].flatten().split(block), strict=True):
            size = g.abs()
            # A square that underflowed counts as the smallest normal number.
            bound = (f + torch.finfo(f.dtype).tiny).sqrt() * squared_scale**0.5
            ratio = (size / (bound + slack)).nan_to_num(nan=torch.inf, posinf=torch.inf)
            max_ratio[name] = max(max_ratio[name], float(ratio.max()) if len(ratio) else 0.0)
            num_violations += int((ratio > 1).sum())
            tightness = (size / bound)[f > 0].nan_to_num_(nan=1).clamp_(max=1)
            num_coordinates += len(tightness)
            total += float(tightness.sum(dtype=torch.float64))
            bins = (tightness * NUM_BINS).long().clamp_(max=NUM_BINS - 1)
            counts += torch.bincount(bins, minlength=NUM_BINS).cpu()
    device = next(iter(fisher.values())).device
    ratios = torch.tensor(list(max_ratio.values()), dtype=torch.float64, device=device)
    sums = torch.tensor([num_violations, num_coordinates, total, *counts.tolist()], dtype=torch.float64, device=device)
    reduce(ratios, dist.ReduceOp.MAX)
    reduce(sums, dist.ReduceOp.SUM)
    max_ratio = dict(zip(max_ratio, ratios.tolist(), strict=True))
    num_violations, num_coordinates, total = int(sums[0]), int(sums[1]), float(sums[2])
    counts = sums[3:].long().cpu()
    if num_coordinates == 0:
        raise UserError("check_bound: every coordinate has a Fisher of 0")
    return BoundCheck(max_ratio, num_violations, num_coordinates, total / num_coordinates, counts)
