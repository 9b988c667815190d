"""Full next-token distributions of student and teacher, compared without keeping them.

Shapes: N = response tokens of a micro-batch, C = tokens of a chunk, V = vocabulary of the student.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from fisher_lit.logprobs import TokenScores, head_logits, hidden_states
from fisher_lit.rollout.batch import MicroBatch
from fisher_lit.sharding import call


def forward_kl(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    batch: MicroBatch,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> tuple[Tensor, Tensor, TokenScores]:
    """KL to the teacher at every prefix, and its mirror image, over the whole vocabulary (arXiv 2609.36262, Table 1).

        forward_t = Σ_a π_T(a|s_t) log[π_T(a|s_t) / p_θ(a|s_t)]
        reverse_t = Σ_a p_θ(a|s_t) log[p_θ(a|s_t) / π_T(a|s_t)]

    The sampled prefixes are held fixed. Heads and softmaxes run over chunks of tokens and are computed again in the
    backward pass, so at most `chunk_tokens` × V logits of each model exist at a time. Rows that only one of the two
    embedding matrices has are padding: no token has their ids, and the teacher gives them no probability.

    Args:
        student: the policy.
        teacher: a model with the same token ids.
        batch: the micro-batch.
        temperature: temperature of both policies.
        chunk_tokens: tokens per chunk.

    Returns:
        forward [N] with gradient, reverse [N] detached, and the student's scores of the sampled tokens. All in nats.
    """

    def chunk(student_CD: Tensor, teacher_CD: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logp_CV = _logprobs(head_logits(student, student_CD), temperature)
        with torch.no_grad():
            with torch.autocast(teacher_CD.device.type, enabled=False):
                logq_CV = _teacher_logprobs(head_logits(teacher, teacher_CD), logp_CV, temperature)
            q_CV, p_CV = logq_CV.exp(), logp_CV.exp()
            entropy = torch.special.entr(p_CV).sum(-1)
            # Where the teacher gives nothing, the reverse divergence is infinite unless the student gives nothing too.
            reverse = torch.where(p_CV > 0, p_CV * (logp_CV - logq_CV), 0).sum(-1)
            negative_entropy = -torch.special.entr(q_CV).sum(-1)
        chosen = logp_CV.gather(-1, targets_C[:, None])[:, 0]
        return negative_entropy - (q_CV * logp_CV).sum(-1), reverse, chosen, entropy

    def divergences() -> tuple[Tensor, ...]:
        student_ND = hidden_states(student, batch)
        with torch.no_grad(), torch.autocast(batch.input_ids.device.type, enabled=False):
            teacher_ND = hidden_states(teacher, batch)
        pieces = []
        parts = (tensor.split(chunk_tokens) for tensor in (student_ND, teacher_ND, batch.targets))
        for inputs in zip(*parts, strict=True):
            if torch.is_grad_enabled():
                pieces.append(checkpoint(chunk, *inputs, use_reentrant=False, preserve_rng_state=False))
            else:
                pieces.append(chunk(*inputs))
        return tuple(torch.cat(piece) for piece in zip(*pieces, strict=True))

    forward_N, reverse_N, chosen_N, entropy_N = call(student, divergences)
    return forward_N, reverse_N, TokenScores(chosen_N, entropy_N)


def _logprobs(logits_CV: Tensor, temperature: float) -> Tensor:
    logits_CV = logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()
    return (logits_CV / temperature).log_softmax(-1)


def _teacher_logprobs(logits_CV: Tensor, like_CV: Tensor, temperature: float) -> Tensor:
    """The teacher's log-probabilities on the student's ids, -inf on those that the teacher lacks."""
    common = min(logits_CV.shape[-1], like_CV.shape[-1])
    logprobs = torch.full_like(like_CV, -torch.inf)
    logprobs[:, :common] = _logprobs(logits_CV[:, :common], temperature).to(like_CV)
    return logprobs
