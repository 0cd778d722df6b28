"""Open a packed data set, whose files are memory-mapped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.config import DataConfig, TaskConfig
from hvd_train.data.classes import numbers_of
from hvd_train.data.column import is_class, is_image
from hvd_train.data.number_labels import OF_NUMBERS
from hvd_train.data.packed_manifest import AGAIN, KINDS, MANIFEST, PackedPart, PackManifest, Shard, read_manifest
from hvd_train.errors import DataError, noun_and_names
from hvd_train.protocol import Field, Fields, Sample


def open_packed(
    folder: Path, config: DataConfig, task: TaskConfig, labelled: bool = True
) -> tuple[Packed, Packed, Packed | None]:
    """Open (train, val, test) of a packed folder.

    The sizes of all files are checked, but not their contents (``packing.check`` does that). ``labelled``: whether
    labels are needed.
    """
    manifest = read_manifest(folder)
    parts = manifest.train, manifest.val, manifest.test
    train, val, *tests = (Packed(folder, part, config.num_classes, config.images) for part in parts if part)
    train.vocabulary, train.fitted = manifest.vocabulary, manifest.fitted
    if config.target == "labels" and labelled:
        _check_task(manifest, train.sample.joined(val.sample), config, task, folder)
    return train, val, tests[0] if tests else None


def check_prepared(folder: Path, run: list[dict[str, Any]] | None) -> None:
    """Refuse a packed table whose columns were prepared in another way than data.fitted of a trained run."""
    if read_manifest(folder).fitted != run:
        what = "the columns of the packed table were prepared in another way than the run's"
        fix = "take the table itself (data.name: table), or pack it with data.fitted of the run's config.yaml"
        raise DataError(what, where=str(folder), fix=fix)


def label_classes(sample: Sample, task: TaskConfig) -> dict[str, bool]:
    """Return {label: whether the task treats it as classes}."""
    return {name: task.classes(name, len(sample.labels) == 1) for name in sample.labels}


def _check_task(manifest: PackManifest, sample: Sample, config: DataConfig, task: TaskConfig, folder: Path) -> None:
    """Check that the labels, which were packed for one task, suit this task."""
    for name, wanted in label_classes(sample, task).items():
        field = sample.labels[name]
        if wanted != manifest.classes.get(name):
            was, now = ("classes" if yes else "numbers" for yes in (not wanted, wanted))
            what = f"labels '{name}' were packed as {was}, and task.loss wants {now}"
            raise DataError(what, where=str(folder), fix="pack with -c and this configuration's task.loss")
        loss, numbers = task.term(name)[0], numbers_of(field.names)
        if loss in OF_NUMBERS and numbers and [*numbers.values()] != [*range(len(numbers))]:
            what = f"labels '{name}' were packed as the numbers of {noun_and_names('class', field.names)}"
            fix = f"pack with -c and this configuration's task.loss, {loss}: the labels are then the numbers themselves"
            raise DataError(what, where=str(folder), fix=fix)
        if config.num_classes and field.classes and config.num_classes != field.classes:
            what = f"packed with {field.classes} classes, and data.num_classes is {config.num_classes}"
            raise DataError(what, where=str(folder), fix="leave it out, or set it when packing")
        ignored = field.masked or is_class(task.ignore_index, field.classes)
        if ignored and task.ignore_index != manifest.ignore_index:
            what = f"packed with ignore_index {manifest.ignore_index}, and task.ignore_index is {task.ignore_index}"
            fix = f"set task.ignore_index: {manifest.ignore_index}, or pack again with this one"
            raise DataError(what, where=str(folder), fix=fix)


class Packed:
    """A part of a packed data set."""

    def __init__(
        self, folder: Path, part: PackedPart, num_classes: int | None = None, images: bool | None = None
    ) -> None:
        self._count, self._rows = part.count, part.rows
        self.fingerprint, self.note, self.vocabulary = part.fingerprint, part.note, ""
        self.fitted: list[dict[str, Any]] | None = None
        fields: dict[str, dict[str, Field]] = {kind: {} for kind in KINDS}
        self._maps: dict[str, dict[str, list[np.ndarray]]] = {kind: {} for kind in KINDS}
        for kind, name, column in part.columns():
            counts = [shard.count for shard in column.shards]
            if sum(counts) != part.count or any(count != part.rows for count in counts[:-1]):
                what = f"the shards of '{name}' hold {sum(counts):,} samples, not {part.count:,}"
                raise DataError(what, where=str(folder / MANIFEST), fix=AGAIN)
            fields[kind][name] = column.field
            if kind == "inputs" and images is not None:
                fields[kind][name] = _declared(column.field, images, len(part.inputs) == 1)
            self._maps[kind][name] = [mapped(folder, column.field, shard) for shard in column.shards]
        known = any(field.classes for field in fields["labels"].values())
        self.sample = Sample(fields["inputs"], fields["labels"], None if known else num_classes)

    def __len__(self) -> int:
        return self._count

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        shards, rows = np.divmod(np.asarray(indices, np.int64), self._rows)
        inputs, labels = (
            {
                name: _rows_of(maps, shards, rows).reshape(-1, *getattr(self.sample, kind)[name].shape)
                for name, maps in self._maps[kind].items()
            }
            for kind in KINDS
        )
        return inputs, labels

    def label(self, name: str, indices: np.ndarray) -> np.ndarray:
        """Return label ``name`` (k, ...) of the samples ``indices`` (k,) without reading their inputs."""
        shards, rows = np.divmod(np.asarray(indices, np.int64), self._rows)
        return _rows_of(self._maps["labels"][name], shards, rows).reshape(-1, *self.sample.labels[name].shape)


def _declared(field: Field, images: bool, alone: bool) -> Field:
    """Return the field of an input for this ``data.images``, which may differ from the one at packing."""
    image = is_image(field.shape, np.dtype(field.dtype), alone, images)
    return replace(field, shape=(*field.shape, 1) if image and len(field.shape) == 2 else field.shape, image=image)


def _rows_of(maps: list[np.ndarray], shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Read samples (k, ...) of a field, given the shard (k,) and the row in it (k,) of each."""
    if len(maps) == 1:
        return maps[0][rows]
    out = np.empty((len(rows), *maps[0].shape[1:]), maps[0].dtype)
    for number in np.unique(shards):
        chosen = shards == number
        out[chosen] = maps[number][rows[chosen]]
    return out


def mapped(folder: Path, field: Field, shard: Shard) -> np.ndarray:
    """Memory-map a file as (count, *shape of the field), and check shape and dtype against the manifest."""
    path = folder / shard.file
    _check_size(path, shard)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"this is not a .npy file: {str(error).splitlines()[0]}", where=str(path), fix=AGAIN) from error
    wanted = (shard.count, *field.shape)
    if array.shape != wanted or array.dtype != np.dtype(field.dtype):
        what = f"the file holds {array.shape} {array.dtype}, the manifest says {wanted} {field.dtype}"
        raise DataError(what, where=str(path), fix=AGAIN)
    return np.asarray(array)


def _check_size(path: Path, shard: Shard) -> None:
    if Path(shard.file).name != shard.file:
        raise DataError(
            f"the manifest names '{shard.file}', which is not a file of this folder",
            where=str(path.parent / MANIFEST),
            fix=AGAIN,
        )
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"the file cannot be read: {error.strerror}", where=str(path), fix=AGAIN) from error
    if size != shard.size:
        what = (
            f"the file is {'cut off' if size < shard.size else 'too long'}: {size:,} bytes, {shard.size:,} were written"
        )
        raise DataError(what, where=str(path), fix=AGAIN)
