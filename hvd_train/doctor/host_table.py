"""``hvd-train doctor`` on a rank of several: one table with a row for each host, the links between them, a verdict."""

from __future__ import annotations

import os
import platform
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hvd_train
from hvd_train.doctor.host import SIZES, reduced, shown
from hvd_train.doctor.link_speed import HostLink, answering, measure
from hvd_train.engine.library import horovod
from hvd_train.errors import ConfigError
from hvd_train.frameworks import FRAMEWORKS, version
from hvd_train.installation import install_fix
from hvd_train.launch.interfaces import interfaces
from hvd_train.protocol import Communicator, allgather_json
from hvd_train.report.text_tables import aligned
from hvd_train.session import Session

CLOCK_SECONDS = 1.0
SHARED_SECONDS = 3.0  # for another host's file to become visible
SETUP = f"on that host {install_fix()}, or share one environment"
# What must be equal on all hosts: what to do if one differs from the first.
FIXES = {
    "Python": SETUP,
    "hvd_train": "install the same version there, or share one environment",
    "Horovod": SETUP,
    **dict.fromkeys(FRAMEWORKS, SETUP),
    "cores": "the slowest host sets the pace: leave it out, or give each host slots to match",
    "GPUs": "look there with nvidia-smi; leave it out, or give each host slots to match",
    "working folder": "start where all hosts have the same folder",
}


@dataclass(frozen=True)
class Facts:
    """The facts about one host.

    ``common``: {what: value} that must be equal on all hosts. ``interfaces``: (name, IPv4 address) of those to other
    hosts. ``file_system``: of the working folder. ``unshared``: why this host does not see the first host's file there,
    "" if it does. ``links``: to the first host's interfaces, none on the first host.
    """

    host: str
    ranks: int
    common: Mapping[str, str]
    interfaces: Sequence[tuple[str, str]]
    file_system: str
    unshared: str
    links: Sequence[HostLink] = ()

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Facts:
        return cls(**values | {"links": [HostLink(**link) for link in values["links"]]})

    @property
    def best(self) -> HostLink | None:
        """Return the answering link with the shortest round trip, or None."""
        return min((link for link in self.links if not link.error), key=lambda link: link.round_trip, default=None)


def hosts() -> int:
    """Compare the hosts of all ranks; rank 0 prints. Returns 0 on all ranks if nothing is wrong, else 1."""
    session = _session()
    with session.opened() as communicator:
        all_facts = _gather(session, communicator)
        seconds = reduced(communicator, session.module.cpu_ops()) if communicator.size > 1 else {}
        faults = differences(all_facts)
        if communicator.rank == 0:
            print(report(all_facts), flush=True)
            if seconds:
                print(f"\nallreduce over all {communicator.size} ranks (the time of a call, and bytes / time):")
                print(aligned(["over", *SIZES], [["MPI" if communicator.mpi else "Gloo", *shown(seconds)]]))
            no_fault = f"no difference between {len(all_facts)} hosts" if len(all_facts) > 1 else "one host"
            print("", *(faults or [no_fault]), sep="\n", flush=True)
    return 1 if faults else 0


def _gather(session: Session, communicator: Communicator) -> list[Facts]:
    """Return the facts of every host, in the order of their first ranks. Called on all ranks."""
    leads, addresses = communicator.local_rank == 0, active_interfaces()
    with ExitStack() as until:
        # First, for all: the first rank of each host, the first host's addresses, and the file that it has written.
        mine: dict[str, Any] = {"leads": leads, "interfaces": addresses}
        if communicator.rank == 0:
            mine |= {"token": (token := secrets.token_hex(32))}
            mine |= {"port": until.enter_context(answering(token.encode()))}
            mine |= dict(zip(("file", "error"), until.enter_context(written(token)), strict=True))
        everyone = allgather_json(communicator, mine, "doctor")
        leaders, first = [k for k, one in enumerate(everyone) if one["leads"]], everyone[0]
        links: list[HostLink] = []
        for k in leaders[1:]:  # one after the other, so that each has the network to itself
            if communicator.rank == k:
                key = first["token"].encode()
                links = [measure(name, address, first["port"], key) for name, address in first["interfaces"]]
            communicator.barrier()
        unshared = first["error"] or (sought(first["file"], first["token"]) if leads else "")
        name, system = os.environ.get("SLURMD_NODENAME", platform.node()), file_system(Path.cwd())
        facts = Facts(name, communicator.local_size, common(session), addresses, system, unshared, links)
        all_facts = allgather_json(communicator, asdict(facts), "facts")
    return [Facts.from_json(all_facts[k]) for k in leaders]


def _session() -> Session:
    """Return a session with the first installed framework; any will do."""
    for framework, record in FRAMEWORKS.items():
        if record.installed():
            return Session.prepare(framework)
    fix = f"on that host {FRAMEWORKS['pytorch'].install}"
    raise ConfigError("no framework is installed", where=f"host {platform.node()}", fix=fix)


