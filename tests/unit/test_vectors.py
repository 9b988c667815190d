import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

from fisher_lit.errors import UserError
from fisher_lit.fisher import vectors
from fisher_lit.fisher.coordinates import Coordinates
from fisher_lit.fisher.selection import top_masks
from fisher_lit.fisher.vectors import (
    PackedMasks,
    load_masks,
    load_vectors,
    pack_bits,
    save_masks,
    save_vectors,
    unpack_bits,
)

SHAPES = {"b.weight": (7, 5), "a.weight": (3, 4, 2), "a.bias": (1,), "scale": (), "none": (0, 2)}
ORDER = Coordinates(tuple(SHAPES), tuple(SHAPES.values()))
MADE = {"q": "1", "source": "model Fisher, 800 trajectories"}


def values():
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


def masks():
    return {name: x > 0 for name, x in values().items()}


@pytest.mark.parametrize("num", [0, 1, 7, 8, 9, 63, 64, 65, 1000])
@pytest.mark.parametrize("chunk", [8, 64, 2**19])
def test_bits_are_those_of_numpy(monkeypatch, num, chunk):
    monkeypatch.setattr(vectors, "CHUNK", chunk)
    mask = torch.rand(num, generator=torch.Generator().manual_seed(num)) < 0.4
    packed = pack_bits(mask)
    assert packed.dtype == torch.uint8
    assert np.array_equal(packed.numpy(), np.packbits(mask.numpy(), bitorder="little"))
    assert torch.equal(unpack_bits(packed, (num,)), mask)


def test_packed_masks_are_the_masks():
    packed = PackedMasks.pack(masks())
    assert list(packed) == list(SHAPES)
    assert packed.num_selected() == sum(int(m.sum()) for m in masks().values())
    for name, mask in masks().items():
        assert packed[name].dtype == torch.bool
        assert torch.equal(packed[name], mask)
        assert packed.bits[name].numel() == (mask.numel() + 7) // 8


def test_packed_masks_outlive_their_values():
    whole = {"a": torch.arange(100.0)}
    (chosen,) = top_masks(whole, [10], Coordinates(("a",), ((100,),)))
    packed = PackedMasks.pack(chosen)
    whole["a"].zero_()
    assert packed["a"].nonzero()[:, 0].tolist() == list(range(90, 100))


def test_round_trip_of_values(tmp_path):
    path = tmp_path / "new" / "fisher.safetensors"
    save_vectors(path, values(), ORDER, MADE)
    loaded, metadata = load_vectors(path, ORDER)
    assert list(loaded) == list(SHAPES)
    for name, x in values().items():
        assert torch.equal(loaded[name], x)
        assert loaded[name].dtype == torch.float32
    assert metadata["num_coordinates"] == str(ORDER.num_coordinates)
    assert metadata["fingerprint"] == ORDER.fingerprint
    assert metadata["format_version"] == "1"
    assert MADE.items() <= metadata.items()
    assert [p.name for p in path.parent.iterdir()] == ["fisher.safetensors"]


@pytest.mark.parametrize("packed", [False, True])
def test_round_trip_of_masks(tmp_path, packed):
    path = tmp_path / "mask.safetensors"
    save_masks(path, PackedMasks.pack(masks()) if packed else masks(), ORDER, MADE)
    loaded, metadata = load_masks(path, ORDER)
    for name, mask in masks().items():
        assert torch.equal(loaded[name], mask)
    assert metadata["num_selected"] == str(loaded.num_selected())
    assert MADE.items() <= metadata.items()
    # 7·5 + 3·4·2 + 1 + 1 coordinates.
    with safe_open(path, framework="np") as file:
        assert sum(file.get_tensor(name).nbytes for name in SHAPES) == 5 + 3 + 1 + 1


