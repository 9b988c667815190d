"""Supervised fine-tuning on demonstrated responses."""

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from fisher_lit.logprobs import TokenScores
from fisher_lit.modules.policy import PolicyModule
from fisher_lit.objectives import sft_loss
from fisher_lit.rollout.batch import MicroBatch, RolloutBatch


class SFT(PolicyModule):
    """Mean negative log-likelihood of the response tokens; prompts are not trained on."""

    uses_rewards = False

    @override
    def loss(self, scores: TokenScores, micro: MicroBatch, indices: Sequence[int], batch: RolloutBatch) -> Tensor:
        return sft_loss(scores.logprobs, num_tokens=batch.total_response_tokens)

    @override
    def signal(self, batch: RolloutBatch) -> list[Tensor | float]:
        return [1.0] * len(batch.rollouts)
