"""Estimators of the diagonal model Fisher and of the expected gradient from rollouts (arXiv 2609.36262, eqs. 6 and 17).

Shapes: N = response tokens of a batch, V = vocabulary, P = measured coordinates.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fisher_lit.errors import UserError
from fisher_lit.fisher.backward import consuming_gradients, measured_parameters, measuring, zeros_like_parameters
from fisher_lit.fisher.batched_scores import BatchedScores, block_elements
from fisher_lit.fisher.layers import batched_scores_obstacle
from fisher_lit.logprobs import response_logprobs
from fisher_lit.rollout.batch import DUMMY, MicroBatch, Rollout, collate, split_micro_batches
from fisher_lit.sharding import ShardedBackward, all_reduce, is_sharded, largest

log = logging.getLogger(__name__)

# Sequences up to this length gain from a common backward pass in any model: one weight costs less to multiply than to
# read and write. In small models the fixed cost per pass matters longer, up to this many token-parameters.
SHORT_TOKENS = 128
SHORT_TOKEN_PARAMETERS = 2**27


class BatchingRule:
    """Whether responses share a backward pass.

    Args:
        model: the model.
        batched: True and False force the answer; None decides by size.

    Raises:
        UserError: if `batched` is True and the model has a layer that cannot be batched.
    """

    def __init__(self, model: PreTrainedModel, batched: bool | None) -> None:
        self.batched = batched
        self.num_parameters = sum(p.numel() for p in model.parameters())
        obstacle = batched_scores_obstacle(model) if batched is not False else None
        if obstacle is not None and batched:
            raise UserError(f"`batched` is true, but {obstacle}; set it to null or false")
        if obstacle is not None:
            _announce(obstacle)
            self.batched = False

    def is_worth_it(self, num_tokens: int) -> bool:
        """True if sequences of this length should share a backward pass."""
        if self.batched is not None:
            return self.batched
        return num_tokens <= SHORT_TOKENS or num_tokens * self.num_parameters <= SHORT_TOKEN_PARAMETERS


@cache
def _announce(obstacle: str) -> None:
    log.info("gradients are squared one response at a time: %s", obstacle)


class _Mean:
    """A mean over responses of one number per measured coordinate."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        names: Iterable[str] | None = None,
        temperature: float = 1.0,
        chunk_tokens: int = 1024,
        batch_tokens: int = 2048,
    ) -> None:
        self.model = model
        self.parameters = measured_parameters(model, names)
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.batch_tokens = batch_tokens
        self.num_responses = 0
        if is_sharded(model) and len(self.parameters) < len(list(model.parameters())):
            raise UserError("names: all parameters of a sharded model are measured together; leave `names` out")
        self._sums = zeros_like_parameters(self.parameters)
        self._is_finished = False

    def mean(self) -> dict[str, Tensor]:
        """The mean by parameter name, float32 (float64 for float64 parameters). Nothing can be added afterwards.

        Raises:
            UserError: if no response was added.
        """
        if self.num_responses == 0 and not is_sharded(self.model):
            raise UserError(f"{type(self).__name__} needs at least one response")
        if not self._is_finished:
            if is_sharded(self.model):
                count = torch.tensor(self.num_responses, device=self.model.device)
                all_reduce(count)
                self.num_responses = int(count)
            # In place: the sums are as large as the model.
            for total in self._sums.values():
                total /= self.num_responses
            self._is_finished = True
        return self._sums

    def _scores(self, batch: MicroBatch) -> Tensor:
        """Log-probabilities [N] of the response tokens."""
        return response_logprobs(
            self.model, batch, temperature=self.temperature, chunk_tokens=self.chunk_tokens
        ).logprobs

    def _collate(self, rollouts: Sequence[Rollout]) -> MicroBatch:
        return collate(rollouts, pad_id=0, device=self.model.device)


