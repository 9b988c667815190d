"""Exceptions whose message says, in one line, what to change. The command line prints them without a traceback."""


class UserError(ValueError):
    """Bad input. The message names the argument, its value and the way out."""


class NonFiniteError(RuntimeError):
    """A loss or a gradient became NaN or infinite. Training stops before the weights are touched."""


class EngineError(RuntimeError):
    """A rollout engine failed or does not hold the trainer's weights. Training stops before the weights are touched."""
