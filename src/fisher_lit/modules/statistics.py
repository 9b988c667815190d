"""What one optimizer update reports, accumulated over its micro-batches."""

import math

import torch
import torch.distributed as dist

from fisher_lit.logprobs import TokenScores
from fisher_lit.rollout.batch import MicroBatch, RolloutBatch
from fisher_lit.sharding import all_reduce


class UpdateStatistics:
    """Sums over the response tokens of an update, kept on the device until the update ends."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), device=device)
        self.entropy = torch.zeros((), device=device)
        self.gap_total = torch.zeros((), device=device)
        self.gap_max = torch.zeros((), device=device)
        self.num_tokens = 0

    def add(self, loss: torch.Tensor, scores: TokenScores, micro: MicroBatch) -> None:
        """Add a micro-batch: its share of the loss, its tokens' entropy and their gap to the sampler."""
        gap = (scores.logprobs.detach() - micro.sampler_logprobs).abs()
        self.loss += loss.detach()
        self.entropy += scores.entropy.sum()
        self.gap_total += gap.sum()
        self.gap_max = torch.maximum(self.gap_max, gap.max())
        self.num_tokens += len(micro.targets)

    def compute(self) -> dict[str, float]:
        """loss; entropy and |log p_sampler − log p_trainer| in nats; the latter only if there was a sampler.

        The values are those of the whole update: all processes call this together.
        """
        sums = torch.stack([self.loss, self.entropy, self.gap_total]).double()
        sums = torch.cat([sums, sums.new_tensor([self.num_tokens])])
        all_reduce(sums)
        all_reduce(self.gap_max, dist.ReduceOp.MAX)
        loss, entropy, gap_total, num_tokens = sums.tolist()
        values = {"loss": loss, "entropy": entropy / num_tokens}
        if not math.isnan(gap_total):
            values["logprob_gap_mean"] = gap_total / num_tokens
            values["logprob_gap_max"] = float(self.gap_max)
        return values


def batch_statistics(batch: RolloutBatch) -> dict[str, float]:
    """Mean response length (tokens) and share of truncated responses (0 to 1)."""
    truncated = sum(r.finish_reason == "length" for r in batch.rollouts)
    return {
        "response_length": batch.num_response_tokens / len(batch.rollouts),
        "truncated": truncated / len(batch.rollouts),
    }