class FisherEstimator(_Mean):
    """Mean of squared sequence scores over rollouts, one per prompt.

        F̂_i = (1/N) Σ_n h_i(x_n, y_n)²,   h_i(x, y) = Σ_t ∂_i log p_θ(y_t | s_t)

    The score is summed over all response tokens, an observed stop token included, squared for each response before
    averaging, and not divided by length (arXiv 2609.36262, eqs. 6 and 17). Memory: one number per measured coordinate
    and the gradient of one parameter at a time.

    Args:
        model: any Hugging Face causal LM; where it is sharded, each process adds responses of its own, in as many calls
            as the others, and holds the mean of its own coordinates.
        names: parameters to measure; None measures every one with `requires_grad`.
        temperature: temperature that the responses were sampled at.
        chunk_tokens: response tokens whose logits exist at a time, where responses are scored one by one.
        batch_tokens: most tokens of several responses scored by one backward pass, padding included.
        batched: True scores several responses per backward pass, False one; None decides by length and model size.

    Attributes:
        num_responses: N, responses so far.

    Raises:
        UserError: if a name is unknown or given for a sharded model, or `batched` is True and the model cannot be
            batched.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        names: Iterable[str] | None = None,
        temperature: float = 1.0,
        chunk_tokens: int = 1024,
        batch_tokens: int = 2048,
        batched: bool | None = None,
    ) -> None:
        super().__init__(
            model, names=names, temperature=temperature, chunk_tokens=chunk_tokens, batch_tokens=batch_tokens
        )
        # Gradients of a sharded model are squared where they meet, one response per process at a time.
        self.batching = BatchingRule(model, False if is_sharded(model) else batched)
        self._squared_norms: list[Tensor] = []

    def add(self, rollouts: Sequence[Rollout], progress: Callable[[int], None] | None = None) -> None:
        """Add responses to the mean. After an error the sums are undefined; the model is not.

        Args:
            rollouts: responses drawn from the model as it is, at most one per prompt over all calls.
            progress: called with the number of responses that have just been added.
        """
        assert not self._is_finished, "the mean has been taken"
        if is_sharded(self.model):
            self._add_sharded(rollouts, progress)
            return
        norms: dict[int, Tensor] = {}
        with measuring(self.model, self.parameters):
            for part in self._parts([r.num_tokens for r in rollouts]):
                members = [rollouts[i] for i in part]
                squared = self._add_together(members) if len(part) > 1 else self._add_one(members[0])
                norms |= dict(zip(part, squared, strict=True))
                if progress is not None:
                    progress(len(part))
        self._squared_norms += [norms[i] for i in range(len(rollouts))]
        self.num_responses += len(rollouts)

    def mean(self) -> dict[str, Tensor]:
        """The Fisher by parameter name, see `_Mean.mean`."""
        fisher = super().mean()
        for total in fisher.values():
            # Batched scores correct a sum of squares, which may leave a rounding error below 0.
            total.clamp_(min=0)
        return fisher

    def squared_norms(self) -> Tensor:
        """‖h(x_n, y_n)‖² over the measured coordinates, [N] float64 in the order of adding.

        Their mean is the trace of the diagonal, and their spread gives its standard error.
        """
        return torch.stack(self._squared_norms).double().cpu() if self._squared_norms else torch.empty(0).double()

    def _add_sharded(self, rollouts: Sequence[Rollout], progress: Callable[[int], None] | None) -> None:
        """One response per pass and process; a process that has run out of responses adds zeros."""
        passes = ShardedBackward(self.model, squares=True)
        with passes.measuring():
            for i in range(largest(len(rollouts), self.model.device)):
                is_mine = i < len(rollouts)
                score = self._scores(self._collate([rollouts[i] if is_mine else DUMMY])).sum()
                squared_norm = passes.run(score if is_mine else 0 * score, self._sums)
                if is_mine:
                    self._squared_norms.append(squared_norm)
                    if progress is not None:
                        progress(1)
        self.num_responses += len(rollouts)

    def _parts(self, lengths: Sequence[int]) -> list[list[int]]:
        """Responses of each backward pass."""
        parts: list[list[int]] = []
        for group in split_micro_batches(lengths, max_tokens=self.batch_tokens):
            # The first of a group is its longest.
            parts += [group] if self.batching.is_worth_it(lengths[group[0]]) else [[i] for i in group]
        return parts

    def _add_together(self, rollouts: Sequence[Rollout]) -> Tensor:
        batch = self._collate(rollouts)

        def score(logits_CV: Tensor, tokens: slice) -> Tensor:
            logprobs_CV = (logits_CV / self.temperature).log_softmax(-1)
            return logprobs_CV.gather(-1, batch.targets[tokens, None]).sum()

        return BatchedScores(self.model, self._sums).add(batch, score)

    def _add_one(self, rollout: Rollout) -> Tensor:
        # A parameter without influence gets no gradient.
        norms = [torch.zeros((), device=self.model.device)]

        def square(name: str, grad: Tensor) -> None:
            # By blocks: the second pass finds them in the cache, and no norm sums too many numbers in float32.
            block = block_elements(grad.device)
            for total, g in zip(self._sums[name].view(-1).split(block), grad.reshape(-1).split(block), strict=True):
                total.addcmul_(g, g)
                norms.append(torch.linalg.vector_norm(g, dtype=total.dtype))

        with consuming_gradients(self.parameters, square) as backward:
            backward(self._scores(self._collate([rollout])).sum())
        return torch.stack(norms).double().square().sum()[None]


class GradientEstimator(_Mean):
    """Weighted mean of token scores over responses, with its sign.

        ĝ_i = (1/M) Σ_m Σ_t w_mt ∂_i log p_θ(y_mt | s_mt)

    With the advantage of a response on each of its tokens this is the policy gradient of arXiv 2609.36262, eqs. 6 and
    17; with w = log π_T − log p_θ the one of K2 distillation (eq. 18), up to its token count; with w = 1 that of
    maximum likelihood. Neither length nor horizon divides. A response whose weights are all 0 counts in M and costs no
    pass. Memory: one number per measured coordinate and the gradient of one parameter at a time.

    Args:
        model: any Hugging Face causal LM; where it is sharded, each process adds responses of its own, in as many calls
            as the others, and holds the mean of its own coordinates.
        names: parameters to measure; None measures every one with `requires_grad`.
        temperature: temperature that the responses were sampled at.
        chunk_tokens: response tokens whose logits exist at a time.
        batch_tokens: most tokens per backward pass, padding included.

    Attributes:
        num_responses: M, responses so far.
    """

    def add(
        self,
        rollouts: Sequence[Rollout],
        weights: Sequence[Tensor | float],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Add responses to the mean. After an error the sums are undefined; the model is not.

        Args:
            rollouts: the responses.
            weights: for each response one number, or one per response token [tokens].
            progress: called with the number of responses that have just been added.

        Raises:
            UserError: if a weight is not finite, or their count is not the number of responses or response tokens.
        """
        assert not self._is_finished, "the mean has been taken"
        if len(weights) != len(rollouts):
            raise UserError(f"weights: {len(weights)} for {len(rollouts)} responses; give one entry per response")
        token_weights = [_token_weights(r, w) for r, w in zip(rollouts, weights, strict=True)]
        active = [i for i, w in enumerate(token_weights) if bool(w.any())]
        groups = split_micro_batches([rollouts[i].num_tokens for i in active], max_tokens=self.batch_tokens)
        if is_sharded(self.model):
            self._add_sharded(rollouts, token_weights, [[active[i] for i in group] for group in groups])
            if progress is not None:
                progress(len(rollouts))
            self.num_responses += len(rollouts)
            return
        with (
            measuring(self.model, self.parameters),
            consuming_gradients(self.parameters, lambda name, grad: self._sums[name].add_(grad)) as backward,
        ):
            for group in groups:
                members = [active[i] for i in group]
                logprobs_N = self._scores(self._collate([rollouts[i] for i in members]))
                weights_N = torch.cat([token_weights[i] for i in members]).to(logprobs_N)
                backward((logprobs_N * weights_N).sum())
                if progress is not None:
                    progress(len(members))
        if progress is not None and len(active) < len(rollouts):
            progress(len(rollouts) - len(active))
        self.num_responses += len(rollouts)

    def _add_sharded(
        self, rollouts: Sequence[Rollout], token_weights: Sequence[Tensor], groups: Sequence[Sequence[int]]
    ) -> None:
        """A group of responses per pass and process; a process that has run out of groups adds zeros."""
        passes = ShardedBackward(self.model, squares=False)
        with passes.measuring():
            for i in range(largest(len(groups), self.model.device)):
                members = groups[i] if i < len(groups) else []
                logprobs_N = self._scores(self._collate([rollouts[m] for m in members] or [DUMMY]))
                weights_N = torch.cat([*(token_weights[m] for m in members), torch.empty(0)]).to(logprobs_N)
                passes.run((logprobs_N * weights_N).sum() if members else 0 * logprobs_N.sum(), self._sums)


def _token_weights(rollout: Rollout, weight: Tensor | float) -> Tensor:
    """Weights of a response's tokens, [tokens] float64."""
    weights = torch.as_tensor(weight, dtype=torch.float64).detach().cpu()
    num_tokens = len(rollout.response_ids)
    if weights.ndim and tuple(weights.shape) != (num_tokens,):
        raise UserError(
            f"weights: the response to {rollout.problem_id} has {num_tokens} tokens, its weights have the shape "
            f"{tuple(weights.shape)}; give one number, or one per token"
        )
    if not bool(weights.isfinite().all()):
        raise UserError(f"weights: a weight of the response to {rollout.problem_id} is not finite; was it rewarded?")
    return weights.expand(num_tokens)
