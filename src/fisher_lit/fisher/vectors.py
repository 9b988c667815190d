"""Files of per-parameter vectors and masks (safetensors), tied to the coordinate order they were made for.

A file holds one tensor per parameter, under its name: values as fp32 in the parameter's shape, masks as bytes [⌈n/8⌉].
Bit i of byte b (bit 0 is the least significant) is the membership of element 8 b + i in row-major order; the bits after
the last element are 0. The metadata hold what the caller gave, such as `q` and `source`, and the entries of `_header`.
"""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fisher_lit.errors import UserError
from fisher_lit.fisher.coordinates import Coordinates, require_shapes
from fisher_lit.fisher.keys import CHUNK

FORMAT_VERSION = "1"
Kind = Literal["values", "masks"]


class PackedMasks(Mapping[str, Tensor]):
    """Parameter name → bool mask, kept as one bit per coordinate and unpacked on access.

    Args:
        bits: packed mask of each parameter, uint8 [⌈n/8⌉].
        shapes: shape of each mask.
    """

    def __init__(self, bits: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.bits = bits
        self.shapes = shapes

    @classmethod
    def pack(cls, masks: Mapping[str, Tensor]) -> "PackedMasks":
        """Pack bool masks, one parameter at a time."""
        bits, shapes = {}, {}
        for name, mask in masks.items():
            bits[name], shapes[name] = pack_bits(mask), tuple(mask.shape)
        return cls(bits, shapes)

    def __getitem__(self, name: str) -> Tensor:
        return unpack_bits(self.bits[name], self.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.bits)

    def __len__(self) -> int:
        return len(self.bits)

    def num_selected(self) -> int:
        """K, the number of coordinates in the set."""
        ones_in_byte = torch.tensor([byte.bit_count() for byte in range(256)])
        chunks = (chunk for bits in self.bits.values() for chunk in bits.split(CHUNK))
        return sum(int((torch.bincount(chunk, minlength=256).cpu() * ones_in_byte).sum()) for chunk in chunks)


def pack_bits(mask: Tensor) -> Tensor:
    """Bool mask of n elements as uint8 [⌈n/8⌉], in the bit order of the file format."""
    flat = mask.reshape(-1)
    packed = torch.zeros(-(-flat.numel() // 8), dtype=torch.uint8, device=mask.device)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=mask.device)
    for start in range(0, flat.numel(), CHUNK):
        chunk = flat[start : start + CHUNK].to(torch.uint8)
        bits = torch.nn.functional.pad(chunk, (0, -len(chunk) % 8)).view(-1, 8)
        packed[start // 8 :][: len(bits)] = (bits * weights).sum(1, dtype=torch.uint8)
    return packed


def unpack_bits(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Bool mask of `shape` from `pack_bits`."""
    mask = torch.empty(shape, dtype=torch.bool, device=packed.device)
    flat = mask.view(-1)
    lanes = torch.arange(8, dtype=torch.uint8, device=packed.device)
    for start in range(0, flat.numel(), CHUNK):
        target = flat[start : start + CHUNK]
        chunk = packed[start // 8 : (start + CHUNK) // 8, None]
        target.copy_((chunk >> lanes).bitwise_and_(1).view(-1)[: len(target)])
    return mask


def save_vectors(
    path: str | Path, tensors: Mapping[str, Tensor], coordinates: Coordinates, metadata: Mapping[str, str]
) -> None:
    """Write one value per coordinate, in fp32. The file appears whole or not at all.

    Args:
        path: file to write; its folder is made if it is missing.
        tensors: whole tensors by parameter name.
        coordinates: the order the file is tied to.
        metadata: further entries, such as `q` and `source`.

    Raises:
        UserError: if names or shapes are not those of `coordinates`.
    """
    coordinates.require_tensors(tensors, "tensors")
    require_shapes(tensors, coordinates.parts, "tensors")
    values = {name: tensors[name].detach().float().contiguous() for name in coordinates.names}
    _write(Path(path), values, _header("values", coordinates), metadata)


def load_vectors(
    path: str | Path, coordinates: Coordinates, device: str | torch.device = "cpu"
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file of `save_vectors`.

    Args:
        path: file to read.
        coordinates: those of the model; the file must have been made for the same.
        device: where the tensors go.

    Returns:
        The fp32 tensors by parameter name, and the metadata.

    Raises:
        UserError: if the file is absent, unreadable, of another kind or made for other coordinates.
    """
    return _read(Path(path), "values", coordinates, device)


def save_masks(
    path: str | Path, masks: Mapping[str, Tensor], coordinates: Coordinates, metadata: Mapping[str, str]
) -> None:
    """Write a set of coordinates, one bit each. The file appears whole or not at all.

    Args:
        path: file to write; its folder is made if it is missing.
        masks: whole bool masks by parameter name.
        coordinates: the order the file is tied to.
        metadata: further entries, such as `q` and `source`.

    Raises:
        UserError: if names or shapes are not those of `coordinates`.
    """
    coordinates.require_tensors(masks, "masks")
    packed = masks if isinstance(masks, PackedMasks) else PackedMasks.pack(masks)
    for name, shape in zip(coordinates.names, coordinates.shapes, strict=True):
        if packed.shapes[name] != shape:
            raise UserError(f"masks: '{name}' has shape {list(packed.shapes[name])}, expected {list(shape)}")
    header = _header("masks", coordinates) | {"num_selected": str(packed.num_selected())}
    _write(Path(path), packed.bits, header, metadata)


def load_masks(
    path: str | Path, coordinates: Coordinates, device: str | torch.device = "cpu"
) -> tuple[PackedMasks, dict[str, str]]:
    """Read a file of `save_masks`; arguments and errors are those of `load_vectors`.

    Returns:
        The masks, which stay packed, and the metadata.
    """
    bits, metadata = _read(Path(path), "masks", coordinates, device)
    masks = PackedMasks(bits, dict(zip(coordinates.names, coordinates.shapes, strict=True)))
    if (selected := str(masks.num_selected())) != (saved := metadata.get("num_selected")):
        raise UserError(f"{path}: damaged, {selected} bits are set and {saved} were saved; write it again")
    return masks, metadata


def _header(kind: Kind, coordinates: Coordinates) -> dict[str, str]:
    return {
        "format": "fisher-lit",
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "num_coordinates": str(coordinates.num_coordinates),
        "fingerprint": coordinates.fingerprint,
        "coordinates": coordinates.to_json(),
    }


def _write(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str], metadata: Mapping[str, str]) -> None:
    assert not header.keys() & metadata.keys(), "an entry of the header must not be overwritten"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(dict(tensors), temporary, {**metadata, **header})
        _sync(temporary)
        os.replace(temporary, path)
        # The folder holds the new name.
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(
    path: Path, kind: Kind, coordinates: Coordinates, device: str | torch.device
) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the path of a file of {kind} that fisher-lit has written")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != "fisher-lit" or metadata.get("kind") != kind:
                raise UserError(
                    f"{path}: holds no {kind} of fisher-lit (kind={metadata.get('kind')}); give another file"
                )
            if (version := metadata.get("format_version")) != FORMAT_VERSION:
                raise UserError(
                    f"{path}: has format version {version}, this program reads {FORMAT_VERSION}; write it again"
                )
            coordinates.require_same(Coordinates.from_json(metadata["coordinates"]), str(path))
            tensors = {name: file.get_tensor(name) for name in coordinates.names}
    except UserError:
        raise
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); write it again") from error
    for name, shape in zip(coordinates.names, coordinates.shapes, strict=True):
        expected = (torch.float32, shape) if kind == "values" else (torch.uint8, (-(-math.prod(shape) // 8),))
        if (tensors[name].dtype, tuple(tensors[name].shape)) != expected:
            raise UserError(f"{path}: damaged, '{name}' is not {expected[0]} {list(expected[1])}; write it again")
    return tensors, metadata
