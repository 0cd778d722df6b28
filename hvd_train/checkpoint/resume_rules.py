"""The rules of resuming: what may differ from the checkpoint, and the consequences (table ``RULES``)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_train.checkpoint.comparable import PARTS, Measure, reading
from hvd_train.checkpoint.manifest import Progress, sample_of
from hvd_train.checkpoint.store import Snapshot
from hvd_train.config import Config, changed
from hvd_train.errors import CheckpointError, ConfigError, DataError, listing
from hvd_train.protocol import EXCHANGE_PREFIX, IN_FLIGHT, Sample, Source, Tree


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run that decide how training resumes from its checkpoint."""

    framework: str
    compression: str
    mode: str  # exchange.mode
    precision: str
    task: dict[str, Any]
    early_stopping: str  # its monitor and mode, as text
    plateau: str  # the same for optim.plateau
    patience: int
    data: dict[str, dict[str, Any]]  # see data_facts
    ranks: int
    stages: str = "1"  # blocks of each stage, as "3 + 2"
    axes: str | None = None  # axis order of residuals; None: there are no residuals
    devices: str = "1"  # blocks of each device of a rank, if a compressor's buckets depend on them
    order: str = ""  # the settings that determine the order of samples
    reading: dict[str, Any] = field(default_factory=dict)  # see comparable.reading
    best: str = "none"  # the monitor of checkpoint.save_top_k
    global_batch: int = 0

    @classmethod
    def of(
        cls,
        config: Config,
        framework: str,
        compression: str,
        data: dict[str, dict[str, Any]],
        ranks: int,
        axes: str | None = None,
    ) -> RunFacts:
        stopping, plateau, split = config.early_stopping, config.optim.plateau, config.parallel.split
        placed = config.parallel.devices_per_rank > 1
        return cls(
            framework=framework,
            compression=compression,
            mode=config.exchange.mode,
            precision=config.precision,
            task=config.task.model_dump(mode="json"),
            early_stopping=f"{config.mode_of(stopping)} of {stopping.monitor}" if stopping else "none",
            plateau=f"{config.mode_of(plateau)} of {plateau.monitor}" if plateau else "none",
            patience=stopping.patience if stopping else 0,
            data=data,
            ranks=ranks,
            stages=" + ".join(map(str, split)) if config.parallel.pipeline > 1 else "1",
            axes=axes,
            devices=" + ".join(map(str, split)) if placed and compression != "none" else "1",
            order=f"seed {config.seed}, sampling {config.data.sampling}, lengths {config.data.lengths}",
            reading=reading(config, data, ranks),
            best=config.checkpoint.monitor if config.checkpoint.save_top_k else "none",
            global_batch=config.global_batch(config.replicas(ranks)),
        )

    @property
    def measure(self) -> Measure:
        return Measure(self.task, self.data, self.reading)


@dataclass(frozen=True)
class Resumption:
    """The state of resuming: the checkpoint's ``progress``, which rules change, and the facts before and now.

    ``sums``: number of sums of the task. ``loss_scale``: initial value in a new run.
    """

    progress: Progress
    before: RunFacts
    now: RunFacts
    sums: int
    loss_scale: float


# ---- consequences of changes: each updates the progress, and returns a line for the user or ""


def _renew_loss_scale(r: Resumption) -> str:
    before, now, progress = r.before.precision, r.now.precision, r.progress
    if before == now == "16-mixed":  # keep the scale that the run has found
        return ""
    note = ""
    if now == "16-mixed" or progress.loss_scale != r.loss_scale:
        note = f"precision {before} -> {now}: loss scale {r.loss_scale:g}"
    progress.loss_scale, progress.good_steps = r.loss_scale, 0
    if before != now:
        progress.skipped = 0
    return note


def _forget_best(r: Resumption) -> str:
    before, now, progress = r.before.early_stopping, r.now.early_stopping, r.progress
    if before == now or (progress.best is None and not progress.waited):
        return ""
    progress.best, progress.waited, progress.stopped = None, 0, False
    return f"early stopping: {before} -> {now}; earlier best values do not count"


def _forget_plateau(r: Resumption) -> str:
    before, now, progress = r.before.plateau, r.now.plateau, r.progress
    if before == now:
        return ""
    progress.plateau_best, progress.plateau_waited = None, 0
    if now != "none" or progress.rate_factor == 1:
        return ""
    # Otherwise nothing would explain why the rate is lower than the schedule's.
    progress.rate_factor = 1.0
    return "optim.plateau: none any more; the learning rate is the schedule's again"