def common(session: Session) -> dict[str, str]:
    """Return this host's values of the keys of ``FIXES``."""
    versions = {
        name: ", ".join(version(package) or "missing" for package in record.packages)
        for name, record in FRAMEWORKS.items()
    }
    return {
        "Python": platform.python_version(),
        "hvd_train": hvd_train.__version__,
        "Horovod": horovod(),
        **versions,
        "cores": str(os.cpu_count()),
        "GPUs": str(session.module.gpus()),
        "working folder": str(Path.cwd()),
    }


def active_interfaces() -> list[tuple[str, str]]:
    """Return (name, IPv4 address) of active interfaces to other hosts."""
    import psutil

    up = {name for name, facts in psutil.net_if_stats().items() if facts.isup}
    return [pair for pair in interfaces() if pair[0] in up]


def file_system(folder: Path) -> str:
    """Return the file system type of ``folder``: nfs4, lustre, ext4."""
    import psutil

    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    place = next((str(at) for at in (folder, *folder.parents) if str(at) in mounts), "")
    return mounts.get(place, "unknown")


@contextmanager
def written(token: str) -> Iterator[tuple[str, str]]:
    """Put a file with ``token`` into the working folder for the duration of the block. Yields (name, "") or ("", why
    not)."""
    try:
        file = tempfile.NamedTemporaryFile("w", prefix=".hvd-train-doctor-", dir=Path.cwd())  # noqa: SIM115
    except OSError as error:
        yield "", f"cannot write there: {error.strerror}"
        return
    with file:
        file.write(token)
        file.flush()
        os.fsync(file.fileno())
        yield Path(file.name).name, ""


def sought(file: str, token: str) -> str:
    """Return "" if the working folder has this file, else why not. A network file system may show it late."""
    stop = time.monotonic() + SHARED_SECONDS
    while True:
        try:
            if Path(file).read_text() == token:
                return ""
            reason = "not whole"
        except OSError as error:
            reason = error.strerror or "cannot be read"
        if time.monotonic() > stop:
            return reason
        time.sleep(0.1)


def report(hosts: Sequence[Facts]) -> str:
    """Return the table of the hosts, the first one first, and the table of the links to it."""
    rows = []
    for k, facts in enumerate(hosts):
        # The link with the shortest round trip gives the most accurate clock offset.
        offset = "0" if k == 0 else f"{1e3 * facts.best.offset:+.1f}" if facts.best else "?"
        named = ", ".join(f"{name} {address}" for name, address in facts.interfaces) or "none"
        shared = f"{facts.file_system}, {'not ' * bool(facts.unshared)}shared" if len(hosts) > 1 else facts.file_system
        rows.append([facts.host, facts.ranks, *facts.common.values(), shared, named, offset])
    text = aligned(["host", "ranks", *hosts[0].common, "file system", "interfaces", "clock (ms)"], rows)
    links = [
        [facts.host, f"{link.interface} {link.address}", *_figures(link)] for facts in hosts for link in facts.links
    ]
    if links:
        text += f"\n\none TCP connection to {hosts[0].host}:\n"
        text += aligned(["from", "to", "round trip", "speed"], links)
    return text


def _figures(link: HostLink) -> tuple[str, str]:
    return (link.error, "-") if link.error else (f"{1e6 * link.round_trip:.0f} us", f"{link.speed / 1e9:.2f} GB/s")


def differences(hosts: Sequence[Facts]) -> list[str]:
    """Return a line for each difference from the first host: the host, what differs, and what to do."""
    first, lines = hosts[0], []
    if first.unshared:
        lines.append(f"{first.host}: working folder: {first.unshared}: start in a folder that all hosts share")
    for facts in hosts[1:]:
        # Compared only with the first host, which shows all differences.
        for name, value in facts.common.items():
            if value != (expected := first.common[name]):
                lines.append(f"{facts.host}: {name}: {value}, {first.host} has {expected}: {FIXES[name]}")
        if facts.best is None:
            addresses = ", ".join(address for _, address in first.interfaces) or "none"
            fix = "look for a firewall or a missing route; --network-interfaces names the network between the hosts"
            lines.append(f"{facts.host}: no TCP connection to {first.host} (addresses: {addresses}): {fix}")
        elif abs(facts.best.offset) > CLOCK_SECONDS:
            lines.append(f"{facts.host}: clock: {facts.best.offset:+.1f} s from {first.host}'s: set it (chronyd, ntpd)")
        if facts.unshared and not first.unshared:
            what = f"does not see what {first.host} writes there ({facts.unshared})"
            lines.append(f"{facts.host}: working folder: {what}: start in a folder that all hosts share")
    return lines
