import copy
import json

import pytest
import torch
from lightning.pytorch import Callback
from transformers import AutoModelForCausalLM, AutoTokenizer

from fisher_lit.logprobs import response_logprobs
from fisher_lit.modules import SFT
from fisher_lit.rollout import DemonstrationDataModule, TransformersEngine
from fisher_lit.rollout.batch import collate
from integration.helpers import data, fit, policy, scalars, sgd


class Gap(Callback):
    """The largest difference between recorded log-probabilities and those of the weights about to be updated."""

    def __init__(self):
        self.largest = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        micro = collate(batch.rollouts, pad_id=0)
        with torch.no_grad():
            scores = response_logprobs(pl_module.model, micro)
        self.largest.append(float((scores.logprobs - micro.sampler_logprobs).abs().max()))


class LaggingEngine(TransformersEngine):
    """Samples from the weights of one update ago: the mistake that the check must find."""

    def __init__(self):
        super().__init__()
        self.copies = []

    def sync_weights(self, model):
        self.copies.append(copy.deepcopy(model))
        super().sync_weights(self.copies[max(0, len(self.copies) - 2)])


@pytest.mark.parametrize(("engine", "fresh"), [(TransformersEngine, True), (LaggingEngine, False)])
def test_rollouts_come_from_the_current_weights(engine, fresh):
    gap = Gap()
    fit(policy(), data(engine=engine()), gap, max_steps=5)
    assert len(gap.largest) == 5
    assert (max(gap.largest) < 1e-4) == fresh


class Gradient(Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.value = torch.cat([p.grad.flatten().double() for p in pl_module.parameters()])


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-6), ("64-true", 1e-12)])
def test_gradient_does_not_depend_on_the_micro_batch_split(precision, tolerance):
    gradients = []
    for split in (
        {"micro_batch_responses": 32},
        {"micro_batch_responses": 3},
        {"micro_batch_responses": None, "micro_batch_tokens": 50},
        {"micro_batch_responses": 32, "logprob_chunk_tokens": 5},
    ):
        seen = Gradient()
        fit(policy(**split), data(), seen, max_steps=1, precision=precision)
        gradients.append(seen.value)
    assert gradients[0].norm() > 0
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() / gradients[0].norm() < tolerance


