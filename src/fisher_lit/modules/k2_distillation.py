"""K2 on-policy distillation (arXiv 2609.36262, equation 18): token-local, in the style of a policy gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from fisher_lit.divergences import forward_kl
from fisher_lit.logprobs import TokenScores
from fisher_lit.modules.distillation import Distillation, sum_of_each
from fisher_lit.modules.policy import require_importance_cap
from fisher_lit.objectives import k2_loss, truncated_importance_weights
from fisher_lit.rollout.batch import DUMMY, MicroBatch, RolloutBatch, collate
from fisher_lit.teacher import Teacher


class K2Distillation(Distillation):
    """Half the mean squared log-ratio to the teacher over the response tokens of the whole update.

    Its gradient weights each token's score by log π_T − log p_θ. There is no reward, no group mean and no clipping.

    Args:
        importance_cap: largest importance weight p_trainer / p_sampler of a token, at least 1, for an engine whose
            log-probabilities differ from the trainer's. Null, as in the paper, has no such weights.
        **kwargs: settings of the policy and its teacher.
    """

    def __init__(self, model: str, teacher: Teacher, importance_cap: float | None = None, **kwargs) -> None:
        super().__init__(model, teacher, **kwargs)
        require_importance_cap(importance_cap)
        self.importance_cap = importance_cap

    @override
    def loss(self, scores: TokenScores, micro: MicroBatch, indices: Sequence[int], batch: RolloutBatch) -> Tensor:
        teacher = self.teacher_tokens(batch, indices).to(scores.logprobs.dtype)
        weights = None
        if self.importance_cap is not None:
            weights = truncated_importance_weights(scores.logprobs, micro.sampler_logprobs, self.importance_cap)
        return k2_loss(scores.logprobs, teacher, num_tokens=batch.total_response_tokens, weights=weights)

    @override
    def signal(self, batch: RolloutBatch) -> list[Tensor | float]:
        return list(self.log_ratios(batch))

    @override
    @torch.no_grad()
    def effective_signal(self, batch: RolloutBatch) -> list[float]:
        """a = Σ_t (w_t − E[w_t | s_t]) with w_t = log π_T − log p_θ, whose conditional mean is −KL(p_θ ‖ π_T) at s_t.

        The mean does not change the expected gradient, and without it products of different tokens would not vanish,
        so this is the sequence signal with E[a h] = E[Σ_t w_t ∂ log p_θ(y_t | s_t)].
        """
        assert self.model is not None
        totals = sum_of_each(self.log_ratios(batch))
        for group in self.micro_batches([r.num_tokens for r in batch.rollouts]):
            micro = collate([batch.rollouts[i] for i in group] or [DUMMY], pad_id=0, device=self.device)
            _, reverse_N, _ = forward_kl(
                self.model,
                self.teacher.network,
                micro,
                temperature=batch.temperature,
                chunk_tokens=self.logprob_chunk_tokens,
            )
            if group:
                totals[group] += torch.zeros(len(group), dtype=torch.float64).index_add(
                    0, micro.row.cpu(), reverse_N.double().cpu()
                )
        return totals.tolist()
