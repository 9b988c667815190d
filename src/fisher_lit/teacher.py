"""A frozen teacher that scores the very tokens a student sampled."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fisher_lit.errors import UserError
from fisher_lit.logprobs import response_logprobs
from fisher_lit.models import load_config, load_model, load_tokenizer, resolve_model
from fisher_lit.rollout.batch import Rollout, collate, split_micro_batches
from fisher_lit.rollout.vllm_engine import VLLMEngine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass
class Teacher:
    """A Hugging Face causal LM that is never trained and never saved.

    Args:
        model: directory or hub name; `tiny-teacher` is shipped with the package.
        dtype: float32, bfloat16, float16 or float64, of its weights and computation.
        device_map: how transformers spreads it over devices (needs the package `accelerate`); null puts it where the
            student is.
        batch_tokens: most tokens scored at a time, padding included.
        chunk_tokens: response tokens whose logits exist at a time.
        engine: score with vLLM in place of transformers, which gives the sampled tokens' log-probabilities only.
    """

    model: str
    dtype: str = "float32"
    device_map: str | None = None
    batch_tokens: int = 16384
    chunk_tokens: int = 1024
    engine: VLLMEngine | None = None
    # Not settings. The owner holds a Teacher, not its network, so the network is no part of the student's module.
    _network: PreTrainedModel | None = field(default=None, init=False, repr=False)
    _is_loaded: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"teacher: `dtype` must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name in ("batch_tokens", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"teacher: `{name}` must be at least 1, got {getattr(self, name)}")

    def load(self, student_tokenizer: PreTrainedTokenizerBase, device: torch.device) -> None:
        """Load the network, unless that is done.

        Raises:
            UserError: if it cannot be loaded, or its vocabulary is not the student's.
        """
        if self._is_loaded:
            return
        path = resolve_model(self.model)
        require_same_vocabulary(student_tokenizer, load_tokenizer(path))
        network = load_model(path, load_config(path), dtype=DTYPES[self.dtype], device_map=self.device_map)
        network.eval().requires_grad_(False)
        if self.engine is not None:
            # vLLM keeps the only copy.
            self.engine.sync_weights(network)
        else:
            self._network = network if self.device_map is not None else network.to(device)  # type: ignore[arg-type]
        self._is_loaded = True

    @property
    def network(self) -> PreTrainedModel:
        """The network, for objectives that need its whole distribution.

        Raises:
            UserError: if vLLM holds it.
        """
        if self.engine is not None:
            raise UserError(
                "teacher: `engine` gives no more than the sampled tokens' log-probabilities, and the whole "
                "distribution is asked for (by FullVocabDistillation or FisherBound); leave `engine` out"
            )
        assert self._network is not None, "load comes first"
        return self._network

    @torch.no_grad()
    def logprobs(self, rollouts: Sequence[Rollout], temperature: float = 1.0) -> list[Tensor]:
        """log π_T(y_t | s_t) of every response token, nats.

        Args:
            rollouts: the student's responses.
            temperature: temperature of both policies.

        Returns:
            One tensor [response tokens] per rollout, float32 on the CPU.

        Raises:
            UserError: if vLLM is to score at another temperature than 1.
        """
        scored: dict[int, Tensor] = {}
        for group in split_micro_batches([r.num_tokens for r in rollouts], max_tokens=self.batch_tokens):
            members = [rollouts[i] for i in group]
            parts = self._from_engine(members, temperature) if self.engine else self._from_network(members, temperature)
            scored |= dict(zip(group, parts, strict=True))
        return [scored[i] for i in range(len(rollouts))]

    def _from_network(self, rollouts: Sequence[Rollout], temperature: float) -> Sequence[Tensor]:
        micro = collate(rollouts, pad_id=0, device=self.network.device)
        with torch.autocast(micro.input_ids.device.type, enabled=False):
            scores = response_logprobs(self.network, micro, temperature=temperature, chunk_tokens=self.chunk_tokens)
        return scores.logprobs.float().cpu().split([len(r.response_ids) for r in rollouts])

    def _from_engine(self, rollouts: Sequence[Rollout], temperature: float) -> Sequence[Tensor]:
        assert self.engine is not None
        if temperature != 1:
            raise UserError(
                f"teacher: `engine` scores at temperature 1, and the responses are sampled at {temperature}; leave "
                f"`engine` out"
            )
        scores = self.engine.score([r.prompt_ids + r.response_ids for r in rollouts])
        return [torch.tensor(s[len(r.prompt_ids) - 1 :]) for s, r in zip(scores, rollouts, strict=True)]


def require_same_vocabulary(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> None:
    """Refuse a teacher whose token ids mean something else. Padding of the embedding matrix does not matter.

    Raises:
        UserError: naming both sizes and the first id that differs.
    """
    mine = {i: token for token, i in student.get_vocab().items()}
    theirs = {i: token for token, i in teacher.get_vocab().items()}
    if mine == theirs:
        return
    first = min(i for i in mine.keys() | theirs.keys() if mine.get(i) != theirs.get(i))
    raise UserError(
        f"teacher: its vocabulary ({len(theirs)} tokens) is not the student's ({len(mine)}): id {first} is "
        f"{theirs.get(first)!r} for the teacher and {mine.get(first)!r} for the student; take one of the same family"
    )
