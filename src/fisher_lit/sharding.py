"""Models whose parameters are spread over processes (FSDP2): what every process holds, and how they act together.

Every function that communicates must be called by all processes, in the same order.
"""

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from fisher_lit.errors import UserError
from fisher_lit.fisher.coordinates import Coordinates, Part


def shard_model(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
) -> None:
    """Spread the parameters of a causal LM over a mesh, in place: a group per decoder layer, and one for the rest.

    Args:
        model: the model; tied embeddings share the group of the rest.
        mesh: one-dimensional.
        compute_dtype: of gathered parameters; None is that of the parameters. Gradients are reduced in float32 then.
        reshard_after_forward: free a layer's gathered parameters between its forward and its backward pass.
        cpu_offload: keep the shards in CPU memory.

    Raises:
        UserError: if the decoder layers cannot be told.
    """
    reduce_dtype = torch.float32 if compute_dtype is not None else None
    settings: dict = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(compute_dtype, reduce_dtype),
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    }
    for layer in decoder_layers(model):
        fully_shard(layer, reshard_after_forward=reshard_after_forward, **settings)
    # The head is computed again in the backward pass, outside any forward of the root, so the rest stays gathered.
    fully_shard(model, reshard_after_forward=False, **settings)
    sum_gradients(model)
    model.call = types.MethodType(lambda _, function: function(), model)  # type: ignore[assignment]
    register_fsdp_forward_method(model, "call")


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, by the classes that transformers never splits over devices."""
    names = set(model._no_split_modules or ())
    layers = [m for m in model.modules() if type(m).__name__ in names and m is not model.get_input_embeddings()]
    if not layers:
        raise UserError(f"model: {type(model).__name__} does not name its decoder layers, so it cannot be sharded")
    return layers


def sum_gradients(model: nn.Module) -> None:
    """Undo FSDP2's mean over processes: a loss is divided by counts of the whole update, so its parts are summed."""
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The sharded groups of a model, the root first; none for an ordinary model."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def is_sharded(model: nn.Module) -> bool:
    """True for a model of `shard_model`, on one process too."""
    return isinstance(model, FSDPModule)


def architecture(model: PreTrainedModel) -> str:
    """Name of a model's class, which FSDP2 hides behind one of its own."""
    return next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def call(model: nn.Module, function: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Call a function of the model's submodules as if it were the model's own forward.

    FSDP2 gathers parameters around `forward`; a function that calls body and head by themselves needs the same.

    Args:
        model: any model.
        function: returns tensors, through which FSDP2 sees the backward pass come.
    """
    if not isinstance(model, FSDPModule):
        return function()
    output = model.call(function)  # type: ignore[operator]
    if not torch.is_grad_enabled():
        # No backward pass will do it, and whole parameters would go stale with the next update.
        model.reshard()
    return output


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Hold all parameters whole, so that forward passes inside need no other process: their numbers may differ."""
    groups = fsdp_modules(model)
    kept = [[g.post_forward_mesh_info for g in m._get_fsdp_state()._fsdp_param_groups] for m in groups]
    # Parameters gathered in inference mode could not be trained afterwards.
    with torch.inference_mode(False), torch.no_grad() if groups else nullcontext():
        if groups:
            groups[0]._get_fsdp_state()._lazy_init()
        for module in groups:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
    try:
        yield
    finally:
        with torch.inference_mode(False), torch.no_grad() if groups else nullcontext():
            for module, infos in zip(groups, kept, strict=True):
                module.reshard()
                for group, info in zip(module._get_fsdp_state()._fsdp_param_groups, infos, strict=True):
                    group.post_forward_mesh_info = info


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing its memory; an ordinary tensor is held whole."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, on every process."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Number of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Sum a tensor over the processes, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor, op)


def largest(number: int, device: torch.device) -> int:
    """The largest of the processes' numbers."""
    found = torch.tensor(number, device=device)
    all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def gather_lists(items: list) -> list[list]:
    """The lists of all processes, in the order of their ranks."""
    if world_size() == 1:
        return [items]
    found: list = [None] * world_size()
    dist.all_gather_object(found, items)
    return found


