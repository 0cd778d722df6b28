"""Train briefly, and write step times, bytes sent by a rank, and its memory."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hvd_train import files
from hvd_train.config import Config
from hvd_train.core.hooks import Hook, StepInfo
from hvd_train.core.training import Training
from hvd_train.frontends.traffic import Traffic
from hvd_train.jobs.fit import train
from hvd_train.jobs.job import opened_job

WARM = 0.25  # share of the samples at the beginning, when graphs are traced and buffers allocated


class Mark(NamedTuple):
    """The progress of a training at a log line: samples and steps of all ranks, seconds, bytes sent by this rank."""

    samples: int
    step: int
    seconds: float
    sent: float


class Meter(Hook):
    """Measures a training between log lines. Rank 0 writes the figures of all ranks to ``output``.

    ``seconds``: time limit of the training, 0: none.
    """

    def __init__(self, traffic: Traffic, seconds: float, output: Path) -> None:
        self._traffic, self._seconds, self._output = traffic, seconds, output
        self._samples = 0
        self._marks: list[Mark] = []
        self._ends: list[float] = []  # of all steps, seconds

    def on_step(self, trainer: Training, info: StepInfo) -> None:
        self._samples += info.batch.count
        self._ends.append(time.perf_counter())
        if not info.log_due:
            return
        self._marks.append(Mark(self._samples, trainer.progress.step, time.perf_counter(), self._traffic.total()))
        if self._seconds and self._marks[-1].seconds - self._marks[0].seconds >= self._seconds:
            trainer.stop(f"{self._seconds:g} s have passed")

    def on_end(self, trainer: Training, summary: Mapping[str, Any]) -> None:
        samples, steps, seconds, sent = (end - begin for begin, end in zip(self._warm(), self._marks[-1], strict=True))
        durations = self._durations() or [0.0]
        local = {
            "sent": sent / max(steps, 1),
            "memory": _peak_bytes(),
            "gpu_memory": trainer.frontend.peak_device_bytes(),
            "median_ms": 1000 * median(durations),
            "longest_ms": 1000 * max(durations),
        }
        parts = trainer.communicator.gather_bytes(json.dumps(local).encode())
        if trainer.communicator.rank == 0:
            ranks = [json.loads(part) for part in parts]
            figures = {name: max(rank[name] for rank in ranks) for name in local}
            # None: the training ended during the warm-up.
            figures |= (
                {"ms": 1000 * seconds / steps, "seconds_per_sample": seconds / samples} if steps else {"ms": None}
            )
            files.put(self._output, json.dumps(figures).encode())

    def _durations(self) -> list[float]:
        """Return the seconds of each measured step; steps of one call share the call's time."""
        ends = [end for end in self._ends if self._warm().seconds <= end <= self._marks[-1].seconds]
        return [end - begin for begin, end in pairwise(ends)]

    def _warm(self) -> Mark:
        """Return the first mark after the warm-up."""
        return next((mark for mark in self._marks[:-1] if mark.samples >= WARM * self._samples), self._marks[0])


def _peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(config: Config, seconds: float, output: Path, verbose: bool) -> int:
    """Train on all ranks, and write the figures to ``output``. Returns the exit code."""
    with opened_job(config, verbose, metered=True) as job:
        assert job.session.traffic is not None
        train(job, hooks=[Meter(job.session.traffic, seconds, output)])
    return 0
