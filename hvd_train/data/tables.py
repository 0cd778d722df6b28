"""Read columns of csv, tsv, Parquet and JSON lines files. Errors name the file, the column and the row, counted from 1
after the header."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_train.config import TaskConfig
from hvd_train.data.classes import (
    MISSING,
    NUMBER,
    OF_CONFIG,
    PADDED,
    WHOLE,
    Classes,
    Known,
    Words,
    remarks_on_missing,
    values_of,
)
from hvd_train.data.column import loses_differences
from hvd_train.data.formats import parquet_size, unreadable
from hvd_train.data.images import PART_NAMES, part_of
from hvd_train.data.jsonl import keys_of, read_jsonl
from hvd_train.data.lines import (
    LONGEST,
    breaks_within_quotes,
    check_empty_lines,
    delimiter,
    header,
    remark_on_lines,
)
from hvd_train.data.memory import check_free
from hvd_train.errors import DataError, listing, reason

if TYPE_CHECKING:
    from pyarrow import ChunkedArray

SUFFIXES = (".csv", ".tsv", ".parquet", ".jsonl")
TYPED = (".parquet", ".jsonl")  # columns have types, so text that looks like numbers is text
BLOCK = 1 << 20  # pyarrow's default
FIX = "correct it, or leave the row or the column out; words of features belong into data.categories"
WORDS = "correct it, or leave the row out; words are classes only with task.loss: cross_entropy, else number them"
DATE = re.compile(r"\d{4}-\d\d-\d\d")
WORDS_OF_FEATURES = "correct it, list the column in data.categories if it holds words, or leave it out"
GAPS = "leave the row or the column out; in a training data.missing fills gaps of features"
NUMERIC = ("int", "uint", "float", "double", "halffloat", "decimal")
MIXED = "correct it; or list data.classes, as words"
PER_SECOND = {"s": 1e0, "ms": 1e3, "us": 1e6, "ns": 1e9}  # units of times
KINDS = {"int64": "whole number of 64 bits", "float64": "number"}


def find_all(folder: Path) -> dict[str, Path]:
    """Return {part: its file} for train, val and, if there is one, test."""
    paths = {part: _find(folder, part) for part in PART_NAMES}
    return {part: path for part, path in paths.items() if path}


def _find(folder: Path, part: str) -> Path | None:
    held = sorted(path for path in folder.iterdir() if _suffix(path) in SUFFIXES and not path.name.startswith("."))
    paths = [path for path in held if part_of(path.stem) == part]
    if len(paths) != 1 and (part != "test" or paths):
        what = f"{' and '.join(path.name for path in paths) or 'none'} found"
        others = [path.name for path in held if part_of(path.stem) is None]
        what += f", and {', '.join(others[:10])}" * bool(others and not paths)
        listed = ", ".join(f"{name}.csv" for name in PART_NAMES[part])
        fix = f"a folder needs one {part} file: {listed}; or {', '.join(SUFFIXES[1:])}"
        raise DataError(what, where=str(folder), fix=fix)
    return paths[0] if paths else None


def _suffix(path: Path) -> str:
    return path.suffix.lower()


def names_of(path: Path, every_line: bool = True) -> list[str]:
    """Return the column names of a file, in its order; of a .jsonl file the keys of all its lines, or of the first."""
    import pyarrow

    if _suffix(path) not in SUFFIXES:
        raise DataError(f"a file '{path.suffix}' is not a table", where=str(path), fix=f"known: {', '.join(SUFFIXES)}")
    try:
        if _suffix(path) == ".jsonl":
            names = keys_of(path, every_line)
        elif _suffix(path) == ".parquet":
            from pyarrow import parquet

            names = parquet.read_schema(path).names
        else:
            names = header(path)
    except UnicodeDecodeError as error:
        raise _no_utf8(path, "the names of the columns") from error
    except (pyarrow.ArrowException, OSError, ValueError, csv.Error) as error:
        raise unreadable(path, error, "table") from error
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise DataError(f"duplicate columns: {', '.join(twice)}", where=str(path), fix="rename them")
    return names


def _no_utf8(path: Path, what: str) -> DataError:
    fix = "store the file as UTF-8; if it is Latin-1: iconv -f latin1 -t utf-8 OLD > NEW"
    return DataError(f"{what} are not UTF-8", where=str(path), fix=fix)


def _cells(path: Path, names: Sequence[str], broken: list[Any]) -> Any:
    """Read columns of a csv file as text; append a row with a wrong number of cells to ``broken`` and stop."""
    import pyarrow
    from pyarrow import csv as arrow

    as_text = {name: pyarrow.string() for name in names}
    convert = arrow.ConvertOptions(include_columns=list(names), column_types=as_text)
    # With threads, pyarrow's errors do not name the row.
    options = arrow.ReadOptions(use_threads=False, block_size=_block(path))

    def stop(row: Any) -> str:
        broken.append(row)
        return "error"

    # A block may end within a cell of several lines, and what follows may look like rows. Parsing such cells is slower.
    longer = path.stat().st_size > options.block_size
    several = longer and breaks_within_quotes(path)
    parse = arrow.ParseOptions(delimiter=delimiter(path), invalid_row_handler=stop, newlines_in_values=several)
    return arrow.read_csv(path, options, parse, convert)


@dataclass(frozen=True)
class Table:
    """Some columns of a file, in memory.

    ``notes``: remarks on converted values; ``late``: keys of a .jsonl file that its first line lacks; ``joined``: a
    remark on rows of several lines.
    """

    path: Path
    columns: dict[str, ChunkedArray]
    late: Sequence[str] = ()
    joined: str = ""
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, names: Sequence[str], gaps: Collection[str] = ()) -> Table:
        """Read columns of a file; cells of a csv file stay text, as their first rows do not tell the type.

        ``gaps``: columns in which a line of JSON may lack a value.
        """
        import pyarrow
        from pyarrow import parquet

        broken: list[Any] = []
        try:
            if _suffix(path) == ".jsonl":
                # Python's objects are several times as large as their text.
                check_free(8 * path.stat().st_size, "reading the lines", str(path), "store it as Parquet")
                return cls(path, *read_jsonl(path, names, gaps))
            if _suffix(path) == ".parquet":
                size = parquet_size(path, names)
            else:  # estimated for columns of equal width
                size = path.stat().st_size * len(names) // max(1, len(header(path)))
            check_free(2 * size, "reading the table", str(path), "take fewer columns, or store it as hdf5 or npy")
            if _suffix(path) == ".parquet":
                table = parquet.read_table(path, columns=list(names))
            else:
                check_empty_lines(path)
                table = _cells(path, names, broken)
        except (pyarrow.ArrowException, OSError, ValueError, csv.Error) as error:
            if broken:
                row = broken[0]
                what = (
                    f"the row has {row.actual_columns} cells, and the header {row.expected_columns}: '{row.text[:60]}'"
                )
                raise DataError(what, where=f"{path}, row {row.number - 1}", fix="correct or remove it") from error
            if "UTF8" in str(error):
                raise _no_utf8(path, "its cells") from error
            raise unreadable(path, error, "table") from error
        columns = {name: table.column(name) for name in names}
        return cls(path, columns, joined="" if _suffix(path) in TYPED else remark_on_lines(path, len(table)))

    def numbers(self, name: str, keep_whole: bool = False) -> np.ndarray:
        """Return a column of numbers (n,) as float32, or with ``keep_whole`` as int64 if all are integers."""
        column = self._filled(name)
        kind = str(column.type)
        whole = kind.startswith(("int", "uint")) or (kind == "string" and _matched(column, WHOLE).all())
        if keep_whole and whole and _castable(column, "int64"):
            return np.asarray(column.cast("int64"))
        if kind == "string":
            values = self._parsed(name, column, "float64", WORDS if keep_whole else FIX)
        elif kind == "bool" or kind.startswith(("int", "uint", "float", "double", "halffloat", "decimal")):
            values = np.asarray(column.cast("float64", safe=False))  # ids may exceed 2^53
        else:
            what = f"column '{name}' of type {kind} holds no numbers"
            raise DataError(what, where=str(self.path), fix="name others in data.features and data.labels")
        with np.errstate(over="ignore"):
            stored = values.astype(np.float32)
        good = np.isfinite(stored)
        if not good.all():
            raise self._fault(name, int(np.argmin(good)), column, "is NaN, infinite or too large for 32 bits")
        self._note_rounded(name, column, values, stored)
        return stored

    def _note_rounded(self, name: str, column: ChunkedArray, values: np.ndarray, stored: np.ndarray) -> None:
        """Add a note if float32 rounds integers (such as ids), or the differences of other numbers."""
        if not len(values):
            return
        if loses_differences(values, stored).any() and (values != np.rint(values)).any():
            row = int(np.argmax(np.abs(stored - values)))
            what = f"column '{name}' holds numbers whose differences float32 rounds"
            example = f"{values[row]:.15g} -> {stored[row]:.15g}"
            self.notes.append(f"{what}: {example} (count times from the first; subtract a mean)")
            return
        if np.abs(values).max() <= 2**24:
            return
        kind, exact = str(column.type), values
        if kind.startswith(("int", "uint")):
            exact = np.asarray(column)
        elif kind == "string" and _castable(column, "int64"):
            exact = np.asarray(column.cast("int64"))
        elif np.abs(values).max() > 2**53 or (values != np.rint(values)).any():
            return
        with np.errstate(invalid="ignore"):
            rounded = stored.astype(exact.dtype) != exact
        if rounded.any():
            row = int(np.argmax(rounded))
            what = f"column '{name}' holds integers that float32 rounds: {column[row].as_py()} -> {stored[row]:.0f}"
            self.notes.append(f"{what} (leave out ids by data.features; count times from the first)")

    def labels(self, name: str, label: str, alone: bool, known: Known, task: TaskConfig) -> np.ndarray | Words:
        """Return the column ``name`` as the label ``label``: classes or numbers, as its loss asks for.

        ``alone``: it is the only label.
        """
        if task.classes(label, alone):
            return self.classes(name, known.label(label, alone), task.ignore_index)
        return self.numbers(name, keep_whole=":" in task.term(label)[0])

    def classes(self, name: str, known: Classes, ignore: int) -> np.ndarray | Words:
        """Return a column of classes (n,), integers or words.

        A csv column holds integers if all its cells are numbers, and words if none is; '1' is a word if it is one of
        the ``known`` class names. ``ignore``: task.ignore_index, which is allowed as well.
        """
        column = self._filled(name)
        if str(column.type) == "string":
            if self._words(name, column, known):
                return self._coded(name, column, known)
        elif str(column.type) == "bool":
            column = column.cast("int64")
        elif not str(column.type).startswith(("int", "uint")):
            what = f"column '{name}' of type {column.type}, and task.loss: cross_entropy wants classes"
            raise DataError(what, where=str(self.path), fix="store whole numbers or words; or set task.loss: mse")
        values = self._parsed(name, column, "int64")
        listed = values_of(known.names or ())
        if known.auto or (known.whose and listed is not None):
            good = np.isin(values, [*(() if listed is None else listed), ignore]) | known.auto
            if str(column.type) == "string" and known.whose != OF_CONFIG:  # whose classes are called by their numbers
                good &= ~_matched(column, PADDED)
            expected = listing(known.names or ())
        else:
            count = max(known.count or 0, len(known.names or ()))
            good = (values == ignore) | ((values >= 0) & (values < (count or np.iinfo(np.int64).max)))
            expected = f"0 to {count - 1}" if count else "0, 1, 2, ..."
        if not good.all():
            raise self._fault(name, int(np.argmin(good)), column, f"is no class{_of(known)}: {expected}")
        self._check_spelling(name, column, values)
        return values

    def _check_spelling(self, name: str, column: ChunkedArray, values: np.ndarray) -> None:
        """Refuse two spellings of one number, such as 7 and 007: they may be two classes."""
        import pyarrow.compute as pc

        if str(column.type) != "string" or pc.count_distinct(column).as_py() == len(np.unique(values)):
            return
        first: dict[int, str] = {}
        for row, (text, value) in enumerate(zip(column.to_pylist(), values.tolist(), strict=True)):
            if first.setdefault(value, text) != text:
                what = f"and '{first[value]}' are one number"
                raise self._fault(name, row, column, what, "write both alike; or list data.classes, as words")

    def _words(self, name: str, column: ChunkedArray, known: Classes) -> bool:
        if _suffix(self.path) in TYPED:
            return True
        numbers = _matched(column, NUMBER.pattern)
        of_numbers, n = int(numbers.sum()), len(column)
        if known.names and values_of(known.names) is None and (of_numbers < n or _holds_any(column, known.names)):
            return True
        if 0 < of_numbers < n:  # report one of the rarer kind
            odd = int(np.argmax(numbers if of_numbers < n - of_numbers else ~numbers))
            others = "are words" if numbers[odd] else f"of {n:,} labels {of_numbers:,} are numbers"
            what = f"is {'a number, and the others' if numbers[odd] else 'no whole number, and'} {others}"
            raise self._fault(name, odd, column, what, MIXED)
        if not of_numbers:
            return True
        whole = _matched(column, WHOLE)
        if not whole.all():
            what = "is no whole number, and task.loss: cross_entropy wants classes"
            raise self._fault(name, int(np.argmin(whole)), column, what)
        return known.auto and bool(_matched(column, PADDED).any())

    def _coded(self, name: str, column: ChunkedArray, known: Classes) -> Words:
        import pyarrow.compute as pc

        names = sorted(pc.unique(column).to_pylist())
        self.notes.extend(remarks_on_missing(f"column '{name}'", names, known))
        codes = np.asarray(pc.index_in(column, value_set=_strings(names))).astype(np.int64)
        if known.names:
            strange = [k for k, word in enumerate(names) if word not in known.names]
            if strange:
                row, what = int(np.argmax(np.isin(codes, strange))), f"is no class{_of(known)}: {listing(known.names)}"
                raise self._fault(name, row, column, what)
        return Words(codes, names)

    def texts(self, name: str) -> list[str]:
        column = self._filled(name)
        if str(column.type) != "string":
            what = f"column '{name}' of type {column.type} holds no text"
            raise DataError(what, where=str(self.path), fix="name the column of the text in data.features")
        return column.to_pylist()

    def with_gaps(self, name: str, kind: str, words: bool) -> np.ndarray:
        """Return a column with gaps: numbers (n,) float64 with NaN, or words (n,) as objects with None.

        ``kind``: "number" or "words"; "": a column of text is one of words, if ``words`` are asked for, and if no cell
        is a number.
        """
        column = self._marked(name)
        text = str(column.type) == "string"
        if not kind:
            kind = self._kind(name, column, words) if text else "number"
        if kind == "words":
            # Numbers and booleans of a typed file are written as Python and pandas write them into a CSV file.
            cells = column.to_pylist()
            return np.array([None if x is None or x != x else str(x) for x in cells], object)
        if text:
            values = self._parsed(name, column, "float64", WORDS_OF_FEATURES)
        elif str(column.type) in ("bool", "null") or str(column.type).startswith(NUMERIC):
            values = np.asarray(column.cast("float64", safe=False))
        else:
            fix = "name others in data.features; dates and times belong into data.dates"
            raise DataError(f"column '{name}' of type {column.type} holds no numbers", where=str(self.path), fix=fix)
        return np.array(values, np.float64)

    def _kind(self, name: str, column: ChunkedArray, words: bool) -> str:
        """Return whether a column of text holds numbers or words; refuse a mixture."""
        present = column.drop_null()
        of_numbers = int(_matched(present, NUMBER.pattern).sum())
        if of_numbers in (len(present), 0) and (of_numbers or not len(present) or words):
            return "words" if words and not of_numbers else "number"
        numbers = _matched(column.fill_null("0"), NUMBER.pattern)
        row, what = int(np.argmin(numbers)), f"is no number, and {of_numbers:,} of {len(present):,} cells are"
        raise self._fault(name, row, column, what, WORDS_OF_FEATURES)

    def days(self, name: str) -> tuple[np.ndarray, bool]:
        """Return a column of dates or times as days since 1970 (n,) float64, NaN where a cell is empty.

        Also return whether they have a time zone: then days began in UTC.
        """
        column = self._marked(name)
        where, fix = f"{self.path}, column '{name}'", "write dates as 2026-11-30, times as 2026-11-30 12:00:00"
        if not str(column.type).startswith(("string", "date", "timestamp", "null")):
            raise DataError(f"a column of type {column.type} holds no dates", where=where, fix=fix)
        if str(column.type).startswith(("string", "null")):
            column = self._stamps(column, where, fix)
        kind = str(column.type)
        per_day = 1.0 if kind.startswith("date32") else 86_400 * PER_SECOND[re.findall(r"\[(\w+)", kind)[0]]
        whole = column.cast("int32" if kind.startswith("date32") else "int64")
        return np.asarray(whole.cast("float64", safe=False), np.float64) / per_day, "tz=" in kind

    def _stamps(self, column: ChunkedArray, where: str, fix: str) -> ChunkedArray:
        """Convert a column of text to timestamps (n,)."""
        import pyarrow

        try:
            return column.cast(pyarrow.timestamp("us"))
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
            with suppress(pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError):
                return column.cast(pyarrow.timestamp("us", tz="UTC"))  # with time zones
            raise DataError(f"it holds no dates: {reason(error)}", where=where, fix=fix) from error

    def _marked(self, name: str) -> ChunkedArray:
        """Return a column whose words for a missing value are none."""
        import pyarrow.compute as pc

        column = self._trimmed(name)
        if str(column.type) != "string":
            return column
        gap = pc.is_in(pc.utf8_lower(column), value_set=_strings([*MISSING, "?"]))
        return pc.if_else(gap, None, column)

    def at(self, name: str, row: int) -> str:
        """Return where a cell is, for messages."""
        return f"{self.path}, column '{name}', row {row + 1}"

    def is_list(self, name: str) -> bool:
        """Return whether each row of a column holds a list."""
        import pyarrow

        kind = self.columns[name].type
        return pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)

    def lists(self, name: str, whole: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return a column of lists of numbers: all values, concatenated, and the length of each list (n,).

        ``whole``: allow only integers, for classes.
        """
        import pyarrow
        import pyarrow.compute as pc

        column = self._filled(name)
        joined = column.combine_chunks() if isinstance(column, pyarrow.ChunkedArray) else column
        flat, lengths = joined.flatten(), np.asarray(pc.list_value_length(joined)).astype(np.int64)
        kind = str(flat.type)
        numbers = kind.startswith(("int", "uint") if whole else ("int", "uint", "float", "double", "halffloat"))
        if not numbers or flat.null_count:
            what = f"column '{name}' holds lists of {kind}{' with missing values' * bool(flat.null_count)}"
            fix = f"store lists of {'whole ' * whole}numbers, not of lists or words"
            raise DataError(what, where=str(self.path), fix=fix)
        return np.asarray(flat), lengths

    def _filled(self, name: str) -> ChunkedArray:
        """Return a column with trimmed text; raises DataError if a row has no value."""
        column = self._trimmed(name)
        if column.null_count:
            raise self._fault(name, _first_null(column), None, "the cell is empty", GAPS)
        return column

    def _trimmed(self, name: str) -> ChunkedArray:
        """Return a column with trimmed text; empty text is no value."""
        import pyarrow
        import pyarrow.compute as pc

        column = self.columns[name]
        if pyarrow.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if pyarrow.types.is_large_string(column.type) or pyarrow.types.is_string(column.type):
            column = pc.utf8_trim_whitespace(column.cast("string"))
            column = pc.if_else(pc.equal(column, ""), None, column)
        return column

    def _parsed(self, name: str, column: ChunkedArray, kind: str, fix: str = FIX) -> np.ndarray:
        if not _castable(column, kind):
            raise self._fault(name, _first_bad(column, kind), column, f"is no {KINDS[kind]}", fix)
        return np.asarray(column.cast(kind))

    def _fault(self, name: str, row: int, column: ChunkedArray | None, what: str, fix: str = FIX) -> DataError:
        text = str(column[row].as_py())[:60] if column is not None else ""
        if DATE.match(text) and fix in (FIX, WORDS_OF_FEATURES):
            fix = "list the column in data.dates, or leave it out by data.features"
        return DataError(f"'{text}' {what}" if text else what, where=self.at(name, row), fix=fix)


