"""Which prompts and seeds the analyses of a fit draw their own responses with."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from fisher_lit.errors import UserError
from fisher_lit.prompts import Prompt
from fisher_lit.rollout.sampling import derive_seed


@dataclass(frozen=True)
class AnalysisSamples:
    """On-policy samples of the analyses; the defaults are the paper's (Table 5).

    Fisher and gradient prompts are drawn from the training prompts without replacement. They are disjoint and the same
    at every step; each policy answers them anew.

    Args:
        fisher_prompts: prompts of the Fisher estimate, one response each.
        gradient_prompts: prompts of the gradient estimate.
        gradient_responses: responses to each gradient prompt.
        prompt_seed: seed of the choice of prompts.
        fisher_seed: seed of the responses of the Fisher estimate.
        gradient_seed: seed of the responses of the gradient estimate.
    """

    fisher_prompts: int = 800
    gradient_prompts: int = 300
    gradient_responses: int = 8
    prompt_seed: int = 800
    fisher_seed: int = 100
    gradient_seed: int = 200

    def __post_init__(self) -> None:
        for name in ("fisher_prompts", "gradient_prompts", "gradient_responses"):
            if getattr(self, name) < 1:
                raise UserError(f"data: `analysis.{name}` must be at least 1, got {getattr(self, name)}")

    def split(self, prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
        """Fisher prompts and gradient prompts.

        Raises:
            UserError: if there are too few training prompts.
        """
        needed = self.fisher_prompts + self.gradient_prompts
        if len(prompts) < needed:
            raise UserError(
                f"data: `analysis` asks for {self.fisher_prompts} Fisher and {self.gradient_prompts} gradient prompts, "
                f"but there are {len(prompts)} training prompts; lower `fisher_prompts` or `gradient_prompts`"
            )
        chosen = random.Random(derive_seed("analysis", self.prompt_seed)).sample(range(len(prompts)), needed)
        picked = [prompts[i] for i in chosen]
        return picked[: self.fisher_prompts], picked[self.fisher_prompts :]
