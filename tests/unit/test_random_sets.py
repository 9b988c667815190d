from itertools import pairwise

import pytest
import torch

from fisher_lit.fisher.coordinates import Coordinates, Part
from fisher_lit.fisher.random_sets import HashKeys, random_masks

MASK_64 = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def flat(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def finalise(z):
    """SplitMix64's output function with unbounded integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return z ^ (z >> 31)


def test_the_oracle_gives_the_published_first_output():
    assert finalise(GAMMA) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("start", [0, 2**31 - 5, 2**32 - 5, 2**33 + 12345, 2**40])
@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_hash_is_splitmix64(start, seed):
    source = HashKeys({"a": Part(start, (10,))}, torch.device("cpu"), seed)
    stream = finalise((seed + GAMMA) & MASK_64)
    want = [finalise((stream + i * GAMMA) & MASK_64) >> 33 for i in range(start, start + 10)]
    assert source.keys("a", 0, 10).tolist() == want
    assert source.keys("a", 3, 7).tolist() == want[3:7]
    assert source.sample("a", 4).tolist() == want[::4]


def test_random_sets_have_exact_size_and_are_nested():
    order = Coordinates(("a", "b", "c"), ((300, 200), (7,), (123, 321)))
    sizes = [1, 30, 500, 5000, 50_000, order.num_coordinates]
    sets = [flat(masks) for masks in random_masks(order, sizes, seed=0)]
    assert [int(s.sum()) for s in sets] == sizes
    for small, large in pairwise(sets):
        assert not (small & ~large).any()
    # Alone, a budget gives the same set as among others.
    assert torch.equal(flat(random_masks(order, [500], seed=0)[0]), sets[2])
    assert not torch.equal(flat(random_masks(order, [500], seed=1)[0]), sets[2])


def test_ties_of_the_hash_go_by_coordinate(monkeypatch):
    """With keys of 3 bits nearly all are tied."""
    whole = HashKeys._hash
    monkeypatch.setattr(HashKeys, "_hash", lambda self, state: whole(self, state) >> 28)
    order = Coordinates(("a",), ((5000,),))
    source = HashKeys(order.parts, torch.device("cpu"), 0)
    key = source.keys("a", 0, 5000)
    ranked = key.argsort(descending=True, stable=True)
    for size in (1, 700, 2500):
        members = random_masks(order, [size], 0)[0]["a"]
        assert torch.equal(members.nonzero()[:, 0], ranked[:size].sort().values)


@pytest.mark.parametrize("grouping", ["blocks", "columns"])
def test_random_sets_are_uniform(grouping):
    """Chi-square over 100 groups of 2,000 coordinates, for 20 seeds; without replacement it scales by 1 − q."""
    order = Coordinates(("a", "b"), ((100, 1000), (100_000,)))
    num, groups, share = order.num_coordinates, 100, 0.1
    statistics = []
    for seed in range(20):
        members = flat(random_masks(order, [num // 10], seed)[0]).view(groups, -1)
        counts = members.sum(1) if grouping == "blocks" else members.view(-1, groups).sum(0)
        expected = num * share / groups
        statistics.append(float(((counts - expected) ** 2).sum() / (expected * (1 - share))))
    mean = sum(statistics) / len(statistics)
    # Mean 99 and variance 198 per seed: four standard errors of the mean, five deviations of one.
    assert abs(mean - 99) < 4 * (198 / 20) ** 0.5
    assert max(abs(s - 99) for s in statistics) < 5 * 198**0.5


def test_two_seeds_overlap_by_chance():
    order = Coordinates(("a",), ((200_000,),))
    num, size = 200_000, 20_000
    sets = [flat(random_masks(order, [size], seed)[0]) for seed in range(8)]
    overlaps = [int((a & b).sum()) for i, a in enumerate(sets) for b in sets[:i]]
    # Hypergeometric mean and variance.
    mean = size**2 / num
    variance = size * (size / num) * (1 - size / num) * (num - size) / (num - 1)
    assert max(abs(o - mean) for o in overlaps) < 4.5 * variance**0.5
    assert abs(sum(overlaps) / len(overlaps) - mean) < 4 * (variance / len(overlaps)) ** 0.5
