"""The analysis callbacks in real fits of the shipped tiny model."""

import json

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

from fisher_lit.callbacks import (
    FisherBound,
    FisherEstimation,
    GradientRecall,
    ParameterMask,
    Retention,
    TokenFisherProbe,
)
from fisher_lit.callbacks.analysis import read_records
from fisher_lit.errors import UserError
from fisher_lit.fisher.coordinates import Coordinates
from fisher_lit.fisher.vectors import load_masks, load_vectors
from fisher_lit.modules import SFT
from fisher_lit.rollout import DemonstrationDataModule, TransformersEngine
from fisher_lit.rollout.analysis_samples import AnalysisSamples
from integration.helpers import OVERLAYS, data, fit, policy, scalars, small_quickstart

SMALL = AnalysisSamples(fisher_prompts=24, gradient_prompts=10, gradient_responses=4)
QS = [0.1, 1.0, 5.0]


def analyses(**when):
    when = when or {"every_n_steps": 2}
    return [
        FisherEstimation(qs=QS, **when),
        GradientRecall(qs=QS, save=True, **when),
        Retention(qs=QS, **when),
        TokenFisherProbe(qs=QS, num_prompts=6, num_positions=2, num_pairs=3, **when),
        FisherBound(**when),
    ]


def run(folder, *callbacks, module=None, datamodule=None, **kwargs):
    module = module or policy(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    logger = TensorBoardLogger(folder.parent, folder.name, version="")
    datamodule = datamodule or data(analysis=SMALL)
    fit(module, datamodule, *callbacks, logger=logger, log_every_n_steps=1, **{"max_steps": 4} | kwargs)
    return module


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analyses") / "run"
    return folder, run(folder, *analyses())


def largest(vector, size):
    """Indices of the `size` largest values, ties to the lower index."""
    return set(np.argsort(-vector, kind="stable")[:size].tolist())


def flat(path, model):
    coordinates = Coordinates.from_model(model)
    return np.concatenate([t.flatten().double().numpy() for t in load_vectors(path, coordinates)[0].values()])


def test_recall_is_the_overlap_of_the_saved_vectors(measured):
    folder, module = measured
    records = read_records(folder / "analyses" / "recall.jsonl")
    assert [record["step"] for record in records] == [0, 2, 4]
    for record in records:
        name = f"step_{record['step']:06d}.safetensors"
        fisher = flat(folder / "analyses" / f"fisher_{name}", module.model)
        gradient = abs(flat(folder / "analyses" / f"gradient_{name}", module.model))
        for q in QS:
            size = int(q * len(fisher) / 100 + 1e-9)
            want = 100 * len(largest(fisher, size) & largest(gradient, size)) / size
            assert record["values"][f"q={q:g}"] == pytest.approx(want)
            assert record["values"][f"q={q:g}"] > 5 * record["values"][f"q={q:g}/random"]


def test_retention_and_share_are_those_of_the_saved_fishers(measured):
    folder, module = measured
    first, last = (flat(folder / "analyses" / f"fisher_step_00000{step}.safetensors", module.model) for step in (0, 4))
    values = read_records(folder / "analyses" / "retention.jsonl")[-1]["values"]
    shares = read_records(folder / "analyses" / "fisher.jsonl")[-1]["values"]
    assert shares["trace"] == pytest.approx(last.sum(), rel=1e-4)
    for q in QS:
        size = int(q * len(first) / 100 + 1e-9)
        before, after = largest(first, size), largest(last, size)
        assert values[f"high/q={q:g}"] == pytest.approx(100 * len(before & after) / size)
        low = len(first) - len(before | after)
        assert values[f"low/q={q:g}"] == pytest.approx(100 * low / (len(first) - size))
        outside = np.ones(len(first), dtype=bool)
        outside[list(before)] = False
        assert values[f"magnitude/q={q:g}"] == pytest.approx(last[outside].mean() / first[outside].mean(), rel=1e-4)
        assert shares[f"share/q={q:g}"] == pytest.approx(100 * last[list(after)].sum() / last.sum(), rel=1e-4)


def test_curves_and_pictures_are_written(measured):
    folder, _ = measured
    for tag in ("recall/q=1", "recall/q=1/random", "retention/high/q=1", "retention/magnitude/q=1", "fisher/share/q=1",
                "token_fisher/ratio/all", "token_fisher/ratio/low=99", "bound/tightness/mean"):  # fmt: skip
        assert [step for step, _ in scalars(folder, tag)] == [0, 2, 4], tag
    assert [value for _, value in scalars(folder, "bound/violations")] == [0, 0, 0]
    for name in ("fisher_share", "fisher_top_1"):
        assert (folder / "analyses" / f"{name}_step_000004.png").read_bytes().startswith(b"\x89PNG")
    assert not list((folder / "analyses").glob("*.tmp"))


def test_training_is_left_as_it_is(measured, tmp_path):
    """Same weights, losses and random streams with and without the analyses, bit for bit."""
    folder, module = measured
    random_state = torch.get_rng_state()
    plain = run(tmp_path / "plain")
    assert torch.equal(random_state, torch.get_rng_state())
    for tag in ("train/loss", "train/reward", "train/gradient_norm", "train/entropy"):
        assert scalars(folder, tag) == scalars(tmp_path / "plain", tag)
    for a, b in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


class CountingEngine(TransformersEngine):
    calls = 0

    def generate(self, requests, **kwargs):
        self.calls += 1
        return super().generate(requests, **kwargs)


def test_shared_samples_are_drawn_once(tmp_path):
    engine = CountingEngine()
    run(tmp_path / "run", *analyses(steps=[0, 1]), datamodule=data(analysis=SMALL, engine=engine), max_steps=1)
    # Two steps of Fisher and gradient responses, and one update.
    assert engine.calls == 5


def test_prompts_are_disjoint_and_fixed():
    module = data(analysis=SMALL)
    prompts = [f"prompt {i}" for i in range(40)]
    fisher, gradient = module.analysis.split(prompts)
    assert (len(fisher), len(gradient)) == (24, 10)
    assert not set(fisher) & set(gradient)
    assert module.analysis.split(prompts) == (fisher, gradient)
    with pytest.raises(UserError, match="24 Fisher and 10 gradient prompts, but there are 30 training prompts"):
        module.analysis.split(prompts[:30])


def test_resumed_run_measures_the_same(measured, tmp_path):
    folder, _ = measured

    def part(max_steps, **kwargs):
        checkpoint = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1)
        callbacks = [*analyses(), checkpoint]
        run(tmp_path / "run", *callbacks, max_steps=max_steps, enable_checkpointing=True, **kwargs)

    part(3)
    # As if a kill had come between the checkpoint of step 2 and its measurement.
    file = tmp_path / "run" / "analyses" / "recall.jsonl"
    file.write_text(file.read_text().splitlines()[0] + "\n")
    part(4, ckpt_path=str(next(tmp_path.glob("*step=2.ckpt"))))
    for name in ("fisher", "recall", "retention", "token_fisher", "bound"):
        want = read_records(folder / "analyses" / f"{name}.jsonl")
        assert read_records(tmp_path / "run" / "analyses" / f"{name}.jsonl") == want, name


