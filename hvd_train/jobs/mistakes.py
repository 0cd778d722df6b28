"""The misclassified images with the highest predicted probability."""

from __future__ import annotations

from heapq import nsmallest
from pathlib import Path

import numpy as np

from hvd_train.errors import ConfigError
from hvd_train.jobs.confusion import classes_of, label_of, labeled, logits_of, names_of
from hvd_train.jobs.job import Job
from hvd_train.jobs.prediction_files import sample_names, softmax
from hvd_train.protocol import Field, allgather_json, one_or_all
from hvd_train.report.plots import images
from hvd_train.report.text_tables import table

MOST = 16  # misclassified images to show

# (1 - probability, sample index, true class, predicted class): the smallest are the worst.
Mistake = tuple[float, int, int, int]


def check_images(job: Job) -> None:
    """Refuse data whose samples are not images with one class each."""
    inputs, (label, _) = one_or_all(job.data.sample.inputs), label_of(job, "--mistakes")
    if not isinstance(inputs, Field) or not inputs.image or label.shape:
        what = "the samples are not images with one class each"
        raise ConfigError(what, where="--mistakes", fix="leave it out; --confusion counts classes", common=True)


def mistakes(job: Job) -> list[Mistake]:
    """Return the worst errors over all ranks' samples of the job's split, worst first."""
    field, classes = label_of(job, "--mistakes")
    worst: list[Mistake] = []
    for batch in job.loader(job.split).evaluation():
        labels = classes_of(one_or_all(dict(batch.labels))[: batch.count], field)
        chances = softmax(logits_of(job, batch, classes, "--mistakes").astype(np.float64))  # (n, C)
        predicted = chances.argmax(1)
        wrong = (predicted != labels) & labeled(job, labels, field, classes)
        rows = zip((1 - chances.max(1))[wrong], batch.indices[wrong], labels[wrong], predicted[wrong], strict=True)
        worst = nsmallest(MOST, [*worst, *((float(p), int(i), int(y), int(k)) for p, i, y, k in rows)])
    return nsmallest(MOST, [tuple(one) for part in allgather_json(job.communicator, worst) for one in part])


def show_mistakes(job: Job, worst: list[Mistake], picture: Path) -> str:
    """Draw the images. Returns a table of them."""
    if not worst:
        return "no mistakes: no picture is drawn"
    part, names = job.data.parts[job.split], names_of(job, "--mistakes")
    samples = sample_names(part)
    # A model may have more outputs than there are classes.
    named = [(names[y], names[k] if k < len(names) else str(k), 1 - rest) for rest, _, y, k in worst]
    pixels = one_or_all(dict(part.fetch(np.array([i for _, i, _, _ in worst]))[0]))
    images(pixels, [f"{true}, taken for\n{other} ({p:.2f})" for true, other, p in named], picture)
    rows = [[samples[i], true, other, f"{p:.4f}"] for (_, i, _, _), (true, other, p) in zip(worst, named, strict=True)]
    return "\n".join([table(["sample", "true", "predicted", "probability"], rows), f"picture: {picture}"])
