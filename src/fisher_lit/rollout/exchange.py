"""Batches of rollouts that are spread over processes."""

from dataclasses import replace

import torch

from fisher_lit.rollout.batch import Rollout, RolloutBatch
from fisher_lit.sharding import all_reduce, gather_lists, world_size


def gather_rollouts(batch: RolloutBatch) -> list[Rollout]:
    """The rollouts of all processes, in the order in which one process would have them."""
    return [rollout for part in gather_lists(batch.rollouts) for rollout in part]


def gather_batch(batch: RolloutBatch) -> RolloutBatch:
    """The batch as one process would have it: rollouts in order, counts added, the seconds of the slowest process."""
    if world_size() == 1:
        return batch
    parts: list[RolloutBatch] = [part for (part,) in gather_lists([batch])]
    teacher = [logprobs for part in parts for logprobs in part.teacher_logprobs or []]
    return replace(
        batch,
        rollouts=[rollout for part in parts for rollout in part.rollouts],
        teacher_logprobs=teacher if batch.teacher_logprobs is not None else None,
        num_reward_timeouts=sum(part.num_reward_timeouts for part in parts),
        seconds={phase: max(part.seconds[phase] for part in parts) for phase in batch.seconds},
    )


def count_over_processes(batch: RolloutBatch, device: torch.device) -> None:
    """Fill in the batch's totals over all processes."""
    counts = torch.tensor([len(batch.rollouts), batch.num_response_tokens], device=device)
    all_reduce(counts)
    batch.total_responses, batch.total_response_tokens = counts.tolist()
