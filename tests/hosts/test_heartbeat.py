"""Ranks and hosts that stand still without an end, and networks that lose packets: named within the limit, code 5."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.hosts.network import Network
from tests.hosts.test_hosts import BIN, ROOTED, words
from tests.limits import SECONDS, until

LIMIT = 10
WAITS = pytest.mark.long("each waits for its limit; the rules have unit tests")
FILTER = pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft (apt install nftables)")


class Job:
    """``fit`` on the first two hosts, past its first steps. ``ranks``: {rank: pid}."""

    def __init__(self, network: Network, folder: Path, launcher: str, each: int, *more: str) -> None:
        self.network, self.hosts = network, network.hosts[:2]
        slots = ",".join(f"{host}:{each}" for host in self.hosts)
        line = [str(BIN / "hvd-train"), "fit", "-np", str(2 * each), "-H", slots, "--launcher", launcher]
        if launcher == "mpirun itself":
            eth0 = [word for part in ("btl", "oob") for word in ("--mca", f"{part}_tcp_if_include", "eth0")]
            start = [str(BIN / "mpirun"), "--quiet", "-np", str(2 * each), "-H", slots, *eth0, "-x", "PYTHONPATH"]
            line = [*start, *line[:2]]
        sets = ["max_epochs=40000", "checkpoint.every_n_steps=20", f"watchdog_s={LIMIT}", *more]
        self.rows = folder / "run" / "metrics.jsonl"
        self.process = network.started([*line, *words(folder / "run", "pytorch", *sets)], **ROOTED)
        stop = time.monotonic() + SECONDS
        while not self.rows.exists() or self.rows.read_text().count("\n") < 30:
            assert self.process.poll() is None and time.monotonic() < stop, self.process.communicate()
            time.sleep(0.1)
        self.ranks = self._ranks()
        assert sorted(self.ranks) == list(range(2 * each))
        time.sleep(2.5)  # the hosts have found one another

    def _ranks(self) -> dict[int, int]:
        found = {}
        for host in self.hosts:
            listed = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=True).stdout
            for pid in listed.split():
                with suppress(OSError):
                    line, environ = (
                        Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0") for name in ("cmdline", "environ")
                    )
                    given = dict(entry.split(b"=", 1) for entry in environ if b"=" in entry)
                    rank = given.get(b"OMPI_COMM_WORLD_RANK", given.get(b"HOROVOD_RANK"))
                    if rank and b"fit" in line:
                        found[int(rank)] = int(pid)
        return found

    def send(self, number: int, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.ranks[rank], number)

    def end(self) -> tuple[int, list[str]]:
        """Its code and the lines of its errors."""
        try:
            _, err = self.process.communicate(timeout=LIMIT + SECONDS)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.returncode, [line for line in err.splitlines() if line.startswith("error")]

    def leaves_nothing(self) -> None:
        until(lambda: not self.network.left())


def drop_large(host: str) -> None:
    rules = "type filter hook input priority 0; policy accept;\niifname lo accept\nmeta length > 1000 drop\n"
    table = f"table inet only_small {{\nchain input {{\n{rules}}}\n}}\n"
    # Else the kernel hands on many packets of a connection as one.
    subprocess.run(["ip", "-n", host, "link", "set", "eth0", "gso_max_segs", "1"], check=True)
    subprocess.run(["ip", "netns", "exec", host, "nft", "-f", "-"], input=table, text=True, check=True)


def pass_all(host: str) -> None:
    line = ["ip", "netns", "exec", host, "nft", "delete", "table", "inet", "only_small"]
    subprocess.run(line, check=True)
    subprocess.run(["ip", "-n", host, "link", "set", "eth0", "gso_max_segs", "65535"], check=True)


@pytest.mark.parametrize(
    ("launcher", "each", "stopped"),
    [
        ("mpirun", 1, [1]),
        pytest.param("mpirun", 2, [2, 3], marks=WAITS),
        pytest.param("mpirun itself", 2, [3], marks=WAITS),
        pytest.param("horovodrun", 1, [0], marks=WAITS),
    ],
)
def test_a_stopped_rank_is_named_with_its_host(network, tmp_path, launcher, each, stopped):
    job = Job(network, tmp_path, launcher, each)
    job.send(signal.SIGSTOP, *stopped)
    code, errors = job.end()
    rank = min(stopped)
    told = (
        f"error: rank {rank} on host {network.hosts[rank // each]} is stopped (SIGSTOP), for more than {LIMIT} s; in "
    )
    assert code == 5 and len(errors) == 1 and errors[0].startswith(told), errors
    assert errors[0].endswith("; --resume auto goes on")
    job.leaves_nothing()


@WAITS
@FILTER
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_large_packets_alone_are_lost(network, tmp_path, launcher):
    job = Job(network, tmp_path, launcher, 1, "model.hidden=[512,512]")
    for host in job.hosts:
        drop_large(host)
    try:
        code, errors = job.end()
        a, b = job.hosts
        told = f"error: large packets do not pass between host {a} and host {b}, small ones do: no step for {LIMIT} s; "
        assert code == 5 and len(errors) == 1 and errors[0].startswith(told), errors
        job.leaves_nothing()
    finally:
        for host in job.hosts:
            pass_all(host)


@WAITS
@FILTER
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_all_ports_but_ssh_are_dropped_from_the_start(network, tmp_path, launcher):
    a, b, _ = network.hosts
    network.only_ssh(a)
    try:
        line = [str(BIN / "hvd-train"), "fit", "-np", "2", "-H", f"{a}:1,{b}:1", "--launcher", launcher]
        done = network.run([*line, *words(tmp_path / "run", "pytorch")], 100, **ROOTED)
    finally:
        network.all_ports(a)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error")]
    told = {
        "mpirun": f"error: host {b} does not reach this host by TCP (10.99.0.1, port ",
        "horovodrun": "error: no connection to the starting host: 10.99.0.1, port ",
    }[launcher]
    assert done.returncode == 5 and len(errors) == 1 and errors[0].startswith(told), done.stderr
    until(lambda: not network.left())  # MPI's daemon goes on trying for a while


@WAITS
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_a_killed_rank_is_named_with_its_host_by_all(network, tmp_path, launcher):
    job = Job(network, tmp_path, launcher, 2, "watchdog_s=25")  # the kernel may take seconds to end a process
    job.send(signal.SIGKILL, 3)
    code, errors = job.end()
    who = f"rank 3 on host {network.hosts[1]} "
    assert code == 5 and f"error: {who}was ended by SIGKILL; look for a crash or too little memory" in "\n".join(errors)
    assert all(who in error for error in errors), errors
    job.leaves_nothing()


@WAITS
@pytest.mark.parametrize(("launcher", "number"), [("horovodrun", signal.SIGTERM), ("mpirun", signal.SIGUSR1)])
def test_a_training_that_is_stopped_saves_and_leaves_nothing(network, tmp_path, launcher, number):
    """And no port is listened to once the hosts have met."""
    job = Job(network, tmp_path, launcher, 1)
    if launcher == "horovodrun":
        ports = [
            subprocess.run(["ip", "netns", "exec", host, "ss", "-Hltnp"], capture_output=True, text=True).stdout
            for host in job.hosts
        ]
        # The rendezvous server alone.
        assert "hvd_train" not in "".join(ports) and sum(text.count("python") for text in ports) <= 1, ports
    job.process.send_signal(number)
    out, _ = job.process.communicate(timeout=LIMIT + SECONDS)
    stopped = re.search(rf"stopped by {number.name} at step (\d+), and saved; --resume auto goes on", out)
    assert job.process.returncode == 75 and stopped, out
    assert (job.rows.parent / "checkpoints" / f"step-{int(stopped[1]):08d}" / "manifest.json").exists()
    job.leaves_nothing()
