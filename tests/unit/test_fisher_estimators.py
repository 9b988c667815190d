import logging
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
)

import reference
from fisher_lit.errors import UserError
from fisher_lit.fisher.batched_scores import block_elements
from fisher_lit.fisher.estimators import BatchingRule, FisherEstimator, GradientEstimator
from fisher_lit.fisher.layers import batched_scores_obstacle
from fisher_lit.objectives import group_advantages
from fisher_lit.rollout.batch import Rollout

torch.set_num_threads(1)

SIZES = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
GEMMA = {**SIZES, "head_dim": 8}
CONFIGS = {
    "qwen3": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "qwen3-untied": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False),
    "qwen2-biases": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "llama-padding-row": LlamaConfig(**SIZES, pad_token_id=0, tie_word_embeddings=True),
    "phi-head-bias-layernorm": PhiConfig(**SIZES, partial_rotary_factor=0.5),
    "stablelm-layernorm": StableLmConfig(**SIZES),
    "gemma": GemmaConfig(**GEMMA, pad_token_id=None),
    "gemma2-soft-cap": Gemma2Config(**GEMMA, pad_token_id=None, attn_implementation="eager"),
    "gemma3-scaled-embedding": Gemma3TextConfig(**GEMMA, pad_token_id=None),
}


def make_model(name, dtype=torch.float64):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    if dtype == torch.float64 and not name.startswith("gemma"):
        reference.use_exact_norms(model)
    model = model.to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights and biases away from 1 and 0, larger weights: nothing is tested at a special point.
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def make_rollout(prompt, response, index=0, reward=0.0):
    return Rollout(
        problem_id=f"p{index}",
        question="",
        gold="",
        sample=0,
        prompt_ids=tuple(prompt),
        response_ids=tuple(response),
        logprobs=(0.0,) * len(response),
        finish_reason="stop",
        text="",
        reward=reward,
    )


