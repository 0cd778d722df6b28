"""A data set with its parts, and the request to open one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hvd_train.config import DataConfig, TaskConfig
from hvd_train.data.classes import Known
from hvd_train.data.combined import joined_samples
from hvd_train.errors import DataError
from hvd_train.protocol import Sample, Source


@dataclass(frozen=True)
class DataRequest:
    """The parts and fields that a command needs of a data set.

    run: the fields of the run whose checkpoint is used; None: a new run. split: train, val, test or all; None: train
    and val. labels: whether labels are needed. test: whether a test part is opened, too. vocabulary: the tokenizer of
    the run, as JSON.
    """

    run: Sample | None = None
    split: str | None = None
    labels: bool = True
    test: bool = False
    vocabulary: str = ""

    @property
    def reads_test(self) -> bool:
        """Return whether a test part is opened; training does not need it."""
        return self.test or self.split in ("test", "all")


NEW_RUN = DataRequest()


class Divisible(Source, Protocol):
    """Samples of which some can be held out; both methods return (training, held out)."""

    def split(self, fraction: float) -> tuple[Source, Source]: ...

    def fold(self, part: int, parts: int) -> tuple[Source, Source]: ...


@dataclass(frozen=True)
class Whole:
    """Samples that are not yet split into training and validation (``fraction``), and a test part, if any."""

    samples: Divisible
    fraction: float
    test: Source | None = None


# Parts by name (train, val, test), or samples still to be split.
Parts = dict[str, Source] | Whole


@dataclass(frozen=True)
class DataSet:
    """The sources of a data set by the names of their parts: train, val and test, or all.

    A training has at least train and val. ``vocabulary``: the tokenizer of a text, as JSON. ``fitted``: what was
    computed from the training samples to prepare the columns of a table.
    """

    name: str
    parts: Mapping[str, Source]
    vocabulary: str = ""
    fitted: list[dict[str, Any]] | None = None

    @property
    def train(self) -> Source:
        return self.parts["train"]

    @property
    def val(self) -> Source:
        return self.parts["val"]

    @property
    def sample(self) -> Sample:
        return joined_samples(self.parts.values())

    @property
    def remarks(self) -> list[str]:
        """Return the remarks of all parts, each line once."""
        return list(dict.fromkeys(line for part in self.parts.values() for line in getattr(part, "remarks", ())))

    @property
    def fingerprint(self) -> str:
        """Return a hash of the contents, independent of paths."""
        fingerprints = " ".join(part.fingerprint for part in self.parts.values())
        return hashlib.sha256(fingerprints.encode()).hexdigest()[:12]


def known(config: DataConfig, request: DataRequest, count: int | None = None) -> Known:
    """Return the classes known before the data are read; ``count``: the data set's fixed number of classes, if any."""
    return Known.of(config, request.run).with_count(count)


def class_task(task: TaskConfig) -> TaskConfig:
    """Return a task whose labels are classes for any loss: a user's loss may take classes, too."""
    return TaskConfig(ignore_index=task.ignore_index)


def existing_path(config: DataConfig) -> Path:
    """Return ``data.path``, which must be a file or a folder."""
    if config.path is None:
        raise DataError(
            f"data set '{config.name}' needs a path", where="data.path", fix="give the file or folder of the data"
        )
    path = Path(config.path).expanduser()
    if not path.exists():
        fix = "" if path.is_absolute() else f"it starts in the current folder, {Path.cwd()}; give --set data.path=PATH"
        raise DataError("there is no such file or folder", where=f"data.path: {path}", fix=fix)
    return path


def existing_folder(config: DataConfig) -> Path:
    """Return ``data.path``, which must be a folder."""
    path = existing_path(config)
    if not path.is_dir():
        raise DataError(f"data set '{config.name}' is a folder, and this is a file", where=f"data.path: {path}")
    return path
