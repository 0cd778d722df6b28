"""Write a model's predictions to a file: ``hvd-train predict``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.config import Config
from hvd_train.core.agreement import collectively
from hvd_train.errors import ConfigError
from hvd_train.jobs.job import Job
from hvd_train.jobs.prediction_files import ArrayFile, ClassTable, Table, sigmoid
from hvd_train.jobs.trained_run import trained_job
from hvd_train.launch.environment import world
from hvd_train.protocol import Batch, Communicator, Field, one_or_all
from hvd_train.run_folder.terminal import say


def check_output(config: Config, output: Path, overwrite: bool, names: bool) -> None:
    """Raise ConfigError for output files that cannot be written so, before any work.

    ``names``: a table of classes is wanted. Existing files are refused on the rank that writes.
    """
    if names:
        _check_names(config, output)
    elif output.suffix not in (".npy", ".csv", ""):
        what = "predictions are a .npy file or a .csv table"
        raise ConfigError(what, where=f"-o {output}", fix="end its name in .npy or .csv")
    outputs = [name for name in config.task.terms if name and not config.task.step]
    existing = [path for path in map(partial(_file_of, output), outputs or [""]) if path.exists()]
    if existing and not overwrite and world().rank == 0:
        fix = "give --overwrite, or another place with -o"
        raise ConfigError("the file exists already", where=str(existing[0]), fix=fix)


def _check_names(config: Config, output: Path) -> None:
    """Refuse ``--names`` without classes or without a CSV file."""
    other = {name: loss for name, (loss, _) in config.task.terms.items() if not _of_classes(config, name, loss)}
    if other:
        what = f"task.loss: {', '.join(other.values())} has no classes"
        known = "; a loss of your own has, with data.num_classes" if any(":" in loss for loss in other.values()) else ""
        raise ConfigError(what + known, where="--names", fix="leave it out: what the model gives is written as .npy")
    if output.suffix != ".csv":
        raise ConfigError("a table of classes is a CSV file", where=f"-o {output}", fix="end its name in .csv")


def _of_classes(config: Config, name: str, loss: str) -> bool:
    """Return whether the output ``name`` predicts classes; with a user's loss, if the run has classes."""
    classes = config.data.classes
    known = classes.get(name) if isinstance(classes, dict) else classes
    return loss == "cross_entropy" or (":" in loss and bool(known or config.data.num_classes))


def predict(
    config: Config,
    which: str,
    output: Path,
    split: str | None,
    verbose: bool,
    overwrite: bool = False,
    names: bool = False,
) -> int:
    """Write the model's outputs (samples, ...), in the data set's order, as .npy or .csv. All ranks share the work.

    Several outputs become files OUTPUT.NAME.npy. Labels are needed only if they determine the held-out samples.
    A .csv is a table with the numbers in the labels' units, or with the class and the probabilities; ``names``: with
    the class and its probability alone.
    """
    with trained_job(config, which, split, verbose, labels=False) as job:
        communicator, split = job.communicator, job.split
        total = len(job.data.parts[split])
        files, shapes = dict[str, ArrayFile](), dict[str, tuple[int, ...]]()
        try:
            # An array has one shape, so outputs per token or pixel must have the same shape for all samples.
            at_places = any(field.shape for field in job.data.sample.labels.values())
            for batch in job.loader(split).evaluation(whole=at_places):
                outputs = job.frontend.predict(job.frontend.to_device(batch))
                for name, rows in (outputs if isinstance(outputs, dict) else {"": outputs}).items():
                    if name not in files:
                        files[name] = _new_file(job, names, name, rows, _file_of(output, name), overwrite)
                    _check_shape(shapes.setdefault(name, rows.shape[1:]), rows)
                    _write_rows(files[name], rows, batch, communicator, total)
            for file in files.values():
                collectively(communicator, file.close)
        except BaseException:  # also for Ctrl-C, so that no partial file is left
            for file in files.values():
                file.discard()
            raise
        if communicator.rank == 0:
            listed = ", ".join(str(_file_of(output, name)) for name in files)
            say(f"{total:,} predictions of the {split} split: {listed}")
    return 0


