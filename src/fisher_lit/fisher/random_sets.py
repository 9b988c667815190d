"""Uniformly random sets of coordinates that need no storage.

The key of a coordinate is a hash of (seed, coordinate), and a random set holds the K largest keys: of exact size,
nested over K (prefixes of one random permutation), and the same however the parameters are sharded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fisher_lit.errors import UserError
from fisher_lit.fisher.coordinates import Coordinates, Part
from fisher_lit.fisher.keys import Keys
from fisher_lit.fisher.selection import AllReduce, Masks, select_largest

# SplitMix64 (Steele, Lea and Flood 2014): increment of the counter, multipliers of the finaliser.
GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def random_masks(
    coordinates: Coordinates,
    sizes: Sequence[int],
    seed: int,
    *,
    parts: Mapping[str, Part] | None = None,
    device: torch.device | str = "cpu",
    all_reduce: AllReduce | None = None,
) -> list[Masks]:
    """Uniformly random sets of coordinates of exact size (R0 and R1 of arXiv 2609.36262, B.2, are seeds 0 and 1).

    Args:
        coordinates: the order, and P.
        sizes: every K, in [1, P]. The set of a smaller K is a subset of the set of a larger one.
        seed: in [0, 2^64).
        parts: what this process holds of each parameter; None means all of it.
        device: where the masks are computed; they are the same on every device.
        all_reduce: sums counts over the processes; needed where a process holds only a part.

    Returns:
        One `Masks` for each of `sizes`.

    Raises:
        UserError: if `seed` or a size is out of range.
    """
    if not 0 <= seed < 2**64:
        raise UserError(f"seed={seed}: not in [0, 2^64)")
    source = HashKeys(coordinates.parts if parts is None else parts, torch.device(device), seed)
    return [Masks(source, top) for top in select_largest(source, sizes, coordinates.num_coordinates, all_reduce)]


@dataclass(frozen=True)
class HashKeys(Keys):
    """The top 31 bits of element number `coordinate` of a SplitMix64 stream that starts at the hash of `seed`.

    Attributes:
        seed: in [0, 2^64).
    """

    seed: int

    def keys(self, name: str, start: int, stop: int) -> Tensor:
        """See `Keys.keys`."""
        base = self.parts[name].start
        return self._hash(torch.arange(base + start, base + stop, device=self.device))

    def sample(self, name: str, stride: int) -> Tensor:
        """See `Keys.sample`."""
        part = self.parts[name]
        return self._hash(torch.arange(part.start, part.start + part.num_coordinates, stride, device=self.device))

    def _hash(self, state: Tensor) -> Tensor:
        """Keys of coordinates (int64), which are overwritten."""
        # int64 arithmetic wraps around, so these are the unsigned 64-bit operations.
        state.mul_(_signed(GAMMA)).add_(_signed(_mix(self.seed + GAMMA)))
        state.bitwise_xor_(_shift(state, 30)).mul_(_signed(MIX_1))
        state.bitwise_xor_(_shift(state, 27)).mul_(_signed(MIX_2))
        # The finaliser's last step, x ^ (x >> 31), does not change the top 31 bits.
        return _shift(state, 33).int()


def _mix(x: int) -> int:
    """SplitMix64's finaliser."""
    x %= 2**64
    x = (x ^ x >> 30) * MIX_1 % 2**64
    x = (x ^ x >> 27) * MIX_2 % 2**64
    return x ^ x >> 31


def _signed(x: int) -> int:
    """The int64 with the bits of the unsigned 64-bit `x`."""
    return x - 2**64 if x >= 2**63 else x


def _shift(x_N: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x_N >> bits).bitwise_and_(2 ** (64 - bits) - 1)
