"""A launched ``hvd-train fit``, its processes and its end, for tests of real launchers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hvd_train.launch.start import environment
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TINY = ROOT / "scripts" / "configs" / "tiny.yaml"
FRAMEWORKS = ["pytorch", "tensorflow"]
# name: (the words before "hvd-train fit", the words after it)
LAUNCHERS = {
    "-np": ([], ["-np", "2"]),
    "-np horovodrun": ([], ["-np", "2", "--launcher", "horovodrun"]),
    "mpirun": ([str(BIN / "mpirun"), "-np", "2"], []),
    "horovodrun": ([str(BIN / "horovodrun"), "-np", "2"], []),
    "horovodrun --mpi": ([str(BIN / "horovodrun"), "-np", "2", "--mpi"], []),
    "horovodrun --gloo": ([str(BIN / "horovodrun"), "-np", "2", "--gloo"], []),
}

SHARED: set[str] = set()  # files in memory of ranks that a test looked for, mostly to kill them

# What Open MPI prints for a rank that was reading from the memory of another one as that was killed.
READ = re.compile(r"^\[.*\] Read -1, expected \d+, errno = 3\n", re.MULTILINE)


class Job:
    """One launched ``hvd-train fit``; its processes carry a mark, its temporary files lie in a folder of its own."""

    def __init__(self, launcher: str, folder: Path, *arguments: str, **variables: str | None) -> None:
        before, after = LAUNCHERS[launcher]
        self.mark, self.temporary, self.folder = uuid.uuid4().hex, folder / f"tmp-{uuid.uuid4().hex[:6]}", folder
        self.temporary.mkdir(parents=True)
        # The variables that Open MPI wants under root, which -np sets by itself.
        own = environment() if before else dict(os.environ)
        own |= {"HVD_TRAIN_TEST": self.mark, "TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT)}
        own = {name: value for name, value in (own | variables).items() if value is not None}
        line = [*before, str(BIN / "hvd-train"), "fit", *after, "-c", str(TINY), *arguments]
        self.started = subprocess.Popen(
            line, cwd=folder, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("HVD_TRAIN_TEST") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def ranks(self) -> list[psutil.Process]:
        """The processes that train, by rank."""
        names = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")
        found = {}
        for process in self.processes():
            try:
                own, line, name = process.environ(), process.cmdline(), process.name()
            except psutil.Error:
                continue
            number = next((own[n] for n in names if n in own), None)
            if number is not None and "fit" in line and "sh" not in name:
                found[int(number)] = process
                with suppress(OSError):
                    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                    SHARED.update(line.split()[-1] for line in maps if "/dev/shm/" in line and "(deleted)" not in line)
        return [found[rank] for rank in sorted(found)]

    def stopped(self, rank: int) -> psutil.Process:
        """Wait until this rank stands by the fault ``stop``, and return its process."""
        found: list[psutil.Process] = []

        def stands() -> bool:
            found[:] = self.ranks()
            with suppress(IndexError, psutil.Error):
                return found[rank].status() == psutil.STATUS_STOPPED
            return False

        self.wait_for(stands)
        return found[rank]

    def end(self) -> tuple[int, str, str]:
        try:
            out, err = self.started.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            for process in self.processes():
                process.kill()
            out, err = self.started.communicate()
            pytest.fail(f"no end after {SECONDS} s:\n{out}\n{err}")
        stop = time.monotonic() + SECONDS
        while self.processes() and time.monotonic() < stop:
            time.sleep(0.1)
        left = self.processes()
        for process in left:
            process.kill()
        assert not left, f"left behind: {left}"
        return self.started.returncode, out, READ.sub("", err)

    def wait_for(self, ready) -> None:
        stop = time.monotonic() + SECONDS
        while not ready():
            assert self.started.poll() is None, self.started.communicate()
            if time.monotonic() > stop:
                for process in self.processes():
                    process.kill()
                pytest.fail(f"the job does not get there: {self.started.communicate()}")
            time.sleep(0.02)


EPOCHS = 25  # of 29 steps
LONG = ["optim.lr=0.01", f"max_epochs={EPOCHS}", "checkpoint.save_top_k=0"]
OFTEN = "checkpoint.every_n_steps=10"


def pending(process: psutil.Process, number: int) -> bool:
    """Return whether a process that is stopped has got a signal."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    (mask,) = re.findall(r"^ShdPnd:\s+(\w+)$", text, re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def cores_of_rank_0(folder: Path) -> int:
    return len(json.loads((folder / "environment.json").read_text())["cores_of_rank_0"])


def settings(folder: Path, *sets: str) -> list[str]:
    words = ["precision=64", "tensorboard=false", "log_every_n_steps=1", *sets]
    return ["--run-dir", str(folder), *(word for s in words for word in ("--set", s))]


def lines_of(folder: Path) -> int:
    """How many lines of results there are."""
    path = folder / "metrics.jsonl"
    return sum('"time"' not in line for line in path.read_text().splitlines()) if path.exists() else 0


def steps_taken(folder: Path) -> int:
    """How many steps were taken before the end."""
    return len([line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"train"' in line])
