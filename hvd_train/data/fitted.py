"""Data for a finished run: its fields by their names, its columns in their order, its classes by their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from hvd_train.data.classes import Lookup, by_number, listing, unknown, values_of
from hvd_train.data.column import INPUT, LABEL
from hvd_train.errors import DataError
from hvd_train.protocol import Field, Fields, Sample, Source


@dataclass(frozen=True)
class Taken:
    """The way from the data to a field of the run: ``name``: there; ``order``: of its columns; ``lookup``: from its
    numbers of classes to the run's. None: as it is."""

    name: str
    order: np.ndarray | None = None
    lookup: Lookup | None = None
    names: tuple[str, ...] = ()  # the run's, for messages
    where: str = ""

    @property
    def plain(self) -> bool:
        return self.order is None and self.lookup is None

    def __call__(self, fields: Fields) -> np.ndarray:
        x = fields[self.name]
        x = x if self.order is None else x[..., self.order]
        if self.lookup is None:
            return x
        found = self.lookup(x)
        strange = (found < 0) & (found != self.lookup.ignore)
        if strange.any():
            raise unknown(sorted(set(x[strange].tolist())), "the run", self.names, self.where)
        return found.astype(x.dtype)


class Fitted:
    """Another source's samples as a run knows them; labels that are not looked at are zeros."""

    def __init__(
        self, own: Source, sample: Sample, inputs: Mapping[str, Taken], labels: Mapping[str, Taken], remarks: list[str]
    ) -> None:
        self._own, self.sample, self._inputs, self._labels = own, sample, inputs, labels
        self.fingerprint, self.note = own.fingerprint, getattr(own, "note", "")
        self.files, self.rows = getattr(own, "files", ()), getattr(own, "rows", None)
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


def as_run(source: Source, run: Sample, labels: bool, where: str, ignore: int) -> Source:
    """``source`` with the fields of ``run``; what is missing is refused by name. ``labels``: whether they are looked
    at; ``ignore``: the label of places that do not count."""
    remarks: list[str] = []
    inputs = _matched("input", run.inputs, source.sample.inputs, where, remarks)
    fields = {
        name: _input(name, run.inputs[name], source.sample.inputs[its], where, remarks) for name, its in inputs.items()
    }
    taken = {name: Taken(its, _order(run.inputs[name], fields[name], where, remarks)) for name, its in inputs.items()}
    fields = {name: _renamed(field, run.inputs[name]) for name, field in fields.items()}
    own_labels, of_labels = dict(run.labels), {}
    if labels:
        for name, its in _matched("label", run.labels, source.sample.labels, where, remarks).items():
            found = source.sample.labels[its]
            order = _order(run.labels[name], found, where, remarks)
            lookup = _lookup(name, run.labels[name], found, where, remarks, ignore)
            of_labels[name] = Taken(its, order, lookup, run.labels[name].names or (), where)
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
        (name,), (its,) = run, own
        if name != its and not {name, its} & {INPUT, LABEL}:
            remarks.append(f"{kind} {its} is taken as {name}, by which name the run knows it")
        return {name: its}
    missing, extra = [name for name in run if name not in own], [name for name in own if name not in run]
    if missing:
        what = f"{kind}s {listing(missing)} missing, which the run was trained with; there are {listing(list(own))}"
        raise DataError(what, where=where, fix="give them under these names")
    if extra:
        remarks.append(f"{kind}s {listing(extra)} left out: the run was trained without")
    return {name: name for name in run}


def _input(name: str, run: Field, own: Field, where: str, remarks: list[str]) -> Field:
    if run.whole != own.whole:
        kinds = ["whole numbers" if field.whole else "numbers with a fraction" for field in (own, run)]
        what = f"inputs '{name}' are {own.dtype}, {kinds[0]}, and the run was trained with {run.dtype}, {kinds[1]}"
        raise DataError(what, where=where, fix=f"store them as {run.dtype}")
    if run.divisor != own.divisor:
        told = [_scale(field) for field in (own, run)]
        remarks.append(f"inputs '{name}' are {told[0]}, and the run was trained with {told[1]}")
    return own


def _scale(field: Field) -> str:
    return f"{field.dtype} {'as stored' if field.divisor == 1 else f'divided by {field.divisor:g}'}"


def _order(run: Field, own: Field, where: str, remarks: list[str]) -> np.ndarray | None:
    """Return the places of the run's columns in the data; None: as they stand."""
    if run.columns and not own.columns:
        remarks.append(f"the data do not tell the names of columns: they are taken as {listing(run.columns)}")
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
    return replace(own, classes=run.classes, names=(own.names or ()) if run.names is None else run.names)


def _lookup(name: str, run: Field, own: Field, where: str, remarks: list[str], ignore: int) -> Lookup | None:
    """Map the data's numbers of classes to the run's of the same names. A number without a name is called as
    it is."""
    if not run.classes or not own.classes:
        return None
    if own.names and run.names is not None:
        names = run.names or tuple(map(str, range(run.classes)))
        strange = [one for one in own.names if one not in names]
        if strange and not run.names:
            what = f"labels '{name}' have the classes {listing(own.names)}, and those of the run are numbers"
            raise DataError(what, where=where, fix="give data.classes: their names in the order of the run's numbers")
        if strange:
            raise unknown(strange, "the run", names, where)
        return Lookup.of(range(len(own.names)), [names.index(one) for one in own.names], ignore)
    if run.names and (values := values_of(run.names)) is not None:
        return Lookup.of(values, range(len(run.names)), ignore)
    if run.names:
        remarks.append(by_number(f"labels '{name}'", run.names))
    if own.classes > run.classes:
        what = f"labels '{name}' have {own.classes} classes, and the run has {run.classes}"
        raise DataError(what, where=where, fix="mend the labels")
    return None
