"""Map new data to the fields of a trained run: names of fields, order of columns, numbers of classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from hvd_train.data.classes import Lookup, by_number, unknown, values_of
from hvd_train.data.column import INPUT, LABEL
from hvd_train.data.wrapper import Wrapper, drawn
from hvd_train.errors import DataError, listing
from hvd_train.protocol import Field, Fields, Sample, Source


@dataclass(frozen=True)
class FieldMap:
    """The conversion of a field of the data to a field of the run.

    ``name``: its name in the data; ``order``: the columns to take; ``lookup``: class numbers in the data -> in the run;
    ``dtype``: the type to cast to. None: no change.
    """

    name: str
    order: np.ndarray | None = None
    lookup: Lookup | None = None
    names: tuple[str, ...] = ()  # the run's, for messages
    where: str = ""
    dtype: str | None = None

    @property
    def plain(self) -> bool:
        return self.order is None and self.lookup is None and self.dtype is None

    def __call__(self, fields: Fields) -> np.ndarray:
        x = fields[self.name]
        x = x if self.order is None else x[..., self.order]
        if self.lookup is None:
            return x if self.dtype is None else x.astype(self.dtype)
        numbers = self.lookup(x)
        strange = (numbers < 0) & (numbers != self.lookup.ignore)
        if strange.any():
            raise unknown(sorted(set(x[strange].tolist())), "the run", self.names, self.where)
        return numbers.astype(x.dtype)


class Fitted(Wrapper):
    """A source that wraps another one and returns the fields of a trained run; labels not needed are zeros."""

    def __init__(
        self,
        source: Source,
        sample: Sample,
        inputs: Mapping[str, FieldMap],
        labels: Mapping[str, FieldMap],
        remarks: list[str],
    ) -> None:
        super().__init__(source, sample)
        self._inputs, self._labels = inputs, labels
        self.remarks += tuple(remarks)
        if hasattr(source, "label"):
            self.label = self._label

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        return self._fitted(self._source.fetch(indices), len(indices))

    def drawn(self, indices: np.ndarray, seed: int, epoch: int, *keys: np.ndarray) -> tuple[Fields, Fields]:
        return self._fitted(drawn(self._source, indices, seed, epoch, *keys), len(indices))

    def _fitted(self, fetched: tuple[Fields, Fields], count: int) -> tuple[Fields, Fields]:
        inputs, labels = fetched
        return (
            {name: field_map(inputs) for name, field_map in self._inputs.items()},
            {
                name: self._labels[name](labels) if name in self._labels else self._zeros(name, count)
                for name in self.sample.labels
            },
        )

    def _zeros(self, name: str, count: int) -> np.ndarray:
        """Return placeholder labels, so that batches have all fields of the run."""
        field = self.sample.labels[name]
        return np.zeros((count, *field.shape), field.dtype)

    def _label(self, name: str, indices: np.ndarray) -> np.ndarray:
        """Return label ``name`` (k, ...) of the samples ``indices`` (k,) without reading their inputs."""
        if name not in self._labels:
            return self._zeros(name, len(indices))
        field_map = self._labels[name]
        return field_map({field_map.name: self._source.label(field_map.name, indices)})  # type: ignore[attr-defined]


def as_run(source: Source, run: Sample, labels: bool, where: str, ignore: int) -> Source:
    """Convert ``source`` to the fields of ``run``; a missing field is a DataError.

    ``labels``: whether labels are needed. ``ignore``: task.ignore_index.
    """
    remarks: list[str] = []
    inputs = _matched("input", run.inputs, source.sample.inputs, where, remarks)
    fields = {
        name: _input(name, run.inputs[name], source.sample.inputs[its], where, remarks) for name, its in inputs.items()
    }
    input_maps = {
        name: FieldMap(its, _order(run.inputs[name], fields[name], where, remarks)) for name, its in inputs.items()
    }
    fields = {name: _renamed(field, run.inputs[name]) for name, field in fields.items()}
    label_fields, label_maps = dict(run.labels), {}
    if labels:
        for name, its in _matched("label", run.labels, source.sample.labels, where, remarks).items():
            field = source.sample.labels[its]
            order = _order(run.labels[name], field, where, remarks)
            lookup = _lookup(name, run.labels[name], field, where, remarks, ignore)
            dtype = _widest([field, run.labels[name]])
            label_maps[name] = FieldMap(its, order, lookup, run.labels[name].names, where, _other(field, dtype))
            columns = run.labels[name].columns if order is not None else field.columns
            label_fields[name] = replace(
                _classes_of(run.labels[name], field), dtype=dtype or field.dtype, columns=columns
            )
            _remark_on_label(name, run.labels[name], field, dtype, remarks)
    sample = Sample(fields, label_fields, source.sample.declared_classes or run.declared_classes)
    everything = {**input_maps, **label_maps}
    same = labels and sample == source.sample and all(x.plain and x.name == name for name, x in everything.items())
    return source if same and not remarks else Fitted(source, sample, input_maps, label_maps, remarks)


WIDTHS = ("bool", "int64", "float32")  # dtypes of labels that are not classes; each can hold the ones before


def _widest(fields: Iterable[Field]) -> str | None:
    """Return the dtype that holds the numbers of all these labels, or None if some are classes or images."""
    kinds = [field.dtype if field.divisor == 1 and not field.classes else "" for field in fields]
    return max(kinds, key=WIDTHS.index) if all(kind in WIDTHS for kind in kinds) else None


def _other(field: Field, dtype: str | None) -> str | None:
    return dtype if dtype != field.dtype else None


def of_one_type(parts: Mapping[str, Source]) -> dict[str, Source]:
    """Convert labels that are numbers to the same dtype in all parts: one part may hold fractions, another integers."""
    made = dict(parts)
    samples = [part.sample for part in parts.values()]
    shared = [name for name in samples[0].labels if all(name in sample.labels for sample in samples)]
    types = {name: _widest(sample.labels[name] for sample in samples) for name in shared}
    for title, part in parts.items():
        its = part.sample.labels
        others = {name: dtype for name, dtype in types.items() if dtype and its[name].dtype != dtype}
        if others:
            labels = {name: replace(field, dtype=others.get(name, field.dtype)) for name, field in its.items()}
            maps = {name: FieldMap(name, dtype=others.get(name)) for name in its}
            inputs = {name: FieldMap(name) for name in part.sample.inputs}
            made[title] = Fitted(part, replace(part.sample, labels=labels), inputs, maps, [])
    return made


def _remark_on_label(name: str, run: Field, data: Field, dtype: str | None, remarks: list[str]) -> None:
    """Add a remark if labels have another kind, dtype or scale than in the run."""
    if data.names and not run.classes:
        remarks.append(f"labels '{name}' are classes, and the run was trained with numbers: {_numbers(data)}")
    elif run.names and not data.classes:
        remarks.append(f"labels '{name}' are numbers, and the run was trained with classes: {_numbers(run)}")
    elif run.divisor != data.divisor:
        remarks.append(f"labels '{name}' are {_scale(data)}, and the run was trained with {_scale(run)}")
    elif dtype and dtype != run.dtype:
        remarks.append(f"labels '{name}' are {data.dtype}, and the run was trained with {run.dtype}")


def _numbers(field: Field) -> str:
    return listing([f"{one} {k}" for k, one in enumerate(field.names)])


def _matched(
    kind: str, run: Mapping[str, Field], data: Mapping[str, Field], where: str, remarks: list[str]
) -> dict[str, str]:
    """Match fields by name: {name in the run: name in the data}. A single field matches whatever its name."""
    if len(run) == len(data) == 1:
        (name,), (its,) = run, data
        if name != its and not {name, its} & {INPUT, LABEL}:
            remarks.append(f"{kind} {its} is used as {name}, its name in the run")
        return {name: its}
    missing, extra = [name for name in run if name not in data], [name for name in data if name not in run]
    if missing:
        what = f"{kind}s {listing(missing)} missing, which the run was trained with; there are {listing(list(data))}"
        raise DataError(what, where=where, fix="give them under these names")
    if extra:
        remarks.append(f"{kind}s {listing(extra)} left out: the run was trained without")
    return {name: name for name in run}


def _input(name: str, run: Field, data: Field, where: str, remarks: list[str]) -> Field:
    if run.whole != data.whole:
        kinds = ["whole numbers" if field.whole else "numbers with a fraction" for field in (data, run)]
        what = f"inputs '{name}' are {data.dtype}, {kinds[0]}, and the run was trained with {run.dtype}, {kinds[1]}"
        raise DataError(what, where=where, fix=f"store them as {run.dtype}")
    if run.divisor != data.divisor:
        scales = [_scale(field) for field in (data, run)]
        remarks.append(f"inputs '{name}' are {scales[0]}, and the run was trained with {scales[1]}")
    if run.shape != data.shape and not (run.columns or data.columns or run.ragged):
        remarks.append(f"inputs '{name}' have the shape {data.shape}, and the run was trained with {run.shape}")
    return data


def on_normalization(run: Sample, sample: Sample) -> list[str]:
    """Return a remark for each input that is normalized differently than in the run."""
    lines = []
    for name, field in run.inputs.items():
        its = sample.inputs.get(name)
        if its and (its.mean, its.std) != (field.mean, field.std):
            now, before = _normalized(its), _normalized(field)
            lines.append(f"inputs '{name}' are {now}, and in the training they were {before} (data.transforms)")
    return lines


def _normalized(field: Field) -> str:
    if not field.mean:
        return "not normalized"
    less, over = (", ".join(f"{x:g}" for x in numbers) for numbers in (field.mean, field.std))
    return f"normalized by mean {less} and std {over}"


def _scale(field: Field) -> str:
    return f"{field.dtype} {'as stored' if field.divisor == 1 else f'divided by {field.divisor:g}'}"


def _order(run: Field, data: Field, where: str, remarks: list[str]) -> np.ndarray | None:
    """Return the indices of the run's columns in the data; None: the same order."""
    if run.columns and not data.columns:
        remarks.append(f"the data do not name their columns: they are taken as {listing(run.columns)}")
    if not run.columns or not data.columns or run.columns == data.columns:
        return None
    missing = [name for name in run.columns if name not in data.columns]
    if missing:
        what = f"columns {listing(missing)} missing, with which the run was trained"
        raise DataError(what, where=where, fix=f"there are {listing(data.columns)}")
    return np.array([data.columns.index(name) for name in run.columns], np.int64)