def _new_file(job: Job, names: bool, name: str, rows: np.ndarray, output: Path, overwrite: bool) -> ArrayFile:
    """Create the file of the output ``name``. ``rows``: a sample of its rows."""
    sample, labels = job.data.sample, job.data.sample.labels
    field = labels.get(name) or one_or_all(labels)
    if not names and output.suffix != ".csv":
        return ArrayFile(output, overwrite)
    part, where = job.data.parts[job.split], "--names" if names else f"-o {output}"
    loss, _ = job.config.task.term(name)
    if not (names or _of_classes(job.config, name, loss)):
        if rows.ndim > 2:
            what = f"the model gives {rows.shape[1:]} for a sample, which is no row of a table"
            raise ConfigError(what, where=where, fix="end its name in .npy", common=True)
        of_table = job.config.data.labels if isinstance(job.config.data.labels, str) else ""
        titles = _titles(field, labels, rows, of_table)
        return Table(output, overwrite, part, titles, *([sigmoid] if loss == "bce" else []))
    fix = "leave it out: the numbers are written as .npy" if names else "end its name in .npy"
    if not isinstance(field, Field) or field.shape:
        what = "the model predicts a class for each token or pixel"
        raise ConfigError(what, where=where, fix=fix, common=True)
    wanted = max(2, field.classes or sample.declared_classes or 0)
    if rows.ndim != 2 or rows.shape[1] < wanted:  # the argmax of a single number is always 0
        what = f"the model gives {rows.shape[1:]} for a sample, and not a number for each of {wanted} classes"
        raise ConfigError(what, where=where, fix=fix, common=True)
    return ClassTable(output, overwrite, part, field.names, every=not names)


def _titles(field: Any, labels: Mapping[str, Field], rows: np.ndarray, of_table: str) -> Sequence[str]:
    """Return the titles of the model's numbers: the label's columns, or its name; ``of_table``: that of a table."""
    count = rows.shape[1] if rows.ndim > 1 else 1
    columns = field.columns if isinstance(field, Field) else ()
    if len(columns) == count:
        return columns
    name = of_table or next((key for key, one in labels.items() if one is field), "prediction")
    return [name] if count == 1 else [f"{name} {k}" for k in range(count)]


def _file_of(output: Path, name: str) -> Path:
    return output.with_name(f"{output.stem}.{name}{output.suffix}") if name else output


def _check_shape(first: tuple[int, ...], rows: np.ndarray) -> None:
    """Raise an error for rows of another shape than the ``first`` ones, on all ranks alike."""
    if rows.shape[1:] != first:
        what = f"the model gives {first} for some samples and {rows.shape[1:]} for others"
        fix = "with data.lengths, let the model return one shape, or train it with a label for each token"
        raise ConfigError(what, where="predict", fix=fix, common=True)


def _write_rows(file: ArrayFile, rows: np.ndarray, batch: Batch, communicator: Communicator, total: int) -> None:
    """Write the rows that all ranks computed for their parts of a batch, on rank 0."""
    rows = rows[: batch.count]  # (samples of this rank, ...): padding is cut off
    # Each rank sends [int64 indices | rows] of its part. Rank 0 writes them to the file.
    parts = communicator.allgather_bytes(batch.indices.tobytes() + np.ascontiguousarray(rows).tobytes())
    if communicator.rank:
        return
    shape, dtype = rows.shape[1:], rows.dtype
    file.open((total, *shape), dtype)
    width = 8 + dtype.itemsize * math.prod(shape)  # an int64 index, then a row
    for part in parts:
        count = len(part) // width
        file.put(np.frombuffer(part, np.int64, count), part[8 * count :])
