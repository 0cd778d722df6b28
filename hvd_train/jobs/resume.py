"""The checkpoint that a training goes on from, and what may have changed since it was written."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_train.checkpoint import store
from hvd_train.checkpoint.manifest import sample_of
from hvd_train.config import Config, changed
from hvd_train.core.agreement import collectively
from hvd_train.core.saving import data_facts
from hvd_train.data.catalog import open_data
from hvd_train.data.classes import listing
from hvd_train.data.dataset import DataSet
from hvd_train.errors import CheckpointError, ConfigError, DataError
from hvd_train.launch import snapshots
from hvd_train.protocol import Communicator, Sample
from hvd_train.run_folder import layout
from hvd_train.run_folder.terminal import warn


def resumes(config: Config, communicator: Communicator, resume: str | None) -> bool:
    """Return whether a checkpoint will give all weights, so that a model need not load pretrained ones.

    Rank 0 looks.
    """
    if resume is None:
        return False
    begun = resume != "auto" or bool(store.find(Path(config.run_dir) / "checkpoints")) or _has_snapshot()
    return bool(communicator.broadcast_bytes(b"1" if communicator.rank == 0 and begun else b""))


def _has_snapshot() -> bool:
    memory = snapshots.given()
    return memory is not None and bool(store.find(memory))


def best_rule(config: Config) -> tuple[str, str]:
    """Return what makes a checkpoint the best: (monitor, mode)."""
    return config.checkpoint.monitor, config.mode_of(config.checkpoint)


def find_checkpoint(
    config: Config, user_config: Config, data: DataSet, resume: str | None, allow_change: Sequence[str]
) -> store.Snapshot | None:
    """Read the checkpoint that ``resume`` names; None to start anew.

    Its configuration and data must be this run's, except what ``allow_change`` names. ``user_config`` is the
    configuration without what the data added.
    """
    if resume is None:
        return None
    run_dir = Path(config.run_dir)
    if resume in ("auto", "last"):
        snapshot = store.newest(run_dir / "checkpoints", warn, snapshots.given())
        if snapshot is None and resume == "last":
            raise CheckpointError("there is no checkpoint to resume from", where=str(run_dir / "checkpoints"))
    else:
        snapshot = store.load(store.resolve(run_dir, resume, *best_rule(config), warn))
    if snapshot is None:
        return None
    _check_config(snapshot.config(), config, user_config, allow_change)
    _check_fields(snapshot, data.sample, "data" in allow_change)
    learned = saved_vocabulary(run_dir) if data.vocabulary else ""
    if learned and json.loads(learned) != json.loads(data.vocabulary):
        what = "the vocabulary that was learned from the text is another one than at the checkpoint"
        fix = f"keep to the run's: --set data.vocabulary={(run_dir / layout.VOCABULARY).resolve()} --allow-change data"
        raise DataError(what, where=str(snapshot.path), fix=fix)
    if "data" not in allow_change:
        _check_data(snapshot, data_facts(data.train, data.val), len(data.train))
    return snapshot


def _check_config(before: Config, config: Config, user_config: Config, allow_change: Sequence[str]) -> None:
    """Refuse a configuration that is not the checkpoint's, except the keys that ``allow_change`` names."""
    classes = config.data.classes
    if classes and before.data.classes is None and user_config.data.classes is None:  # an older checkpoint keeps none
        before = before.model_copy(update={"data": before.data.model_copy(update={"classes": classes})})
    rows = [row for row in changed(before, config) if not _allowed(row[0], allow_change)]
    if rows:
        listed = ", ".join(f"{key}: {a} -> {b}" for key, a, b in rows)
        keys = " ".join(f"--allow-change {key}" for key, _, _ in rows)
        kept = next((a for key, a, _ in rows if key == "data.classes" and isinstance(a, list)), None)
        undo = f"keep its classes with --set data.classes={json.dumps(kept)!r}" if kept else "undo it"
        raise ConfigError(f"the configuration changed since the checkpoint ({listed})", fix=f"{undo}, or give {keys}")


def _allowed(key: str, allow_change: Sequence[str]) -> bool:
    if key.startswith("data.classes"):  # other data are no reason to number classes anew
        return "data.classes" in allow_change
    return any(key == allowed or key.startswith(allowed + ".") for allowed in allow_change)


