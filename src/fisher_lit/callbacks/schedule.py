"""When something happens: at listed steps, or every n steps."""

from collections.abc import Sequence

from fisher_lit.errors import UserError


class Schedule:
    """Optimizer steps at which a callback fires. Step s is the state after s updates; step 0 is before the first.

    Args:
        owner: name of the callback, for messages.
        steps: steps to fire at.
        every_n_steps: fire at each multiple, 0 included.

    Raises:
        UserError: if both are given, or a number is out of range.
    """

    def __init__(self, owner: str, steps: Sequence[int] | None, every_n_steps: int | None) -> None:
        if steps is not None and every_n_steps is not None:
            raise UserError(f"{owner}: give `steps` ({list(steps)}) or `every_n_steps` ({every_n_steps}), not both")
        if every_n_steps is not None and every_n_steps < 1:
            raise UserError(f"{owner}: `every_n_steps` must be at least 1, got {every_n_steps}")
        if steps is not None and any(s < 0 for s in steps):
            raise UserError(f"{owner}: `steps` must not be negative, got {list(steps)}")
        self.steps = frozenset(steps or ())
        self.every_n_steps = every_n_steps

    def is_due(self, step: int) -> bool:
        """Whether to fire in the state after `step` updates."""
        return step in self.steps or (self.every_n_steps is not None and step % self.every_n_steps == 0)
