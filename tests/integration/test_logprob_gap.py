"""A sampler that disagrees with the trainer, in real fits."""

import copy

import pytest
import torch

from fisher_lit.errors import EngineError, UserError
from fisher_lit.rollout import TransformersEngine
from integration.helpers import data, fit, policy


class OtherWeights(TransformersEngine):
    """Draws from weights that are not the trainer's."""

    def sync_weights(self, model):
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.model.norm.weight.mul_(0.9)
        super().sync_weights(other)


def test_training_stops_before_the_update():
    module = policy(logprob_gap_stop=0.001)
    fit(module, data(), max_steps=0)
    initial = copy.deepcopy(module.model.state_dict())
    with pytest.raises(EngineError, match=r"of update 0 differ by .* more than `logprob_gap_stop` \(0.001\)"):
        fit(module, data(engine=OtherWeights()))
    assert all(torch.equal(value, initial[name]) for name, value in module.model.state_dict().items())


def test_gap_is_warned_of_once_per_update(caplog):
    fit(policy(logprob_gap_warn=0.001), data(engine=OtherWeights()), max_steps=2)
    assert caplog.text.count("more than `logprob_gap_warn` (0.001)") == 2


@pytest.mark.parametrize("engine", [TransformersEngine, OtherWeights])
def test_importance_weights_change_the_update_only_where_there_is_a_gap(engine):
    plain, weighted = (
        fit(policy(importance_cap=cap), data(engine=engine()), max_steps=1).lightning_module for cap in (None, 1.0)
    )
    moved = max(float((a - b).abs().max()) for a, b in zip(plain.parameters(), weighted.parameters(), strict=True))
    assert (moved < 1e-6) == (engine is TransformersEngine)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"importance_cap": 0.5}, "`importance_cap` must be at least 1, got 0.5"),
        ({"logprob_gap_warn": 0}, "`logprob_gap_warn` must be above 0, got 0"),
        ({"logprob_gap_stop": -1}, "`logprob_gap_stop` must be above 0, got -1"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        policy(**settings)
