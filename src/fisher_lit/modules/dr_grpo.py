"""Dr. GRPO (arXiv 2503.20783) with the settings of arXiv 2609.36262, Appendix B.2."""

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from fisher_lit.errors import UserError
from fisher_lit.logprobs import TokenScores
from fisher_lit.modules.policy import PolicyModule, require_importance_cap
from fisher_lit.modules.statistics import batch_statistics
from fisher_lit.objectives import dr_grpo_loss, group_advantages, truncated_importance_weights
from fisher_lit.rollout.batch import MicroBatch, RolloutBatch


class DrGRPO(PolicyModule):
    """Reinforcement learning from verifiable rewards: the clipped surrogate, summed over tokens.

    The advantage is the reward minus the mean of its group. The loss is divided by responses × horizon. There is no
    division by the standard deviation or by the response's length, no KL penalty and no entropy bonus. The ratio is
    taken to the recorded log-probabilities of the sampler: with one update per batch it is 1, up to the gap between
    the sampler's log-probabilities and the trainer's. A token whose gap leaves [1 − ε, 1 + ε] on the side of its
    advantage then gets no gradient. `importance_cap` weights such tokens in place of dropping them.

    Args:
        clip_range: ε of the clipped surrogate.
        importance_cap: largest importance weight p_trainer / p_sampler of a token, at least 1; the ratio is then
            taken to the trainer's own log-probabilities. Null, as in the paper, has no such weights.
        **kwargs: settings of the policy.
    """

    def __init__(self, model: str, clip_range: float = 0.2, importance_cap: float | None = None, **kwargs) -> None:
        super().__init__(model, **kwargs)
        if not 0 < clip_range < 1:
            raise UserError(f"model: `clip_range` must be in (0, 1), got {clip_range}")
        require_importance_cap(importance_cap)
        self.clip_range = clip_range
        self.importance_cap = importance_cap

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = self.data
        if stage == "fit" and data.responses_per_prompt < 2:
            raise UserError(
                f"data: `responses_per_prompt` is {data.responses_per_prompt}, so every response is its own group mean "
                f"and no advantage differs from 0; set at least 2"
            )
        if stage == "fit":
            self.require_full_softmax()

    @override
    def loss(self, scores: TokenScores, micro: MicroBatch, indices: Sequence[int], batch: RolloutBatch) -> Tensor:
        advantages = group_advantages(batch.rewards).flatten()[list(indices)].to(self.device)[micro.row]
        reference = micro.sampler_logprobs
        if self.importance_cap is not None:
            advantages = advantages * truncated_importance_weights(scores.logprobs, reference, self.importance_cap)
            reference = scores.logprobs.detach()
        return dr_grpo_loss(
            scores.logprobs,
            reference,
            advantages,
            clip_range=self.clip_range,
            num_responses=batch.total_responses,
            horizon=batch.horizon,
        )

    @override
    def signal(self, batch: RolloutBatch) -> list[Tensor | float]:
        return group_advantages(batch.rewards).flatten().tolist()

    @override
    def has_gradient(self, batch: RolloutBatch) -> list[bool]:
        return [bool(advantage != 0) for advantage in self.signal(batch)]

    @override
    def batch_metrics(self, batch: RolloutBatch) -> dict[str, float]:
        idle = (group_advantages(batch.rewards) == 0).all(-1)
        return batch_statistics(batch) | {
            "reward": float(batch.rewards.mean()),
            "zero_advantage_groups": float(idle.float().mean()),
            "reward_timeouts": float(batch.num_reward_timeouts),
        }
