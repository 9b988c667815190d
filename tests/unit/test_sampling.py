import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.logits_process import MinPLogitsWarper

from fisher_lit.errors import UserError
from fisher_lit.rollout.sampling import Sampling, derive_seed, draw, next_token_logprobs


@pytest.mark.parametrize(
    ("sampling", "warper"),
    [
        (Sampling(temperature=0.7), TemperatureLogitsWarper(0.7)),
        (Sampling(top_k=5), TopKLogitsWarper(5)),
        (Sampling(top_p=0.7), TopPLogitsWarper(0.7)),
        (Sampling(min_p=0.2), MinPLogitsWarper(0.2)),
    ],
)
def test_each_knob_agrees_with_transformers(sampling, warper):
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) * 2
    want = warper(None, logits.clone()).log_softmax(-1)
    torch.testing.assert_close(next_token_logprobs(logits, sampling), want)


def test_knobs_that_keep_everything_keep_everything():
    logits = torch.randn(3, 7)
    full = next_token_logprobs(logits, Sampling())
    torch.testing.assert_close(full, logits.log_softmax(-1))
    torch.testing.assert_close(next_token_logprobs(logits, Sampling(top_k=7)), full)


def test_ties_never_widen_top_k():
    kept = next_token_logprobs(torch.zeros(1, 6), Sampling(top_k=2)).isfinite()
    assert kept.sum() == 2


def test_temperature_zero_is_the_first_most_likely_token():
    logprobs = next_token_logprobs(torch.tensor([[1.0, 3.0, 3.0]]), Sampling(temperature=0))
    assert logprobs.tolist() == [[-torch.inf, 0.0, -torch.inf]]
    assert draw(logprobs, torch.tensor([0.999], dtype=torch.float64)).item() == 1


def test_draws_follow_the_distribution():
    logprobs = torch.randn(9, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    uniforms = torch.rand(100_000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    counts = torch.bincount(draw(logprobs.expand(100_000, 9), uniforms), minlength=9).double().numpy()
    expected = 100_000 * logprobs.double().exp().numpy()
    # The 99.9% quantile of chi-square with 8 degrees of freedom.
    assert ((counts - expected) ** 2 / expected).sum() < 26.1


@pytest.mark.parametrize("uniform", [0.0, 0.5, np.nextafter(1.0, 0.0)])
def test_impossible_tokens_are_never_drawn(uniform):
    logprobs = torch.tensor([[-torch.inf, 0.3, -torch.inf, 0.7, -torch.inf]]).log_softmax(-1)
    assert draw(logprobs, torch.tensor([uniform], dtype=torch.float64)).item() in (1, 3)


def test_seeds_are_stable_and_distinct():
    assert derive_seed("train", 0, 1) == 2376528315726723075
    seeds = {derive_seed(a, b, c) for a in ("train", "eval") for b in range(30) for c in range(30)}
    assert len(seeds) == 1800
    assert all(0 <= s < 2**63 for s in seeds)


@pytest.mark.parametrize(
    ("setting", "value"), [("temperature", -1), ("top_p", 0), ("top_p", 1.5), ("top_k", 0), ("min_p", 1)]
)
def test_bad_settings_are_named(setting, value):
    with pytest.raises(UserError, match=rf"`{setting}` must be .* got {value}"):
        Sampling(**{setting: value})
