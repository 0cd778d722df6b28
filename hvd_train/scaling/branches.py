"""Does a larger batch pay? Trainings that branch off from one checkpoint, with larger batches over the same samples.

The largest batch whose loss recovers is worth its ranks (branched training: Merrill et al. 2025, arXiv 2505.23971).
The learning rate of the checkpoint grows with the batch: linearly with SGD, else with the square root.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_train.checkpoint import store
from hvd_train.config import Config, changed, load_config
from hvd_train.config.schedules import SCHEDULES
from hvd_train.errors import CheckpointError, ConfigError, amount
from hvd_train.files import put
from hvd_train.launch import logged
from hvd_train.report.text_tables import table
from hvd_train.run_folder import layout, metrics_file, safe_reading
from hvd_train.scaling.study import discard, prepare
from hvd_train.sweep.folder import LOG
from hvd_train.sweep.local import fit
from hvd_train.sweep.trials import Trial

CSV = "branches.csv"
STEPS = 200  # of the branch with the batch as it is, unless --samples says otherwise
FEWEST = 10  # steps of the largest batch
RECOVERS = 1.01  # times the loss with the batch as it is
LINEAR = ("sgd",)  # optimizers whose rate grows linearly with the batch (Goyal et al. 2017, arXiv 1706.02677)


@dataclass(frozen=True)
class Branches:
    """The branches of a checkpoint: ``times`` its global batch ``batch`` on ``ranks``, over ``samples`` more samples.

    ``rate``: the learning rate at the checkpoint. ``step``: its steps. ``before``: its configuration.
    """

    folder: Path
    checkpoint: Path
    before: Config
    config: Config
    ranks: int
    times: Sequence[int]
    samples: int
    batch: int
    rate: float
    step: int

    def rate_of(self, times: int) -> float:
        """Return the learning rate of a branch."""
        linear = self.config.optim.name in LINEAR and not self.config.optim.is_users
        return self.rate * (times if linear else math.sqrt(times))

    def steps_of(self, times: int) -> int:
        return self.samples // (times * self.batch)

    def trial(self, times: int) -> Trial:
        """Return the training of a branch. Raises ConfigError."""
        data = self.config.model_dump(mode="json")
        data |= {"batch_size": None, "global_batch_size": times * self.batch}
        data |= {"max_steps": self.step + self.steps_of(times), "max_epochs": None, "early_stopping": None, "swa": None}
        data |= {"tensorboard": False, "loggers": [], "run_dir": str(self.folder / f"batch-{times}x")}
        of_schedules = {option for row in SCHEDULES.values() for option in row.options}
        optim = {key: value for key, value in data["optim"].items() if key not in of_schedules}
        optim |= {"lr": self.rate_of(times), "schedule": "constant", "lr_scaling": "none", "lr_reference_batch": None}
        data["optim"] = optim | {"warmup_steps": 0, "warmup_epochs": 0, "plateau": None}
        data["checkpoint"] |= {"every_n_epochs": 0, "every_n_steps": 0, "snapshot_every_n_steps": 0, "save_top_k": 0}
        data["checkpoint"] |= {"save_last": False}
        return Trial(times, {"batch": f"{times}x"}, load_config(base=data))

    def words(self, trial: Trial) -> list[str]:
        """Return the options of ``fit`` that go on from the checkpoint with a branch's configuration."""
        keys = [word for key, _, _ in changed(self.before, trial.config) for word in ("--allow-change", key)]
        return ["--resume", str(self.checkpoint), *keys]


@dataclass(frozen=True)
class Branch:
    """What became of a branch. ``seconds``: of its steps that count; ``problem``: why it failed."""

    times: int
    batch: int
    rate: float
    steps: int
    loss: float | None = None
    seconds: float | None = None
    problem: str = ""


