"""A file is replaced as a whole, or stays as it was."""

from __future__ import annotations

import os

import pytest

from hvd_train import files


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_what_cannot_be_written_leaves_the_old_file_alone(tmp_path, monkeypatch, fails):
    path = tmp_path / "model.bin"
    files.put(path, b"old")
    files.put(path, b"whole")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError, match="No space left"):
        files.put(path, b"new")
    assert path.read_bytes() == b"whole" and os.listdir(tmp_path) == ["model.bin"]
