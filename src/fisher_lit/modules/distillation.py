"""What the distillation objectives share: a teacher that scores the student's own responses."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from fisher_lit.modules.policy import PolicyModule
from fisher_lit.modules.statistics import batch_statistics
from fisher_lit.rollout.batch import RolloutBatch
from fisher_lit.teacher import Teacher

# Below this probability a sampled token is one that the teacher hardly ever writes.
RARE_PROBABILITY = 1e-4


class Distillation(PolicyModule):
    """A student that learns from a teacher's log-probabilities of its own responses. No answer is judged in training.

    Args:
        teacher: the teacher.
        **kwargs: settings of the policy.
    """

    uses_rewards = False

    def __init__(self, model: str, teacher: Teacher, **kwargs) -> None:
        super().__init__(model, **kwargs)
        self.teacher = teacher

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            self.require_full_softmax()

    @override
    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.teacher.load(self.tokenizer, self.device)

    @override
    def prepare(self, batch: RolloutBatch) -> None:
        if batch.teacher_logprobs is None:
            batch.teacher_logprobs = self.teacher.logprobs(batch.rollouts, batch.temperature)

    def log_ratios(self, batch: RolloutBatch) -> list[Tensor]:
        """log π_T(y_t|s_t) − log p_θ(y_t|s_t) of each response's tokens under the policy that sampled them, nats."""
        self.prepare(batch)
        assert batch.teacher_logprobs is not None
        return [
            teacher - torch.tensor(r.logprobs)
            for r, teacher in zip(batch.rollouts, batch.teacher_logprobs, strict=True)
        ]

    def teacher_tokens(self, batch: RolloutBatch, indices: Sequence[int]) -> Tensor:
        """The teacher's log-probabilities of a micro-batch's response tokens, [N]."""
        assert batch.teacher_logprobs is not None
        return torch.cat([batch.teacher_logprobs[i] for i in indices]).to(self.device)

    @override
    def batch_metrics(self, batch: RolloutBatch) -> dict[str, float]:
        log_ratio = torch.cat(self.log_ratios(batch))
        teacher = torch.cat(batch.teacher_logprobs or [])
        return batch_statistics(batch) | {
            "reverse_kl_k1": float(-log_ratio.mean()),
            "reverse_kl_k3": float((torch.expm1(log_ratio) - log_ratio).mean()),
            "teacher_logprob": float(teacher.mean()),
            "student_logprob": float((teacher - log_ratio).mean()),
            "teacher_rare_tokens": float((teacher.exp() < RARE_PROBABILITY).float().mean()),
        }


def sum_of_each(terms: Sequence[Tensor]) -> Tensor:
    """Sum over the tokens of each response, [responses] float64."""
    return torch.tensor([float(t.double().sum()) for t in terms], dtype=torch.float64)
