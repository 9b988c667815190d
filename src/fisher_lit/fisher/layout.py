"""Where a parameter sits in a transformer, read off its Hugging Face name."""

import re
from typing import Literal, NamedTuple, get_args

Module = Literal["embedding", "q", "k", "v", "o", "gate", "up", "down", "norm", "head", "other"]
MODULES: tuple[Module, ...] = get_args(Module)

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_NAMES: dict[str, Module] = {
    **dict.fromkeys(("embed_tokens", "wte", "wpe", "embed_in", "embed_positions"), "embedding"),
    **dict.fromkeys(("lm_head", "embed_out"), "head"),
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
_NORM = re.compile(r"norm|^ln_")


class Place(NamedTuple):
    """A layer and a module type.

    Attributes:
        layer: index of the decoder layer, None outside the layers.
        module: type of the module. Fused projections (`qkv_proj`, `gate_up_proj`, `c_attn`) are "other"; a tied head
            counts as the embedding.
    """

    layer: int | None
    module: Module


def where(name: str) -> Place:
    """Layer and module type of the parameter `name`, such as `model.layers.3.self_attn.q_proj.weight`."""
    layer = _LAYER.search(name)
    return Place(int(layer[1]) if layer else None, _module(name))


def _module(name: str) -> Module:
    # The innermost component that is known decides, so that adapters count as the projection they sit on.
    for component in reversed(name.split(".")):
        if component in _NAMES:
            return _NAMES[component]
        if _NORM.search(component):
            return "norm"
    return "other"
