"""Files of a job's launcher: none is left, whoever is killed."""

from __future__ import annotations

import mmap
import resource
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from hvd_train.errors import CommunicationError, ConfigError
from hvd_train.launch import job_folders, start
from hvd_train.launch.job_folders import job_folder
from hvd_train.launch.launchers.mpirun import MEMORY, Mpirun

KILLER = """
import os, signal, sys, time
from mpi4py import MPI
MPI.COMM_WORLD.allreduce(1)
names = [os.environ["OMPI_MCA_orte_tmpdir_base"], os.environ["OMPI_MCA_btl_vader_backing_directory"]]
if MPI.COMM_WORLD.rank == 0:
    open(sys.argv[1], "w").write(" ".join(f"{name} {len(os.listdir(name))}" for name in names))
    os.kill(os.getppid(), signal.SIGKILL)
time.sleep(600)
"""


def test_mpirun_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    note = tmp_path / "note"
    with pytest.raises(CommunicationError, match="SIGKILL"):
        start.launch(2, "mpirun", [], program=[sys.executable, "-c", KILLER, str(note)])
    temporary, one, memory, two = note.read_text().split()
    assert (Path(temporary).parent, one) == (tmp_path, "1")  # its session
    assert (str(Path(memory).parent), two) == (MEMORY, "2")  # a file of each rank
    assert not Path(temporary).exists() and not Path(memory).exists()


def test_what_the_user_set_stands(monkeypatch):
    monkeypatch.setenv("OMPI_MCA_btl_vader_backing_directory", "/dev/shm")
    with start.folders(Mpirun(), 2) as variables:
        assert "OMPI_MCA_btl_vader_backing_directory" not in variables
        assert Path(variables["OMPI_MCA_orte_tmpdir_base"]).is_dir()


def test_a_place_that_cannot_be_written(tmp_path, monkeypatch):
    """The launcher reports it, or takes another."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with start.folders(Mpirun(), 2) as variables:
        assert "OMPI_MCA_orte_tmpdir_base" not in variables


def test_a_rank_of_a_killed_job_removes_its_folders(tmp_path, monkeypatch):
    with job_folder(tmp_path, "mpi") as folder:
        monkeypatch.setenv(job_folders.VARIABLE, f"{folder}:{tmp_path / 'gone'}")
        job_folders.remove_orphaned()
        assert folder.is_dir()
    orphan = tmp_path / "hvd-train-mpi-1-orphan"
    orphan.mkdir()
    monkeypatch.setenv(job_folders.VARIABLE, str(orphan))
    job_folders.remove_orphaned()
    assert not orphan.exists()


def test_a_rank_whose_mpirun_was_killed(tmp_path, monkeypatch):
    """Of a plain mpirun: what lies in /dev/shm and in mpirun's own folder, and nothing else."""
    session, other = tmp_path / "pid.123", tmp_path / "work"
    for folder in (session, other):
        (folder / "0").mkdir(parents=True)
    segments = [tmp_path / "vader_segment.host.0.1.0", tmp_path / "vader_segment.host.0.2.0"]
    for path in segments:
        path.write_bytes(b"x")
    with segments[0].open("r+b") as file, mmap.mmap(file.fileno(), 1):
        monkeypatch.setenv("PMIX_SERVER_TMPDIR", str(session))
        Mpirun().remove_left()
        assert [path.exists() for path in segments] == [False, True]
        assert not session.exists()
        monkeypatch.setenv("PMIX_SERVER_TMPDIR", str(other))
        Mpirun().remove_left()
        assert (other / "0").is_dir()


def test_limits_under_which_mpirun_crashes(tmp_path, monkeypatch):
    """With 24 open files it hung for a minute and more; without room for shared memory a rank ended with code 1."""
    Mpirun().check_limits(2)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (37, 37))
    with pytest.raises(
        ConfigError, match="needs 38 open files for 2 ranks, and 37 are allowed; ulimit -n; ulimit -n 1"
    ):
        start.launch(2, "mpirun", [])
    monkeypatch.setattr(resource, "getrlimit", lambda which: (-1, -1))  # no limit
    usage = shutil.disk_usage(tmp_path)
    full = {MEMORY: usage._replace(free=1 << 20)}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full.get(str(path), usage))
    with pytest.raises(ConfigError, match="4,194,312 bytes needed, 1,048,576 free; /dev/shm; make it larger"):
        start.launch(2, "mpirun", [])
    monkeypatch.setenv("OMPI_MCA_btl_vader_backing_directory", str(tmp_path))
    Mpirun().check_limits(2)