def _block(path: Path) -> int:
    """Return the block size in bytes for pyarrow's parser, which must be longer than any row."""
    with open(path, "rb") as stream:
        longest = max((len(stream.readline(LONGEST)) for _ in range(20)), default=0)
    return max(BLOCK, min(16 * longest, 1 << 30))


def _matched(column: ChunkedArray, pattern: str) -> np.ndarray:
    """Return for each text of a column whether the whole text matches a pattern, (n,) bool."""
    import pyarrow.compute as pc

    return np.asarray(pc.match_substring_regex(column, f"^({pattern.strip('^$')})$"), bool)


def _strings(values: Sequence[str]) -> Any:
    import pyarrow

    return pyarrow.array(values, pyarrow.string())


def _holds_any(column: ChunkedArray, names: Sequence[str]) -> bool:
    import pyarrow.compute as pc

    return bool(pc.any(pc.is_in(column, value_set=_strings(names))).as_py())


def _of(known: Classes) -> str:
    return f" of {known.whose}" if known.whose and known.names else ""


def _first_null(column: ChunkedArray) -> int:
    return int(np.argmax(np.asarray(column.is_null())))


def _castable(column: ChunkedArray, kind: str) -> bool:
    import pyarrow

    try:
        column.cast(kind)
    except pyarrow.ArrowInvalid:
        return False
    return True


def _first_bad(column: ChunkedArray, kind: str) -> int:
    """Find the first row that cannot be cast, by bisection, because pyarrow does not name it."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        if _castable(column.slice(low, middle - low), kind):
            low = middle
        else:
            high = middle
    return low
