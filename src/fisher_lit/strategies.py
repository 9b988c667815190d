"""Training on several processes: a Lightning strategy that shards parameters, gradients and optimizer with FSDP2."""

from datetime import timedelta

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, StrategyRegistry
from transformers import PreTrainedModel
from typing_extensions import override

from fisher_lit.errors import UserError
from fisher_lit.sharding import shard_model


class FSDP2Strategy(ModelParallelStrategy):
    """Data-parallel training with sharded parameters, over all devices of all nodes. Its name is `fsdp2`.

    A checkpoint is one file with whole tensors, so that any number of processes, or none of this strategy, reads it.
    Precision `bf16-mixed` gathers and computes in bfloat16, and keeps and reduces in float32.

    Args:
        reshard_after_forward: free each layer's gathered parameters after its forward pass; slower, with less memory.
        cpu_offload: keep shards and optimizer state in CPU memory; slower, with less device memory.
        process_group_backend: of torch.distributed; null takes the device's usual one.
        timeout: longest wait for the other processes.
    """

    def __init__(
        self,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload

    @override
    def setup_environment(self) -> None:
        # Lightning's own choice would be the number of nodes.
        self._data_parallel_size = self.num_processes * self.num_nodes
        super().setup_environment()

    def shard(self, model: PreTrainedModel) -> None:
        """Spread a model's parameters over the processes, in place."""
        shard_model(
            model,
            self.device_mesh["data_parallel"],
            compute_dtype=torch.bfloat16 if self.precision_plugin.precision == "bf16-mixed" else None,
            reshard_after_forward=self.reshard_after_forward,
            cpu_offload=self.cpu_offload,
        )


StrategyRegistry.register("fsdp2", FSDP2Strategy, description=FSDP2Strategy.__doc__.splitlines()[0])  # type: ignore[union-attr]


def require_supported_strategy(trainer: Trainer) -> None:
    """Refuse a Trainer that would train on several processes in another way than `FSDP2Strategy`.

    Raises:
        UserError: naming the strategy and the number of processes.
    """
    strategy = trainer.strategy
    if isinstance(strategy, FSDP2Strategy):
        return
    if trainer.world_size > 1 or isinstance(strategy, FSDPStrategy | ModelParallelStrategy):
        raise UserError(
            f"trainer: strategy {type(strategy).__name__} with {trainer.world_size} processes is not supported, as an "
            f"update is several backward passes; set `strategy: fsdp2`, or `devices: 1` and `strategy: auto`"
        )
