"""Folders of images: find the parts and classes, read the headers, and decode the pixels."""

from __future__ import annotations

import struct
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hvd_train.data.formats import unreadable
from hvd_train.data.memory import check_free
from hvd_train.errors import DataError

# Allowed names of the parts, as a folder, a file or the first half of an array's name.
PART_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
# Suffixes of images. A file with such a suffix must be readable; other files are tried, and skipped if they are not.
SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".avif", ".jp2", ".ppm", ".pgm",
    ".pbm", ".pnm",
)  # fmt: skip
# Formats recognized by their first bytes, whatever the suffix.
BY_CONTENT = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "AVIF", "JPEG2000")
# Pillow opens these, but needs other programs to decode them.
NOT_DECODED = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
# What Pillow raises for damaged files.
BROKEN = (OSError, SyntaxError, ValueError, struct.error, KeyError, IndexError, TypeError, OverflowError, EOFError)
GRAY = ("L", "1", "LA")
# The EXIF tag, and its values that swap height and width.
ORIENTATION, LYING = 0x0112, (5, 6, 7, 8)
LISTED = 10  # classes listed in a message
NOT_IN_A_CLASS = "beside the classes"
TOGETHER = 64  # headers that a thread reads at once
THREADS = 8  # more than cores: a network file system has a high latency


def part_of(name: str) -> str | None:
    """Return the part (train, val or test) that a name of a folder, file or array means, or None."""
    return next((part for part, names in PART_NAMES.items() if name.lower() in names), None)


def _hidden(path: Path) -> bool:
    """Return whether a program created it, not the user: .ipynb_checkpoints, ._x, __MACOSX."""
    return path.name.startswith((".", "__MACOSX"))


