"""The rules that name a rank or host when ranks on several hosts stand still, without a process or a network."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from hvd_train.launch import hosts_watchdog
from hvd_train.launch.handshake import greet, introduce
from hvd_train.launch.hosts_watchdog import NO_PROCESS, Host, HostsWatchdog, gone_hub
from tests.limits import SECONDS

LIMIT = 20.0
STACK = 'Thread 0x1 (most recent call first):\n  File "{}", line 7 in {}'


class Clock:
    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class Job:
    """Three hosts of two ranks each; ``beat`` lets time pass while these hosts are heard."""

    def __init__(self, clock: Clock, stacks: dict[int, list[str]] | None = None) -> None:
        self.clock = clock
        self.hosts = [Host(name, [2 * k, 2 * k + 1]) for k, name in enumerate("abc")]
        self.rows = {host.name: [[100 + rank, 7, "training", {}, 5, "S"] for rank in host.ranks] for host in self.hosts}
        self.large = {"a": 0.0, "b": 1.0, "c": 1.0}
        waits = {rank: [STACK.format("/x/horovod/mpi_ops.py", "synchronize")] for rank in range(6)}
        self.watchdog = HostsWatchdog(self.hosts, LIMIT, lambda: waits | (stacks or {}))

    def beat(self, seconds: float, heard: str = "abc", steps: str = "") -> bool:
        for _ in range(int(seconds)):
            self.clock.now += 1
            for host in self.hosts:
                for row in self.rows[host.name]:
                    row[4] += host.name in steps
                if host.name in heard:
                    host.update(self.rows[host.name], self.large[host.name])
            if self.watchdog.look():
                return True
        return False

    @property
    def line(self) -> str:
        return self.watchdog.verdict("--resume auto goes on").splitlines()[0]


def test_a_stopped_rank_of_another_host(clock):
    job = Job(clock)
    assert not job.beat(30, steps="abc")
    job.rows["b"][1][5] = "T"
    assert not job.beat(LIMIT)
    assert job.beat(3)
    assert job.line == (
        "rank 3 on host b is stopped (SIGSTOP), for more than 20 s; in training, step 7; --resume auto goes on"
    )


def test_a_rank_in_code_of_its_own_is_named_with_its_stack(clock):
    job = Job(clock, {4: [STACK.format("/home/me/data.py", "fetch")]})
    assert job.beat(LIMIT + 3)
    assert job.line.startswith("rank 4 on host c has not moved for 20 s (in fetch, /home/me/data.py:7); in training")
    assert "most recent call first" in job.watchdog.verdict("")


def test_a_silent_host(clock):
    job = Job(clock)
    job.beat(5, steps="abc")
    assert not job.beat(LIMIT, "ac")
    assert job.beat(2, "ac")
    assert job.line.startswith("host b (ranks 2, 3) does not answer: nothing was heard for 20 s; in training, step 7; ")


def test_the_oldest_silence_is_to_blame(clock):
    job = Job(clock)
    job.beat(5, steps="abc")
    job.beat(8, "ac")
    assert job.beat(30, "a")
    assert job.line.startswith("host a (ranks 0, 1) does not reach the other hosts (b, c)")
    job.hosts.append(Host("d", [6, 7]))
    four = HostsWatchdog(job.hosts, LIMIT, dict)
    job.hosts[3].update([[106, 7, "training", {}, 5, "S"], [107, 7, "training", {}, 5, "S"]])
    four._still -= LIMIT + 1
    four._last = {rank: (job.rows["abc"[rank // 2]][rank % 2][4] if rank < 6 else 5) for rank in range(8)}
    assert four.look() and four.verdict("").startswith("host b (ranks 2, 3) does not answer")


def test_a_silent_host_is_left_alone_while_ranks_go_on(clock):
    """Its process may have been ended, or a firewall may let MPI pass alone."""
    job = Job(clock)
    job.beat(2)
    assert not job.beat(200, "ac", steps="ac")


def test_a_host_that_was_never_heard_is_not_blamed_while_nobody_waits(clock):
    job = Job(clock)
    for name in "ac":
        for row in job.rows[name]:
            row[2] = "starting"
    assert not job.beat(100, "ac")
    job.rows["a"][0][2] = "exchange"
    assert job.beat(LIMIT + 3, "ac") and ", and never did: open the ports to host a" in job.line


def test_a_short_silence_and_a_late_step_are_none(clock):
    job = Job(clock)
    for _ in range(20):
        assert not job.beat(LIMIT - 5, "ac")
        assert not job.beat(1, steps="abc")


def test_a_hub_that_was_stopped_blames_nobody(clock):
    job = Job(clock)
    job.beat(5)
    clock.now += 500
    assert not job.watchdog.look() and not job.beat(LIMIT - 2)


def test_a_save_may_take_as_long_as_it_likes(clock):
    job = Job(clock)
    job.rows["a"][0][2] = "saving"
    assert not job.beat(300)


def test_large_packets_that_are_lost(clock):
    job = Job(clock)
    job.beat(5, steps="abc")
    for second in range(40):
        job.large["c"] = float(second)
        if job.beat(1):
            break
    assert job.line.startswith("large packets do not pass between host a and host c, small ones do: no step for 20 s; ")


def test_large_packets_that_are_lost_with_a_short_limit_and_no_stack_is_asked_for(clock):
    """The last large message came back just before: it is 9 s old when ranks have stood still for 10 s."""
    job = Job(clock)
    job.watchdog = HostsWatchdog(job.hosts, 10, lambda: pytest.fail("stacks travel in large packets"))
    job.beat(5, steps="abc")
    for second in range(40):
        job.large["c"] = max(0.0, second - 2)
        if job.beat(1):
            break
    assert second == 10 and job.line.startswith("large packets do not pass between host a and host c, small ones do: ")


def test_which_rank_was_lost_first(clock):
    job = Job(clock)
    assert job.watchdog.lost() == []
    job.beat(1)
    job.rows["c"][0][5] = NO_PROCESS
    job.beat(1)
    job.rows["a"][0][3] = {"code": 5, "lost": True}  # by that one
    job.rows["b"][0][3] = {"code": 1}
    job.beat(1)
    assert job.watchdog.lost() == ["rank 4 on host c"]


def test_ranks_that_do_not_notice_that_another_has_died(clock):
    """Gloo at times leaves ranks waiting although their peer's connections have ended."""
    job = Job(clock)
    job.beat(1, steps="abc")
    job.rows["c"][0][5] = NO_PROCESS
    job.rows["c"][1][3] = {"code": 5, "lost": True}  # it has noticed
    assert not job.beat(30, steps="a")  # these ranks still do something
    assert job.beat(30) and clock.now == 1000 + 1 + 30 + 11
    assert job.line.startswith("rank 4 on host c has ended, and the others wait for it; ")


