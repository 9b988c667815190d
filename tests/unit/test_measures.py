import math
import random

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, Phi3Config

from fisher_lit.errors import UserError
from fisher_lit.fisher import measures
from fisher_lit.fisher.layout import MODULES, Place, where
from fisher_lit.fisher.measures import (
    Overlap,
    by_module,
    density,
    fisher_share,
    fisher_sums,
    jaccard,
    magnitude_ratio,
    overlap,
    recall,
    retention,
    share,
)

SHAPES = {
    "model.embed_tokens.weight": (40, 5),
    "model.layers.0.mlp.up_proj.weight": (11, 13),
    "model.norm.weight": (9,),
}
NUM = sum(math.prod(shape) for shape in SHAPES.values())


def masks_of(members):
    """Bool masks by parameter from a set of global coordinates."""
    whole = torch.zeros(NUM, dtype=torch.bool)
    whole[sorted(members)] = True
    pieces = whole.split([math.prod(shape) for shape in SHAPES.values()])
    return {name: piece.view(shape) for (name, shape), piece in zip(SHAPES.items(), pieces, strict=True)}


def draw(seed, size):
    return set(random.Random(seed).sample(range(NUM), size))


@pytest.mark.parametrize("size", [1, 17, 200, NUM - 1])
def test_recall_and_retention_are_equations_7_and_12(size):
    a, b, everything = draw(0, size), draw(1, size), set(range(NUM))
    sets = overlap(masks_of(a), masks_of(b))
    assert sets == (size, size, len(a & b), NUM)
    assert recall(sets) == pytest.approx((100 * len(a & b) / size, 100 * size / NUM))
    low, high = retention(sets)
    assert low == pytest.approx((100 * len((everything - a) & (everything - b)) / (NUM - size), 100 - 100 * size / NUM))
    assert high == pytest.approx((100 * len(a & b) / size, 100 * size / NUM))


@pytest.mark.parametrize(("first", "second"), [(30, 70), (1, NUM), (50, 50)])
def test_jaccard_beside_simulated_random_sets(first, second):
    a, b = draw(2, first), draw(3, second)
    sets = overlap(masks_of(a), masks_of(b))
    assert jaccard(sets).value == pytest.approx(100 * len(a & b) / len(a | b))
    both = [len(draw(10 + 2 * i, first) & draw(11 + 2 * i, second)) for i in range(2000)]
    mean = sum(both) / len(both)
    assert jaccard(sets).random == pytest.approx(100 * mean / (first + second - mean), rel=0.03)


def test_random_baselines_of_the_paper():
    """Last row of table 4, up to the rounding of K; chance 0.503% of two 1% sets."""
    sets = Overlap(500, 500, 1, 1_000_000)
    assert retention(sets).low.random == pytest.approx(99.95)
    assert retention(sets).high.random == pytest.approx(0.05)
    assert jaccard(Overlap(10_000, 10_000, 0, 1_000_000)).random == pytest.approx(0.5025, abs=1e-4)


def test_sets_of_different_size_or_parameters_are_refused():
    sets = overlap(masks_of(draw(0, 5)), masks_of(draw(0, 6)))
    for measure in (recall, retention):
        with pytest.raises(UserError, match=r"sets hold 5 and 6 coordinates"):
            measure(sets)
    with pytest.raises(UserError, match="'x' is in one of the two only"):
        overlap(masks_of({1}), masks_of({1}) | {"x": torch.ones(1) > 0})
    with pytest.raises(UserError, match=r"has shape \[9\] in one and \[8\]"):
        overlap(masks_of({1}), masks_of({1}) | {"model.norm.weight": torch.ones(8) > 0})


def test_undefined_measures_are_nan():
    full = overlap(masks_of(range(NUM)), masks_of(range(NUM)))
    assert math.isnan(retention(full).low.value)
    assert retention(full).high.value == 100
    zero = fisher_sums({name: torch.zeros(shape) for name, shape in SHAPES.items()}, masks_of({1}))
    assert math.isnan(fisher_share(zero).value)


def vector(seed):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g).mul(4).exp() for name, shape in SHAPES.items()}


def flat(tensors):
    return [x for tensor in tensors.values() for x in tensor.double().flatten().tolist()]


@pytest.mark.parametrize("chunk", [7, 2**19])
def test_sums_share_and_magnitude_ratio(monkeypatch, chunk):
    monkeypatch.setattr(measures, "CHUNK", chunk)
    high, now, initial = draw(4, 60), vector(0), vector(1)
    low = sorted(set(range(NUM)) - high)
    masks = masks_of(high)
    sums_now, sums_initial = fisher_sums(now, masks), fisher_sums(initial, masks)
    assert sums_now.inside == pytest.approx(math.fsum(flat(now)[i] for i in high), rel=1e-12)
    assert sums_now.total == pytest.approx(math.fsum(flat(now)), rel=1e-12)
    assert sums_now[2:] == (60, NUM)
    held = 100 * math.fsum(flat(now)[i] for i in high) / math.fsum(flat(now))
    assert fisher_share(sums_now) == pytest.approx((held, 100 * 60 / NUM))

    def mean(values):
        return math.fsum(flat(values)[i] for i in low) / len(low)

    ratio = magnitude_ratio(sums_now, sums_initial)
    assert ratio.low == pytest.approx(mean(now) / mean(initial), rel=1e-9)
    assert ratio.all == pytest.approx(math.fsum(flat(now)) / math.fsum(flat(initial)), rel=1e-12)