def _reset_incomparable(r: Resumption) -> str:
    """Reset best values if the loss or the data changed, because they are not comparable."""
    before, now, p = r.before, r.now, r.progress

    def reason(rule: str) -> str:
        return "" if rule == "none" else before.measure.difference(now.measure, rule.rpartition(" ")[2])

    forgets = {}
    if (why := reason(now.early_stopping)) and (p.best is not None or p.waited):
        forgets["early stopping"] = why
        p.stopped = p.stopped and p.waited < before.patience
        p.best, p.waited = None, 0
    if (why := reason(now.plateau)) and (p.plateau_best is not None or p.plateau_waited):
        forgets["optim.plateau"] = why
        p.plateau_best, p.plateau_waited = None, 0
    if why := reason(now.best):  # store.py compares checkpoints in the same way
        forgets["checkpoint.save_top_k"] = why
    if not forgets:
        return ""
    reasons = " and ".join(dict.fromkeys(forgets.values()))
    return f"{', '.join(forgets)}: {reasons}; earlier best values do not count"


def _wait_longer(r: Resumption) -> str:
    before, now, progress = r.before.patience, r.now.patience, r.progress
    # Early stopping has ended the run (after another reason ``waited`` is less), and the new patience is not used up.
    if not progress.stopped or not 0 < before <= progress.waited < now:
        return ""
    progress.stopped = False
    return f"early stopping: patience {before} -> {now}, of which {progress.waited} are used"


def _restart_epoch(r: Resumption) -> str:
    progress, others = r.progress, r.before.data["train"] != r.now.data["train"]
    # In another order, some of the remaining samples were already used. An epoch whose steps are done has no remaining
    # ones.
    reordered = r.before.order != r.now.order and not progress.ending
    if not progress.consumed or not (others or reordered):
        return ""
    progress.consumed, progress.epoch_sums = 0, []
    progress.pending, progress.ending = [], False
    what = "the training data changed" if others else "the order of samples changed"
    return f"{what}: epoch {progress.epoch + 1} starts over"


def _drop_sums(r: Resumption) -> str:
    """Drop sums of another task or other classes, whose entries have another meaning."""
    same = r.before.task == r.now.task
    if not same or len(r.progress.epoch_sums) != r.sums:
        r.progress.epoch_sums = []
    if not same:
        r.progress.pending = []
    return ""


def _report_batch(r: Resumption) -> str:
    """Report a changed global batch: ``batch_size`` is per rank, and the number of ranks differs."""
    before, now = r.before, r.now
    if before.global_batch == now.global_batch or (before.ranks, before.stages) == (now.ranks, now.stages):
        return ""
    old, new = (f"{f.global_batch} on {f.ranks} rank{'s' * (f.ranks != 1)}" for f in (before, now))
    keep = f"--set batch_size=null --set global_batch_size={before.global_batch}"
    keys = "--allow-change batch_size --allow-change global_batch_size"
    return f"the global batch is {new}, and was {old} (to keep it: {keep} {keys})"


@dataclass(frozen=True)
class Rule:
    """A row of the table. ``allowed``: what the user must give. ``follows``: the consequence."""

    change: str
    allowed: str
    follows: str
    apply: Callable[[Resumption], str] | None = None


RULES = (
    Rule("a key that is declared free (config/keys)", "nothing", "nothing"),
    Rule("any other key", "--allow-change KEY", "nothing"),
    Rule("precision", "--allow-change precision", "the loss scale starts over", _renew_loss_scale),
    Rule("early_stopping: monitor or mode", "nothing", "the best value does not count", _forget_best),
    Rule("optim.plateau", "--allow-change optim.plateau", "a new monitor or mode starts over", _forget_plateau),
    Rule("ema", "--allow-change ema", "a mean starts at the weights; without one, training goes on with its own"),
    Rule("swa", "--allow-change swa", "a mean of other epochs starts over; without one, training goes on with its own"),
    Rule("the loss, or data of a monitor", "--allow-change KEY", "the best value does not count", _reset_incomparable),
    Rule("early_stopping: a longer patience", "nothing", "a run that it ended continues", _wait_longer),
    Rule("training data, or their order", "--allow-change KEY", "the current epoch starts over", _restart_epoch),
    Rule("task", "--allow-change task", "sums of the current epoch are dropped", _drop_sums),
    Rule("ranks, pipeline stages, devices of a rank", "nothing", "per-rank state is not restored"),
    Rule("ranks, with batch_size", "nothing", "the global batch changes", _report_batch),
    Rule("framework, exchange", "--allow-change KEY", "per-rank state is not restored"),
    Rule("a GPU or a CPU, with a compression", "nothing", "residuals of image models are not restored"),
    Rule("names of classes", "--allow-change data.classes", "nothing"),
    Rule("names of columns", "--allow-change data", "columns are matched by position"),
    Rule("order of columns, scale of inputs, vocabulary", "refused", ""),
    Rule("tensors of the model or optimizer", "refused", ""),
)


