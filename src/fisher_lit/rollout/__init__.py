"""Rollouts: prompts, engines that draw responses, and the batches that objectives train on."""

from fisher_lit.rollout.batch import Rollout, RolloutBatch
from fisher_lit.rollout.datamodule import RolloutDataModule
from fisher_lit.rollout.demonstrations import DemonstrationDataModule
from fisher_lit.rollout.engine import Engine
from fisher_lit.rollout.sampling import Sampling
from fisher_lit.rollout.transformers_engine import TransformersEngine
from fisher_lit.rollout.vllm_engine import VLLMEngine
from fisher_lit.rollout.vllm_server import VLLMServerEngine

__all__ = [
    "DemonstrationDataModule",
    "Engine",
    "Rollout",
    "RolloutBatch",
    "RolloutDataModule",
    "Sampling",
    "TransformersEngine",
    "VLLMEngine",
    "VLLMServerEngine",
]
