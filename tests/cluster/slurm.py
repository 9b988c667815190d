"""A real Slurm on this machine: munge, slurmctld, and a slurmd for each of two nodes with three pretended GPUs."""

import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from integration.helpers import ROOT

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
# The credential's lifetime is also how long a requeued job waits.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
MailProg=/bin/true
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 Gres=gpu:3
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16 Gres=gpu:3
PartitionName=main Nodes=n1,n2 Default=YES PriorityTier=1
PartitionName=urgent Nodes=n1,n2 PriorityTier=2
"""


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Slurm:
    """The cluster and its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "FISHER_LIT_VENV": sys.prefix}
        self.daemons: list[subprocess.Popen] = []

    def start(self) -> None:
        missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun") if not shutil.which(name)]
        assert not missing, f"not installed: {missing}; apt-get install slurm-wlm munge"
        host = socket.gethostname().split(".")[0]
        settings = {"folder": self.folder, "host": host, "user": getpass.getuser(), "ports": free_ports(3)}
        (self.folder / "slurm.conf").write_text(CONFIG.format(**settings))
        # Any files that exist can pretend to be GPUs.
        (self.folder / "gres.conf").write_text(
            "".join(f"Name=gpu File=/dev/{name}\n" for name in ("null", "zero", "full"))
        )
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for name in ("state", "n1", "n2"):
            (self.folder / name).mkdir()
        files = {"socket": "munge.socket", "log-file": "munged.log", "pid-file": "munged.pid", "seed-file": "seed"}
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        self.daemon("munged", "--foreground", "--force", f"--key-file={key}", *options)
        self.until(lambda: (self.folder / "munge.socket").exists(), 10)
        self.daemon("slurmctld", "-D")
        for node in ("n1", "n2"):
            self.daemon("slurmd", "-D", "-N", node)
        self.until(lambda: self.call("sinfo -h -o %t -t idle", check=False) == "idle", 30)

    def daemon(self, *command: str) -> None:
        with open(self.folder / "daemons.log", "a") as log:
            self.daemons.append(subprocess.Popen(command, env=self.env, stdout=log, stderr=log))

    def stop(self) -> None:
        self.call("scancel --signal=KILL --full --user " + getpass.getuser(), check=False)
        self.call("scancel --user " + getpass.getuser(), check=False)
        deadline = time.monotonic() + 10
        while self.call("squeue -h -t running,completing", check=False) and time.monotonic() < deadline:
            time.sleep(0.2)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def call(self, command: str | list[str], check: bool = True, **env: str) -> str:
        args = command.split() if isinstance(command, str) else command
        result = subprocess.run(args, env=self.env | env, cwd=ROOT, text=True, capture_output=True)
        assert not check or result.returncode == 0, result.stderr
        return result.stdout.strip()

    def submit(self, script: str, *args: str, options: tuple[str, ...] = (), **env: str) -> str:
        """Put a script of `cluster/` into the queue, on one CPU core a task; returns the job's id."""
        output = f"--output={self.folder}/job-%A_%a.out" if "grid" in script else f"--output={self.folder}/job-%j.out"
        command = ["sbatch", "--parsable", "--cpus-per-task=1", output, *options, f"cluster/{script}", *args]
        return self.call(command, **env)

    def output(self, job: str) -> str:
        return self.read(f"job-{job}.out")

    def read(self, name: str) -> str:
        file = self.folder / name
        return file.read_text(errors="replace") if file.exists() else ""

    def field(self, job: str, name: str) -> str:
        found = re.search(rf"\b{name}=(\S+)", self.call(f"scontrol show --oneliner job {job}"))
        assert found, name
        return found[1]

    def until(self, condition, seconds: float, log: str = "daemons.log") -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"nothing after {seconds} s: {self.read(log)}"
            time.sleep(0.2)

    def until_printed(self, job: str, text: str, seconds: float = 90) -> None:
        """Wait until the job has printed the text."""

        def printed():
            assert self.field(job, "JobState") in ("PENDING", "RUNNING"), self.output(job)
            return text in self.output(job)

        self.until(printed, seconds, f"job-{job}.out")

    def finish(self, job: str, state: str = "COMPLETED", seconds: float = 120) -> str:
        """Wait until the job has ended in this state; returns what it printed."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.until(lambda: self.field(job, "JobState") in ended, seconds, f"job-{job}.out")
        assert self.field(job, "JobState") == state, self.output(job)
        return self.output(job)
