"""Layers whose gradient for one sequence has a closed form, and how to recognise them in a model.

    linear     y = W a + b           ∂/∂W = Σ_t δ_t ⊗ a_t,   ∂/∂b = Σ_t δ_t
    embedding  y = c · E[id]         ∂/∂E[v] = Σ_{t: id_t = v} c δ_t
    norm       y = (w + c) ⊙ n(x) + b   ∂/∂w = Σ_t δ_t ⊙ n(x_t),   ∂/∂b = Σ_t δ_t

with δ_t the gradient of the layer's output at position t.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Layer:
    """A module whose per-sequence gradients are known in closed form, and the names of its parameters."""

    module: nn.Module
    kind: Literal["linear", "embedding", "norm"]
    weight: str
    bias: str | None


def norm_slope(layer: Layer, inputs: Tensor) -> Tensor:
    """∂y/∂w of a norm, elementwise: y is affine in w, so it is a difference of two outputs."""
    weight = cast(Tensor, layer.module.weight).detach()
    return _norm_output(layer, inputs, torch.ones_like(weight)) - _norm_output(layer, inputs, torch.zeros_like(weight))


def _norm_output(layer: Layer, inputs: Tensor, weight: Tensor) -> Tensor:
    """Output of a norm with another weight and no bias."""
    bias = {} if layer.bias is None else {"bias": torch.zeros_like(weight)}
    return functional_call(layer.module, {"weight": weight, **bias}, (inputs,))


def embedding_scale(module: nn.Module) -> float:
    """Constant that some architectures multiply their looked-up rows with."""
    return float(cast(float, getattr(module, "embed_scale", 1.0)))


def find_layers(model: PreTrainedModel) -> tuple[list[Layer], str | None]:
    """List a model's layers.

    Args:
        model: any Hugging Face causal LM.

    Returns:
        Every module that has parameters of its own, and None; or what stands in the way of the closed forms, in words.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    users: dict[nn.Parameter, list[nn.Module]] = {}
    layers = []
    for path, module in model.named_modules():
        own = {name: p for name, p in module._parameters.items() if p is not None}
        if not own:
            continue
        kind = _kind(module)
        if kind is None or "weight" not in own or not own.keys() <= {"weight", "bias"}:
            return [], f"{path} is a {type(module).__name__} with the parameters {', '.join(own)}"
        for parameter in own.values():
            users.setdefault(parameter, []).append(module)
            if isinstance(parameter, DTensor):
                return [], f"{path} is sharded"
        layers.append(Layer(module, kind, names[own["weight"]], names[own["bias"]] if "bias" in own else None))
    for parameter, modules in users.items():
        if len(modules) > 1 and (len(modules) > 2 or {*modules} != {head, embedding}):
            return [], f"{names[parameter]} is shared by {len(modules)} modules"
    if not any(layer.module is head and layer.kind == "linear" for layer in layers):
        return [], f"the output layer is a {type(head).__name__}"
    return layers, None


def _kind(module: nn.Module) -> Literal["linear", "embedding", "norm"] | None:
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return "linear"
    if isinstance(module, nn.Embedding) and module.max_norm is None and not module.scale_grad_by_freq:
        return "embedding"
    is_norm = isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("RMSNorm")
    return "norm" if is_norm and all(p.ndim == 1 for p in module.parameters()) else None


@torch.no_grad()
def batched_scores_obstacle(model: PreTrainedModel) -> str | None:
    """Say why sequences of a model cannot be squared together, or None if they can.

    Each layer must be used once per forward pass, on an input whose first dimension is the sequence; only the input
    embedding and the head may share a weight. One forward pass over 3 × 5 tokens looks at how the layers are called,
    and checks that embeddings and norms compute what their closed form says.
    """
    layers, obstacle = find_layers(model)
    if obstacle is not None:
        return obstacle
    body = [layer for layer in layers if layer.module is not model.get_output_embeddings()]
    seen: set[nn.Module] = set()
    checking: set[nn.Module] = set()
    found: list[str] = []

    def inspect(layer: Layer, module: nn.Module, args: tuple, output: object) -> None:
        # The check calls norms itself.
        if module in checking:
            return
        if module in seen:
            found.append(f"{layer.weight} is used twice")
        checking.add(module)
        if (mismatch := _mismatch(layer, args, output, num_sequences=3)) is not None:
            found.append(f"the module of {layer.weight} {mismatch}")
        checking.discard(module)
        seen.add(module)

    handles = [layer.module.register_forward_hook(partial(inspect, layer)) for layer in body]
    ids = torch.arange(15, device=model.device).view(3, 5) % model.get_output_embeddings().weight.shape[0]
    positions = torch.arange(5, device=model.device).expand(3, 5)
    try:
        model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _mismatch(layer: Layer, args: tuple, output: object, *, num_sequences: int) -> str | None:
    """Why one call of a layer does not fit its closed form."""
    inputs = args[0] if args else None
    if not isinstance(inputs, Tensor) or not isinstance(output, Tensor):
        return "does not map a tensor to a tensor"
    if inputs.ndim < 2 or inputs.shape[0] != num_sequences:
        return f"mixes sequences (its input has the shape {tuple(inputs.shape)})"
    if layer.kind == "linear":
        return None
    module = layer.module
    weight = cast(Tensor, module.weight)
    if layer.kind == "embedding":
        expected = nn.functional.embedding(inputs, weight) * embedding_scale(module)
    else:
        bias = 0 if layer.bias is None else cast(Tensor, module.bias)
        expected = _norm_output(layer, inputs, torch.zeros_like(weight)) + norm_slope(layer, inputs) * weight + bias
    tolerance = 1e-5 if output.dtype in (torch.float32, torch.float64) else 2e-2
    if not torch.allclose(output, expected.to(output.dtype), rtol=tolerance, atol=tolerance):
        return f"is not a plain {layer.kind} layer"
    return None
