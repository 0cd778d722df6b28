"""Ranks that watch one another where no ``-np`` process watches them: under other launchers, over several hosts, in
user scripts.

On one host the first few ranks watch all ranks, each from a thread; several, because one of them may be the stopped
rank. They read shared memory, because Horovod's own stall check hangs with a stopped rank. Over several hosts a process
on each host reports to that of rank 0 (``launch/heartbeat.py``).
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from hvd_train.launch import heartbeat
from hvd_train.launch.interfaces import interfaces
from hvd_train.launch.status import StatusSlot, StatusTable, host_key, supported, verdict_path
from hvd_train.launch.watchdog import DEAD, Watchdog, state

if TYPE_CHECKING:
    from hvd_train.protocol import Communicator

LOOK_SECONDS, LOOKERS = 0.5, 4  # seconds between polls; how many ranks of a host watch
WRITE_SECONDS = 5.0  # for another rank of this host to print who is stuck
HERE_SECONDS = 1.5  # for the end of a rank of this host to be seen
NEWS_SECONDS = 10.0  # for the name of the lost rank to reach the other hosts; busy ones took more than 3
PORT, PORTS = "HVD_TRAIN_PORT", 16  # the first of the ports that a firewall leaves open, as of srun's ranks


class Company(NamedTuple):
    """The ranks of this host. ``hosts``: the number of hosts that report to one another."""

    table: StatusTable
    ranks: list[int]
    name: str
    hosts: int = 1


_companies: list[Company] = []


def watch(communicator: Communicator, limit: float, goes_on: str = "") -> StatusSlot | None:
    """Begin to watch all ranks. All end with code 5 if one is stuck for ``limit`` seconds (0: never).

    Must be called on all ranks. Returns the slot for this rank's status, or None if no process on this host reads it.
    ``goes_on`` says how the job continues after a loss.
    """
    # All ranks call the same collectives, even those with nothing to watch.
    hosts = _gather_hosts(communicator)
    here = next(k for k, (_, ranks) in enumerate(hosts) if communicator.rank in ranks)
    name, company = hosts[here]
    alone = (len(company) == 1 and len(hosts) == 1) or not limit or not supported()
    first = company[0] == communicator.rank
    # The first rank of each host creates the table. The others open it by its path in /proc.
    table = StatusTable(len(company)) if first and not alone else None
    paths = communicator.allgather_bytes((table.path if table else "").encode(), "status")
    path = paths[company[0]].decode()
    slot = None
    if path:
        try:
            slot = StatusSlot(path, company.index(communicator.rank))
            table = table or StatusTable(len(company), path)
        except OSError:  # a kernel that isolates processes
            table = None
    beats = len(hosts) > 1 and _beat(
        communicator, heartbeat.HostArguments(hosts, here, path, limit, goes_on, ""), first
    )
    if slot is None or table is None:
        return None
    _companies.append(Company(table, company, name, len(hosts) if beats else 1))
    if beats:
        threading.Thread(target=_follow, args=[table], name="watchdog", daemon=True).start()
    elif len(company) > 1 and company.index(communicator.rank) < LOOKERS:
        arguments = [table, company, limit, goes_on]
        threading.Thread(target=_look, args=arguments, name="watchdog", daemon=True).start()
    return slot


def _gather_hosts(communicator: Communicator) -> list[tuple[str, list[int]]]:
    """Return (name, ranks) of each host, in the order of their first ranks."""
    local = json.dumps([host_key(), os.environ.get("HOROVOD_HOSTNAME") or platform.node()])
    groups: dict[bytes, tuple[str, list[int]]] = {}
    for rank, key in enumerate(communicator.allgather_bytes(local.encode(), "hosts")):
        groups.setdefault(key, (json.loads(key)[1], []))[1].append(rank)
    return list(groups.values())


def _beat(communicator: Communicator, job: heartbeat.HostArguments, first: bool) -> bool:
    """Start the heartbeat process of each host. Returns False if the hub does not listen."""
    # Rank 0's host listens first. Its token, addresses and port then go to the other hosts over Horovod.
    offer = ""
    if communicator.rank == 0 and job.path:
        token, begin = secrets.token_hex(32), os.environ.get(PORT, "")
        ports = [int(begin) + k for k in range(PORTS)] if begin.isdigit() else [0]
        addresses = host_addresses()
        with suppress(OSError):
            job = job._replace(token=token, ports=ports, verdict=verdict_path())
            port = heartbeat.start_hub(job)
            offer = json.dumps([token, addresses, port]) if port else ""
    offer = communicator.allgather_bytes(offer.encode(), "heartbeat")[0].decode()
    if not offer:
        return False
    if first and communicator.rank and job.path:
        token, addresses, port = json.loads(offer)
        with suppress(OSError):
            heartbeat.start(job._replace(token=token, addresses=addresses, port=port))
    return True


def host_addresses() -> list[str]:
    """Return this host's IPv4 addresses, those of networks that the user named first and loopback last."""
    named = ",".join(os.environ.get(name, "") for name in ("HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include"))
    named_first = sorted(interfaces(), key=lambda pair: pair[0] not in named.split(","))
    return [*(address for _, address in named_first), "127.0.0.1"]


