"""One global order over the coordinates of a model.

A coordinate is one scalar of one parameter. P counts them, tied weights once. The order decides ties, mask files and
random masks, and depends neither on the number of processes nor on how parameters are sharded.
"""

import builtins
import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate, zip_longest

from torch import Tensor, nn

from fisher_lit.errors import UserError


@dataclass(frozen=True)
class Part:
    """The contiguous run of one parameter's coordinates that a process holds.

    A parameter sharded on dim 0 is contiguous: rows r to s of a [R, C] parameter start at offset + r·C.

    Attributes:
        start: global coordinate of the first element.
        shape: shape of the local tensor.
    """

    start: int
    shape: tuple[int, ...]

    @property
    def num_coordinates(self) -> int:
        """Elements of the local tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Coordinates:
    """Parameters in the order of `named_parameters()`; inside one, row-major order of the whole (unsharded) parameter.

    Attributes:
        names: unique parameter names; a tied weight stands under the first of its names.
        shapes: whole shapes, in the same order.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
    ) -> "Coordinates":
        """Coordinates of the trainable parameters of `model`; buffers and parameters without `requires_grad` have none.

        Args:
            model: any module, sharded (`DTensor` parameters) or not.
            include: shell-style patterns on whole parameter names, such as `*.mlp.*`; None takes every parameter.
            exclude: patterns of parameters to leave out, applied after `include`.

        Raises:
            UserError: if a pattern matches no trainable parameter, or no parameter is left.
        """
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        kept = _matching(shapes, include, "include") if include is not None else set(shapes)
        if exclude is not None:
            kept -= _matching(shapes, exclude, "exclude")
        if not kept:
            raise UserError(
                f"include={include!r}, exclude={exclude!r}: none of the model's {len(shapes)} trainable "
                "parameters is left; widen `include` or narrow `exclude`"
            )
        names = tuple(name for name in shapes if name in kept)
        return cls(names, tuple(shapes[name] for name in names))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Global coordinate of the first element of each parameter."""
        return tuple(accumulate(map(math.prod, self.shapes[:-1]), initial=0))

    @cached_property
    def num_coordinates(self) -> int:
        """P, the number of coordinates."""
        return sum(map(math.prod, self.shapes))

    @cached_property
    def parts(self) -> dict[str, Part]:
        """Every parameter as the part of a process that holds all of it."""
        return {n: Part(o, s) for n, o, s in zip(self.names, self.offsets, self.shapes, strict=True)}

    def range(self, name: str) -> builtins.range:
        """Global coordinates of parameter `name`.

        Raises:
            KeyError: if there is no such parameter.
        """
        part = self.parts[name]
        return range(part.start, part.start + part.num_coordinates)

    def name_at(self, index: int) -> str:
        """Name of the parameter that holds global coordinate `index`.

        Raises:
            IndexError: if `index` is not in [0, P).
        """
        if not 0 <= index < self.num_coordinates:
            raise IndexError(f"coordinate {index} is not in [0, {self.num_coordinates})")
        # Of several parameters with one offset, all but the last are empty.
        return self.names[bisect_right(self.offsets, index) - 1]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the ordered list of names and shapes."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The ordered list of names and shapes as JSON."""
        return json.dumps([[n, list(s)] for n, s in zip(self.names, self.shapes, strict=True)])

    @classmethod
    def from_json(cls, text: str) -> "Coordinates":
        """Inverse of `to_json`.

        Raises:
            ValueError: if `text` is not such a list.
        """
        pairs = [(str(name), tuple(int(size) for size in shape)) for name, shape in json.loads(text)]
        return cls(tuple(name for name, _ in pairs), tuple(shape for _, shape in pairs))

    def require_same(self, other: "Coordinates", what: str) -> None:
        """Refuse `other`, the coordinates that `what` (a file, say) was made for, unless they are the same as these.

        Raises:
            UserError: naming P and the first differing parameter of both sides.
        """
        if self.fingerprint == other.fingerprint:
            return
        mine, theirs = zip(self.names, self.shapes, strict=True), zip(other.names, other.shapes, strict=True)
        here, there = next((a, b) for a, b in zip_longest(mine, theirs) if a != b)
        raise UserError(
            f"{what}: made for P={other.num_coordinates} coordinates in {len(other.names)} parameters, the model has "
            f"P={self.num_coordinates} in {len(self.names)}; first difference: {_show(there)} there, {_show(here)} in "
            "the model. Use the model, `include` and `exclude` it was made with"
        )

    def require_tensors(self, names: Iterable[str], what: str) -> None:
        """Refuse per-parameter tensors (`what`) whose names are not these.

        Raises:
            UserError: naming the first missing or unknown parameter.
        """
        given = set(names)
        for name in self.names:
            if name not in given:
                raise UserError(f"{what}: no tensor for parameter '{name}'; every parameter needs one")
        if unknown := sorted(given - set(self.names)):
            raise UserError(f"{what}: '{unknown[0]}' is not among the {len(self.names)} parameters of the coordinates")


def require_shapes(tensors: Mapping[str, Tensor], parts: Mapping[str, Part], what: str) -> None:
    """Refuse tensors (`what`) whose shape is not that of their part.

    Raises:
        UserError: naming the parameter and both shapes.
    """
    for name, part in parts.items():
        if tuple(tensors[name].shape) != part.shape:
            raise UserError(f"{what}: '{name}' has shape {list(tensors[name].shape)}, expected {list(part.shape)}")


def _matching(names: Iterable[str], patterns: str | Sequence[str], argument: str) -> set[str]:
    names = list(names)
    matched: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = {name for name in names if fnmatchcase(name, pattern)}
        if not hits:
            raise UserError(
                f"{argument}: pattern '{pattern}' matches none of the {len(names)} trainable parameters"
                + (f" (the first is '{names[0]}')" if names else "")
            )
        matched |= hits
    return matched


def _show(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return "nothing" if entry is None else f"'{entry[0]}' {list(entry[1])}"
