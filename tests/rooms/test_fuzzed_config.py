"""Whatever a configuration holds, it is taken or refused in clear lines, and never anything else.

``HVD_TRAIN_FUZZ=100000`` takes as many cases of each kind instead of some hundreds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvd_train.config import Config, explain, load_config, resolved_yaml
from hvd_train.errors import ConfigError

CASES = int(os.environ.get("HVD_TRAIN_FUZZ", "300"))
fuzzed = settings(
    max_examples=CASES,
    derandomize=CASES == 300,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
TEXTS = [path.read_text() for path in sorted((Path(__file__).parents[2] / "scripts" / "configs").glob("*.yaml"))]
KEYS = [key for key, *_ in explain()]
PIECES = [
    "", " ", "\n", "\t", ":", ": ", "- ", "[", "]", "{", "}", "&a", "*a", "!!python/object:os.system", "|", ">", "'",
    '"', "#", "---", "...", "null", "true", "-1", "1e400", ".nan", ".inf", "0x10", "1_000", "2026-11-23", "\x00",
    "\x1b", "\u2028", "é", "10" * 40, *KEYS,
]  # fmt: skip
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.sampled_from(KEYS + PIECES)
)
values = st.recursive(
    scalars,
    lambda below: st.one_of(st.lists(below, max_size=4), st.dictionaries(st.text(max_size=9), below, max_size=4)),
    max_leaves=8,
)


def taken_or_told(folder: Path, path: Path | None = None, sets=(), **more) -> None:
    modules = set(sys.modules)
    try:
        config = load_config(path, sets, **more)
    except ConfigError as error:
        rows = str(error).split("\n")
        assert len(rows) < 200 and all(0 < len(row) < 2000 for row in rows), str(error)
        assert all(row.replace("\t", " ").isprintable() for row in rows), repr(str(error))
        return
    assert isinstance(config, Config) and not {name for name in sys.modules if name not in modules} & {
        "os",
        "antigravity",
    }
    again = folder / "again.yaml"
    again.write_text(resolved_yaml(config))
    assert load_config(again) == config


@fuzzed
@given(st.binary(max_size=200))
def test_any_bytes(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp()
    (folder / "job.yaml").write_bytes(content)
    taken_or_told(folder, folder / "job.yaml")


@fuzzed
@given(
    st.sampled_from(TEXTS),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 20), st.sampled_from(PIECES)), max_size=4),
)
def test_real_files_with_pieces_changed(tmp_path_factory, text, changes):
    folder = tmp_path_factory.getbasetemp()
    for share, gone, piece in changes:
        at = int(share * len(text))
        text = text[:at] + piece + text[at + gone :]
    (folder / "job.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    taken_or_told(folder, folder / "job.yaml")


@fuzzed
@given(st.dictionaries(st.sampled_from(KEYS), values, max_size=4))
def test_real_keys_with_any_value(tmp_path_factory, given_values):
    """As ``hvd_train.fit`` takes it, and as a file."""
    data: dict = {}
    for key, value in given_values.items():
        *above, last = key.split(".")
        at = data
        for part in above:
            at = at.setdefault(part, {}) if isinstance(at.get(part, {}), dict) else {}
        at[last] = value
    folder = tmp_path_factory.getbasetemp()
    taken_or_told(folder, base=data)
    (folder / "job.yaml").write_text(yaml.safe_dump(data))
    taken_or_told(folder, folder / "job.yaml")


@fuzzed
@given(
    st.lists(
        st.one_of(st.text(max_size=30), st.builds("{}={}".format, st.sampled_from(KEYS), st.text(max_size=20))),
        max_size=3,
    )
)
def test_any_settings(tmp_path_factory, sets):
    taken_or_told(tmp_path_factory.getbasetemp(), sets=sets)


def test_the_check_can_fail(tmp_path, monkeypatch):
    """Negative control: a reader that lets Python's own errors out."""
    monkeypatch.setattr("hvd_train.config.reading._read", lambda *_: {"seed": [].pop()})
    with pytest.raises(IndexError):
        taken_or_told(tmp_path, tmp_path / "job.yaml")
