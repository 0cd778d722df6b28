"""Measure on some ranks what ``hvd-train plan`` predicts from: steps, the exchange alone, the loader alone."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from hvd_train import files
from hvd_train.config import Config, load_config
from hvd_train.core.hooks import Epoch, Hook, StepInfo
from hvd_train.core.training import Training
from hvd_train.jobs.connect import exchange_of
from hvd_train.jobs.fit import train
from hvd_train.jobs.job import Job, opened_job
from hvd_train.launch.environment import world
from hvd_train.protocol import Communicator, broadcast_json
from hvd_train.update import auto
from hvd_train.update.exchange import Exchange

WARM = 0.3  # share of the time at the beginning, when graphs are traced and buffers allocated
LEAST_CALLS, LONGEST = 4, 4.0  # calls to measure, unless they take so many times the seconds that were asked for
SIZES, SIZE_SECONDS = 8, 1.0  # of batches: the smallest, and the time for each
FLAT, FASTER = 2, 1.03  # so many larger sizes must be so much faster to go on
TURNS = 40  # of an exchange alone, at most
SHARES = {"other batch": 0.4, "exchange": 0.25, "input": 0.1, "compressors": 0.5}  # of the seconds, for each part


class Recorder(Hook):
    """Records calls of steps for some seconds, then ends the training on all ranks.

    Calls that trace a graph, the first of each number of steps and the first part of the time are left out.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._began = seconds, 0.0  # when the first call ended
        self._rows: list[tuple[float, list[float]]] = []  # (when it ended, as ``calls``)
        self._lengths: set[int] = set()
        self._steps, self._traced = 0, 0
        self._last, self._waited = 0.0, 0.0  # the end of the last call, and the seconds waited until then

    def on_start(self, trainer: Training) -> None:
        self._last, self._waited = time.perf_counter(), trainer.frontend.waited(False)

    def on_step(self, trainer: Training, info: StepInfo) -> None:
        self._steps += 1
        if not trainer.frontend.queued:
            self._end_call(trainer.frontend.waited(True), trainer.frontend.traced)
        if info.due.sync and self._began:
            # Ranks sync at the same steps, so all of them leave after the same.
            passed = time.perf_counter() - self._began
            over = passed > self._seconds and (len(self.calls) >= LEAST_CALLS or passed > LONGEST * self._seconds)
            trainer.progress.stopped = broadcast_json(trainer.communicator, over)

    def _end_call(self, waited: float, traced: int) -> None:
        now = time.perf_counter()
        if self._steps in self._lengths and traced == self._traced:
            row = [self._steps, (now - self._last) / self._steps, (waited - self._waited) / self._steps]
            self._rows.append((now, row))
        self._lengths.add(self._steps)
        self._began = self._began or now
        self._last, self._waited, self._steps, self._traced = now, waited, 0, traced

    def on_epoch_end(self, trainer: Training, epoch: Epoch) -> None:
        # The evaluation belongs to no step.
        self._last, self._waited = time.perf_counter(), trainer.frontend.waited(True)

    @property
    def calls(self) -> list[list[float]]:
        """Return [steps, seconds of a step, of these waiting for transfers] of each call after the warm-up."""
        warm = self._began + WARM * (time.perf_counter() - self._began)
        return [row for end, row in self._rows if end > warm] or [row for _, row in self._rows[-1:]]


def calibrate(config: Config, seconds: float, output: Path, verbose: bool) -> int:
    """Measure for about ``seconds`` on all ranks, and write the figures to ``output``. Returns the exit code.

    The file is written after each part, so that what was measured is there if a later part fails.
    """
    with opened_job(config, verbose, metered=world().size > 1) as job:
        gpus = job.session.module.gpus() if config.device != "cpu" else 0
        figures: dict[str, Any] = {"samples": len(job.data.train), "ranks": job.communicator.size, "gpus": gpus}

        def write(more: Mapping[str, Any]) -> None:
            figures.update(more)
            if job.communicator.rank == 0:
                files.put(output, json.dumps(figures).encode())

        write({"batch": job.config.global_batch(job.communicator.size), "calls": _steps(job, seconds)})
        if job.communicator.size > 1:
            write(_exchange_alone(job, SHARES["exchange"] * seconds))
        if other := _other_batch(job):
            batch = other.config.global_batch(job.communicator.size)
            write({"other": [batch, _steps(other, SHARES["other batch"] * seconds)]})
        write({"input": _input(job, SHARES["input"] * seconds)})
        if job.communicator.size > 1:
            write({"compressors": _compressors(job, SHARES["compressors"] * seconds)})
    return 0


