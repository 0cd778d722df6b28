"""What the operating system knows about a process: on cores, without a core, and what others do there."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from hvd_train.core.process_usage import USAGE, ProcessUsage

BUSY = [sys.executable, "-c", "while True: pass"]


@pytest.fixture
def one_core():
    """This process, and those that it starts, run on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


def measured(seconds):
    usage = ProcessUsage()
    assert usage.read() == [None] * len(USAGE)
    usage.begin()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return dict(zip(USAGE, usage.read(last=True), strict=True))


def test_another_program_on_the_same_core_is_seen(one_core):
    """Both get what the scheduler gives them; together they have the core all the time."""
    other = subprocess.Popen(BUSY, process_group=0)
    try:
        # It is a child, and counts as this rank's own.
        alone = time.process_time()
        child = measured(2.0)
        alone = time.process_time() - alone
    finally:
        other.kill()
        other.wait()
    assert child["cpu"] > 1.4 * alone
    # The child of a process that has ended.
    line = f"import subprocess as s; print(s.Popen({BUSY!r}, stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    pid = int(subprocess.run([sys.executable, "-c", line], capture_output=True, check=True).stdout)
    try:
        beside = measured(2.0)
    finally:
        os.kill(pid, 9)
    assert beside["elapsed"] >= 2.0 and beside["busy"] > beside["cpu"] + 0.3
    assert beside["queued"] > 0.3


def test_figures_are_read_again_only_after_a_while():
    """Reading them takes 1/1000 of the time at most."""
    now = [0.0]
    usage = ProcessUsage(lambda: now[0])

    def clock():
        now[0] += 0.001  # each reading takes 1 ms
        return now[0]

    usage._clock = clock
    usage.begin()
    assert usage.read() == [None] * len(USAGE)
    now[0] += 1.1
    figures = usage.read()
    assert figures[0] == pytest.approx(1.1, abs=0.01)
    assert usage.read() == figures
