"""Train: lock the run folder, find the checkpoint to resume from, run the loop, print the start and the end."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hvd_train import faults
from hvd_train.checkpoint.store import Snapshot
from hvd_train.config import Config, leaves, resolved_yaml
from hvd_train.core import missed_averages
from hvd_train.core.agreement import collectively
from hvd_train.core.callbacks.advice import FewerRanksAdvice, OneThreadAdvice
from hvd_train.core.control_sync import StopSource
from hvd_train.core.hooks import Hook
from hvd_train.core.loop import Trainer
from hvd_train.errors import Interrupted
from hvd_train.frameworks import FRAMEWORKS
from hvd_train.jobs import messages
from hvd_train.jobs.batch_size import BatchSizer
from hvd_train.jobs.connect import connect, unfreeze
from hvd_train.jobs.job import Job, opened_job, versions
from hvd_train.jobs.probabilities import warn_of_probabilities
from hvd_train.jobs.resume import find_checkpoint
from hvd_train.jobs.user_hooks import hooks_of
from hvd_train.launch import job_folders, snapshots
from hvd_train.launch.environment import command_began, keep_memory, world
from hvd_train.launch.failed_rank import end_at_once
from hvd_train.launch.signals import SignalListener
from hvd_train.protocol import allgather_json, broadcast_json
from hvd_train.run_folder import layout
from hvd_train.run_folder.answering import FileWatch
from hvd_train.run_folder.lock import Lock
from hvd_train.run_folder.log import NullLog, RunLog
from hvd_train.run_folder.terminal import long_step
from hvd_train.run_folder.trackers import load
from hvd_train.run_folder.trackers.calls import Trackers
from hvd_train.run_folder.trackers.tracker import TrackedRun


def fit(
    config: Config,
    resume: str | None,
    allow_change: tuple[str, ...],
    overwrite: bool,
    verbose: bool,
    listener: SignalListener,
    until: int | None = None,
    quiet: bool = False,
) -> int:
    """Train, with a run folder on rank 0. Returns the exit code. ``quiet``: print only the last line."""
    code, listener.run_dir = 0, Path(config.run_dir)
    faults.arm(world().rank)
    opening = opened_job(config, verbose, resume, progress=not quiet, sizer=BatchSizer())
    with locked_run_folder(config, resume, overwrite) as lock, opening as job:
        if not listener.is_watched:
            listener.peer_slot = job.session.watch(config.watchdog_s, "--resume auto goes on")
        if lock:
            listener.last_calls.append(lock.release)
        listener.last_calls += [snapshots.remove_orphaned, job_folders.remove_orphaned]
        try:
            hooks = _rank_check(job)
            began = command_began()
            train(
                job, resume, allow_change, overwrite, lock, hooks,
                stop_source=listener, until=until, quiet=quiet, began=began,
            )  # fmt: skip
        except Interrupted as error:
            code = error.exit_code
        # Ignore signals from here on: ranks end one by one, and launchers send signals to the last ones.
        listener.finish(code)
    listener.report_end(code=code)
    return code


@contextmanager
def locked_run_folder(config: Config, resume: str | None, overwrite: bool) -> Iterator[Lock | None]:
    """Lock the run folder on rank 0 if this run may use it."""
    if world().rank:
        yield None
        return
    run_dir = Path(config.run_dir)
    with Lock(run_dir) as lock:
        layout.bring_back(run_dir)
        layout.check_free(run_dir, resume, overwrite)
        yield lock


def train(
    job: Job,
    resume: str | None = None,
    allow_change: Sequence[str] = (),
    overwrite: bool = False,
    lock: Lock | None = None,
    hooks: Sequence[Hook] = (),
    user_hooks: bool = False,
    stop_source: StopSource | None = None,
    until: int | None = None,
    quiet: bool = False,
    began: float | None = None,
) -> dict[str, Any]:
    """Train an opened job to its end or to epoch ``until``. Returns the summary, equal on all ranks.

    All ranks read and check everything before the run folder changes. ``user_hooks``: some ``hooks`` are the user's.
    ``began``: when the ranks' time began (seconds since 1970); None: now. Raises Interrupted.
    """
    began = began or time.time()
    config, communicator, run_dir = job.config, job.communicator, Path(job.config.run_dir)
    # Training from Python handles no signals, and must not end the user's process because of a file.
    log = _log_of(job, lock, quiet, FileWatch(config.watchdog_s, end_at_once if stop_source else None))

    def find() -> Snapshot | None:
        if communicator.rank:
            return None
        return find_checkpoint(config, job.data, resume, allow_change)

    with long_step("preparing the training", communicator.rank == 0 and not quiet):
        trackers = collectively(communicator, lambda: load(config.loggers if communicator.rank == 0 else []))
        # Before the weights, because with user hooks, which may change them, ranks must not share memory.
        of_config = collectively(communicator, lambda: hooks_of(config))
        snapshot = collectively(communicator, find)
        user_hooks = user_hooks or bool(of_config)
        update, compression = connect(job, _compression_of(job, snapshot), user_hooks, _phase_of(job, snapshot))
        data = job.data.train, job.data.val
        hooks = [*_thread_check(job), *hooks, *of_config]
        messages.warn_of_events(job, hooks)
        memory = snapshots.folder_of_rank()
        hosts = Counter(allgather_json(communicator, platform.node(), "host"))
        trainer = Trainer(
            config, job.frontend, update, *data, run_dir, log, compression, hooks, stop_source, until, memory
        )
        trainer.before_epoch = partial(unfreeze, job, user_hooks=user_hooks)
        trainer.time.add_start(time.time() - began)
        notes = trainer.restore(snapshot)
    too_rare = missed_averages.notes(config, trainer.schedule.total_steps, trainer.progress.step, trainer.limit)
    notes = [*config.notes, *trainer.schedule.notes(), *too_rare, *notes]
    if resume == "auto" and snapshot is None:
        notes = [f"note: --resume auto found no checkpoint in {run_dir}: the run begins anew", *notes]
    start = [messages.start(job, trainer, snapshot), *notes, *filter(None, [trainer.complete])]
    log.message("\n".join(start))
    if communicator.rank == 0 and ":" in config.model.name and not job.session.links:
        warn_of_probabilities(job, log)
    keeps_memory = keep_memory()  # not before, so that memory freed during setup returns to the kernel
    if isinstance(log, RunLog):
        log.trackers = Trackers(trackers, TrackedRun(run_dir, dict(leaves(config.resolved().model_dump(mode="json")))))
        log.files, log.began = _files(job, compression, keeps_memory, hosts), began
        log.resumed_at = None if resume is None else trainer.progress.step
        log.evaluates_again = trainer.progress.ending
        log.replace = overwrite and not layout.goes_on(run_dir, resume)
    faults.at("start")
    summary = _run(trainer, log)
    if communicator.rank == 0:
        with log.watch.at(run_dir):
            text = messages.end(summary, config)
        for words in filter(None, [messages.time_of(summary), messages.energy_of(summary)]):
            log.message(words)
        log.last_message(text)
    log.close()
    return summary


def _log_of(job: Job, lock: Lock | None, quiet: bool, watch: FileWatch) -> RunLog | NullLog:
    config = job.config
    if job.communicator.rank:
        return NullLog()
    events = config.tensorboard or "tensorboard" in config.loggers
    return RunLog(
        Path(config.run_dir),
        tensorboard=events,
        total_epochs=config.max_epochs,
        lock=lock,
        quiet=quiet,
        watch=watch,
    )


def _run(trainer: Trainer, log: RunLog | NullLog) -> dict[str, Any]:
    """Train, and write the end of the run. Returns the summary. Raises Interrupted."""
    communicator = trainer.communicator
    log.waits_for("the first step")
    try:
        summary = trainer.fit()
    except Interrupted as error:
        log.last_message(str(error))
        collectively(communicator, lambda: log.close(trainer.progress.step))
        trainer.close()
        raise
    except Exception:
        log.failed()
        raise
    collectively(communicator, lambda: log.summary(summary))
    trainer.close()
    return summary


def _compression_of(job: Job, snapshot: Snapshot | None) -> str:
    """Return the compression to use, on all ranks. Rank 0 has the snapshot."""
    compression: str = job.config.exchange.compression
    # ``auto`` keeps the run's first choice, because a new measurement could choose another one.
    if snapshot and compression == "auto":
        compression = snapshot.meta["compression"]
    return broadcast_json(job.communicator, compression)


def _phase_of(job: Job, snapshot: Snapshot | None) -> int:
    """Return the epoch since which the snapshot's trained weights have been the same (optim.groups). Rank 0 has the
    snapshot."""
    phase = snapshot.progress.phase if snapshot else 0
    return broadcast_json(job.communicator, phase)


def _rank_check(job: Job) -> list[Hook]:
    """Return the hook that checks whether fewer ranks are faster, if all use the cores of one host."""
    communicator = job.communicator
    one_host = communicator.size == communicator.local_size
    several = communicator.size > 1 and not job.session.links  # pipeline stages are used to save memory
    return [FewerRanksAdvice(job.session.threads)] if _device(job) == "cpu" and one_host and several else []


def _device(job: Job) -> str:
    """Return what computes: cpu or cuda."""
    device = job.config.device
    return ("cuda" if job.session.module.gpus() else "cpu") if device == "auto" else device


def _files(job: Job, compression: str, keeps_memory: bool, hosts: Mapping[str, int]) -> dict[str, Any]:
    """Return the files written at the start of a run: configuration, environment, vocabulary.

    ``hosts``: the number of ranks of each, in rank order.
    """
    environment = {"versions": versions(job.config), **job.session.settings}
    environment |= {
        "device": _device(job),
        "hosts": hosts,
        "compression": compression,
        "keeps_freed_memory": keeps_memory,
    }
    files: dict[str, Any] = {"config.yaml": resolved_yaml(job.config.resolved()), "environment.json": environment}
    if job.data.vocabulary:
        files[layout.VOCABULARY] = job.data.vocabulary
    return files


def _thread_check(job: Job) -> list[Hook]:
    """Return the hook that checks whether one thread is faster, if ``auto`` chose several."""
    threads = job.session.settings.get("threads", 1)
    by = job.session.settings.get("environment", {}).get("OMP_NUM_THREADS", {}).get("chosen_by")
    chosen = job.config.threads == "auto" and by == "hvd_train" and job.config.device != "cuda"
    alone = job.communicator.size == 1 and threads > 1 and FRAMEWORKS[job.config.framework].threads_wait
    return [OneThreadAdvice(threads)] if chosen and alone else []
