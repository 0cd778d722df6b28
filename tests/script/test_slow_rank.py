"""What a script's ranks spend their time on, on ranks that are threads."""

from __future__ import annotations

import time

import pytest

from hvd_train.core import control_sync
from hvd_train.core.shares import SHOWN
from hvd_train.script.shared.slow_rank import SlowRankReport
from tests.rank_threads import run_ranks

SLEEP = 0.02


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """The ranks exchange their times after some steps."""
    monkeypatch.setattr(control_sync, "SECONDS", 0.05)


def script(communicator, part, steps=20):
    """A loop in which rank 1 sleeps in each step."""
    report = SlowRankReport(communicator, lambda fresh: communicator.waited)
    for step in range(steps):
        late = SLEEP * (communicator.rank == 1 and step > 0)
        with report.input():
            time.sleep(late * (part == "input"))
        time.sleep(late * (part == "compute"))
        communicator.allgather_bytes(b"gradients")
        report.stepped()
    report.pause(evaluates=True)
    time.sleep(3 * SLEEP)
    report.resume()
    for _ in range(40):
        communicator.allgather_bytes(b"gradients")
        report.stepped()
    return report.seconds(), report.seconds()


@pytest.mark.parametrize("part", ["input", "compute"])
def test_a_sleep_on_one_rank_is_its_part_and_the_wait_of_the_other(part):
    for seconds, again in run_ranks(2, lambda communicator: script(communicator, part)):
        half = 19 * SLEEP / 2  # the mean over two ranks
        assert seconds.keys() <= {*SHOWN} and min(seconds.values()) > 0
        assert seconds[part] > 0.8 * half and seconds["wait"] > 0.7 * half
        assert seconds["evaluate"] > 2 * SLEEP and again == {}


def test_one_rank_waits_for_nobody():
    ((seconds, _),) = run_ranks(1, lambda communicator: script(communicator, "input"))
    assert seconds.get("wait", 0.0) == 0.0