def test_gradient_is_the_dr_grpo_estimator():
    """Against one backward per response of (r - mean r)·log p(y|x), summed and divided by responses × horizon."""
    seen, batches = Gradient(), []

    class Keep(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            batches.append((batch, copy.deepcopy(pl_module.model)))

    fit(policy(), data(), seen, Keep(), max_steps=1, precision="64-true")
    batch, model = batches[0]
    want = torch.zeros_like(seen.value)
    for i, r in enumerate(batch.rollouts):
        group = [o.reward for o in batch.rollouts[i // 8 * 8 : i // 8 * 8 + 8]]
        model.zero_grad()
        logits = model(torch.tensor([r.prompt_ids + r.response_ids])).logits[0, len(r.prompt_ids) - 1 : -1]
        logits.log_softmax(-1)[range(len(r.response_ids)), list(r.response_ids)].sum().backward()
        score = torch.cat([p.grad.flatten() for p in model.parameters()])
        want -= (r.reward - sum(group) / 8) * score / (32 * 8)
    # The ratio to the float32 log-probabilities of the sampler is 1 up to their rounding.
    assert (seen.value - want).norm() / want.norm() < 1e-5


def test_gradient_norm_is_clipped_after_callbacks():
    class Big(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            for p in pl_module.parameters():
                p.grad.fill_(1.0)

    start, module = {}, policy(optimizer=sgd(1.0), gradient_clip=0.5)

    class Keep(Callback):
        def on_train_start(self, trainer, pl_module):
            start.update({n: p.detach().clone() for n, p in pl_module.named_parameters()})

    fit(module, data(), Big(), Keep(), max_steps=1)
    moved = torch.cat([(p.detach() - start[n]).flatten() for n, p in module.named_parameters()])
    assert moved.norm().item() == pytest.approx(0.5, rel=1e-3)


def test_prompts_are_a_permutation_each_epoch():
    seen = []

    class Keep(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append([r.problem_id for r in batch.rollouts if r.sample == 0])

    # 40 problems, 4 per update: epochs of 10 updates.
    fit(policy(), data(responses_per_prompt=2), Keep(), max_steps=25)
    epochs = [[i for update in seen[e : e + 10] for i in update] for e in (0, 10)]
    assert len(set(epochs[0])) == 40
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


def test_same_seed_same_numbers_and_another_seed_others(run):
    short = ["--trainer.max_steps", 4, "--trainer.limit_val_batches", 0]
    a, b = (run("fit", *short, name=name) for name in "ab")
    c = run("fit", *short, "--seed_everything", 1, name="c")
    for tag in ("train/loss", "train/reward", "train/gradient_norm", "train/entropy"):
        assert scalars(a, tag) == scalars(b, tag)
        assert scalars(a, tag) != scalars(c, tag)


def test_quickstart_writes_what_it_promises(run):
    out = run(
        "fit",
        "--trainer.max_steps",
        6,
        "--trainer.val_check_interval",
        4,
        "--data.init_args.val.init_args.num_problems",
        20,
    )
    assert [step for step, _ in scalars(out, "val/accuracy")] == [0, 4, 6]
    for tag in (
        "train/reward", "train/zero_advantage_groups", "train/response_length", "train/truncated", "train/entropy",
        "train/gradient_norm", "train/lr", "train/logprob_gap_mean", "train/logprob_gap_max", "perf/tokens_per_second",
        "perf/seconds_generation", "perf/seconds_reward", "perf/seconds_update",
    ):  # fmt: skip
        assert len(scalars(out, tag)) == 6, tag
    assert all(value < 1e-4 for _, value in scalars(out, "train/logprob_gap_max"))
    lines = [json.loads(line) for line in (out / "completions" / "val_step_000006.jsonl").read_text().splitlines()]
    assert len(lines) == 20 * 8
    accuracy = 100 * sum(line["reward"] for line in lines) / len(lines)
    assert scalars(out, "val/accuracy")[-1][1] == pytest.approx(accuracy, rel=1e-5)
    solved = 100 * len({line["problem_id"] for line in lines if line["reward"] == 1}) / 20
    assert scalars(out, "val/pass@8")[-1][1] == pytest.approx(solved, rel=1e-5)
    exported = out / "hf" / "step_000006"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    assert tokenizer.decode(tokenizer("12+34=")["input_ids"]) == "12+34="
    assert model.dtype == torch.float32


def test_validate_and_test_score_a_model_directory(run):
    small = ["--data.init_args.val.init_args.num_problems", 10]
    out = run("validate", *small)
    assert len((out / "completions" / "val_step_000000.jsonl").read_text().splitlines()) == 80
    out = run(
        "test",
        "--data.init_args.test",
        "fisher_lit.problems.ArithmeticProblems",
        "--data.init_args.test.num_problems",
        5,
    )
    assert len((out / "completions" / "test_step_000000.jsonl").read_text().splitlines()) == 40


def test_evaluation_leaves_training_as_it_is(run):
    short = ["--trainer.max_steps", 4]
    with_val = run("fit", *short, "--trainer.val_check_interval", 1, name="with_val")
    without = run("fit", *short, "--trainer.limit_val_batches", 0, name="without")
    for tag in ("train/loss", "train/gradient_norm"):
        assert scalars(with_val, tag) == scalars(without, tag)


def test_bf16_keeps_float32_parameters():
    module = policy()
    trainer = fit(module, data(), max_steps=1, precision="bf16-mixed")
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert trainer.global_step == 1


def test_sft_raises_the_likelihood_of_demonstrations():
    losses = []

    class Keep(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            losses.append(float(trainer.callback_metrics["train/loss"]))
            assert {r.text for r in batch.rollouts} <= {p.problem.answer for p in trainer.datamodule.prompts["train"]}
            assert all(r.response_ids[-1] == pl_module.tokenizer.eos_token_id for r in batch.rollouts)

    module = SFT("tiny-base", micro_batch_responses=8, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    fit(module, data(kind=DemonstrationDataModule, responses_per_prompt=1, prompts_per_update=40), Keep(), max_steps=30)
    assert losses[-1] < 0.7 * losses[0]


def test_wrong_share_of_demonstrations():
    module = data(kind=DemonstrationDataModule, responses_per_prompt=1, wrong_share=0.4, prompts_per_update=40)
    right = []

    class Keep(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            right.extend(r.text == r.gold for r in batch.rollouts)

    fit(SFT("tiny-base", micro_batch_responses=40, optimizer=sgd(0.0)), module, Keep(), max_steps=25)
    # 1,000 demonstrations; another problem may have the same answer, so a little more than 60% are right.
    assert 0.56 < sum(right) / len(right) < 0.68
