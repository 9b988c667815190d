"""Sampler and trainer that disagree: truncated importance weights and the k3 estimate, against enumeration."""

import math

import pytest
import torch

from fisher_lit.errors import EngineError
from fisher_lit.logprobs import TokenScores
from fisher_lit.modules.statistics import UpdateStatistics, check_logprob_gap
from fisher_lit.objectives import dr_grpo_loss, truncated_importance_weights
from fisher_lit.rollout.batch import Rollout, collate


def gradient(logits, sampler, advantages, cap):
    """E_{y ~ sampler} of the gradient of −M·H·loss for one-token responses, by enumeration."""
    total = torch.zeros_like(logits)
    for token in range(len(logits)):
        leaf = logits.clone().requires_grad_()
        logprob = leaf.log_softmax(-1)[token : token + 1]
        weights = truncated_importance_weights(logprob, sampler[token].log()[None], cap)
        loss = dr_grpo_loss(
            logprob,
            logprob.detach(),
            weights * advantages[token],
            clip_range=0.2,
            num_responses=1,
            horizon=1,
        )
        total -= sampler[token] * torch.autograd.grad(loss, leaf)[0]
    return total


@pytest.mark.parametrize("cap", [math.inf, 2.0, 1.0])
def test_gradient_is_the_trainers_own_up_to_the_cap(cap):
    g = torch.Generator().manual_seed(0)
    logits, other, advantages = torch.randn(3, 5, generator=g, dtype=torch.float64)
    sampler, trainer = other.softmax(-1), logits.softmax(-1)
    want = torch.zeros(5, dtype=torch.float64)
    for token in range(5):
        score = -trainer.clone()
        score[token] += 1
        want += torch.minimum(trainer[token], cap * sampler[token]) * advantages[token] * score
    torch.testing.assert_close(gradient(logits, sampler, advantages, cap), want)


def test_weights_are_one_where_sampler_and_trainer_agree():
    logprobs = torch.tensor([-0.1, -5.0], requires_grad=True)
    weights = truncated_importance_weights(logprobs, logprobs.detach(), 1.0)
    assert weights.tolist() == [1, 1]
    assert not weights.requires_grad


def test_k3_estimates_the_kl_from_sampler_to_trainer():
    """Each of V tokens once is what a uniform sampler gives in expectation."""
    size = 6
    trainer = torch.randn(size, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    uniform = -math.log(size)
    rollouts = [Rollout(str(t), "", "", 0, (1,), (t,), (uniform,), "length", "") for t in range(size)]
    statistics = UpdateStatistics(torch.device("cpu"))
    statistics.add(torch.zeros(()), TokenScores(trainer, torch.zeros(size)), collate(rollouts, pad_id=0))
    values = statistics.compute()
    assert values["logprob_gap_k3"] == pytest.approx(float((uniform - trainer.double()).mean()), rel=1e-5)
    assert values["logprob_gap_mean"] == pytest.approx(float((uniform - trainer).abs().mean()), rel=1e-5)


def test_gap_bounds(caplog):
    check_logprob_gap(0.01, warn=0.05, stop=0.5, update=3)
    assert not caplog.records
    check_logprob_gap(0.06, warn=0.05, stop=0.5, update=3)
    assert "of update 3 differ by 0.06 nats per token on average, more than `logprob_gap_warn`" in caplog.text
    for gap in (0.6, math.nan):
        with pytest.raises(EngineError, match=f"differ by {gap} nats .* more than `logprob_gap_stop`"):
            check_logprob_gap(gap, warn=0.05, stop=0.5, update=3)
    caplog.clear()
    check_logprob_gap(9.0, warn=None, stop=None, update=3)
    assert not caplog.records
