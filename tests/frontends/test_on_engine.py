"""What keeps the engine from being used is told in one line."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from hvd_train.engine import library, transfers
from hvd_train.errors import ConfigError
from hvd_train.frontends import on_engine
from hvd_train.frontends.on_engine import EngineNumpy
from hvd_train.installation import install_fix


def test_two_horovods_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod.torch", ModuleType("horovod.torch"))
    with pytest.raises(ConfigError, match="two Horovods in one process.* horovod.torch.* HVD_TRAIN_BINDINGS=stock"):
        EngineNumpy(2).open()


def test_a_processor_without_what_it_was_compiled_for(monkeypatch, tmp_path):
    monkeypatch.setattr(on_engine, "lacking", lambda: "f16c, fma")
    with pytest.raises(ConfigError, match="a processor with f16c, fma"):
        EngineNumpy(2).open()


def test_what_this_processor_lacks(monkeypatch, tmp_path):
    shown = tmp_path / "cpuinfo"
    monkeypatch.setattr(library, "CPUINFO", shown)
    assert library.lacking() == ""  # not told
    shown.write_text("processor\t: 0\nflags\t\t: fpu avx sse4_2 f16c fma\n")
    assert library.lacking() == ""
    shown.write_text("processor\t: 0\nflags\t\t: fpu sse4_2 f16c\n")
    assert library.lacking() == "avx, fma"
    shown.write_text("processor\t: 0\nFeatures\t: fp asimd\n")  # ARM
    assert library.lacking() == ""


@pytest.mark.skipif("openmpi" not in library.built(), reason="the engine is not built for Open MPI")
def test_no_mpi(monkeypatch):
    monkeypatch.setitem(library.MPI, "openmpi", "libnowhere.so.40")
    with pytest.raises(ConfigError, match="libnowhere.so.40.* load the MPI that starts the ranks"):
        EngineNumpy(2).open()


def test_adasum_needs_a_power_of_two():
    communicator = EngineNumpy(3)
    communicator.size, communicator.hvd = 3, SimpleNamespace(failed=lambda: False)
    with pytest.raises(NotImplementedError, match="power of 2"):
        communicator.allreduce_async(np.ones(2), "x", "adasum")


def test_truth_values_are_not_added():
    """MPI ends the job for it."""
    engine = transfers.Engine.__new__(transfers.Engine)
    blocks = [transfers.block(np.ones(2, bool))]
    with pytest.raises(ValueError, match="truth values"):
        engine.start(transfers.ALLREDUCE, ["x"], blocks, blocks)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (lambda binary: b"", "is damaged: it is no library"),
        (lambda binary: b"#!/bin/sh\n" * 20, "is damaged: it is no library"),
        (lambda binary: binary[: len(binary) // 2], "is damaged: its end is missing"),
        (lambda binary: binary[:-1], "is damaged: its end is missing"),
        (lambda binary: binary[:18] + b"\xb7\x00" + binary[20:], "is for another machine"),  # AArch64
    ],
)
def test_a_damaged_library_is_not_loaded(changed, told, monkeypatch, tmp_path):
    """Half a file would end the process by SIGBUS."""
    if not library.built():
        pytest.skip("the engine is not built")
    name = library.chosen()
    binary = library.file_of(name).read_bytes()
    assert library.damage(library.file_of(name)) == "" == library.damage(library.TENSORFLOW_OP)
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    (tmp_path / f"{name}.so").write_bytes(changed(binary))
    with pytest.raises(ConfigError, match=f"the engine's library {told}; .*{name}.so; remove .*engine/lib .*, and "):
        EngineNumpy(2).open()


def test_bindings_that_do_not_exist(monkeypatch):
    monkeypatch.setenv(library.BINDINGS, "Stockk")
    with pytest.raises(ConfigError, match="'Stockk' is neither engine nor stock; HVD_TRAIN_BINDINGS; unset it"):
        EngineNumpy(2).open()


def test_stock_bindings_that_are_missing(monkeypatch):
    """``pip install .`` would not bring them: the engine is there, and the variable stands in its way."""
    monkeypatch.setenv(library.BINDINGS, "stock")
    monkeypatch.setattr(library, "built", lambda: ["openmpi"])
    assert library.missing_fix().startswith("unset HVD_TRAIN_BINDINGS")
    monkeypatch.setattr(library, "built", list)
    assert library.missing_fix() == install_fix()
