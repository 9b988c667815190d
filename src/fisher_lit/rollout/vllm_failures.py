"""How vLLM fails, as one clear line each."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds past `batch_timeout` after which vLLM counts as stuck inside one step.
GRACE = 300.0
# What vLLM raises when it cannot do what it is asked for.
FAILURES = (AssertionError, AttributeError, ImportError, KeyError, RuntimeError, TimeoutError, TypeError, ValueError)


@contextmanager
def hard_limit(seconds: float) -> Iterator[None]:
    """End the process if the body takes longer than `seconds` and a grace.

    It is for a body that is stuck in compiled code, where no exception can reach it.
    """

    def stop() -> None:
        print(
            f"fisher-lit: error: engine: vLLM has not answered for {seconds + GRACE:g} s; the process ends here, and "
            f"the last checkpoint is intact",
            file=sys.stderr,
            flush=True,
        )
        os._exit(2)

    timer = threading.Timer(seconds + GRACE, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _first_line(error: BaseException) -> str:
    """The line of an error message that says what is wrong; pydantic's first one does not."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if "validation error" not in line] or [type(error).__name__]
    return lines[0].removeprefix("Value error, ").split(" [type=")[0][:300]


def failure(what: str, error: BaseException) -> str:
    """What failed, why, and how to go on, in one line."""
    return (
        f"engine: vLLM {what} ({_first_line(error)}); the last checkpoint is intact. Resume from it, with "
        f"fisher_lit.rollout.TransformersEngine if it happens again"
    )


def refusal(architecture: str, error: BaseException) -> str:
    """Why vLLM does not start, with the way out."""
    line = _first_line(error)
    if "not supported for now" in line or "no vLLM implementation" in line or "not compatible with vLLM" in line:
        return f"engine: vLLM does not know the architecture {architecture}; use fisher_lit.rollout.TransformersEngine"
    if "KV cache" in line or "cache blocks" in line:
        return (
            f"engine: vLLM has too little memory for its key-value cache ({line}); raise `gpu_memory_utilization` or "
            f"`kv_cache_gib`, or lower `max_model_len`"
        )
    return f"engine: vLLM cannot start with {architecture} ({line}); use fisher_lit.rollout.TransformersEngine"
