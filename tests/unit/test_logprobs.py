import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig

from fisher_lit.errors import UserError
from fisher_lit.logprobs import check_head, response_logprobs
from fisher_lit.rollout.batch import Rollout, collate
from probes import LargestTensor


def random_rollouts(count, vocab_size, *, longest=12, seed=0):
    g = torch.Generator().manual_seed(seed)

    def tokens():
        length = int(torch.randint(1, longest, (1,), generator=g))
        return tuple(torch.randint(0, vocab_size, (length,), generator=g).tolist())

    result = []
    for i in range(count):
        response = tokens()
        result.append(Rollout(str(i), "", "", 0, tokens(), response, (0.0,) * len(response), "stop", ""))
    return result


def one_at_a_time(model, rollout, temperature):
    """Log-probabilities and entropies of one unpadded sequence from the model's own forward, float64 softmax."""
    ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
    logits = model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1].double() / temperature
    logprobs = logits.log_softmax(-1)
    chosen = logprobs[range(len(logprobs)), list(rollout.response_ids)]
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
def test_padded_chunked_scores_equal_one_sequence_at_a_time(tiny_model, temperature, chunk_tokens):
    tiny_model.double()
    rollouts = random_rollouts(9, 20)
    scores = response_logprobs(
        tiny_model, collate(rollouts, pad_id=0), temperature=temperature, chunk_tokens=chunk_tokens
    )
    chosen, entropy = zip(*[one_at_a_time(tiny_model, r, temperature) for r in rollouts], strict=True)
    torch.testing.assert_close(scores.logprobs, torch.cat(chosen), rtol=0, atol=1e-12)
    torch.testing.assert_close(scores.entropy, torch.cat(entropy), rtol=0, atol=1e-12)


def test_gradient_equals_the_unchunked_one(tiny_model):
    tiny_model.double()
    rollouts = random_rollouts(6, 20)
    weights = torch.randn(sum(len(r.response_ids) for r in rollouts), dtype=torch.float64)
    loss = (weights * response_logprobs(tiny_model, collate(rollouts, pad_id=0), chunk_tokens=4).logprobs).sum()
    got = torch.autograd.grad(loss, list(tiny_model.parameters()))
    chosen = torch.cat([one_at_a_time(tiny_model, r, 1.0)[0] for r in rollouts])
    want = torch.autograd.grad((weights * chosen).sum(), list(tiny_model.parameters()))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


def test_logits_of_all_tokens_never_exist_at_once(tokenizer):
    config = GraniteConfig(
        vocab_size=5000, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    rollouts = random_rollouts(8, 5000, longest=60)
    num_tokens = sum(len(r.response_ids) for r in rollouts)
    with LargestTensor() as seen:
        response_logprobs(model, collate(rollouts, pad_id=0), chunk_tokens=16).logprobs.sum().backward()
    assert num_tokens > 5 * 16
    # The head's weight gradient and one chunk of logits are the largest.
    assert seen.largest == 5000 * 16


SMALL = {
    "vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        CohereConfig(**SMALL, logit_scale=0.3),
        GraniteConfig(**SMALL, logits_scaling=4.0),
        Gemma2Config(**SMALL, final_logit_softcapping=0.05, query_pre_attn_scalar=8),
    ],
    ids=["logit_scale", "logits_scaling", "softcap"],
)
def test_heads_that_scale_or_cap_their_logits(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    check_head(model)
    rollouts = random_rollouts(3, 30)
    want = torch.cat([one_at_a_time(model, r, 1.0)[0] for r in rollouts])
    got = response_logprobs(model, collate(rollouts, pad_id=0)).logprobs
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


def test_a_head_that_does_more_is_refused(tiny_model):
    tiny_model.config.logit_scale = 0.5  # Qwen3 does not scale, so the two paths differ now.
    with pytest.raises(UserError, match="Qwen3ForCausalLM does more"):
        check_head(tiny_model)


def test_scores_are_float32_under_bf16_autocast(tiny_model):
    with torch.autocast("cpu", torch.bfloat16):
        scores = response_logprobs(tiny_model, collate(random_rollouts(2, 20), pad_id=0))
    assert scores.logprobs.dtype == torch.float32