def _renamed(data: Field, run: Field) -> Field:
    if not run.columns or not data.columns or run.columns == data.columns:
        return replace(data, columns=data.columns or run.columns)
    return replace(data, shape=(*data.shape[:-1], len(run.columns)), columns=run.columns)


def _classes_of(run: Field, data: Field) -> Field:
    if not run.classes or not data.classes:
        return data
    return replace(data, classes=run.classes, names=run.names)


def _lookup(name: str, run: Field, data: Field, where: str, remarks: list[str], ignore: int) -> Lookup | None:
    """Map class numbers in the data to those of the run, by class name; a class without a name is its number."""
    if not run.classes or not data.classes:
        return None
    if data.names:
        names = run.names or tuple(map(str, range(run.classes)))
        strange = [one for one in data.names if one not in names]
        if strange and not run.names:
            what = f"labels '{name}' have the classes {listing(data.names)}, and those of the run are numbers"
            raise DataError(what, where=where, fix="give data.classes: their names in the order of the run's numbers")
        if strange:
            raise unknown(strange, "the run", names, where)
        return Lookup.of(range(len(data.names)), [names.index(one) for one in data.names], ignore)
    if run.names and (values := values_of(run.names)) is not None:
        return Lookup.of(values, range(len(run.names)), ignore)
    if run.names:
        remarks.append(by_number(f"labels '{name}'", run.names))
    if data.classes > run.classes:
        what = f"labels '{name}' have {data.classes} classes, and the run has {run.classes}"
        raise DataError(what, where=where, fix="correct the labels")
    return None
