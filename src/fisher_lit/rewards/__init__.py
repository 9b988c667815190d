"""Rewards for verifiable answers."""

from fisher_lit.rewards.pool import MathReward, score

__all__ = ["MathReward", "score"]
