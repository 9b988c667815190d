"""What one pass over the evaluation problems collects: metrics, and every completion."""

import json
import os
from pathlib import Path

from torch import nn
from torchmetrics import MeanMetric

from fisher_lit.metrics import AvgAtK, PassAtK
from fisher_lit.rollout.batch import Rollout, RolloutBatch
from fisher_lit.rollout.exchange import gather_rollouts


class Evaluation(nn.Module):
    """Accumulates evaluation batches; its metrics are Lightning-visible torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = AvgAtK()
        self.solved = PassAtK()
        self.response_length = MeanMetric()
        self.truncated = MeanMetric()
        self.rollouts: list[Rollout] = []
        self.responses_per_prompt = 0

    def reset(self) -> None:
        """Forget everything collected."""
        for metric in (self.accuracy, self.solved, self.response_length, self.truncated):
            metric.reset()
        self.rollouts = []

    def update(self, batch: RolloutBatch) -> None:
        """Add the rollouts of one evaluation batch, of which every process has a share."""
        rewards = batch.rewards.to(self.accuracy.device)
        self.accuracy.update(rewards)
        self.solved.update(rewards)
        for rollout in batch.rollouts:
            self.response_length.update(len(rollout.response_ids))
            self.truncated.update(100.0 * (rollout.finish_reason == "length"))
        self.rollouts += gather_rollouts(batch)
        self.responses_per_prompt = batch.responses_per_prompt

    def compute(self) -> dict[str, float]:
        """accuracy, accuracy_stderr, pass@k, truncated: percent; response_length: tokens."""
        return {
            "accuracy": float(self.accuracy.compute()),
            "accuracy_stderr": float(self.accuracy.standard_error()),
            f"pass@{self.responses_per_prompt}": float(self.solved.compute()),
            "response_length": float(self.response_length.compute()),
            "truncated": float(self.truncated.compute()),
        }

    def write_completions(self, path: Path) -> None:
        """One JSON line per response, written whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            for rollout in self.rollouts:
                file.write(json.dumps(completion(rollout), ensure_ascii=False) + "\n")
        temporary.replace(path)

    def examples(self, count: int) -> str:
        """The first responses to the first `count` problems, as Markdown."""
        firsts = [r for r in self.rollouts if r.sample == 0][:count]
        return "\n\n---\n\n".join(
            f"**{r.problem_id}** reward {r.reward:g}, {len(r.response_ids)} tokens, gold `{r.gold}`\n\n"
            f"```\n{r.question}\n```\n\n```\n{r.text}\n```"
            for r in firsts
        )


def completion(rollout: Rollout) -> dict:
    """A rollout as the line that completion files hold."""
    return {
        "problem_id": rollout.problem_id,
        "sample": rollout.sample,
        "question": rollout.question,
        "gold": rollout.gold,
        "response": rollout.text,
        "reward": rollout.reward,
        "finish_reason": rollout.finish_reason,
        "num_tokens": len(rollout.response_ids),
    }
