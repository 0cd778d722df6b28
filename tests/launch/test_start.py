"""``-np``: the launcher that is there, its command line, its environment, and what its end means. No framework runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import psutil
import pytest

from hvd_train.errors import CommunicationError, ConfigError
from hvd_train.launch import launchers, start
from hvd_train.launch.environment import CORES
from hvd_train.launch.launchers import base, installed
from hvd_train.launch.launchers.mpirun import Mpirun
from tests.limits import SECONDS, until


def test_many_more_ranks_than_cores_are_told(monkeypatch, capfd):
    monkeypatch.setattr(start.os, "sched_getaffinity", lambda _: {3, 7})
    for ranks in (1, 2, 4):
        start.note_of_cores(ranks)
    assert capfd.readouterr().err == "", "two a core may be a trial"
    start.note_of_cores(40)
    what = "40 ranks share 2 cores of this host: they compute in turn, and each waits for all"
    assert capfd.readouterr().err == f"note: {what}; -np 2 is faster\n"


@pytest.mark.skipif(installed.find_tool("mpirun") is None, reason="needs mpirun")
def test_mpirun_needs_no_ssh_on_one_host(monkeypatch, tmp_path):
    """Open MPI looks for it at its start, and a small container has none."""
    (tmp_path / "mpirun").symlink_to(installed.find_tool("mpirun"))
    monkeypatch.setenv("PATH", str(tmp_path))
    line = start.command(2, "mpirun", [])
    line = [*line[: line.index(sys.executable) + 1], "-c", "print('began')"]
    done = subprocess.run(line, env=start.environment(), capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0 and done.stdout.split() == ["began", "began"], done.stderr


@pytest.fixture
def tools(monkeypatch):
    """Which launchers are installed, and whether Horovod speaks MPI."""

    def install(*names, mpi=True):
        monkeypatch.setattr(installed, "find_tool", lambda name: f"/bin/{name}" if name in names else None)
        monkeypatch.setattr(installed, "mpi_built", lambda: mpi)

    return install


def test_mpi_before_gloo(tools):
    tools("mpirun", "horovodrun")
    assert launchers.choose("auto").name == "mpirun"
    assert launchers.choose("horovodrun").name == "horovodrun"
    tools("mpirun", "horovodrun", mpi=False)
    assert launchers.choose("auto").name == "horovodrun"
    with pytest.raises(ConfigError, match="built without MPI"):
        launchers.choose("mpirun")
    tools("horovodrun")
    assert launchers.choose("auto").name == "horovodrun"
    tools()
    assert launchers.choose("auto").name == "horovodrun"  # it needs no command
    told = "mpirun is not installed; --launcher mpirun; .*, or use --launcher horovodrun, which needs no mpirun"
    with pytest.raises(ConfigError, match=told):
        launchers.choose("mpirun")


@pytest.mark.parametrize("variable", ["TMPDIR", "TMP", "OMPI_MCA_orte_tmpdir_base"])
def test_a_folder_of_temporary_files_that_mpirun_cannot_use(tools, monkeypatch, tmp_path, variable):
    """Its ranks ended as if they had crashed."""
    tools("mpirun", "horovodrun")
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "none"))
    with pytest.raises(ConfigError) as told:
        launchers.choose("auto")
    assert str(told.value).startswith(f"mpirun's files cannot be written: No such file or directory; {variable}: /")
    monkeypatch.setenv(variable, str(tmp_path))
    assert launchers.choose("auto").name == "mpirun"
    full = SimpleNamespace(free=5 << 20)
    monkeypatch.setattr("hvd_train.launch.launchers.mpirun.shutil.disk_usage", lambda folder: full)
    with pytest.raises(ConfigError, match=f"no room for mpirun's files.*5,242,880 free; {variable}: {tmp_path}; set"):
        launchers.choose("mpirun")
    assert launchers.choose("horovodrun").name == "horovodrun"


def test_command_lines(tools, monkeypatch):
    tools("mpirun", "horovodrun")
    program = [sys.executable, "-P", "-m", "hvd_train", "fit", "-c", "a b.yaml"]
    mpi = start.command(2, "mpirun", ["fit", "-c", "a b.yaml"])
    assert mpi[-7:] == program
    assert mpi[mpi.index("--bind-to") + 1] == "none"  # a rank binds itself
    gloo = start.command(2, "horovodrun", ["fit"], program=["stub"])
    assert gloo == [sys.executable, "-P", "-m", "hvd_train.launch.ssh_starter", "-np", "2", "stub"]


def test_environment_keeps_what_the_user_set(monkeypatch):
    monkeypatch.setenv("OMPI_MCA_btl", "tcp,self")
    assert start.environment()["OMPI_MCA_btl"] == "tcp,self"
    assert {int(core) for core in start.environment()[CORES].split(",")} == os.sched_getaffinity(0)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT", raising=False)
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in start.environment()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert start.environment()["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


# ---- the end of a job: a shell stands for the launcher


@pytest.fixture
def job(monkeypatch):
    """Runs a shell script as the job; gives launch's result."""
    monkeypatch.setattr(Mpirun, "check", lambda self: None)

    def run(script):
        monkeypatch.setattr(Mpirun, "command", lambda *args: ["/bin/sh", "-c", script])
        return start.launch(2, "mpirun", [])

    return run


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 6, 75])
def test_exit_codes_pass(job, code):
    assert job(f"exit {code}") == code


