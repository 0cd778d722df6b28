"""Run trials within one allocation: ranks are split into groups, and each free group takes the next trial.

The framework is loaded once, and Horovod is initialized once per group, over the group's part of MPI's world.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

from hvd_train.config.user_code import look_in
from hvd_train.data.catalog import open_data
from hvd_train.errors import ConfigError, Interrupted, TrainError
from hvd_train.frontends.mpi import Counter, can_meet, leave, mpi_world
from hvd_train.jobs.fit import locked_run_folder, train
from hvd_train.jobs.job import build_job
from hvd_train.launch.launchers import named
from hvd_train.launch.signals import SignalListener, listen
from hvd_train.launch.world import World
from hvd_train.protocol import Communicator
from hvd_train.run_folder.terminal import warn
from hvd_train.session import Session, failures_explained
from hvd_train.sweep.folder import LOG, Sweep, begin, fail
from hvd_train.sweep.halving import turn
from hvd_train.sweep.progress import live
from hvd_train.sweep.results import report
from hvd_train.sweep.trials import Trial

PATIENCE = 10.0  # seconds to wait for the other ranks after a trial failed on one


def open_ranks(trials: Sequence[Trial], each: int, here: World, verbose: bool) -> tuple[Session, Any]:
    """Load the framework and check that the ranks can be split into groups of ``each``; return (session, MPI world)."""
    if here.size % each:
        what = f"{here.size} ranks cannot be split into groups of {each}"
        raise ConfigError(what, where="--ranks-per-trial", fix="give a divisor of the number of ranks")
    config = trials[0].config
    # A process can load only one framework, once, with a fixed number of threads.
    for key in ("framework", "threads"):
        if len({getattr(trial.config, key) for trial in trials}) > 1:
            what = f"{key} differs between trials, and a process can have only one"
            raise ConfigError(what, where=f"--param {key}", fix="start a sweep for each")
    can_meet(here)
    # Load TensorFlow before MPI: both contain hwloc, and MPI crashes if it starts with its own copy and finds
    # TensorFlow's later.
    session = Session.prepare(config.framework, config.threads, verbose)
    return session, mpi_world(here)


def train_trials(sweep: Sweep, each: int, here: World, resume: bool, verbose: bool) -> NoReturn:
    """Run a sweep on groups of ``each`` ranks; rank 0 prints the results. Exits the process with the sweep's code."""
    session, mpi = open_ranks(sweep.trials, each, here, verbose)
    if mpi.rank == 0:
        begin(sweep, resume)
    mpi.Barrier()
    with nullcontext() if mpi.rank else live(sweep):
        code = run(sweep, each, here, session, mpi, listen())
    leave(code if here.rank else report(sweep, code))


def run(sweep: Sweep, each: int, here: World, session: Session, mpi: Any, listener: SignalListener) -> int:
    """Run the remaining trials. Returns 0, or the exit code of the signal that stopped the sweep."""
    part = mpi.Split(here.rank // each, here.rank)
    _set_group_environment(part, here)
    code, in_step = 0, True
    session.open(part)
    while not code and any(mpi.allgather(in_step)):
        todo, until = mpi.bcast(_turn(sweep) if mpi.rank == 0 else None)
        if not todo:
            break
        counter = Counter(mpi)
        # A group out of step takes no further trial: Horovod cannot be initialized twice in a process.
        while in_step and not code:
            # All groups share the counter, so a free group takes the next trial.
            k = part.bcast(counter.next() if part.rank == 0 else None)
            if k >= len(todo):
                break
            code, in_step = _run(sweep.trials[todo[k]], until, session, part, listener)
        counter.close()
        code = max(mpi.allgather(code))
    if in_step:
        session.communicator.close()
    return code


def _turn(sweep: Sweep) -> tuple[list[int], int | None]:
    trials, until = turn(sweep)
    return [trial.number for trial in trials], until


def _set_group_environment(part: Any, here: World) -> None:
    """Set the launcher's environment variables to the rank and size within the group; MPI has read them already."""
    os.environ.update(named(here.launcher).place(part.rank, part.size, part.rank, part.size))
    os.environ["HVD_TRAIN_TERMINAL"] = "0"  # a trial's output goes to a file


def _run(trial: Trial, until: int | None, session: Session, part: Any, listener: SignalListener) -> tuple[int, bool]:
    """Run one trial. Returns (0 or the code that stops the sweep, whether the group's ranks are still in step)."""
    run_dir, error = Path(trial.config.run_dir), None
    listener.reset()
    listener.run_dir = run_dir
    if part.rank == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / LOG if part.rank == 0 else os.devnull, "w") as log, redirect_stdout(log), redirect_stderr(log):
        try:
            with locked_run_folder(trial.config, "auto", False) as lock:
                look_in(trial.config.code_dir)
                data = open_data(trial.config.data, trial.config.task)
                with failures_explained(session.communicator):
                    job = build_job(trial.config, session, data)
                    train(job, "auto", (), False, lock, stop_source=listener, until=until)
        except Interrupted as caught:
            listener.ended = True
            return caught.exit_code, True
        except Exception as caught:
            error = caught
            warn(str(caught))
    listener.ended = True
    in_step = _wait_for_group(part, error is not None, session.communicator)
    failure = (type(error).__name__, str(error), getattr(error, "exit_code", 1)) if error else None
    results = part.allgather((failure, in_step))
    failures = [one for one, _ in results if one]
    if not failures:
        return 0, True
    # A rank that lost another one is not the cause.
    causes = [one for one in failures if one[0] != "LostRankError"] or failures
    if part.rank == 0:
        kind, text, code = causes[0]
        known = isinstance(error, TrainError) and type(error).__name__ == kind
        fail(trial, (text if known else f"{kind}: {text}").splitlines()[0][:300], code)
    return 0, all(kept for _, kept in results)


def _wait_for_group(part: Any, failed: bool, communicator: Communicator) -> bool:
    """Wait for all ranks of the group; return False if the communicator had to be closed.

    After a failure here, other ranks may hang in a collective. Closing the communicator ends it with an error there.
    """
    barrier, until = part.Ibarrier(), time.monotonic() + PATIENCE
    while not barrier.Test():
        time.sleep(0.01)
        if failed and time.monotonic() > until:
            communicator.close()
            barrier.Wait()
            return False
    return True
