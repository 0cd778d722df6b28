"""Which tests run side by side; the switch ``--long``: cases marked ``@pytest.mark.long(reason)`` run only with it;
and where the time went."""

import atexit
import gc
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import seconds

# The same cases in each run, and none is too slow: no verdict depends on draws or on what else the machine does.
settings.register_profile(
    "tests", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as ranks have it; before torch is loaded
SHOWN = 20
TESTS = Path(__file__).parent
# What --quick runs: folders and files that need no framework, and skip the cases for one that is not installed.
QUICK = (
    "checkpoint/test_resume_rules",
    "checkpoint/test_writer",
    "compression/",
    "core/",
    "data/",
    "report/",
    "rooms/",
    "run_folder/",
    "task/test_task",
    "task/test_recorded",
    "task/test_against_scikit_learn",
    "update/",
    "frontends/test_contract",
    "frontends/test_records",
    "script/test_local_training",
    "stages/test_links",
    "stages/test_numpy_stages",
    "stages/test_schedule",
    "stages/test_split",
    "sweep/test_repeats",
    "verify/test_difference",
    "test_faults",
    "test_planted_faults",
    "test_files",
    "test_packaging",
)
# The longest first, so that both workers end at about the same time.
LONGEST = [
    "ranks/test_worlds",
    "tests/script/keras/test_keras",
    "tests/script/pytorch/test_sharded",
    "stages/test_runs",
    "tests/script/pytorch/test_worlds",
    "tests/script/keras/test_sharded",
    "verify/test_verify",
    "ranks/test_lost_ranks",
    "ranks/test_launchers",
    "ranks/test_signals",
    "cli/test_guide",
    "ranks/test_async",
]


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run the cases marked long as well")
    parser.addoption("--quick", action="store_true", help="run what needs no framework alone")


def pytest_ignore_collect(collection_path, config):
    """Leave out the files that --quick does not run before they are imported: many of them import a framework."""
    if config.getoption("--quick") and collection_path.match("test_*.py"):
        return None if collection_path.relative_to(TESTS).as_posix().startswith(QUICK) else True
    return None


def pytest_configure(config):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup leaves it ignored, in what tests start and send it to as well
    if not hasattr(config, "workerinput"):  # the one process, or the one that hands the tests to workers
        handle, os.environ[seconds.FILE] = tempfile.mkstemp(prefix="hvd-train-test-seconds-")
        os.close(handle)


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        os.unlink(os.environ.pop(seconds.FILE))


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there is none
def pytest_xdist_make_scheduler(config, log):
    from tests.scheduling import Scheduling

    return Scheduling(config, log)


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: next((i for i, name in enumerate(LONGEST) if name in item.nodeid), len(LONGEST)))
    for item in items:
        if config.getoption("--quick") and "_at_any_" in item.name:
            item.add_marker(pytest.mark.skip(reason="--quick: a training for each step or moment"))
        mark = item.get_closest_marker("long")
        if mark is None:
            continue
        if not mark.args:
            raise pytest.UsageError(f"{item.nodeid}: the marker 'long' wants the reason")
        if not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason=f"--long: {mark.args[0]}"))


def pytest_collection_finish():
    gc.freeze()  # Keras collects at every clear_session, a third of a second for what the imports left


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Draws, types and sessions begin anew: no verdict depends on the tests that a worker ran before."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
    if keras := sys.modules.get("keras"):
        keras.utils.set_random_seed(0)
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
    if script := sys.modules.get("hvd_train.script.shared.world"):
        # The world of one that a script opens once a process, for one framework.
        script._sessions.clear()
        atexit.unregister(script._close)
    if loop := sys.modules.get("hvd_train.script.keras.loop"):
        loop._iterations.clear()  # by which passes over data are numbered


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    before = seconds.spent()
    try:
        return (yield)
    finally:
        seconds.tell("", item.location[0], seconds.spent() - before)


def pytest_terminal_summary(terminalreporter):
    """A world counts for the file whose test asked for it first."""
    told = seconds.cases()
    rows = [row for row in told if not row[1]][:SHOWN] + [row for row in told if row[1]][:SHOWN]
    if rows and rows[0][0] > 20:
        terminalreporter.section("CPU seconds, with those of launched ranks")
        for total, worker, name, ranks in rows:
            terminalreporter.line(f"{total:7.1f} " + (f"  {worker}: {name}, {ranks} ranks in all" if worker else name))
