"""The folder in memory: it goes with its job, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hvd_train.errors import ConfigError
from hvd_train.launch import snapshots
from hvd_train.run_folder.lock import ticks
from tests.limits import SECONDS


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "PLACE", tmp_path)
    return tmp_path


def test_it_lies_there_for_the_job_and_no_longer(place):
    with snapshots.in_memory(True):
        folder = snapshots.folder_of_rank()
        assert folder.parent == place and folder.stat().st_mode & 0o777 == 0o700
        (folder / "step-1").mkdir()
        snapshots.remove_if_orphaned()  # a rank that ends while its job lives
        assert folder.is_dir()
    assert snapshots.folder_of_rank() is None and not list(place.iterdir())
    with snapshots.in_memory(False):
        assert snapshots.folder_of_rank() is None and not list(place.iterdir())


def test_what_a_killed_job_left_goes_with_the_next_one(place):
    code = "import os; from hvd_train.run_folder.lock import ticks; print(os.getpid(), ticks(os.getpid()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=SECONDS)
    pid, began = done.stdout.split()
    dead = place / f"hvd-train-snapshots-{pid}-{began}-abc"
    again = place / f"hvd-train-snapshots-{os.getpid()}-{ticks(os.getpid()) + 1}-abc"  # its pid is another's today
    lives = place / f"hvd-train-snapshots-{os.getpid()}-{ticks(os.getpid())}-abc"
    other = place / "hvd-train-snapshots-notes"
    for folder in (dead, again, lives, other):
        (folder / "step-1").mkdir(parents=True)
    with snapshots.in_memory(True):
        assert not dead.exists() and not again.exists() and lives.exists() and other.exists()


def test_no_room_is_one_line(monkeypatch, place):
    monkeypatch.setattr(snapshots, "PLACE", place / "nowhere")
    with pytest.raises(ConfigError, match="cannot be written: No such file"), snapshots.in_memory(True):
        pass
