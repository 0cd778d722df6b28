"""``metrics.csv``: the lines of metrics.jsonl as a table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hvd_train import files
from hvd_train.run_folder import metrics_file
from hvd_train.run_folder.trackers.tracker import Point, Target, TrackedRun, Tracker

NAME = "metrics.csv"


class CsvFile(Tracker):
    """A CSV table with a column for each name of metrics.jsonl. A cell is empty if the value is missing or null."""

    def __init__(self, run: TrackedRun) -> None:
        self._run_dir, self._columns = run.run_dir, [*_columns(run.run_dir)]
        self._write_all()

    def row(self, row: Mapping[str, Any]) -> None:
        if row.keys() - set(self._columns):
            # The first evaluation adds columns: rewrite the table from metrics.jsonl, which already has this line.
            self._columns = [*dict.fromkeys([*_columns(self._run_dir), *row])]
            self._write_all()
        else:
            with io.BufferedWriter(files.appended(self._run_dir / NAME)) as stream:
                stream.write(_text([row], self._columns, header=False))

    def _write_all(self) -> None:
        rows, _ = metrics_file.read(self._run_dir)
        files.put(self._run_dir / NAME, _text(rows, self._columns, header=True))


class CsvTarget(Target):
    """The table of a run that trained without it."""

    whole = True

    def __init__(self, run: TrackedRun) -> None:
        self._run, self.place = run, str(run.run_dir / NAME)
        self.live = "csv" in run.config.get("loggers", ())

    def send(self, points: Iterable[Point]) -> None:
        CsvFile(self._run)


def _columns(run_dir: Path) -> dict[str, None]:
    return dict.fromkeys(name for row in metrics_file.read(run_dir)[0] for name in row)


def _text(rows: Iterable[Mapping[str, Any]], columns: list[str], header: bool) -> bytes:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    if header and columns:
        writer.writerow(columns)
    for row in rows:
        cells = (row.get(name) for name in columns)
        writer.writerow([json.dumps(x) if isinstance(x, list | dict) else x for x in cells])
    return stream.getvalue().encode()
