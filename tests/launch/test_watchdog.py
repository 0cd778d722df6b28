"""Ranks under a launcher alone watch one another: several may see the same thing at the same time."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys

import pytest

from hvd_train.launch import watchdog
from hvd_train.launch.status import ASK, StatusSlot, StatusTable
from tests.limits import SECONDS


@pytest.fixture
def table():
    with StatusTable(1) as table:
        slot = StatusSlot(table.path, 0)
        yield table
        faulthandler.unregister(ASK)
        signal.signal(ASK, signal.SIG_DFL)
        assert slot


def test_one_of_all_that_see_it_tells_it(table):
    others = [StatusTable(1, table.path) for _ in range(3)]
    assert [reader.claim() for reader in (others[0], table, *others)] == [True, False, False, False, False]


def test_news_reach_all_readers(table):
    reader = StatusTable(1, table.path)
    assert reader.news() == {}
    table.publish({"lost": ["rank 1 on host b"]})
    assert reader.news() == {"lost": ["rank 1 on host b"]} and reader.read(0).record == {}
    table.publish({"end": 0.0})
    assert reader.news() == {"end": 0.0}


def test_answers_to_two_that_ask_at_once_are_kept_apart(table, monkeypatch):
    """Else the main thread of the one and the first thread of the other look like one thread."""
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 0.5)
    own = watchdog.Watchdog(StatusTable(1, table.path), 1.0)
    other = subprocess.Popen(["sh", "-c", f"while kill -{ASK:d} {os.getpid()}; do sleep 0.1; done"])
    try:
        found = own._stacks([table.read(0)])[0]
    finally:
        other.kill()
        other.wait()
    assert len(found) == len(sys._current_frames())
    assert all(thread.count("most recent call first") == 1 for thread in found), found


def test_a_rank_that_answers_late_is_waited_for(table, monkeypatch):
    """On a busy machine; a rank without a stack would be blamed for what another one does."""
    asked: list[subprocess.Popen] = []
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 0.01)
    # Another process asks, because no thread of this one may begin or end while faulthandler writes the stacks.
    late = ["sh", "-c", f"sleep 0.3; kill -{ASK:d} {os.getpid()}"]
    monkeypatch.setattr(table, "request_stacks", lambda: asked.append(subprocess.Popen(late)))
    stack = watchdog.stacks(table, [table.read(0)])[0][-1]
    assert "most recent call first" in stack and "test_a_rank_that_answers_late" in stack
    assert asked.pop().wait(SECONDS) == 0


@pytest.mark.parametrize("phase", ["training", "saving"])
def test_who_goes_on_or_saves_is_not_stuck(table, monkeypatch, phase):
    """However slowly, and however long it saves."""
    now = [1000.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    slot, own = StatusSlot(table.path, 0), watchdog.Watchdog(table, 5.0)
    for step in range(10):
        if phase == "training" or step == 0:
            slot.at(phase, step)
        for _ in range(4):
            now[0] += 1
            assert not own.look()
    slot.at("training", 11)
    own._stacks = lambda statuses: {0: [""]}
    assert [now.append(now.pop() + 1) or own.look() for _ in range(7)] == [False] * 6 + [True]


def test_who_was_stopped_itself_blames_nobody(table):
    """Time in which the watchdog did not look does not count as time without a step."""
    slot = StatusSlot(table.path, 0)
    slot.at("training", 3)
    own = watchdog.Watchdog(table, 5.0)
    assert not own.look()
    own._since -= 60
    own._before -= 60
    assert not own.look() and not own.stuck