def test_a_rank_that_cannot_be_seen_has_not_died(clock):
    """In a container of its own: a step of theirs may take longer than ``DEAD_SECONDS``."""
    job = Job(clock)
    job.rows["c"][0][5] = NO_PROCESS
    assert not job.beat(19)


def test_hosts_whose_ranks_have_come_to_their_end(clock):
    job = Job(clock)
    for row in job.rows["b"]:
        row[3], row[5] = {"code": 0}, NO_PROCESS
    job.beat(1)
    assert not job.beat(100, "ac") and not job.watchdog.lost()


def test_the_rule_of_another_host(clock):
    hub = Host("a", [0, 1])
    look = gone_hub(hub, LIMIT)
    hub.closed, rows = False, [[102, 7, "training", {}, 5, "S"]]
    lines = []
    for second in range(60):
        clock.now += 1
        rows[0][4] += second < 10
        lines.append(look(rows, "--resume auto goes on"))
    assert not any(lines[:28]) and all(lines[32:])
    assert lines[40] == "host a (ranks 0, 1) does not answer: nothing was heard for 20 s; --resume auto goes on"
    hub.closed, rows[0][2] = True, "saving"
    assert not look(rows, "")


@pytest.mark.parametrize(
    "rows", [[], [[1]], [[1, 2, "training", {}, 3, "S"]], [["x", 2, "training", {}, 3, "S"]] * 2, [None, None]]
)
def test_other_reports_are_refused(rows):
    with pytest.raises((ValueError, TypeError)):
        Host("a", [0, 1]).update(rows)


@pytest.mark.parametrize(
    ("token", "host", "right"), [("t", 1, True), ("other", 1, False), ("t", 0, False), ("t", 3, False)]
)
def test_who_may_connect(token, host, right):
    """And the token is not sent."""
    here, there = socket.socketpair()
    outcome: list[object] = []

    def serve() -> None:
        try:
            outcome.append(greet(here, "t", 3))
        except OSError as error:
            outcome.append(error)
            here.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        introduce(there, token, host, "small")
        assert right
    except OSError:
        assert not right
    thread.join(SECONDS)
    assert (outcome == [(host, "small")]) == right
    there.close()


def test_a_stranger_has_the_whole_time_once(monkeypatch):
    monkeypatch.setattr("hvd_train.launch.handshake.HELLO_SECONDS", 0.5)
    here, there = socket.socketpair()
    ended = threading.Event()

    def drip() -> None:
        while not ended.is_set():
            there.send(b"x")
            time.sleep(0.1)

    thread = threading.Thread(target=drip)
    thread.start()
    began = time.monotonic()
    with pytest.raises(OSError):
        greet(here, "t", 3)
    ended.set()
    thread.join()
    assert time.monotonic() - began < SECONDS  # it would have sent bytes for ever
    assert hosts_watchdog.LARGE_LATE_SECONDS < LIMIT
