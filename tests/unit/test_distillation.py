"""Distillation losses, the teacher's scoring and full-vocabulary divergences, against plain float64 computations."""

import copy

import pytest
import torch
from transformers import Qwen3ForCausalLM

from fisher_lit.divergences import forward_kl
from fisher_lit.errors import UserError
from fisher_lit.objectives import k2_loss, policy_gradient_loss
from fisher_lit.rollout.batch import Rollout, collate
from fisher_lit.teacher import Teacher, require_same_vocabulary
from fisher_lit.tiny import character_tokenizer, tiny_config
from probes import LargestTensor


@pytest.fixture
def teacher_model():
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(tiny_config(20, layers=1, width=32))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    return model


def rollouts(count, seed=0):
    g = torch.Generator().manual_seed(seed)

    def tokens():
        return tuple(torch.randint(0, 20, (int(torch.randint(1, 9, (1,), generator=g)),), generator=g).tolist())

    made = []
    for i in range(count):
        response = tokens()
        made.append(Rollout(str(i), "", "", 0, tokens(), response, (0.0,) * len(response), "stop", ""))
    return made


def next_token_logprobs(model, rollout):
    """[tokens, V] float64 log-probabilities at every position of one response, from a plain forward."""
    ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
    return model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1].double().log_softmax(-1)


def test_k2_gradient_is_the_reverse_kl_gradient():
    """Σ_a p(a) ∂ ½(log p(a) − log q(a))² = ∂ KL(p ‖ q) at every prefix."""
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits, other = torch.randn(2, 7, dtype=torch.float64, generator=g)
        logits.requires_grad_()
        logp, logq = logits.log_softmax(-1), other.log_softmax(-1)
        (want,) = torch.autograd.grad((logp.exp() * (logp - logq)).sum(), logits, retain_graph=True)
        got = torch.zeros(7, dtype=torch.float64)
        for a in range(7):
            loss = k2_loss(logp[a : a + 1], logq[a : a + 1], num_tokens=1)
            got += logp[a].exp().item() * torch.autograd.grad(loss, logits, retain_graph=True)[0]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


def test_k2_weights_each_score_by_the_log_ratio():
    logp = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([-0.5, -2.5, -0.5], dtype=torch.float64)
    k2_loss(logp, teacher, num_tokens=10).backward()
    torch.testing.assert_close(-logp.grad, (teacher - logp.detach()) / 10)


def test_policy_gradient_loss_weights_scores_by_the_signal():
    logp = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    signal = torch.tensor([0.5, 0.5, -2.0], dtype=torch.float64)
    policy_gradient_loss(logp, signal, num_responses=2).backward()
    torch.testing.assert_close(-logp.grad, signal / 2)


@pytest.mark.parametrize(("batch_tokens", "chunk_tokens"), [(10_000, 1000), (30, 3), (1, 1)])
def test_teacher_scores_as_one_by_one(teacher_model, batch_tokens, chunk_tokens):
    made = rollouts(12)
    teacher = Teacher("tiny-teacher", batch_tokens=batch_tokens, chunk_tokens=chunk_tokens)
    teacher._network = teacher_model
    with torch.no_grad():
        for rollout, got in zip(made, teacher.logprobs(made), strict=True):
            want = next_token_logprobs(teacher_model, rollout)
            want = want[range(len(want)), list(rollout.response_ids)]
            torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
            assert not got.requires_grad


def test_teacher_never_holds_all_logits():
    model = Qwen3ForCausalLM(tiny_config(3000, layers=1, width=32))
    teacher = Teacher("tiny-teacher", chunk_tokens=4)
    teacher._network = model
    made = rollouts(20)
    with LargestTensor() as seen:
        teacher.logprobs(made)
    assert sum(len(r.response_ids) for r in made) > 60
    # The head's weight, seen transposed, is larger than a chunk of logits and smaller than all of them.
    assert seen.largest == 32 * 3000


def test_divergences_and_gradient_against_plain_sums(tiny_model, teacher_model):
    student, teacher = tiny_model.double(), teacher_model.double()
    made = rollouts(8)
    forward, reverse, scores = forward_kl(student, teacher, collate(made, pad_id=0), chunk_tokens=5)
    want_forward, want_reverse, want_chosen = [], [], []
    for rollout in made:
        logp, logq = next_token_logprobs(student, rollout), next_token_logprobs(teacher, rollout).detach()
        want_forward.append((logq.exp() * (logq - logp)).sum(-1))
        want_reverse.append((logp.exp() * (logp - logq)).sum(-1).detach())
        want_chosen.append(logp[range(len(logp)), list(rollout.response_ids)])
    torch.testing.assert_close(forward, torch.cat(want_forward), rtol=0, atol=1e-10)
    torch.testing.assert_close(reverse, torch.cat(want_reverse), rtol=0, atol=1e-10)
    torch.testing.assert_close(scores.logprobs, torch.cat(want_chosen), rtol=0, atol=1e-10)
    got = torch.autograd.grad(forward.sum(), list(student.parameters()))
    want = torch.autograd.grad(torch.cat(want_forward).sum(), list(student.parameters()))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-10)
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("rows", [17, 26])
def test_padding_of_an_embedding_matrix_does_not_matter(tiny_model, teacher_model, rows):
    """The teacher has fewer or more rows than the student's 20; only the rows that both have are compared."""
    student = tiny_model.double()
    resized = copy.deepcopy(teacher_model).double()
    resized.resize_token_embeddings(rows, mean_resizing=False)
    made = [r for r in rollouts(30) if max(r.prompt_ids + r.response_ids) < 17]
    forward, _, _ = forward_kl(student, resized, collate(made, pad_id=0))
    common = min(rows, 20)
    want = []
    for rollout in made:
        ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
        positions = slice(len(rollout.prompt_ids) - 1, -1)
        logq = resized(input_ids=ids).logits[0, positions, :common].log_softmax(-1)
        logp = student(input_ids=ids).logits[0, positions].log_softmax(-1)[:, :common]
        want.append((logq.exp() * (logq - logp)).sum(-1))
    torch.testing.assert_close(forward, torch.cat(want), rtol=0, atol=1e-10)


def test_other_vocabulary_is_refused():
    require_same_vocabulary(character_tokenizer(), character_tokenizer())
    other = character_tokenizer()
    other.add_tokens(["x"])
    with pytest.raises(
        UserError, match=r"\(21 tokens\) is not the student's \(20\): id 20 is 'x' for the teacher and None"
    ):
        require_same_vocabulary(character_tokenizer(), other)


@pytest.mark.parametrize(
    ("setting", "message"),
    [({"dtype": "int8"}, "`dtype` must be one of .* got 'int8'"), ({"batch_tokens": 0}, "batch_tokens")],
)
def test_bad_teachers_are_refused(setting, message):
    with pytest.raises(UserError, match=message):
        Teacher("tiny-teacher", **setting)
