"""TensorBoard's custom-scalars page: the few charts to look at first."""

from lightning.pytorch import Trainer

LAYOUT = {
    "Learning": {
        "training reward": ["Multiline", ["train/reward"]],
        "accuracy (%)": ["Multiline", ["val/accuracy", "val/pass@.*"]],
        "groups without a signal": ["Multiline", ["train/zero_advantage_groups"]],
    },
    "Health": {
        "entropy (nats)": ["Multiline", ["train/entropy"]],
        "gradient norm": ["Multiline", ["train/gradient_norm"]],
        "sampler to trainer gap (nats)": ["Multiline", ["train/logprob_gap_.*"]],
        "response length (tokens)": ["Multiline", ["train/response_length", "val/response_length"]],
        "truncated": ["Multiline", ["train/truncated"]],
    },
    "Distillation": {
        "reverse KL per token (nats)": ["Multiline", ["train/reverse_kl_k1", "train/reverse_kl_k3"]],
        "log-probability (nats)": ["Multiline", ["train/teacher_logprob", "train/student_logprob"]],
        "tokens that the teacher hardly writes": ["Multiline", ["train/teacher_rare_tokens"]],
    },
    "Speed": {
        "seconds": ["Multiline", ["perf/seconds_.*"]],
        "response tokens per second": ["Multiline", ["perf/tokens_per_second"]],
    },
}


def scalar_layout(trainer: Trainer) -> dict:
    """The module's charts, then those of each callback that has a `scalar_layout()`."""
    layout = dict(LAYOUT)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if hasattr(callback, "scalar_layout"):
            layout |= callback.scalar_layout()
    return layout
