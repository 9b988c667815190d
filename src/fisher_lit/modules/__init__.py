"""Objectives as LightningModules."""

from fisher_lit.modules.dr_grpo import DrGRPO
from fisher_lit.modules.policy import PolicyModule
from fisher_lit.modules.sft import SFT

__all__ = ["SFT", "DrGRPO", "PolicyModule"]
