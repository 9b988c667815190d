import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from fisher_lit.errors import EngineError, UserError
from fisher_lit.rollout.engine import SampleRequest
from fisher_lit.rollout.sampling import Sampling
from fisher_lit.rollout.vllm_requests import check_lengths, check_sampling, sampling_parameters
from fisher_lit.rollout.weight_sync import (
    check_probe,
    checkpoint_weights,
    fingerprint,
    probe_tokens,
    trainer_logprobs,
)

SIZES = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


def models():
    torch.manual_seed(0)
    experts = {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    return {
        "tied": Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
        "untied": Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)),
        "experts": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts)),
    }


@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
def test_weights_are_those_of_a_saved_checkpoint(tmp_path, kind):
    model = models()[kind]
    model.save_pretrained(tmp_path)
    want = load_file(tmp_path / "model.safetensors")
    got = list(checkpoint_weights(model, torch.float32))
    assert [name for name, _ in got] == [name for name, _ in checkpoint_weights(model, torch.float32)]
    weights = dict(got)
    if kind == "tied":
        assert torch.equal(weights.pop("lm_head.weight"), want["model.embed_tokens.weight"])
    assert weights.keys() == want.keys()
    assert all(torch.equal(weights[name], value) for name, value in want.items())
    halves = dict(checkpoint_weights(model, torch.bfloat16))
    assert all(torch.equal(halves[name], value.bfloat16()) for name, value in want.items())


def flip_sign(weight):
    weight[0, 0] *= -1


def swap_rows(weight):
    weight[[0, 1]] = weight[[1, 0]]


def one_ulp(weight):
    weight.view(torch.int32)[-1, -1] += 1


def negate(weight):
    weight.neg_()


@pytest.mark.parametrize("edit", [flip_sign, swap_rows, one_ulp, negate])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"])
def test_fingerprint_sees_every_edit(edit, name):
    model = models()["tied"]
    before = fingerprint(model)
    assert fingerprint(model) == before
    weight = model.get_parameter(name).data
    copy = weight.clone()
    edit(weight)
    assert fingerprint(model) != before
    weight.copy_(copy)
    assert fingerprint(model) == before


def test_fingerprint_of_other_dtypes():
    model = models()["untied"]
    found = {fingerprint(model.to(dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float64)}
    assert len(found) == 3


def test_probe_is_the_trainers_own_forward():
    model = models()["untied"].double()
    tokens = probe_tokens(model, 64)
    assert len(tokens) == 32
    assert len(probe_tokens(model, 10)) == 9
    logprobs = trainer_logprobs(model, tokens)
    for t in range(1, len(tokens)):
        logits = model(torch.tensor([tokens[:t]])).logits[0, -1]
        assert float(logprobs[t - 1]) == pytest.approx(float(logits.log_softmax(-1)[tokens[t]]), abs=1e-5)


@pytest.mark.parametrize(
    ("gap", "dtype", "tolerance", "passes"),
    [(5e-4, torch.float32, None, True), (2e-3, torch.float32, None, False), (0.05, torch.bfloat16, None, True),
     (0.2, torch.bfloat16, None, False), (0.2, torch.bfloat16, 0.3, True), (math.nan, torch.float32, None, False)],
)  # fmt: skip
def test_probe_bound(gap, dtype, tolerance, passes):
    trainer = torch.tensor([-1.0, -2.0])
    engine = [-1.0 - 2 * gap, -2.0]
    if passes:
        assert check_probe(engine, trainer, dtype=dtype, tolerance=tolerance) == pytest.approx(gap, rel=1e-3)
    else:
        with pytest.raises(EngineError, match=f"differ from the trainer's by {gap:.3g} nats per token, more than"):
            check_probe(engine, trainer, dtype=dtype, tolerance=tolerance)


def test_every_knob_is_explicit():
    request = SampleRequest((1, 2), 2**63 - 1)
    knobs = sampling_parameters(request, Sampling(), 7, frozenset([5, 3]))
    assert (knobs["temperature"], knobs["top_p"], knobs["top_k"], knobs["min_p"]) == (1.0, 1.0, 0, 0.0)
    assert (knobs["seed"], knobs["max_tokens"], knobs["stop_token_ids"]) == (2**63 - 1, 7, [3, 5])
    assert sampling_parameters(request, Sampling(top_k=4), 7, frozenset())["top_k"] == 4


def test_requests_that_vllm_would_change_are_refused():
    for accepted in (Sampling(), Sampling(temperature=0), Sampling(temperature=0.01, min_p=0.1, top_k=3)):
        check_sampling(accepted)
    with pytest.raises(UserError, match="`temperature` of 0 or from"):
        check_sampling(Sampling(temperature=0.009))
    check_lengths([SampleRequest((1, 2), 0)], 6, 8)
    with pytest.raises(UserError, match="a prompt of 2 tokens and a response of 7 are more than"):
        check_lengths([SampleRequest((1,), 0), SampleRequest((1, 2), 0)], 7, 8)