def random_rollouts(count, vocab_size=11, seed=0, longest=6):
    """Ids of padding and repeated ids occur in prompts and responses; lengths differ."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randint(vocab_size, (int(torch.randint(1, longest, (), generator=g)),), generator=g).tolist()  # noqa: E731
    return [make_rollout(draw(), draw(), i) for i in range(count)]


def fisher(model, rollouts, **options):
    estimator = FisherEstimator(model, **options)
    estimator.add(rollouts)
    return estimator.mean(), estimator.squared_norms()


def relative_difference(got, want):
    assert got.keys() == want.keys()
    return max(float((got[n] - want[n]).abs().max() / want[n].abs().max()) for n in want)


@pytest.mark.parametrize("name", CONFIGS)
def test_batched_squares_equal_the_loop(name):
    model, rollouts = make_model(name), random_rollouts(12)
    assert batched_scores_obstacle(model) is None
    together, norms_together = fisher(model, rollouts, batched=True)
    one_by_one, norms_one_by_one = fisher(model, rollouts, batched=False)
    # Gemma's norms compute in float32 whatever the model's dtype, the gradient of their weight too.
    tolerance = 1e-6 if name.startswith("gemma") else 1e-10
    assert relative_difference(together, one_by_one) < tolerance
    torch.testing.assert_close(norms_together, norms_one_by_one, rtol=10 * tolerance, atol=0)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-untied", "phi-head-bias-layernorm", "llama-padding-row"])
def test_fisher_equals_the_reference(name, batched):
    model, rollouts = make_model(name), random_rollouts(5)
    got, norms = fisher(model, rollouts, batched=batched, chunk_tokens=2)
    scores = [reference.score(model, r.prompt_ids, r.response_ids) for r in rollouts]
    want = reference.combine([(1 / len(rollouts), h) for h in scores], torch.square)
    assert relative_difference(got, want) < 1e-9
    want_norms = torch.stack([reference.flatten(h).square().sum() for h in scores])
    torch.testing.assert_close(norms, want_norms, rtol=1e-9, atol=0)


def test_float32_batches_equal_the_loop_and_split_anywhere():
    model, rollouts = make_model("qwen3", torch.float32), random_rollouts(40)
    one_by_one, _ = fisher(model, rollouts, batched=False)
    for batch_tokens in (20, 64, 4096):
        together, _ = fisher(model, rollouts, batched=True, batch_tokens=batch_tokens)
        assert relative_difference(together, one_by_one) < 1e-5
        assert all(t.dtype == torch.float32 and bool((t >= 0).all()) for t in together.values())


def test_added_piecewise_or_at_once():
    model, rollouts = make_model("qwen3"), random_rollouts(9)
    whole, norms = fisher(model, rollouts)
    estimator = FisherEstimator(model)
    seen = []
    for start in range(0, 9, 4):
        estimator.add(rollouts[start : start + 4], progress=seen.append)
    assert sum(seen) == estimator.num_responses == 9
    assert relative_difference(estimator.mean(), whole) < 1e-12
    torch.testing.assert_close(estimator.squared_norms(), norms)


def test_temperature_scales_the_logits():
    model, rollouts = make_model("qwen3-untied"), random_rollouts(4)
    cooled = make_model("qwen3-untied")
    with torch.no_grad():
        cooled.lm_head.weight /= 0.7
    for batched in (True, False):
        got, _ = fisher(model, rollouts, batched=batched, temperature=0.7, names=["model.norm.weight"])
        want, _ = fisher(cooled, rollouts, batched=batched, names=["model.norm.weight"])
        assert relative_difference(got, want) < 1e-9


def test_names_restrict_the_measurement():
    model, rollouts = make_model("qwen3"), random_rollouts(6)
    everything, _ = fisher(model, rollouts)
    names = ["model.layers.1.self_attn.q_proj.weight", "model.layers.0.input_layernorm.weight"]
    for batched in (True, False):
        part, norms = fisher(model, rollouts, batched=batched, names=names)
        assert part.keys() == set(names)
        assert relative_difference(part, {n: everything[n] for n in names}) < 1e-10
        torch.testing.assert_close(norms.mean(), sum(t.sum() for t in part.values()), rtol=1e-10, atol=0)
    with pytest.raises(UserError, match="nonsense"):
        FisherEstimator(model, names=["nonsense"])


# The exact model: V = 3, at most 3 tokens, token 0 stops; 15 responses.
PROMPT, HORIZON, STOP = (1, 2), 3, 0


@pytest.fixture(scope="module")
def exact():
    model = reference.exact_qwen3(3)
    responses = reference.enumerate_responses(3, HORIZON, STOP)
    return model, responses, reference.probabilities(model, PROMPT, responses)


def test_enumerated_probabilities_and_scores_add_up(exact):
    """Σ π = 1, and the score identity E[h] = 0 (eq. 5)."""
    model, responses, weights = exact
    assert len(responses) == 15
    assert sum(weights) == pytest.approx(1, abs=1e-12)
    assert max(weights) < 0.6
    estimator = GradientEstimator(model)
    estimator.add([make_rollout(PROMPT, y) for y in responses], weights)
    scale = max(float(h.abs().max()) for h in reference.score(model, PROMPT, responses[0]).values())
    assert max(float(g.abs().max()) for g in estimator.mean().values()) < 1e-12 * scale


def test_exact_fisher_is_the_sum_of_token_fishers(exact):
    """Eq. 2 against eq. 8, both enumerated."""
    model, responses, weights = exact
    per_response = [fisher(model, [make_rollout(PROMPT, y)])[0] for y in responses]
    sequence = reference.flatten(reference.combine(zip(weights, per_response, strict=True)))
    by_token = sum(
        w * reference.token_fisher_by_scores(model, PROMPT + prefix)
        for prefix, w in reference.reachable_prefixes(model, PROMPT, HORIZON, STOP)
    )
    torch.testing.assert_close(sequence, by_token, rtol=1e-9, atol=1e-12)
    exact_fisher = reference.flatten(reference.exact_fisher(model, PROMPT, HORIZON, STOP))
    torch.testing.assert_close(sequence, exact_fisher, rtol=1e-9, atol=1e-12)


def test_sampled_fisher_converges(exact):
    """n = 4,000 responses: the trace within 4 standard errors, 99% of the coordinates within 4 of theirs."""
    model, responses, weights = exact
    n = 4000
    drawn = torch.multinomial(torch.tensor(weights), n, replacement=True, generator=torch.Generator().manual_seed(5))
    got, norms = fisher(model, [make_rollout(PROMPT, responses[i], k) for k, i in enumerate(drawn.tolist())])
    want = reference.flatten(reference.exact_fisher(model, PROMPT, HORIZON, STOP))
    fourth = reference.flatten(
        reference.combine(
            [(w, reference.score(model, PROMPT, y)) for w, y in zip(weights, responses, strict=True)],
            lambda h: h**4,
        )
    )
    errors = ((fourth - want.square()) / n).clamp_min(0).sqrt()
    difference = (reference.flatten(got) - want).abs()
    assert float((difference <= 4 * errors + 1e-12).double().mean()) > 0.99
    trace_error = float(norms.std()) / n**0.5
    assert abs(float(norms.mean()) - float(want.sum())) < 4 * trace_error
    # The test could tell a wrong estimator: the standard error is small against the value.
    assert trace_error < 0.05 * float(want.sum())


def test_sampled_policy_gradient_converges(exact):
    """Eq. 17 with the group's mean: E[ĝ] = (1 − 1/G) E[r h], n = 1,500 prompts with G = 4."""
    model, responses, weights = exact
    rewards = torch.tensor([float(sum(y) % 2) for y in responses], dtype=torch.float64)
    num_prompts, group = 1500, 4
    generator = torch.Generator().manual_seed(7)
    drawn = torch.multinomial(torch.tensor(weights), num_prompts * group, replacement=True, generator=generator)
    advantages = group_advantages(rewards[drawn].view(num_prompts, group)).flatten()
    estimator = GradientEstimator(model)
    estimator.add([make_rollout(PROMPT, responses[i]) for i in drawn.tolist()], advantages.tolist())
    got = reference.flatten(estimator.mean())
    scores = torch.stack([reference.flatten(reference.score(model, PROMPT, y)) for y in responses])
    # What these draws give, exactly.
    totals = torch.zeros(len(responses), dtype=torch.float64).index_add(0, drawn, advantages)
    torch.testing.assert_close(got, totals @ scores / len(drawn), rtol=1e-9, atol=1e-12)
    want = (1 - 1 / group) * (torch.tensor(weights) * rewards) @ scores
    per_prompt = (advantages[:, None] * scores[drawn]).view(num_prompts, group, -1).mean(1)
    errors = per_prompt.std(0) / num_prompts**0.5
    assert float(((got - want).abs() <= 4 * errors + 1e-12).double().mean()) > 0.99
    assert float(errors.norm()) < 0.2 * float(want.norm())


