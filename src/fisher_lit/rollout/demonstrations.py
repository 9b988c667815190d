"""Demonstrated responses in place of sampled ones, for supervised fine-tuning."""

import random
from collections.abc import Sequence

from typing_extensions import override

from fisher_lit.errors import UserError
from fisher_lit.problems import Problem
from fisher_lit.prompts import Prompt
from fisher_lit.rollout.batch import Rollout, RolloutBatch
from fisher_lit.rollout.datamodule import RolloutDataModule
from fisher_lit.rollout.sampling import derive_seed


class DemonstrationDataModule(RolloutDataModule):
    """Trains on the answers of the problems themselves; evaluation and analyses still draw rollouts.

    A demonstration is the problem's answer as text, then the tokenizer's end-of-sequence token.

    Args:
        wrong_share: share of the demonstrations that show the answer of another problem, drawn anew each time; a model
            trained on them knows the task and is often wrong, which leaves room for reinforcement learning.
        **kwargs: settings of the rollouts; `responses_per_prompt` must be 1.
    """

    def __init__(self, wrong_share: float = 0.0, responses_per_prompt: int = 1, **kwargs) -> None:
        super().__init__(responses_per_prompt=responses_per_prompt, **kwargs)
        if not 0 <= wrong_share <= 1:
            raise UserError(f"data: `wrong_share` must be in [0, 1], got {wrong_share}")
        if responses_per_prompt != 1:
            raise UserError(
                f"data: a problem has one demonstration, but `responses_per_prompt` is {responses_per_prompt}; set 1"
            )
        self.wrong_share = wrong_share

    @override
    def objective_batch(self, on_policy: RolloutBatch) -> RolloutBatch:
        firsts = [r for r in on_policy.rollouts if r.sample == 0]
        prompts = [Prompt(Problem(r.problem_id, r.question, r.gold), r.prompt_ids) for r in firsts]
        # No update has this number, so these are demonstrations of their own.
        return self.train_batch(prompts, -1)

    @override
    def train_batch(self, prompts: Sequence[Prompt], update: int) -> RolloutBatch:
        rollouts = []
        for prompt in prompts:
            problem = prompt.problem
            chance = random.Random(derive_seed("demonstration", self.seed, update, problem.id))
            shown = problem
            if chance.random() < self.wrong_share:
                shown = chance.choice(self.prompts["train"]).problem
            ids = tuple(self.tokenizer(shown.answer, add_special_tokens=False)["input_ids"])
            ids = (*ids, self.tokenizer.eos_token_id)[: self.max_response_tokens]
            rollouts.append(
                Rollout(
                    problem_id=problem.id,
                    question=problem.question,
                    gold=problem.answer,
                    sample=0,
                    prompt_ids=prompt.token_ids,
                    response_ids=ids,
                    # A demonstration was not drawn from the policy.
                    logprobs=(float("nan"),) * len(ids),
                    finish_reason="stop" if ids[-1] == self.tokenizer.eos_token_id else "length",
                    text=shown.answer,
                )
            )
        return RolloutBatch(rollouts, responses_per_prompt=1, horizon=self.max_response_tokens)
