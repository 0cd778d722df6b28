"""A checkpoint is whole or not there; damage is named; the newest good one is found; the best and the newest stay."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_train.checkpoint import resume_rules, store
from hvd_train.checkpoint.manifest import FORMAT, encode, read
from hvd_train.checkpoint.store import Progress, Snapshot
from hvd_train.config import Config
from hvd_train.errors import CheckpointError
from hvd_train.frontends.serial import Serial
from hvd_train.jobs import resume
from hvd_train.jobs.trained_run import choose_checkpoint, trained_config
from hvd_train.protocol import Field, Sample
from tests.limits import SECONDS

TREE = {
    "weights/a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "statistics/a": np.ones(2),
    "slots/momentum/a": np.zeros((2, 3), np.float32),
    "slots/step": np.array(3, np.float32),
}
SLOTS = ("slots/momentum/a", "slots/step")
PARTS = {k: x for k, x in TREE.items() if k not in SLOTS}, {k: TREE[k] for k in SLOTS}
CASES = int(os.environ.get("HVD_TRAIN_FUZZ", "500"))  # 100000 outside of the daily tests
FILES = ["manifest.json", "optimizer.safetensors", "weights.safetensors"]


def snapshot(step=3, local=(), **metrics):
    return Snapshot(step, 1, 32, *PARTS, list(local), facts(step, metrics))


def facts(step=3, monitor=None, **config):
    part = {"samples": 53, "fingerprint": "0123456789abcdef"}
    return {
        "framework": "pytorch", "world_size": 2, "compression": "topk", "axes": "channels first",
        "config": Config.model_validate(config).model_dump(mode="json"),
        "sample": asdict(Sample({"input": Field((5,), "float32")}, {"label": Field((), "int64", classes=3)})),
        "progress": asdict(Progress(step=step, epoch=1, consumed=32)),
        "monitor": monitor or {}, "data": {"train": part, "val": part},
    }  # fmt: skip


def snapshot_of_two():
    return snapshot(3, [{"0/0": np.ones(3)}, {"0/0": np.zeros(3)}], val_loss=0.5)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_model_alone_is_read_where_no_more_is_needed_and_all_is_verified(tmp_path):
    path = store.save(tmp_path, snapshot(local=[{"0/0": np.ones(3)}]))
    alone = store.load(path, model_only=True)
    assert alone.model.keys() == PARTS[0].keys() and not alone.optimizer and alone.local == [{}]
    file = path / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="SHA-256"):
        store.load(path, model_only=True)


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o770), (0o007, 0o770), (0o022, 0o700), (0o077, 0o700)])
def test_a_group_that_works_on_the_same_files_can_use_a_checkpoint(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        path = store.save(tmp_path / "checkpoints", snapshot())
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o666 & ~umask}


@pytest.mark.parametrize("local", [[], [{}], [{"0/0": np.ones(3)}, {"0/0": np.zeros(3)}]])
def test_what_is_saved_is_loaded(tmp_path, local):
    path = store.save(tmp_path, snapshot(local=local, val_loss=0.5))
    assert path == tmp_path / "step-00000003" and path.stat().st_mode & 0o777 == 0o700
    assert names(path) == sorted(FILES + [f"rank-{r}.safetensors" for r, part in enumerate(local) if part])
    found = store.load(path)
    assert (found.step, found.epoch, found.consumed) == (3, 1, 32)
    assert found.meta == json.loads(json.dumps(facts(monitor={"val_loss": 0.5})))
    assert found.tree.keys() == TREE.keys()
    for key, array in TREE.items():
        assert found.tree[key].dtype == array.dtype and (found.tree[key] == array).all()
        assert found.tree[key].shape == array.shape
    assert [sorted(part) for part in found.local] == [sorted(part) for part in local]
    assert names(tmp_path) == ["step-00000003"], "nothing temporary is left"


def test_the_same_step_is_replaced(tmp_path):
    store.save(tmp_path, snapshot(val_loss=1.0))
    path = store.save(tmp_path, snapshot(val_loss=2.0))
    assert store.load(path).meta["monitor"] == {"val_loss": 2.0}
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
    store.save(tmp_path, snapshot(3))
    path = store.save(tmp_path, snapshot(7))
    damage(path / name)
    with pytest.raises(CheckpointError) as caught:
        store.load(path)
    assert "step-00000007" in caught.value.where
    warnings = []
    found = store.newest(tmp_path, warnings.append)
    assert found.step == 3
    assert len(warnings) == 1 and "step-00000007" in warnings[0] and "the one before" in warnings[0]


GARBAGE = [
    None, True, -1, 0, 1, 3, 1 << 62, 10**40, 0.5, -1e300, "", "3", "../../etc/passwd", "rank-99.safetensors",
    "x" * 5000, "\x1b[2J\n", [], [0], [[[]]], {}, {"a": {"b": []}}, {"weights.safetensors": {}},
]  # fmt: skip


def places(node, path=()):
    """All paths into nested dictionaries and lists."""
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, below in items:
        yield from places(below, (*path, key))


def mutated(manifest, rng):
    """One or two places of it changed: garbage in its place, gone, or something beside it."""
    made = json.loads(json.dumps(manifest))
    for _ in range(rng.integers(1, 3)):
        paths = [p for p in places(made) if p]
        path = paths[rng.integers(len(paths))]
        at, garbage = made, GARBAGE[rng.integers(len(GARBAGE))]
        for key in path[:-1]:
            at = at[key]
        what = rng.integers(3)
        if what == 0:
            at[path[-1]] = garbage
        elif what == 1:
            del at[path[-1]]
        elif isinstance(at, dict):
            at[str(garbage)[:40]] = garbage
    return made


def one_line(error, path):
    text = str(error)
    assert "\n" not in text and len(text) < 500 and text.isprintable() and str(path) in text, text


def test_no_manifest_gives_more_than_one_clear_line(tmp_path):
    """Mutations of a whole manifest, seeded, four of five of its fields and the others of its bytes: it loads as
    it should, or is one line, with little memory."""
    rng, path = np.random.default_rng(0), store.save(tmp_path / "checkpoints", snapshot_of_two())
    text = (path / "manifest.json").read_bytes()
    refused, tracked = 0, 0
    tracemalloc.start()
    for number in range(CASES):
        if number % 5:
            content = encode(mutated(json.loads(text), rng))
        else:  # bytes
            content = bytearray(text)
            content[rng.integers(len(content))] = rng.integers(256)
            content = bytes(content[: rng.integers(len(content)) if number % 10 else None])
        (path / "manifest.json").write_bytes(content)
        tracemalloc.reset_peak()
        try:
            found = store.load(path)
            assert found.step == 3 and len(found.local) <= 2 and found.tree.keys() == TREE.keys()
            assert found.config().seed >= 0 and found.progress.step >= 0
        except CheckpointError as error:
            refused += 1
            one_line(error, path)
        except ValueError as error:
            pytest.fail(f"{content!r}: {error!r}")
        store.prune(tmp_path / "checkpoints", save_top_k=1, save_last=True, monitor="val_loss", mode="min")
        tracked = max(tracked, tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert refused > CASES / 2 and tracked < 8e6


def test_no_file_of_tensors_gives_more_than_one_clear_line(tmp_path):
    """Their bytes changed, most often in the header, with the right hash in the manifest."""
    rng, path = np.random.default_rng(1), store.save(tmp_path / "checkpoints", snapshot_of_two())
    manifest, refused = json.loads((path / "manifest.json").read_text()), 0
    files = {name: (path / name).read_bytes() for name in manifest["files"]}
    tracemalloc.start()
    for number in range(CASES):
        name = str(rng.choice(sorted(files)))
        content = bytearray(files[name])
        header = 8 + int.from_bytes(content[:8], "little")
        for _ in range(rng.integers(1, 4)):
            content[rng.integers(header if number % 4 else len(content))] = rng.integers(256)
        if number % 7 == 0:
            content = content[: rng.integers(len(content))]
        if number % 11 == 0:
            content[:8] = int(rng.integers(2**62)).to_bytes(8, "little")
        entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (path / name).write_bytes(content)
        (path / "manifest.json").write_bytes(encode(manifest | {"files": manifest["files"] | {name: entry}}))
        tracemalloc.reset_peak()
        try:
            found = store.load(path)
            assert found.step == 3 and all(isinstance(x, np.ndarray) for x in found.tree.values())
        except CheckpointError as error:
            refused += 1
            one_line(error, path)
        assert tracemalloc.get_traced_memory()[1] < 8e6
        (path / name).write_bytes(files[name])
    tracemalloc.stop()
    assert refused > CASES / 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"files": {"../../etc/passwd": {"bytes": 1, "sha256": "x"}}}, "files"),
        ({"files": {"weights.safetensors": {"bytes": "many", "sha256": "x"}}}, "files"),
        ({"files": []}, "files"),
        ({"step": "three"}, "step"),
        ({"meta": 5}, "meta"),
        ({"ranks": None}, "ranks"),
        ({"ranks": "3"}, "ranks"),
        ({"ranks": 10**9}, "ranks"),
        ({"ranks": True}, "ranks"),
        ({"step": 7}, "step 7"),
        ({"consumed": -1}, "consumed"),
        ({"files": {}}, "weights.safetensors"),
        ({"more": 1}, "more"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_is_named(tmp_path, change, words):
    path = store.save(tmp_path, snapshot_of_two())
    manifest = json.loads((path / "manifest.json").read_text()) | change
    (path / "manifest.json").write_bytes(encode(manifest))
    with pytest.raises(CheckpointError) as caught:
        store.load(path)
    assert words in str(caught.value) and str(path) in caught.value.where


def test_no_flipped_bit_of_a_manifest_goes_unseen(tmp_path):
    """Every bit, one at a time: it is told, or the manifest means the same (the case of "\\u00e9", of 1e-05)."""
    path = store.save(tmp_path, snapshot_of_two())
    file, seen = path / "manifest.json", 0
    text = file.read_bytes()
    saved = json.loads(text)
    with file.open("r+b", buffering=0) as stream:
        for bit in range(8 * len(text)):
            at, flipped = bit // 8, text[bit // 8] ^ 1 << bit % 8
            stream.seek(at)
            stream.write(bytes([flipped]))
            try:
                _, meta = read(path)
                assert json.loads(file.read_bytes()) == saved and meta == saved["meta"], (
                    f"bit {bit} of {text[at:][:40]}"
                )
            except CheckpointError as error:
                seen += 1
                one_line(error, path)
            stream.seek(at)
            stream.write(text[at : at + 1])
    assert file.read_bytes() == text and read(path)[1] == saved["meta"]
    assert seen > 0.99 * 8 * len(text)


def test_another_format_is_refused_by_its_number(tmp_path):
    path = store.save(tmp_path, snapshot())
    text = (path / "manifest.json").read_text()
    for number in (FORMAT - 1, FORMAT + 1):
        (path / "manifest.json").write_text(text.replace(f'"format": {FORMAT}', f'"format": {number}'))
        with pytest.raises(CheckpointError) as caught:
            store.load(path)
        assert str(caught.value) == f"the checkpoint has format {number}, and this version reads format 3; {path}"


def test_a_key_that_stands_twice_is_refused(tmp_path):
    """Readers of JSON differ in which of two they take."""
    path = store.save(tmp_path, snapshot_of_two())
    text = (path / "manifest.json").read_text()
    for key in ("consumed", "monitor"):
        doubled = text.replace(f'"{key}":', f'"{key}": 5, "{key}":', 1)
        (path / "manifest.json").write_text(doubled)
        with pytest.raises(CheckpointError, match=f"the manifest is damaged .{key}: stands twice."):
            store.load(path)


@pytest.mark.parametrize("name", ["optimizer", "rank-1"])
def test_a_file_that_the_manifest_does_not_name_is_missed(tmp_path, name):
    """Slots and residuals would begin anew without a word."""
    path = store.save(tmp_path, snapshot_of_two())
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"][f"{name}.safetensors"]
    (path / "manifest.json").write_bytes(encode(manifest))
    with pytest.raises(CheckpointError, match="the manifest is damaged .files: (no optimizer|of 2 ranks: 0)"):
        store.load(path)


def test_foreign_bytes_under_a_valid_hash(tmp_path):
    path = store.save(tmp_path, snapshot())
    content = b"\x80\x04 a pickle, say"
    (path / "weights.safetensors").write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["weights.safetensors"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_bytes(encode(manifest))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        store.load(path)


def test_all_damaged_is_an_error_and_none_is_none(tmp_path):
    warnings = []
    assert store.newest(tmp_path, warnings.append) is None
    assert store.newest(tmp_path / "missing", warnings.append) is None
    for step in (1, 2):
        cut(store.save(tmp_path, snapshot(step)) / "weights.safetensors")
    with pytest.raises(CheckpointError, match="no checkpoint can be used"):
        store.newest(tmp_path, warnings.append)
    assert len(warnings) == 2


# ---- faults while writing


def test_a_full_disk_leaves_the_old_one_and_says_how_much_is_missing(tmp_path, monkeypatch):
    store.save(tmp_path, snapshot(1))

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"No space left.*bytes needed.*free"):
        store.save(tmp_path, snapshot(2))
    assert names(tmp_path) == ["step-00000001"]
    assert store.newest(tmp_path, pytest.fail).step == 1


def test_one_transient_error_is_survived(tmp_path, monkeypatch):
    real, left = os.fsync, [OSError(errno.EIO, "Input/output error")]

    def flaky(descriptor):
        if left:
            raise left.pop()
        real(descriptor)

    monkeypatch.setattr(os, "fsync", flaky)
    monkeypatch.setattr(store.time, "sleep", lambda seconds: None)
    assert store.load(store.save(tmp_path, snapshot())).step == 3
    assert names(tmp_path) == ["step-00000003"]


PRUNED = {"save_top_k": 1, "save_last": True, "monitor": "val_loss", "mode": "min"}


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOENT, errno.EACCES])
@pytest.mark.parametrize("times", [1, 9])
@pytest.mark.parametrize("name", ["rename", "listdir"])
def test_pruning_that_fails_is_tried_again_and_then_told(tmp_path, monkeypatch, number, times, name):
    monkeypatch.setattr(store, "AGAIN_SECONDS", 0.0)
    for step in range(1, 6):
        store.save(tmp_path, snapshot(step, val_loss=step))
    real, left, told = getattr(os, name), [times], []

    def flaky(*args, **more):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, os.strerror(number))
        return real(*args, **more)

    monkeypatch.setattr(os, name, flaky)
    store.prune(tmp_path, **PRUNED, warn=told.append)
    monkeypatch.setattr(os, name, real)
    again = times == 1 and number != errno.EACCES
    words = f"old checkpoints cannot be removed: {os.strerror(number)}; {tmp_path}; the next save tries again"
    assert told == ([] if again else [words])
    store.prune(tmp_path, **PRUNED, warn=pytest.fail)
    assert names(tmp_path) == ["step-00000001", "step-00000004", "step-00000005"]


def test_the_best_stays_while_its_manifest_cannot_be_read(tmp_path, monkeypatch):
    """One that is damaged goes; one that the file server does not give just now may be whole, and was removed."""
    monkeypatch.setattr(store, "AGAIN_SECONDS", 0.0)
    for step in range(1, 6):
        store.save(tmp_path, snapshot(step, val_loss=step))
    real, told = store.read, []

    def unread(path):
        if path.name == "step-00000001":
            raise CheckpointError("cannot be read", where=str(path)) from OSError(errno.EIO, "Input/output error")
        return real(path)

    monkeypatch.setattr(store, "read", unread)
    store.prune(tmp_path, **PRUNED, warn=told.append)
    assert "step-00000001" in names(tmp_path) and len(told) == 1
    monkeypatch.setattr(store, "read", real)
    store.prune(tmp_path, **PRUNED, warn=pytest.fail)
    assert names(tmp_path) == ["step-00000001", "step-00000004", "step-00000005"]


KILLED = """
import os, sys
from pathlib import Path
from hvd_train.checkpoint import resume_rules, store
from tests.checkpoint.test_store import snapshot
root, step, at, calls = Path(sys.argv[1]), int(sys.argv[2]), [0], [0]
def counted(name):
    real = getattr(os, name)
    def call(*args, **kwargs):
        calls[0] += 1
        if calls[0] == at[0]:
            os._exit(42)
        return real(*args, **kwargs)
    setattr(os, name, call)
