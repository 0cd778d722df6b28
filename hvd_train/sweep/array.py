"""Run a sweep as a Slurm job array: one batch script, with a task for each trial.

The configurations of all trials are written to the sweep's folder before the job is submitted, so all tasks use the
same plan, whenever they start. The last task to end writes the results.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from hvd_train.errors import ConfigError
from hvd_train.launch import logged
from hvd_train.launch import submit as jobs
from hvd_train.run_folder.terminal import say
from hvd_train.sweep.folder import CONFIG, LOG, PLAN, Sweep, begin, fail, load, state
from hvd_train.sweep.results import finish, left
from hvd_train.sweep.rungs import ladder
from hvd_train.sweep.trials import Trial

TRIAL = jobs.Shell('"$trial"')
WORDS = ("fit", "-c", jobs.Shell(f"{TRIAL}/{CONFIG}"), "--resume", "auto")


def of(folder: Path, trials: Sequence[Trial], repeats: Sequence[str] = ()) -> Sweep:
    """Make a sweep without rungs, because the tasks of a job array do not wait for one another."""
    return Sweep(folder, trials, ladder(trials, None), repeats)


def options(sweep: Sweep, at_once: int | None) -> dict[str, str]:
    """Return the options for sbatch: a task for each trial that is not done, at most ``at_once`` at a time.

    Each task logs to the folder of its trial.
    """
    numbers = [trial.number for trial in sweep.trials if state(sweep, trial).word != "done"]
    if not numbers:
        raise ConfigError("all trials are done", where=str(sweep.folder), fix="see hvd-train sweep --collect")
    first, last = numbers[0], numbers[-1]
    listed = f"{first}-{last}" if len(numbers) == last - first + 1 > 1 else ",".join(map(str, numbers))
    output = f"{str(sweep.folder).replace('%', '%%')}/trial-%3a/{LOG}"
    return {"array": f"{listed}%{at_once}" if at_once else listed, "output": output}


def line(folder: Path) -> str:
    """Return the line of the batch script that sets ``$trial``, the folder of the task's trial."""
    return f'trial={shlex.quote(str(folder))}/trial-$(printf %03d "$SLURM_ARRAY_TASK_ID")'


def script(batch: jobs.BatchJob, sweep: Sweep, at_once: int | None) -> str:
    """Return the batch script, which is the same for all tasks."""
    return batch.script(
        batch.hvd_train(WORDS),
        run_dir=TRIAL,
        options=options(sweep, at_once),
        first=[line(sweep.folder)],
        then=[[*jobs.HERE, "ended", TRIAL]],
    )


def submit(sweep: Sweep, text: str, resume: bool) -> str:
    """Submit the job and return its id. If Slurm refuses it, remove the plan again."""
    # Before submitting, because the first task may start at once and read the plan.
    begin(sweep, resume)
    try:
        return jobs.submit(text)
    except ConfigError:
        if not resume:
            (sweep.folder / PLAN).unlink()
        raise


def ended(run_dir: Path, code: int) -> int:
    """Record that the ranks of a task exited with ``code``, and return the exit code of the task."""
    sweep = load(run_dir.parent)
    trial = next(trial for trial in sweep.trials if trial.name == run_dir.name)
    if code not in logged.STOPPED and state(sweep, trial).word != "done":
        fail(trial, logged.reason(run_dir / LOG, code), code)
    # The last task finds nothing left, and writes the results.
    if not left(sweep):
        say(finish(sweep), styled=True)
    return code
