"""Full-vocabulary on-policy distillation with forward KL (arXiv 2609.36262, Table 1)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from fisher_lit.divergences import forward_kl
from fisher_lit.logprobs import TokenScores
from fisher_lit.modules.distillation import Distillation
from fisher_lit.rollout.batch import MicroBatch, RolloutBatch


class FullVocabDistillation(Distillation):
    """Mean KL(π_T ‖ p_θ) over the prefixes that the student sampled, which are held fixed.

    The loss is divided by the response tokens of the whole update.
    """

    @override
    def forward_loss(
        self, micro: MicroBatch, indices: Sequence[int], batch: RolloutBatch
    ) -> tuple[Tensor, TokenScores]:
        assert self.model is not None
        forward_N, _, scores = forward_kl(
            self.model,
            self.teacher.network,
            micro,
            temperature=batch.temperature,
            chunk_tokens=self.logprob_chunk_tokens,
        )
        return forward_N.sum() / batch.total_response_tokens, scores

    @override
    def signal(self, batch: RolloutBatch) -> list[Tensor | float]:
        """A_T = Σ_t (π_T(y_t|s_t) / p_θ(y_t|s_t) − 1), whose product with the score has the gradient as its mean."""
        return [float(torch.expm1(ratio.double()).sum()) for ratio in self.log_ratios(batch)]