def find_parts(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Return {part: its folder}, and the other folders with images, which are not read.

    Without a training folder there are no parts: the folders are classes.
    """
    folders = [path for path in sorted(folder.iterdir()) if path.is_dir() and not _hidden(path)]
    by_part: dict[str, list[Path]] = {}
    for path in folders:
        if part := part_of(path.name):
            by_part.setdefault(part, []).append(path)
    # Folders named like a part that hold folders, which must be classes.
    held = [path for part, paths in by_part.items() if part != "train" for path in paths if _holds_folders(path)]
    if "train" not in by_part:
        if held:
            names = ", ".join(PART_NAMES["train"])
            what = f"{held[0].name} holds classes, and there is no training part next to it"
            raise DataError(what, where=str(folder), fix=f"call the folder for training one of {names}")
        return {}, []
    if not (len(by_part) > 1 or any(_holds_folders(path) for path in by_part["train"])):
        return {}, []  # "train" is a class
    for part, paths in by_part.items():
        if len(paths) > 1:
            what = f"{' and '.join(path.name for path in paths)} are the same part, {part}"
            raise DataError(what, where=str(folder), fix="keep one of them, or join them")
    others = [path.name for path in folders if part_of(path.name) is None and holds_images(path)]
    if others and "val" not in by_part:
        what = f"{', '.join(others)} beside {by_part['train'][0].name}: a folder of images whose part is not known"
        fix = f"call a validation part one of {', '.join(PART_NAMES['val'])}, or move the folder away"
        raise DataError(what, where=str(folder), fix=fix)
    return {part: paths[0] for part, paths in by_part.items()}, others


def _holds_folders(folder: Path) -> bool:
    return any(path.is_dir() and not _hidden(path) for path in folder.iterdir())


def holds_images(folder: Path) -> bool:
    """Return whether a folder or one of its direct subfolders holds images."""
    folders = (folder, *(path for path in folder.iterdir() if path.is_dir() and not _hidden(path)))
    return any(path.suffix.lower() in SUFFIXES for one in folders for path in one.iterdir())


class ImageFile(Protocol):
    """An image file: a path, or a member of an archive."""

    @property
    def name(self) -> str: ...
    @property
    def suffix(self) -> str: ...
    def open(self, mode: Any = ...) -> Any: ...


@dataclass(frozen=True)
class Header:
    """The header of an image file: its mode, (width, height) after EXIF rotation, and whether EXIF rotates it.

    ``transparent``: it has an alpha channel; ``animated``: it holds several images, as animations and stacks do.
    """

    mode: str
    size: tuple[int, int]
    turned: bool
    transparent: bool = False
    animated: bool = False


@dataclass
class Listing:
    """The images of one part, sorted by class name and file name, and the files that are skipped."""

    where: Path
    files: list[ImageFile] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # the class of each file
    headers: list[Header] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)  # every class folder, also empty ones
    skipped: dict[str, Counter[str]] = field(default_factory=dict)  # class -> {suffix: count}
    numbered: bool = False  # whether names that are integers are class numbers

    @property
    def empty(self) -> list[str]:
        there = set(self.names)
        return [name for name in self.classes if name not in there]

    @property
    def colored(self) -> bool:
        return any(header.mode not in GRAY for header in self.headers)

    @property
    def note(self) -> str:
        """Return a remark about skipped files and empty classes, or ""."""
        parts = [f"{name}: {_described(counts)}" for name, counts in [*self.skipped.items()][:LISTED]]
        parts += [f"and {len(self.skipped) - LISTED} more classes"] * (len(self.skipped) > LISTED)
        parts += [f"no image in {', '.join(self.empty[:LISTED])}"] * bool(self.empty)
        what = "images in class folders" if NOT_IN_A_CLASS in self.skipped else "images"
        return f"not read in {self.where}, as these are not {what}: {'; '.join(parts)}" if parts else ""


def _described(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())


def list_images(folder: Path, labels: bool = True) -> Listing:
    """Read the header of every file in the class folders of ``folder`` (10 000 files: 1.5 s on one core).

    Without ``labels`` the files may lie in ``folder`` itself.
    """
    if not folder.is_dir():
        raise DataError("there is no such folder", where=str(folder))
    listing, candidates = Listing(folder), list[tuple[str, Path]]()
    held = sorted(path for path in folder.iterdir() if not _hidden(path))
    if not labels and not any(path.is_dir() for path in held):
        candidates, held = [(folder.name, path) for path in held], []
    for kind in held:
        if not kind.is_dir():
            _skip(listing, NOT_IN_A_CLASS, kind)
            continue
        listing.classes.append(kind.name)
        for file in sorted(kind.iterdir()):
            if file.is_dir() and not _hidden(file):
                _skip(listing, kind.name, file)
            elif not _hidden(file):
                candidates.append((kind.name, file))
    add_images(listing, candidates)
    if not listing.files:
        skipped = f"; {listing.note}" if listing.note else ""
        fix = "put the images of each class into a folder of its own, CLASS/*.png"
        raise DataError(f"no images in CLASS/ folders{skipped}", where=str(folder), fix=fix)
    return listing


def add_images(listing: Listing, candidates: Sequence[tuple[str, ImageFile]]) -> None:
    """Add (class, file) pairs to the listing; files that are not images count as skipped."""
    for (kind, file), header in zip(candidates, _headers([file for _, file in candidates]), strict=True):
        if header is None:
            _skip(listing, kind, file)
        else:
            listing.files.append(file)
            listing.names.append(kind)
            listing.headers.append(header)


def _skip(listing: Listing, kind: str, path: ImageFile) -> None:
    what = "folder" if isinstance(path, Path) and path.is_dir() else path.suffix.lower() or "without an ending"
    listing.skipped.setdefault(kind, Counter())[what] += 1


def check_no_class_is_empty(listing: Listing) -> None:
    """Refuse a class without an image: leaving it out would change the numbers of other classes."""
    if listing.empty:
        name = listing.empty[0]
        held = listing.skipped.get(name)
        what = f"class '{name}' has no image" + (f", but {_described(held)}" if held else "")
        fix = "add or convert its images, or remove the folder"
        raise DataError(what, where=str(listing.where / name), fix=fix)


def _headers(files: Sequence[ImageFile]) -> Iterator[Header | None]:
    parts = [files[start : start + TOGETHER] for start in range(0, len(files), TOGETHER)]
    with ThreadPoolExecutor(THREADS, "headers") as pool:
        for headers in pool.map(lambda part: [_header(file) for file in part], parts):
            yield from headers


@cache
def _formats() -> dict[str, str]:
    """Return {suffix: format} of all formats that Pillow decodes."""
    from PIL import Image

    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # check_free says it
    known = Image.registered_extensions()
    return {suffix: name for suffix, name in known.items() if name in Image.OPEN and name not in NOT_DECODED}


@cache
def _formats_of(suffix: str) -> tuple[str, ...]:
    """Return the formats to try for a file with this suffix.

    A suffix of an image allows all of them; others allow their own format, or those recognized by their first bytes.
    """
    if suffix in SUFFIXES:
        return tuple(dict.fromkeys((*BY_CONTENT, *_formats().values())))
    return (_formats()[suffix],) if suffix in _formats() else BY_CONTENT


@contextmanager
def _opened(path: ImageFile) -> Iterator[Any]:
    """Open an image without decoding its pixels yet; errors become a DataError with the file's name."""
    from PIL import Image

    try:
        with path.open("rb") as file, Image.open(file, formats=_formats_of(path.suffix.lower())) as image:
            yield image
    except Image.DecompressionBombError as error:
        what = f"an image of more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels"
        raise DataError(what, where=str(path), fix="make it smaller") from error
    except BROKEN as error:
        raise unreadable(str(path), error, "image") from error


def _header(path: ImageFile) -> Header | None:
    """Read a header; return None for a file that is not an image and has no suffix of one."""
    try:
        with _opened(path) as image:
            return _read_header(path, image)
    except DataError as error:
        foreign = isinstance(error.__cause__, BROKEN) and getattr(error.__cause__, "errno", None) is None
        if foreign and path.suffix.lower() not in SUFFIXES:
            return None
        raise


DEEP = "store it with 8 bits per channel, or read it in a data set of your own ('hvd-train guide images')"


def _read_header(path: ImageFile, image: Any) -> Header:
    # Pillow would cut the values of single numbers off at 255, and the lower bits of colors.
    if image.mode.startswith(("I", "F")) or _is_deep(image):
        kind = f"an image of mode {image.mode}" + ", with more than 8 bits per channel" * _is_deep(image)
        raise DataError(kind, where=str(path), fix=DEEP)
    tag = 1
    # EXIF at the end of a PNG file is not read: the image would have to be decoded first.
    if "exif" in image.info or image.format == "TIFF":
        with suppress(*BROKEN):  # unreadable EXIF means no rotation
            tag = image.getexif().get(ORIENTATION, 1)
    width, height = image.size
    swapped = tag in LYING and image.format != "TIFF"  # Pillow itself swaps the sides of TIFF
    transparent = "A" in image.getbands() or "transparency" in image.info
    animated = bool(getattr(image, "is_animated", False))
    return Header(image.mode, (height, width) if swapped else (width, height), tag != 1, transparent, animated)


def _is_deep(image: Any) -> bool:
    """Return whether the file has more than 8 bits for each channel; ``image`` is not decoded yet."""
    # What is given to the decoder: ("raw", box, offset, "RGB;16B"), or for PNM ("ppm", box, offset, ("RGB", 65535)).
    arguments = [tile[3] if isinstance(tile[3], tuple) else (tile[3],) for tile in image.tile]
    return any(
        (isinstance(x, str) and ";16" in x) or (tile[0].startswith("ppm") and isinstance(x, int) and x > 255)
        for tile, given in zip(image.tile, arguments, strict=True)
        for x in given
    )


def remarks_on_pixels(listing: Listing) -> list[str]:
    """Return remarks about contents that are not read: further images in a file, and transparency."""
    lines, pairs = [], [*zip(listing.files, listing.headers, strict=True)]
    animated = [file for file, header in pairs if header.animated]
    if animated:
        counted = f"{len(animated):,} {'file holds' if len(animated) == 1 else 'files hold'}"
        lines.append(f"{counted} several images, of which the first is read: {animated[0]}")
    alpha = [file for file, header in pairs if header.transparent]
    # Many images have an alpha channel without a transparent pixel.
    seen = next((file for file in alpha[:LISTED] if _is_transparent(file)), None)
    if seen is not None:
        counted = f"{len(alpha):,} {'image has' if len(alpha) == 1 else 'images have'}"
        what = f"{counted} an alpha channel, which is left out: transparent pixels have the color that is stored there"
        lines.append(f"{what}: {seen}")
    return lines


def _is_transparent(path: ImageFile) -> bool:
    """Return whether any pixel of an image is transparent."""
    with _opened(path) as image:
        return image.convert("RGBA").getextrema()[3][0] < 255


def upright(image: Any) -> np.ndarray:
    """Return an image of Pillow as an array (height, width) or (height, width, 3) uint8, as its file would be read.

    Raises DataError for more than 8 bits a channel.
    """
    from PIL import ImageOps

    if image.mode.startswith(("I", "F")):
        raise DataError(f"an image of mode {image.mode}", fix="convert it to an array in __getitem__")
    image = ImageOps.exif_transpose(image)
    gray = image.mode in ("1", "L", "LA") or (image.mode == "P" and image.palette.mode == "L")
    return np.asarray(image.convert("L" if gray else "RGB"))


class ImageFiles:
    """Image files, decoded on access to upright images (k, side, side, c) uint8; c is 3 if ``colored``, else 1."""

    dtype = np.dtype(np.uint8)

    def __init__(self, listing: Listing, side: int | None, colored: bool) -> None:
        self._paths, self._side = listing.files, side
        self._mode = "RGB" if colored else "L"
        sizes = [header.size for header in listing.headers]
        self._size = (side, side) if side else sizes[0]
        odd = next((k for k, size in enumerate(sizes) if size != self._size), None)
        if odd is not None and not side:
            raise self._of_another_size(odd, sizes[odd])
        self.shape = (len(sizes), self._size[1], self._size[0], 3 if colored else 1)
        # For the fingerprint.
        turned = sum(header.turned for header in listing.headers)
        self.names = " ".join(
            [f"{kind}/{path.name}" for kind, path in zip(listing.names, self._paths, strict=True)]
            + [f"{turned} turned"][:turned]
        )
        most = max(range(len(sizes)), key=lambda k: sizes[k][0] * sizes[k][1])
        width, height = sizes[most]
        what = f"an image of {width:,} x {height:,} pixels"
        fix = "store it smaller: data.image_size resizes only after it was read"
        # The decoded image has up to 4 bytes a pixel; its converted copy has 1 or 3.
        check_free(width * height * (4 + self.shape[3]), what, str(self._paths[most]), fix)

    def __len__(self) -> int:
        return len(self._paths)

    def _of_another_size(self, row: int, size: tuple[int, int]) -> DataError:
        what = f"an image of {size} pixels, the first one has {self._size}"
        return DataError(what, where=str(self._paths[row]), fix="set data.image_size")

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        from PIL import Image, ImageOps

        out = np.empty((len(rows), *self.shape[1:]), np.uint8)
        for k, row in enumerate(rows):
            with _opened(self._paths[row]) as image:
                image.load()
                ImageOps.exif_transpose(image, in_place=True)
            if image.mode != self._mode:  # else ``convert`` copies
                image = image.convert(self._mode)
            if image.size != self._size:
                if not self._side:
                    raise self._of_another_size(row, image.size)
                image = image.resize(self._size, Image.Resampling.BILINEAR)
            out[k] = np.asarray(image).reshape(out.shape[1:])
        return out
