"""The switch ``--long``: cases marked ``@pytest.mark.long(reason)`` run only with it."""

import pytest


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
