"""Hosts from ``-H a:2,b:2`` or a hostfile, and Python commands on them over ssh."""

from __future__ import annotations

import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvd_train import __version__
from hvd_train.errors import CommunicationError, ConfigError, amount
from hvd_train.launch.interfaces import interface_of, interfaces

# Horovod's launcher passes names to a shell, so they may hold no character that is special there.
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
MOST_SLOTS = 65536
ANSWER_SECONDS = 60.0  # for ssh to connect (10 s, below) and Python to start, also on a busy host
# Never prompt: ranks have no terminal.
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "PasswordAuthentication=no", "-o", "StrictHostKeyChecking=no"]
SSH += ["-o", "ConnectTimeout=10"]
ALIVE = ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4"]  # a silent host is given up after 20 s
VERSION = "import hvd_train; print(hvd_train.__version__)"
# Runs on another host: connect to the first of these addresses that answers.
CONNECT = """
import socket
for address in {addresses}:
    try:
        socket.create_connection((address, {port}), 3).close()
    except OSError:
        continue
    print(address)
    break
"""
OPEN = "open the ports between the hosts, or name another network: --network-interfaces"


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job. ``slots``: {host: how many ranks it takes}, in the order of ranks; ``interfaces`` "": all."""

    slots: dict[str, int]
    interfaces: str = ""

    @property
    def elsewhere(self) -> bool:
        """Return whether a host is another one than this."""
        return not all(map(is_here, self.slots))

    @property
    def words(self) -> str:
        return ",".join(f"{host}:{count}" for host, count in self.slots.items())

    @property
    def options(self) -> list[str]:
        """Return the options of ``fit`` that name these hosts."""
        return ["-H", self.words, *(["--network-interfaces", self.interfaces] if self.interfaces else [])]

    def needed(self, num_proc: int) -> list[str]:
        """Return the hosts for ``num_proc`` ranks, filled one after the other."""
        left, names = num_proc, []
        for host, count in self.slots.items():
            if left > 0:
                names.append(host)
            left -= count
        if left > 0:
            total = sum(self.slots.values())
            fix = f"-np {total}, or more slots (HOST:SLOTS)"
            raise ConfigError(f"{num_proc} ranks on hosts with {total} slots", where=f"-H {self.words}", fix=fix)
        return names


def parse(hosts: str | None, hostfile: Path | None, interfaces: str | None) -> Hosts | None:
    """Read ``a:2,b:2`` (1 without a number), or a file with a line ``a slots=2`` for each host.

    Both formats are Horovod's and Open MPI's. Returns None if neither is given. Raises ConfigError.
    """
    if hosts and hostfile:
        raise ConfigError("--hosts and --hostfile name the hosts twice", where="--hostfile", fix="give one of them")
    if interfaces and not re.fullmatch(r"[\w.:,-]+", interfaces):
        raise ConfigError(
            f"{interfaces!r} is not a list of networks",
            where="--network-interfaces",
            fix="give names, such as eth0,ib0",
        )
    if hosts:
        rows = [(f"--hosts {hosts}", row) for row in hosts.split(",")]
    elif hostfile:
        try:
            lines = hostfile.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConfigError(f"the file cannot be read: {reason}", where=f"--hostfile {hostfile}") from error
        rows = [(f"{hostfile}:{k}", line.partition("#")[0].strip()) for k, line in enumerate(lines, 1)]
        rows = [(where, row) for where, row in rows if row]
    else:
        if interfaces:
            fix = "give --hosts or --hostfile too: ranks of one host need no network"
            raise ConfigError("no hosts are named", where="--network-interfaces", fix=fix)
        return None
    slots: dict[str, int] = {}
    for where, row in rows:
        match = re.fullmatch(r"([^\s:]+)(?::(\d+)|\s+slots\s*=\s*(\d+))?(\s+max[-_]slots\s*=\s*\d+)?", row)
        if not match or not NAME.fullmatch(match[1]) or not (match[2] or match[3] or "1").strip("0"):
            fix = "write HOST:SLOTS[,HOST:SLOTS ...], or in a file a line 'HOST slots=N' each"
            raise ConfigError(f"{row!r} is not a host", where=where, fix=fix)
        if match[1].lower() in (host.lower() for host in slots):  # host names are case-insensitive
            raise ConfigError(f"{match[1]} stands twice", where=where, fix="give it once, with all its slots")
        count = match[2] or match[3] or "1"
        if len(count) > len(str(MOST_SLOTS)) or int(count) > MOST_SLOTS:
            raise ConfigError(f"{match[1]} has {count[:30]} slots", where=where, fix=f"a host takes up to {MOST_SLOTS}")
        slots[match[1]] = int(count)
    if not slots:
        raise ConfigError("the file names no host", where=f"--hostfile {hostfile}")
    return Hosts(slots, interfaces or "")


def is_here(host: str) -> bool:
    """Return whether a host name means this host."""
    if host in ("localhost", platform.node()):
        return True
    with suppress(OSError):
        address = socket.gethostbyname(host)
        return address.startswith("127.") or bool(interface_of(address))
    return False  # an alias in ssh's configuration


def spread(hosts: Hosts | None, num_proc: int | None, nnodes: int | None, each: int | None) -> tuple[Hosts, int]:
    """Return the first ``nnodes`` hosts (None: all) with ``each`` ranks (None: one a slot), and the number of ranks."""
    if hosts is None:
        fix = "give --hosts or --hostfile, or within an allocation --launcher srun"
        raise ConfigError("no hosts are named", where="--nnodes, --nproc-per-node", fix=fix)
    if nnodes and nnodes > len(hosts.slots):
        raise ConfigError(
            f"{nnodes} hosts are wanted, and {len(hosts.slots)} are named",
            where="--nnodes",
            fix="name more, or ask for fewer",
        )
    chosen = dict(list(hosts.slots.items())[:nnodes])
    for host, count in chosen.items():
        if each and each > count:
            what = f"{host} has {amount(count, 'slot')}, not {each}"
            raise ConfigError(what, where="--nproc-per-node", fix=f"say {host}:{each}, or 'slots={each}' in the file")
    chosen = {host: each or count for host, count in chosen.items()}
    return Hosts(chosen, hosts.interfaces), ranks_in_all(num_proc, sum(chosen.values()))


def ranks_in_all(num_proc: int | None, total: int) -> int:
    """Return ``total``. Raises ConfigError if ``-np`` is another number."""
    if num_proc not in (None, total):
        fix = "leave out -np"
        raise ConfigError(
            f"-np {num_proc} differs from the {total} ranks of these hosts", where="--nnodes, --nproc-per-node", fix=fix
        )
    return total


def travelling(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for ranks on other hosts, without secrets."""
    starts = ("OMP_", "HOROVOD_", "NCCL_", "TF_", "HVD_TRAIN_")
    names = [name for name in environ if name == "PYTHONPATH" or name.startswith(starts) and "SECRET" not in name]
    return {name: environ[name] for name in sorted(names)}