def test_sums_are_exact_where_fp32_sums_are_not():
    values = {"a": torch.cat([torch.tensor([2.0**24]), torch.ones(1000)])}
    sums = fisher_sums(values, {"a": torch.arange(1001) > 0})
    assert (sums.inside, sums.total) == (1000, 2**24 + 1000)


def test_parts_add_up_through_all_reduce():
    """The second process is played by adding what the other half of the rows gives."""
    a, b, values = masks_of(draw(5, 80)), masks_of(draw(6, 80)), vector(2)

    def half(tensors, which):
        return {name: t.tensor_split(2)[which] for name, t in tensors.items()}

    def counterpart(measure, *tensors):
        collected = []
        measure(*(half(t, 1) for t in tensors), all_reduce=lambda t: collected.append(t.clone()))
        return measure(*(half(t, 0) for t in tensors), all_reduce=lambda t: t.add_(collected[0]))

    assert counterpart(overlap, a, b) == overlap(a, b)
    assert counterpart(fisher_sums, values, a) == pytest.approx(fisher_sums(values, a))
    got, want = counterpart(by_module, values), by_module(values)
    assert list(got) == list(want)
    assert all(got[place] == pytest.approx(want[place]) for place in want)


def test_density_and_share_by_module():
    values = {
        "model.layers.0.self_attn.q_proj.weight": torch.full((2, 5), 3.0),
        "model.layers.0.self_attn.q_proj.bias": torch.full((2,), 4.0),
        "model.layers.1.self_attn.q_proj.weight": torch.full((2, 5), 1.0),
        "model.embed_tokens.weight": torch.full((8,), 1.0),
    }
    masks = {name: torch.zeros_like(v, dtype=torch.bool) for name, v in values.items()}
    masks["model.layers.0.self_attn.q_proj.weight"][0] = True
    masks["model.layers.0.self_attn.q_proj.bias"][0] = True
    groups = by_module(values)
    assert groups == {Place(0, "q"): (38, 12), Place(1, "q"): (10, 10), Place(None, "embedding"): (8, 8)}
    assert share(groups)[Place(0, "q")] == pytest.approx((100 * 38 / 56, 100 * 12 / 30))
    assert sum(s.value for s in share(groups).values()) == pytest.approx(100)
    assert sum(s.random for s in share(groups).values()) == pytest.approx(100)
    selected = density(by_module(masks))
    assert selected[Place(0, "q")] == pytest.approx((100 * 6 / 12, 100 * 6 / 30))
    assert selected[Place(1, "q")] == pytest.approx((0, 100 * 6 / 30))


SMALL = {"vocab_size": 16, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 8}
SMALL |= {"num_key_value_heads": 1, "head_dim": 4}


def places_of(model: nn.Module):
    return {name: where(name) for name, _ in model.named_parameters()}


@pytest.mark.parametrize("config", [LlamaConfig(**SMALL, tie_word_embeddings=False), Gemma3TextConfig(**SMALL)])
def test_places_of_real_models(config):
    with torch.device("meta"):
        places = places_of(AutoModelForCausalLM.from_config(config))
    per_layer = set(MODULES) - {"embedding", "head", "other"}
    assert {p.module for p in places.values() if p.layer is not None} == per_layer
    for layer in (0, 1):
        inside = [name for name, place in places.items() if place.layer == layer]
        assert all(f".layers.{layer}." in name for name in inside)
        for module in per_layer - {"norm"}:
            assert (
                [n for n in inside if places[n].module == module]
                == [n for n in inside if f".{module}_proj." in n]
                != []
            )
    outside = {name: place.module for name, place in places.items() if place.layer is None}
    tied = config.tie_word_embeddings
    assert outside == {"model.embed_tokens.weight": "embedding", "model.norm.weight": "norm"} | (
        {} if tied else {"lm_head.weight": "head"}
    )


def test_fused_projections_are_other(tiny_model):
    with torch.device("meta"):
        phi = places_of(AutoModelForCausalLM.from_config(Phi3Config(**{**SMALL, "pad_token_id": 0})))
        gpt = places_of(AutoModelForCausalLM.from_config(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=16)))
    assert phi["model.layers.1.self_attn.qkv_proj.weight"] == (1, "other")
    assert phi["model.layers.1.mlp.gate_up_proj.weight"] == (1, "other")
    assert phi["model.layers.0.self_attn.o_proj.weight"] == (0, "o")
    assert gpt["transformer.h.0.attn.c_attn.weight"] == (0, "other")
    assert gpt["transformer.h.0.ln_1.bias"] == (0, "norm")
    assert gpt["transformer.ln_f.weight"] == (None, "norm")
    assert gpt["transformer.wte.weight"] == gpt["transformer.wpe.weight"] == (None, "embedding")
    qwen = places_of(tiny_model)
    assert qwen["model.layers.1.self_attn.q_norm.weight"] == (1, "norm")
    assert qwen["model.layers.1.self_attn.q_proj.weight"] == (1, "q")


def test_adapters_count_as_their_projection():
    assert where("base_model.model.model.layers.12.mlp.down_proj.lora_A.default.weight") == (12, "down")
    assert where("model.layers.3.mlp.experts.5.gate_proj.weight") == (3, "gate")
    assert where("model.layers.3.mlp.gate.weight") == (3, "other")
    assert where("layers.4.layernorm_mlp.up_proj.weight") == (4, "up")
