"""Training objectives as pure functions.

Every loss is a *sum* over the tokens of a micro-batch divided by a count of the *whole* update, so the split into
micro-batches cannot change the gradient. Shapes: N = response tokens of a micro-batch. Log-probabilities in nats.
"""

import torch
from torch import Tensor


def group_advantages(rewards: Tensor) -> Tensor:
    """Rewards minus their group's mean, without dividing by the standard deviation (Dr. GRPO, arXiv 2503.20783).

        A_nj = r_nj − (1/G) Σ_k r_nk

    Args:
        rewards: [prompts, G].

    Returns:
        Advantages of the same shape and dtype.
    """
    return rewards - rewards.mean(dim=-1, keepdim=True)


def dr_grpo_loss(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_range: float,
    num_responses: int,
    horizon: int,
) -> Tensor:
    """Token-summed clipped surrogate with a constant denominator (Dr. GRPO; arXiv 2609.36262, Appendix B.2).

        L = −1/(M·H) Σ_t min(ρ_t A_t, clip(ρ_t, 1−ε, 1+ε) A_t),   ρ_t = exp(log p_θ(y_t) − log p_sampler(y_t))

    There is no KL penalty and no entropy bonus.

    Args:
        logprobs: [N] log p_θ of the response tokens; carries the gradient.
        sampler_logprobs: [N] the sampler's, constant.
        advantages: [N] the advantage of each token's response, constant.
        clip_range: ε.
        num_responses: M, responses of the whole update.
        horizon: H, the most tokens that a response may have.

    Returns:
        A scalar.
    """
    ratio = (logprobs - sampler_logprobs).exp()
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return -torch.minimum(ratio * advantages, clipped * advantages).sum() / (num_responses * horizon)


def truncated_importance_weights(logprobs: Tensor, sampler_logprobs: Tensor, cap: float) -> Tensor:
    """How much more likely the trainer finds each token than the sampler did, up to a cap.

        w_t = min(p_θ(y_t) / p_sampler(y_t), C)

    A surrogate with the ratio p_θ / sg[p_θ] and advantages w_t A_t has the gradient Σ_t w_t A_t ∂ log p_θ(y_t), which
    up to the cap is unbiased per token for the trainer's policy although another one drew the tokens (truncated
    importance sampling: Ionides 2008).

    Args:
        logprobs: [N] log p_θ of the response tokens, nats.
        sampler_logprobs: [N] the sampler's.
        cap: C, at least 1.

    Returns:
        [N], constant.
    """
    return (logprobs.detach() - sampler_logprobs).exp().clamp(max=cap)


def k2_loss(logprobs: Tensor, teacher_logprobs: Tensor, *, num_tokens: int, weights: Tensor | None = None) -> Tensor:
    """Half the squared log-ratio on the student's own samples (arXiv 2609.36262, equation 18; Schulman's k2).

        L = 1/(2 N_tok) Σ_t (log p_θ(y_t | s_t) − log π_T(y_t | s_t))²

    On-policy its gradient is an unbiased estimate of the gradient of Σ_t KL(p_θ(·|s_t) ‖ π_T(·|s_t)) / N_tok with the
    prefixes held fixed; its value is a biased estimate of that divergence.

    Args:
        logprobs: [N] log p_θ of the response tokens; carries the gradient.
        teacher_logprobs: [N] the teacher's, constant.
        num_tokens: N_tok, response tokens of the whole update.
        weights: [N] importance weight of each token's term, constant; None weights all by 1.

    Returns:
        A scalar, nats² per token.
    """
    terms = (logprobs - teacher_logprobs).square()
    return (terms if weights is None else weights * terms).sum() / (2 * num_tokens)


def policy_gradient_loss(logprobs: Tensor, signal: Tensor, *, num_responses: int) -> Tensor:
    """Surrogate whose negative gradient is the mean over responses of a fixed sequence signal times the score.

        L = −1/M Σ_n a_n Σ_t log p_θ(y_nt | s_nt)

    Args:
        logprobs: [N] log p_θ of the response tokens; carries the gradient.
        signal: [N] the signal a of each token's response, constant.
        num_responses: M, responses of the whole update.

    Returns:
        A scalar.
    """
    return -(signal * logprobs).sum() / num_responses


def sft_loss(logprobs: Tensor, *, num_tokens: int) -> Tensor:
    """Mean negative log-likelihood of the demonstrated response tokens.

        L = −1/N_tok Σ_t log p_θ(y_t | s_t)

    Args:
        logprobs: [N] log p_θ of the response tokens; carries the gradient.
        num_tokens: N_tok, response tokens of the whole update.

    Returns:
        A scalar, nats per token.
    """
    return -logprobs.sum() / num_tokens
