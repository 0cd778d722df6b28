"""The tests of survival can fail: each promise is kept, and each protection that is taken away is found missing.

A power cut is played on a copy of the folder: what was not fsynced is empty, or missing where its folder was not
fsynced, and what was renamed has its new name.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_train.checkpoint import resume_rules, store
from hvd_train.errors import CheckpointError
from tests.checkpoint.test_store import TREE, snapshot
from tests.core.test_loop import KillingLog, Stop, config, final, same, trainer
from tests.rank_threads import run_ranks


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


def unsynced(path, pieces):
    path.write_bytes(b"".join(pieces))


@pytest.mark.parametrize("missing", ["fsync of files", "fsync of the folder", "the rename"])
def test_control_f04_without_the_order_a_power_cut_is_found_to_damage(tmp_path, monkeypatch, missing):
    if missing == "fsync of files":
        monkeypatch.setattr(store, "write", unsynced)
    elif missing == "fsync of the folder":
        monkeypatch.setattr(store, "sync", lambda folder: None)
    else:
        monkeypatch.setattr(store, "NAME", re.compile(r"step-([0-9]+)(\..*)?$"))  # counts as it is written
    assert Disk(tmp_path, monkeypatch).lost


def test_control_f20_without_the_hash_a_flipped_bit_would_be_trained_on(tmp_path, monkeypatch):
    path = store.save(tmp_path, snapshot())
    flip_last(path / "weights.safetensors")
    with pytest.raises(CheckpointError, match="SHA-256"):
        store.load(path)

    class Same:
        def hexdigest(self):
            return store.read(path)[0].files[self.name].sha256

        def __init__(self, content):
            self.name = next(n for n in os.listdir(path) if (path / n).read_bytes() == content)

    monkeypatch.setattr(store, "hashlib", SimpleNamespace(sha256=Same))  # not for the manifest's own
    found = store.load(path).tree
    assert any((found[key] != array).any() for key, array in TREE.items())


def flip_last(path):
    """A byte of the numbers."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("kept", ["consumed", "epoch"])
def test_control_f05_with_a_wrong_sample_position_a_resumed_run_is_another(tmp_path, monkeypatch, kept):
    c = config(checkpoint={"every_n_steps": 2})
    whole = final(2, c, tmp_path / "whole")
    for folder in ("right", "wrong"):
        with pytest.raises(Stop):
            run_ranks(2, lambda com, f=folder: trainer(com, c, tmp_path / f, KillingLog(11)).fit())
    assert same(final(2, c, tmp_path / "right", resume=True)[1], whole[1])
    carry_over = resume_rules.carry_over

    def wrong(resumption):
        setattr(resumption.progress, kept, 0)
        return carry_over(resumption)

    monkeypatch.setattr(resume_rules, "carry_over", wrong)
    tree = final(2, c, tmp_path / "wrong", resume=True)[1]
    assert not np.array_equal(tree["weights/w"], whole[1]["weights/w"])
