"""``batch_size: auto``: a child process of each rank tries sizes, and all ranks take the same one.

A child, because a size that does not fit into memory ends a process; it trains alone, so the exchange is timed apart.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from hvd_train.checkpoint import store
from hvd_train.config import Config, resolved_yaml
from hvd_train.config.modes import EVERY_STEP
from hvd_train.core.agreement import collectively
from hvd_train.errors import CheckpointError, ConfigError
from hvd_train.jobs.connect import exchange_of
from hvd_train.jobs.job import Job
from hvd_train.jobs.resume import place
from hvd_train.jobs.trial import trial
from hvd_train.launch import logged
from hvd_train.launch.environment import threads, world
from hvd_train.launch.launchers.installed import python
from hvd_train.launch.process import end_with_parent
from hvd_train.protocol import Communicator, allgather_json, broadcast_json
from hvd_train.update import auto

AUTO = "auto"
FIRST = 8  # samples a rank, the smallest size that is tried
SECONDS, MOST_SECONDS = 30.0, 120.0  # of all sizes; until a child is ended
STEPS = 10  # that an epoch keeps at least
KNEE = 0.9  # of the most samples/s: the smallest size that reaches it is taken
LAUNCHED = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HOROVOD_", "SLURM_", "HVD_TRAIN_")  # variables that make a rank


class BatchSizer:
    """Chooses the size of ``batch_size: auto`` while a job is opened. ``tries``: sizes will be tried."""

    tries = False

    def begin(self, config: Config, communicator: Communicator, resume: str | None) -> Config:
        """Return the configuration with the size of the resumed run, or with the smallest one, to build the model."""
        if config.batch_size != AUTO:
            return config
        check(config)
        config = as_before(config, communicator, resume)
        self.tries = config.batch_size == AUTO
        return config.model_copy(update={"batch_size": FIRST}) if self.tries else config

    def finish(self, job: Job) -> Job:
        """Return the job with the best size."""
        return with_best(job)


def as_before(config: Config, communicator: Communicator, resume: str | None) -> Config:
    """Return the configuration with the size of the resumed run; unchanged if there is none. Rank 0 reads it."""
    size = 0
    if resume is not None and communicator.rank == 0:
        with suppress(CheckpointError, OSError):  # reported when the checkpoint is loaded
            before = store.config_of(place(config, resume)).get("batch_size")
            size = before if isinstance(before, int) else 0
    size = broadcast_json(communicator, size)
    return config.model_copy(update={"batch_size": size}) if size else config


def check(config: Config) -> None:
    """Raise ConfigError if sizes cannot be tried."""
    if config.parallel.pipeline > 1 or config.parallel.devices_per_rank > 1:
        what = "batch_size: auto tries the whole model on one device"
        raise ConfigError(what, where="parallel", fix="give the number of samples, as in batch_size: 32")


def with_best(job: Job) -> Job:
    """Try sizes, and return the job with the one that all ranks take. Raises ConfigError if none could be tried."""
    ranks = job.communicator
    most = len(job.data.train) // (STEPS * ranks.size * job.config.accumulate_grad_batches)

    def trying() -> tuple[Sequence[Sequence[float]], str]:
        try:
            with TemporaryDirectory(prefix="hvd-train-batch-") as name:
                return _tried(job.config, max(most, FIRST), Path(name))
        except OSError as error:
            what = f"batch_size: auto cannot write its files: {error.strerror}"
            raise ConfigError(what, where=gettempdir(), fix="make room, or give the number of samples") from error

    mine, problem = collectively(ranks, trying)
    tried = [{int(size): seconds for size, seconds in rows} for rows in allgather_json(ranks, mine)]
    common = sorted(set.intersection(*map(set, tried)))
    if not common:
        reason = next(filter(None, allgather_json(ranks, problem)), "ranks have tried no size in common")
        raise ConfigError(
            f"batch_size: auto could not try a size: {reason}", fix="give the number, as in batch_size: 32", common=True
        )
    exchange = 0.0
    if ranks.size > 1 and job.config.exchange.mode in EVERY_STEP:
        compression = job.config.exchange.compression
        chosen = exchange_of(job, "none" if compression == "auto" else compression)
        exchange = auto.fastest(chosen, job.frontend.specs())
    together = ranks.size * job.config.accumulate_grad_batches
    rates = {size: together * size / (max(one[size] for one in tried) + exchange) for size in common}
    size = knee(rates)
    note = f"batch_size: auto: {size} ({described(rates)})"
    config = job.config.model_copy(update={"batch_size": size})
    config.notes.append(note)
    return replace(job, config=config)


def knee(rates: Mapping[int, float]) -> int:
    """Return the smallest size that reaches KNEE of the most samples/s."""
    return min(size for size, rate in rates.items() if rate >= KNEE * max(rates.values()))


def described(rates: Mapping[int, float]) -> str:
    return "samples/s: " + ", ".join(f"{size}: {rate:,.0f}" for size, rate in rates.items())


def _tried(config: Config, most: int, folder: Path) -> tuple[Sequence[Sequence[float]], str]:
    """Run the child. Return rows of [size, seconds of a step], and why there is none."""
    file, output, log = (folder / name for name in ("trial.yaml", "sizes.json", "output.log"))
    alone = trial(config, threads(config.threads, world()), folder / "run")
    file.write_text(resolved_yaml(alone))
    line = [*python("hvd_train"), "calibrate", "-c", str(file), "--seconds", f"{SECONDS:g}", "-o", str(output)]
    code = logged.TOO_LONG
    with open(log, "w") as stream:
        child = subprocess.Popen(
            [*line, "--batches", str(most)],
            stdout=stream, stderr=stream, env=_alone(os.environ), start_new_session=True, preexec_fn=end_with_parent,
        )  # fmt: skip
        try:
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(MOST_SECONDS)
        finally:
            child.kill()
            child.wait()
    with suppress(OSError, ValueError):
        return json.loads(output.read_bytes()), ""
    if code == logged.TOO_LONG:
        return [], f"{MOST_SECONDS:.0f} s were too few for some steps of {FIRST} samples"
    return [], logged.reason(log, code)


def _alone(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that is no rank, and sees the GPU of this rank alone."""
    result = {name: value for name, value in environ.items() if not name.startswith(LAUNCHED)}
    visible, index = environ.get("CUDA_VISIBLE_DEVICES", "").split(","), world().local_rank
    if visible != [""] and index < len(visible):
        result["CUDA_VISIBLE_DEVICES"] = visible[index]
    elif visible == [""] and world().size > 1:
        result["CUDA_VISIBLE_DEVICES"] = str(index)
    return result