def carry_over(resumption: Resumption) -> list[str]:
    """Apply all rules to the progress. Returns a line for each part that no longer counts."""
    notes = [rule.apply(resumption) for rule in RULES if rule.apply]
    return [note for note in notes if note]


def why_left_behind(before: RunFacts, now: RunFacts, same_shapes: bool) -> str:
    """Return why residuals and other per-rank state cannot be restored, "" if they can.

    That state is valid only for its rank, compressor, framework and device (axis order). Otherwise all ranks reset it
    to zero.
    """
    names = ("ranks", "stages", "devices", "framework", "compression", "mode", "axes")
    pairs = {name: (getattr(before, name), getattr(now, name)) for name in names}
    changes = [f"{name} {old} -> {new}" for name, (old, new) in pairs.items() if old not in (None, new)]
    return ", ".join(changes) or ("" if same_shapes else "their shapes differ")


# ---- refused changes

NEW_RUN = "begin a new run with --run-dir, whose model.init_from takes the weights that fit"


def check_config(before: Config, config: Config, allow_change: Sequence[str]) -> None:
    """Raise ConfigError if the configuration differs from the checkpoint's in keys other than ``allow_change``."""
    users = next((c.optim.name for c in (before, config) if c.optim.is_users), "")
    if users and before.framework != config.framework and "framework" in allow_change:
        what = f"the slots of an optimizer of yours do not go from {before.framework} to {config.framework}"
        raise ConfigError(what, where=f"optim.name: {users}", fix=f"go on with framework: {before.framework}")
    rows = [row for row in changed(before, config) if not _allowed(row[0], allow_change)]
    if rows:
        listed = ", ".join(f"{key}: {a} -> {b}" for key, a, b in rows)
        keys = " ".join(f"--allow-change {key}" for key, _, _ in rows)
        kept = next((a for key, a, _ in rows if key == "data.classes" and isinstance(a, list)), None)
        undo = f"keep its classes with --set data.classes={json.dumps(kept)!r}" if kept else "undo it"
        fix = f"{undo}, or give {keys}"
        if any(key.startswith("model.") for key, _, _ in rows):  # with other shapes the checkpoint cannot be loaded
            fix = f"{fix}; for another network {NEW_RUN}"
        raise ConfigError(f"the configuration changed since the checkpoint ({listed})", fix=fix)


def _allowed(key: str, allow_change: Sequence[str]) -> bool:
    if key.startswith("data.classes"):  # other data must not renumber classes
        return "data.classes" in allow_change
    return any(key == allowed or key.startswith(allowed + ".") for allowed in allow_change)


def check_fields(snapshot: Snapshot, sample: Sample, allowed: bool) -> None:
    """Refuse reordered columns and rescaled inputs, which the weights cannot tell apart."""
    run = sample_of(snapshot.meta)
    for kind, before, now in (("inputs", run.inputs, sample.inputs), ("labels", run.labels, sample.labels)):
        for name, old in before.items():
            new = now.get(name)
            if new is None:
                continue
            key = "data.features" if kind == "inputs" else "data.labels"
            if old.columns and new.columns and old.columns != new.columns:
                same = set(old.columns) == set(new.columns)
                fewer = set(old.columns) > set(new.columns)
                if same or fewer or not allowed:
                    how = "in another order" if same else "fewer" if fewer else "called otherwise"
                    what = f"the columns are {how} than at the checkpoint: {listing(new.columns)}"
                    fix = f"they were {listing(old.columns)}; give them again, or --allow-change data: by position"
                    if same or fewer:
                        fix = f"give --set {key}={json.dumps(list(old.columns))!r} --allow-change data"
                    raise DataError(what, where=str(snapshot.path), fix=fix)
            if kind == "inputs" and old.divisor != new.divisor:
                scales = [f"{one.dtype} divided by {one.divisor:g}" for one in (old, new)]
                what = f"inputs '{name}' were {scales[0]} at the checkpoint, and are {scales[1]}"
                raise DataError(what, where=str(snapshot.path), fix=f"store them as {old.dtype}")


