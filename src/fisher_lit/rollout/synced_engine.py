"""An engine that holds a copy of the trainer's weights."""

from abc import abstractmethod

import torch
from transformers import PreTrainedModel

from fisher_lit.errors import UserError
from fisher_lit.rollout.engine import Engine
from fisher_lit.rollout.weight_sync import check_probe, fingerprint, probe_tokens, trainer_logprobs


class SyncedEngine(Engine):
    """Sends weights that changed, and proves with a probe that the engine then holds them.

    Args:
        dtype: what the engine computes in.
        probe_every_n_syncs: weight syncs from one probe to the next; the first always has one.
        probe_tolerance: largest mean absolute difference of the probe's log-probabilities, nats per token.
        batch_timeout: seconds that the responses to one call may take.
    """

    def __init__(
        self, dtype: torch.dtype, probe_every_n_syncs: int, probe_tolerance: float | None, batch_timeout: float
    ) -> None:
        if probe_every_n_syncs < 1:
            raise UserError(f"engine: `probe_every_n_syncs` must be at least 1, got {probe_every_n_syncs}")
        for name, value in {"probe_tolerance": probe_tolerance, "batch_timeout": batch_timeout}.items():
            if value is not None and not value > 0:
                raise UserError(f"engine: `{name}` must be above 0, got {value}")
        self.dtype = dtype
        self.probe_every_n_syncs = probe_every_n_syncs
        self.probe_tolerance = probe_tolerance
        self.batch_timeout = batch_timeout
        self.num_syncs = 0
        self._held: int | None = None

    @abstractmethod
    def _send(self, model: PreTrainedModel) -> None:
        """Give the engine all weights."""

    @abstractmethod
    def _probe_logprobs(self, token_ids: list[int]) -> list[float]:
        """The engine's log-probabilities of all tokens but the first, nats."""

    @property
    @abstractmethod
    def _max_model_len(self) -> int:
        """Most tokens of a prompt and its response."""

    def _sync(self, model: PreTrainedModel, *, probe: bool = False) -> None:
        """Send the weights, unless the engine holds these very ones."""
        current = fingerprint(model)
        if current == self._held:
            return
        # Until the probe has passed it is unknown what the engine holds.
        self._held = None
        self._send(model)
        if probe or self.num_syncs % self.probe_every_n_syncs == 0:
            tokens = probe_tokens(model, self._max_model_len)
            found, want = self._probe_logprobs(tokens), trainer_logprobs(model, tokens)
            check_probe(found, want, dtype=self.dtype, tolerance=self.probe_tolerance)
        self.num_syncs += 1
        self._held = current
