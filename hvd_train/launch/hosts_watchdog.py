"""The rules for blaming a rank or a host when ranks on several hosts hang. No network access here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_train.errors import name_ranks
from hvd_train.launch.status import EXCHANGE, RankStatus
from hvd_train.launch.watchdog import PAUSE_SECONDS, WATCHED, Watchdog

LARGE_LATE_SECONDS = 7.0  # without a large message (one is sent every 4 s), while small ones arrive
NO_PROCESS = "-"  # replaces the kernel's process state letter once there is no process


@dataclass
class Host:
    """The last report of a host, received at ``heard``.

    ``closed``: it has no connection. ``large``: seconds from the last large message that came back to the report.
    """

    name: str
    ranks: list[int]
    heard: float = field(default_factory=lambda: time.monotonic())
    closed: bool = True
    large: float = 0.0
    statuses: list[RankStatus] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    died: dict[int, float] = field(default_factory=dict)  # rank: when its failure was first seen

    def update(self, rows: Sequence[Sequence[Any]], large: float = 0.0) -> None:
        """Store a report: (pid, step, phase, record, beats, state) of each rank. Raises ValueError if malformed."""
        statuses, states = [], []
        if len(rows) != len(self.ranks):
            raise ValueError(f"{len(rows)} rows of {len(self.ranks)} ranks")
        for pid, step, phase, record, beats, state in rows:
            statuses.append(RankStatus(int(pid), int(step), str(phase), dict(record), int(beats), ""))
            states.append(str(state))
        self.statuses, self.states, self.large = statuses, states, float(large)
        self.heard, self.closed = time.monotonic(), False
        for rank, one, state in zip(self.ranks, statuses, states, strict=True):
            # A rank that ends because another was lost reports "lost" and is not a cause.
            failed = one.record.get("code", 0) != 0 or (state == NO_PROCESS and not one.record)
            if failed and not one.record.get("lost"):
                self.died.setdefault(rank, self.heard)

    @property
    def left(self) -> bool:
        """Return whether all of its ranks have ended."""
        return bool(self.states) and all(state == NO_PROCESS for state in self.states)

    @property
    def words(self) -> str:
        return f"host {self.name} ({name_ranks(self.ranks)})"


class HostsWatchdog(Watchdog):
    """The watchdog for the ranks of all ``hosts``; the first is this host.

    A silent host is blamed only if no rank of the others makes progress: a network may lose reports while it carries
    gradients. If only large messages are lost, the network is blamed. ``ask`` returns {rank: its stacks}.
    """

    def __init__(self, hosts: Sequence[Host], limit: float, ask: Callable[[], dict[int, list[str]]]) -> None:
        super().__init__(None, limit)
        self._hosts, self._ask_all = list(hosts), ask
        self._order = sorted((rank, host) for host in range(len(hosts)) for rank in hosts[host].ranks)
        self._last: dict[int, int] = {}
        self._still = time.monotonic()
        self._line = ""

    def host(self, rank: int) -> Host:
        return self._hosts[self._order[rank][1]]

    def _of_ranks(self, name: str) -> list[Any]:
        rows = []
        for rank, host in self._order:
            values = getattr(self._hosts[host], name)
            rows.append(values[self._hosts[host].ranks.index(rank)] if values else None)
        return rows

    def _read_all(self) -> list[RankStatus]:
        return [status or RankStatus(0, 0, "starting", {}, 0, "") for status in self._of_ranks("statuses")]

    def _states(self, statuses: list[RankStatus]) -> dict[int, str]:
        return {rank: state for rank, state in enumerate(self._of_ranks("states")) if state}

    def _stacks(self, statuses: list[RankStatus]) -> dict[int, list[str]]:
        return self._ask_all()

    def lost(self) -> list[str]:
        """Return the rank that was lost first, and those lost at the same time, with their hosts."""
        died = sorted((when, rank) for host in self._hosts for rank, when in list(host.died.items()))
        return [f"rank {rank} on host {self.host(rank).name}" for when, rank in died if when == died[0][0]]

    def look(self) -> bool:
        if not self._limit:
            return False
        now, statuses = time.monotonic(), self._read_all()
        if now - self._before > PAUSE_SECONDS:  # this process itself was stopped, so silence means nothing
            for host in self._hosts:
                host.heard = max(host.heard, now)
            self._still = now
        beats = {rank: one.beats for rank, one in enumerate(statuses)}
        if beats != self._last:
            self._last, self._still = beats, now
        silent = [host for host in self._hosts if not host.left and now - host.heard > self._limit / 2]
        if not silent:
            return super().look()
        self._before = now
        if min(now - self._still, *(now - host.heard for host in silent)) > self._limit:
            others = [rank for rank in range(len(statuses)) if self.host(rank) not in silent]
            # A rank that does not wait for others may just be busy. A host that keeps its connection open and
            # sends nothing is blamed anyway.
            waits = any(statuses[rank].phase in (*WATCHED, EXCHANGE) for rank in others)
            if waits or not any(host.closed for host in silent):
                self._blame(silent, statuses)
        return bool(self._line)

    def _blame(self, silent: list[Host], statuses: list[RankStatus]) -> None:
        others = self._hosts[1:]
        # If no other host is heard, this one has lost its network.
        if len(silent) == len(others) > 1:
            names = ", ".join(host.name for host in silent)
            self._line = f"{self._hosts[0].words} does not reach the other hosts ({names})"
        else:
            oldest = min(silent, key=lambda host: host.heard)
            together = [host for host in silent if host.heard - oldest.heard < PAUSE_SECONDS]
            self._line = f"{' and '.join(host.words for host in together)} {_answers(len(together))}"
            if not oldest.statuses:
                self._line += f", and never did: open the ports to host {self._hosts[0].name}"
        place = next((statuses[rank].place for rank in self._hosts[0].ranks), "")
        self._line += f": nothing was heard for {self._limit:g} s; {place}"

    def _culprits(self, statuses: list[RankStatus], stopped: list[int]) -> dict[int, tuple[str, str]]:
        dead = [rank for host in self._hosts for rank in host.died]
        if dead and not stopped:
            return {rank: ("has ended, and the others wait for it", "") for rank in dead}
        late = [host for host in self._hosts[1:] if not host.left and host.large > LARGE_LATE_SECONDS]
        if late and not stopped:
            ways = " and ".join(host.name for host in late)
            self._line = (
                f"large packets do not pass between host {self._hosts[0].name} and host {ways}, small ones do: "
            )
            self._line += (
                f"no step for {self._limit:g} s; {statuses[0].place}; set the MTU of their interfaces to what "
            )
            self._line += "the network carries (ip link set DEVICE mtu 1400)"
            return dict.fromkeys(range(len(statuses)), ("", ""))  # stacks would add nothing
        return super()._culprits(statuses, stopped)

    def verdict(self, goes_on: str) -> str:
        """Return a line that names the blamed rank or host, followed by the stack of a rank that hangs."""
        stack = ""
        line = self._line
        if not line:
            rank = min(self.stuck)
            what, stack = self.stuck[rank]
            line = f"rank {rank} on host {self.host(rank).name} {what}; {self._read_all()[rank].place}"
        return "\n".join(["; ".join(filter(None, (line, goes_on))), *stack.splitlines()])


def gone_hub(hub: Host, limit: float) -> Callable[[Sequence[Sequence[Any]], str], str]:
    """Return the rule by which another host blames the hub.

    Called with the rows of a report and ``goes_on``, it returns the line that blames the hub's host once the hub has
    been silent, and this host's ranks have stood still, for ``limit`` seconds; else "".
    """
    beats: list[int] = []
    still = before = time.monotonic()

    def look(rows: Sequence[Sequence[Any]], goes_on: str) -> str:
        nonlocal beats, still, before
        now = time.monotonic()
        if now - before > PAUSE_SECONDS * 4:  # this process was stopped itself
            hub.heard, still = max(hub.heard, now), now
        before = now
        if [row[4] for row in rows] != beats:
            beats, still = [row[4] for row in rows], now
        waits = any(row[2] in (*WATCHED, EXCHANGE) for row in rows)
        if not limit or min(now - still, now - hub.heard) < limit or (hub.closed and not waits):
            return ""
        line = f"{hub.words} {_answers(1)}: nothing was heard for {limit:g} s"
        return "; ".join(filter(None, (line, goes_on)))

    return look


def _answers(count: int) -> str:
    return "does not answer" if count == 1 else "do not answer"
