import pytest
import torch

import reference
from fisher_lit.errors import UserError
from fisher_lit.fisher.bound import (
    check_bound,
    demonstration_signal,
    full_vocabulary_signal,
    sum_by_response,
    teacher_return,
)
from fisher_lit.fisher.estimators import FisherEstimator, GradientEstimator
from fisher_lit.objectives import group_advantages
from fisher_lit.rollout.batch import Rollout

torch.set_num_threads(1)

PROMPT, HORIZON, STOP = (1, 2), 3, 0


class Enumerated:
    """A student and a teacher of vocabulary 3, and every response to one prompt."""

    def __init__(self):
        self.model = reference.exact_qwen3(3)
        self.teacher = reference.exact_qwen3(3, seed=1)
        self.demonstrator = reference.exact_qwen3(3, seed=2)
        self.responses = reference.enumerate_responses(3, HORIZON, STOP)
        self.row = torch.tensor([m for m, y in enumerate(self.responses) for _ in y])
        self.logprobs, self.teacher_logprobs, self.demonstration_logprobs = (
            torch.cat([reference.token_logprobs(m, PROMPT, y).detach() for y in self.responses])
            for m in (self.model, self.teacher, self.demonstrator)
        )
        self.weights = sum_by_response(self.logprobs, self.row, len(self.responses)).exp()
        self.rewards = torch.tensor([float(y.count(2)) for y in self.responses], dtype=torch.float64)
        scores = [reference.score(self.model, PROMPT, y) for y in self.responses]
        self.scores = torch.stack([reference.flatten(h) for h in scores])

    def probability(self, response):
        """π(y | x), with its gradient."""
        return reference.token_logprobs(self.model, PROMPT, response).sum().exp()

    def gradient_of(self, objective):
        return reference.flatten(reference.gradient(self.model, objective))


@pytest.fixture(scope="module")
def enumerated():
    return Enumerated()


def sft(e):
    """E_ν[log π] for the demonstrator's ν."""
    nu = sum_by_response(e.demonstration_logprobs, e.row, len(e.responses)).exp()
    objective = sum(
        w * reference.token_logprobs(e.model, PROMPT, y).sum() for w, y in zip(nu, e.responses, strict=True)
    )
    logprobs, demonstrated = (
        sum_by_response(x, e.row, len(e.responses)) for x in (e.logprobs, e.demonstration_logprobs)
    )
    return objective, demonstration_signal(logprobs, demonstrated)


def on_policy_rl(e):
    """E_π[r], differentiated through π."""
    objective = sum(r * e.probability(y) for r, y in zip(e.rewards, e.responses, strict=True))
    return objective, e.rewards - (e.weights * e.rewards).sum()


def policy_gradient_distillation(e):
    """E_π[R_T] with R_T held fixed."""
    returns = teacher_return(e.logprobs, e.teacher_logprobs, e.row, len(e.responses))
    objective = sum(r * e.probability(y) for r, y in zip(returns, e.responses, strict=True))
    return objective, returns - (e.weights * returns).sum()


def full_vocabulary_distillation(e):
    """−E_π[Σ_t KL(π_T ‖ p)] with the prefixes' distribution held fixed."""
    objective = 0.0
    for prefix, weight in reference.reachable_prefixes(e.model, PROMPT, HORIZON, STOP):
        logp = reference.next_token_logits(e.model, PROMPT + prefix).log_softmax(-1)
        logq = reference.next_token_logits(e.teacher, PROMPT + prefix).log_softmax(-1).detach()
        objective = objective - weight * (logq.exp() * (logq - logp)).sum()
    return objective, full_vocabulary_signal(e.logprobs, e.teacher_logprobs, e.row, len(e.responses))


OBJECTIVES = [sft, on_policy_rl, policy_gradient_distillation, full_vocabulary_distillation]


@pytest.mark.parametrize("method", OBJECTIVES, ids=lambda f: f.__name__)
def test_proposition_1(enumerated, method):
    """The objective's gradient by autograd is E[a h], and below the bound (eqs. 3 and 4, Table 2)."""
    e = enumerated
    objective, signal = method(e)
    gradient = e.gradient_of(objective)
    torch.testing.assert_close((e.weights * signal) @ e.scores, gradient, rtol=1e-9, atol=1e-12)
    # Each signal has mean 0 under the policy.
    assert abs(float(e.weights @ signal)) < 1e-12
    scale = float(e.weights @ signal.square())
    fisher = e.weights @ e.scores.square()
    assert bool((gradient.abs() <= (scale * fisher).sqrt() * (1 + 1e-9)).all())
    result = check_bound({"all": gradient}, {"all": fisher}, scale)
    assert result.num_violations == 0
    assert 0.1 < result.max_ratio["all"] <= 1


