"""A real vLLM server of the shipped tiny model on the loopback, on vLLM's CPU backend."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch

from fisher_lit.errors import EngineError, UserError
from fisher_lit.logprobs import response_logprobs
from fisher_lit.models import load_config, load_model, resolve_model
from fisher_lit.rollout import Sampling, TransformersEngine, VLLMServerEngine
from fisher_lit.rollout.batch import Rollout, collate
from fisher_lit.rollout.engine import SampleRequest
from fisher_lit.rollout.sampling import derive_seed
from integration.helpers import data, fit, policy

KWARGS = {"sampling": Sampling(), "max_new_tokens": 8, "stop_ids": frozenset([1])}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        # The `vllm` command of the CPU wheel looks for the metadata of the GPU one; this is what `vllm serve` runs.
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", resolve_model("tiny-base"),
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
        "--no-enable-chunked-prefill", "--kv-cache-memory-bytes", str(1 << 28), "--max-num-seqs", "64",
        "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs",
        "--weight-transfer-config", '{"backend": "fisher_lit"}',
    ]  # fmt: skip
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with log.open("w") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 150
        while True:
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture
def model():
    path = resolve_model("tiny-base")
    return load_model(path, load_config(path))


def requests(count):
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 10, (count,), generator=g).tolist()
    return [
        SampleRequest(tuple(torch.randint(2, 20, (n,), generator=g).tolist()), derive_seed("test", i))
        for i, n in enumerate(lengths)
    ]


def generate(engine, model, batch, **kwargs):
    engine.sync_weights(model)
    return engine.generate(batch, **KWARGS | kwargs)


def test_greedy_equals_the_transformers_engine(url, model):
    for stop_ids in (frozenset([1]), frozenset([7, 9])):
        settings = {"sampling": Sampling(temperature=0), "stop_ids": stop_ids}
        want = generate(TransformersEngine(), model, requests(40), **settings)
        assert generate(VLLMServerEngine(url, dtype="float32"), model, requests(40), **settings) == want


def test_logprobs_are_the_trainers_after_training(url):
    engine = VLLMServerEngine(url, dtype="float32")
    module = policy(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    fit(module, data(engine=engine), max_steps=5)
    assert engine.num_syncs > 2
    batch = requests(60)
    samples = generate(engine, module.model, batch)
    rollouts = [
        Rollout(str(i), "", "", 0, r.prompt_ids, s.token_ids, s.logprobs, s.finish_reason, "")
        for i, (r, s) in enumerate(zip(batch, samples, strict=True))
    ]
    micro = collate(rollouts, pad_id=0)
    with torch.no_grad():
        want = response_logprobs(module.model, micro).logprobs
    torch.testing.assert_close(micro.sampler_logprobs, want, rtol=0, atol=1e-4)
    assert generate(engine, module.model, batch[::-1])[::-1] == samples


def test_skipped_sync_is_caught(url, model, monkeypatch):
    engine = VLLMServerEngine(url, dtype="float32")
    engine.sync_weights(model)
    monkeypatch.setattr(engine, "_send", lambda model: None)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.1)
    with pytest.raises(EngineError, match="does not hold the trainer's weights"):
        engine.sync_weights(model)


def test_request_that_the_server_refuses_is_one_line(url, model):
    engine = VLLMServerEngine(url, dtype="float32")
    engine.sync_weights(model)
    with pytest.raises(EngineError, match=r"/v1/completions answers 400 \(") as error:
        engine.generate([SampleRequest((10**6,), 0)], **KWARGS)
    assert "\n" not in str(error.value)


def test_server_that_is_not_there(model):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        engine = VLLMServerEngine(f"http://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(EngineError, match=r"/v1/models does not answer .* Start the server with VLLM_SERVER_DEV"):
            engine.sync_weights(model)


def test_server_that_hangs(model):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = VLLMServerEngine(f"http://127.0.0.1:{silent.getsockname()[1]}", batch_timeout=0.2)
        with pytest.raises(
            EngineError, match=r"/v1/models does not answer \(timed out\); the last checkpoint is intact"
        ):
            engine.sync_weights(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "localhost:8000"}, "`url` must start with http:// or https://, got 'localhost:8000'"),
        ({"url": "http://x", "max_concurrent_requests": 0}, "`max_concurrent_requests` must be at least 1, got 0"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        VLLMServerEngine(**settings)
