"""The folder in memory: it goes with its job, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hvd_train.errors import ConfigError
from hvd_train.launch import snapshots
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
        snapshots.remove_orphaned()  # a rank that ends while its job lives
        assert folder.is_dir()
    assert snapshots.folder_of_rank() is None and not list(place.iterdir())
    with snapshots.in_memory(False):
        assert snapshots.folder_of_rank() is None and not list(place.iterdir())


def test_what_a_killed_job_left_goes_with_the_next_one(place):
    """A process of another pid namespace holds one of the folders: its pid means nothing here."""
    dead, other = (place / f"{prefix}{os.getpid()}-abc" for prefix in ("hvd-train-memory-", "notes-"))
    for folder in (dead, other):
        (folder / "step-1").mkdir(parents=True)
    away = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if subprocess.run([*away, "true"], capture_output=True, timeout=SECONDS, check=False).returncode:
        away = []  # not allowed in every container
    owner = subprocess.Popen(
        [*away, sys.executable, "-c", OWNER, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    lives = place / owner.stdout.readline().strip()
    assert lives.parent == place and lives.is_dir()
    with snapshots.in_memory(True):
        assert not dead.exists() and (lives / "step-1").exists() and other.exists()
    owner.stdin.write("\n")  # it ends at once, and leaves its folder behind
    owner.stdin.close()
    assert owner.wait(SECONDS) == 0 and (lives / "step-1").exists()
    with snapshots.in_memory(True):
        assert not lives.exists()


OWNER = """
import os, pathlib, sys
from hvd_train.launch import snapshots
snapshots.PLACE = pathlib.Path(sys.argv[1])
with snapshots.in_memory(True):
    folder = snapshots.folder_of_rank()
    (folder / "step-1").mkdir()
    print(folder.name, flush=True)
    input()
    os._exit(0)
"""


def test_no_room_is_one_line(monkeypatch, place):
    monkeypatch.setattr(snapshots, "PLACE", place / "nowhere")
    with pytest.raises(ConfigError, match="cannot be written: No such file"), snapshots.in_memory(True):
        pass
