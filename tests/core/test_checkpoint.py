"""A checkpoint is whole or not there; damage is named; the newest good one is found; the best and the newest stay."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hvd_train.core import checkpoint
from hvd_train.core.checkpoint import Snapshot
from hvd_train.errors import CheckpointError

TREE = {
    "weights/a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "statistics/a": np.ones(2),
    "slots/momentum/a": np.zeros((2, 3), np.float32),
    "slots/step": np.array(3, np.float32),
}
FILES = ["manifest.json", "optimizer.safetensors", "weights.safetensors"]


def snapshot(step=3, local=(), **metrics):
    return Snapshot(step, 1, 32, TREE, list(local), {"monitor": metrics, "progress": {"step": step}})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("local", [[], [{}], [{"0/0": np.ones(3)}, {"0/0": np.zeros(3)}]])
def test_what_is_saved_is_loaded(tmp_path, local):
    path = checkpoint.save(tmp_path, snapshot(local=local, val_loss=0.5))
    assert path == tmp_path / "step-00000003"
    assert names(path) == sorted(FILES + [f"rank-{r}.safetensors" for r, part in enumerate(local) if part])
    found = checkpoint.load(path)
    assert (found.step, found.epoch, found.consumed) == (3, 1, 32)
    assert found.meta == {"monitor": {"val_loss": 0.5}, "progress": {"step": 3}}
    assert found.tree.keys() == TREE.keys()
    for key, array in TREE.items():
        assert found.tree[key].dtype == array.dtype and (found.tree[key] == array).all()
        assert found.tree[key].shape == array.shape
    assert [sorted(part) for part in found.local] == [sorted(part) for part in local]
    assert names(tmp_path) == ["step-00000003"], "nothing temporary is left"


def test_the_same_step_is_replaced(tmp_path):
    checkpoint.save(tmp_path, snapshot(val_loss=1.0))
    path = checkpoint.save(tmp_path, snapshot(val_loss=2.0))
    assert checkpoint.load(path).meta["monitor"] == {"val_loss": 2.0}
    assert names(tmp_path) == ["step-00000003"]


# ---- damage


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def link(path):
    aside = path.with_name("aside")
    path.rename(aside)
    path.symlink_to(aside)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [Path.unlink, cut, flip, link], ids=["missing", "cut", "flipped", "link"])
def test_damage_is_named_and_the_one_before_is_used(tmp_path, name, damage):
    checkpoint.save(tmp_path, snapshot(3))
    path = checkpoint.save(tmp_path, snapshot(7))
    if name == "manifest.json" and damage is flip:  # a flipped byte of JSON may still be JSON: make it one that is not
        (path / name).write_text("{")
    else:
        damage(path / name)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path)
    assert "step-00000007" in caught.value.where
    warnings = []
    found = checkpoint.newest(tmp_path, warnings.append)
    assert found.step == 3
    assert len(warnings) == 1 and "step-00000007" in warnings[0] and "the one before" in warnings[0]


@pytest.mark.parametrize(
    "change",
    [
        {"format": 99},
        {"files": {"../../etc/passwd": {"bytes": 1, "sha256": "x"}}},
        {"files": {"weights.safetensors": {"bytes": "many", "sha256": "x"}}},
        {"files": []},
        {"step": "three"},
        {"meta": 5},
        {"ranks": None},
    ],
    ids=str,
)
def test_a_manifest_is_not_trusted(tmp_path, change):
    path = checkpoint.save(tmp_path, snapshot())
    manifest = json.loads((path / "manifest.json").read_text()) | change
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError):
        checkpoint.load(path)


def test_foreign_bytes_under_a_valid_hash(tmp_path):
    import hashlib

    path = checkpoint.save(tmp_path, snapshot())
    content = b"\x80\x04 a pickle, say"
    (path / "weights.safetensors").write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["weights.safetensors"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="no safetensors file"):
        checkpoint.load(path)


def test_all_damaged_is_an_error_and_none_is_none(tmp_path):
    warnings = []
    assert checkpoint.newest(tmp_path, warnings.append) is None
    assert checkpoint.newest(tmp_path / "missing", warnings.append) is None
    for step in (1, 2):
        cut(checkpoint.save(tmp_path, snapshot(step)) / "weights.safetensors")
    with pytest.raises(CheckpointError, match="no checkpoint can be used"):
        checkpoint.newest(tmp_path, warnings.append)
    assert len(warnings) == 2


# ---- faults while writing


def test_a_full_disk_leaves_the_old_one_and_says_how_much_is_missing(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, snapshot(1))

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"No space left.*bytes needed.*free"):
        checkpoint.save(tmp_path, snapshot(2))
    assert names(tmp_path) == ["step-00000001"]
    assert checkpoint.newest(tmp_path, pytest.fail).step == 1


def test_one_transient_error_is_survived(tmp_path, monkeypatch):
    real, left = os.fsync, [OSError(errno.EIO, "Input/output error")]

    def flaky(descriptor):
        if left:
            raise left.pop()
        real(descriptor)

    monkeypatch.setattr(os, "fsync", flaky)
    monkeypatch.setattr(checkpoint.time, "sleep", lambda seconds: None)
    assert checkpoint.load(checkpoint.save(tmp_path, snapshot())).step == 3
    assert names(tmp_path) == ["step-00000003"]


KILLED = """
import os, sys
from pathlib import Path
from hvd_train.core import checkpoint
from tests.core.test_checkpoint import snapshot
folder, at, calls = Path(sys.argv[1]), int(sys.argv[2]), [0]
def counted(name):
    real = getattr(os, name)
    def call(*args, **kwargs):
        calls[0] += 1
        if calls[0] == at:
            os._exit(42)
        return real(*args, **kwargs)
    setattr(os, name, call)