def test_a_selection_is_saved_without_being_held(tmp_path):
    x = {"w": torch.rand(300, 7)}
    order = Coordinates(("w",), ((300, 7),))
    (chosen,) = top_masks(x, [21], order)
    save_masks(tmp_path / "m", chosen, order, {})
    loaded, metadata = load_masks(tmp_path / "m", order)
    assert torch.equal(loaded["w"], chosen["w"])
    assert metadata["num_selected"] == "21"


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "fisher.safetensors"
    save_vectors(path, values(), ORDER, MADE)
    before = path.read_bytes()
    broken = values()
    last = ORDER.names[1]
    # It has a shape and no values: the file is begun before it fails.
    broken[last] = broken[last].to("meta")
    with pytest.raises(NotImplementedError):
        save_vectors(path, broken, ORDER, MADE)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["fisher.safetensors"]


def test_a_file_that_cannot_take_its_place_is_removed(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError):
        save_vectors(tmp_path / "taken", values(), ORDER, MADE)
    assert [p.name for p in tmp_path.rglob("*")] == ["taken"]


def test_other_coordinates_are_refused(tmp_path):
    path = tmp_path / "fisher.safetensors"
    save_vectors(path, values(), ORDER, MADE)
    save_masks(tmp_path / "mask", masks(), ORDER, MADE)
    other = Coordinates.from_json(ORDER.to_json().replace("[7, 5]", "[5, 7]"))
    for load, file in ((load_vectors, path), (load_masks, tmp_path / "mask")):
        with pytest.raises(UserError) as error:
            load(file, other)
        assert all(
            word in str(error.value) for word in (str(file), "P=61", "'b.weight' [7, 5] there", "[5, 7] in the model")
        )


def test_tensors_of_other_parameters_are_not_saved(tmp_path):
    for save, tensors in ((save_vectors, values()), (save_masks, masks())):
        with pytest.raises(UserError, match="'extra' is not among"):
            save(tmp_path / "x", tensors | {"extra": torch.zeros(1)}, ORDER, {})
        with pytest.raises(UserError, match=r"'scale' has shape \[2\], expected \[\]"):
            save(tmp_path / "x", tensors | {"scale": torch.zeros(2) > 0}, ORDER, {})
    assert list(tmp_path.iterdir()) == []


def rewrite_header(path, change):
    """Change the JSON header of a safetensors file."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def test_files_that_cannot_be_used(tmp_path):
    path, mask_path = tmp_path / "fisher", tmp_path / "mask"

    def refuses(words, load=load_vectors, file=path):
        with pytest.raises(UserError) as error:
            load(file, ORDER)
        assert all(word in str(error.value) for word in (str(file), *words))
        assert "\n" not in str(error.value)

    refuses(["no such file"])
    refuses(["no such file"], file=tmp_path)
    path.write_bytes(b"")
    refuses(["cannot be read"])
    path.write_bytes(b"not a safetensors file at all" * 100)
    refuses(["cannot be read"])
    save_vectors(path, values(), ORDER, MADE)
    path.write_bytes(path.read_bytes()[:-4])
    refuses(["cannot be read"])
    save_masks(mask_path, masks(), ORDER, MADE)
    refuses(["holds no values", "kind=masks"], file=mask_path)
    save_vectors(path, values(), ORDER, MADE)
    refuses(["holds no masks", "kind=values"], load=load_masks)

    rewrite_header(path, lambda h: h["__metadata__"].update(format_version="2"))
    refuses(["version 2", "reads 1"])
    save_vectors(path, values(), ORDER, MADE)
    rewrite_header(path, lambda h: h["__metadata__"].pop("coordinates"))
    refuses(["cannot be read"])
    save_vectors(path, values(), ORDER, MADE)
    rewrite_header(path, lambda h: h["a.bias"].update(dtype="I32"))
    refuses(["damaged", "'a.bias'"])
    rewrite_header(path, lambda h: h.pop("__metadata__"))
    refuses(["holds no values"])


def test_a_flipped_bit_in_a_mask_is_noticed(tmp_path):
    path = tmp_path / "mask"
    save_masks(path, masks(), ORDER, MADE)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 4
    path.write_bytes(raw)
    with pytest.raises(UserError, match="damaged, "):
        load_masks(path, ORDER)
