"""What vLLM is asked for, in process or over HTTP: every sampling knob, and limits that it would hide."""

from collections.abc import Sequence
from typing import Any

from fisher_lit.errors import UserError
from fisher_lit.rollout.engine import SampleRequest
from fisher_lit.rollout.sampling import Sampling

# vLLM silently raises lower temperatures to the first, and refuses higher ones than the second.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0


def check_sampling(sampling: Sampling) -> None:
    """Refuse what vLLM would draw from another distribution.

    Raises:
        UserError: naming the setting.
    """
    temperature = sampling.temperature
    if temperature != 0 and not LOWEST_TEMPERATURE <= temperature <= HIGHEST_TEMPERATURE:
        raise UserError(
            f"sampling: vLLM takes a `temperature` of 0 or from {LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE}, "
            f"got {temperature}; set one of these, or use fisher_lit.rollout.TransformersEngine"
        )
    if sampling.min_p > 0 and sampling.top_p < 1:
        raise UserError(
            f"sampling: vLLM applies `min_p` ({sampling.min_p}) before `top_p` ({sampling.top_p}), not after it; set "
            f"one of the two, or use fisher_lit.rollout.TransformersEngine"
        )


def check_lengths(requests: Sequence[SampleRequest], max_new_tokens: int, max_model_len: int) -> None:
    """Refuse prompts that leave no room for the whole horizon.

    Raises:
        UserError: naming the longest prompt.
    """
    longest = max((len(request.prompt_ids) for request in requests), default=0)
    if longest + max_new_tokens > max_model_len:
        raise UserError(
            f"engine: a prompt of {longest} tokens and a response of {max_new_tokens} are more than vLLM's "
            f"`max_model_len` of {max_model_len}; raise it, or lower `max_prompt_tokens` or `max_response_tokens`"
        )


def sampling_parameters(
    request: SampleRequest, sampling: Sampling, max_new_tokens: int, stop_ids: frozenset[int]
) -> dict[str, Any]:
    """Every parameter of vLLM that decides which tokens are drawn, under its own names."""
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": request.seed,
        "stop": None,
        # The stop token stays in the response; the model's own end of sequence counts only if it is among them.
        "stop_token_ids": sorted(stop_ids),
        "ignore_eos": True,
        "max_tokens": max_new_tokens,
        "min_tokens": 0,
        "logprobs": 0,
        "watermarking": False,
    }
