"""Resolve ``task.class_weights``, given by class name or as ``balanced``, to a number for each class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvd_train.config import Config
from hvd_train.config.names import did_you_mean
from hvd_train.core.agreement import collectively
from hvd_train.data.balanced import labels_of
from hvd_train.data.classes import all_names
from hvd_train.data.dataset import DataSet
from hvd_train.errors import ConfigError
from hvd_train.protocol import Communicator, Field, Source, broadcast_json

WHERE = "task.class_weights"


def with_class_weights(config: Config, data: DataSet, communicator: Communicator) -> Config:
    """Return the configuration with ``task.class_weights``, if set, as a number for each class.

    Only rank 0 counts the labels, reading all samples once if a source cannot give labels separately.
    """
    wanted, ignore, rank = config.task.class_weights, config.task.ignore_index, communicator.rank
    if wanted is None or not data.sample.labels:
        return config
    ((name, field),) = data.sample.labels.items()
    local = collectively(communicator, lambda: _numbers(wanted, name, field, data, ignore) if rank == 0 else [])
    weights = broadcast_json(communicator, local)
    return config.model_copy(update={"task": config.task.model_copy(update={"class_weights": weights})})


def _numbers(wanted: Any, name: str, field: Field, data: DataSet, ignore: int) -> list[float]:
    classes = field.classes or 0
    if isinstance(wanted, Mapping):
        names = all_names(field.names, classes)
        if unknown := [one for one in wanted if one not in names]:
            raise ConfigError(did_you_mean(unknown[0], names), where=WHERE, fix="name classes of the data")
        return [float(wanted.get(one, 1.0)) for one in names]
    if wanted != "balanced":
        if len(wanted) != classes:
            raise ConfigError(
                f"{len(wanted)} numbers for {classes} classes", where=WHERE, fix="give one for each class"
            )
        return [float(weight) for weight in wanted]
    ignored = ignore if field.masked else None
    counts, real = class_counts(data.train, name, classes, ignored), np.arange(classes) != ignored
    if not counts[real].all():
        missing = np.flatnonzero(real & (counts == 0))
        lacking = ", ".join(all_names(field.names, classes)[k] for k in missing[:10])
        what = f"no training sample is of class {lacking}, so nothing balances it"
        raise ConfigError(
            what,
            where=WHERE,
            fix="give the weights by name, or leave the class out of data.classes and data.num_classes",
        )
    # As in scikit-learn: each class has the same total weight, and the mean weight of a sample is 1.
    return (counts.sum() / (real.sum() * np.where(real, counts, np.inf))).tolist()


def class_counts(source: Source, name: str, classes: int, ignored: int | None = None) -> np.ndarray:
    """Count the labels of each class (classes,), except missing and ``ignored`` ones."""
    counts = np.zeros(classes)
    for labels in labels_of(source, name):
        known = labels[(labels >= 0) & (labels < classes) & (labels != ignored)]
        counts += np.bincount(known, minlength=classes)
    return counts
