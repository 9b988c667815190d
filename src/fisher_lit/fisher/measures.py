"""Measures on sets of coordinates and on Fisher values, each beside what uniformly random sets would give.

A set is a mapping from parameter names to bool masks, a vector one to fp32 tensors; both may hold a process's local
parts, then `all_reduce` sums over the processes. Mappings are read one parameter at a time. Shares and overlaps are in
percent. A measure that would divide by zero is NaN.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fisher_lit.errors import UserError
from fisher_lit.fisher.keys import CHUNK
from fisher_lit.fisher.layout import Place, where
from fisher_lit.fisher.selection import AllReduce


class Score(NamedTuple):
    """A measure and its analytic value for uniformly random sets, in the same unit."""

    value: float
    random: float


class Overlap(NamedTuple):
    """Sizes of two sets, of their intersection, and P."""

    first: int
    second: int
    both: int
    num_coordinates: int


class Retention(NamedTuple):
    """Retention of the initial low-Fisher and high-Fisher set, percent."""

    low: Score
    high: Score


class FisherSums(NamedTuple):
    """Float64 sums of a vector over a set (`inside`) and over everything, and the numbers of coordinates."""

    inside: float
    total: float
    num_inside: int
    num_total: int


class MagnitudeRatio(NamedTuple):
    """Average Fisher relative to the initial one, over the initial low-Fisher set and over all coordinates."""

    low: float
    all: float


class GroupSum(NamedTuple):
    """Sum over the coordinates of a group of parameters, and their number."""

    total: float
    num: int


def overlap(first: Mapping[str, Tensor], second: Mapping[str, Tensor], all_reduce: AllReduce | None = None) -> Overlap:
    """Count two sets and their intersection.

    Args:
        first: bool masks by parameter name.
        second: masks of the same names and shapes.
        all_reduce: sums counts over the processes.

    Raises:
        UserError: if names or shapes differ.
    """
    counts = []
    for a, b in _pairs(first, second):
        sizes = [a.count_nonzero(), b.count_nonzero(), (a & b).count_nonzero()]
        counts.append(torch.stack([*sizes, sizes[0].new_tensor(a.numel())]))
    return Overlap(*_reduced(torch.stack(counts).sum(0), all_reduce))


def recall(sets: Overlap) -> Score:
    """Gradient-support recall (equation 7 of arXiv 2609.36262), percent.

        Recall(q) = 100 |S_F(q) ∩ S_g(q)| / K_q,    random: 100 K_q / P

    Args:
        sets: overlap of the K_q coordinates with the largest Fisher and the K_q with the largest absolute gradient.

    Raises:
        UserError: if the two sets are of different size.
    """
    _require_equal_sizes(sets, "recall")
    return Score(100 * _ratio(sets.both, sets.first), 100 * _ratio(sets.first, sets.num_coordinates))


def retention(sets: Overlap) -> Retention:
    """How much of the initial low-Fisher and high-Fisher set is left (equation 12 of arXiv 2609.36262), percent.

        low = 100 |L_0 ∩ L_k| / (P − K),    high = 100 |H_0 ∩ H_k| / K,    random: 100 (P − K) / P and 100 K / P

    Args:
        sets: overlap of H_0 and H_k, the K coordinates with the largest Fisher at the start and at step k; L_0 and L_k
            are their complements.

    Raises:
        UserError: if the two sets are of different size.
    """
    _require_equal_sizes(sets, "retention")
    num_low = sets.num_coordinates - sets.first
    low_both = sets.num_coordinates - sets.first - sets.second + sets.both
    return Retention(
        low=Score(100 * _ratio(low_both, num_low), 100 * _ratio(num_low, sets.num_coordinates)),
        high=Score(100 * _ratio(sets.both, sets.first), 100 * _ratio(sets.first, sets.num_coordinates)),
    )


def jaccard(sets: Overlap) -> Score:
    """Jaccard index 100 |A ∩ B| / |A ∪ B|, percent.

    The random value is a ratio of expectations, E|A ∩ B| / E|A ∪ B|, with E|A ∩ B| = |A| |B| / P.
    """
    expected = _ratio(sets.first * sets.second, sets.num_coordinates)
    sizes = sets.first + sets.second
    return Score(100 * _ratio(sets.both, sizes - sets.both), 100 * _ratio(expected, sizes - expected))


def fisher_sums(
    values: Mapping[str, Tensor], masks: Mapping[str, Tensor], all_reduce: AllReduce | None = None
) -> FisherSums:
    """Float64 sums of `values` over the set `masks` and over all coordinates.

    Args:
        values: fp32 tensors by parameter name.
        masks: bool masks of the same names and shapes.
        all_reduce: sums float64 numbers over the processes.

    Raises:
        UserError: if names or shapes differ.
    """
    sums = []
    for value, mask in _pairs(values, masks):
        inside, total = _sum(value, mask), _sum(value)
        sums.append(torch.stack([inside, total, mask.count_nonzero(), total.new_tensor(mask.numel())]))
    inside_sum, total_sum, num_inside, num_total = _reduced(torch.stack(sums).sum(0), all_reduce)
    return FisherSums(inside_sum, total_sum, int(num_inside), int(num_total))


def fisher_share(sums: FisherSums) -> Score:
    """Share of the total Fisher held by a set, percent; random: 100 K / P."""
    return Score(100 * _ratio(sums.inside, sums.total), 100 * _ratio(sums.num_inside, sums.num_total))


def magnitude_ratio(now: FisherSums, initial: FisherSums) -> MagnitudeRatio:
    """M_k(q) / M_0(q), the average Fisher on the fixed initial low-Fisher set L_0(q) (equation 13 of arXiv 2609.36262).

        M_k(q) = 1/|L_0(q)| Σ_{i ∈ L_0(q)} F_{k,i}

    Args:
        now: sums of the Fisher at step k over H_0(q), the complement of L_0(q), and over all coordinates.
        initial: sums of the initial Fisher over the same set.

    Returns:
        The ratio on L_0(q), and the same ratio over all coordinates. Neither depends on the set in expectation, so
        there is no random value.
    """
    assert now.num_inside == initial.num_inside, "the set is fixed"
    assert now.num_total == initial.num_total, "the coordinates are fixed"
    return MagnitudeRatio(
        low=_ratio(now.total - now.inside, initial.total - initial.inside), all=_ratio(now.total, initial.total)
    )


def by_module(tensors: Mapping[str, Tensor], all_reduce: AllReduce | None = None) -> dict[Place, GroupSum]:
    """Sum of a vector, or size of a set, by layer and module type.

    Args:
        tensors: fp32 values or bool masks by parameter name; the same names on every process.
        all_reduce: sums float64 numbers over the processes.

    Returns:
        In the order in which the groups first appear.
    """
    rows: dict[Place, list[Tensor]] = defaultdict(list)
    for name, tensor in tensors.items():
        total = _sum(tensor)
        rows[where(name)].append(torch.stack([total, total.new_tensor(tensor.numel())]))
    groups = _reduced(torch.stack([torch.stack(group).sum(0) for group in rows.values()]), all_reduce)
    return {place: GroupSum(total, int(count)) for place, (total, count) in zip(rows, groups, strict=True)}


def density(groups: Mapping[Place, GroupSum]) -> dict[Place, Score]:
    """Percent of each group's coordinates that are in the set; random: 100 K / P.

    Args:
        groups: `by_module` of a set.
    """
    size, count = _totals(groups)
    return {place: Score(100 * _ratio(*group), 100 * _ratio(size, count)) for place, group in groups.items()}


def share(groups: Mapping[Place, GroupSum]) -> dict[Place, Score]:
    """Percent of the whole sum (or set) that lies in each group; random: the group's percentage of the coordinates.

    Args:
        groups: `by_module` of a vector or a set.
    """
    total, count = _totals(groups)
    return {
        place: Score(100 * _ratio(group.total, total), 100 * _ratio(group.num, count))
        for place, group in groups.items()
    }


def _pairs(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    if set(first) != set(second):
        name = min(set(first) ^ set(second))
        raise UserError(f"sets: parameter '{name}' is in one of the two only; compare sets of the same coordinates")
    for name in first:
        a, b = first[name], second[name]
        if a.shape != b.shape:
            raise UserError(f"sets: '{name}' has shape {list(a.shape)} in one and {list(b.shape)} in the other")
        yield a, b


def _sum(tensor: Tensor, mask: Tensor | None = None) -> Tensor:
    """Float64 sum of `tensor`, or of its elements in `mask`, without a float64 copy of it."""
    chunks = tensor.reshape(-1).split(CHUNK)
    if mask is None:
        sums = [chunk.sum(dtype=torch.float64) for chunk in chunks]
    else:
        members = mask.reshape(-1).split(CHUNK)
        sums = [(c * m).sum(dtype=torch.float64) for c, m in zip(chunks, members, strict=True)]
    return torch.stack(sums).sum()


def _reduced(sums: Tensor, all_reduce: AllReduce | None) -> list:
    if all_reduce:
        all_reduce(sums)
    return sums.tolist()


def _require_equal_sizes(sets: Overlap, measure: str) -> None:
    if sets.first != sets.second:
        raise UserError(f"{measure}: the sets hold {sets.first} and {sets.second} coordinates; select both with one q")


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _totals(groups: Mapping[Place, GroupSum]) -> tuple[float, int]:
    return math.fsum(g.total for g in groups.values()), sum(g.num for g in groups.values())
