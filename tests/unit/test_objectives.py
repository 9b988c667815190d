import math

import pytest
import torch

from fisher_lit.objectives import dr_grpo_loss, group_advantages, sft_loss


def test_advantages_are_centred_and_not_scaled():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    want = [[0.75, -0.25, -0.25, -0.25], [0.0, 0.0, 0.0, 0.0]]
    assert group_advantages(rewards).tolist() == want


def test_dr_grpo_loss_by_a_plain_loop():
    g = torch.Generator().manual_seed(0)
    logp, old, adv = (torch.randn(40, generator=g, dtype=torch.float64) for _ in range(3))
    want = 0.0
    for p, q, a in zip(logp.tolist(), old.tolist(), adv.tolist(), strict=True):
        ratio = math.exp(p - q)
        want -= min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
    got = dr_grpo_loss(logp, old, adv, clip_range=0.2, num_responses=6, horizon=11)
    assert got.item() == pytest.approx(want / 66, rel=1e-12)


@pytest.mark.parametrize(("log_ratio", "advantage", "moves"), [
    (0.0, 1.0, True), (0.5, 1.0, False), (-0.5, 1.0, True), (0.5, -1.0, True), (-0.5, -1.0, False),
])  # fmt: skip
def test_clipping_stops_only_moves_away_from_the_sampler(log_ratio, advantage, moves):
    logp = torch.tensor([log_ratio], requires_grad=True)
    dr_grpo_loss(logp, torch.zeros(1), torch.tensor([advantage]), clip_range=0.2, num_responses=1, horizon=1).backward()
    assert (logp.grad.item() != 0) == moves


def test_on_policy_gradient_is_the_advantage_over_responses_and_horizon():
    logp = torch.randn(5, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.5, 0.5, -0.25, -0.25, 0.0], dtype=torch.float64)
    dr_grpo_loss(logp, logp.detach(), advantages, clip_range=0.2, num_responses=4, horizon=10).backward()
    torch.testing.assert_close(logp.grad, -advantages / 40)


def test_sft_loss_is_cross_entropy():
    logits = torch.randn(7, 5, dtype=torch.float64)
    targets = torch.randint(0, 5, (7,))
    logp = logits.log_softmax(-1)[range(7), targets]
    torch.testing.assert_close(sft_loss(logp, num_tokens=7), torch.nn.functional.cross_entropy(logits, targets))
