"""Keys: non-negative 31-bit integers by which coordinates are ranked.

Non-negative fp32 numbers sort like their bit patterns, so the key of a value is its bit pattern.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fisher_lit.errors import UserError
from fisher_lit.fisher.coordinates import Part

# Coordinates handled at a time: temporaries stay near the caches and far below the size of the values.
CHUNK = 2**19
# Bit pattern of +inf; NaNs lie above it.
INFINITY_BITS = 0x7F800000


@dataclass(frozen=True)
class Keys(ABC):
    """Keys of the coordinates that this process holds, computed when asked for.

    Attributes:
        parts: what this process holds of each parameter.
        device: where the keys are computed.
    """

    parts: Mapping[str, Part]
    device: torch.device

    @abstractmethod
    def keys(self, name: str, start: int, stop: int) -> Tensor:
        """int32 keys in [0, 2^31) of elements `start` to `stop` (row-major) of the local part of parameter `name`."""

    @abstractmethod
    def sample(self, name: str, stride: int) -> Tensor:
        """Keys of every `stride`-th element of the local part of parameter `name`; wrong values may get any key."""

    @property
    def num_coordinates(self) -> int:
        """Coordinates that this process holds."""
        return sum(part.num_coordinates for part in self.parts.values())

    def all_keys(self) -> Iterator[Tensor]:
        """Every key of this process, `CHUNK` at a time, in coordinate order."""
        for name in self.parts:
            for _, keys in self.chunks(name):
                yield keys

    def chunks(self, name: str, first: int = 0, last: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Pairs (global coordinate of the first key, keys) that cover the coordinates of `name` in [first, last)."""
        part = self.parts[name]
        stop = part.num_coordinates if last is None else min(part.num_coordinates, last - part.start)
        for start in range(max(first - part.start, 0), stop, CHUNK):
            yield part.start + start, self.keys(name, start, min(start + CHUNK, stop))


@dataclass(frozen=True)
class ValueKeys(Keys):
    """Bit patterns of non-negative fp32 values (−0 counts as 0).

    Attributes:
        values: local tensors by parameter name, shaped like `parts`.
    """

    values: Mapping[str, Tensor]

    def keys(self, name: str, start: int, stop: int) -> Tensor:
        """See `Keys.keys`.

        Raises:
            UserError: if a value is negative, infinite or NaN.
        """
        values = self.values[name].detach().reshape(-1)[start:stop]
        bits = values.view(torch.int32)
        low, high = torch.aminmax(bits)
        if low >= 0 and high < INFINITY_BITS:
            return bits
        wrong = ~((values >= 0) & (values < torch.inf))
        if wrong.any():
            index = int(wrong.int().argmax())
            raise UserError(
                f"values: parameter '{name}' holds {float(values[index])} at coordinate "
                f"{self.parts[name].start + start + index}; only finite values >= 0 can be ranked"
            )
        return bits & 0x7FFFFFFF

    def sample(self, name: str, stride: int) -> Tensor:
        """See `Keys.sample`."""
        bits = self.values[name].detach().reshape(-1)[::stride].view(torch.int32)
        return bits.clamp(0, INFINITY_BITS)
