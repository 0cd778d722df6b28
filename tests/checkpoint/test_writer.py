"""Checkpoints in the background: the bytes that are written, and a write that never ends."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from hvd_train.checkpoint import serialize
from hvd_train.checkpoint import writer as writer_module
from hvd_train.checkpoint.serialize import pack, packed
from tests.limits import SECONDS

PATH = Path("checkpoints") / "step-00000004"


@pytest.mark.parametrize("piece", [1, 100, 1 << 20])
def test_pieces_are_a_safetensors_file(monkeypatch, piece):
    """Of arrays as they lie in memory: transposed, cut out, empty, a number; each aligned to its own width."""
    monkeypatch.setattr(serialize, "CACHED_BYTES", piece)
    base = np.random.default_rng(0).normal(size=(7, 5, 3))
    tree = {
        "transposed": base.transpose(2, 0, 1),
        "wide": np.arange(70.0 * 3).reshape(70, 3).T,
        "single": base.astype(np.float32)[:, ::2],
        "half": base[0].astype(np.float16),
        "step": np.float32(3.0).reshape(()),
        "none": np.zeros((0, 4), np.int8),
        "mask": base[1] > 0,
        "counts": np.arange(6, dtype=np.uint16).reshape(2, 3).T,
        'a "name"\n': np.arange(3),
    }
    content = b"".join(packed(tree))
    assert content == pack(tree) and len(list(packed(tree))) > (40 if piece == 1 else 1)
    found = load(content)
    assert found.keys() == tree.keys()
    for key, x in tree.items():
        assert found[key].dtype == x.dtype and found[key].shape == x.shape and (found[key] == x).all(), key
    length = int.from_bytes(content[:8], "little")
    for entry in json.loads(content[8 : 8 + length]).values():
        assert (8 + length + entry["data_offsets"][0]) % {"F64": 8, "I64": 8, "F32": 4}.get(entry["dtype"], 1) == 0


def begun(limit: float, work) -> writer_module.Writer:
    writer = writer_module.Writer(limit)
    writer.begin(PATH, lambda: work(writer))
    return writer


def test_a_write_that_hangs_is_given_up_after_the_limit():
    end, began = threading.Event(), time.monotonic()
    writer = begun(0.4, lambda _: end.wait())
    assert writer.outcome() is None
    writer.wait()
    kind, what, where, _ = json.loads(writer.outcome())
    end.set()
    assert 0.4 < time.monotonic() - began < SECONDS and (kind, where) == ("CheckpointError", str(PATH))
    assert what == "the checkpoint cannot be written: there was no progress for 0.4 s"


@pytest.mark.parametrize("limit", [0.5, 0])
def test_a_write_that_moves_takes_as_long_as_it_does(monkeypatch, limit):
    now, may_move, has_moved = [0.0], threading.Semaphore(0), threading.Semaphore(0)
    monkeypatch.setattr(writer_module.time, "monotonic", lambda: now[0])

    def slow(writer):
        for _ in range(8):
            assert may_move.acquire(timeout=SECONDS)
            writer.moved()
            has_moved.release()

    writer = begun(limit, slow)
    for _ in range(8):
        now[0] += 0.25
        assert writer.outcome() is None
        may_move.release()
        assert has_moved.acquire(timeout=SECONDS)
    writer.wait()
    assert writer.outcome() == "" and writer.longest == 8 * 0.25


def test_a_process_that_was_stopped_itself_gives_nothing_up(monkeypatch):
    now, end = [0.0], threading.Event()
    monkeypatch.setattr(writer_module.time, "monotonic", lambda: now[0])
    writer = begun(600, lambda _: end.wait())
    for seconds in (200, 200, 5000, 200, 200, 199):
        now[0] += seconds
        assert writer.outcome() is None
    now[0] += 2
    assert "there was no progress for 600 s" in (writer.outcome() or "")
    end.set()
