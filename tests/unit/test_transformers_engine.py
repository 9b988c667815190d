import pytest
import torch

from fisher_lit.errors import UserError
from fisher_lit.logprobs import response_logprobs
from fisher_lit.rollout.batch import Rollout, collate
from fisher_lit.rollout.engine import SampleRequest
from fisher_lit.rollout.sampling import Sampling
from fisher_lit.rollout.transformers_engine import TransformersEngine

EOS = 1


def requests(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (count,), generator=g).tolist()
    return [
        SampleRequest(tuple(torch.randint(2, 20, (n,), generator=g).tolist()), seed=1000 + i)
        for i, n in enumerate(lengths)
    ]


def generate(model, batch, *, max_batch_size=64, max_new_tokens=12, sampling=Sampling(), stop_ids=frozenset([EOS])):
    engine = TransformersEngine(max_batch_size)
    engine.sync_weights(model)
    return engine.generate(batch, sampling=sampling, max_new_tokens=max_new_tokens, stop_ids=stop_ids)


def test_logprobs_are_those_of_a_forward_without_cache(tiny_model):
    batch = requests(40)
    samples = generate(tiny_model, batch)
    rollouts = [
        Rollout(str(i), "", "", 0, r.prompt_ids, s.token_ids, s.logprobs, s.finish_reason, "")
        for i, (r, s) in enumerate(zip(batch, samples, strict=True))
    ]
    micro = collate(rollouts, pad_id=0)
    with torch.no_grad():
        want = response_logprobs(tiny_model, micro).logprobs
    torch.testing.assert_close(micro.sampler_logprobs, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("max_batch_size", [1, 3, 7])
def test_results_do_not_depend_on_batching(tiny_model, max_batch_size):
    batch = requests(30)
    whole = generate(tiny_model, batch)
    parts = generate(tiny_model, batch, max_batch_size=max_batch_size)
    assert [s.token_ids for s in parts] == [s.token_ids for s in whole]
    reordered = generate(tiny_model, batch[::-1])[::-1]
    assert [s.token_ids for s in reordered] == [s.token_ids for s in whole]
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=2e-5)


def test_greedy_equals_transformers_generate(tiny_model):
    batch = requests(12)
    for request, sample in zip(batch, generate(tiny_model, batch, sampling=Sampling(temperature=0)), strict=True):
        ids = torch.tensor([request.prompt_ids])
        want = tiny_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=EOS,
            pad_token_id=0,
        )[0, ids.shape[1] :]
        assert list(sample.token_ids) == want.tolist()


def test_first_tokens_follow_the_softmax(tiny_model):
    prompt = (5, 13, 6)
    samples = generate(
        tiny_model, [SampleRequest(prompt, s) for s in range(20_000)], max_batch_size=5_000, max_new_tokens=1
    )
    counts = torch.bincount(torch.tensor([s.token_ids[0] for s in samples]), minlength=20).double()
    with torch.no_grad():
        expected = 20_000 * tiny_model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
    common = expected > 5
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    # The 99.9% quantile of chi-square with 19 degrees of freedom bounds that with fewer.
    assert common.sum() > 5
    assert statistic < 43.8


def test_stop_tokens_stay_and_truncation_adds_nothing(tiny_model):
    samples = generate(tiny_model, requests(200), max_new_tokens=5)
    reasons = {s.finish_reason for s in samples}
    assert reasons == {"stop", "length"}
    for s in samples:
        assert (s.token_ids[-1] == EOS) == (s.finish_reason == "stop")
        assert EOS not in s.token_ids[:-1]
        assert len(s.token_ids) == len(s.logprobs)
        assert s.finish_reason == "stop" or len(s.token_ids) == 5


def test_several_stop_tokens(tiny_model):
    samples = generate(tiny_model, requests(50), max_new_tokens=30, stop_ids=frozenset([EOS, 7, 9]))
    assert {s.token_ids[-1] for s in samples if s.finish_reason == "stop"} == {EOS, 7, 9}


def test_seeds_decide_the_response(tiny_model):
    prompt = (5, 13, 6)
    a, b, c = generate(tiny_model, [SampleRequest(prompt, 1), SampleRequest(prompt, 1), SampleRequest(prompt, 2)])
    assert a.token_ids == b.token_ids
    assert a.token_ids != c.token_ids


def test_global_random_numbers_are_left_alone(tiny_model):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    generate(tiny_model, requests(3))
    assert torch.equal(before, torch.get_rng_state())
    assert tiny_model.training


def test_model_generation_config_is_ignored(tiny_model):
    plain = generate(tiny_model, requests(20))
    tiny_model.generation_config.update(temperature=0.1, top_k=1, top_p=0.1, eos_token_id=3, do_sample=True)
    assert [s.token_ids for s in generate(tiny_model, requests(20))] == [s.token_ids for s in plain]


def test_logprobs_under_a_cut_distribution(tiny_model):
    for sample in generate(tiny_model, requests(20), sampling=Sampling(top_k=1)):
        assert sample.logprobs == (0.0,) * len(sample.token_ids)


def test_bad_batch_size():
    with pytest.raises(UserError, match="`max_batch_size` must be at least 1, got 0"):
        TransformersEngine(0)
