"""The manifest of a packed data set: parts, fields and files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from hvd_train.errors import DataError
from hvd_train.protocol import Field

MANIFEST, VERSION = "manifest.json", 1
KINDS = ("inputs", "labels")
AGAIN = "pack it again"


class _Record(BaseModel):
    """The base class of all entries in the manifest; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Shard(_Record):
    """A file with ``count`` rows of one field, its size in bytes, and its SHA-256."""

    file: str
    count: PositiveInt
    size: PositiveInt
    sha256: str


class PackedColumn(_Record):
    """A field and the files that hold it."""

    field: Field
    shards: list[Shard]


class PackedPart(_Record):
    """A part of the data; ``rows``: the number of samples in each shard except the last."""

    count: PositiveInt
    rows: PositiveInt
    fingerprint: str
    note: str
    inputs: dict[str, PackedColumn]
    labels: dict[str, PackedColumn]

    def columns(self) -> Iterator[tuple[str, str, PackedColumn]]:
        """Yield ("inputs" or "labels", name, column) of each field."""
        for kind in KINDS:
            for name, column in getattr(self, kind).items():
                yield kind, name, column


class PackManifest(_Record):
    """The contents of a packed folder.

    ``classes``: for each label, whether it was packed as classes. ``vocabulary``: the tokenizer of a text, as JSON.
    ``fitted``: how the columns of a table were prepared, as data.fitted.
    """

    version: Literal[1]
    packed_from: str
    classes: dict[str, bool]
    ignore_index: int
    train: PackedPart
    val: PackedPart
    test: PackedPart | None = None
    vocabulary: str = ""
    fitted: list[dict[str, Any]] | None = None

    def shards(self) -> Iterator[tuple[PackedColumn, Shard]]:
        """Yield every file of all parts, with its column."""
        for part in filter(None, (self.train, self.val, self.test)):
            for _, _, column in part.columns():
                for shard in column.shards:
                    yield column, shard


def read_manifest(folder: Path) -> PackManifest:
    path = folder / MANIFEST
    try:
        return PackManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        fix = "see 'hvd-train data pack --help'; if packing was interrupted, pack again"
        raise DataError("this is not a packed data set, or an incomplete one", where=str(path), fix=fix) from error
    except OSError as error:
        raise DataError(f"the manifest cannot be read: {error.strerror}", where=str(path)) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        raise DataError(
            f"this is not the manifest of a packed data set: {what}"[:300], where=str(path), fix=AGAIN
        ) from error


def summary(manifest: PackManifest) -> str:
    """Describe a packed data set as "1,437 training and 360 validation samples, 4 files, 1.5 MB"."""
    shards = [shard for _, shard in manifest.shards()]
    size = sum(shard.size for shard in shards) / 1e6
    tests = f", {manifest.test.count:,} test samples" if manifest.test else ""
    return (
        f"{manifest.train.count:,} training and {manifest.val.count:,} validation samples{tests}, {len(shards)} files, "
        f"{size:,.1f} MB"
    )
