"""Columns of a table as inputs of a model: words become numbers, gaps are filled, numbers are scaled.

What this needs is computed from the training samples alone, by scikit-learn, and kept as ``data.fitted``, the facts of
each column in the order of the inputs. ``eval`` and ``predict`` use the run's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_train.config import DataConfig
from hvd_train.data.column import loses_differences
from hvd_train.data.memory import check_free
from hvd_train.data.tables import Table
from hvd_train.errors import DataError, listing

Facts = list[dict[str, Any]]
STRATEGIES = {"mean": "mean", "median": "median", "mode": "most_frequent"}
NUMBERS = "numbers"  # the input of all numbers, beside those of words as ids
MANY_WORDS = 50  # a column with more different words, and less than two rows for each, is a name and not a category
DATE = "date"
FILL = "set data.missing: median (or mean, mode, flag), or leave the row or the column out"


def prepares(config: DataConfig) -> bool:
    """Return whether the configuration asks for prepared columns."""
    asked = config.categories, config.dates, config.fitted
    return any(one is not None for one in asked) or config.missing != "refuse" or config.scale != "none"


class Preparation:
    """The columns ``features`` of a table; ``fitted``: facts of an earlier fit, or None."""

    def __init__(self, table: Table, features: Sequence[str], config: DataConfig, fitted: Facts | None) -> None:
        self._table, self._config, self.fitted = table, config, fitted or []
        listed = config.categories if isinstance(config.categories, list) else []
        by_column = list(config.missing) if isinstance(config.missing, Mapping) else []
        for key, names in (("categories", listed), ("dates", config.dates or []), ("missing", by_column)):
            if strange := [name for name in names if name not in features]:
                what = f"{listing(strange)} is no feature"
                raise DataError(what, where=f"data.{key}", fix=f"the features are {listing(features)}")
        self._columns: dict[str, np.ndarray] = {}
        self._kinds: dict[str, str] = {}
        kinds = {facts["column"]: facts["kind"] for facts in self.fitted}
        zones = {facts["column"]: facts.get("zone", False) for facts in self.fitted}
        self._zones: set[str] = set()
        for name in features:
            wanted = DATE if name in (config.dates or ()) else "words" if name in listed else ""
            self._kinds[name] = kind = kinds[name] if fitted else wanted
            if kind == DATE:
                self._columns[name], zone = table.days(name)
                self._zones |= {name} if zone else set()
                if fitted and zone != zones[name] and not np.isnan(self._columns[name]).all():
                    have = ["no time zone", "a time zone"]
                    what = f"its times have {have[zone]}, and those of the training have {have[zones[name]]}"
                    raise self._error(name, what, "write all of them with their zone, or none")
            else:
                self._columns[name] = table.with_gaps(name, kind, words=config.categories == "auto")

    def _policy(self, name: str) -> str:
        asked = self._config.missing
        return asked.get(name, "refuse") if isinstance(asked, Mapping) else asked

    def fit(self, rows: np.ndarray) -> Facts:
        """Compute the facts of all columns from the training samples ``rows`` (k,)."""
        self.fitted = [self._fit(name, x[rows]) for name, x in self._columns.items()]
        return self.fitted

    def _fit(self, name: str, x: np.ndarray) -> dict[str, Any]:
        from sklearn.impute import SimpleImputer
        from sklearn.preprocessing import MinMaxScaler, StandardScaler

        words, policy = x.dtype == object, self._policy(name)
        there = x[[one is not None for one in x]] if words else x[~np.isnan(x)]
        if not len(there):
            raise self._error(name, "no training sample has a value", "leave the column out by data.features")
        if not words and np.isinf(there).any():
            raise self._error(name, "it holds infinity", "correct it, or leave the row or the column out")
        facts: dict[str, Any] = {"column": name, "kind": "words" if words else self._kinds[name] or "number"}
        facts |= {"zone": True} if name in self._zones else {}
        if policy in STRATEGIES:
            strategy = "most_frequent" if words else STRATEGIES[policy]
            imputer = SimpleImputer(strategy=strategy, missing_values=None if words else np.nan)
            fill = imputer.fit(x[:, None]).statistics_[0]
            facts["fill"] = str(fill) if words else float(fill)
        elif policy == "flag":
            facts["flag"] = True
        if words and self._config.categories == "auto" and self._dates(name):
            what = "its words are dates, each of which would be a category"
            fix = f"set data.dates: [{name}] and data.scale: standard, or leave it out by data.features"
            raise self._error(name, what, fix)
        if words:
            values = sorted({*there.tolist()})
            if len(values) > MANY_WORDS and 2 * len(values) > len(there):
                what = f"{len(values):,} different words in {len(there):,} training samples are no categories"
                raise self._error(name, what, "leave the column out by data.features")
            return facts | {"values": values}
        filled = np.where(np.isnan(x), facts.get("fill", np.nan), x)[:, None]
        if self._config.scale == "standard":
            standard = StandardScaler().fit(filled)  # it leaves gaps out
            facts |= {"minus": float(standard.mean_[0]), "over": float(standard.scale_[0])}
        elif self._config.scale == "minmax":
            ends = MinMaxScaler().fit(filled)
            facts |= {"minus": float(ends.data_min_[0]), "over": float(1 / ends.scale_[0])}
        return facts

    def _dates(self, name: str) -> bool:
        """Return whether all cells of a column of words are dates, or empty."""
        try:
            return not np.isnan(self._table.days(name)[0]).all()
        except DataError:
            return False

    def inputs(self) -> tuple[Any, Any, list[str]]:
        """Return the inputs, the names of their columns and remarks.

        Inputs are (n, columns) float32, or with ``encoding: ids`` {NUMBERS: these, column of words: ids (n,) int64}.
        """
        ids, remarks = dict[str, np.ndarray](), list[str]()
        parts: list[np.ndarray] = []
        names: list[str] = []
        told = "{} holds numbers that float32 rounds, or whose differences it rounds (set data.scale: standard)"
        for facts in self.fitted:
            x = self._columns[name := facts["column"]]
            numbers, flags = self._words(name, x, facts, remarks) if facts["kind"] == "words" else _scaled(x, facts)
            if not facts.get("flag") and "fill" not in facts and flags.any():
                raise self._gap(name, flags)
            if facts["kind"] == "words" and self._config.encoding == "ids":
                if name == NUMBERS or not name.isidentifier():
                    what = "an input of words cannot have this name, which is an argument of the model"
                    raise self._error(name, what, "rename the column")
                ids[name] = numbers
                if facts.get("flag"):
                    names.append(f"{name} missing")
                    parts.append(flags[:, None])
                continue
            if facts["kind"] == "words":
                names += [f"{name}={word}" for word in facts["values"]]
                count = len(facts["values"])
                what, fix = f"{count:,} columns of column '{name}'", "set data.encoding: ids, or leave the column out"
                check_free(12 * len(x) * count, what, str(self._table.path), fix)
                numbers = (numbers[:, None] == np.arange(1, count + 1)).astype(np.float32)
            else:
                names.append(name)
                if _rounds(numbers):
                    remarks.append(told.format(f"column '{name}'"))
            parts.append(numbers.reshape(len(x), -1))
            if facts.get("flag"):
                names.append(f"{name} missing")
                parts.append(flags[:, None])
        if twice := sorted(name for name, count in Counter(names).items() if count > 1):
            raise self._error(twice[0], "two columns would have this name", "rename one of them")
        matrix = np.concatenate(parts, axis=1) if parts else np.zeros((len(x), 0))
        with np.errstate(over="ignore"):
            matrix = matrix.astype(np.float32)
        if not np.isfinite(matrix).all():
            bad = names[int(np.argmin(np.isfinite(matrix).all(axis=0)))]
            raise self._error(bad, "holds NaN, infinity or a number that is too large for 32 bits", "correct it")
        if not ids:
            return matrix, tuple(names), remarks
        named = {NUMBERS: matrix} if parts else {}
        return named | ids, dict.fromkeys(ids, ()) | dict.fromkeys(named, tuple(names)), remarks

    def _words(self, name: str, x: np.ndarray, facts: Mapping[str, Any], remarks: list[str]) -> tuple[Any, Any]:
        """Return ids (n,), 0 for words that the training samples lack, and where a cell is empty (n,)."""
        numbers = {word: k + 1 for k, word in enumerate(facts["values"])}
        gaps = np.array([one is None for one in x])
        known = [numbers.get(facts.get("fill") if one is None else one, 0) for one in x.tolist()]
        ids = np.array(known, np.int64)
        strange = (ids == 0) & ~gaps
        if strange.any():
            unseen = "not among the training samples"
            if self._policy(name) == "refuse":
                row = int(np.argmax(strange))
                fix = f"it has {listing(facts['values'])}; with another data.missing it counts as none of them"
                raise DataError(f"'{x[row]}' is {unseen}", where=self._table.at(name, row), fix=fix)
            words = listing(sorted({*x[strange].tolist()}))
            remarks.append(f"column '{name}' of {self._table.path}: {words} {unseen}: counted as none of their words")
        return ids, gaps

    def _gap(self, name: str, gaps: np.ndarray) -> DataError:
        fix = "fill the cell, or leave the row out" if self._config.fitted else FILL
        return DataError("the cell is empty", where=self._table.at(name, int(np.argmax(gaps))), fix=fix)

    def _error(self, name: str, what: str, fix: str) -> DataError:
        return DataError(what, where=f"{self._table.path}, column '{name}'", fix=fix)


def _rounds(values: np.ndarray) -> bool:
    """Return whether float32 rounds whole numbers (n,), or the differences of others."""
    with np.errstate(over="ignore", invalid="ignore"):
        stored = values.astype(np.float32)
        whole = (values == np.rint(values)).all() and (stored != values).any()
    return bool(whole) or bool(loses_differences(values[:, None], stored[:, None]).any())


def _scaled(x: np.ndarray, facts: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return scaled numbers (n,), where gaps without a fill are 0, and where a cell is empty (n,)."""
    gaps = np.isnan(x)
    scaled = (np.where(gaps, facts.get("fill", 0.0), x) - facts.get("minus", 0.0)) / facts.get("over", 1.0)
    return np.where(gaps & ("fill" not in facts), 0.0, scaled), gaps


def table_of(fitted: Facts) -> list[tuple[str, str, str, str]]:
    """Return a row for each column: its name, kind, what fills gaps, and its words or scale."""
    rows = []
    for facts in fitted:
        fill = facts.get("fill", "a column of its own" if facts.get("flag") else "refused")
        values = listing(facts["values"]) if "values" in facts else ""
        if "over" in facts:
            values = f"(x - {facts['minus']:.6g}) / {facts['over']:.6g}"
        rows.append((facts["column"], facts["kind"], fill if isinstance(fill, str) else f"{fill:.6g}", values))
    return rows
