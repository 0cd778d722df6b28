"""``hvd-train doctor`` on one host."""

from __future__ import annotations

from importlib import metadata

import pytest

from hvd_train.doctor import host
from tests.cli.running import run


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
    assert host.doctor(False) == 1 and "no libcudart" in capsys.readouterr().out
    found["tensorflow"] = sound
    assert host.doctor(False) == 0


def test_doctor_finds_a_sound_installation():
    done = run("doctor")
    rows = [line.split() for line in done.stdout.splitlines()]
    verdicts = {(row[0], row[1]): row[-1] for row in rows if row and row[-1] == "ok"}
    assert set(verdicts) == {(f, tool) for f in ("pytorch", "tensorflow") for tool in ("mpirun", "horovodrun")}
    assert "Horovod with MPI, Gloo" in done.stdout
