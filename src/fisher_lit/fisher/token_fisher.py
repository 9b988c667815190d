"""Token Fisher under the model's own next-token distribution and under the uniform one (arXiv 2609.36262, eqs. 9, 11).

Shapes: V = vocabulary, C = pairs of a batch, G = parameter groups.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fisher_lit.errors import UserError
from fisher_lit.fisher.backward import consuming_gradients, measured_parameters, measuring, zeros_like_parameters
from fisher_lit.fisher.batched_scores import BatchedScores, block_elements
from fisher_lit.fisher.estimators import BatchingRule
from fisher_lit.logprobs import head_logits, hidden_states
from fisher_lit.rollout.batch import Rollout, collate, split_micro_batches
from fisher_lit.rollout.sampling import derive_seed, draw
from fisher_lit.sharding import ShardedBackward, all_reduce, call, is_sharded, local, share_of, world_size


class ParameterGroups:
    """Nested groups of coordinates: all of them first, then the given ones, each a part of the one before.

    Args:
        parameters: measured parameters (or any tensors of their shapes) by name.
        masks: a bool mask per parameter name for each further group, the largest group first.

    Attributes:
        sizes: coordinates of each group.

    Raises:
        UserError: if a mask lacks a parameter or has another shape, a group is empty or not nested.
    """

    def __init__(self, parameters: Mapping[str, Tensor], masks: Sequence[Mapping[str, Tensor]] = ()) -> None:
        # How many of the masks hold a coordinate; as they are nested, this says which.
        held = {n: local(p) for n, p in parameters.items()}
        self._levels = {n: torch.zeros(p.shape, dtype=torch.uint8, device=p.device) for n, p in held.items()}
        self.sizes = [self._total(sum(level.numel() for level in self._levels.values()))]
        for index, mask in enumerate(masks):
            size = 0
            for name, level in self._levels.items():
                if name not in mask or mask[name].shape != level.shape:
                    raise UserError(f"groups: group {index} has no mask of shape {tuple(level.shape)} for {name}")
                member = mask[name].to(level.device)
                if bool((member & (level < index)).any()):
                    raise UserError(f"groups: group {index} is not a part of the one before it; give the largest first")
                level += member
                size += int(member.sum())
            size = self._total(size)
            if size == 0:
                raise UserError(f"groups: group {index} is empty")
            self.sizes.append(size)

    def _total(self, size: int) -> int:
        total = torch.tensor(size, device=next(iter(self._levels.values())).device)
        all_reduce(total)
        return int(total)

    def means(self, vector: Mapping[str, Tensor]) -> Tensor:
        """Mean over each group, [G] float64 on the CPU.

        Args:
            vector: a number per coordinate, by parameter name.
        """
        device = next(iter(vector.values())).device
        totals = torch.zeros(len(self.sizes), dtype=torch.float64, device=device)
        for name, level in self._levels.items():
            block = block_elements(device)
            for values, levels in zip(vector[name].flatten().split(block), level.flatten().split(block), strict=True):
                totals[0] += values.sum(dtype=torch.float64)
                for index in range(1, len(self.sizes)):
                    totals[index] += (values * (levels >= index)).sum(dtype=torch.float64)
        all_reduce(totals)
        return totals.cpu() / torch.tensor(self.sizes, dtype=torch.float64)


@dataclass(frozen=True)
class TokenFisher:
    """Token Fisher of each prompt, averaged over its pairs, positions and the coordinates of each group.

    Attributes:
        real: [prompts, G] float64, token pairs drawn from the model's next-token distribution.
        uniform: [prompts, G] float64, token pairs drawn uniformly from the vocabulary.
        num_backward: pairs of unequal tokens, equal pairs of a position counted once.
    """

    real: Tensor
    uniform: Tensor
    num_backward: int


class _Pair(NamedTuple):
    """Two unequal tokens that may follow a response's first `position` tokens, and how often they were drawn."""

    position: int
    first: int
    second: int
    times: int


