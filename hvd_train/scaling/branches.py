"""Does a larger batch pay? Trainings that branch off from one checkpoint, with larger batches over the same samples.

The largest batch whose loss recovers is worth its ranks (branched training: Merrill et al. 2025, arXiv 2505.23971).
The learning rate of the checkpoint grows with the batch: linearly with SGD, else with the square root.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_train.checkpoint import store
from hvd_train.config import Config, changed, digest, load_config
from hvd_train.config.schedules import SCHEDULES
from hvd_train.errors import CheckpointError, ConfigError, amount, listing
from hvd_train.files import put
from hvd_train.insight.calibration import check_samples
from hvd_train.launch import logged
from hvd_train.report.text_tables import table
from hvd_train.run_folder import layout, metrics_file, safe_reading
from hvd_train.scaling.study import discard, prepare
from hvd_train.sweep.folder import LOG
from hvd_train.sweep.local import fit
from hvd_train.sweep.trials import Trial

CSV, ABOUT = "branches.csv", "branches.json"
STEPS = 200  # of the branch with the batch as it is, unless --samples says otherwise
FEWEST = 10  # steps of the largest batch
RECOVERS = 0.01  # of the loss with the batch as it is, by which another may be larger
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
    """Prepare the branches of a checkpoint, or of the newest one in a run folder.

    Raises ConfigError if the options do not fit it.
    """
    times = parse_times(batches)
    if (checkpoint / "checkpoints").is_dir():
        checkpoint = store.newest_readable(checkpoint / "checkpoints")
    before = load_config(base=store.config_of(checkpoint))
    config = load_config(path, sets) if path else load_config(base=store.config_of(checkpoint), sets=sets)
    check_samples(config)
    batch = config.global_batch(config.replicas(ranks))
    samples = samples or STEPS * batch
    if samples < FEWEST * times[-1] * batch:
        what = f"{samples:,} samples are fewer than {FEWEST} steps of {times[-1]} x {batch}"
        raise ConfigError(what, where="--samples", fix=f"give {FEWEST * times[-1] * batch:,} or more")
    # Equal for all, so that each takes whole steps.
    unit = math.lcm(*times) * batch
    step = store.read(checkpoint)[0].step
    yours = config.optim.lr != before.optim.lr
    rate = config.optim.lr if yours else rate_at(checkpoint.absolute().parents[1], step)
    if rate is None:
        what = "the learning rate at the checkpoint is not known, as its run folder has no metrics.jsonl"
        raise ConfigError(what, where=str(checkpoint), fix="--set optim.lr=0.01, for example")
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

    ``starting``: options of ``fit`` that start the ranks. ``report`` gets a line for each branch. Raises ConfigError if
    the folder holds other branches.
    """
    found: list[Branch] = []
    _begin(branches)
    for times in branches.times:
        trial = branches.trial(times)
        run_dir, code = Path(trial.config.run_dir), 0
        if not (run_dir / layout.SUMMARY).exists():
            discard(trial)
            prepare(trial)
            code = fit(trial, [*branches.words(trial), *starting])
            if code in logged.STOPPED:
                return found, code
        one = read(branches, times, run_dir, code)
        found.append(one)
        told = f"failed: {one.problem}" if one.loss is None else f"{amount(one.steps, 'step')}, val loss {one.loss:.4f}"
        report(f"batch {one.batch:,}: {told}")
    return found, 0


def _begin(branches: Branches) -> None:
    """Write what the branches have in common, or compare it with what an earlier call has left."""
    path, own = branches.folder / ABOUT, {"checkpoint": str(branches.checkpoint.absolute()), "ranks": branches.ranks}
    own |= {"samples": branches.samples, "rate": branches.rate, "config": digest(branches.config.resolved())}
    try:
        branches.folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            before = safe_reading.json_object(path)
            other = [name for name in own if before.get(name) != own[name]]
            if other:
                what = f"the folder holds branches with another {listing(other)}"
                raise ConfigError(what, where=str(branches.folder), fix="give the same options, or another --run-dir")
        put(path, json.dumps(own).encode())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the branches cannot begin: {error}", where=str(path)) from error


def read(branches: Branches, times: int, run_dir: Path, code: int) -> Branch:
    """Read the result of a branch from its run folder. ``code``: what its training ended with."""
    about = times, times * branches.batch, branches.rate_of(times), branches.steps_of(times)
    try:
        summary = safe_reading.json_object(run_dir / layout.SUMMARY)
        seconds = float(summary["time"]["effective"]) * float(summary["time"]["allocation"])
    except (OSError, ValueError, KeyError, TypeError):
        return Branch(*about, problem=logged.reason(run_dir / LOG, code))
    loss = summary.get("val_loss")
    if not safe_reading.number(loss):
        return Branch(*about, seconds=seconds, problem="it has no validation loss")
    return Branch(*about, float(loss), seconds)


def largest(found: Sequence[Branch]) -> Branch | None:
    """Return the largest batch whose loss recovers, as do those of all smaller ones; None: nothing to compare."""
    if not found or found[0].loss is None:
        return None
    best, most = found[0], found[0].loss + RECOVERS * abs(found[0].loss)
    for one in found[1:]:
        if one.loss is None or one.loss > most:
            break
        best = one
    return best


def text(branches: Branches, found: Sequence[Branch]) -> str:
    """Return the table of the branches, and a sentence about the largest batch that pays."""
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
    elif best.times > 1:
        lines.append(
            f"{best.batch:,} is the largest batch whose loss recovers (within 1 %): the same samples in 1/{best.times} "
            f"of the steps, on up to {best.times} times as many ranks, with a learning rate of {best.rate:.4g}."
        )
    elif len(found) == 1 or found[1].loss is None:
        lines.append("No larger batch can be compared.")
    else:
        lines.append(f"No larger batch pays: with {found[1].batch:,} the loss does not come within 1 %.")
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
