"""The server's side of weights over HTTP. Only a vLLM server imports it."""

import base64
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class HTTPInitInfo(WeightTransferInitInfo):
    """There is nothing to agree on."""


@dataclass
class HTTPUpdateInfo(WeightTransferUpdateInfo):
    """Some weights in checkpoint form.

    Attributes:
        names: their names.
        dtype_names: their dtypes, without "torch.".
        shapes: their shapes.
        data: their bytes one after the other, in base64.
    """

    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    data: str = ""


class HTTPWeightTransferEngine(WeightTransferEngine[HTTPInitInfo, HTTPUpdateInfo]):
    """Loads weights that come in the body of `/update_weights`."""

    init_info_cls = HTTPInitInfo
    update_info_cls = HTTPUpdateInfo

    def init_transfer_engine(self, init_info: HTTPInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class waits for an accelerator, and there may be none. Nothing here is asynchronous.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: HTTPUpdateInfo) -> None:
        model: Any = self.model
        model.load_weights(unpack(update_info, self.device))

    def shutdown(self) -> None:
        pass


def unpack(info: HTTPUpdateInfo, device: torch.device) -> list[tuple[str, Tensor]]:
    """Names and tensors of a request's body."""
    raw = torch.frombuffer(bytearray(base64.b64decode(info.data)), dtype=torch.uint8)
    weights, start = [], 0
    for name, dtype_name, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
        dtype: torch.dtype = getattr(torch, dtype_name)
        end = start + dtype.itemsize * torch.Size(shape).numel()
        weights.append((name, raw[start:end].clone().view(dtype).view(shape).to(device)))
        start = end
    return weights