for name in ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink"):
    counted(name)
checkpoint.save(folder, snapshot(2))
checkpoint.prune(folder, save_top_k=1, save_last=True, monitor="val_loss", mode="min")
"""


def test_killed_at_any_moment_a_valid_one_exists(tmp_path):
    """The process ends right before its k-th file-system call, for every k."""
    root = Path(__file__).parents[2]
    for k in range(1, 100):
        folder = tmp_path / str(k)
        checkpoint.save(folder, snapshot(1))
        line = [sys.executable, "-c", KILLED, str(folder), str(k)]
        code = subprocess.run(line, cwd=root, timeout=60, check=False).returncode
        assert code in (0, 42)
        assert checkpoint.newest(folder, pytest.fail).step in (1, 2)
        checkpoint.prune(folder, save_top_k=1, save_last=True, monitor="val_loss", mode="min")
        assert names(folder) in (["step-00000001"], ["step-00000001", "step-00000002"]), (
            "what the killed process left is swept"
        )
        if code == 0:
            break
    assert 5 < k < 99


def test_preflight_proves_the_folder(tmp_path):
    checkpoint.preflight(tmp_path / "new" / "checkpoints")
    assert names(tmp_path / "new" / "checkpoints") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        checkpoint.preflight(tmp_path / "file" / "checkpoints")


# ---- which stay, which are found

LOSSES = {1: 0.5, 2: 0.2, 3: 0.4, 4: 0.3}


@pytest.mark.parametrize(
    ("save_top_k", "save_last", "mode", "kept"),
    [
        (1, True, "min", [2, 3, 4]),
        (2, True, "min", [2, 3, 4]),
        (3, False, "min", [2, 3, 4]),
        (1, False, "max", [1]),
        (1, True, "max", [1, 3, 4]),
        (0, True, "min", [3, 4]),
        (0, False, "min", [4]),  # the only way to lose all would be to keep none
        (9, False, "min", [1, 2, 3, 4]),
    ],
)
def test_the_best_and_the_newest_stay(tmp_path, save_top_k, save_last, mode, kept):
    for step, loss in LOSSES.items():
        checkpoint.save(tmp_path, snapshot(step, val_loss=loss))
    (tmp_path / "step-00000009.tmp-12ab").mkdir()
    (tmp_path / "step-00000009.old-12ab").mkdir()
    (tmp_path / "mine").mkdir()
    checkpoint.prune(tmp_path, save_top_k=save_top_k, save_last=save_last, monitor="val_loss", mode=mode)
    assert [step for step, _ in checkpoint.find(tmp_path)] == kept
    assert "mine" in names(tmp_path) and len(names(tmp_path)) == len(kept) + 1


def test_without_a_monitored_value_a_checkpoint_is_not_best(tmp_path):
    checkpoint.save(tmp_path, snapshot(1, val_loss=0.5))
    checkpoint.save(tmp_path, snapshot(2, val_loss=float("nan")))
    checkpoint.save(tmp_path, snapshot(3, val_loss=0.7))
    checkpoint.save(tmp_path, snapshot(4))
    checkpoint.prune(tmp_path, save_top_k=1, save_last=False, monitor="val_loss", mode="min")
    assert [step for step, _ in checkpoint.find(tmp_path)] == [1]


def test_words_and_paths(tmp_path):
    folder = tmp_path / "checkpoints"
    for step, loss in LOSSES.items():
        checkpoint.save(folder, snapshot(step, val_loss=loss))
    last, best = folder / "step-00000004", folder / "step-00000002"
    assert checkpoint.resolve(tmp_path, "best") == best
    assert checkpoint.resolve(tmp_path, "best", mode="max") == folder / "step-00000001"
    assert checkpoint.resolve(tmp_path, "last") == last
    assert checkpoint.choose(tmp_path, "best", "val_loss", "max").step == 1
    assert checkpoint.choose(tmp_path, "last", "val_loss", "min").step == checkpoint.load(last).step
    for given in (tmp_path, folder, last):
        assert checkpoint.resolve(Path("elsewhere"), str(given)) == last
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        checkpoint.resolve(tmp_path, str(tmp_path / "nothing"))
    with pytest.raises(CheckpointError, match="no checkpoint has a val_accuracy"):
        checkpoint.resolve(tmp_path, "best", "val_accuracy", "max")
