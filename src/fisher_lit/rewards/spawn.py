"""Fresh worker processes that do not import the user's main script.

`multiprocessing` imports the parent's main module in every spawned process. Here that would load torch into each
grading worker, and run a training script without a `__main__` guard once more. The workers need neither: all they are
sent lives in importable modules.
"""

import io
import os
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from multiprocessing.process import BaseProcess

from typing_extensions import override


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _Popen(popen_spawn_posix.Popen):
    """The standard library's start of a spawned process, less the main module."""

    _fds: list[int]

    def _launch(self, process_obj: BaseProcess) -> None:
        tracker = resource_tracker.getfd()
        assert tracker is not None
        self._fds.append(tracker)
        preparation = spawn.get_preparation_data(process_obj.name)
        buffer = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump({k: v for k, v in preparation.items() if not k.startswith("init_main")}, buffer)
            reduction.dump(process_obj, buffer)
        finally:
            set_spawning_popen(None)
        child_reads, parent_writes = os.pipe()
        self.sentinel, child_holds = os.pipe()
        self.finalizer = util.Finalize(self, _close, (self.sentinel, parent_writes))
        try:
            command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=child_reads)
            self._fds += [child_reads, child_holds]
            self.pid = util.spawnv_passfds(os.fsencode(spawn.get_executable()), command, self._fds)
        finally:
            os.close(child_reads)
            os.close(child_holds)
        with open(parent_writes, "wb", closefd=False) as pipe:
            pipe.write(buffer.getbuffer())


class WorkerProcess(SpawnProcess):
    """A spawned process that starts from an empty main module."""

    @staticmethod
    @override
    def _Popen(process_obj: BaseProcess) -> _Popen:
        return _Popen(process_obj)


class WorkerContext(SpawnContext):
    """The "spawn" start method with `WorkerProcess`."""

    Process = WorkerProcess