def _check_fields(snapshot: store.Snapshot, sample: Sample, allowed: bool) -> None:
    """Refuse columns in another order, and inputs of another scale: weights know them by place and size alone."""
    run = sample_of(snapshot.meta) if snapshot.meta.get("sample") else None
    pairs = [(kind, getattr(run, kind), getattr(sample, kind)) for kind in ("inputs", "labels")] if run else []
    for kind, before, now in pairs:
        for name, old in before.items():
            new = now.get(name)
            if new is None:
                continue
            key = "data.features" if kind == "inputs" else "data.labels"
            if old.columns and new.columns and old.columns != new.columns:
                same = set(old.columns) == set(new.columns)
                if same or not allowed:
                    how = "in another order" if same else "called otherwise"
                    what = f"the columns are {how} than at the checkpoint: {listing(new.columns)}"
                    fix = f"they were {listing(old.columns)}; give them again, or --allow-change data: by their places"
                    if same:
                        fix = f"give --set {key}={json.dumps(list(old.columns))!r} --allow-change data"
                    raise DataError(what, where=str(snapshot.path), fix=fix)
            if kind == "inputs" and old.divisor != new.divisor:
                scales = [f"{one.dtype} divided by {one.divisor:g}" for one in (old, new)]
                what = f"inputs '{name}' were {scales[0]} at the checkpoint, and are {scales[1]}"
                raise DataError(what, where=str(snapshot.path), fix=f"store them as {old.dtype}")


def _check_data(snapshot: store.Snapshot, facts: dict[str, dict[str, Any]], size: int) -> None:
    """Refuse training and validation data with other samples than the checkpoint's."""
    rows = changed_parts(snapshot.meta.get("data", {}), facts)
    consumed = snapshot.progress.consumed
    if not rows and consumed > size:  # a checkpoint that says nothing of its data
        rows.append(f"training: {consumed:,} samples of an epoch used -> {size:,}")
    if rows:
        what = f"the data changed since the checkpoint ({'; '.join(rows)})"
        fix = "give the same data, or --allow-change data: a begun epoch then begins anew"
        raise DataError(what, where=str(snapshot.path), fix=fix)


def changed_parts(before: Mapping[str, Any], now: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """List the parts of the data that differ from the checkpoint's, as "training: 88 samples -> 120"."""
    rows = []
    for part, name in {"train": "training", "val": "validation"}.items():
        if part in before and before[part] != now[part]:
            old, new = (f"{facts[part]['samples']:,}" for facts in (before, now))
            rows.append(f"{name}: {old} samples -> {new}" if old != new else f"{name}: {new} samples, but others")
    return rows


def saved_vocabulary(run_dir: Path) -> str:
    """Read the run's vocabulary, as JSON; empty if the run has none, or is of an older version."""
    try:
        text = (run_dir / layout.VOCABULARY).read_text(encoding="utf-8")
        json.loads(text)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        what = f"the vocabulary of the run cannot be read: {error}"
        raise CheckpointError(what, where=str(run_dir / layout.VOCABULARY)) from error
    return text


def data_as_before(
    config: Config, communicator: Communicator, data: DataSet, resume: str | None, user_data: Any = None
) -> DataSet:
    """Open the data as images where the resumed run did: earlier versions took every (n, height, width) for images.

    Rank 0 reads the checkpoint's manifest. ``user_data`` is handed on to ``open_data``.
    """
    if resume is None or config.data.images is not None:
        return data
    were_images = communicator.rank == 0 and _were_images(config, data, resume)
    if not communicator.broadcast_bytes(b"1" if were_images else b""):
        return data
    if communicator.rank == 0:
        shapes = ", ".join(str(field.shape) for field in data.sample.inputs.values())
        print(
            f"note: samples of {shapes} are images, as when the run began (data.images: true)",
            file=sys.stderr,
            flush=True,
        )
    as_images = config.data.model_copy(update={"images": True})
    return collectively(communicator, lambda: open_data(as_images, config.task, user_data))


def _were_images(config: Config, data: DataSet, resume: str) -> bool:
    run_dir, rule = Path(config.run_dir), config.checkpoint
    try:
        newest = resume in ("auto", "last")
        place = (
            store.newest_readable(run_dir / "checkpoints")
            if newest
            else store.resolve(run_dir, resume, rule.monitor, rule.mode)
        )
        run = sample_of(store.read(place)[1])
    except (CheckpointError, OSError):  # reported where the checkpoint is loaded
        return False
    pairs = [(run.inputs[name], field) for name, field in data.sample.inputs.items() if run and name in run.inputs]
    return any(old.image and not new.image and old.shape in (new.shape, (*new.shape, 1)) for old, new in pairs)
