"""Log-probabilities of response tokens, with memory that does not grow with tokens × vocabulary.

Shapes: N = response tokens of a micro-batch, D = hidden width, V = vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from fisher_lit.errors import UserError
from fisher_lit.rollout.batch import MicroBatch
from fisher_lit.sharding import call


@dataclass(frozen=True)
class TokenScores:
    """Scores of the response tokens of a micro-batch, in its row-major order.

    Attributes:
        logprobs: [N] float32 (float64 for a float64 model), nats; carries the gradient.
        entropy: [N], entropy of each next-token distribution, nats, detached.
    """

    logprobs: Tensor
    entropy: Tensor


def head_logits(model: PreTrainedModel, hidden_ND: Tensor) -> Tensor:
    """Logits [N, V] of last hidden states [N, D], with the scaling and soft cap of the architecture's config.

    `check_head` proves for a loaded model that nothing else happens between hidden states and logits.
    """
    config = model.config
    logits = model.get_output_embeddings()(hidden_ND)
    if (scale := getattr(config, "logit_scale", None)) is not None:
        logits = logits * scale
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits


def hidden_states(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Hidden states [N, D] from which each response token of `batch` is predicted."""
    positions = (batch.attention_mask.cumsum(-1) - 1).clamp_min(0)
    output = model.base_model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=positions,
        use_cache=False,
    )
    # The state at position t predicts token t + 1.
    return output.last_hidden_state[:, :-1][batch.response_mask[:, 1:]]


def response_logprobs(
    model: PreTrainedModel, batch: MicroBatch, *, temperature: float = 1.0, chunk_tokens: int = 1024
) -> TokenScores:
    """Log-probability and entropy of every response token of a micro-batch.

        log p(y_t | s_t) = z_{y_t} / τ − log Σ_a exp(z_a / τ)

    The head and the softmax run over chunks of tokens and are computed again in the backward pass, so at most
    `chunk_tokens` × V logits exist at a time. Prompt and padding positions never reach the head.

    Args:
        model: any Hugging Face causal LM.
        batch: the micro-batch.
        temperature: τ, the temperature that the responses were sampled at.
        chunk_tokens: tokens per chunk.

    Returns:
        The scores, in float32 whatever the model computes in (float64 for a float64 model).
    """

    def chunk_scores(hidden_CD: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        logits = head_logits(model, hidden_CD)
        # float64 models are for exact references.
        logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(-1, targets_C[:, None])[:, 0]
        with torch.no_grad():
            entropy = torch.special.entr(logprobs.exp()).sum(-1)
        return chosen, entropy

    def scores() -> tuple[Tensor, ...]:
        hidden_ND = hidden_states(model, batch)
        pieces = []
        for hidden_CD, targets_C in zip(hidden_ND.split(chunk_tokens), batch.targets.split(chunk_tokens), strict=True):
            if torch.is_grad_enabled():
                piece = checkpoint(chunk_scores, hidden_CD, targets_C, use_reentrant=False, preserve_rng_state=False)
            else:
                piece = chunk_scores(hidden_CD, targets_C)
            pieces.append(piece)
        chosen, entropy = zip(*pieces, strict=True)
        return torch.cat(chosen), torch.cat(entropy)

    return TokenScores(*call(model, scores))


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Prove that `head_logits` of the hidden states is what the model's own forward gives.

    Raises:
        UserError: if the two differ, naming the architecture.
    """
    vocabulary = model.get_output_embeddings().weight.shape[0]
    ids = torch.arange(1, 9, device=model.device)[None] % vocabulary
    want = model(input_ids=ids, use_cache=False).logits
    got = head_logits(model, model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    if not torch.allclose(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max())):
        raise UserError(
            f"model: the head of {type(model).__name__} does more than a projection, scaling and soft cap "
            f"(logits differ by {float((got - want).abs().max()):.2g}); fisher_lit.logprobs.head_logits must learn it"
        )
