"""The engine by itself, without a framework."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hvd_train.engine import library
from tests.launching import launch
from tests.limits import SECONDS

pytestmark = pytest.mark.skipif(not library.built(), reason="the engine is not built")


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
@pytest.mark.parametrize("size", [2, 3])
def test_collectives_are_numpys(launcher, size, tmp_path):
    """Every collective and type, groups, process sets, errors, a transfer that nobody waits for."""
    done = launch(size, launcher, ["-m", "tests.engine.ranks", str(tmp_path), str(size)])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    assert [one["wrong"] for one in found] == [[]] * size
    assert {(one["size"], one["mpi"]) for one in found} == {(size, launcher == "mpirun")}


def test_no_framework_and_no_python_is_needed():
    for name in (*library.built(), *(["tensorflow"] if library.TENSORFLOW_OP.exists() else [])):
        line = ["nm", "-D", "--undefined-only", str(library.FOLDER / f"{name}.so")]
        needed = {row.split()[-1] for row in subprocess.run(line, capture_output=True, text=True).stdout.splitlines()}
        assert needed
        foreign = {
            symbol
            for symbol in needed
            if symbol.startswith(("Py", "_Py")) or "torch" in symbol or "N10tensorflow" in symbol
        }
        assert not foreign
        assert name == "tensorflow" or not any(symbol.startswith("TF_") for symbol in needed)


def test_what_we_declare_of_tensorflow_is_tensorflows():
    """The operations are compiled without TensorFlow's headers."""
    includes = Path(pytest.importorskip("tensorflow").sysconfig.get_include())
    line = ["c++", "-std=c++17", "-fsyntax-only", "-DTENSORFLOW_HEADERS", "-isystem", str(includes)]
    source = Path(library.__file__).parent / "native" / "tensorflow_op.cc"
    done = subprocess.run([*line, str(source)], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[:3000]


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, "openmpi"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "openmpi"),
        ({"PMI_RANK": "0"}, "mpich"),
        ({"PMI_RANK": "0", "OMPI_COMM_WORLD_RANK": "0"}, "openmpi"),
        ({"HOROVOD_CONTROLLER": "gloo", "PMI_RANK": "0"}, "gloo"),
    ],
)
def test_the_library_of_who_started_the_rank(environ, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    for name in library.MPI:
        (tmp_path / f"{name}.so").touch()
    assert library.chosen(environ) == wanted
    (tmp_path / "mpich.so").unlink()
    assert library.chosen({"PMI_RANK": "0"}) == "openmpi"  # one library speaks Gloo as well as another


def test_stock_bindings_where_there_is_no_engine(tmp_path, monkeypatch):
    assert not library.use_stock({})
    assert library.use_stock({library.BINDINGS: "stock"})
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    assert library.use_stock({})
