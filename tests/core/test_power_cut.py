"""A power cut while a checkpoint is written, played on a copy of the folder.

What was not fsynced is empty, or missing where its folder was not fsynced, and what was renamed has its new name.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hvd_train.checkpoint import store
from hvd_train.errors import CheckpointError
from tests.checkpoint.test_store import snapshot


class Disk:
    """Saves steps 1 and 2, and plays a power cut after each fsync, rename and removal of the second."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.root, self.synced, self.lost = root / "checkpoints", root, set(), []
        store.save(self.folder, snapshot(1))
        self.synced |= {path.stat().st_ino for path in self.folder.rglob("*")}
        self.folder_current = True  # whether all renames in it are on the disk
        fsync, rename, self.rmtree = os.fsync, os.rename, shutil.rmtree

        def synced(descriptor):
            fsync(descriptor)
            self.synced.add(os.fstat(descriptor).st_ino)
            self.folder_current |= os.fstat(descriptor).st_ino == self.folder.stat().st_ino
            self.cut("fsync")

        def renamed(old, new):
            rename(old, new)
            self.folder_current = False
            self.cut("rename")

        def removed(path, **options):
            if not self.folder_current and ".old-" in Path(path).name:
                self.lost.append("removed before the new one's name was on the disk")
            self.rmtree(path, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", synced)
            patch.setattr(os, "rename", renamed)
            patch.setattr(shutil, "rmtree", removed)
            store.save(self.folder, snapshot(2))
        self.cut("end")
        if not self.folder_current:
            self.lost.append("committed, but its name is not on the disk")

    def cut(self, after: str) -> None:
        copy = self.root / "after the cut"
        shutil.copytree(self.folder, copy)
        for path in self.folder.rglob("*.*"):
            if path.is_file() and path.stat().st_ino not in self.synced:
                (copy / path.relative_to(self.folder)).write_bytes(b"")
            elif path.is_file() and path.parent.stat().st_ino not in self.synced:
                (copy / path.relative_to(self.folder)).unlink()
        try:
            store.newest(copy, lambda line: self.lost.append(f"{after}: {line}"))
        except CheckpointError as error:
            self.lost.append(f"{after}: {error}")
        self.rmtree(copy)


def test_a_power_cut_at_any_moment_leaves_valid_checkpoints_alone(tmp_path, monkeypatch):
    assert Disk(tmp_path, monkeypatch).lost == []
