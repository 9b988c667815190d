"""What one optimizer update reports, accumulated over its micro-batches."""

import logging
import math

import torch
import torch.distributed as dist

from fisher_lit.errors import EngineError
from fisher_lit.logprobs import TokenScores
from fisher_lit.rollout.batch import MicroBatch, RolloutBatch
from fisher_lit.sharding import all_reduce

log = logging.getLogger(__name__)


class UpdateStatistics:
    """Sums over the response tokens of an update, kept on the device until the update ends."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), device=device)
        self.entropy = torch.zeros((), device=device)
        self.gap_total = torch.zeros((), device=device)
        self.gap_max = torch.zeros((), device=device)
        self.gap_k3 = torch.zeros((), device=device)
        self.num_tokens = 0

    def add(self, loss: torch.Tensor, scores: TokenScores, micro: MicroBatch) -> None:
        """Add a micro-batch: its share of the loss, its tokens' entropy and their gap to the sampler."""
        log_ratio = scores.logprobs.detach() - micro.sampler_logprobs
        gap = log_ratio.abs()
        self.loss += loss.detach()
        self.entropy += scores.entropy.sum()
        self.gap_total += gap.sum()
        self.gap_max = torch.maximum(self.gap_max, gap.max())
        # The k3 estimate of KL(sampler ‖ trainer): r − 1 − log r with r = p_trainer / p_sampler, never negative.
        self.gap_k3 += (log_ratio.expm1() - log_ratio).sum()
        self.num_tokens += len(micro.targets)

    def compute(self) -> dict[str, float]:
        """loss; entropy and the gap between sampler and trainer in nats, the latter only if there was a sampler.

        The gap is |log p_sampler − log p_trainer| as mean and largest, and as KL(sampler ‖ trainer) per token. All
        processes call this together: the values are those of the whole update.
        """
        sums = torch.stack([self.loss, self.entropy, self.gap_total, self.gap_k3]).double()
        sums = torch.cat([sums, sums.new_tensor([self.num_tokens])])
        all_reduce(sums)
        all_reduce(self.gap_max, dist.ReduceOp.MAX)
        loss, entropy, gap_total, gap_k3, num_tokens = sums.tolist()
        values = {"loss": loss, "entropy": entropy / num_tokens}
        if not math.isnan(gap_total):
            values["logprob_gap_mean"] = gap_total / num_tokens
            values["logprob_gap_max"] = float(self.gap_max)
            values["logprob_gap_k3"] = gap_k3 / num_tokens
        return values


def check_logprob_gap(mean: float, *, warn: float | None, stop: float | None, update: int) -> None:
    """Warn of, or stop at, a sampler whose log-probabilities are not the trainer's.

    Args:
        mean: mean |log p_sampler − log p_trainer| of an update, nats per token.
        warn: warn above it; None never does.
        stop: stop above it, or where the mean is not a number; None never does.
        update: number of the update, for the message.

    Raises:
        EngineError: above `stop`.
    """
    text = (
        f"the sampler's and the trainer's log-probabilities of update {update} differ by {mean:.3g} nats per token "
        f"on average"
    )
    if stop is not None and not mean <= stop:
        raise EngineError(
            f"{text}, more than `logprob_gap_stop` ({stop:g}); training stopped before this update. The engine draws "
            f"from other weights or another distribution; use fisher_lit.rollout.TransformersEngine"
        )
    if warn is not None and not mean <= warn:
        log.warning("%s, more than `logprob_gap_warn` (%g)", text, warn)


def batch_statistics(batch: RolloutBatch) -> dict[str, float]:
    """Mean response length (tokens) and share of truncated responses (0 to 1)."""
    truncated = sum(r.finish_reason == "length" for r in batch.rollouts)
    return {
        "response_length": batch.num_response_tokens / len(batch.rollouts),
        "truncated": truncated / len(batch.rollouts),
    }