def batches(config: Config, most: int, seconds: float, output: Path, verbose: bool) -> int:
    """Take steps of 8, 16, ... ``most`` samples on one rank; write rows of [size, seconds of a step] to ``output``.

    The file is written after each size, since one may need too much memory. It ends once larger sizes are no faster.
    """
    data, rows, began = config.model_dump(mode="json"), list[list[float]](), time.monotonic()
    with opened_job(load_config(base=data | {"batch_size": SIZES}), verbose) as job:
        size, accumulate = SIZES, config.accumulate_grad_batches
        while size <= most and time.monotonic() - began < seconds:
            sized = replace(job, config=load_config(base=data | {"batch_size": size}))
            steps, taken, _ = np.array(_steps(sized, SIZE_SECONDS)[0]).T
            rows.append([size, float(np.average(taken, weights=steps))])
            files.put(output, json.dumps(rows).encode())
            rates = [accumulate * n / taken for n, taken in rows]
            if len(rows) > FLAT and max(rates[-FLAT:]) < FASTER * max(rates[:-FLAT]):
                break
            size *= 2
    return 0


def _steps(job: Job, seconds: float) -> list[list[Any]]:
    """Train for some seconds; return ``Recorder.calls`` of each rank, cut to the same number of calls."""
    recorder = Recorder(seconds)
    train(job, overwrite=True, hooks=[recorder], quiet=True)
    parts = job.communicator.allgather_bytes(json.dumps(recorder.calls).encode(), "calls")
    calls = [json.loads(part) for part in parts]
    shortest = min(map(len, calls))
    return [rows[len(rows) - shortest :] for rows in calls]


