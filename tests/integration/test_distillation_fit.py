"""Fits of the distillation objectives with the shipped tiny student and teacher."""

import copy

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from fisher_lit.callbacks.analysis import read_records
from fisher_lit.errors import UserError
from fisher_lit.logprobs import response_logprobs
from fisher_lit.modules import FullVocabDistillation, K2Distillation, PGDistillation
from fisher_lit.rollout.batch import collate
from fisher_lit.teacher import Teacher
from integration.helpers import ROOT, data, fit, scalars, sgd
from integration.test_analyses import analyses
from integration.test_analyses import run as analysed

OPD_TINY = ROOT / "configs" / "opd_tiny.yaml"
KINDS = [K2Distillation, PGDistillation, FullVocabDistillation]


def distillation(kind, dtype="float32", **kwargs):
    settings = {"micro_batch_responses": 8, "optimizer": sgd(0.1)}
    return kind("tiny-base", teacher=Teacher("tiny-teacher", dtype=dtype), **settings | kwargs)


class Gradient(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batch, self.model = batch, copy.deepcopy(pl_module.model)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.value = torch.cat([p.grad.flatten().double() for p in pl_module.parameters()])


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_does_not_depend_on_the_micro_batch_split(kind):
    gradients = []
    for split in ({"micro_batch_responses": 32}, {"micro_batch_responses": 3}, {"logprob_chunk_tokens": 5}):
        seen = Gradient()
        fit(distillation(kind, dtype="float64", **split), data(), seen, max_steps=1, precision="64-true")
        gradients.append(seen.value)
    assert gradients[0].norm() > 0
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() / gradients[0].norm() < 1e-12


def test_k2_gradient_is_the_weighted_score_sum():
    """−(1/N_tok) Σ_t (log π_T − log p_θ) ∂ log p_θ, one response at a time."""
    seen, module = Gradient(), distillation(K2Distillation)
    fit(module, data(), seen, max_steps=1, precision="64-true")
    num_tokens = sum(len(r.response_ids) for r in seen.batch.rollouts)
    want = torch.zeros_like(seen.value)
    for rollout in seen.batch.rollouts:
        seen.model.zero_grad()
        micro = collate([rollout], pad_id=0)
        logp = response_logprobs(seen.model, micro).logprobs
        with torch.no_grad():
            teacher = response_logprobs(module.teacher.network, micro).logprobs
        (-(teacher - logp).detach() * logp).sum().backward()
        want += torch.cat([p.grad.flatten() for p in seen.model.parameters()]) / num_tokens
    # The teacher scores in float32.
    assert (seen.value - want).norm() / want.norm() < 1e-5


def test_teacher_is_in_no_checkpoint_and_no_optimizer(tmp_path):
    module = distillation(K2Distillation)
    before = None

    class Keep(Callback):
        def on_train_start(self, trainer, pl_module):
            nonlocal before
            before = [p.clone() for p in pl_module.teacher.network.parameters()]

    checkpoint = ModelCheckpoint(dirpath=tmp_path, save_last=True, every_n_train_steps=1)
    trainer = fit(module, data(), checkpoint, Keep(), max_steps=2, enable_checkpointing=True)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert all(key.startswith(("model.", "evaluation.")) for key in saved["state_dict"])
    student = sum(p.numel() for p in module.model.parameters())
    assert sum(p.numel() for p in module.parameters()) == student
    assert sum(p.numel() for group in trainer.optimizers[0].param_groups for p in group["params"]) == student
    assert all(torch.equal(a, b) for a, b in zip(before, module.teacher.network.parameters(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_analyses_run_in_every_objective(tmp_path, kind):
    analysed(tmp_path / "run", *analyses(steps=[0]), module=distillation(kind), max_steps=1)
    for name in ("fisher", "recall", "retention", "token_fisher", "bound"):
        (record,) = read_records(tmp_path / "run" / "analyses" / f"{name}.jsonl")
        assert record["step"] == 0
    assert record["values"]["violations"] == 0
    assert record["values"]["signal_scale"] > 0
    recall = read_records(tmp_path / "run" / "analyses" / "recall.jsonl")[0]["values"]
    assert recall["q=5"] > 3 * recall["q=5/random"]


def test_tiny_distillation_moves_the_student_towards_the_teacher(run):
    out = run("fit", "--trainer.max_steps", 100, "--data.init_args.val.init_args.num_problems", 100, config=OPD_TINY)
    for tag in ("train/teacher_logprob", "train/student_logprob", "train/teacher_rare_tokens", "train/reverse_kl_k1"):
        assert len(scalars(out, tag)) == 100
    k3 = [value for _, value in scalars(out, "train/reverse_kl_k3")]
    assert sum(k3[-10:]) < 0.65 * sum(k3[:10])
    accuracy = [value for _, value in scalars(out, "val/accuracy")]
    assert accuracy[-1] > accuracy[0] + 8
    assert not scalars(out, "train/reward")


def test_one_response_has_no_group_to_compare_with():
    with pytest.raises(UserError, match="`responses_per_prompt` is 1, so every response is its own group mean"):
        fit(distillation(PGDistillation, micro_batch_responses=4), data(responses_per_prompt=1), max_steps=1)