def opened(
    folder: Path,
    checkpoint: Path,
    path: Path | None,
    sets: Sequence[str],
    ranks: int,
    batches: str,
    samples: int | None,
) -> Branches:
    """Read the checkpoint (or the newest one of a run folder), and check what is asked. Raises ConfigError."""
    times = parse_times(batches)
    if (checkpoint / "checkpoints").is_dir():
        checkpoint = store.newest_readable(checkpoint / "checkpoints")
    before = load_config(base=store.config_of(checkpoint))
    config = load_config(path, sets) if path else load_config(base=store.config_of(checkpoint), sets=sets)
    batch = config.global_batch(config.replicas(ranks))
    samples = samples or STEPS * batch
    if samples < FEWEST * times[-1] * batch:
        what = f"{samples:,} samples are fewer than {FEWEST} steps of {times[-1]} x {batch}"
        raise ConfigError(what, where="--samples", fix=f"give {FEWEST * times[-1] * batch:,} or more")
    # Equal for all, so that each takes whole steps.
    unit = math.lcm(*times) * batch
    step = store.read(checkpoint)[0].step
    rate = rate_at(checkpoint.parents[1], step) or config.optim.lr
    return Branches(folder, checkpoint, before, config, ranks, times, -(-samples // unit) * unit, batch, rate, step)


def parse_times(text: str) -> list[int]:
    """Parse ``1x,2x,4x``; 1 is always among them. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not re.fullmatch("[1-9][0-9]{0,3}x", word):
            what = f"{word!r} is no multiple of the batch"
            raise ConfigError(what, where=f"--batch {text}", fix="list them, as in --batch 1x,2x,4x")
    return sorted({1, *(int(word[:-1]) for word in words)})


def rate_at(run_dir: Path, step: int) -> float | None:
    """Return the learning rate that the run logged last, up to a step; None: not known."""
    try:
        rows, _ = metrics_file.read(run_dir)
    except (CheckpointError, OSError):
        return None
    rates = [row["lr"] for row in rows if row["event"] == "train" and row["step"] <= step and "lr" in row]
    return next((rate for rate in reversed(rates) if safe_reading.number(rate) and rate > 0), None)


def measure(branches: Branches, starting: Sequence[str], report: Callable[[str], None]) -> tuple[list[Branch], int]:
    """Train the branches that have not ended; return what became of all, and 0 or the exit code of a signal.

    ``starting``: options of ``fit`` that start the ranks. ``report`` gets a line for each branch.
    """
    found: list[Branch] = []
    for times in branches.times:
        trial = branches.trial(times)
        run_dir = Path(trial.config.run_dir)
        if not (run_dir / layout.SUMMARY).exists():
            discard(trial)
            prepare(trial)
            code = fit(trial, [*branches.words(trial), *starting])
            if code in logged.STOPPED:
                return found, code
        one = read(branches, times, run_dir)
        found.append(one)
        told = f"failed: {one.problem}" if one.loss is None else f"{amount(one.steps, 'step')}, val loss {one.loss:.4f}"
        report(f"batch {one.batch:,}: {told}")
    return found, 0


def read(branches: Branches, times: int, run_dir: Path) -> Branch:
    """Return what became of a branch."""
    about = times, times * branches.batch, branches.rate_of(times), branches.steps_of(times)
    try:
        summary = safe_reading.json_object(run_dir / layout.SUMMARY)
        loss, seconds = summary["val_loss"], summary["time"]
        if not safe_reading.number(loss):
            return Branch(*about, problem="its loss is no number")
        return Branch(*about, float(loss), float(seconds["effective"]) * float(seconds["allocation"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Branch(*about, problem=logged.reason(run_dir / LOG, 1))


def largest(found: Sequence[Branch]) -> Branch | None:
    """Return the largest batch whose loss recovers, as do those of all smaller ones; None: nothing to compare."""
    if not found or found[0].loss is None:
        return None
    best = found[0]
    for one in found[1:]:
        if one.loss is None or one.loss > RECOVERS * found[0].loss:
            break
        best = one
    return best


def text(branches: Branches, found: Sequence[Branch]) -> str:
    """Return the table of the branches, and what it says."""
    header = ["batch", "learning rate", "steps", "val loss", "difference", "seconds of steps"]
    rows, base = [], found[0].loss if found else None
    for one in found:
        loss = "-" if one.loss is None else f"{one.loss:.4f}"
        difference = "-" if one.loss is None or not base else f"{100 * (one.loss / base - 1):+.2f} %"
        seconds = "-" if one.seconds is None else f"{one.seconds:.1f}"
        rows.append([f"{one.batch:,} ({one.times}x)", f"{one.rate:.4g}", one.steps, loss, difference, seconds])
    lines = [f"from step {branches.step}, over {branches.samples:,} samples", "", table(header, rows), ""]
    lines += [f"batch {one.batch:,} failed: {one.problem}" for one in found if one.problem]
    best = largest(found)
    if best is None:
        lines.append("Nothing can be said, because the batch as it is has no loss.")
    elif best.times == 1:
        lines.append(
            f"A larger batch than {best.batch:,} does not pay: no loss comes within 1 % after as many samples."
        )
    else:
        more = f" on up to {best.times} times as many ranks" if best.times > 1 else ""
        lines.append(
            f"{best.batch:,} is the largest batch whose loss recovers (within 1 %): the same samples in "
            f"{best.times} times fewer steps{more}, with a learning rate of {best.rate:.4g}."
        )
    return "\n".join(lines)


def write(branches: Branches, found: Sequence[Branch]) -> Path:
    """Write branches.csv into the folder. Raises CheckpointError."""
    stream, path = io.StringIO(), branches.folder / CSV
    rows = csv.writer(stream, lineterminator="\n")
    rows.writerow(["times", "global_batch", "learning_rate", "steps", "val_loss", "seconds", "problem"])
    rows.writerows([[one.times, one.batch, one.rate, one.steps, one.loss, one.seconds, one.problem] for one in found])
    try:
        put(path, stream.getvalue().encode())
    except OSError as error:
        raise CheckpointError(f"the table cannot be written: {error.strerror}", where=str(path)) from error
    return path
