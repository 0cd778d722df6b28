"""The confusion matrix of a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hvd_train.core.reductions import ordered_sum
from hvd_train.data.classes import all_names
from hvd_train.data.number_labels import OF_NUMBERS
from hvd_train.errors import ConfigError
from hvd_train.jobs.job import Job
from hvd_train.metrics.metric import says_yes
from hvd_train.protocol import Batch, Field, one_or_all
from hvd_train.report.plots import matrix
from hvd_train.report.text_tables import table

MOST_CLASSES = 20  # up to which the terminal shows the whole matrix
MOST_PAIRS = 20  # number of pairs shown for more classes
LEFT_OUT = "leave it out; predict writes what the model gives"


def confusion(job: Job) -> np.ndarray:
    """Return the confusion matrix (K, K) over all ranks' samples of the job's split; row: true class, column: predicted
    class.

    Labels of tokens or pixels count one by one; unlabelled ones are left out.
    """
    field, classes = label_of(job)
    counts = np.zeros((classes, classes))
    for batch in job.loader(job.split).evaluation():
        actual, predicted = _pairs(job, batch, field, classes)
        np.add.at(counts, (actual, predicted), 1)
    return ordered_sum(counts, job.session.groups.data, "confusion")


def show(counts: np.ndarray, names: Sequence[str], picture: Path) -> str:
    """Draw the matrix. Returns it as a table or, with many classes, the most frequently confused pairs."""
    matrix(counts, names, picture)
    whole = [[int(count) for count in row] for row in counts]
    if len(names) <= MOST_CLASSES:
        rows = [[name, *row] for name, row in zip(names, whole, strict=True)]
        return "\n".join([table(["true \\ predicted", *names], rows), f"picture: {picture}"])
    order = np.argsort(-(counts - np.diag(np.diag(counts))), axis=None, kind="stable")[:MOST_PAIRS]
    pairs = [np.unravel_index(place, counts.shape) for place in order]
    rows = [[names[i], names[j], whole[i][j]] for i, j in pairs if i != j and whole[i][j]]
    return "\n".join([table(["true", "predicted", "samples"], rows), f"picture of all: {picture}"])


def names_of(job: Job, option: str = "--confusion") -> list[str]:
    """Return the names of the classes, or their numbers."""
    field, classes = label_of(job, option)
    return all_names(field.names, classes)


def label_of(job: Job, option: str = "--confusion") -> tuple[Field, int]:
    """Return the only label field and its number of classes. Raises ConfigError (naming ``option``) without one.

    Image labels count as classes whatever the loss is, although a regression loss uses them as numbers.
    """
    labels, losses = job.data.sample.labels, [loss for loss, _ in job.config.task.terms.values()]
    field = one_or_all(labels)
    if isinstance(field, Field) and losses == ["bce"] and not field.shape:
        return field, 2
    if isinstance(field, Field) and field.classes and not {*losses} & {"bce", *OF_NUMBERS}:
        return field, field.classes
    what = f"the labels {', '.join(labels)} are not one label of classes"
    raise ConfigError(what, where=option, fix=LEFT_OUT, common=True)


def logits_of(job: Job, batch: Batch, classes: int, option: str = "--confusion") -> np.ndarray:
    """Compute the logits (n, ..., at least ``classes``) for the labels (n, ...) of a batch.

    The single output of a binary model is the logit of class 1; that of class 0 is then 0.
    """
    outputs = job.frontend.predict(job.frontend.to_device(batch))
    outputs = one_or_all(outputs) if isinstance(outputs, dict) else outputs
    if isinstance(outputs, dict):
        what = f"the model gives {', '.join(outputs)}, and one output has the classes"
        raise ConfigError(what, where=option, fix=LEFT_OUT, common=True)
    outputs, shape = outputs[: batch.count], (batch.count, *one_or_all(dict(batch.labels)).shape[1:])
    if outputs.shape[:-1] == shape and outputs.shape[-1] >= max(2, classes):
        return outputs
    if classes == 2 and outputs.shape in (shape, (*shape, 1)):
        logits = outputs.reshape(*shape, 1)
        return np.concatenate([np.zeros_like(logits), logits], -1)
    what = f"the model gives {outputs.shape[1:]} for a sample, and not a number for each of {classes} classes"
    raise ConfigError(what, where=option, fix=LEFT_OUT, common=True)


def classes_of(labels: np.ndarray, field: Field) -> np.ndarray:
    """Return labels as classes. Fractional binary labels, as of a resized mask, become 0 or 1."""
    return labels if field.classes else says_yes(labels).astype(np.int64)


def labeled(job: Job, labels: np.ndarray, field: Field, classes: int) -> np.ndarray:
    """Return a mask of labels that are classes. ``task.ignore_index`` is never one, even within their range."""
    ignored = (labels == job.config.task.ignore_index) if field.masked else np.zeros(labels.shape, bool)
    return (labels >= 0) & (labels < classes) & ~ignored


def _pairs(job: Job, batch: Batch, field: Field, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the true and the predicted class of each labelled token, pixel or sample, (labels,) each."""
    labels = classes_of(one_or_all(dict(batch.labels))[: batch.count].reshape(-1), field)
    predicted = logits_of(job, batch, classes).argmax(-1).reshape(-1)
    there = labeled(job, labels, field, classes)
    # A model may have more outputs than there are classes: ignore the others.
    there &= predicted < classes
    return labels[there].astype(int), predicted[there]
