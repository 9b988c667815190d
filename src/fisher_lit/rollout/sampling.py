"""Drawing next tokens: the distribution, and a draw that depends on nothing but its own uniform number.

Shapes: B = sequences, V = vocabulary.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from fisher_lit.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How next tokens are drawn. Nothing is taken from a model's own generation config.

    Args:
        temperature: softmax temperature; 0 takes the most likely token.
        top_p: smallest set of tokens with at least this probability mass; 1 keeps all.
        top_k: this many most likely tokens; null keeps all.
        min_p: tokens with at least this share of the most likely token's probability; 0 keeps all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError(f"sampling: `temperature` must be at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"sampling: `top_p` must be in (0, 1], got {self.top_p}; 1 keeps every token")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"sampling: `top_k` must be at least 1, got {self.top_k}; null keeps every token")
        if not 0 <= self.min_p < 1:
            raise UserError(f"sampling: `min_p` must be in [0, 1), got {self.min_p}; 0 keeps every token")

    @property
    def is_full_softmax(self) -> bool:
        """True if every token can be drawn, with its probability at the temperature."""
        return self.temperature > 0 and self.top_p == 1 and self.top_k is None and self.min_p == 0


def next_token_logprobs(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities of the distribution that tokens are drawn from.

    The temperature comes first, then top-k, top-p and min-p, each on what the one before it left; the rest is
    normalised. With temperature 0 the distribution is a point mass on the first most likely token.

    Args:
        logits_BV: logits of any floating dtype.
        sampling: the settings.

    Returns:
        [B, V] float32, nats; -inf where a token cannot be drawn.
    """
    logits = logits_BV.float()
    if sampling.temperature == 0:
        point_mass = torch.full_like(logits, -torch.inf)
        return point_mass.scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        ranks = logits.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        logits = logits.masked_fill(ranks >= sampling.top_k, -torch.inf)
    if sampling.top_p < 1:
        sorted_logits, order = logits.sort(dim=-1, descending=True, stable=True)
        probs = sorted_logits.softmax(-1)
        # A token is out if those before it already hold the mass; the first is always in.
        out = probs.cumsum(-1) - probs >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(out).scatter(-1, order, out), -torch.inf)
    if sampling.min_p > 0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return logits.log_softmax(-1)


def draw(logprobs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Draw one token per sequence by inverting the cumulative distribution.

    Args:
        logprobs_BV: log-probabilities, nats.
        uniforms_B: numbers in [0, 1), float64; equal numbers and log-probabilities give equal tokens.

    Returns:
        [B] int64 token ids; a token of probability 0 is never drawn.
    """
    cumulative = logprobs_BV.double().exp().cumsum(-1)
    total = cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, uniforms_B.double()[:, None] * total, right=True)
    # Rounding can put the product on the total itself; the last token with mass is the right one then.
    last = (cumulative < total).sum(-1, keepdim=True)
    return torch.minimum(tokens, last)[:, 0]


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from a list of labels and numbers, equal on every platform.

    Different lists give unrelated seeds, so that neither two prompts, two responses nor two uses share random numbers.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
