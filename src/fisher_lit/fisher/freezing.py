"""Training of a fixed set of coordinates: the others stay as they are, bit for bit."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from fisher_lit.sharding import local


@torch.no_grad()
def zero_frozen_gradients(parameters: Mapping[str, nn.Parameter], masks: Mapping[str, Tensor]) -> None:
    """Set the gradient of every coordinate outside the set to 0, in place.

    Args:
        parameters: parameters by name; those without a gradient are passed over.
        masks: True on the coordinates that are trained; of a sharded parameter, the process's part.
    """
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            local(parameter.grad).masked_fill_(~masks[name], 0)


@torch.no_grad()
def restore_frozen(
    parameters: Mapping[str, nn.Parameter], masks: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> None:
    """Set every coordinate outside the set back to its reference value, in place.

    A zero gradient does not hold a weight where it is: weight decay and momentum move it.
    """
    for name, parameter in parameters.items():
        held = local(parameter)
        held.copy_(torch.where(masks[name], held, reference[name]))


def moves_with_gradient_only(optimizer: Optimizer) -> bool:
    """True if a coordinate whose gradient has always been 0 provably stays as it is, so that nothing need be restored.

    That holds for Adam, AdamW and SGD without weight decay and without a past (old moments move weights too).
    """
    decays = any(group.get("weight_decay", 0) != 0 for group in optimizer.param_groups)
    return type(optimizer) in (Adam, AdamW, SGD) and not decays and not optimizer.state