for name in ("open", "fsync", "rename", "replace", "link", "mkdir", "rmdir", "unlink", "scandir"):
    counted(name)
for k in range(1, 100):
    folder = root / str(k)
    store.save(folder, snapshot(1, val_loss=1.0))
    if os.fork() == 0:  # imports are paid once
        calls[0], at[0] = 0, k
        store.save(folder, snapshot(step, val_loss=2.0))
        store.prune(folder, save_top_k=1, save_last=True, monitor="val_loss", mode="min")
        os._exit(0)
    if os.waitstatus_to_exitcode(os.wait()[1]) == 0:
        break
"""


@pytest.mark.parametrize("step", [1, 2])  # 1: the only checkpoint is saved again
def test_killed_at_any_moment_a_valid_one_exists(tmp_path, step):
    """The process ends right before its k-th file-system call, for every k."""
    line = [sys.executable, "-c", KILLED, str(tmp_path), str(step)]
    subprocess.run(line, cwd=Path(__file__).parents[2], timeout=SECONDS, check=True)
    folders = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert 8 < len(folders) < 99
    seen = set()
    for folder in folders:
        found = store.newest(folder, pytest.fail)
        assert found is not None and found.step in (1, step), folder
        seen.add(found.meta["monitor"]["val_loss"])
        assert store.load(store.resolve(folder, str(folder))).step == found.step
        store.prune(folder, save_top_k=1, save_last=True, monitor="val_loss", mode="min")
        wanted = ["step-00000001", "step-00000002"][: found.step]
        assert names(folder) == wanted, f"{folder}: what the killed process left is swept"
        assert store.newest(folder, pytest.fail).meta == found.meta
    assert seen == {1.0, 2.0}


def test_preflight_proves_the_folder(tmp_path):
    """A folder that cannot be written ends a run at its start, not at its first save."""
    store.preflight(tmp_path / "new" / "checkpoints", 1000)
    assert names(tmp_path / "new" / "checkpoints") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        store.preflight(tmp_path / "file" / "checkpoints", 0)
    with pytest.raises(CheckpointError, match=r"no room for a checkpoint: 1,000,000,000,000,000 bytes needed, .* free"):
        store.preflight(tmp_path / "new" / "checkpoints", 10**15)


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
        store.save(tmp_path, snapshot(step, val_loss=loss))
    (tmp_path / "step-00000009.tmp-12ab").mkdir()
    (tmp_path / "step-00000009.old-12ab").mkdir()
    (tmp_path / "mine").mkdir()
    store.prune(tmp_path, save_top_k=save_top_k, save_last=save_last, monitor="val_loss", mode=mode)
    assert [step for step, _ in store.find(tmp_path)] == kept
    assert "mine" in names(tmp_path) and len(names(tmp_path)) == len(kept) + 1


def test_without_a_monitored_value_a_checkpoint_is_not_best(tmp_path):
    store.save(tmp_path, snapshot(1, val_loss=0.5))
    store.save(tmp_path, snapshot(2, val_loss=float("nan")))
    store.save(tmp_path, snapshot(3, val_loss=0.7))
    store.save(tmp_path, snapshot(4))
    store.prune(tmp_path, save_top_k=1, save_last=False, monitor="val_loss", mode="min")
    assert [step for step, _ in store.find(tmp_path)] == [1]


def test_a_value_of_other_data_is_not_best(tmp_path):
    """A run that went on with harder data: what was easy before is no better, and would stay the best for ever."""
    meta = facts()
    others = meta | {"data": {**meta["data"], "val": {"samples": 53, "fingerprint": "others"}}}
    of_loss = copy.deepcopy(others)
    of_loss["config"]["task"]["loss"] = "mse"
    rows = [(1, meta, 0.1), (2, others, 0.5), (3, others, 0.4), (4, others, 0.6)]
    for step, of_run, loss in rows:
        progress = asdict(Progress(step=step, epoch=1, consumed=32))
        of_run = of_run | {"monitor": {"val_loss": loss, "train_loss": loss}, "progress": progress}
        store.save(tmp_path, Snapshot(step, 1, 32, *PARTS, [], of_run))
    assert store.resolve(tmp_path.parent, str(tmp_path)).name == "step-00000004"
    assert [step for _, step, _ in store._ranked(tmp_path, "val_loss", "min")] == [3, 2, 4]
    assert [step for _, step, _ in store._ranked(tmp_path, "train_loss", "min")] == [1, 3, 2, 4]
    of_loss |= {"monitor": {"val_loss": 9.0}, "progress": asdict(Progress(step=5, epoch=1, consumed=32))}
    store.save(tmp_path, Snapshot(5, 1, 32, *PARTS, [], of_loss))
    store.prune(tmp_path, save_top_k=1, save_last=True, monitor="val_loss", mode="min")
    assert [step for step, _ in store.find(tmp_path)] == [4, 5]
    assert store.best(tmp_path, "val_loss", "min").startswith("val_loss 9.0000 in epoch")


def test_words_and_paths(tmp_path):
    folder = tmp_path / "checkpoints"
    for step, loss in LOSSES.items():
        store.save(folder, snapshot(step, val_loss=loss))
    last, best = folder / "step-00000004", folder / "step-00000002"
    assert store.resolve(tmp_path, "best") == best
    assert store.resolve(tmp_path, "best", mode="max") == folder / "step-00000001"
    assert store.resolve(tmp_path, "last") == last
    assert store.choose(tmp_path, "best", "val_loss", "max").step == 1
    assert store.choose(tmp_path, "last", "val_loss", "min").step == store.load(last).step
    for given in (tmp_path, folder, last):
        assert store.resolve(Path("elsewhere"), str(given)) == last
    # As the last line of a training names it, and shorter.
    assert store.resolve(tmp_path, "step-00000001") == store.resolve(tmp_path, "step-1") == folder / "step-00000001"
    with pytest.raises(CheckpointError, match=f"there is no checkpoint; step-9; {tmp_path} has step-0.*, {last.name}$"):
        store.resolve(tmp_path, "step-9")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        store.resolve(tmp_path, str(tmp_path / "nothing"))
    with pytest.raises(CheckpointError, match="no checkpoint has a val_accuracy"):
        store.resolve(tmp_path, "best", "val_accuracy", "max")


def test_code_is_trusted_where_folder_and_code_are_the_callers_alone(tmp_path, monkeypatch):
    """A library's function, a link, what others can write or own: each is asked about."""
    (tmp_path / "mine").mkdir()
    code, folder = tmp_path / "mine" / "parts.py", tmp_path / "run"
    code.write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(tmp_path)

    def named(name="mine.parts:network"):
        shutil.rmtree(folder, ignore_errors=True)
        store.save(folder / "checkpoints", Snapshot(1, 1, 32, *PARTS, [], facts(model={"name": name})))
        return trained_config(None, [], str(folder), "last")[1]

    assert named() == {} and named("parts:network") == {"model.name": "parts:network"}, "there is no such module"
    for library in ("os:system", "numpy:load", "torch.hub:load"):
        assert named(library) == {"model.name": library}
    manifest = folder / "checkpoints" / "step-00000001" / "manifest.json"
    for path in (folder, folder / "checkpoints", manifest, code, tmp_path / "mine"):
        for mode in (0o020, 0o002):
            named()
            before = path.stat().st_mode
            path.chmod(before | mode)
            assert trained_config(None, [], str(folder), "last")[1], (path, mode)
            path.chmod(before)
    named()
    assert trained_config(None, [], str(folder), "last")[1] == {}
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: 12345)
        assert trained_config(None, [], str(folder), "last")[1], "they belong to another user"
    shutil.move(folder / "checkpoints", tmp_path / "elsewhere")
    (folder / "checkpoints").symlink_to(tmp_path / "elsewhere")
    assert trained_config(None, [], str(folder), "last")[1], "a link may lead to another's"