@pytest.mark.parametrize("name", ["KILL", "SEGV", "ABRT"])
def test_a_rank_that_a_signal_ended_is_code_5(job, name):
    with pytest.raises(CommunicationError, match=f"a rank was ended by SIG{name}.*--resume auto") as caught:
        job(f"exit {128 + signal.Signals['SIG' + name]}")
    assert caught.value.exit_code == 5


def test_a_bus_error_says_how_full_shared_memory_is(job, monkeypatch):
    """Here of a folder that has 64 MB."""
    usage = SimpleNamespace(total=64_000_000, free=9_000_000)
    monkeypatch.setattr(base.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(CommunicationError, match=r"full \(on this host /dev/shm has 9 of 64 MB free; docker run --shm"):
        job(f"exit {128 + signal.SIGBUS}")
    assert base.named_signal(signal.SIGKILL) == "SIGKILL"


def test_nothing_of_the_job_is_left(job):
    line = ["sleep", f"600.{os.getpid()}"]  # no other test's
    assert job(f"{' '.join(line)} & exit 0") == 0
    until(lambda: line not in [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])])


OUTER = """
import os, sys
from hvd_train.launch.launchers.mpirun import Mpirun
from hvd_train.launch.start import launch
PROGRAM = f"trap 'exit {sys.argv[1]}' INT TERM USR1; echo $$; while :; do sleep 0.1; done"
Mpirun.check = lambda self: None
Mpirun.command = lambda *args: ["/bin/sh", "-c", PROGRAM]
sys.exit(launch(2, "mpirun", []))
"""


@pytest.mark.parametrize(
    ("number", "ranks", "code"),
    [
        (signal.SIGINT, 1, 130),
        (signal.SIGINT, 130, 130),
        (signal.SIGINT, 75, 130),
        (signal.SIGTERM, 1, 143),
        (signal.SIGTERM, 75, 75),  # they have saved
        (signal.SIGUSR1, 75, 75),
        (signal.SIGKILL, 1, -9),
    ],
)
def test_a_signal_ends_the_job(number, ranks, code):
    line = [sys.executable, "-c", textwrap.dedent(OUTER), str(ranks)]
    outer = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    inner = psutil.Process(int(outer.stdout.readline()))
    outer.send_signal(number)
    assert outer.wait(SECONDS) == code
    outer.stdout.close()
    until(lambda: not inner.is_running() or inner.status() == psutil.STATUS_ZOMBIE)


EARLY = """
import os, signal
from hvd_train.launch import process
pumps = process._pumps
process._pumps = lambda *given: os.kill(os.getpid(), signal.SIGTERM) or pumps(*given)
print(process.run(["sleep", "20"], os.environ)[:2])
"""


def test_a_signal_while_the_launcher_starts_ends_the_job():
    """Before the handler knows of it."""
    line = [sys.executable, "-c", EARLY]
    done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout == "(143, [15])\n"


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_ranks_outlive_the_reader_of_their_output(tmp_path, launcher):
    tool = tmp_path / launcher
    words = "a line of a rank, as long as a line of the log is"
    tool.write_text(f"#!/bin/sh\nfor k in $(seq 2000); do echo '{words}'; done\n")
    tool.chmod(0o755)
    program = f"from hvd_train.launch import process; print(process.run(['{tool}'], {{}})[0], file=open('code', 'w'))"
    line = f'{sys.executable} -c "{program}" | head -1'
    done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout == f"{words}\n" and done.stderr == ""
    assert (tmp_path / "code").read_text() == "0\n"


@pytest.mark.parametrize(("before", "sent", "lasts"), [("", "15", 2 * SECONDS), ("nohup ", "0", 1.5)])
def test_a_closed_terminal_ends_the_launcher_but_under_nohup(tmp_path, before, sent, lasts):
    """It gets SIGTERM, whose meaning it knows."""
    fake = "import signal, sys, time; signal.signal(15, lambda n, f: sys.exit(n)); print(flush=True); "
    fake += f"time.sleep({lasts})"
    program = "import sys; from hvd_train.launch import process; "
    program += f"sys.exit(process.run([sys.executable, '-c', {fake!r}], {{}})[0])"
    words = [*before.split(), sys.executable, "-c", program]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path) as started:
        started.stdout.readline()
        started.send_signal(signal.SIGHUP)
        assert started.wait(SECONDS) == int(sent)


@pytest.mark.parametrize(
    ("shown", "whose"),
    [
        ("HYDRA build details:\n    Version: 5.0.2", "MPICH"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9", "Intel MPI"),
    ],
)
def test_the_mpirun_of_another_mpi_is_not_taken(monkeypatch, tmp_path, shown, whose):
    """Its options are others: it ended with 255, and "look for a crash or too little memory"."""
    tool = tmp_path / "mpirun"
    tool.write_text(f"#!/bin/sh\necho '{shown}'\n")
    tool.chmod(0o755)
    monkeypatch.setattr(installed, "find_tool", lambda name: str(tool))
    monkeypatch.setattr(installed, "mpi_built", lambda: True)
    assert not Mpirun().usable()
    with pytest.raises(ConfigError, match=f"mpirun is {whose}'s, .* Open MPI's; --launcher mpirun; .*horovodrun"):
        Mpirun().check()
    tool.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.8'\n")
    installed.other_mpi.cache_clear()
    assert Mpirun().usable()
