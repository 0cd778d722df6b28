"""Ranks under a launcher alone watch one another: several may see the same thing at the same time."""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time

import pytest

from hvd_train.launch import watchdog
from hvd_train.launch.board import ASK, Board, Page


@pytest.fixture
def board():
    with Board(1) as board:
        page = Page(board.path, 0)
        yield board
        faulthandler.unregister(ASK)
        signal.signal(ASK, signal.SIG_DFL)
        assert page


def test_one_of_all_that_see_it_tells_it(board):
    others = [Board(1, board.path) for _ in range(3)]
    assert [reader.claim() for reader in (others[0], board, *others)] == [True, False, False, False, False]


def test_news_reach_all_readers(board):
    reader = Board(1, board.path)
    assert reader.news() == {}
    board.publish({"lost": ["rank 1 on host b"]})
    assert reader.news() == {"lost": ["rank 1 on host b"]} and reader.read(0).record == {}
    board.publish({"end": 0.0})
    assert reader.news() == {"end": 0.0}


def test_answers_to_two_that_ask_at_once_are_kept_apart(board, monkeypatch):
    """Else the main thread of the one and the first thread of the other look like one thread."""
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 0.5)
    told, found = [board.read(0)], []
    own = watchdog.Watchdog(Board(1, board.path), 1.0)
    looker = threading.Thread(target=lambda: found.extend(own._stacks(told)[0]))
    looker.start()
    while looker.is_alive():
        board.ask()
        time.sleep(0.1)
    assert len(found) == len(sys._current_frames()) + 1  # and the looker
    assert all(thread.count("most recent call first") == 1 for thread in found), found


def test_who_was_stopped_itself_blames_nobody(board):
    """What it did not see is no time without a step."""
    page = Page(board.path, 0)
    page.at("training", 3)
    own = watchdog.Watchdog(board, 5.0)
    assert not own.look()
    own._since -= 60
    own._before -= 60
    assert not own.look() and not own.stuck
