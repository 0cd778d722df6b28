"""A Slurm of two nodes on this host: munge, slurmctld and two slurmd, each with a folder, ports and a key.

On a ``tests.hosts.network`` each node has a network of its own, and the first one runs slurmctld too.
"""

from __future__ import annotations

import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from hvd_train.launch.process import end_with_parent
from hvd_train.launch.submit import RUNNING
from tests.hosts.network import Network
from tests.limits import SECONDS

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "sinfo")
WHERE = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
START_SECONDS, END_SECONDS = 60.0, 20.0  # a Slurm that does not start is skipped
# Every node has more cores than this host, or a step of 4 tasks would wait for ever on 2 cores.
CONF = """
ClusterName=test
SlurmctldHost={host}({addresses[0]})
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ctld}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
NodeName={nodes[0]} NodeHostname={hosts[0]} NodeAddr={addresses[0]} Port={node1} CPUs=16
NodeName={nodes[1]} NodeHostname={hosts[1]} NodeAddr={addresses[1]} Port={node2} CPUs=16
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=WHERE) is None]


class Cluster:
    """``environment``: what a command needs to talk to it. ``stop`` leaves no process behind, and the daemons end with
    this process in any case."""

    def __init__(self, folder: Path, network: Network | None = None) -> None:
        self.folder, self.network = folder, network
        self.nodes = network.hosts[:2] if network else ["node1", "node2"]
        self.daemons: list[psutil.Popen] = []
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "HVD_TRAIN", "HOROVOD"))}
        self.environment = {**kept, "PATH": WHERE, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        folder = self.folder
        (folder / "state").mkdir(parents=True)
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        words = [f"--{name}={folder / file}" for name, file in {**names, "seed-file": "munge.seed"}.items()]
        # --force: others may look into the folder above; the key is ours alone.
        self._daemon("munged", "--foreground", "--force", "--num-threads=2", *words)
        self.wait_for(lambda: (folder / "munge.socket").exists())
        ports = dict(zip(("ctld", "node1", "node2"), _free_ports(3), strict=True))
        hosts, addresses = (["localhost"] * 2, ["127.0.0.1"] * 2)
        if self.network:
            hosts, addresses = self.nodes, ["10.99.0.1", "10.99.0.2"]
        places = {"host": hosts[0], "hosts": hosts, "addresses": addresses, "nodes": self.nodes}
        conf = CONF.format(user=getpass.getuser(), folder=folder, **places, **ports)
        (folder / "slurm.conf").write_text(conf)
        self._daemon(*self.on(self.nodes[0], "slurmctld", "-D", "-i"))
        for node in self.nodes:
            self._daemon(*self.on(node, "slurmd", "-D", "-N", node))
        self.wait_for(lambda: self._states() == ["idle", "2"])

    def on(self, node: str, *line: str) -> list[str]:
        """The command line that runs ``line`` within a node's network."""
        if not self.network:
            return list(line)
        # "ip netns" would hide /sys/fs/cgroup; Horovod ends a process whose host name leads nowhere.
        named = f'mount --bind /etc/netns/{node}/hosts /etc/hosts; hostname {node}; exec "$@"'
        space = ["nsenter", f"--net=/run/netns/{node}", "unshare", "--uts", "--mount"]
        return [*space, "sh", "-c", named, "sh", *line]

    def _daemon(self, *line: str) -> None:
        with (self.folder / "daemons.log").open("a") as log:
            self.daemons.append(
                psutil.Popen(
                    line,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )
            )

    def wait_for(self, ready: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        stop = time.monotonic() + seconds
        while not ready():
            dead = [daemon.args[0] for daemon in self.daemons if daemon.poll() is not None]
            assert not dead and time.monotonic() < stop, f"{dead}: {(self.folder / 'daemons.log').read_text()[-3000:]}"
            time.sleep(0.1)

    def _states(self) -> list[str]:
        """["idle", "2"] when both nodes wait for jobs; nothing as long as nobody answers."""
        line = self.on(self.nodes[0], "sinfo", "-h", "-o", "%T %D")
        return subprocess.run(line, env=self.environment, capture_output=True, text=True, check=False).stdout.split()

    def run(self, *line: str) -> str:
        line = tuple(self.on(self.nodes[0], *line))
        done = subprocess.run(line, env=self.environment, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def end_of(self, job: str) -> str:
        """The state in which a job ends."""
        stop = time.monotonic() + SECONDS
        while time.monotonic() < stop:
            state = re.findall(r"JobState=(\S+)", self.run("scontrol", "show", "job", job))[0]
            if state not in RUNNING:
                return state
            time.sleep(0.2)
        raise AssertionError(f"job {job} does not end")

    def stop(self) -> None:
        """Jobs first: what a step runs outlives slurmd."""
        if self.daemons and all(daemon.poll() is None for daemon in self.daemons):
            self.run("scancel", "--user", getpass.getuser())
        stop = time.monotonic() + END_SECONDS
        while self.steps() and time.monotonic() < stop:
            time.sleep(0.1)
        left = [*self.daemons, *self.steps()]
        for process in left:
            with suppress(psutil.Error):
                process.terminate()
        for process in psutil.wait_procs(left, timeout=END_SECONDS)[1]:
            process.kill()

    def steps(self) -> list[psutil.Process]:
        """Return the processes of this cluster's jobs, and the daemons of their steps."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                own = process.environ()
                step = "SLURM_JOB_ID" in own or process.name() == "slurmstepd"
                if step and own.get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    found.append(process)
        return sorted(found, key=lambda process: process.pid)


def _free_ports(count: int) -> list[int]:
    """Return ports below the ephemeral ones, of which any connection might take one before it is opened again."""
    ports: list[int] = []
    for port in range(16384 + os.getpid() % 8192, 32768):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise AssertionError("no free port")
