"""Rollouts by transformers from the trained module's own weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from typing_extensions import override

from fisher_lit.errors import UserError
from fisher_lit.rollout.engine import Engine, Sample, SampleRequest
from fisher_lit.rollout.sampling import Sampling, draw, next_token_logprobs


@dataclass
class _Row:
    """A response being drawn."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False

    def sample(self) -> Sample:
        return Sample(tuple(self.token_ids), tuple(self.logprobs), "stop" if self.stopped else "length")


class TransformersEngine(Engine):
    """Samples with a key-value cache from the live weights of the trained model; nothing is copied.

    Prompts of similar length share a batch, padded on the left. Finished responses leave the batch, so that a long
    response does not keep computing its neighbours.

    Args:
        max_batch_size: most responses drawn at a time. More is faster until the key-value cache fills the memory.
    """

    def __init__(self, max_batch_size: int = 64) -> None:
        if max_batch_size < 1:
            raise UserError(f"engine: `max_batch_size` must be at least 1, got {max_batch_size}")
        self.max_batch_size = max_batch_size
        self._model: PreTrainedModel | None = None

    @override
    def sync_weights(self, model: PreTrainedModel) -> None:
        self._model = model

    @override
    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[SampleRequest],
        *,
        sampling: Sampling,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        progress: Callable[[int], None] | None = None,
    ) -> list[Sample]:
        assert self._model is not None, "sync_weights comes before generate"
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].prompt_ids))
        samples: dict[int, Sample] = {}
        was_training = self._model.training
        self._model.eval()
        try:
            for start in range(0, len(order), self.max_batch_size):
                indices = order[start : start + self.max_batch_size]
                batch = [requests[i] for i in indices]
                for row in self._generate_batch(self._model, batch, sampling, max_new_tokens, stop_ids):
                    samples[indices[row.index]] = row.sample()
                if progress is not None:
                    progress(len(indices))
        finally:
            self._model.train(was_training)
        return [samples[i] for i in range(len(requests))]

    def _generate_batch(
        self,
        model: PreTrainedModel,
        requests: Sequence[SampleRequest],
        sampling: Sampling,
        max_new_tokens: int,
        stop_ids: frozenset[int],
    ) -> list[_Row]:
        device = model.device
        input_ids, attention_mask = _left_pad([r.prompt_ids for r in requests], max_new_tokens)
        input_ids, attention_mask = input_ids.to(device), attention_mask.to(device)
        uniforms_BT = torch.stack([_uniforms(r.seed, max_new_tokens) for r in requests]).to(device)
        stop = torch.tensor(sorted(stop_ids), device=device, dtype=torch.int64)
        cache = DynamicCache(config=model.config)
        length = input_ids.shape[1]
        positions = (attention_mask[:, :length].cumsum(-1) - 1).clamp_min(0)
        rows = [_Row(i) for i in range(len(requests))]
        active = rows
        for t in range(max_new_tokens):
            output = model(
                input_ids=input_ids,
                attention_mask=attention_mask[:, : length + t],
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logprobs_BV = next_token_logprobs(output.logits[:, -1], sampling)
            tokens_B = draw(logprobs_BV, uniforms_BT[:, t])
            stopped_B = torch.isin(tokens_B, stop)
            drawn = zip(
                active,
                tokens_B.tolist(),
                logprobs_BV.gather(-1, tokens_B[:, None])[:, 0].tolist(),
                stopped_B.tolist(),
                strict=True,
            )
            for row, token, logprob, stopped in drawn:
                row.token_ids.append(token)
                row.logprobs.append(logprob)
                row.stopped = stopped
            if bool(stopped_B.any()):
                keep = (~stopped_B).nonzero()[:, 0]
                if len(keep) == 0:
                    break
                active = [row for row in active if not row.stopped]
                cache.batch_select_indices(keep)
                tokens_B, attention_mask, uniforms_BT = (
                    tokens_B[keep],
                    attention_mask[keep],
                    uniforms_BT[keep],
                )
                positions = positions[keep]
            input_ids, positions = tokens_B[:, None], positions[:, -1:] + 1
        return rows


def _left_pad(prompts: Sequence[tuple[int, ...]], max_new_tokens: int) -> tuple[Tensor, Tensor]:
    """Prompt ids padded on the left [B, L], and their attention mask with room for the response [B, L + horizon]."""
    longest = max(len(p) for p in prompts)
    # The id under the padding is never attended to.
    input_ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.ones(len(prompts), longest + max_new_tokens, dtype=torch.int64)
    for b, prompt in enumerate(prompts):
        input_ids[b, longest - len(prompt) :] = torch.tensor(prompt)
        mask[b, : longest - len(prompt)] = 0
    return input_ids, mask


def _uniforms(seed: int, count: int) -> Tensor:
    """The response's own random numbers [count], float64; from the CPU, so the same on every device."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
