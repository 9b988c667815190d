"""Files of per-parameter vectors and masks (safetensors), tied to the coordinate order they were made for.

A file holds one tensor per parameter, under its name: values as fp32 in the parameter's shape, masks as bytes [⌈n/8⌉].
Bit i of byte b (bit 0 is the least significant) is the membership of element 8 b + i in row-major order; the bits after
the last element are 0. The metadata hold what the caller gave, such as `q` and `source`, and the entries of `_header`.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fisher_lit.errors import UserError
from fisher_lit.fisher.coordinates import Coordinates, require_shapes
from fisher_lit.fisher.keys import CHUNK
from fisher_lit.sharding import Shards, all_reduce, rank

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
    path: str | Path,
    tensors: Mapping[str, Tensor],
    coordinates: Coordinates,
    metadata: Mapping[str, str],
    shards: Shards | None = None,
) -> None:
    """Write one value per coordinate, in fp32. The file appears whole or not at all.

    Args:
        path: file to write; its folder is made if it is missing.
        tensors: tensors by parameter name; the process's parts where there are `shards`.
        coordinates: the order the file is tied to.
        metadata: further entries, such as `q` and `source`.
        shards: what this process holds; None means all. All processes call together, and process 0 writes.

    Raises:
        UserError: if names or shapes are not those of `coordinates`.
    """
    shards = shards or Shards(coordinates.parts)
    coordinates.require_tensors(tensors, "tensors")
    require_shapes(tensors, shards.parts, "tensors")
    values = (
        shards.gather(tensors[name].detach().float(), shape)
        for name, shape in zip(coordinates.names, coordinates.shapes, strict=True)
    )
    _write(Path(path), values, coordinates, _header("values", coordinates), metadata)


def load_vectors(
    path: str | Path,
    coordinates: Coordinates,
    device: str | torch.device = "cpu",
    shards: Shards | None = None,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file of `save_vectors`.

    Args:
        path: file to read.
        coordinates: those of the model; the file must have been made for the same.
        device: where the tensors go.
        shards: what this process holds; it reads no more. None means all.

    Returns:
        The fp32 tensors by parameter name, and the metadata.

    Raises:
        UserError: if the file is absent, unreadable, of another kind or made for other coordinates.
    """

    def take(name: str, values: Tensor) -> Tensor:
        return shards.take(values, name, coordinates.parts[name].start) if shards else values

    return _read(Path(path), "values", coordinates, device, take)


def save_masks(
    path: str | Path,
    masks: Mapping[str, Tensor],
    coordinates: Coordinates,
    metadata: Mapping[str, str],
    shards: Shards | None = None,
) -> None:
    """Write a set of coordinates, one bit each. The file appears whole or not at all.

    Args:
        path: file to write; its folder is made if it is missing.
        masks: bool masks by parameter name; the process's parts where there are `shards`.
        coordinates: the order the file is tied to.
        metadata: further entries, such as `q` and `source`.
        shards: as for `save_vectors`.

    Raises:
        UserError: if names or shapes are not those of `coordinates`.
    """
    coordinates.require_tensors(masks, "masks")
    shards = shards or Shards(coordinates.parts)
    packed = masks if isinstance(masks, PackedMasks) else PackedMasks.pack(masks)
    for name, part in shards.parts.items():
        if packed.shapes[name] != part.shape:
            raise UserError(f"masks: '{name}' has shape {list(packed.shapes[name])}, expected {list(part.shape)}")
    selected = torch.tensor(packed.num_selected(), device=next(iter(packed.bits.values())).device)
    if shards.mesh is not None:
        all_reduce(selected)
    bits = (
        # Bytes of different parts do not fit together.
        packed.bits[name] if shards.mesh is None else pack_bits(shards.gather(packed[name], shape))
        for name, shape in zip(coordinates.names, coordinates.shapes, strict=True)
    )
    header = _header("masks", coordinates) | {"num_selected": str(int(selected))}
    _write(Path(path), bits, coordinates, header, metadata)


def load_masks(
    path: str | Path,
    coordinates: Coordinates,
    device: str | torch.device = "cpu",
    shards: Shards | None = None,
) -> tuple[PackedMasks, dict[str, str]]:
    """Read a file of `save_masks`; arguments and errors are those of `load_vectors`.

    Returns:
        The masks, which stay packed, and the metadata.
    """
    selected = 0

    def take(name: str, bits: Tensor) -> Tensor:
        nonlocal selected
        part = coordinates.parts[name]
        selected += PackedMasks({name: bits}, {name: part.shape}).num_selected()
        if shards is None or shards.mesh is None:
            return bits
        return pack_bits(shards.take(unpack_bits(bits, part.shape), name, part.start))

    bits, metadata = _read(Path(path), "masks", coordinates, device, take)
    parts = coordinates.parts if shards is None else shards.parts
    if str(selected) != (saved := metadata.get("num_selected")):
        raise UserError(f"{path}: damaged, {selected} bits are set and {saved} were saved; write it again")
    return PackedMasks(bits, {name: part.shape for name, part in parts.items()}), metadata


def _header(kind: Kind, coordinates: Coordinates) -> dict[str, str]:
    return {
        "format": "fisher-lit",
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "num_coordinates": str(coordinates.num_coordinates),
        "fingerprint": coordinates.fingerprint,
        "coordinates": coordinates.to_json(),
    }


def _write(
    path: Path,
    tensors: Iterable[Tensor],
    coordinates: Coordinates,
    header: Mapping[str, str],
    metadata: Mapping[str, str],
) -> None:
    """Write one whole tensor after the other, so that no two need exist at a time."""
    assert not header.keys() & metadata.keys(), "an entry of the header must not be overwritten"
    assert all(isinstance(value, str) for value in metadata.values()), "safetensors takes strings"
    if rank() != 0:
        # Gathering takes every process.
        for _ in tensors:
            pass
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(_safetensors_header(coordinates, header["kind"], {**metadata, **header}))
            for tensor in tensors:
                file.write(tensor.cpu().contiguous().numpy().data)
        _sync(temporary)
        os.replace(temporary, path)
        # The folder holds the new name.
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _safetensors_header(coordinates: Coordinates, kind: str, metadata: Mapping[str, str]) -> bytes:
    """Length and JSON header of a safetensors file that holds a tensor per parameter in the coordinates' order."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, shape in zip(coordinates.names, coordinates.shapes, strict=True):
        size = math.prod(shape)
        start, end = end, end + (4 * size if kind == "values" else -(-size // 8))
        dtype, saved_shape = ("F32", list(shape)) if kind == "values" else ("U8", [-(-size // 8)])
        entries[name] = {"dtype": dtype, "shape": saved_shape, "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    # Readers expect the data at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(
    path: Path,
    kind: Kind,
    coordinates: Coordinates,
    device: str | torch.device,
    take: Callable[[str, Tensor], Tensor],
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
            tensors = {}
            for name, shape in zip(coordinates.names, coordinates.shapes, strict=True):
                tensor = file.get_tensor(name)
                expected = (torch.float32, shape) if kind == "values" else (torch.uint8, (-(-math.prod(shape) // 8),))
                if (tensor.dtype, tuple(tensor.shape)) != expected:
                    raise UserError(
                        f"{path}: damaged, '{name}' is not {expected[0]} {list(expected[1])}; write it again"
                    )
                tensors[name] = take(name, tensor)
    except UserError:
        raise
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); write it again") from error
    return tensors, metadata