def test_the_best_of_a_run_is_by_its_own_mode_and_that_is_told(tmp_path, capsys):
    rule = {"monitor": "val_accuracy", "mode": "min"}
    for step, accuracy in ((1, 0.8), (2, 0.9)):
        meta = facts(step, {"val_accuracy": accuracy}, checkpoint=rule)
        store.save(tmp_path / "checkpoints", Snapshot(step, 1, 32, *PARTS, [], meta))
    for sets, step, lines in (([], 1, 1), (["checkpoint.mode=auto"], 2, 0), (["checkpoint.mode=max"], 2, 0)):
        config, _ = trained_config(None, sets, str(tmp_path), "best")
        assert choose_checkpoint(config, "best").step == step and config.restores
        told = capsys.readouterr().err
        assert told.count("\n") == lines and ("takes the smallest val_accuracy as best" in told) == bool(lines)


def test_a_damaged_best_is_told(tmp_path):
    """Its manifest cannot say that it was the best: the user hears that another one is taken."""
    for step, loss in LOSSES.items():
        store.save(tmp_path / "checkpoints", snapshot(step, val_loss=loss))
    flip(tmp_path / "checkpoints" / "step-00000002" / "manifest.json")
    warnings = []
    assert store.choose(tmp_path, "best", "val_loss", "min", warnings.append).step == 4
    (said,) = warnings
    assert said.startswith("checkpoint step-00000002 cannot be used (the manifest is damaged")


def test_a_resume_from_the_best_goes_by_the_rule(tmp_path, monkeypatch):
    """So do the stages, of which each checkpoint here has others."""
    for step, loss, accuracy in ((1, 0.3, 0.8), (2, 0.2, 0.9), (3, 0.1, 0.7)):
        meta = facts(step, {"val_loss": loss, "val_accuracy": accuracy}, parallel={"pipeline": 2, "split": [1, step]})
        store.save(tmp_path / "checkpoints", Snapshot(step, 1, 32, *PARTS, [], meta))
    monkeypatch.setattr(resume_rules, "changed", lambda before, now: [])
    for rule, step in (({}, 3), ({"monitor": "val_accuracy"}, 2)):
        keys = {"run_dir": str(tmp_path), "checkpoint": rule, "parallel": {"pipeline": 2}}
        config = Config.model_validate(keys)
        assert resume.split_as_before(config, Serial(), "best").parallel.split == [1, step]
        monkeypatch.setattr(Snapshot, "config", lambda _, config=config: config)
        data = SimpleNamespace(sample=Sample({}, {}), vocabulary="")
        found = resume.find_checkpoint(config, data, "best", ["data"])
        assert found.step == step