def test_retention_from_another_runs_fisher(measured, tmp_path):
    folder, _ = measured
    path = str(folder / "analyses" / "fisher_step_000004.safetensors")
    run(tmp_path / "run", Retention(qs=QS, steps=[0], initial_fisher=path), max_steps=1)
    (record,) = read_records(tmp_path / "run" / "analyses" / "retention.jsonl")
    backwards = read_records(folder / "analyses" / "retention.jsonl")[-1]["values"]
    assert record["values"]["high/q=1"] == pytest.approx(backwards["high/q=1"])


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0),
        lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, weight_decay=0.01),
    ],
    ids=["AdamW with decay", "AdamW", "SGD with momentum"],
)
@pytest.mark.parametrize("source", ["initial_fisher", "random"])
def test_frozen_coordinates_do_not_move(tmp_path, optimizer, source):
    before = {n: p.detach().clone() for n, p in run(tmp_path / "start", max_steps=0).model.named_parameters()}
    mask = ParameterMask(source=source, q=1.0)
    module = run(tmp_path / "run", mask, module=policy(optimizer=optimizer), max_steps=5)
    coordinates = Coordinates.from_model(module.model)
    masks, metadata = load_masks(tmp_path / "run" / "analyses" / "mask.safetensors", coordinates)
    assert metadata["source"] == source
    assert masks.num_selected() == coordinates.num_coordinates // 100
    moved = 0
    for name, parameter in module.model.named_parameters():
        assert torch.equal(parameter[~masks[name]], before[name][~masks[name]])
        moved += int((parameter != before[name]).sum())
    assert moved > 0.5 * masks.num_selected()
    norms = [scalars(tmp_path / "run", f"mask/gradient_norm_{kind}") for kind in ("all", "trained")]
    assert all(whole >= part for (_, whole), (_, part) in zip(*norms, strict=True))


