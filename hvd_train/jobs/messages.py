"""The lines that a training prints at its start and its end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_train.checkpoint import store
from hvd_train.config import Config
from hvd_train.core.hooks import Hook, unknown_events
from hvd_train.core.loop import Trainer
from hvd_train.core.shares import SHOWN, described, duration
from hvd_train.data.dataset import DataSet
from hvd_train.data.number_labels import remark_on_ignored
from hvd_train.data.preparation import table_of
from hvd_train.errors import CheckpointError, amount, listing, printable
from hvd_train.jobs.job import Job, described_inputs
from hvd_train.jobs.resume import best_rule
from hvd_train.protocol import Sample
from hvd_train.report.text_tables import table
from hvd_train.run_folder.terminal import warn

COLUMNS = ("column", "holds", "gaps", "words or scale")
LONG_RUN = 60.0  # seconds from which the end of a run says what they were spent on


def start(job: Job, trainer: Trainer, snapshot: store.Snapshot | None) -> str:
    """Describe the model, the data, the ranks, and where a resumed run continues."""
    c, size = job.config, job.communicator.size
    count = sum(x.size for key, x in job.frontend.whole.items() if key.startswith("weights/"))
    groups = job.parameter_groups
    count = count or sum(spec.size for spec in (groups.specs if groups else job.frontend.specs()))
    steps = f"{amount(trainer.steps_per_epoch, 'step')} per epoch"
    if trainer.limited:
        samples = f"{trainer.epoch_size:,} of {trainer.train_size:,} samples"
        steps = f"{trainer.limit} of {steps}, {samples} (limit_train_batches)"
    if c.limit_val_batches and (evaluated := trainer.val_loader.evaluated(c.limit_val_batches)) < trainer.val_size:
        steps += f"; an evaluation takes {evaluated:,} of {trainer.val_size:,} samples (limit_val_batches)"
    lines = [
        f"{c.framework}, {c.model.name}: {count:,} weights; {job.data.name}: {len(job.data.train):,} training and "
        f"{len(job.data.val):,} validation samples",
        f"{amount(size, 'rank')}, global batch {c.batch_words(size)}, {steps}",
    ]
    if trainer.global_batch > trainer.train_size:
        lines.append(
            f"note: the global batch holds more than the {trainer.train_size:,} training samples: a step takes all of "
            "them, and is an epoch"
        )
    if trainer.groups.links:
        stages, micro = trainer.groups.links.size, c.parallel.microbatches
        replicas = amount(trainer.groups.data.size, "replica")
        lines.append(f"{stages} stages, {replicas}, {micro} micro-batches a step ({c.parallel.schedule})")
    if (devices := c.parallel.devices_per_rank) > 1:
        lines.append(f"{devices} devices a rank: {', '.join(map(str, getattr(job.frontend, 'devices', ())))}")
    if costs := getattr(job.frontend, "block_costs", ()):
        lines.append(_division(costs, c.parallel.split, "stage" if trainer.groups.links else "device"))
    # The shape as the model sees it, so that a wrong axis order is obvious.
    lines.append(f"the model gets {described_inputs(c, job.data.sample)}")
    if fitted := job.data.fitted:
        lines.append(f"{amount(len(fitted), 'column')} prepared as in data.fitted of config.yaml (--check lists them)")
    # A note of both splits is printed once.
    notes = (getattr(part, "note", "").splitlines() for part in (job.data.train, job.data.val))
    lines += dict.fromkeys(line for part in notes for line in part)
    lines += [*_classes(job.data.sample), *job.data.remarks, *same_parts(job.data)]
    lines += [f"note: {line}" for line in (*job.frontend.task.remarks, *_ignored_labels(job))]
    lines += [*job.initialization, *(groups.table() if groups else [])]
    if snapshot:
        p = trainer.progress
        lines.append(f"resumed at step {p.step}: epoch {p.epoch + 1}, {p.consumed:,} samples of it used")
    return "\n".join(lines)


def same_parts(data: DataSet) -> list[str]:
    """Return a line if the validation split is the training split."""
    if data.train.fingerprint != data.val.fingerprint:
        return []
    return ["note: the validation samples are the training samples: their metrics say nothing about new ones"]


def _ignored_labels(job: Job) -> list[str]:
    """Return a line for each user loss that counts labels which are ignored elsewhere."""
    labels, lines = job.data.sample.labels, []
    for one in job.frontend.task.objectives:
        name = one.output or (next(iter(labels)) if len(labels) == 1 else "")
        if one.user_loss and name in labels and not one.weighted_by_data:
            ignored = one.ignore_index if one.user_loss.ignored is None else one.user_loss.ignored
            lines.append(remark_on_ignored(job.data.train, name, ignored, one.loss.rpartition(":")[2]))
    return [*filter(None, lines)]


def prepared_columns(job: Job) -> str:
    """List how each column of a table is prepared; "" if none is."""
    return table(COLUMNS, table_of(job.data.fitted)) if job.data.fitted else ""


def weight_names(job: Job) -> str:
    """List the weight names that ``optim.groups`` matches, which are those of checkpoints."""
    specs = job.parameter_groups.specs if job.parameter_groups else job.frontend.specs()
    return f"names for optim.groups: {', '.join(spec.name for spec in specs)}"


def _classes(sample: Sample) -> list[str]:
    """List the class names and numbers, a line for each label field."""
    rows = {
        name: [f"{printable(one, one_line=True)} {k}" for k, one in enumerate(field.names)]
        for name, field in sample.labels.items()
    }
    return [f"classes{f' of {name}' * (len(rows) > 1)}: {listing(row)}" for name, row in rows.items() if row]


def end(summary: dict[str, Any], config: Config) -> str:
    """Describe the result, the speed, the best checkpoint and the run folder in one line."""
    run_dir = Path(config.run_dir)
    scores = {name[4:]: x for name, x in summary.items() if name.startswith("val_") and name != "val_samples"}
    listed = ", ".join(f"{name.replace('_', ' ')} {x:.4f}" for name, x in scores.items() if x is not None)
    nothing = "an evaluation without a value" if summary["val_samples"] else "no evaluation"
    result = f"validation {listed}" if listed else nothing
    at = summary.get("paused_at")
    word = f"left after epoch {at}, --resume auto goes on" if at else "done"
    best = ""
    with suppress(CheckpointError):  # all is written, so an unreadable checkpoint is no failure now
        best = store.best(run_dir / "checkpoints", *best_rule(config)) if config.checkpoint.save_top_k else ""
    best = f"; best: {best}" if best else ""
    speed = summary["samples_per_second"]
    speed = f", {speed:,.0f} samples/s" if speed else ""
    return f"{word}: {result}{speed}{best}; run folder {printable(str(run_dir), one_line=True)}"


def time_of(summary: dict[str, Any]) -> str:
    """Describe in one line what the time of a long run was spent on; "" for a short one."""
    times = summary["time"]
    parts = {name: times[name] for name in SHOWN}
    total = sum(parts.values())
    if total < LONG_RUN:
        return ""
    shares = described({name: x / total for name, x in parts.items()})
    return f"time: {shares}; {times['effective']:.0%} of {duration(times['allocation'])} went into steps that count"


def energy_of(summary: dict[str, Any]) -> str:
    """Describe the energy of a run in one line; "" if no counter was there."""
    energy = summary.get("energy")
    if not energy:
        return ""
    sources = ", ".join(f"{name} {x:,.3g}" for name, x in energy.items() if name not in ("wh", "hosts"))
    return f"energy: {energy['wh']:,.3g} Wh on {amount(energy['hosts'], 'host')}, whoever used it ({sources})"


def warn_of_events(job: Job, hooks: Sequence[Hook]) -> None:
    """Warn of hook methods that look like events but are not called."""
    for hook in hooks if job.communicator.rank == 0 else ():
        for line in unknown_events(hook):
            warn(line)


def _division(costs: Sequence[Any], split: Sequence[Any], part: str) -> str:
    """Return the table of the stages or devices that share a model, with the share of each."""
    rows, at = [], 0
    seconds, weights = sum(cost.seconds for cost in costs), sum(cost.weights for cost in costs)
    for number, count in enumerate(split):
        of_part = costs[at : at + count]
        names = of_part[0].name if count == 1 else f"{of_part[0].name} to {of_part[-1].name}"
        time, size = sum(cost.seconds for cost in of_part), sum(cost.weights for cost in of_part)
        rows.append(
            [str(number), f"{count}: {names}", f"{1000 * time:.2f}", f"{time / (seconds or 1):.0%}"]
            + [f"{size / 1e6:.2f}", f"{size / (weights or 1):.0%}"]
        )
        at += count
    return table([part, "blocks", "ms a micro-batch", "of all", "MB of weights", "of all"], rows)