def _other_batch(job: Job) -> Job | None:
    """Return the job with half the samples a step; None if they do not divide among the ranks and micro-batches."""
    config, size = job.config, job.communicator.size
    together = config.global_batch(size)
    if together % (2 * size * config.micro_batches):
        return None
    data = config.model_dump(mode="json") | {"batch_size": None, "global_batch_size": together // 2}
    return replace(job, config=load_config(base=data))


def _exchange_alone(job: Job, seconds: float) -> dict[str, Any]:
    """Time exchanges of the job's buckets, and of one number in place of each."""
    return _timed_exchanges(exchange_of(job, _compression(job)), job, seconds)


def _compression(job: Job) -> str:
    name = job.config.exchange.compression
    return "none" if name == "auto" else name


def _timed_exchanges(exchange: Exchange, job: Job, seconds: float) -> dict[str, Any]:
    frontend, ranks = job.frontend, job.frontend.groups.data
    gradients = auto.random_gradients(exchange, frontend.specs())
    states = [tuple(map(frontend.ops.from_numpy, arrays)) for arrays in exchange.init_state()]

    def whole(*flats: Any) -> Any:
        return exchange.reduce(list(flats), states)[0]

    def nothing(*flats: Any) -> Any:
        handles = [ranks.allreduce_async(x, f"empty{k}") for k, x in enumerate(flats)]
        return [ranks.synchronize(handle) for handle in handles]

    numbers = [frontend.ops.from_numpy(np.zeros(1, np.float32)) for _ in gradients]
    ops = frontend.ops
    return {
        "exchange": timed(frontend.compiled(whole), gradients, ranks, ops, seconds / 2),
        "empty": timed(frontend.compiled(nothing), numbers, ranks, ops, seconds / 2),
        "sent": _sent(job, exchange, gradients, states),
        "messages": len(gradients),
    }


def _sent(job: Job, exchange: Exchange, gradients: Sequence[Any], states: Sequence[Any]) -> float:
    """Return the bytes that this rank sends in an exchange."""
    traffic = job.session.traffic
    assert traffic is not None
    before = traffic.total()
    exchange.reduce([g + 0 for g in gradients], states)
    return traffic.total() - before


def timed(
    call: Callable[..., Any], tensors: Sequence[Any], ranks: Communicator, ops: Any, seconds: float
) -> list[float]:
    """Call several times, and return the seconds of each, as the mean over ranks. The first call is left out."""
    times: list[float] = []
    began = time.perf_counter()
    for turn in range(TURNS):
        copies = [x + 0 for x in tensors]  # an exchange may reduce in place
        ranks.barrier()
        start = time.perf_counter()
        for flat in call(*copies):
            ops.to_numpy(flat[:1])  # a GPU works asynchronously
        took = time.perf_counter() - start
        if turn:
            times.append(took)
        over = turn > 1 and time.perf_counter() - began > seconds
        if broadcast_json(ranks, over):
            break
    parts = [json.loads(part) for part in ranks.allgather_bytes(json.dumps(times).encode(), "times")]
    return [fmean(column) for column in zip(*parts, strict=True)]


def _input(job: Job, seconds: float) -> float:
    """Return the seconds of a batch of the loader alone, while no rank computes."""
    job.communicator.barrier()
    count, began = 0, time.perf_counter()
    with closing(job.loader("train").epoch(0)) as steps:
        for _ in steps:
            count += 1
            if time.perf_counter() - began > seconds:
                break
    return (time.perf_counter() - began) / count


def _compressors(job: Job, seconds: float) -> dict[str, list[float]]:
    """Return {compressor: [seconds of an exchange, bytes that a rank sends]} of those that ``auto`` may choose."""
    found: dict[str, list[float]] = {}
    ranks, specs, began = job.frontend.groups.data, job.frontend.specs(), time.perf_counter()
    for name in auto.CANDIDATES:
        if broadcast_json(ranks, time.perf_counter() - began > seconds):
            break
        exchange = exchange_of(job, name)
        fastest = auto.fastest(exchange, specs)
        gradients = auto.random_gradients(exchange, specs)
        states = [tuple(map(job.frontend.ops.from_numpy, arrays)) for arrays in exchange.init_state()]
        found[name] = [fastest, _sent(job, exchange, gradients, states)]
    return found


def rehearse(config: Config, own: Sequence[float], seconds: float, output: Path, verbose: bool) -> int:
    """Take steps that sleep instead of computing, and exchange for real; write their seconds to ``output``.

    ``own``: seconds of steps without waiting, of which each rank draws its own. A rank that sleeps needs no core.
    """
    with opened_job(config, verbose) as job:
        ranks, frontend = job.frontend.groups.data, job.frontend
        exchange = exchange_of(job, _compression(job))
        gradients = auto.random_gradients(exchange, frontend.specs())
        states = [tuple(map(frontend.ops.from_numpy, arrays)) for arrays in exchange.init_state()]
        reduce = frontend.compiled(lambda *flats: exchange.reduce(list(flats), states)[0])
        draw = random.Random(job.communicator.rank)
        ends: list[float] = []
        while True:
            time.sleep(draw.choice(own))
            for flat in reduce(*[g + 0 for g in gradients]):
                frontend.ops.to_numpy(flat[:1])
            ends.append(time.perf_counter())
            passed, steps = ends[-1] - ends[0], len(ends)
            # At steps that all ranks know, because asking takes time.
            if steps & (steps - 1) == 0 and broadcast_json(ranks, passed > seconds / 2):
                break
        taken = np.diff(ends[1:]).tolist() or np.diff(ends).tolist()
        if job.communicator.rank == 0:
            files.put(output, json.dumps({"steps": taken}).encode())
    return 0
