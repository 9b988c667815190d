"""What an engine with weights of its own needs: the trainer's weights as a stream, and proof that it holds them.

Shapes: T = tokens of the probe.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fisher_lit.errors import EngineError
from fisher_lit.sharding import all_reduce, local, whole

# Mean absolute difference of log-probabilities, nats per token, that rounding to a dtype can explain.
ROUNDING = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
PROBE_TOKENS = 32
_CHUNK = 1 << 20


def checkpoint_weights(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The model's weights under their names in a Hugging Face checkpoint, one at a time, in a fixed order.

    A tied weight comes under each of its names: an engine may keep a packed copy for each use. (vLLM's CPU backend
    does, and a reload without `lm_head.weight` leaves its head as it was.) One whole, cast copy exists at a time; all
    processes take the stream together.

    Args:
        model: the trained model.
        dtype: floating-point weights are cast to it.
    """
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    # Some architectures keep weights in other shapes in memory, such as the experts of a layer as one tensor.
    for name, tensor in revert_weight_conversion(model, state).items():
        tensor = whole(tensor)
        yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> int:
    """A 64-bit number that changes if any bit of any weight changes.

        h = Σ_c K^c Σ_i k_i b_ci   (mod 2^64),   b = the weights' bits, c = chunk, k_i odd and random

    A change of one weight always changes it; other changes go unseen with a probability of about 2^-63. Tensors'
    version counters would not do: an edit through `.data` leaves them as they are. It reads every weight once.

    Args:
        model: the trained model.
    """
    device = model.device
    weights = model.state_dict().values()
    size = min(_CHUNK, max(local(weight).numel() for weight in weights))
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**63), 2**63 - 1, (size,), generator=generator, dtype=torch.int64)
    keys = (keys | 1).to(device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for weight in map(local, weights):
        bits = weight.contiguous().view(-1).view(integers[weight.element_size()])
        for chunk in bits.split(size):
            total = total * 6364136223846793005 + (chunk.to(torch.int64) * keys[: len(chunk)]).sum()
    # Each process has hashed what it holds, and all must decide alike.
    all_reduce(total)
    return int(total)


def probe_tokens(model: PreTrainedModel, max_length: int) -> list[int]:
    """Token ids of the probe: the same random ones for every model of a vocabulary size."""
    vocabulary = int(model.get_output_embeddings().weight.shape[0])
    length = min(PROBE_TOKENS, max_length - 1)
    return torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(0)).tolist()


@torch.no_grad()
def trainer_logprobs(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """Log-probabilities [T − 1] of all tokens but the first under the trainer's own forward, nats, float32."""
    ids = torch.tensor([token_ids], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].cpu()


def check_probe(engine: list[float], trainer: Tensor, *, dtype: torch.dtype, tolerance: float | None) -> float:
    """Prove that an engine gives the trainer's log-probabilities of the probe.

    In a 16-bit dtype a single small update is below the rounding; weights that miss many updates, or the wrong
    weights, are not.

    Args:
        engine: [T − 1] the engine's log-probabilities, nats.
        trainer: [T − 1] the trainer's, nats.
        dtype: what the engine computes in.
        tolerance: largest mean absolute difference, nats per token; None is `ROUNDING` of the dtype.

    Returns:
        The mean absolute difference, nats per token.

    Raises:
        EngineError: if it is larger, or not a number.
    """
    bound = ROUNDING[dtype] if tolerance is None else tolerance
    gap = float((torch.tensor(engine) - trainer).abs().mean())
    if not gap <= bound or math.isnan(gap):
        raise EngineError(
            f"engine: after a weight sync its log-probabilities of the probe differ from the trainer's by {gap:.3g} "
            f"nats per token, more than the {bound:g} that {str(dtype).removeprefix('torch.')} explains, so it does "
            f"not hold the trainer's weights; use fisher_lit.rollout.TransformersEngine, or set `probe_tolerance`"
        )
    return gap
