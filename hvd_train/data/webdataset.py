"""WebDataset: images and classes in tar files, which are read without unpacking.

The files of a sample share a folder and a name up to the first dot: ``0001.jpg`` and ``0001.cls``. The headers of a
tar file tell where its files begin, so samples are read in any order. Training shuffles them by seed, on any number of
ranks, whatever the order within the shards.

Source of the format: the documentation of the package ``webdataset``, https://github.com/webdataset/webdataset.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from hvd_train.data.images import PART_NAMES, SUFFIXES, Listing, add_images, part_of
from hvd_train.errors import DataError

CLASS, JSON = ".cls", ".json"
JSON_KEYS = ("cls", "label")
END = bytes(512)  # a block of zeros ends an archive
PIECE = 1 << 20  # bytes read at once


class _Header(tarfile.TarInfo):
    """A header of a tar file that refuses a negative size, which hangs Python before 3.11.14."""

    def _block(self, count: int) -> int:
        if count < 0:
            raise tarfile.ReadError(f"a header says that a file has {count:,} bytes")
        return super()._block(count)  # type: ignore[misc]


class _Section(io.RawIOBase):
    """A file object for a section of another file."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._position = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}
        self._position = max(0, offset + bases[whence])
        return self._position

    def readinto(self, buffer) -> int:
        self._file.seek(self._start + self._position)
        data = self._file.read(max(0, min(len(buffer), self._size - self._position)))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


@dataclass(frozen=True, slots=True)
class TarMember:
    """A file within a tar file, whose data begin at byte ``start``."""

    tar: Path
    name: str
    start: int
    size: int

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def open(self, mode: str = "rb") -> BinaryIO:
        return io.BufferedReader(_Section(self.tar.open("rb"), self.start, self.size))

    def read(self) -> bytes:
        with self.open() as file:
            return file.read()

    def __str__(self) -> str:
        return f"{self.tar}/{self.name}"


def tar_files(folder: Path) -> list[Path]:
    """Return the tar files of a folder and of its direct subfolders, sorted by name."""
    return sorted(x for pattern in ("*.tar", "*/*.tar") for x in folder.glob(pattern) if not x.name.startswith("."))


def find_shards(path: Path) -> dict[str, list[Path]]:
    """Return {part: its tar files}, or {"all": ...} if no name tells a part.

    The part is a word of the file name (``val-0003.tar``, ``photos-val-0003.tar``) or the folder (``val/0003.tar``).
    """
    if not path.is_dir():
        return {"all": [path]}
    by_part: dict[str | None, list[Path]] = {}
    for file in tar_files(path):
        words = re.findall("[A-Za-z]+", file.stem) if file.parent == path else [file.parent.name]
        named = {part_of(word) for word in words} - {None}
        by_part.setdefault(named.pop() if len(named) == 1 else None, []).append(file)
    others = by_part.pop(None, [])
    if not by_part and not others:
        fix = "compressed ones (.tar.gz) are not read: unpack them with gunzip"
        raise DataError("no .tar files", where=str(path), fix=fix)
    if not by_part:
        return {"all": others}
    if others or "train" not in by_part:
        what = f"{others[0].name} beside those of {', '.join(map(str, by_part))}" if others else "no training part"
        fix = f"put the name of its part into each file name: {', '.join(names[0] for names in PART_NAMES.values())}"
        raise DataError(what, where=str(path), fix=fix)
    return {str(part): files for part, files in by_part.items()}


def list_samples(files: Iterable[Path], where: Path, labels: bool) -> Listing:
    """Read the headers of tar files and of their images, and with ``labels`` the class of each sample."""
    listing, pairs = Listing(where, numbered=True), []
    for tar in files:
        for members in _samples(tar):
            pictures = [member for suffix, member in members.items() if suffix.endswith(SUFFIXES)]
            for suffix in set(members) - {CLASS, JSON}:
                if members[suffix] not in pictures:
                    listing.skipped.setdefault(tar.name, Counter())[suffix] += 1
            if len(pictures) > 1:
                what = f"a sample of several images: {', '.join(PurePosixPath(x.name).name for x in pictures)}"
                raise DataError(what, where=str(tar), fix="keep one, or write a data function that reads them")
            if not pictures:
                listing.skipped.setdefault(tar.name, Counter())["samples without an image"] += 1
                continue
            pairs.append((_class_of(members, pictures[0]) if labels else "", pictures[0]))
    add_images(listing, pairs)
    if not listing.files:
        raise DataError("no images in the tar files", where=str(where), fix="each sample is NAME.jpg and NAME.cls")
    return listing


def _samples(tar: Path) -> Iterator[dict[str, TarMember]]:
    """Yield for each sample of a tar file {lower-case name from the first dot on: the file}."""
    samples: dict[str, dict[str, TarMember]] = {}
    for member in _members(tar):
        folder, _, name = member.name.rpartition("/")
        stem, dot, suffix = name.partition(".")
        if not stem or not dot:  # a hidden file, or one without a suffix
            continue
        sample = samples.setdefault(f"{folder}/{stem}", {})
        if sample.setdefault(f".{suffix.lower()}", member) is not member:
            raise DataError(f"two files are called {member.name}", where=str(tar), fix="give each sample another name")
    yield from samples.values()


def _members(tar: Path) -> list[TarMember]:
    """Return the regular files of an archive, which must be complete: a truncated copy would lose samples."""
    try:
        with tarfile.open(tar, "r:", tarinfo=_Header) as archive:
            members = [TarMember(tar, one.name, one.offset_data, one.size) for one in archive if one.isreg()]
            end = archive.offset
        with tar.open("rb") as file:
            file.seek(end)
            whole = file.read(len(END)) == END
            more = whole and any(piece.strip(b"\0") for piece in iter(partial(file.read, PIECE), b""))
    except (OSError, tarfile.TarError, ValueError, OverflowError, IndexError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        fix = "a compressed one must be unpacked: gunzip" if tar.suffix != ".tar" else "copy it again"
        raise DataError(f"the tar file cannot be read: {reason}", where=str(tar), fix=fix) from error
    if not whole:
        raise DataError("the tar file is cut off", where=str(tar), fix="copy it again")
    if more:
        what = "there are data after the end of the archive, as if tar files were joined by cat"
        raise DataError(what, where=str(tar), fix="keep them as separate files, or join them with tar -A")
    return members


def _class_of(members: dict[str, TarMember], image: TarMember) -> str:
    """Read the class of a sample, as text."""
    if CLASS in members:
        try:
            text = members[CLASS].read().decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            fix = "write the class as UTF-8 text"
            raise DataError("a class that is not UTF-8", where=str(members[CLASS]), fix=fix) from error
        if not text:
            raise DataError("a class without a name", where=str(members[CLASS]), fix="write its name or number into it")
        return text
    if JSON in members:
        try:
            value = json.loads(members[JSON].read())
            classes = [value[key] for key in JSON_KEYS if key in value]
        except (ValueError, TypeError) as error:
            raise DataError(f"not a JSON object: {error}", where=str(members[JSON]), fix='write {"cls": 3}') from error
        text = str(classes[0]).strip() if classes and not isinstance(classes[0], bool) else ""
        if text and isinstance(classes[0], str | int | float):
            return text
    fix = f"put its class into {PurePosixPath(image.name).stem}{CLASS}, or under '{JSON_KEYS[0]}' of {JSON}"
    raise DataError("a sample without a class", where=str(image), fix=fix)