def check_data(snapshot: Snapshot, facts: dict[str, dict[str, Any]]) -> None:
    """Refuse training or validation data that differ from the checkpoint's."""
    rows = changed_parts(snapshot.meta["data"], facts)
    if rows:
        what = f"the data changed since the checkpoint ({'; '.join(rows)})"
        fix = "give the same data, or --allow-change data: the current epoch then starts over"
        raise DataError(what, where=str(snapshot.path), fix=fix)


def check_prepared(saved: Any, now: Any, checkpoint: Path) -> None:
    """Refuse columns of a table that are prepared in another way than the run's: weights would get other inputs."""
    if saved != now:
        what = "the columns of the table are prepared in another way than in the checkpoint: by other samples or keys"
        fix = "keep the run's data and keys, or copy data.fitted of its config.yaml into the configuration"
        raise DataError(what, where=str(checkpoint), fix=fix)


def check_vocabulary(saved: str, learned: str, file: Path, checkpoint: Path) -> None:
    """Refuse a vocabulary with other token ids than the run's. ``saved``: the run's in ``file``, if any."""
    if saved and json.loads(saved) != json.loads(learned):
        what = "the vocabulary learned from the text differs from the checkpoint's"
        fix = f"keep to the run's: --set data.vocabulary={file.resolve()} --allow-change data"
        raise DataError(what, where=str(checkpoint), fix=fix)


def check_tree(expected: Tree, saved: Tree) -> None:
    """Refuse a checkpoint whose tensors differ from the model's, with a table of differences."""
    rows = []
    for key in sorted(expected.keys() | saved.keys()):
        if key.startswith(EXCHANGE_PREFIX):  # its tensors are named after weights
            continue
        if key not in saved:
            rows.append(f"  {key}: not in the checkpoint")
        elif key not in expected:
            rows.append(f"  {key}: not in this model or optimizer")
        elif expected[key].shape != saved[key].shape:
            rows.append(f"  {key}: {saved[key].shape} in the checkpoint, {expected[key].shape} in the model")
    if rows:
        more = [f"  and {len(rows) - 20} more"] if len(rows) > 20 else []
        lines = ["the checkpoint does not fit this model and optimizer:", *rows[:20], *more]
        raise CheckpointError("\n".join([*lines, f"  undo the change, or {NEW_RUN}"]))


def fitting(expected: Tree, saved: Tree) -> Tree:
    """Return the tensors of a checkpoint to restore. Raises CheckpointError if they do not fit the model.

    Exchanges in flight are dropped if this run's update keeps different ones or none.
    """
    trees = [{key: x.shape for key, x in tree.items() if key.startswith(IN_FLIGHT)} for tree in (expected, saved)]
    if trees[0] != trees[1]:
        expected, saved = (
            {key: x for key, x in tree.items() if not key.startswith(IN_FLIGHT)} for tree in (expected, saved)
        )
    check_tree(expected, saved)
    return saved


# ---- the data of two runs


def data_facts(train: Source, val: Source) -> dict[str, dict[str, Any]]:
    """Return the size and fingerprint of each split, which a resumed run compares."""
    parts = {"train": train, "val": val}
    short = {name: hashlib.sha256(str(part.fingerprint).encode()).hexdigest()[:16] for name, part in parts.items()}
    return {name: {"samples": len(part), "fingerprint": short[name]} for name, part in parts.items()}


def changed_parts(before: Mapping[str, Any], now: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """List the splits that differ from the checkpoint's, as "training: 88 samples -> 120"."""
    rows = []
    for part, name in PARTS.items():
        if before[part] != now[part]:
            old, new = (f"{facts[part]['samples']:,}" for facts in (before, now))
            rows.append(f"{name}: {old} samples -> {new}" if old != new else f"{name}: {new} samples, but others")
    return rows
