"""A file server that does not answer: the error is told within the limit, and nothing that follows waits for it."""

from __future__ import annotations

import threading
import time

import pytest

from hvd_train import files
from hvd_train.errors import CheckpointError
from hvd_train.run_folder import layout, lock
from hvd_train.run_folder.answering import FileWatch
from hvd_train.run_folder.lock import Lock
from tests.limits import SECONDS


def test_an_access_that_hangs_is_told_with_its_path(tmp_path):
    """The main thread waits in it, and can raise nothing."""
    told: list[CheckpointError] = []
    ended = threading.Event()
    watch = FileWatch(0.5, lambda error: (told.append(error), ended.set()))
    with watch.at(tmp_path / "run"):
        with watch.at(tmp_path / "short"):
            pass
        assert ended.wait(SECONDS)
    (error,) = told
    words = "look for a disk or a file server that does not answer; watchdog_s sets the limit"
    assert str(error) == f"the file system has not answered for 0.45 s; {tmp_path / 'run'}; {words}"


@pytest.mark.parametrize("limit", [0.0, SECONDS])
def test_no_access_is_ended_before_its_limit(tmp_path, limit):
    watch = FileWatch(limit, lambda error: pytest.fail(str(error)))
    with watch.at(tmp_path):
        time.sleep(0.1)
    watch.close()


def test_nothing_waits_for_a_lock_or_a_traceback_that_cannot_be_reached(tmp_path, monkeypatch):
    """The line that says why the run ends comes after the lock's release, and never came."""
    end = threading.Event()
    monkeypatch.setattr(files, "ANSWER_SECONDS", 0.2)
    began = time.monotonic()
    with Lock(tmp_path / "run"):
        real = lock._read
        monkeypatch.setattr(lock, "_read", lambda path: end.wait(SECONDS) and real(path))
    monkeypatch.setattr(layout.Path, "write_text", lambda *args, **more: end.wait(SECONDS))
    assert layout.keep_failure(tmp_path / "run", "stacks", "text") == "" and files.hanging()
    end.set()
    assert time.monotonic() - began < SECONDS / 2
    while files.hanging():
        time.sleep(0.01)