def test_gradient_takes_a_weight_per_token(exact):
    model, _, _ = exact
    rollouts = [make_rollout((1,), (2, 1, 0)), make_rollout((2, 1), (1, 1))]
    weights = [torch.tensor([0.5, -2.0, 3.0]), torch.tensor([1.5, 0.0])]
    estimator = GradientEstimator(model)
    estimator.add(rollouts, weights)
    losses = [
        (reference.token_logprobs(model, r.prompt_ids, r.response_ids) * w).sum()
        for r, w in zip(rollouts, weights, strict=True)
    ]
    want = reference.gradient(model, sum(losses) / 2)
    assert relative_difference(estimator.mean(), want) < 1e-10


def test_responses_without_weight_cost_no_pass_and_count(exact):
    model, _, _ = exact
    passes = []
    handle = model.model.register_forward_pre_hook(lambda *_: passes.append(1))
    estimator, seen = GradientEstimator(model, batch_tokens=1), []
    estimator.add([make_rollout((1,), (2, 0), i) for i in range(3)], [0.0, 1.0, torch.zeros(2)], seen.append)
    handle.remove()
    assert len(passes) == 1
    assert sum(seen) == estimator.num_responses == 3
    want = reference.combine([(1 / 3, reference.score(model, (1,), (2, 0)))])
    assert relative_difference(estimator.mean(), want) < 1e-10


@pytest.mark.parametrize(
    ("weights", "message"),
    [([float("nan")], "not finite"), ([torch.ones(3)], "2 tokens"), ([1.0, 1.0], "2 for 1")],
)
def test_bad_weights_are_refused(exact, weights, message):
    with pytest.raises(UserError, match=message):
        GradientEstimator(exact[0]).add([make_rollout((1,), (2, 0))], weights)


