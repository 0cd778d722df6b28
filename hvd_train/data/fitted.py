"""Data for a finished run: its fields by their names, its columns in their order, its classes by their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from hvd_train.data.classes import Lookup, listing, unknown
from hvd_train.errors import DataError
from hvd_train.protocol import Field, Fields, Sample, Source

NO_VALUE = -(1 << 63)  # no label is ignored here


@dataclass(frozen=True)
class Taken:
    """How a field of the run comes out of the data: ``name``: there; ``order``: of its columns; ``lookup``: from its
    numbers of classes to the run's. None: as it is."""

    name: str
    order: np.ndarray | None = None
    lookup: Lookup | None = None

    @property
    def plain(self) -> bool:
        return self.order is None and self.lookup is None

    def __call__(self, fields: Fields) -> np.ndarray:
        x = fields[self.name]
        x = x if self.order is None else x[..., self.order]
        return x if self.lookup is None else self.lookup(x).astype(x.dtype)


class Fitted:
    """Another source's samples as a run knows them; labels that are not looked at are zeros."""

    def __init__(
        self, own: Source, sample: Sample, inputs: Mapping[str, Taken], labels: Mapping[str, Taken], remarks: list[str]
    ) -> None:
        self._own, self.sample, self._inputs, self._labels = own, sample, inputs, labels
        self.fingerprint, self.note = own.fingerprint, getattr(own, "note", "")
        self.files = getattr(own, "files", ())
        self.ordered, self.remarks = getattr(own, "ordered", False), (*getattr(own, "remarks", ()), *remarks)

    def __len__(self) -> int:
        return len(self._own)

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        inputs, labels = self._own.fetch(indices)
        zeros = {
            name: np.zeros((len(indices), *field.shape), field.dtype)
            for name, field in self.sample.labels.items()
            if name not in self._labels
        }
        return (
            {name: taken(inputs) for name, taken in self._inputs.items()},
            zeros | {name: taken(labels) for name, taken in self._labels.items()},
        )


def as_run(source: Source, run: Sample, labels: bool, where: str) -> Source:
    """``source`` with the fields of ``run``; what is missing is refused by name. ``labels``: whether they are looked
    at."""
    remarks: list[str] = []
    inputs = _matched("input", run.inputs, source.sample.inputs, where, remarks)
    fields = {name: _input(name, run.inputs[name], source.sample.inputs[its], where) for name, its in inputs.items()}
    taken = {name: Taken(its, _order(run.inputs[name], fields[name], where)) for name, its in inputs.items()}
    fields = {name: _renamed(field, run.inputs[name]) for name, field in fields.items()}
    own_labels, of_labels = dict(run.labels), {}
    if labels:
        for name, its in _matched("label", run.labels, source.sample.labels, where, remarks).items():
            found = source.sample.labels[its]
            order = _order(run.labels[name], found, where)
            of_labels[name] = Taken(its, order, _lookup(name, run.labels[name], found, where))
            own_labels[name] = _classes_of(run.labels[name], found)
    sample = Sample(fields, own_labels, source.sample.told_classes or run.told_classes)
    everything = {**taken, **of_labels}
    same = labels and sample == source.sample and all(x.plain and x.name == name for name, x in everything.items())
    return source if same and not remarks else Fitted(source, sample, taken, of_labels, remarks)


def _matched(
    kind: str, run: Mapping[str, Field], own: Mapping[str, Field], where: str, remarks: list[str]
) -> dict[str, str]:
    """{name in the run: name in the data}; a single field needs no name."""
    if len(run) == len(own) == 1:
        return {next(iter(run)): next(iter(own))}
    missing, extra = [name for name in run if name not in own], [name for name in own if name not in run]
    if missing:
        what = f"{kind}s {listing(missing)} missing, which the run was trained with; there are {listing(list(own))}"
        raise DataError(what, where=where, fix="give them under these names")
    if extra:
        remarks.append(f"{kind}s {listing(extra)} left out: the run was trained without")
    return {name: name for name in run}


def _input(name: str, run: Field, own: Field, where: str) -> Field:
    if run.whole != own.whole:
        kinds = ["whole numbers" if field.whole else "numbers with a fraction" for field in (own, run)]
        what = f"inputs '{name}' are {own.dtype}, {kinds[0]}, and the run was trained with {run.dtype}, {kinds[1]}"
        raise DataError(what, where=where, fix=f"store them as {run.dtype}")
    return own


def _order(run: Field, own: Field, where: str) -> np.ndarray | None:
    """Of the run's columns in the data; None: as they stand."""
    if not run.columns or not own.columns or run.columns == own.columns:
        return None
    missing = [name for name in run.columns if name not in own.columns]
    if missing:
        what = f"columns {listing(missing)} missing, with which the run was trained"
        raise DataError(what, where=where, fix=f"there are {listing(own.columns)}")
    return np.array([own.columns.index(name) for name in run.columns], np.int64)


def _renamed(own: Field, run: Field) -> Field:
    if not run.columns or not own.columns:
        return replace(own, columns=own.columns or run.columns or ())
    return replace(own, shape=(*own.shape[:-1], len(run.columns)), columns=run.columns)


def _classes_of(run: Field, own: Field) -> Field:
    if not run.classes or not own.classes:
        return own
    return replace(own, classes=run.classes, names=run.names or own.names or ())


def _lookup(name: str, run: Field, own: Field, where: str) -> Lookup | None:
    """From the data's numbers of classes to the run's, which have the same names."""
    if not run.classes or not own.classes:
        return None
    if run.names and own.names:
        strange = [one for one in own.names if one not in run.names]
        if strange:
            raise unknown(strange, "the run", run.names, where)
        return Lookup.of(range(len(own.names)), [run.names.index(one) for one in own.names], NO_VALUE)
    if own.classes > run.classes:
        what = f"labels '{name}' have {own.classes} classes, and the run has {run.classes}"
        raise DataError(what, where=where, fix="mend the labels")
    return None
