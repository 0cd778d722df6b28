"""``hvd-train doctor`` on one host."""

from __future__ import annotations

from importlib import metadata

import pytest
from click.testing import CliRunner

from hvd_train.cli.main import cli
from hvd_train.doctor import host
from hvd_train.engine import library
from hvd_train.installation import install_fix, replace_fix


@pytest.mark.parametrize("package", ["tensorflow", "tensorflow-cpu"])
def test_doctor_counts_whatever_is_broken(monkeypatch, capsys, package):
    """TensorFlow's build for GPUs has another name."""

    def version(name):
        if name in (package, "torch"):
            return "1"
        raise metadata.PackageNotFoundError(name)

    sound = {"version": "1", "gpus": 0, "mpi": True, "gloo": True, "nccl": False}
    found = {"pytorch": sound, "tensorflow": {"error": "no libcudart"}}
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(host, "_look", lambda framework: found[framework])
    monkeypatch.setattr(host, "_probe", lambda framework, tool, verbose: (framework, tool, *"...", "ok"))
    output = (host.doctor(False), capsys.readouterr().out)
    assert output[0] == 1 and "no libcudart" in output[1] and "hvd_train is tested with 2.13" in output[1]
    found["tensorflow"] = sound | {"version": "2.21.3"}
    found["pytorch"] = sound | {"version": "2.13.1+cpu"}
    assert host.doctor(False) == 0 and "is tested with" not in capsys.readouterr().out


def test_jax_without_the_engine_breaks_nothing(monkeypatch, capsys):
    """Horovod has no bindings of its own for it."""
    sound = {"version": "1", "gpus": 0, "mpi": True, "gloo": True, "nccl": False}
    monkeypatch.setattr(metadata, "version", lambda name: "1")
    monkeypatch.setattr(host, "use_stock", lambda: True)
    monkeypatch.setattr(host, "_look", {"pytorch": sound, "tensorflow": sound}.__getitem__)
    monkeypatch.setattr(host, "_probe", lambda framework, tool, verbose: (framework, tool, *"...", "ok"))
    assert host.doctor(False) == 0
    assert ["jax", "needs", "the", "engine", *install_fix("--bindings both").split()] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]


def test_a_damaged_engine_is_not_the_frameworks_fault(monkeypatch, capsys, tmp_path):
    """Each library that cannot be used has a row of its own; one for another MPI than the host's is no fault."""
    sound = {"version": "1", "gpus": 0}
    for name in ("openmpi", "mpich", "gloo", "tensorflow"):
        (tmp_path / f"{name}.so").write_bytes(b"no library")
    monkeypatch.setattr(metadata, "version", lambda name: "1")
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setattr(host, "TENSORFLOW_OP", tmp_path / "tensorflow.so")
    monkeypatch.setattr(host, "_look", lambda framework: dict(sound))
    monkeypatch.setattr(host, "_probe", lambda framework, tool, verbose: (framework, tool, *"...", "ok"))
    assert host.doctor(False) == 1
    output = capsys.readouterr().out
    rows = [line for line in output.splitlines() if line.startswith("engine, ")]
    assert [row.split()[1] for row in rows] == ["tensorflow.so", "openmpi.so", "mpich.so", "gloo.so"]
    assert all("is damaged: it is no library" in row and replace_fix() in row for row in rows)
    assert "not tried" in output
    monkeypatch.setattr(host, "damage", lambda file: "")
    found = {"openmpi": "", "mpich": "libmpi.so.12: cannot open shared object file", "gloo": ""}
    monkeypatch.setattr(host, "_load_error", found.__getitem__)
    assert host.doctor(False) == 0
    output = capsys.readouterr().out
    assert "engine, " not in output and "Horovod with MPI, Gloo" in output
    found |= {"openmpi": "crashes while it is loaded"}
    assert host.doctor(False) == 1
    assert "engine, openmpi.so" in (output := capsys.readouterr().out) and "engine, mpich" not in output


def test_no_framework_at_all(monkeypatch, capsys):
    """Each is missing, with the way to get it, and there is nothing to try."""

    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(host, "_look", lambda framework: {"error": "no module"})
    assert host.doctor(False) == 1
    output = capsys.readouterr().out
    assert "pip install torch" in output or "run scripts/setup --frameworks pytorch" in output
    assert "not tried: neither a framework nor a launcher" in output


def test_doctor_finds_a_sound_installation(monkeypatch):
    """Each framework with one launcher; the others are said to be sound."""
    probe, tried = host._probe, {"pytorch": "mpirun", "tensorflow": "horovodrun"}

    def probed(framework, tool, verbose):
        return probe(framework, tool, verbose) if tried[framework] == tool else (framework, tool, *"...", "ok")

    monkeypatch.setattr(host, "_probe", probed)
    done = CliRunner().invoke(cli, ["doctor"])
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines()]
    sound = {(row[0], row[1]): row for row in rows if row and row[-1] == "ok"}
    assert set(sound) == {(framework, tool) for framework in tried for tool in ("mpirun", "horovodrun")}
    assert all("GB/s" in sound[pair] for pair in tried.items()) and "Horovod with MPI, Gloo" in done.output
