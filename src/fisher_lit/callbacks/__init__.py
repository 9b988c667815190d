"""Callbacks: the analyses, each with an overlay in the repository's `callbacks/`, and those that the configs use."""

from fisher_lit.callbacks.boundary_evaluation import BoundaryEvaluation
from fisher_lit.callbacks.fisher_bound import FisherBound
from fisher_lit.callbacks.fisher_estimation import FisherEstimation
from fisher_lit.callbacks.gradient_recall import GradientRecall
from fisher_lit.callbacks.hf_export import HFExport
from fisher_lit.callbacks.parameter_mask import ParameterMask
from fisher_lit.callbacks.progress import UpdateProgressBar
from fisher_lit.callbacks.retention import Retention
from fisher_lit.callbacks.stop_on_signal import StopOnSignal
from fisher_lit.callbacks.token_fisher_probe import TokenFisherProbe

__all__ = [
    "BoundaryEvaluation",
    "FisherBound",
    "FisherEstimation",
    "GradientRecall",
    "HFExport",
    "ParameterMask",
    "Retention",
    "StopOnSignal",
    "TokenFisherProbe",
    "UpdateProgressBar",
]
