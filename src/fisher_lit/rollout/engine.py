"""What a rollout engine is: token ids in, token ids with log-probabilities out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedModel

from fisher_lit.rollout.sampling import Sampling


@dataclass(frozen=True)
class SampleRequest:
    """One response to draw: the prompt's token ids and the seed of the response's own random numbers."""

    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Sample:
    """A drawn response.

    Attributes:
        token_ids: the response's token ids; an observed stop token is the last one.
        logprobs: log-probability (nats) of each under the distribution that it was drawn from.
        finish_reason: "stop" or "length".
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]


class Engine(ABC):
    """Draws responses from the weights that it was last given.

    Every sampling knob is explicit, each response has a seed of its own, and results do not depend on which
    responses share a batch (up to the rounding of matrix products of another shape).
    """

    @abstractmethod
    def sync_weights(self, model: PreTrainedModel) -> None:
        """Draw from `model`'s present weights from now on."""

    @abstractmethod
    def generate(
        self,
        requests: Sequence[SampleRequest],
        *,
        sampling: Sampling,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        progress: Callable[[int], None] | None = None,
    ) -> list[Sample]:
        """Draw one response per request, in the order of the requests.

        Args:
            requests: prompts with seeds.
            sampling: how tokens are drawn.
            max_new_tokens: horizon of a response, tokens.
            stop_ids: token ids that end a response.
            progress: called with the number of responses just finished.
        """