def share_of(items: Sequence) -> Sequence:
    """This process's run of consecutive items; sizes differ by at most one, and the runs in rank order give all."""
    size, extra = divmod(len(items), world_size())
    start = rank() * size + min(rank(), extra)
    return items[start : start + size + (rank() < extra)]


@dataclass(frozen=True)
class Shards:
    """What this process holds of each parameter.

    Attributes:
        parts: the local run of each parameter's coordinates.
        mesh: the processes, or None where every parameter is whole.
    """

    parts: dict[str, Part]
    mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, model: nn.Module, coordinates: Coordinates) -> "Shards":
        """The shards of a model's parameters."""
        parameters = dict(model.named_parameters())
        parts, mesh = {}, None
        for name, part in coordinates.parts.items():
            parameter = parameters[name]
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                rows, columns = part.shape[0], part.num_coordinates // max(part.shape[0], 1)
                first = min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)
                part = Part(part.start + first * columns, tuple(local(parameter).shape))
            parts[name] = part
        return cls(parts, mesh)

    def gather(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The whole of one parameter's tensor from its local parts, on every process."""
        if self.mesh is None:
            return tensor
        stride = torch.empty(shape, device="meta").stride()
        number = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
        whole = DTensor.from_local(
            number.contiguous(), self.mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
        ).full_tensor()
        return whole.view(tensor.dtype)

    def take(self, tensor: Tensor, name: str, start: int) -> Tensor:
        """This process's part of a parameter's whole tensor, whose first coordinate is `start`."""
        part = self.parts[name]
        first = part.start - start
        if part.num_coordinates == tensor.numel():
            return tensor
        # A view would keep the rest in memory.
        return tensor.reshape(-1)[first : first + part.num_coordinates].view(part.shape).clone()


class _SquareThenSum(ReduceScatter):
    """Squares each process's own gradient before the sum over processes, and adds up what it squared.

    The ordinary sum comes first, and (h₁ + h₂)² is not h₁² + h₂².
    """

    def __init__(self, device: torch.device) -> None:
        self.squared_norm = torch.zeros((), dtype=torch.float64, device=device)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> dist.Work | None:
        input_tensor.square_()
        self.squared_norm += input_tensor.sum(dtype=torch.float64)
        return dist.reduce_scatter_single(output_tensor, input_tensor, group=group, op=dist.ReduceOp.SUM)


class ShardedBackward:
    """Backward passes of a sharded model that measure: the gradients of a pass are consumed and freed after it.

    All processes run equally many passes, each over sequences of its own.

    Args:
        model: a model of `shard_model`.
        squares: take the sum over processes of squared gradients in place of the sum of gradients.
    """

    def __init__(self, model: nn.Module, squares: bool) -> None:
        self.model = model
        self.squares = squares
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.device = next(iter(self.parameters.values())).device
        self._is_alone = world_size() == 1
        self._collective = _SquareThenSum(self.device)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Set gradients aside and install the reduction; everything is as before afterwards, also after an error."""
        grads = {name: p.grad for name, p in self.parameters.items()}
        groups = [g for m in fsdp_modules(self.model) for g in m._get_fsdp_state()._fsdp_param_groups]
        kept = [group._reduce_scatter_comm for group in groups]
        with torch.inference_mode(False), torch.enable_grad():
            try:
                for parameter in self.parameters.values():
                    parameter.grad = None
                if self.squares:
                    for group in groups:
                        group._reduce_scatter_comm = self._collective
                yield
            finally:
                for group, collective in zip(groups, kept, strict=True):
                    group._reduce_scatter_comm = collective
                for name, parameter in self.parameters.items():
                    parameter.grad = grads[name]

    def run(self, scalar: Tensor, sums: dict[str, Tensor]) -> Tensor:
        """Run one backward pass on every process, and add what it gives to `sums`, the local parts.

        Returns:
            Squared norm of this process's own gradient, float64; of the sum's local part where gradients are summed.
        """
        self._collective.squared_norm.zero_()
        scalar.backward()
        total = self._collective.squared_norm.clone()
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None, f"no gradient reached {name}"
            grad, parameter.grad = local(parameter.grad), None
            if self.squares and self._is_alone:
                # A single process does not communicate, so nothing has been squared.
                grad = grad.square()
                total += grad.sum(dtype=torch.float64)
            sums[name] += grad
        return total
