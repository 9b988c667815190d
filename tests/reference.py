"""Slow and obvious oracles: float64, every response enumerated, one backward pass per number.

Nothing here uses the package. Vectors are dictionaries from parameter name to float64 tensor.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import product

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

Vector = dict[str, Tensor]
Ids = tuple[int, ...]


def exact_qwen3(vocab_size: int, *, seed: int = 0, num_layers: int = 2, spread: float = 4.0) -> Qwen3ForCausalLM:
    """A tiny float64 Qwen3 with tied embeddings whose next-token distributions are far from uniform.

    Args:
        vocab_size: V.
        seed: seed of the weights.
        num_layers: decoder layers.
        spread: factor on the initial weights; larger ones give more peaked distributions.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
        max_position_embeddings=64,
    )
    model = Qwen3ForCausalLM(config)
    use_exact_norms(model)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter *= spread
            else:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def use_exact_norms(model: PreTrainedModel) -> None:
    """Replace RMSNorms of the Llama kind, which compute in float32 whatever the model's dtype, by torch's own."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon))


def enumerate_responses(vocab_size: int, horizon: int, stop_id: int) -> list[Ids]:
    """Every response: it ends with its first stop token, or is cut by the horizon."""
    complete = []
    for length in range(1, horizon + 1):
        for ids in product(range(vocab_size), repeat=length):
            if stop_id not in ids[:-1] and (ids[-1] == stop_id or length == horizon):
                complete.append(ids)
    return complete


def next_token_logits(model: PreTrainedModel, prefix: Ids) -> Tensor:
    """Logits [V] of the token after a prefix, by the model's own forward."""
    return model(input_ids=torch.tensor([prefix], device=model.device), use_cache=False).logits[0, -1]


def token_logprobs(model: PreTrainedModel, prompt: Ids, response: Ids) -> Tensor:
    """log p(y_t | s_t) of every response token, [tokens]; one forward pass per token."""
    rows = [next_token_logits(model, prompt + response[:t]).log_softmax(-1) for t in range(len(response))]
    return torch.stack([row[token] for row, token in zip(rows, response, strict=True)])


def gradient(model: PreTrainedModel, scalar: Tensor) -> Vector:
    """∂ scalar / ∂θ for every unique parameter; 0 where it has no influence."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(scalar, parameters, allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for name, p, g in zip(names, parameters, grads, strict=True)}


def score(model: PreTrainedModel, prompt: Ids, response: Ids) -> Vector:
    """h(x, y) = ∂ Σ_t log p(y_t | s_t)."""
    return gradient(model, token_logprobs(model, prompt, response).sum())


def combine(terms: Iterable[tuple[float, Vector]], function: Callable[[Tensor], Tensor] = lambda x: x) -> Vector:
    """Σ weight · function(vector)."""
    total: Vector = {}
    for weight, vector in terms:
        for name, x in vector.items():
            total[name] = total.get(name, torch.zeros_like(x)) + weight * function(x)
    return total


def flatten(vector: Vector) -> Tensor:
    """All coordinates in one tensor [P]."""
    return torch.cat([x.flatten() for x in vector.values()])


def probabilities(model: PreTrainedModel, prompt: Ids, responses: Sequence[Ids]) -> list[float]:
    """π(y | x) of each response."""
    with torch.no_grad():
        return [float(token_logprobs(model, prompt, y).sum().exp()) for y in responses]


def exact_fisher(model: PreTrainedModel, prompt: Ids, horizon: int, stop_id: int) -> Vector:
    """F = Σ_y π(y | x) h(x, y)² (eq. 2)."""
    responses = enumerate_responses(model.config.vocab_size, horizon, stop_id)
    weights = probabilities(model, prompt, responses)
    return combine([(w, score(model, prompt, y)) for w, y in zip(weights, responses, strict=True)], torch.square)


def reachable_prefixes(model: PreTrainedModel, prompt: Ids, horizon: int, stop_id: int) -> list[tuple[Ids, float]]:
    """Every response prefix at which a token is drawn, with the probability of getting there."""
    alive = [i for i in range(model.config.vocab_size) if i != stop_id]
    prefixes = [ids for length in range(horizon) for ids in product(alive, repeat=length)]
    return [(ids, probabilities(model, prompt, [ids])[0] if ids else 1.0) for ids in prefixes]


def logit_sensitivities(model: PreTrainedModel, prefix: Ids) -> tuple[Tensor, Tensor]:
    """Probabilities [V] and sensitivities ∂z_a/∂θ [V, P] at a prefix."""
    probs = next_token_logits(model, prefix).softmax(-1).detach()
    # A fresh graph each time: no retained state to get wrong.
    rows = [flatten(gradient(model, next_token_logits(model, prefix)[a])) for a in range(len(probs))]
    return probs, torch.stack(rows)


def token_fisher_by_scores(model: PreTrainedModel, prefix: Ids) -> Tensor:
    """f(s) = Σ_a p_a (∂ log p_a)², [P], straight from the definition."""
    probs = next_token_logits(model, prefix).softmax(-1).detach()
    total = torch.zeros(())
    for a, p in enumerate(probs):
        total = total + p * flatten(gradient(model, next_token_logits(model, prefix).log_softmax(-1)[a])).square()
    return total


def token_fisher_by_pairs(probs: Tensor, sensitivities: Tensor) -> Tensor:
    """½ Σ_ab p_a p_b (j_a − j_b)², [P] (eq. 9, second form, and eq. 11 for uniform probabilities)."""
    total = torch.zeros_like(sensitivities[0])
    for a, b in product(range(len(probs)), repeat=2):
        total += 0.5 * probs[a] * probs[b] * (sensitivities[a] - sensitivities[b]).square()
    return total
