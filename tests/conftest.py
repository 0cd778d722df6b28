"""The switch ``--long``: cases marked ``@pytest.mark.long(reason)`` run only with it. And where the time went."""

import gc
import os
from collections import Counter

import pytest

from tests import seconds

SHOWN = 20
_files: Counter[str] = Counter()


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run the cases marked long as well")


def pytest_collection_modifyitems(config, items):
    for item in items:
        mark = item.get_closest_marker("long")
        if mark is None:
            continue
        if not mark.args:
            raise pytest.UsageError(f"{item.nodeid}: the marker 'long' wants the reason")
        if not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason=f"--long: {mark.args[0]}"))


def pytest_collection_finish():
    gc.freeze()  # Keras collects at every clear_session, a third of a second for what the imports left


@pytest.fixture(scope="session", autouse=True)
def _seconds_of_cases(tmp_path_factory):
    os.environ[seconds.FILE] = str(tmp_path_factory.mktemp("seconds") / "cases.jsonl")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    before = seconds.spent()
    try:
        return (yield)
    finally:
        _files[item.location[0]] += seconds.spent() - before


def pytest_terminal_summary(terminalreporter):
    """A world counts for the file whose test asked for it first."""
    rows = [(total, name) for name, total in _files.most_common(SHOWN)]
    rows += [(total, f"  {name}, {ranks} ranks in all") for total, name, ranks in seconds.cases()[:SHOWN]]
    if rows and rows[0][0] > 20:
        terminalreporter.section("CPU seconds, with those of launched ranks")
        for total, name in rows:
            terminalreporter.line(f"{total:7.1f} {name}")
