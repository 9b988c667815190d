import random
import threading
from fractions import Fraction

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fisher_lit.errors import UserError
from fisher_lit.fisher import keys, selection
from fisher_lit.fisher.coordinates import Coordinates, Part
from fisher_lit.fisher.keys import ValueKeys
from fisher_lit.fisher.random_sets import HashKeys, random_masks
from fisher_lit.fisher.selection import TopK, budget, select_largest, top_masks


def flat(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def oracle(values, size):
    """Membership by a stable sort of float64 numbers: the highest first, ties in coordinate order."""
    order = torch.argsort(flat(values).double(), descending=True, stable=True)
    return torch.zeros(len(order), dtype=torch.bool).index_fill_(0, order[:size], True)


def coordinates_of(tensors):
    return Coordinates(tuple(tensors), tuple(tuple(t.shape) for t in tensors.values()))


def draw_values(seed):
    """Parameters of odd shapes, full of ties, zeros of both signs, denormals and neighbours of one bit."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    shapes = [(rng.randint(1, 40), rng.randint(1, 30)), (), (rng.randint(1, 700),), (0, 3), (rng.randint(1, 9),)]
    values = {}
    for i, shape in enumerate(shapes):
        kind = (seed + i) % 6
        x = torch.randn(shape, generator=g).mul(3).exp()
        if kind == 1:
            x = torch.randint(0, 3, shape, generator=g).float() * torch.where(
                torch.rand(shape, generator=g) < 0.5, -0.0, 1
            )
        if kind == 2:
            x = torch.randint(0, 5, shape, generator=g).int().view(torch.float32)
        if kind == 3:
            x = (torch.tensor(1.0).view(torch.int32) + torch.randint(-2, 3, shape, generator=g).int()).view(
                torch.float32
            )
        if kind == 4:
            x = torch.where(torch.rand(shape, generator=g) < 0.7, 0.0, x * 1e-30)
        values[f"p{i}"] = x.abs() if kind != 1 else x
    return values


@pytest.mark.parametrize("chunk", [64, 2**19])
@pytest.mark.parametrize("kept", [0.0, 1.0], ids=["all-keys", "largest-keys"])
@pytest.mark.parametrize("seed", range(12))
def test_equals_a_stable_sort(monkeypatch, chunk, kept, seed):
    monkeypatch.setattr(keys, "CHUNK", chunk)
    monkeypatch.setattr(selection, "MAX_KEPT", kept)
    monkeypatch.setattr(selection, "SAMPLE_STRIDE", 3)
    values = draw_values(seed)
    order = coordinates_of(values)
    num = order.num_coordinates
    sizes = sorted(
        {1, 2, num // 100 + 1, num // 10 + 1, num // 2 + 1, num - 1, num, *random.Random(seed).sample(range(1, num), 1)}
    )
    for size, masks in zip(sizes, top_masks(values, sizes, order), strict=True):
        assert list(masks) == list(values)
        assert all(masks[name].shape == values[name].shape for name in values)
        assert torch.equal(flat(masks), oracle(values, size))
        assert masks.top.size == size


def test_all_values_equal():
    values = {"a": torch.full((300,), 0.5), "b": torch.full((7, 9), 0.5)}
    for size, masks in zip(
        [1, 299, 300, 301, 363], top_masks(values, [1, 299, 300, 301, 363], coordinates_of(values)), strict=True
    ):
        assert torch.equal(flat(masks), torch.arange(363) < size)


def test_a_sample_that_misleads_does_not_change_the_result(monkeypatch):
    """Every sampled value is large, the others are small: the floor is far too high."""
    values = {"a": torch.rand(2_000_000, generator=torch.Generator().manual_seed(0))}
    values["a"][:: selection.SAMPLE_STRIDE] = torch.linspace(2, 12, 3930).exp()
    swept = []
    whole = ValueKeys.all_keys
    monkeypatch.setattr(ValueKeys, "all_keys", lambda self: swept.append(1) or whole(self))
    (masks,) = top_masks(values, [4000], coordinates_of(values))
    assert torch.equal(flat(masks), oracle(values, 4000))
    # One sweep to copy the largest keys, which are too few, then two over all of them.
    assert len(swept) == 3


def test_one_sweep_suffices_for_a_small_share(monkeypatch):
    values = {"a": torch.randn(2_000_000, generator=torch.Generator().manual_seed(0)).exp()}
    swept = []
    whole = ValueKeys.all_keys
    monkeypatch.setattr(ValueKeys, "all_keys", lambda self: swept.append(1) or whole(self))
    several = top_masks(values, [2000, 10_000], coordinates_of(values))
    assert len(swept) == 1
    assert [torch.equal(flat(m), oracle(values, m.top.size)) for m in several] == [True, True]


def test_non_contiguous_values_keep_row_major_order():
    values = {"a": torch.randint(0, 4, (50, 60)).float().t()}
    (masks,) = top_masks(values, [1111], coordinates_of(values))
    assert torch.equal(flat(masks), oracle(values, 1111))


class Processes:
    """Threads in the place of processes: `all_reduce` adds up what every thread brings."""

    def __init__(self, num):
        self.num, self.barrier, self.brought = num, threading.Barrier(num), {}

    def all_reduce(self, rank):
        def reduce(tensor):
            self.brought[rank] = tensor.clone()
            self.barrier.wait(timeout=20)
            total = sum(self.brought.values())
            self.barrier.wait(timeout=20)
            tensor.copy_(total)

        return reduce

    def run(self, work):
        results = [None] * self.num

        def start(rank):
            results[rank] = work(rank, self.all_reduce(rank))

        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(self.num)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        return results


def shard(order, rank, num):
    """Rows of each parameter as FSDP2 shards them: chunks of ⌈R/num⌉ rows, the last ones short or empty."""
    parts, rows = {}, {}
    for name, shape in zip(order.names, order.shapes, strict=True):
        step = -(-shape[0] // num)
        first, last = min(rank * step, shape[0]), min((rank + 1) * step, shape[0])
        per_row = len(order.range(name)) // shape[0]
        parts[name] = Part(order.range(name).start + first * per_row, (last - first, *shape[1:]))
        rows[name] = slice(first, last)
    return parts, rows


@pytest.mark.parametrize("kept", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_shards_select_what_one_process_selects(monkeypatch, seed, kept):
    monkeypatch.setattr(keys, "CHUNK", 64)
    monkeypatch.setattr(selection, "MAX_KEPT", kept)
    monkeypatch.setattr(selection, "SAMPLE_STRIDE", 3)
    values = {name: x for name, x in draw_values(seed).items() if x.numel() > 1}
    order = coordinates_of(values)
    sizes = [1, order.num_coordinates // 20 + 1, order.num_coordinates // 3, order.num_coordinates - 2]

    def work(rank, all_reduce):
        parts, rows = shard(order, rank, 3)
        local = {name: values[name][rows[name]] for name in values}
        chosen = top_masks(local, sizes, order, parts=parts, all_reduce=all_reduce)
        chance = random_masks(order, sizes, 5, parts=parts, all_reduce=all_reduce)
        return [[dict(m) for m in chosen], [dict(m) for m in chance]]

    results = Processes(3).run(work)
    for i, size in enumerate(sizes):
        for kind, whole in enumerate([top_masks(values, sizes, order), random_masks(order, sizes, 5)]):
            for name in values:
                joined = torch.cat([result[kind][i][name] for result in results])
                assert torch.equal(joined, whole[i][name]), (kind, size, name)


def test_a_sample_that_misleads_one_process_only(monkeypatch):
    """Rank 0 samples only its large values and needs its others too, while rank 1 could make up the number."""
    monkeypatch.setattr(selection, "MAX_KEPT", 1.0)
    monkeypatch.setattr(selection, "SAMPLE_STRIDE", 3)
    x = torch.rand(6000, generator=torch.Generator().manual_seed(0))
    x[:3000] += 5
    x[:3000:3] *= 100
    order = Coordinates(("a",), ((6000,),))

    def work(rank, all_reduce):
        local = {"a": x[3000 * rank : 3000 * (rank + 1)]}
        parts = {"a": Part(3000 * rank, (3000,))}
        return top_masks(local, [1500], order, parts=parts, all_reduce=all_reduce)[0]["a"]

    assert torch.equal(torch.cat(Processes(2).run(work)), oracle({"a": x}, 1500))


def test_a_part_without_all_reduce_is_refused():
    order = Coordinates(("a",), ((6,),))
    with pytest.raises(UserError, match="hold 3 of P=6"):
        top_masks({"a": torch.ones(3)}, [1], order, parts={"a": Part(0, (3,))})


class CountsOfZeros:
    """`all_reduce` beside a second process that holds `num` zeros and nothing else."""

    def __init__(self, num):
        self.num, self.first = num, True

    def __call__(self, counts):
        if self.first or counts.shape == (selection.HIGH_BINS,):
            counts[0] += self.num
        self.first = False


def test_more_than_2_to_the_33_coordinates():
    """The other process's 2^33 zeros come first in coordinate order; this one's values are tied."""
    zeros = 2**33 + 11
    parts = {"here": Part(zeros, (1000,)), "there": Part(0, (0,))}
    order = Coordinates(("there", "here"), ((zeros,), (1000,)))
    values = {"here": torch.arange(1000).remainder(10).float() + 1, "there": torch.zeros(0)}
    for size in (1, 100, 537, 1000):
        (masks,) = top_masks(values, [size], order, parts=parts, all_reduce=CountsOfZeros(zeros))
        assert torch.equal(masks["here"], oracle({"here": values["here"]}, size))
        assert masks.top.cutoff > 2**33


def test_counts_past_32_bits():
    counts = torch.tensor([2**31, 0, 2**33, 5])
    assert selection._locate(counts, 2**31) == (0, 2**31)
    assert selection._locate(counts, 2**31 + 1) == (2, 1)
    assert selection._locate(counts, 2**31 + 2**33 + 5) == (3, 5)
    assert selection._locate_from_top(counts, 6) == (2, 1)


def test_cutoff_splits_a_chunk():
    chunk = torch.tensor([5, 7, 5, 9, 5], dtype=torch.int32)
    start = 2**35
    for cutoff, want in [(0, "01010"), (start + 1, "11010"), (start + 3, "11110"), (start + 99, "11111")]:
        assert TopK(1, 5, cutoff).contains(chunk, start).int().tolist() == [int(c) for c in want]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0, -float("nan"), -1e-45, -float("inf")])
@pytest.mark.parametrize("index", [0, 4567])
def test_values_that_cannot_be_ranked(wrong, index):
    values = {"fine": torch.rand(10), "layer.weight": torch.rand(100, 50)}
    values["fine"][3] = -0.0
    values["layer.weight"].view(-1)[index] = wrong
    held = float(values["layer.weight"].view(-1)[index])
    with pytest.raises(UserError, match=rf"'layer\.weight' holds {held} at coordinate {10 + index};"):
        top_masks(values, [3], coordinates_of(values))


def test_arguments_that_do_not_fit():
    order = Coordinates(("a",), ((4,),))
    for size in (0, -1, 5):
        with pytest.raises(UserError, match=rf"size={size}: not in \[1, P=4\]"):
            top_masks({"a": torch.ones(4)}, [size], order)
    with pytest.raises(UserError, match=r"'a' is torch\.float64"):
        top_masks({"a": torch.ones(4).double()}, [1], order)
    with pytest.raises(UserError, match=r"'a' has shape \[5\]"):
        top_masks({"a": torch.ones(5)}, [1], order)
    with pytest.raises(UserError, match="no tensor for parameter 'a'"):
        top_masks({"b": torch.ones(4)}, [1], order)
    for seed in (-1, 2**64):
        with pytest.raises(UserError, match="seed="):
            random_masks(order, [1], seed)


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that is made inside the context."""

    largest = 0

    def __init__(self, known):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("q", [1, 20])
def test_no_large_temporaries(monkeypatch, tied, q):
    monkeypatch.setattr(keys, "CHUNK", 2**16)
    x = torch.rand(2**21, generator=torch.Generator().manual_seed(0))
    values = {"a": x.mul_(4).floor_() if tied else x}
    with LargestTensor(values.values()) as made:
        top_masks(values, [budget(q, 2**21)], coordinates_of(values))
    # 2% of the values at most are copied for q = 1; counts take 512 KiB whatever P is.
    assert 0 < made.largest <= 2**19


def test_budget_is_exact():
    for q, percent in [(0.05, "1/20"), (0.1, "1/10"), (0.29, "29/100"), (0.07, "7/100"), (5, "5"), ("1e-3", "1/1000")]:
        for num in (100_000, 1_720_574_976, 2**33 + 1):
            assert budget(q, num) == (Fraction(percent) * num / 100).__floor__()
    # In binary floating point 0.29 * 10000 / 100 is below 29.
    assert budget(0.29, 10_000) == 29
    assert budget(100, 7) == 7


@pytest.mark.parametrize("q", [0, -1, 100.1, float("nan"), float("inf"), "many", "1/0"])
def test_percentages_out_of_range(q):
    with pytest.raises(UserError, match=r"q=.*: not a percentage in \(0, 100\]"):
        budget(q, 1000)


def test_percentage_that_selects_nothing():
    with pytest.raises(UserError, match=r"q=0\.05: selects none of P=1999"):
        budget(0.05, 1999)
    assert budget(0.05, 2000) == 1


def test_select_largest_of_many_sizes_shares_its_sweeps(monkeypatch):
    order = Coordinates(("a",), ((50_000,),))
    source = HashKeys(order.parts, torch.device("cpu"), 3)
    swept = []
    whole = HashKeys.all_keys
    monkeypatch.setattr(HashKeys, "all_keys", lambda self: swept.append(1) or whole(self))
    tops = select_largest(source, list(range(1, 50_000, 700)), 50_000)
    assert len(tops) == 72
    assert len(swept) == 2
