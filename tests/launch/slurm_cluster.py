"""A Slurm cluster of one node on this machine: munged, slurmctld and slurmd in the foreground, on 127.0.0.1.

It needs Debian's packages ``slurmctld``, ``slurmd``, ``slurm-client`` and ``munge``, and root.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")

_CONF = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmctldPort={ctld}
SlurmdPort={slurmd}
AuthType=auth/munge
AuthInfo=socket={here}/munge.socket
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=30
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=localhost NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why no cluster can be started here; empty where one can."""
    absent = [name for name in PROGRAMS if _program(name) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "slurmd needs root"


@dataclass(frozen=True)
class Cluster:
    """A running cluster."""

    here: Path

    @property
    def environment(self) -> dict[str, str]:
        """Variables for Slurm's programs; of an outer job none is kept."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return {**kept, "SLURM_CONF": str(self.here / "slurm.conf")}

    def call(self, *words: str) -> str:
        """The output of one of Slurm's programs."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job."""
        text = self.call("scontrol", "show", "job", "--oneliner", number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait(self, number: str, states: tuple[str, ...], deadline_s: float = 400) -> str:
        """Wait until a job has one of these states, and return it."""
        end = time.monotonic() + deadline_s
        while (state := self.job(number)["JobState"]) not in states:
            assert time.monotonic() < end, f"job {number} is {state}"
            time.sleep(0.2)
        return state


@contextmanager
def cluster(here: Path) -> Iterator[Cluster]:
    """Start the three servers; they are ended by their process ids."""
    for name in ("state", "spool"):
        (here / name).mkdir(parents=True)
    key = here / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    (here / "slurm.conf").write_text(_CONF.format(here=here, ctld=_free_port(), slurmd=_free_port()))
    started = Cluster(here)
    munged = ["--foreground", "--force", f"--key-file={key}", f"--socket={here}/munge.socket"]
    munged += [f"--pid-file={here}/munged.pid", f"--seed-file={here}/munged.seed", f"--log-file={here}/munged.log"]
    servers = []
    try:
        servers.append(_start("munged", *munged, here=here, environment=started.environment))
        _until(lambda: (here / "munge.socket").exists())
        servers.append(_start("slurmctld", "-D", here=here, environment=started.environment))
        servers.append(_start("slurmd", "-D", "-N", "localhost", here=here, environment=started.environment))
        _until(lambda: "idle" in _sinfo(started))
        yield started
    finally:
        for server in reversed(servers):
            server.terminate()
            server.wait(timeout=60)


def _sinfo(started: Cluster) -> str:
    words = ["scontrol", "show", "node", "localhost"]
    done = subprocess.run(words, env=started.environment, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.lower()


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _start(name: str, *words: str, here: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with (here / f"{name}.out").open("wb") as out:
        return subprocess.Popen([str(_program(name)), *words], stdout=out, stderr=subprocess.STDOUT, env=environment)


def _until(true: object, deadline_s: float = 120) -> None:
    end = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