def test_mask_continues_after_a_resume(tmp_path):
    def part(name, max_steps, **kwargs):
        checkpoint = ModelCheckpoint(dirpath=tmp_path / name, every_n_train_steps=2, save_top_k=-1)
        module = policy(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1))
        mask = ParameterMask(source="random", q=5.0, seed=3)
        run(tmp_path / name, mask, checkpoint, module=module, max_steps=max_steps, enable_checkpointing=True, **kwargs)
        return module

    whole = part("whole", 4)
    part("cut", 2)
    resumed = part("cut", 4, ckpt_path=str(next((tmp_path / "cut").glob("*step=2.ckpt"))))
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_mask_from_files(measured, tmp_path):
    folder, module = measured
    fisher = str(folder / "analyses" / "fisher_step_000000.safetensors")
    coordinates = Coordinates.from_model(module.model)

    def mask_of(name, **kwargs):
        run(tmp_path / name, ParameterMask(**kwargs), max_steps=1)
        path = tmp_path / name / "analyses" / "mask.safetensors"
        return path, load_masks(path, coordinates)[0]

    path, from_fisher = mask_of("fisher", source="fisher_file", path=fisher, q=1.0)
    _, from_start = mask_of("start", source="initial_fisher", q=1.0)
    _, from_mask = mask_of("mask", source="mask_file", path=str(path), q=None)
    for name in coordinates.names:
        assert torch.equal(from_fisher[name], from_start[name])
        assert torch.equal(from_fisher[name], from_mask[name])


def test_file_of_another_model_is_refused(tmp_path, tiny_model, tokenizer, measured):
    folder, module = measured
    size = Coordinates.from_model(module.model).num_coordinates
    tiny_model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    path = str(folder / "analyses" / "fisher_step_000000.safetensors")
    other = policy(model=str(tmp_path / "model"))
    with pytest.raises(UserError, match=rf"made for P={size} coordinates .* the model has P="):
        run(tmp_path / "run", ParameterMask(source="fisher_file", path=path, q=1.0), module=other, max_steps=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "fisher_file"}, "`path` is None"),
        ({"source": "random", "path": "x"}, "`path` is 'x'"),
        ({"source": "random", "q": None}, "`q` is None with source 'random'"),
        ({"source": "random", "q": 0}, "q=0"),
        ({"source": "fisher_file", "path": "nowhere"}, "there is no file 'nowhere'"),
    ],
)
def test_bad_masks_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        ParameterMask(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": [1], "every_n_steps": 2}, "not both"),
        ({"every_n_steps": 0}, "`every_n_steps` must be at least 1, got 0"),
        ({"steps": [-1]}, "must not be negative"),
        ({"qs": [101]}, "q=101"),
    ],
)
def test_bad_schedules_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        FisherEstimation(**settings)


def test_analyses_of_supervised_fine_tuning(tmp_path):
    datamodule = data(DemonstrationDataModule, analysis=SMALL, prompts_per_update=8)
    run(tmp_path / "run", *analyses(steps=[0]), module=SFT("tiny-base"), datamodule=datamodule, max_steps=1)
    for name in ("fisher", "recall", "retention", "token_fisher", "bound"):
        assert len(read_records(tmp_path / "run" / "analyses" / f"{name}.jsonl")) == 1
    (record,) = read_records(tmp_path / "run" / "analyses" / "bound.jsonl")
    assert record["values"]["violations"] == 0


@pytest.mark.parametrize(
    "overlays", [*([path] for path in OVERLAYS), OVERLAYS], ids=[*(path.stem for path in OVERLAYS), "all but one mask"]
)
def test_overlays_run(request, tmp_path, overlays):
    cli = request.getfixturevalue("run")
    # Two masks would each freeze what the other trains.
    overlays = [path for path in overlays if len(overlays) == 1 or path.stem != "mask_random"]
    args = [arg for path in overlays for arg in ("-c", path)]
    out = cli(
        "fit", *args, "--trainer.max_steps", 2, "--trainer.limit_val_batches", 0, config=small_quickstart(tmp_path)
    )
    written = {path.stem for path in (out / "analyses").glob("*.jsonl")}
    assert written == {path.stem for path in overlays if not path.stem.startswith("mask")}
    for path in (out / "analyses").glob("*.jsonl"):
        (line,) = path.read_text().splitlines()
        assert all(np.isfinite(value) for value in json.loads(line)["values"].values())
    assert (out / "analyses" / "mask.safetensors").exists() == any("mask" in path.stem for path in overlays)
