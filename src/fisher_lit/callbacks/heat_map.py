"""Pictures of where: layers × module types."""

import os
from collections.abc import Mapping

from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure

from fisher_lit.callbacks.measurements import Measurements
from fisher_lit.fisher.layout import MODULES, Place
from fisher_lit.fisher.measures import Score


def heat_map(title: str, scores: Mapping[Place, Score]) -> Figure:
    """A grid of layers (rows; the first is outside the layers) and module types (columns), each cell with its value.

    Args:
        title: what the cells show.
        scores: a value for each place.
    """
    modules = [m for m in MODULES if any(place.module == m for place in scores)]
    layers = sorted({place.layer for place in scores}, key=lambda layer: -1 if layer is None else layer)
    grid = [[_value(scores, layer, module) for module in modules] for layer in layers]
    figure = Figure(figsize=(1.5 + 0.8 * len(modules), 1.3 + 0.32 * len(layers)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(grid, aspect="auto", cmap="viridis", vmin=0)
    axes.set_title(title)
    axes.set_xticks(range(len(modules)), modules)
    axes.set_yticks(range(len(layers)), ["–" if layer is None else str(layer) for layer in layers])
    axes.set_ylabel("layer")
    middle = max(value for row in grid for value in row if value == value) / 2
    for y, row in enumerate(grid):
        for x, value in enumerate(row):
            if value == value:
                color = "white" if value < middle else "black"
                axes.text(x, y, f"{value:.3g}", ha="center", va="center", fontsize=7, color=color)
    figure.colorbar(image)
    return figure


def log_heat_map(measurements: Measurements, name: str, title: str, scores: Mapping[Place, Score]) -> None:
    """Write a map as `<log_dir>/analyses/<name>_step_<n>.png` and as the TensorBoard image `where/<name>`."""
    if not measurements.trainer.is_global_zero:
        return
    step = measurements.trainer.global_step
    measurements.directory.mkdir(parents=True, exist_ok=True)
    figure = heat_map(f"{title}, step {step}", scores)
    path = measurements.directory / f"{name}_step_{step:06d}.png"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(path)
    for logger in measurements.trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(f"where/{name}", figure, step)


def _value(scores: Mapping[Place, Score], layer: int | None, module: str) -> float:
    score = scores.get(Place(layer, module))  # type: ignore[arg-type]
    return float("nan") if score is None else score.value