def test_nothing_added_is_refused(exact):
    for estimator in (FisherEstimator(exact[0]), GradientEstimator(exact[0])):
        with pytest.raises(UserError, match="at least one response"):
            estimator.mean()


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("surroundings", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(batched, surroundings, fails):
    model = make_model("qwen3")
    model.train()
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    parameters = dict(model.named_parameters())
    parameters["model.layers.0.mlp.up_proj.weight"].requires_grad_(False)
    kept = parameters["model.norm.weight"]
    kept.grad = torch.full_like(kept, 3.0)
    grads = {n: p.grad for n, p in parameters.items()}
    flags = {n: p.requires_grad for n, p in parameters.items()}
    state = torch.get_rng_state()

    def progress(_):
        if fails:
            raise KeyError

    estimators = [FisherEstimator(model, batched=batched), GradientEstimator(model)]
    calls = [lambda e: e.add(random_rollouts(3), progress), lambda e: e.add(random_rollouts(3), [1.0] * 3, progress)]
    for estimator, call in zip(estimators, calls, strict=True):
        with surroundings(), pytest.raises(KeyError) if fails else nullcontext():
            call(estimator)
        assert all(p.grad is grads[n] for n, p in parameters.items())
        assert bool((kept.grad == 3).all())
        assert {n: p.requires_grad for n, p in parameters.items()} == flags
        assert [m.training for m in model.modules()] == modes
        assert torch.equal(torch.get_rng_state(), state)
        assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters.values())
        assert not any(m._forward_hooks for m in model.modules())
    # The frozen parameter was not measured.
    assert "model.layers.0.mlp.up_proj.weight" not in estimators[0].parameters


def test_dropout_is_off_while_measuring():
    config = Qwen3Config(**SIZES, head_dim=8, attention_dropout=0.5)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double()
    rollouts = random_rollouts(4)
    want, _ = fisher(model.eval(), rollouts)
    got, _ = fisher(model.train(), rollouts)
    assert relative_difference(got, want) < 1e-12
    assert model.training


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(batched, use_reentrant):
    model, rollouts = make_model("qwen3"), random_rollouts(5)
    want, _ = fisher(model, rollouts, batched=batched)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    model.train()
    passes = []
    handle = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    got, _ = fisher(model, rollouts, batched=batched)
    handle.remove()
    # Each forward pass of a layer ran twice.
    assert len(passes) == (2 if batched else 2 * len(rollouts)) + (1 if batched else 0)
    assert relative_difference(got, want) < 1e-12


def test_the_loop_keeps_one_gradient_at_a_time():
    model, rollouts = make_model("qwen3", torch.float32), random_rollouts(3)
    parameters = dict(model.named_parameters())
    alive = []

    def count(*_):
        alive.append(sum(p.grad is not None for p in parameters.values()))

    handles = [m.register_full_backward_hook(count) for m in model.modules() if not list(m.children())]
    estimator = FisherEstimator(model, batched=False)
    sums = dict(estimator._sums)
    estimator.add(rollouts, progress=count)
    assert len(alive) > 30
    assert max(alive) == 0
    for handle in handles:
        handle.remove()
    # The result is the accumulator itself.
    assert all(t is sums[n] for n, t in estimator.mean().items())


