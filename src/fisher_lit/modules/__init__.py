"""Objectives as LightningModules."""

from fisher_lit.modules.dr_grpo import DrGRPO
from fisher_lit.modules.full_vocab_distillation import FullVocabDistillation
from fisher_lit.modules.k2_distillation import K2Distillation
from fisher_lit.modules.pg_distillation import PGDistillation
from fisher_lit.modules.policy import PolicyModule
from fisher_lit.modules.sft import SFT

__all__ = ["SFT", "DrGRPO", "FullVocabDistillation", "K2Distillation", "PGDistillation", "PolicyModule"]