def test_squared_scales_are_the_chi_squares_of_appendix_a(enumerated):
    e = enumerated
    _, signal = full_vocabulary_distillation(e)
    want = 0.0
    for prefix, weight in reference.reachable_prefixes(e.model, PROMPT, HORIZON, STOP):
        p, q = (reference.next_token_logits(m, PROMPT + prefix).softmax(-1).detach() for m in (e.model, e.teacher))
        want += weight * float(((q - p).square() / p).sum())
    assert float(e.weights @ signal.square()) == pytest.approx(want, rel=1e-9)


def make_rollouts(e, drawn):
    return [
        Rollout("p", "", "", k, PROMPT, e.responses[i], (0.0,) * len(e.responses[i]), "stop", "")
        for k, i in enumerate(drawn)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_prompts", [1, 40])
def test_the_bound_holds_on_samples(enumerated, dtype, num_prompts):
    """With the group's mean as baseline and the same responses on both sides, whatever the sample."""
    e, group = enumerated, 8
    model = reference.exact_qwen3(3).to(dtype)
    generator = torch.Generator().manual_seed(4)
    drawn = torch.multinomial(e.weights, num_prompts * group, replacement=True, generator=generator)
    rollouts = make_rollouts(e, drawn.tolist())
    advantages = group_advantages(e.rewards[drawn].view(num_prompts, group)).flatten()
    fisher, gradient = FisherEstimator(model), GradientEstimator(model)
    fisher.add(rollouts)
    gradient.add(rollouts, advantages.tolist())
    scale = float(advantages.square().mean())
    result = check_bound(gradient.mean(), fisher.mean(), scale)
    assert result.num_violations == 0
    assert max(result.max_ratio.values()) <= 1
    assert result.num_coordinates == sum(int((f > 0).sum()) for f in fisher.mean().values())
    # A gradient that is too large is found out.
    too_large = {n: 20 * g for n, g in gradient.mean().items()}
    assert check_bound(too_large, fisher.mean(), scale).num_violations > 100
    # So is a scale from other samples.
    assert check_bound(gradient.mean(), fisher.mean(), scale / 400).num_violations > 100


def test_one_response_meets_the_bound_with_equality(enumerated):
    e = enumerated
    rollouts = make_rollouts(e, [4])
    fisher, gradient = FisherEstimator(e.model), GradientEstimator(e.model)
    fisher.add(rollouts)
    gradient.add(rollouts, [-0.3])
    result = check_bound(gradient.mean(), fisher.mean(), 0.09)
    assert result.num_violations == 0
    assert result.mean_tightness == pytest.approx(1, abs=1e-9)
    assert result.tightness_quantile(0.01) == 1


def test_tightness_summary():
    torch.manual_seed(0)
    # More than one block of coordinates.
    fisher = {"a": torch.rand(700_000), "b": torch.rand(30, 40)}
    ratio = {"a": torch.rand(700_000) ** 3, "b": torch.rand(30, 40) ** 3}
    signs = {n: torch.where(torch.rand_like(f) < 0.5, -1.0, 1.0) for n, f in fisher.items()}
    gradient = {n: signs[n] * ratio[n] * (4 * f).sqrt() for n, f in fisher.items()}
    result = check_bound(gradient, fisher, 4.0)
    flat = torch.cat([r.flatten() for r in ratio.values()]).double()
    assert result.mean_tightness == pytest.approx(float(flat.mean()), rel=1e-4)
    ordered = flat.sort().values
    for q in (0.1, 0.5, 0.9, 0.99):
        want = float(ordered[int(q * len(flat))])
        assert want - 1e-3 < result.tightness_quantile(q) < want + 2e-3
    assert result.max_ratio["b"] == pytest.approx(float(ratio["b"].max()), abs=1e-3)
    assert int(result.tightness_counts.sum()) == result.num_coordinates == 701_200


def test_coordinates_without_fisher():
    """A gradient where no score was ever seen is a violation; squares that underflowed and NaN are told apart."""
    fisher = {"w": torch.tensor([1.0, 0.0, 0.0, 1.0])}
    result = check_bound({"w": torch.tensor([0.5, 0.0, 1e-3, 0.5])}, fisher, 1.0)
    assert (result.num_violations, result.num_coordinates) == (1, 2)
    tiny = torch.tensor([1e-22, 1e-25])
    assert tiny.square()[1] == 0 < tiny.square()[0]
    with_tiny = {**fisher, "tiny": tiny.square()}
    assert check_bound({"w": torch.zeros(4), "tiny": tiny}, with_tiny, 1.0).num_violations == 0
    nan = check_bound({"w": torch.tensor([0.5, 0.0, 0.0, float("nan")])}, fisher, 1.0)
    assert (nan.num_violations, nan.max_ratio["w"]) == (1, float("inf"))


def test_bad_input_is_refused():
    one = {"w": torch.ones(2)}
    with pytest.raises(UserError, match="different parameters"):
        check_bound({"v": torch.ones(2)}, one, 1.0)
    with pytest.raises(UserError, match="every signal 0"):
        check_bound(one, one, 0.0)
    with pytest.raises(UserError, match="Fisher of 0"):
        check_bound({"w": torch.zeros(2)}, {"w": torch.zeros(2)}, 1.0)
