"""Rollouts and how they become padded micro-batches.

Shapes: B = sequences of a micro-batch, T = tokens of its longest sequence, N = response tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fisher_lit.errors import UserError


@dataclass(frozen=True)
class Rollout:
    """One response to one prompt.

    Attributes:
        problem_id: identifier of the problem in its source.
        question: the problem's text.
        gold: the reference answer.
        sample: index of the response among the responses to its prompt.
        prompt_ids: token ids of the prompt.
        response_ids: token ids of the response; an observed stop token is its last one, a truncated response has none.
        logprobs: log-probability (nats) of each response token under the distribution that it was drawn from.
        finish_reason: "stop" where a stop token was drawn, "length" where the horizon cut the response.
        text: the response as text, without special tokens.
        reward: the reward, or NaN where none was computed.
    """

    problem_id: str
    question: str
    gold: str
    sample: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    text: str
    reward: float = float("nan")

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass
class RolloutBatch:
    """The rollouts of one optimizer update, or of one evaluation batch.

    Attributes:
        rollouts: the responses, those to one prompt next to each other.
        responses_per_prompt: size of each group of responses to one prompt.
        horizon: the most tokens that a response may have.
        temperature: sampling temperature; the trainer scores the tokens at the same one.
        seconds: wall-clock seconds by phase ("generation", "reward").
        num_reward_timeouts: answers whose judgement ran into its time limit.
        teacher_logprobs: for distillation, the teacher's log-probability (nats) of each response token, [tokens] each.
        total_responses: responses of the whole update, over all processes; losses divide by it. 0 takes this batch's.
        total_response_tokens: the same for response tokens.
    """

    rollouts: list[Rollout]
    responses_per_prompt: int
    horizon: int
    temperature: float = 1.0
    seconds: dict[str, float] = field(default_factory=dict)
    num_reward_timeouts: int = 0
    teacher_logprobs: list[Tensor] | None = None
    total_responses: int = 0
    total_response_tokens: int = 0

    def __post_init__(self) -> None:
        self.total_responses = self.total_responses or len(self.rollouts)
        self.total_response_tokens = self.total_response_tokens or self.num_response_tokens

    @property
    def rewards(self) -> Tensor:
        """Rewards [prompts, responses_per_prompt], float32."""
        num_prompts = len(self.rollouts) // self.responses_per_prompt
        return torch.tensor([r.reward for r in self.rollouts]).view(num_prompts, self.responses_per_prompt)

    @property
    def num_response_tokens(self) -> int:
        """Response tokens of this process's rollouts, observed stop tokens included."""
        return sum(len(r.response_ids) for r in self.rollouts)


@dataclass(frozen=True)
class MicroBatch:
    """Right-padded token ids of several rollouts.

    Attributes:
        input_ids: [B, T] int64, prompt then response then padding.
        attention_mask: [B, T] int64, 1 on prompt and response.
        response_mask: [B, T] bool, True on response tokens. It follows lengths, never ids: a stop token that is also
            the padding token stays in the response.
        row: [N] int64, the sequence that each response token belongs to, in row-major order.
        targets: [N] int64, the response tokens in the same order.
        sampler_logprobs: [N] float32, the sampler's log-probability of each of them, nats.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    row: Tensor
    targets: Tensor
    sampler_logprobs: Tensor


def collate(rollouts: Sequence[Rollout], *, pad_id: int, device: torch.device | str = "cpu") -> MicroBatch:
    """Pad rollouts on the right to the longest of them.

    Args:
        rollouts: at least one; each has at least one prompt token and one response token.
        pad_id: id written into the padding; it is masked everywhere.
        device: where the tensors go.
    """
    longest = max(r.num_tokens for r in rollouts)
    input_ids = torch.full((len(rollouts), longest), pad_id, dtype=torch.int64)
    response_mask = torch.zeros(len(rollouts), longest, dtype=torch.bool)
    attention_mask = torch.zeros(len(rollouts), longest, dtype=torch.int64)
    for b, rollout in enumerate(rollouts):
        assert rollout.prompt_ids, f"empty prompt for problem {rollout.problem_id}"
        assert rollout.response_ids, f"empty response to problem {rollout.problem_id}"
        tokens = torch.tensor(rollout.prompt_ids + rollout.response_ids)
        input_ids[b, : len(tokens)] = tokens
        attention_mask[b, : len(tokens)] = 1
        response_mask[b, len(rollout.prompt_ids) : len(tokens)] = True
    return MicroBatch(
        input_ids=input_ids.to(device),
        attention_mask=attention_mask.to(device),
        response_mask=response_mask.to(device),
        row=response_mask.nonzero()[:, 0].to(device),
        targets=input_ids[response_mask].to(device),
        sampler_logprobs=torch.tensor([x for r in rollouts for x in r.logprobs]).to(device),
    )


# What a process computes where the others have one more sequence than it has: passes through the whole model.
DUMMY = Rollout("", "", "", 0, (0,), (0,), (0.0,), "length", "")


def split_micro_batches(
    lengths: Sequence[int], *, max_responses: int | None = None, max_tokens: int | None = None
) -> list[list[int]]:
    """Group sequences of similar length, so that little padding is computed.

    Sequences are taken from the longest to the shortest (equal lengths in their given order), and a group is closed
    when the next one would pass a limit. A sequence longer than `max_tokens` is a group of its own.

    Args:
        lengths: tokens of each sequence.
        max_responses: most sequences of a group.
        max_tokens: most tokens of a group, its padding included.

    Returns:
        Indices into `lengths`, each exactly once.

    Raises:
        UserError: if neither or both limits are given, or one is below 1.
    """
    if (max_responses is None) == (max_tokens is None):
        raise UserError(
            f"give exactly one of `micro_batch_responses` ({max_responses}) and `micro_batch_tokens` ({max_tokens})"
        )
    limit = max_responses if max_responses is not None else max_tokens
    assert limit is not None
    if limit < 1:
        name = "micro_batch_responses" if max_responses is not None else "micro_batch_tokens"
        raise UserError(f"`{name}` must be at least 1, got {limit}")
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # The first sequence of a group is its longest, so a row more costs that many tokens.
        cost = 1 if max_responses is not None else (lengths[groups[-1][0]] if groups else 0)
        if not groups or (len(groups[-1]) + 1) * cost > limit:
            groups.append([])
        groups[-1].append(index)
    return groups