def look(hosts: Sequence[str]) -> None:
    """Check over ssh that all hosts have this Python and this version, before ranks start there."""
    answers = asked(hosts)
    for host, (code, out, error) in answers.items():
        where = f"host {host}"
        if code == 255:
            raise ConfigError(f"ssh cannot connect: {error or 'no answer'}", where=where, fix=f"try 'ssh {host}'")
        if code == 124:
            raise ConfigError(f"no answer within {ANSWER_SECONDS:g} s", where=where, fix=f"try 'ssh {host}'")
        if code:
            fix = "install it at the same path on all hosts, or share the file system"
            raise ConfigError(f"{sys.executable} does not run hvd_train there: {error}", where=where, fix=fix)
        if out != __version__:
            fix = "install the same version on all hosts"
            raise ConfigError(f"hvd_train is {out} there, and {__version__} here", where=where, fix=fix)


def asked(hosts: Sequence[str], code: str = VERSION) -> dict[str, tuple[int, str, str]]:
    """Run Python ``code`` on all hosts over ssh, and return {host: (exit code, output, last line of its errors)}.

    The code is 255 if ssh failed, and 124, as for timeout(1), if the host did not answer in time.
    """
    path = f"PYTHONPATH={os.environ['PYTHONPATH']}" if "PYTHONPATH" in os.environ else ""

    def one(host: str) -> tuple[int, str, str]:
        line = ["cd", os.getcwd(), "&&", "env", *([path] if path else []), sys.executable, "-P", "-c", code]
        words = " ".join(word if word == "&&" else shlex.quote(word) for word in line)
        try:
            done = subprocess.run(
                [*SSH, host, words], capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 124, "", ""
        except OSError as error:
            raise ConfigError(
                f"ssh cannot be run: {error.strerror}", where="--hosts", fix="install an ssh client"
            ) from error
        return done.returncode, done.stdout.strip(), (done.stderr.strip().splitlines() or [""])[-1]

    with ThreadPoolExecutor(min(32, len(hosts))) as pool:
        return dict(zip(hosts, pool.map(one, hosts), strict=True))


def check_way_back(hosts: Sequence[str]) -> str:
    """Let the hosts connect back to this one over TCP. Returns an error line that names those that cannot, or ""."""
    addresses = [address for _, address in interfaces()]
    with socket.create_server(("", 0), backlog=2 * len(hosts)) as server:
        port = server.getsockname()[1]
        answers = asked(hosts, CONNECT.format(addresses=addresses, port=port))
    apart = [host for host, (code, out, _) in answers.items() if code == 0 and not out]
    if not apart:
        return ""
    way = f"{', '.join(addresses)}, port {port}"
    what = f"host {', '.join(apart)} does not reach this host by TCP ({way}), though ssh does"
    return str(CommunicationError(what, where=f"hosts {', '.join(hosts)}", fix=OPEN))


def after(hosts: Sequence[str], code: int) -> None:
    """Raise CommunicationError if a host no longer answers, after a job that failed with ``code``."""
    # With these codes the ranks have printed their error.
    if code in (0, 2, 3, 4, 6, 75, 130):
        return
    time.sleep(0.5)
    gone = [host for host, (code_of_ssh, _, _) in asked(hosts).items() if code_of_ssh in (255, 124)]
    if gone:
        fix = "--resume auto goes on from the last checkpoint, on the hosts that are left with -H"
        raise CommunicationError(f"host {', '.join(gone)} does not answer any more", fix=fix)
