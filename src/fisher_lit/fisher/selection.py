"""Exact selection of the K largest of P values, without a sort, a gather or an array of P indices.

A radix select counts the keys' high halves, then the low halves inside the bin that holds the K-th largest key. If that
key occurs more often than there is room for, further sweeps find the coordinate below which it is taken. For small K, a
sample says where the largest keys begin, so that few need counting; it cannot change the result. Only counts leave a
process, so `all_reduce` is all that sharding needs.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from itertools import chain

import torch
from torch import Tensor

from fisher_lit.errors import UserError
from fisher_lit.fisher.coordinates import Coordinates, Part, require_shapes
from fisher_lit.fisher.keys import Keys, ValueKeys

# Sums a tensor of counts or sums over the processes, in place.
AllReduce = Callable[[Tensor], None]
# Starts a sweep over all keys of this process.
Sweep = Callable[[], Iterable[Tensor]]

LOW_BITS = 16
LOW_BINS = 2**LOW_BITS
HIGH_BINS = 2 ** (31 - LOW_BITS)
# One key in so many is sampled. A prime, so that the sample does not follow the columns of a matrix.
SAMPLE_STRIDE = 509
# The largest share of the keys that may be copied to be counted apart from the others.
MAX_KEPT = 1 / 32


def budget(q: float | str | Decimal, num_coordinates: int) -> int:
    """K_q = ⌊q·P/100⌋, with `q` read as the decimal number it is written as (equation 7 of arXiv 2609.36262).

    Args:
        q: percent of the coordinates, in (0, 100].
        num_coordinates: P.

    Raises:
        UserError: if `q` is not a number in (0, 100], or K_q is 0.
    """
    try:
        exact = Fraction(str(q))
    except (ValueError, ZeroDivisionError):
        exact = Fraction(-1)
    if not 0 < exact <= 100:
        raise UserError(f"q={q}: not a percentage in (0, 100]")
    size = exact * num_coordinates // 100
    if size == 0:
        raise UserError(f"q={q}: selects none of P={num_coordinates} coordinates; use at least 100/P")
    return size


@dataclass(frozen=True)
class TopK:
    """The K coordinates with the largest keys; of equal keys, those with the lower coordinate.

    Attributes:
        size: K.
        threshold: the smallest key in the set, in [0, 2^31).
        cutoff: coordinates with the key `threshold` are in the set if they lie below this one.
    """

    size: int
    threshold: int
    cutoff: int

    def contains(self, keys: Tensor, start: int) -> Tensor:
        """Membership (bool) of the consecutive coordinates from `start` on, given their keys (int32, [n])."""
        ties = min(max(self.cutoff - start, 0), len(keys))
        return torch.cat([keys[:ties] >= self.threshold, keys[ties:] > self.threshold])


class Masks(Mapping[str, Tensor]):
    """Parameter name → bool mask of the local part, computed on access and not kept.

    The masks follow their source: if it is made of values, keep those as they are while the masks are in use, or pack
    the masks (`fisher_lit.fisher.vectors.PackedMasks`).

    Args:
        source: the keys that `top` was selected from.
        top: the selection.
    """

    def __init__(self, source: Keys, top: TopK) -> None:
        self.source = source
        self.top = top

    def __getitem__(self, name: str) -> Tensor:
        part = self.source.parts[name]
        mask = torch.empty(part.shape, dtype=torch.bool, device=self.source.device)
        flat = mask.view(-1)
        for start, keys in self.source.chunks(name):
            flat[start - part.start :][: len(keys)] = self.top.contains(keys, start)
        return mask

    def __iter__(self) -> Iterator[str]:
        return iter(self.source.parts)

    def __len__(self) -> int:
        return len(self.source.parts)


def top_masks(
    values: Mapping[str, Tensor],
    sizes: Sequence[int],
    coordinates: Coordinates,
    *,
    parts: Mapping[str, Part] | None = None,
    all_reduce: AllReduce | None = None,
) -> list[Masks]:
    """The sets of the K globally largest values, for several K at once. Ties go to the lower coordinate.

    Args:
        values: fp32 values >= 0 by parameter name, all on one device; the local part of each.
        sizes: every K, in [1, P]; see `budget`.
        coordinates: the order, and P.
        parts: what this process holds of each parameter; None means all of it.
        all_reduce: sums counts over the processes; needed where a process holds only a part.

    Returns:
        One `Masks` for each of `sizes`. They refer to `values`.

    Raises:
        UserError: if a value is negative, infinite or NaN, or names, shapes, dtypes or sizes do not fit.
    """
    coordinates.require_tensors(values, "values")
    parts = coordinates.parts if parts is None else parts
    require_shapes(values, parts, "values")
    for name, tensor in values.items():
        if tensor.dtype != torch.float32:
            raise UserError(f"values: '{name}' is {tensor.dtype}; convert it to torch.float32")
    source = ValueKeys(parts, values[coordinates.names[0]].device, values)
    return [Masks(source, top) for top in select_largest(source, sizes, coordinates.num_coordinates, all_reduce)]


@torch.no_grad()
def select_largest(
    source: Keys, sizes: Sequence[int], num_coordinates: int, all_reduce: AllReduce | None = None
) -> list[TopK]:
    """The K largest keys for every K of `sizes`, in one or two sweeps over the keys; a few more where ties are split.

    Args:
        source: keys of this process.
        sizes: every K, in [1, P].
        num_coordinates: P over all processes.
        all_reduce: sums counts over the processes.

    Raises:
        UserError: if a size is not in [1, P], or the processes together hold another number of keys than P.
    """
    for size in sizes:
        if not 1 <= size <= num_coordinates:
            raise UserError(f"size={size}: not in [1, P={num_coordinates}]")
    reduce = all_reduce or (lambda counts: None)
    reduce(held := torch.tensor([source.num_coordinates], device=source.device))
    if held != num_coordinates:
        raise UserError(
            f"parts: the processes hold {int(held)} of P={num_coordinates} coordinates; check `parts` and `all_reduce`"
        )
    sweep = _sweep_largest(source, max(sizes), num_coordinates, reduce)
    tops: list[TopK] = []
    split = []
    for size, (threshold, rank, ties) in zip(sizes, _find_thresholds(sweep, sizes, source.device, reduce), strict=True):
        if rank < ties:
            split.append((len(tops), threshold, rank))
        tops.append(TopK(size, threshold, num_coordinates))
    for i, cutoff in _find_cutoffs(source, split, num_coordinates, reduce):
        tops[i] = replace(tops[i], cutoff=cutoff)
    return tops


def _sweep_largest(source: Keys, size: int, num_coordinates: int, reduce: AllReduce) -> Sweep:
    """Sweep over copies of the `size` or more largest keys; over all keys where copies would be too many."""
    sample = torch.zeros(HIGH_BINS, dtype=torch.int64, device=source.device)
    for name in source.parts:
        sample += torch.bincount(source.sample(name, SAMPLE_STRIDE) >> LOW_BITS, minlength=HIGH_BINS)
    reduce(sample)
    expected = size / SAMPLE_STRIDE
    # Four standard deviations more, so that the floor is hardly ever too high.
    enough = math.ceil(expected + 4 * math.sqrt(expected)) + 64
    if enough > int(sample.sum()):
        return source.all_keys
    floor_bin, _ = _locate_from_top(sample, enough)
    if SAMPLE_STRIDE * int(sample[floor_bin:].sum()) > num_coordinates * MAX_KEPT:
        return source.all_keys
    floor = floor_bin << LOW_BITS
    kept = [keys[_nonzero(keys >= floor)] for keys in source.all_keys()]
    reduce(num_kept := torch.tensor([sum(map(len, kept))], device=source.device))
    return (lambda: kept) if num_kept >= size else source.all_keys


def _find_thresholds(
    sweep: Sweep, sizes: Sequence[int], device: torch.device, reduce: AllReduce
) -> list[tuple[int, int, int]]:
    """For each K: the K-th largest key, how many keys equal to it are among the K, and how many there are."""
    reduce(high := _count_high(sweep, device))
    found = [_locate_from_top(high, size) for size in sizes]
    bins = sorted({high_bin for high_bin, _ in found})
    reduce(low := _count_low(sweep, bins, device))
    thresholds = []
    for high_bin, rank in found:
        counts = low[bins.index(high_bin)]
        low_bin, rank = _locate_from_top(counts, rank)
        thresholds.append((high_bin << LOW_BITS | low_bin, rank, int(counts[low_bin])))
    return thresholds


def _count_high(sweep: Sweep, device: torch.device) -> Tensor:
    """[HIGH_BINS] int64: how many keys have each high half."""
    counts = torch.zeros(HIGH_BINS, dtype=torch.int64, device=device)
    for keys in sweep():
        counts += torch.bincount(keys >> LOW_BITS, minlength=HIGH_BINS)
    return counts


def _count_low(sweep: Sweep, bins: Sequence[int], device: torch.device) -> Tensor:
    """[len(bins), LOW_BINS] int64: how many keys with the high half `bins[i]` have each low half."""
    assert len(bins) < 256, "rows are looked up as uint8"
    # Row number + 1 of each high half; 0 for the others.
    row_of = torch.zeros(HIGH_BINS, dtype=torch.uint8, device=device)
    row_of[torch.tensor(bins)] = torch.arange(1, len(bins) + 1, dtype=torch.uint8, device=device)
    counts = torch.zeros(len(bins), LOW_BINS, dtype=torch.int64, device=device)
    for keys in sweep():
        rows = row_of.index_select(0, keys >> LOW_BITS)
        hits = _nonzero(rows)
        cells = (rows[hits].long() - 1) * LOW_BINS + (keys[hits] & (LOW_BINS - 1))
        counts.view(-1).scatter_add_(0, cells, torch.ones_like(cells))
    return counts


def _find_cutoffs(
    source: Keys, split: Sequence[tuple[int, int, int]], num_coordinates: int, reduce: AllReduce
) -> Iterator[tuple[int, int]]:
    """For each (i, key, rank): i, and one more than the coordinate of the rank-th key equal to `key`."""
    # The coordinate is known to lie in [low, low + width); each sweep divides the width by LOW_BINS.
    width = num_coordinates
    lows, ranks = [0] * len(split), [rank for _, _, rank in split]
    while split and width > 1:
        step = -(-width // LOW_BINS)
        counts = torch.zeros(len(split), LOW_BINS, dtype=torch.int64, device=source.device)
        for row, (low, (_, threshold, _)) in enumerate(zip(lows, split, strict=True)):
            for start, keys in chain.from_iterable(source.chunks(name, low, low + width) for name in source.parts):
                bins = (_nonzero(keys == threshold) + (start - low)) // step
                counts[row].scatter_add_(0, bins, torch.ones_like(bins))
        reduce(counts)
        for row in range(len(split)):
            chosen, ranks[row] = _locate(counts[row], ranks[row])
            lows[row] += chosen * step
        width = step
    return ((i, low + 1) for (i, _, _), low in zip(split, lows, strict=True))


def _locate(counts: Tensor, rank: int) -> tuple[int, int]:
    """The first bin where the running count reaches `rank`, and the rank within that bin (both ranks from 1)."""
    counts = counts.cpu()
    running = counts.cumsum(0)
    index = int(torch.searchsorted(running, rank))
    return index, rank - int(running[index] - counts[index])


def _locate_from_top(counts: Tensor, rank: int) -> tuple[int, int]:
    index, rank = _locate(counts.flip(0), rank)
    return len(counts) - 1 - index, rank


def _nonzero(flags: Tensor) -> Tensor:
    """Indices of the non-zero elements of a fresh bool or uint8 vector; fast where they are rare."""
    whole = len(flags) // 8 * 8
    # Eight flags are read as one word.
    words = flags[:whole].view(torch.int64).nonzero()
    if len(words) > whole // 32:
        return flags.nonzero()[:, 0]
    lanes = torch.arange(8, device=flags.device)
    near = torch.cat([(words * 8 + lanes).view(-1), torch.arange(whole, len(flags), device=flags.device)])
    return near[flags[near] != 0]
