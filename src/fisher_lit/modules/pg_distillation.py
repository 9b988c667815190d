"""PG-style on-policy distillation (arXiv 2609.36262, Table 1): the sequence signal of the theory."""

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from fisher_lit.errors import UserError
from fisher_lit.logprobs import TokenScores
from fisher_lit.modules.distillation import Distillation, sum_of_each
from fisher_lit.objectives import group_advantages, policy_gradient_loss
from fisher_lit.rollout.batch import MicroBatch, RolloutBatch


class PGDistillation(Distillation):
    """Policy gradient with the fixed reward R_T = Σ_t log[π_T(y_t|s_t) / p_θ(y_t|s_t)] minus its group's mean.

    Every token of a response is credited with the whole response. The loss is divided by the number of responses.
    """

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and self.data.responses_per_prompt < 2:
            raise UserError(
                f"data: `responses_per_prompt` is {self.data.responses_per_prompt}, so every response is its own group "
                f"mean and no signal is left; set at least 2, or use K2Distillation"
            )

    @override
    def loss(self, scores: TokenScores, micro: MicroBatch, indices: Sequence[int], batch: RolloutBatch) -> Tensor:
        signal = self._centred_returns(batch)[list(indices)].to(scores.logprobs)
        return policy_gradient_loss(scores.logprobs, signal[micro.row], num_responses=batch.total_responses)

    @override
    def signal(self, batch: RolloutBatch) -> list[Tensor | float]:
        return self._centred_returns(batch).tolist()

    def _centred_returns(self, batch: RolloutBatch) -> Tensor:
        returns = sum_of_each(self.log_ratios(batch))
        return group_advantages(returns.view(-1, batch.responses_per_prompt)).flatten()
