import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fisher_lit.errors import UserError
from fisher_lit.rollout.batch import Rollout, collate, split_micro_batches


def rollout(prompt, response, logprobs=None):
    logprobs = logprobs or tuple(-float(i) for i in range(len(response)))
    return Rollout("p", "q", "g", 0, tuple(prompt), tuple(response), logprobs, "stop", "text", 1.0)


def test_collate_masks_follow_lengths_not_ids():
    # The padding id 0 is a prompt token, a response token and the stop token of the second rollout.
    batch = collate([rollout([1, 2, 0], [3, 4]), rollout([0], [0, 0])], pad_id=0)
    assert batch.input_ids.tolist() == [[1, 2, 0, 3, 4], [0, 0, 0, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.response_mask.long().tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 0, 0]]
    assert batch.row.tolist() == [0, 0, 1, 1]
    assert batch.targets.tolist() == [3, 4, 0, 0]
    assert batch.sampler_logprobs.tolist() == [0.0, -1.0, 0.0, -1.0]


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 60), st.booleans())
def test_split_covers_everything_within_the_limit(lengths, limit, by_tokens):
    limits = {"max_tokens": limit} if by_tokens else {"max_responses": limit}
    groups = split_micro_batches(lengths, **limits)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        padded = max(lengths[i] for i in group) * len(group)
        assert len(group) == 1 or (padded if by_tokens else len(group)) <= limit


def test_sorting_leaves_little_padding():
    lengths = torch.randint(10, 1000, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    groups = split_micro_batches(lengths, max_responses=8)
    padded = sum(max(lengths[i] for i in g) * len(g) for g in groups)
    assert padded < 1.15 * sum(lengths)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "exactly one of"),
        ({"max_responses": 1, "max_tokens": 1}, "exactly one of"),
        ({"max_responses": 0}, "`micro_batch_responses` must be at least 1, got 0"),
        ({"max_tokens": -3}, "`micro_batch_tokens` must be at least 1, got -3"),
    ],
)
def test_bad_limits_are_named(limits, message):
    with pytest.raises(UserError, match=message):
        split_micro_batches([1, 2], **limits)
