"""Read the header of csv and tsv files, and check their lines."""

from __future__ import annotations

import csv
from functools import partial
from itertools import dropwhile
from pathlib import Path

import numpy as np

from hvd_train.errors import DataError

LONGEST = 1 << 26  # bytes of a line
PIECE = 1 << 20  # bytes read at once


def delimiter(path: Path) -> str:
    return "\t" if path.suffix.lower() == ".tsv" else ","


def header(path: Path) -> list[str]:
    """Return the cells of the first line that is not empty."""
    # pyarrow would take 40 s for the names of 200 000 columns.
    with open(path, "rb") as stream:
        first = stream.readline(LONGEST + 1)
        while first and not first.strip():
            first = stream.readline(LONGEST + 1)
    if not first.endswith(b"\n") and b"\r" in first.rstrip():
        raise ValueError("its lines end in CR alone, as of old Macs: tr '\\r' '\\n' < OLD > NEW")
    if len(first) > LONGEST:
        raise ValueError(f"its first line has more than {LONGEST:,} bytes")
    csv.field_size_limit(LONGEST)
    names = next(csv.reader([first.decode("utf-8-sig")], delimiter=delimiter(path)), [])
    if not names:
        raise ValueError("Empty CSV file")
    return names


def check_empty_lines(path: Path) -> None:
    """Refuse an empty line within a file of one column: it may be a row, and pyarrow would skip it."""
    if len(header(path)) != 1:
        return
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as stream:
        lines = dropwhile(lambda cells: not cells, csv.reader(stream, delimiter=delimiter(path)))
        empty = 0
        for row, cells in enumerate(lines):  # row 0 is the header
            if not cells:
                empty = empty or row
            elif empty:
                raise DataError("the line is empty", where=f"{path}, row {empty}", fix="correct it, or leave it out")


def breaks_within_quotes(path: Path) -> bool:
    """Return whether a cell in quotation marks holds a line break: before it the number of marks is odd."""
    odd = 0  # 1 after an odd number of marks
    with open(path, "rb") as stream:
        for piece in iter(partial(stream.read, PIECE), b""):
            if b'"' not in piece and not odd:
                continue
            bytes_ = np.frombuffer(piece, np.uint8)
            marks = (odd + np.cumsum(bytes_ == ord('"'), dtype=np.int64)) % 2  # (bytes,)
            if marks[bytes_ == ord("\n")].any():
                return True
            odd = int(marks[-1])
    return False


def remark_on_lines(path: Path, rows: int) -> str:
    """Return a remark if a file has more lines than ``rows`` and a header, else "". Raises DataError for NUL bytes.

    An unclosed quotation mark joins everything up to the next one into one cell, and the rows between are lost.
    """
    with open(path, "rb") as stream:
        ends = 0
        for piece in iter(partial(stream.read, PIECE), b""):
            if b"\0" in piece:
                fix = "write it as UTF-8; if it is UTF-16: iconv -f utf-16 -t utf-8 OLD > NEW"
                raise DataError("the file holds NUL bytes, which are not text", where=str(path), fix=fix)
            ends += piece.count(b"\n")
        if ends <= rows:
            return ""
        stream.seek(0)
        lines = sum(1 for line in stream if line.rstrip(b"\r\n"))
    if lines <= rows + 1:
        return ""
    what = f"{path} has {rows:,} rows in {lines - 1:,} lines: some quoted cells hold line breaks"
    return f"{what} (an unclosed quotation mark joins rows: double it within quotation marks)"