def cause_reported() -> bool:
    """Return whether another process has printed the cause and is ending all ranks."""
    return any(one.table.claimed() or "end" in one.table.news() for one in _companies)


def left() -> list[int]:
    """Return the ranks of this host that have finished their script."""
    return list(ended())


def ended() -> dict[int, dict]:
    """Return {rank: last record} for the ranks of this host that have finished their script."""
    records = {rank: one.table.read(place).record for one in _companies for place, rank in enumerate(one.ranks)}
    return {rank: record for rank, record in records.items() if record.get("code") == 0}


def lost() -> str:
    """Return the rank that ended too early, "rank 1 on host node2", waiting until it is known; "" if none did."""
    # On one host the kernel knows at once who has ended; from other hosts the news takes a moment.
    here = all(one.hosts == 1 for one in _companies)
    stop = time.monotonic() + (HERE_SECONDS if here else NEWS_SECONDS)
    while _companies and time.monotonic() < stop:
        for one in _companies:
            lost_ranks = one.table.news().get("lost") or _lost_here(one)
            if lost_ranks:
                return ", ".join(lost_ranks)
        time.sleep(0.05)
    return ""


def _lost_here(company: Company) -> list[str]:
    if company.hosts > 1:
        return []  # the process of this host knows in which order ranks were lost
    statuses = {rank: company.table.read(place) for place, rank in enumerate(company.ranks)}
    gone = [rank for rank, one in statuses.items() if one.pid and not one.record and state(one.pid) in DEAD]
    gone += [rank for rank, one in statuses.items() if one.record.get("code") and not one.record.get("lost")]
    return [f"rank {rank} on host {company.name}" for rank in gone]


def _follow(table: StatusTable) -> None:
    """End this rank when its host's process says so. Runs in a thread, because the main one may hang in Horovod."""
    while "end" not in (news := table.news()):
        time.sleep(LOOK_SECONDS)
    time.sleep(float(news["end"]))
    os._exit(5)


def _look(table: StatusTable, company: list[int], limit: float, goes_on: str) -> None:
    """Watch the ranks of this host, and end this rank when one is stuck. The first to notice prints which one."""
    watchdog = Watchdog(table, limit)
    while not watchdog.look():
        time.sleep(LOOK_SECONDS)
    stuck = {company[place]: row for place, row in watchdog.stuck.items()}
    culprit = min(stuck)
    what, stack = stuck[culprit]
    where = f"; {table.read(company.index(culprit)).place}; {goes_on}" if goes_on else ""
    # Only one of the watching ranks prints.
    if table.claim():
        with suppress(OSError):
            os.write(2, "\n".join([f"error[rank {culprit}]: {what}{where}", *stack.splitlines(), ""]).encode())
    else:
        time.sleep(WRITE_SECONDS)  # the launcher would end the rank that is still printing
    os._exit(5)
