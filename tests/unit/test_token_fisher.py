from collections import Counter

import pytest
import torch

import reference
from fisher_lit.errors import UserError
from fisher_lit.fisher.token_fisher import ParameterGroups, _draw_pairs, exact_token_fisher, token_fisher
from fisher_lit.rollout.batch import Rollout

torch.set_num_threads(1)

PROMPT, HORIZON, STOP = (1, 2), 2, 0


def make_rollout(response, prompt=PROMPT, index=0):
    return Rollout(
        problem_id=f"p{index}",
        question="",
        gold="",
        sample=0,
        prompt_ids=tuple(prompt),
        response_ids=tuple(response),
        logprobs=(0.0,) * len(response),
        finish_reason="stop",
        text="",
    )


@pytest.fixture(scope="module")
def model():
    return reference.exact_qwen3(4, num_layers=1)


@pytest.fixture(scope="module")
def masks(model):
    """Three nested random groups."""
    g = torch.Generator().manual_seed(0)
    keys = {n: torch.rand(p.shape, generator=g) for n, p in model.named_parameters()}
    return [{n: k < share for n, k in keys.items()} for share in (0.9, 0.5, 0.1)]


@pytest.mark.parametrize("response", [(3, 1, 0), (0,), (2, 2)])
def test_exact_values_equal_both_forms(model, response):
    """Eq. 9: the definition, the variance and the pairs; eq. 11: the pairs under the uniform distribution."""
    for position in range(len(response)):
        prefix = PROMPT + response[:position]
        probs, sensitivities = reference.logit_sensitivities(model, prefix)
        real, uniform = map(reference.flatten, exact_token_fisher(model, make_rollout(response), position))
        torch.testing.assert_close(real, reference.token_fisher_by_scores(model, prefix), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(real, reference.token_fisher_by_pairs(probs, sensitivities), rtol=1e-9, atol=1e-12)
        equal = torch.full_like(probs, 1 / len(probs))
        torch.testing.assert_close(
            uniform, reference.token_fisher_by_pairs(equal, sensitivities), rtol=1e-9, atol=1e-12
        )


def test_token_fishers_add_up_to_the_model_fisher(model):
    """Eq. 8, with the exact token Fisher at every prefix."""
    total = sum(
        w * reference.flatten(exact_token_fisher(model, make_rollout((*prefix, STOP)), len(prefix))[0])
        for prefix, w in reference.reachable_prefixes(model, PROMPT, HORIZON, STOP)
    )
    want = reference.flatten(reference.exact_fisher(model, PROMPT, HORIZON, STOP))
    torch.testing.assert_close(total, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("batched", [True, False])
def test_pair_means_converge(model, masks, batched):
    """20,000 pairs per position: every group within 4 standard errors of the mean over the response's positions."""
    response, num_pairs = (3, 1, 2, 0), 20_000
    got = token_fisher(
        model, [make_rollout(response)], seed=3, masks=masks, num_positions=4, num_pairs=num_pairs, batched=batched
    )
    groups = ParameterGroups(dict(model.named_parameters()), masks)
    for condition, values in enumerate((got.real, got.uniform)):
        exact, variance = torch.zeros(4).double(), torch.zeros(4).double()
        for position in range(4):
            exact += groups.means(exact_token_fisher(model, make_rollout(response), position)[condition]) / 4
            probs, j = reference.logit_sensitivities(model, PROMPT + response[:position])
            weights = probs if condition == 0 else torch.full_like(probs, 1 / len(probs))
            distances = 0.5 * (j[:, None] - j[None]).square().view(16, -1)
            members = [torch.ones_like(j[0]), *(reference.flatten(m).double() for m in masks)]
            terms = torch.stack([(distances * m).sum(1) / m.sum() for m in members], dim=1)
            pair_weights = torch.outer(weights, weights).flatten()
            variance += ((pair_weights @ terms**2) - (pair_weights @ terms) ** 2) / num_pairs / 16
        assert bool(((values[0] - exact).abs() < 4 * variance.sqrt()).all())
        assert bool((variance.sqrt() < 0.02 * exact).all())


def random_rollouts(count, vocab_size, longest=12):
    g = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, longest, (count,), generator=g).tolist()
    return [make_rollout(torch.randint(vocab_size, (n,), generator=g).tolist(), index=i) for i, n in enumerate(lengths)]


def test_batches_change_nothing(model, masks):
    rollouts = random_rollouts(6, 4)
    want = token_fisher(model, rollouts, seed=1, masks=masks, batched=False)
    for options in ({"batched": True}, {"batched": True, "batch_tokens": 30}, {}):
        got = token_fisher(model, rollouts, seed=1, masks=masks, **options)
        torch.testing.assert_close(got.real, want.real, rtol=1e-10, atol=0)
        torch.testing.assert_close(got.uniform, want.uniform, rtol=1e-10, atol=0)
        assert got.num_backward == want.num_backward
    # A response's draws do not depend on the others, nor on the groups.
    alone = token_fisher(model, rollouts[3:4], seed=1)
    torch.testing.assert_close(alone.real, want.real[3:4, :1], rtol=1e-10, atol=0)
    assert not torch.equal(token_fisher(model, rollouts, seed=2).uniform, want.uniform[:, :1])


def test_sums_follow_the_drawn_pairs(model):
    """The mean over all pairs, equal ones as 0, from the oracle's sensitivities."""
    rollout = make_rollout((3, 1, 2))
    got = token_fisher(model, [rollout], seed=9)
    pairs = _draw_pairs(model, rollout, 9, 8, 8)
    for drawn, value in zip(pairs, (got.real, got.uniform), strict=True):
        total = 0.0
        for position, a, b, times in drawn:
            _, j = reference.logit_sensitivities(model, PROMPT + (3, 1, 2)[:position])
            total += times * float((j[a] - j[b]).square().mean()) / 2
        assert float(value) == pytest.approx(total / 64, rel=1e-9)
    assert got.num_backward == len(pairs[0]) + len(pairs[1])


def test_draws_follow_their_distributions(model):
    """Ordered pairs fall together: (a, b) with a < b has probability 2 p_a p_b; both conditions share positions."""
    rollout, num_pairs = make_rollout((3,)), 40_000
    real, uniform = _draw_pairs(model, rollout, 0, 1, num_pairs)
    probs = reference.next_token_logits(model, PROMPT).softmax(-1).detach()
    for drawn, weights in ((real, probs), (uniform, torch.full((4,), 0.25))):
        seen = {(a, b): times for _, a, b, times in drawn}
        for a in range(4):
            for b in range(a + 1, 4):
                p = 2 * float(weights[a] * weights[b])
                assert abs(seen.get((a, b), 0) / num_pairs - p) < 4 * (p * (1 - p) / num_pairs) ** 0.5 + 1e-9


@pytest.mark.parametrize(("num_tokens", "times"), [(20, {1}), (8, {1}), (5, {1, 2}), (3, {2, 3}), (1, {8})])
def test_positions_cover_the_response_evenly(model, num_tokens, times):
    """Eight different positions where there are as many; otherwise each as often as the others, give or take one."""
    # So many pairs that every position has unequal ones.
    totals = Counter()
    for seed in range(40):
        _, uniform = _draw_pairs(model, make_rollout((1,) * num_tokens), seed, 8, 30)
        counts = Counter()
        for position, _, _, n in uniform:
            counts[position] += n
        assert len(counts) == min(8, num_tokens)
        # 30 pairs per visit, a quarter of them equal.
        visits = {position: round(n / 22.5) for position, n in counts.items()}
        assert all(abs(counts[p] / 22.5 - visits[p]) < 0.8 for p in counts)
        totals.update(counts.keys())
    # 40 × 8/n visits of each position expected; every position is reached.
    assert set(totals) == set(range(num_tokens))
    if num_tokens == 20:
        assert all(5 <= n <= 28 for n in totals.values())


def test_a_certain_next_token_gives_no_real_pairs():
    """Equal pairs count as 0, stay in the count and cost no backward pass."""
    model = reference.exact_qwen3(4, num_layers=1, spread=300.0)
    rollout = make_rollout((3,))
    assert float(reference.next_token_logits(model, PROMPT).softmax(-1).detach().max()) > 1 - 1e-6
    real, uniform = _draw_pairs(model, rollout, 0, 8, 8)
    assert real == []
    got = token_fisher(model, [rollout], seed=0)
    assert float(got.real) == 0
    assert float(got.uniform) > 0
    assert got.num_backward == len(uniform) <= 6


def test_uniform_pairs_reach_the_whole_vocabulary():
    _, uniform = _draw_pairs(reference.exact_qwen3(37, num_layers=1), make_rollout((1,)), 0, 1, 500)
    assert {token for _, a, b, _ in uniform for token in (a, b)} == set(range(37))


def test_group_means(model, masks):
    groups = ParameterGroups(dict(model.named_parameters()), masks)
    vector = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    flat = reference.flatten(vector)
    want = [flat.mean()] + [flat[reference.flatten(mask)].mean() for mask in masks]
    torch.testing.assert_close(groups.means(vector), torch.stack(want), rtol=1e-12, atol=1e-14)
    assert groups.sizes == [len(flat)] + [int(reference.flatten(mask).sum()) for mask in masks]


def test_bad_groups_are_refused(model, masks):
    parameters = dict(model.named_parameters())
    with pytest.raises(UserError, match="largest first"):
        ParameterGroups(parameters, masks[::-1])
    with pytest.raises(UserError, match="no mask of shape"):
        ParameterGroups(parameters, [{}])
    with pytest.raises(UserError, match="empty"):
        ParameterGroups(parameters, [{n: torch.zeros_like(m) for n, m in masks[0].items()}])
    with pytest.raises(UserError, match="num_pairs"):
        token_fisher(model, [], seed=0, num_pairs=0)


def test_the_model_is_left_as_it_was(model):
    parameters = dict(model.named_parameters())
    kept = parameters["model.norm.weight"]
    kept.grad = grad = torch.full_like(kept, 3.0)
    state, seen = torch.get_rng_state(), []
    for batched in (True, False):
        with torch.no_grad():
            token_fisher(model, random_rollouts(2, 4), seed=0, batched=batched, progress=seen.append)
            exact_token_fisher(model, make_rollout((1,)), 0)
    assert seen == [1] * 4
    assert kept.grad is grad
    assert bool((grad == 3).all())
    assert all(p.grad is None and p.requires_grad for n, p in parameters.items() if p is not kept)
    assert torch.equal(torch.get_rng_state(), state)
    kept.grad = None


@pytest.mark.parametrize("batched", [True, False])
def test_autocast_changes_little(batched):
    model, rollouts = reference.exact_qwen3(4).float(), random_rollouts(4, 4)
    want = token_fisher(model, rollouts, seed=0, batched=batched)
    with torch.autocast("cpu", torch.bfloat16):
        got = token_fisher(model, rollouts, seed=0, batched=batched)
    torch.testing.assert_close(got.uniform.mean(), want.uniform.mean(), rtol=0.05, atol=0)
    assert not torch.equal(got.uniform, want.uniform)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(use_reentrant):
    model = reference.exact_qwen3(4)
    rollouts = random_rollouts(2, 4)
    want = token_fisher(model, rollouts, seed=0, batched=False)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    got = token_fisher(model.train(), rollouts, seed=0, batched=False)
    torch.testing.assert_close(got.uniform, want.uniform, rtol=1e-10, atol=0)