def token_fisher(
    model: PreTrainedModel,
    rollouts: Sequence[Rollout],
    *,
    seed: int,
    masks: Sequence[Mapping[str, Tensor]] = (),
    names: Iterable[str] | None = None,
    num_positions: int = 8,
    num_pairs: int = 8,
    batch_tokens: int = 2048,
    batched: bool | None = None,
    progress: Callable[[int], None] | None = None,
) -> TokenFisher:
    """Estimate the token Fisher and its uniform reference from pairs of next tokens (arXiv 2609.36262, Table 7, B.3).

        D_G(s, a, b) = 1/(2|G|) Σ_{i∈G} (∂_i z_a(s) − ∂_i z_b(s))²

    averaged over the pairs of a position, then over a response's positions. Both conditions use the same prefixes s.
    Pairs are drawn with replacement at temperature 1; a pair of equal tokens counts as 0. The positions of a response
    are the first `num_positions` of random orders of its tokens, one after the other: all different where it has
    enough tokens, and otherwise each as often as the others, give or take one. Draws depend on `seed`, the problem and
    the sample index only.

    Args:
        model: any Hugging Face causal LM; processes that shard it take the same responses and share the pairs.
        rollouts: one response per prompt.
        seed: seed of positions and pairs.
        masks: groups of coordinates, as for `ParameterGroups`; the group of all measured ones always comes first.
        names: parameters to measure; None measures every one with `requires_grad`.
        num_positions: positions per response.
        num_pairs: pairs per position and condition.
        batch_tokens: most tokens of several prefixes that share a backward pass, padding included.
        batched: True takes several pairs per backward pass, False one; None decides by length and model size.
        progress: called with 1 after each response.

    Returns:
        A row per response.

    Raises:
        UserError: if a name is unknown, the groups are not nested, or a count is below 1.
    """
    for name, count in (("num_positions", num_positions), ("num_pairs", num_pairs)):
        if count < 1:
            raise UserError(f"`{name}` must be at least 1, got {count}")
    parameters = measured_parameters(model, names)
    groups = ParameterGroups(parameters, masks)
    measure = _PairSquares(
        model, parameters, batch_tokens, BatchingRule(model, False if is_sharded(model) else batched)
    )
    rows: list[Tensor] = []
    num_backward = 0
    with measuring(model, parameters), measure.passes.measuring() if measure.passes else nullcontext():
        for rollout in rollouts:
            for pairs in _draw_pairs(model, rollout, seed, num_positions, num_pairs):
                num_backward += len(pairs)
                rows.append(groups.means(measure.sums(rollout, pairs)) / (num_positions * num_pairs))
            if progress is not None:
                progress(1)
    table = torch.stack(rows).view(len(rollouts), 2, -1) if rows else torch.empty(0, 2, len(groups.sizes))
    return TokenFisher(real=table[:, 0], uniform=table[:, 1], num_backward=num_backward)


def _prefix(rollout: Rollout, position: int) -> Rollout:
    """The response's token at `position`, as the only one that a longer prompt is followed by."""
    return replace(
        rollout,
        prompt_ids=rollout.prompt_ids + rollout.response_ids[:position],
        response_ids=rollout.response_ids[position : position + 1],
        logprobs=rollout.logprobs[position : position + 1],
    )


def _prefix_logits(model: PreTrainedModel, rollout: Rollout, chosen: Sequence[int]) -> Tensor:
    """Logits of chosen response tokens, [chosen, V] float32 (float64 for a float64 model)."""
    batch = collate([rollout], pad_id=0, device=model.device)

    def logits() -> tuple[Tensor]:
        hidden_ND = hidden_states(model, batch)
        return (torch.cat([head_logits(model, hidden_ND[i : i + 1]) for i in chosen]),)

    (logits_NV,) = call(model, logits)
    return logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()


