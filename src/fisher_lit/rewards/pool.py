"""Grading in worker processes under a hard limit of time and memory."""

import logging
import math
import os
import resource
import signal
import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from fisher_lit.errors import UserError
from fisher_lit.rewards.extract import final_answer
from fisher_lit.rewards.judge import is_correct, reference_answer
from fisher_lit.rewards.normalize import cheap_verdict, normalize
from fisher_lit.rewards.spawn import WorkerContext

_log = logging.getLogger(__name__)

# Address space of a worker. SymPy needs a tenth of it; a tower of powers takes all it gets.
_MEMORY_BYTES = 4 * 2**30
# Longer answers are normalised in a worker too: a degenerate one can take long.
_MAX_CHEAP_CHARACTERS = 500
_MAX_STARTS = 3
_CHECK_SECONDS = 0.5


def _start_worker() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, _MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Big-integer arithmetic never returns to the interpreter, so a Python handler would not run.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # math-verify warns once that it runs without its own time limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # The first comparison loads SymPy's modules and fills the parser's tables; no answer pays for that.
    is_correct(r"\frac{x^2 + \sqrt{2}}{3} = y", r"y = x + \sin(1)")


def _judge(answer: str, gold: str, timeout_s: float) -> bool:
    # Should the training process die, nobody would stop a hanging worker: the kernel does.
    signal.alarm(math.ceil(timeout_s) + 1)
    try:
        return is_correct(answer, gold)
    finally:
        signal.alarm(0)


def _stop_pool(pool: ProcessPool, pid: int) -> None:
    # A forked copy of the training process has no part in its parent's workers.
    if os.getpid() == pid:
        pool.stop()
        pool.join()


def _quick_verdict(answer: str, gold: str) -> bool | None:
    if answer == gold:
        return True
    if max(len(answer), len(gold)) > _MAX_CHEAP_CHARACTERS:
        return None
    return cheap_verdict(normalize(answer), normalize(gold))


class MathReward:
    r"""Binary reward for mathematics: 1 where a response's final answer equals the reference, else 0.

    The final answer is the last `\boxed{}`, else a marked statement such as "The answer is 5", else a response that is
    nothing but a number. Equal strings and plain numbers are decided at once; math-verify judges the rest in worker
    processes, which start with the first such answer. An answer that exceeds the limit of time or memory, or takes
    its worker down, scores 0 and is counted; a fresh worker replaces the one that is lost. No signal is set in the
    calling process, and calls from any thread will do.

    Args:
        num_workers: worker processes, at least 1.
        timeout_s: seconds that one answer may take once a worker has taken it up, greater than 0.

    Raises:
        UserError: for an argument out of range.
    """

    num_timeouts: int
    """Answers so far that were cut off by the limit of time or memory, or by the death of their worker."""

    def __init__(self, num_workers: int = 2, timeout_s: float = 5.0) -> None:
        if num_workers < 1:
            raise UserError(f"reward: `num_workers` must be at least 1, got {num_workers}")
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise UserError(f"reward: `timeout_s` must be a number of seconds greater than 0, got {timeout_s}")
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self.num_timeouts = 0
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._pool: ProcessPool | None = None
        self._stop: weakref.finalize | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Settings and the count: a copy starts workers of its own."""
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_pool", "_stop")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def __call__(self, responses: Sequence[str], golds: Sequence[str]) -> list[float]:
        """Score responses against their references.

        Args:
            responses: generated texts.
            golds: the reference answer of each: a number, LaTeX, words, a choice letter, or text that ends in a
                box or in GSM8K's "#### 18".

        Returns:
            1.0 or 0.0 for each response, in order.

        Raises:
            UserError: where the two differ in length.
            RuntimeError: where workers cannot be started.
        """
        if len(responses) != len(golds):
            raise UserError(f"reward: got {len(responses)} `responses` for {len(golds)} `golds`; give one for each")
        answers = [final_answer(response) for response in responses]
        pairs = [(a, reference_answer(g)) if a is not None else None for a, g in zip(answers, golds, strict=True)]
        verdicts = {pair: _quick_verdict(*pair) for pair in pairs if pair is not None}
        unknown = [pair for pair, verdict in verdicts.items() if verdict is None]
        if unknown:
            verdicts.update(self._judge_all(unknown))
        return [float(pair is not None and bool(verdicts[pair])) for pair in pairs]

    def close(self) -> None:
        """Stop the workers. The next call starts new ones."""
        with self._lock:
            if self._stop is not None:
                self._stop()
            self._pool = self._stop = None

    def _running_pool(self) -> ProcessPool:
        with self._lock:
            if self._pool is None:
                self._pool = ProcessPool(self.num_workers, initializer=_start_worker, context=WorkerContext())
                self._stop = weakref.finalize(self, _stop_pool, self._pool, os.getpid())
            return self._pool

    def _judge_all(self, pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], bool]:
        verdicts: dict[tuple[str, str], bool] = {}
        waiting = list(pairs)
        for _ in range(_MAX_STARTS):
            futures = self._schedule(waiting)
            for pair, future in futures.items():
                if not _is_lost(future):
                    verdicts[pair] = self._verdict(future)
            waiting = [pair for pair in waiting if pair not in verdicts]
            if not waiting:
                return verdicts
            # A worker that dies while it is idle breaks the pool.
            self.close()
        raise RuntimeError(f"the grading workers died {_MAX_STARTS} times in a row; is the machine out of memory?")

    def _schedule(self, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], ProcessFuture]:
        """Judge `pairs` and wait until all are done or the pool is broken."""
        pool = self._running_pool()
        futures: dict[tuple[str, str], ProcessFuture] = {}
        try:
            for pair in pairs:
                futures[pair] = pool.schedule(_judge, args=(*pair, self.timeout_s), timeout=self.timeout_s)
        except RuntimeError:
            # The pool broke since its last use.
            return futures
        while wait(futures.values(), timeout=_CHECK_SECONDS).not_done and pool.active:
            pass
        return futures

    def _verdict(self, future: ProcessFuture) -> bool:
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, (FutureTimeoutError, ProcessExpired, MemoryError)):
            self.num_timeouts += 1
        else:
            _log.warning("an answer could not be judged and scores 0: %r", error)
        return False


def _is_lost(future: ProcessFuture) -> bool:
    return not future.done() or isinstance(future.exception(), BrokenProcessPool)


@cache
def _shared_reward(num_workers: int, timeout_s: float) -> MathReward:
    return MathReward(num_workers, timeout_s)


def score(
    responses: Sequence[str], golds: Sequence[str], *, num_workers: int = 2, timeout_s: float = 5.0
) -> list[float]:
    """Score responses with a `MathReward` that is kept for the life of the process.

    Args:
        responses: generated texts.
        golds: the reference answer of each.
        num_workers: worker processes.
        timeout_s: seconds that one answer may take.

    Returns:
        1.0 or 0.0 for each response, in order.

    Raises:
        UserError: where the two differ in length or a setting is out of range.
    """
    return _shared_reward(num_workers, timeout_s)(responses, golds)
