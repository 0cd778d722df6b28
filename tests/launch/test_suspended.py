"""Ctrl-Z: the ranks stop with the process that started them, and go on with it."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hvd_train.launch.watchdog import state
from tests.limits import SECONDS, until

# A rank writes a byte every now and then, in a process of its own as well, until it is told to end.
RANK = """
import os, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
if len(sys.argv) < 3:
    subprocess.Popen([sys.executable, *sys.orig_argv[1:], "child"])
with open(folder / f"{os.getpid()}.count", "ab", 0) as file:
    while not (folder / "end").exists():
        file.write(b".")
        time.sleep(0.02)
"""
STARTER = """
import sys
from hvd_train.launch.start import launch
sys.exit(launch(2, sys.argv[1], [], program=[sys.executable, "-c", sys.argv[2], sys.argv[3]]))
"""
LOGGED = """
import os, pathlib, sys
from hvd_train.launch.logged import run
sys.exit(run([sys.executable, "-c", *sys.argv[1:]], os.environ, pathlib.Path(sys.argv[-1]) / "log"))
"""


def sizes(folder: Path) -> list[int]:
    return sorted(path.stat().st_size for path in folder.glob("*.count"))


def grow(folder: Path, before: list[int]) -> bool:
    return all(new > old for new, old in zip(sizes(folder), before, strict=True))


def check_stop_and_go(folder: Path, processes: int, stop, go_on) -> None:
    """``stop`` and ``go_on`` act on a job that has ``processes`` counters in the folder."""
    until(lambda: len(sizes(folder)) == processes and min(sizes(folder)) > 0)
    stop()
    until(lambda: (before := sizes(folder), time.sleep(0.5), before == sizes(folder))[2])
    before = sizes(folder)
    go_on()
    until(lambda: grow(folder, before))
    (folder / "end").touch()


@pytest.mark.parametrize(
    ("line", "processes"),
    [
        ([STARTER, "mpirun", RANK], 4),
        ([STARTER, "horovodrun", RANK], 4),
        ([LOGGED, RANK], 2),  # a trial of a sweep without ranks of its own
        ([LOGGED, STARTER, "horovodrun", RANK], 4),
    ],
)
def test_without_a_terminal(tmp_path, line, processes):
    job = subprocess.Popen([sys.executable, "-c", *line, str(tmp_path)], start_new_session=True)

    def stop():
        job.send_signal(signal.SIGTSTP)
        until(lambda: state(job.pid) == "T")

    check_stop_and_go(tmp_path, processes, stop, lambda: job.send_signal(signal.SIGCONT))
    assert job.wait(SECONDS) == 0


def test_at_a_terminal(tmp_path):
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv("/bin/bash", ["bash", "--norc", "-i"])
    shown = bytearray()

    def read() -> None:
        while select.select([terminal], [], [], SECONDS)[0]:
            try:
                shown.extend(os.read(terminal, 4096))
            except OSError:  # the shell has ended
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    (tmp_path / "job.py").write_text(f"import sys\nsys.argv[1:1] = ['horovodrun', {RANK!r}]\n{STARTER}")
    os.write(terminal, f"{sys.executable} {tmp_path}/job.py {tmp_path}; echo code $?\n".encode())

    def stop():
        os.write(terminal, b"\x1a")
        until(lambda: b"Stopped" in shown)

    check_stop_and_go(tmp_path, 4, stop, lambda: os.write(terminal, b"fg\n"))
    os.write(terminal, b"exit\n")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
