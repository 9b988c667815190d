"""What one optimizer update reports, accumulated over its micro-batches."""

import torch

from fisher_lit.logprobs import TokenScores
from fisher_lit.rollout.batch import MicroBatch, RolloutBatch


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
        """loss; entropy and |log p_sampler − log p_trainer| in nats; the latter only if there was a sampler."""
        values = {"loss": float(self.loss), "entropy": float(self.entropy) / self.num_tokens}
        if not torch.isnan(self.gap_total):
            values["logprob_gap_mean"] = float(self.gap_total) / self.num_tokens
            values["logprob_gap_max"] = float(self.gap_max)
        return values


def batch_statistics(batch: RolloutBatch) -> dict[str, float]:
    """Mean response length (tokens) and share of truncated responses (0 to 1)."""
    truncated = sum(r.finish_reason == "length" for r in batch.rollouts)
    return {
        "response_length": batch.num_response_tokens / len(batch.rollouts),
        "truncated": truncated / len(batch.rollouts),
    }
