import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fisher_lit.errors import UserError
from fisher_lit.fisher.coordinates import Coordinates, Part, require_shapes


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.mlp = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(2))
        self.frozen = nn.Parameter(torch.zeros(7), requires_grad=False)


def test_every_trainable_parameter_once_in_order():
    net = Net()
    order = Coordinates.from_model(net)
    assert order.names == tuple(f"{n}" for n, p in net.named_parameters() if p.requires_grad)
    assert "embed.weight" in order.names
    assert not {"head.weight", "scale", "frozen"} & set(order.names)
    assert order.num_coordinates == 15 + (12 + 4) + (4 + 4) + (12 + 3)


def test_offsets_ranges_and_names_are_one_enumeration():
    net = Net()
    order = Coordinates.from_model(net)
    want = [name for name, p in net.named_parameters() if p.requires_grad for _ in range(p.numel())]
    assert [order.name_at(i) for i in range(order.num_coordinates)] == want
    for name, offset in zip(order.names, order.offsets, strict=True):
        assert order.range(name).start == offset == want.index(name)
        assert len(order.range(name)) == want.count(name) == order.parts[name].num_coordinates
    for outside in (-1, order.num_coordinates):
        with pytest.raises(IndexError):
            order.name_at(outside)


def test_empty_parameters_and_scalars():
    order = Coordinates(("a", "b", "c", "d"), ((2,), (0, 4), (), (0,)))
    assert order.offsets == (0, 2, 2, 3)
    assert [order.name_at(i) for i in range(order.num_coordinates)] == ["a", "a", "c"]


def test_arithmetic_past_32_bits():
    order = Coordinates(("a", "b", "c"), ((2**17, 2**16), (3,), (2**31 + 5,)))
    assert order.num_coordinates == 2**33 + 3 + 2**31 + 5
    assert order.offsets == (0, 2**33, 2**33 + 3)
    assert order.name_at(2**33 + 2) == "b"
    assert order.name_at(2**33 + 3) == order.name_at(order.num_coordinates - 1) == "c"


def test_patterns():
    net = Net()
    assert Coordinates.from_model(net, include="mlp.*").names == (
        "mlp.0.weight",
        "mlp.0.bias",
        "mlp.1.weight",
        "mlp.1.bias",
        "mlp.2.weight",
        "mlp.2.bias",
    )
    assert Coordinates.from_model(net, include=["mlp.2.*", "embed.*"], exclude=["*.bias"]).names == (
        "embed.weight",
        "mlp.2.weight",
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"include": ["mlp.*", "attn.*"]}, ["include", "attn.*", "7", "embed.weight"]),
        ({"exclude": "frozen"}, ["exclude", "frozen"]),
        ({"include": "mlp.*", "exclude": "mlp.*"}, ["include", "exclude"]),
        ({"include": []}, ["include=[]"]),
    ],
)
def test_patterns_that_leave_nothing(arguments, words):
    with pytest.raises(UserError) as error:
        Coordinates.from_model(Net(), **arguments)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_a_model_without_trainable_parameters():
    with pytest.raises(UserError, match="0 trainable"):
        Coordinates.from_model(Net().requires_grad_(False))


def test_fingerprint_tells_names_shapes_and_order_apart():
    base = Coordinates(("a", "b"), ((2, 3), (4,)))
    same = Coordinates.from_json(base.to_json())
    assert same == base
    assert same.fingerprint == base.fingerprint
    others = [
        Coordinates(("b", "a"), ((4,), (2, 3))),
        Coordinates(("a", "b"), ((3, 2), (4,))),
        Coordinates(("a", "c"), ((2, 3), (4,))),
        Coordinates(("a",), ((2, 3),)),
        Coordinates(("a", "b", "c"), ((2, 3), (4,), (0,))),
    ]
    assert len({o.fingerprint for o in [base, *others]}) == 6
    base.require_same(same, "mask.safetensors")
    for other in others:
        with pytest.raises(UserError, match=r"mask\.safetensors: made for P="):
            base.require_same(other, "mask.safetensors")


def test_mismatch_names_both_sides():
    mine = Coordinates(("a", "b"), ((2, 3), (4,)))
    with pytest.raises(UserError) as error:
        mine.require_same(Coordinates(("a", "x"), ((2, 3), (5,))), "file")
    assert all(word in str(error.value) for word in ("P=11", "P=10", "'x' [5] there", "'b' [4] in the model"))
    with pytest.raises(UserError, match="nothing there"):
        mine.require_same(Coordinates(("a",), ((2, 3),)), "file")


def test_required_tensors_and_shapes():
    order = Coordinates(("a", "b"), ((2, 3), (4,)))
    order.require_tensors({"b": 0, "a": 0}, "values")
    with pytest.raises(UserError, match="no tensor for parameter 'b'"):
        order.require_tensors({"a": 0}, "values")
    with pytest.raises(UserError, match="'c' is not among"):
        order.require_tensors({"a": 0, "b": 0, "c": 0}, "values")
    with pytest.raises(UserError, match=r"values: 'b' has shape \[4\], expected \[2\]"):
        require_shapes({"b": torch.zeros(4)}, {"b": Part(0, (2,))}, "values")


def test_order_is_that_of_whole_parameters_under_sharding():
    """Rank 1 of 4 of a process group that moves nothing: the parameters are real DTensors."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    whole = Coordinates.from_model(Net())
    net = Net()
    init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        fully_shard(net, mesh=torch.distributed.init_device_mesh("cpu", (4,)))
        assert isinstance(net.mlp[0].weight, DTensor)
        assert net.mlp[0].weight.to_local().shape == (1, 3)
        assert Coordinates.from_model(net) == whole
    finally:
        destroy_process_group()
