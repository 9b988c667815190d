"""Can a small fixed set of coordinates carry the training?"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from fisher_lit.callbacks.heat_map import log_heat_map
from fisher_lit.callbacks.measurements import Measurements
from fisher_lit.errors import UserError
from fisher_lit.fisher.freezing import moves_with_gradient_only, restore_frozen, zero_frozen_gradients
from fisher_lit.fisher.measures import by_module, density
from fisher_lit.fisher.random_sets import random_masks
from fisher_lit.fisher.selection import budget
from fisher_lit.fisher.vectors import PackedMasks, load_masks, load_vectors, save_masks
from fisher_lit.sharding import all_reduce, local, whole

Source = Literal["initial_fisher", "fisher_file", "random", "mask_file"]


class ParameterMask(Callback):
    """Train a fixed set of coordinates and hold all others bit for bit (Appendix B.2).

    Frozen gradients are zeroed after accumulation and before clipping; frozen weights are restored after the step where
    the optimizer could move them without a gradient. The mask is kept as `<log_dir>/analyses/mask.safetensors` with a
    picture of where it lies. Curves: `mask/gradient_norm_all` and `mask/gradient_norm_trained`, before and after.

    Args:
        source: `initial_fisher` takes the top q percent of the Fisher measured before the first update, `fisher_file`
            those of a Fisher file, `random` a uniformly random set, `mask_file` a saved mask.
        q: budget, percent of all coordinates; not with `mask_file`.
        path: the file of `fisher_file` or `mask_file`.
        seed: seed of a random set; smaller budgets of one seed are subsets of larger ones.
    """

    def __init__(
        self,
        source: Source = "initial_fisher",
        q: float | None = 1.0,
        path: str | None = None,
        seed: int = 0,
    ) -> None:
        if source.endswith("_file") != (path is not None):
            raise UserError(
                f"ParameterMask: `path` is {path!r}; the sources that need one are fisher_file and mask_file"
            )
        if (q is None) != (source == "mask_file"):
            raise UserError(
                f"ParameterMask: `q` is {q} with source {source!r}; set a percentage, or null for mask_file"
            )
        if q is not None:
            budget(q, 10**9)
        if path is not None and not Path(path).is_file():
            raise UserError(
                f"ParameterMask: there is no file {path!r}; set `path` to a file that an analysis has saved"
            )
        self.source = source
        self.q = q
        self.path = path
        self.seed = seed
        self._masks: Mapping[str, Tensor] = {}
        self._reference: dict[str, Tensor] | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        measurements = Measurements.of(trainer, pl_module)
        kept = measurements.directory / "mask.safetensors"
        if trainer.global_step > 0:
            self._masks = self._resume(kept, measurements)
        else:
            self._masks = PackedMasks.pack(self._select(measurements))
            save_masks(kept, self._masks, measurements.coordinates, self._description(), measurements.shards)
            log_heat_map(measurements, "mask", "Density of the mask (%)", density(by_module(self._masks, all_reduce)))
        (optimizer,) = trainer.optimizers
        if trainer.global_step > 0 or not moves_with_gradient_only(optimizer):
            self._reference = {n: local(p.detach()).clone() for n, p in self._parameters(pl_module).items()}
            optimizer.register_step_post_hook(lambda *_: self._restore(pl_module))

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        parameters = self._parameters(pl_module)
        before = _gradient_norm(parameters)
        zero_frozen_gradients(parameters, self._masks)
        norms = {"mask/gradient_norm_all": before, "mask/gradient_norm_trained": _gradient_norm(parameters)}
        pl_module.log_dict(norms, batch_size=1)

    def scalar_layout(self) -> dict:
        """Charts for TensorBoard's custom-scalars page."""
        return {"Mask": {"gradient norm": ["Multiline", ["mask/gradient_norm_.*"]]}}

    def _select(self, measurements: Measurements) -> Mapping[str, Tensor]:
        coordinates, device, shards = measurements.coordinates, measurements.module.device, measurements.shards
        if self.source == "mask_file":
            return load_masks(str(self.path), coordinates, device, shards)[0]
        sizes = measurements.sizes([self.q])  # type: ignore[list-item]
        if self.source == "random":
            return random_masks(
                coordinates, sizes, self.seed, parts=shards.parts, device=device, all_reduce=all_reduce
            )[0]
        if self.source == "fisher_file":
            fisher: Mapping[str, Tensor] = load_vectors(str(self.path), coordinates, device, shards)[0]
        else:
            fisher = measurements.initial_fisher()
            measurements.save_fisher()
        return measurements.top(fisher, [self.q])[0]  # type: ignore[list-item]

    def _resume(self, kept: Path, measurements: Measurements) -> Mapping[str, Tensor]:
        masks, metadata = load_masks(kept, measurements.coordinates, measurements.module.device, measurements.shards)
        for key, value in self._description().items():
            if metadata.get(key) != value:
                raise UserError(
                    f"ParameterMask: this run was started with {key} {metadata.get(key)!r}, now it is {value!r}; "
                    f"set it back, or start another run"
                )
        return masks

    def _description(self) -> dict[str, str]:
        return {"source": self.source, "q": str(self.q), "path": str(self.path), "seed": str(self.seed)}

    def _parameters(self, module: LightningModule) -> dict[str, torch.nn.Parameter]:
        return {n: p for n, p in module.model.named_parameters() if n in self._masks}  # type: ignore[union-attr]

    def _restore(self, module: LightningModule) -> None:
        assert self._reference is not None
        restore_frozen(self._parameters(module), self._masks, self._reference)


def _gradient_norm(parameters: Mapping[str, torch.nn.Parameter]) -> Tensor:
    return whole(torch.nn.utils.get_total_norm([p.grad for p in parameters.values() if p.grad is not None]))