class LargestTensor(TorchDispatchMode):
    """Most elements of any tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else [result]:
            if isinstance(item, torch.Tensor):
                self.num_elements = max(self.num_elements, item.numel())
        return result


def test_batches_make_no_gradient_per_sequence():
    config = Qwen3Config(**{**SIZES, "vocab_size": 32, "hidden_size": 256, "intermediate_size": 512}, head_dim=128)
    model = AutoModelForCausalLM.from_config(config)
    largest_weight = max(p.numel() for p in model.parameters())
    rollouts = random_rollouts(64, vocab_size=32, longest=3)
    with LargestTensor() as largest:
        fisher(model, rollouts, batched=True)
    assert 64 * largest_weight > 10 * block_elements(torch.device("cpu"))
    assert largest.num_elements <= block_elements(torch.device("cpu"))


@pytest.mark.parametrize("batched", [True, False])
def test_autocast_computes_in_bfloat16_and_sums_in_float32(batched):
    model, rollouts = make_model("qwen3", torch.float32), random_rollouts(20)
    want, _ = fisher(model, rollouts, batched=batched)
    with torch.autocast("cpu", torch.bfloat16):
        # Weights that the caller's forward has cast are in autocast's cache.
        model(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()
        model.zero_grad()
        got, _ = fisher(model, rollouts, batched=batched)
    assert all(p.grad is None for p in model.parameters())
    assert all(t.dtype == torch.float32 for t in got.values())
    a, b = reference.flatten(got), reference.flatten(want)
    assert not torch.equal(a, b)
    assert float((a - b).norm() / b.norm()) < 0.05
    # A bfloat16 sum keeps 8 bits: adding a part 1/1000 as large would change nothing.
    assert float((a.bfloat16().float() != a).double().mean()) > 0.9


def test_weights_cast_by_autocast_do_not_leak_gradients():
    """Autocast keeps cast weights, with the flags they had; passes with other flags must not meet them."""
    model = make_model("qwen3", torch.float32)
    rollouts = [make_rollout((1, 2), (3,) * 20), *random_rollouts(6)]
    alive, counts = [], []

    def count(num_responses):
        alive.append([n for n, p in model.named_parameters() if p.grad is not None])
        counts.append(num_responses)

    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=torch.tensor([[1, 2]]))
        # The long response by itself, then the others together.
        FisherEstimator(model, batched=True, batch_tokens=42).add(rollouts, count)
        model(input_ids=torch.tensor([[1, 2]]))
        FisherEstimator(model, batched=False, names=["model.norm.weight"]).add(rollouts, count)
        model.requires_grad_(False)
        FisherEstimator(model, batched=False, names=[n for n, _ in model.named_parameters()]).add(rollouts, count)
        assert not model(input_ids=torch.tensor([[1, 2]])).logits.requires_grad
    assert counts[0] == 1 < counts[1]
    assert sum(counts) == 3 * 7
    assert not any(alive)


@pytest.mark.parametrize("batched", [True, False])
def test_bfloat16_parameters_get_float32_sums(batched):
    model, rollouts = make_model("qwen3", torch.float32), random_rollouts(20)
    want, _ = fisher(model, rollouts, batched=batched)
    got, _ = fisher(model.bfloat16(), rollouts, batched=batched)
    assert all(t.dtype == torch.float32 for t in got.values())
    a, b = reference.flatten(got), reference.flatten(want)
    assert float((a - b).norm() / b.norm()) < 0.1


def test_unknown_layers_are_scored_one_by_one_and_said_once(caplog):
    torch.manual_seed(0)
    gpt2 = GPT2Config(vocab_size=11, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=1)
    opt = OPTConfig(
        vocab_size=11, hidden_size=16, ffn_dim=24, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=16
    )
    moe = Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8)
    expected = {"Conv1D": gpt2, "embed_positions": opt, "mlp": moe}
    for word, config in expected.items():
        # Grouped expert products have no float64.
        dtype = torch.float32 if config is moe else torch.float64
        model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
        assert word in batched_scores_obstacle(model)
        with pytest.raises(UserError, match="`batched` is true"):
            FisherEstimator(model, batched=True)
        with caplog.at_level(logging.INFO):
            got, _ = fisher(model, random_rollouts(3))
            fisher(model, random_rollouts(1))
        assert sum(word in message for message in caplog.messages) == 1
        scores = [reference.score(model, r.prompt_ids, r.response_ids) for r in random_rollouts(3)]
        want = reference.combine([(1 / 3, h) for h in scores], torch.square)
        got, want = reference.flatten(got), reference.flatten(want)
        assert float((got - want).abs().max() / want.max()) < (1e-4 if config is moe else 1e-9)


class Flattened(torch.nn.Module):
    """Runs a layer on all tokens of all sequences at once."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.flatten(0, 1)).view_as(x)


def test_unusual_calls_of_known_layers_are_noticed():
    twice = make_model("qwen3")
    twice.model.layers[1].mlp = twice.model.layers[0].mlp
    shared = make_model("qwen3")
    shared.model.layers[1].mlp.up_proj.weight = shared.model.layers[0].mlp.up_proj.weight
    mixed = make_model("qwen3")
    mixed.model.layers[0].mlp = Flattened(mixed.model.layers[0].mlp)
    for model, message in ((twice, "used twice"), (shared, "shared by 2 modules"), (mixed, "mixes sequences")):
        assert message in batched_scores_obstacle(model)
        rollouts = random_rollouts(3)
        got, _ = fisher(model, rollouts)
        scores = [reference.score(model, r.prompt_ids, r.response_ids) for r in rollouts]
        want = reference.combine([(1 / 3, h) for h in scores], torch.square)
        assert relative_difference(got, want) < 1e-9


def test_long_sequences_of_large_models_are_scored_one_by_one(exact):
    rule = BatchingRule(exact[0], None)
    assert rule.is_worth_it(100)
    assert rule.is_worth_it(3000)
    rule.num_parameters = 1_700_000_000
    assert rule.is_worth_it(100)
    assert not rule.is_worth_it(1000)
    assert BatchingRule(exact[0], True).is_worth_it(10**6)
    assert not BatchingRule(exact[0], False).is_worth_it(1)
