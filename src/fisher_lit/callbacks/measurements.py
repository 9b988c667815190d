"""What the analyses of one policy share. Each is measured once per step, however many callbacks ask for it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor
from tqdm.auto import tqdm

from fisher_lit.errors import UserError
from fisher_lit.fisher.coordinates import Coordinates
from fisher_lit.fisher.estimators import FisherEstimator, GradientEstimator
from fisher_lit.fisher.selection import Masks, budget, top_masks
from fisher_lit.fisher.vectors import load_vectors, save_vectors
from fisher_lit.rollout.batch import Rollout, RolloutBatch
from fisher_lit.rollout.datamodule import RolloutDataModule
from fisher_lit.rollout.sampling import derive_seed
from fisher_lit.sharding import Shards, all_reduce, share_of

Vector = Mapping[str, Tensor]


class Measurements:
    """Fisher, gradient and rollouts of the current policy, and the Fisher of the initial one.

    Everything of a step is dropped when the next update begins. Vectors and sets are this process's parts, and all
    processes measure together.

    Args:
        trainer: the Trainer of the fit.
        module: its policy.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer = trainer
        self.module = module
        self.data: RolloutDataModule = trainer.datamodule  # type: ignore[attr-defined]
        self.coordinates = Coordinates.from_model(module.model)  # type: ignore[arg-type]
        self.directory = Path(trainer.log_dir or trainer.default_root_dir) / "analyses"
        self.shards = Shards.of(module.model, self.coordinates)  # type: ignore[arg-type]
        self._of_step: dict[str, object] = {}

    @classmethod
    def of(cls, trainer: Trainer, module: LightningModule) -> "Measurements":
        """The measurements that all callbacks of a Trainer share."""
        data: RolloutDataModule = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data.measurements, cls) or data.measurements.trainer is not trainer:
            data.measurements = cls(trainer, module)
        return data.measurements

    def forget_step(self) -> None:
        """Drop what belongs to the current policy."""
        self._of_step.clear()

    def fisher(self) -> FisherEstimator:
        """The Fisher estimator of the current policy, filled (equation 6)."""
        return self._once("fisher", self._measure_fisher)

    def gradient(self) -> dict[str, Tensor]:
        """The gradient estimate of the module's own objective at the current policy, signed (equation 6)."""
        return self._once("gradient", self._measure_gradient)

    def gradient_rollouts(self) -> RolloutBatch:
        """On-policy responses to this process's share of the gradient prompts."""
        return self._once("gradient_rollouts", self._draw_gradient_rollouts)

    def objective_batch(self) -> RolloutBatch:
        """The responses that the gradient is estimated from."""
        return self.data.objective_batch(self.gradient_rollouts())

    def fisher_sets(self, qs: Sequence[float]) -> list[Masks]:
        """The K_q coordinates with the largest Fisher of the current policy, for each q (percent)."""
        return self.top(self.fisher().mean(), qs)

    def gradient_sets(self, qs: Sequence[float]) -> list[Masks]:
        """The K_q coordinates with the largest absolute gradient estimate, for each q (percent)."""
        magnitude = {name: g.abs() for name, g in self.gradient().items()}
        return self.top(magnitude, qs)

    def top(self, values: Vector, qs: Sequence[float]) -> list[Masks]:
        """The K_q coordinates with the largest values, for each q (percent)."""
        sizes = self.sizes(qs)
        return top_masks(values, sizes, self.coordinates, parts=self.shards.parts, all_reduce=all_reduce)

    def sizes(self, qs: Sequence[float]) -> list[int]:
        """K_q of each q."""
        return [budget(q, self.coordinates.num_coordinates) for q in qs]

    def initial_fisher(self, path: str | None = None) -> Vector:
        """The Fisher of the initial policy: from a file, measured now at step 0, or kept from this run's step 0.

        Raises:
            UserError: if this fit is past step 0 and did not keep one.
        """
        if path is None and self.trainer.global_step == 0:
            return self.fisher().mean()
        kept = Path(path) if path is not None else self.directory / "fisher_step_000000.safetensors"
        if not kept.exists():
            way_out = (
                "" if path else "; it is measured at step 0, so start the fit anew or give the file of another run"
            )
            raise UserError(f"there is no initial Fisher '{kept}'{way_out}")
        return load_vectors(kept, self.coordinates, self.module.device, self.shards)[0]

    def save_fisher(self) -> Path:
        """Write the Fisher of the current policy, unless that is done."""
        path = self.directory / f"fisher_step_{self.trainer.global_step:06d}.safetensors"
        samples = self.data.analysis
        metadata = {
            "source": "FisherEstimation",
            "step": str(self.trainer.global_step),
            "num_responses": str(self.fisher().num_responses),
            "seeds": f"prompts {samples.prompt_seed}, responses {samples.fisher_seed}",
        }
        self._once("saved", lambda: self.save(path, self.fisher().mean(), metadata))
        return path

    def save(self, path: Path, values: Vector, metadata: Mapping[str, str]) -> None:
        """Write one value per coordinate."""
        save_vectors(path, values, self.coordinates, metadata, self.shards)

    @contextmanager
    def progress(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """A progress bar of `total` items where the Trainer shows one; yields the function that advances it."""
        bar = self.trainer.progress_bar_callback
        hidden = not self.trainer.is_global_zero or not isinstance(bar, TQDMProgressBar) or bar.is_disabled
        description = f"step {self.trainer.global_step}: {name}"
        with tqdm(total=total, desc=description, leave=False, disable=hidden) as shown:
            yield lambda count: (shown.update(count), None)[1]

    def fisher_estimator(self, batch: RolloutBatch) -> FisherEstimator:
        """An empty Fisher estimator for responses such as those of `batch`."""
        return FisherEstimator(
            self.module.model,  # type: ignore[arg-type]
            temperature=batch.temperature,
            chunk_tokens=self.module.logprob_chunk_tokens,  # type: ignore[arg-type]
        )

    def score(self, estimator: FisherEstimator, rollouts: Sequence[Rollout], name: str) -> FisherEstimator:
        """Add rollouts to a Fisher estimator in the precision that the policy trains in."""
        with self.progress(name, len(rollouts)) as advance, self.trainer.precision_plugin.forward_context():
            estimator.add(rollouts, advance)
        return estimator

    def _once(self, key: str, measure: Callable):
        if key not in self._of_step:
            self._of_step[key] = measure()
        return self._of_step[key]

    def _measure_fisher(self) -> FisherEstimator:
        prompts = share_of(self.data.analysis.split(self.data.prompts["train"])[0])
        with self.progress("Fisher responses", len(prompts)) as advance:
            batch = self.data.draw(
                prompts,
                1,
                self.data.sampling,
                lambda problem_id, j: derive_seed("fisher", self.data.analysis.fisher_seed, problem_id, j),
                advance,
                judge=False,
            )
        return self.score(self.fisher_estimator(batch), batch.rollouts, "Fisher")

    def _draw_gradient_rollouts(self) -> RolloutBatch:
        samples = self.data.analysis
        prompts = share_of(samples.split(self.data.prompts["train"])[1])
        with self.progress("gradient responses", len(prompts) * samples.gradient_responses) as advance:
            return self.data.draw(
                prompts,
                samples.gradient_responses,
                self.data.sampling,
                lambda problem_id, j: derive_seed("gradient", samples.gradient_seed, problem_id, j),
                advance,
                judge=bool(self.module.uses_rewards),
            )

    def _measure_gradient(self) -> dict[str, Tensor]:
        batch = self.objective_batch()
        return self.weighted_scores(batch, self.module.signal(batch))  # type: ignore[operator]

    def weighted_scores(self, batch: RolloutBatch, weights: Sequence[Tensor | float]) -> dict[str, Tensor]:
        """Mean of weighted scores over the responses of a batch (equation 6, right)."""
        estimator = GradientEstimator(
            self.module.model,  # type: ignore[arg-type]
            temperature=batch.temperature,
            chunk_tokens=self.module.logprob_chunk_tokens,  # type: ignore[arg-type]
        )
        with (
            self.progress("gradient", len(batch.rollouts)) as advance,
            self.trainer.precision_plugin.forward_context(),
        ):
            estimator.add(batch.rollouts, weights, advance)
        return estimator.mean()