@torch.no_grad()
def _draw_pairs(
    model: PreTrainedModel, rollout: Rollout, seed: int, num_positions: int, num_pairs: int
) -> tuple[list[_Pair], list[_Pair]]:
    """Real and uniform pairs of unequal tokens, sorted by position; (a, b) and (b, a) are one pair drawn twice."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "token_fisher", rollout.problem_id, rollout.sample))
    num_tokens = len(rollout.response_ids)
    rounds = -(-num_positions // num_tokens)
    orders = [torch.randperm(num_tokens, generator=generator) for _ in range(rounds)]
    positions = torch.cat(orders)[:num_positions].tolist()
    uniforms = torch.rand(2, num_positions, 2 * num_pairs, generator=generator, dtype=torch.float64)
    end = max(positions) + 1
    upto = replace(rollout, response_ids=rollout.response_ids[:end], logprobs=rollout.logprobs[:end])
    logits_NV = _prefix_logits(model, upto, positions)
    counts: list[Counter[tuple[int, int, int]]] = [Counter(), Counter()]
    for index, position in enumerate(positions):
        logprobs_V = logits_NV[index].log_softmax(-1).cpu()
        real = draw(logprobs_V.expand(2 * num_pairs, -1), uniforms[0, index])
        uniform = (uniforms[1, index] * len(logprobs_V)).long()
        for counter, tokens in zip(counts, (real, uniform), strict=True):
            for a, b in tokens.view(num_pairs, 2).tolist():
                if a != b:
                    counter[position, min(a, b), max(a, b)] += 1
    real_pairs, uniform_pairs = ([_Pair(*key, times) for key, times in sorted(c.items())] for c in counts)
    return real_pairs, uniform_pairs


class _PairSquares:
    """Sums over pairs of the squared gradient of (z_a − z_b)/√2, inside `measuring`."""

    def __init__(
        self, model: PreTrainedModel, parameters: dict[str, nn.Parameter], batch_tokens: int, batching: BatchingRule
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.batch_tokens = batch_tokens
        self.batching = batching
        self._sums = zeros_like_parameters(self.parameters)
        self.passes = ShardedBackward(model, squares=True) if is_sharded(model) else None

    def sums(self, rollout: Rollout, pairs: Sequence[_Pair]) -> dict[str, Tensor]:
        """Sum over pairs, by parameter name; valid until the next call."""
        for total in self._sums.values():
            total.zero_()
        if self.passes is not None:
            self._add_sharded(self.passes, rollout, pairs)
            return self._sums
        lengths = [len(rollout.prompt_ids) + pair.position + 1 for pair in pairs]
        if pairs and self.batching.is_worth_it(max(lengths)):
            for part in split_micro_batches(lengths, max_tokens=self.batch_tokens):
                self._add_together(rollout, [pairs[i] for i in part])
        else:
            for position, same in groupby(pairs, key=lambda pair: pair.position):
                self._add_at(_prefix(rollout, position), list(same))
        return self._sums

    def _add_sharded(self, passes: ShardedBackward, rollout: Rollout, pairs: Sequence[_Pair]) -> None:
        """Each process takes its share of the pairs, one per pass; one that has run out of pairs adds zeros."""
        mine = share_of(pairs)
        for i in range(-(-len(pairs) // world_size())):
            pair = mine[i] if i < len(mine) else pairs[0]._replace(times=0)
            logits_1V = _prefix_logits(self.model, _prefix(rollout, pair.position), [0])
            passes.run((logits_1V[0, pair.first] - logits_1V[0, pair.second]) * (pair.times / 2) ** 0.5, self._sums)

    def _add_together(self, rollout: Rollout, pairs: Sequence[_Pair]) -> None:
        """One sequence per pair."""
        device = self.model.device
        batch = collate([_prefix(rollout, pair.position) for pair in pairs], pad_id=0, device=device)
        first = torch.tensor([pair.first for pair in pairs], device=device)
        second = torch.tensor([pair.second for pair in pairs], device=device)
        scales = torch.tensor([(pair.times / 2) ** 0.5 for pair in pairs], device=device, dtype=torch.float64)

        def difference(logits_CV: Tensor, part: slice) -> Tensor:
            row = torch.arange(len(logits_CV), device=device)
            return ((logits_CV[row, first[part]] - logits_CV[row, second[part]]) * scales[part].to(logits_CV)).sum()

        BatchedScores(self.model, self._sums).add(batch, difference)

    def _add_at(self, prefix: Rollout, pairs: Sequence[_Pair]) -> None:
        """One forward pass over the prefix and one backward pass per pair: no pair sees a token after its position."""
        hidden_1D = hidden_states(self.model, collate([prefix], pad_id=0, device=self.model.device))
        logits_V = head_logits(self.model, hidden_1D)[0]
        logits_V = logits_V if logits_V.dtype == torch.float64 else logits_V.float()
        with consuming_gradients(self.parameters, lambda name, grad: self._sums[name].addcmul_(grad, grad)) as backward:
            for index, pair in enumerate(pairs):
                difference = (logits_V[pair.first] - logits_V[pair.second]) * (pair.times / 2) ** 0.5
                backward(difference, retain_graph=index + 1 < len(pairs))


def exact_token_fisher(
    model: PreTrainedModel, rollout: Rollout, position: int, names: Iterable[str] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Token Fisher of every coordinate at one prefix, and its uniform reference, without sampling (eqs. 9 and 11).

        f_i(s) = Var_{a∼p(·|s)}[∂_i z_a(s)],   f_i^unif(s) = Var_{a∼uniform}[∂_i z_a(s)]

    One backward pass per token of the vocabulary, and five numbers per coordinate: for small vocabularies.

    Args:
        model: any Hugging Face causal LM whose parameters are not sharded.
        rollout: the response.
        position: tokens of the response before the one that is predicted.
        names: parameters to measure; None measures every one with `requires_grad`.

    Returns:
        f and f^unif by parameter name, float32 (float64 for float64 parameters).
    """
    parameters = measured_parameters(model, names)
    means = [zeros_like_parameters(parameters) for _ in range(2)]
    sums = [zeros_like_parameters(parameters) for _ in range(2)]
    with measuring(model, parameters):
        batch = collate([_prefix(rollout, position)], pad_id=0, device=model.device)
        logits_V = head_logits(model, hidden_states(model, batch))[0]
        probs = logits_V.detach().double().softmax(-1).tolist()
        weights = [0.0, 0.0]
        gains = [0.0, 0.0]

        def update(name: str, grad: Tensor) -> None:
            # Running weighted variance: no difference of large numbers.
            for c in range(2):
                before = grad.to(means[c][name].dtype) - means[c][name]
                means[c][name].add_(before, alpha=gains[c] / weights[c] if weights[c] else 0.0)
                sums[c][name].add_(before * (grad - means[c][name]), alpha=gains[c])

        with consuming_gradients(parameters, update) as backward:
            for token, probability in enumerate(probs):
                gains[:] = [probability, 1 / len(probs)]
                weights[:] = [w + g for w, g in zip(weights, gains, strict=True)]
                backward(logits_V[token], retain_graph=token + 1 < len(probs))
    return sums[0], sums[1]
