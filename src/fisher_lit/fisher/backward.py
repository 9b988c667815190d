"""Backward passes that measure: they see chosen parameters, keep no second gradient, and leave the model as it was."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fisher_lit.errors import UserError
from fisher_lit.sharding import local


class Backward(Protocol):
    """Runs the backward pass of a scalar."""

    def __call__(self, scalar: Tensor, retain_graph: bool = False) -> None: ...


def measured_parameters(model: nn.Module, names: Iterable[str] | None = None) -> dict[str, nn.Parameter]:
    """Parameters by name, a tied weight once under its first name.

    Args:
        model: the model.
        names: names to keep; None keeps every parameter with `requires_grad`.

    Raises:
        UserError: if a name is unknown, or nothing is left.
    """
    known = dict(model.named_parameters())
    if names is None:
        names = [name for name, parameter in known.items() if parameter.requires_grad]
    wanted = set(names)
    if unknown := wanted - known.keys():
        raise UserError(
            f"names: {min(unknown)!r} is not a parameter of the model; it has {', '.join(list(known)[:3])}, ..."
        )
    if not wanted:
        raise UserError("names: no parameter to measure; name some, or set `requires_grad` on some")
    return {name: parameter for name, parameter in known.items() if name in wanted}


def zeros_like_parameters(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A zero for every coordinate of the process: float32, or float64 for float64 parameters."""
    parameters = {name: local(p) for name, p in parameters.items()}
    dtypes = {name: torch.float64 if p.dtype == torch.float64 else torch.float32 for name, p in parameters.items()}
    # A tensor made in inference mode could not be added to outside it.
    with torch.inference_mode(False):
        return {name: torch.zeros(p.shape, dtype=dtypes[name], device=p.device) for name, p in parameters.items()}


@contextmanager
def measuring(model: PreTrainedModel, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Let backward passes reach `parameters` only, and leave the model as it was, also after an error.

    Inside, every `grad` is None, and gradients are on even where the caller turned them off. A model with dropout is
    put in evaluation mode; any other keeps its mode, because activation checkpointing works in training mode only.
    """
    everything = list(model.parameters())
    grads = [p.grad for p in everything]
    flags = [p.requires_grad for p in everything]
    modes = {module: module.training for module in model.modules()}
    chosen = {id(p) for p in parameters.values()}
    with torch.inference_mode(False), torch.enable_grad():
        try:
            if _is_random(model):
                model.eval()
            for parameter in everything:
                parameter.grad = None
                parameter.requires_grad_(id(parameter) in chosen)
            yield
        finally:
            for parameter, grad, flag in zip(everything, grads, flags, strict=True):
                parameter.grad = grad
                parameter.requires_grad_(flag)
            for module, mode in modes.items():
                module.training = mode


def _is_random(model: PreTrainedModel) -> bool:
    """True if the model draws random numbers in training mode (dropout, router jitter)."""
    config = model.config.get_text_config().to_dict()
    rates = [v for k, v in config.items() if isinstance(v, float) and ("drop" in k or "jitter" in k)]
    rates += [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    return any(rate > 0 for rate in rates)


@contextmanager
def consuming_gradients(
    parameters: Mapping[str, nn.Parameter], consume: Callable[[str, Tensor], object]
) -> Iterator[Backward]:
    """Run backward passes whose gradients are handed to `consume`, each the moment it is complete, and freed.

    Yields:
        The function that runs a backward pass.
    """
    done: set[str] = set()

    def hook(name: str, parameter: Tensor) -> None:
        # The square of a part is not a part of the square.
        assert name not in done, f"two gradients reached {name} in one backward pass"
        done.add(name)
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        with torch.autocast(grad.device.type, enabled=False):
            consume(name, grad)

    def backward(scalar: Tensor, retain_graph: bool = False) -> None:
        done.clear()
        scalar.backward(retain_graph=retain_graph)

    handles = [p.register_post_accumulate_grad_hook(partial(hook, name)) for name, p in parameters.items()]
    try:
        yield backward
    finally:
        for handle in handles:
            handle.remove()
