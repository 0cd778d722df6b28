"""No script trains on without the others: a rank that is gone, or waits for what never comes, ends all with code 5."""

from __future__ import annotations

import re

import pytest

from tests.launching import launch
from tests.limits import SECONDS

LIMIT, WATCHDOG = 4, 4  # seconds for ranks that have come apart, above what a busy machine may keep one back
WAITED = {"torch": (r"ht\.sum", "bucket"), "keras": ("fit_evaluate_predict", r"(meeting|\.counts)")}
LEFT = "error[rank 0]: rank 1 came to the end of the script, and this rank waits for it; end the loop at the same step"
CASES = [
    ("torch", "leaves", "mpirun"),
    ("torch", "apart", "horovodrun"),
    ("tensorflow", "leaves", "mpirun"),
    ("keras torch", "apart", "mpirun"),
]
MESSAGES = {
    ("torch", "shapes"): "the ranks diverged: ht.sum got 2, 3 numbers on rank 0, 1, ...; call the same",
    (
        "keras",
        "shapes",
    ): "the ranks diverged: Mismatched .*; call the same on all ranks, with tensors of the same shape",
    ("keras", "drift"): "the weights of rank 1 differ from those of rank 0, first in sequential/dense/bias; "
    "optimizer.apply; ",
}


def ended(launcher, api, kind, env):
    # As a module: the file's folder has a folder keras, which a script there would import in place of Keras.
    return launch(2, launcher, ["-m", "tests.script.lost_rank", api, kind], seconds=SECONDS, **env)


@pytest.mark.parametrize(("api", "kind", "launcher"), CASES)
def test_whatever_a_script_catches_it_ends_with_code_5(tmp_path, api, kind, launcher):
    limit = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(LIMIT)} if kind == "apart" else {}
    run = ended(launcher, api, kind, limit)
    assert run.returncode == 5, run.stdout[-2000:] + run.stderr[-3000:]
    lines = re.findall(r"error\[rank .*", run.stdout + run.stderr)
    if kind == "leaves":
        assert len(lines) == 1 and lines[0].startswith(LEFT), lines
        return
    own, others = WAITED["torch" if api == "torch" else "keras"]
    assert len(lines) == 1 and lines[0].startswith("error[rank 0]: the ranks diverged: "), run.stdout + run.stderr
    assert re.search(rf"{own}\S* waits for rank 1\b", lines[0])
    assert re.search(rf"{others}\S* waits for rank 0\b", lines[0])


@pytest.mark.parametrize(
    ("api", "kind", "launcher"),
    [
        ("torch", "shapes", "horovodrun"),
        ("tensorflow", "shapes", "mpirun"),
        ("tensorflow", "drift", "mpirun"),
    ],
)
def test_ranks_that_hand_over_other_things_end_with_code_5(tmp_path, api, kind, launcher):
    """Other shapes; and, within a tf.function, other weights."""
    run = ended(launcher, api, kind, {})
    lines = re.findall(r"error\[rank .*", run.stdout + run.stderr)
    assert run.returncode == 5 and "trained" not in run.stdout, run.stdout[-2000:] + run.stderr[-3000:]
    assert len(lines) == 1 and "Traceback" not in run.stderr, run.stdout + run.stderr
    assert re.match(r"error\[rank \d\]: " + MESSAGES[api.split()[0] if api == "torch" else "keras", kind], lines[0]), (
        lines
    )


@pytest.mark.parametrize("api", ["torch", "keras torch"])
def test_weights_that_a_script_has_moved_itself_are_compared_at_its_end(api):
    """Ranks drifted apart with exit code 0. Nobody waits: the rank that ends last finds it."""
    run = ended("mpirun", api, "moved", {})
    lines = set(re.findall(r"error\[rank \d\]: (.*)", run.stdout + run.stderr))
    assert run.returncode == 5 and "Traceback" not in run.stderr, run.stdout[-2000:] + run.stderr[-3000:]
    what = "the weights of this rank differ from those of rank {}, and no gradient was exchanged; the end of the"
    assert lines and all(line.startswith((what.format(0), what.format(1))) for line in lines), lines


@pytest.mark.parametrize(
    ("api", "kind", "launcher"),
    [
        ("torch", "loops", "mpirun"),
        ("tensorflow", "loads", "horovodrun"),
    ],
)
def test_a_rank_that_loops_is_named_with_its_stack(api, kind, launcher):
    """In the script itself, in a callback, and in what loads batches, which TensorFlow asks from within a step."""
    run = ended(launcher, api, kind, {"HVD_TRAIN_WATCHDOG_S": str(WATCHDOG)})
    out = run.stdout + run.stderr
    assert run.returncode == 5, out[-5000:]
    place = r"\(in wedged, \S+lost_rank\.py:\d+\); if"
    assert re.search(rf"error\[rank 1\]: has kept the others waiting for {WATCHDOG} s {place}", out), out[-5000:]
    assert 'lost_rank.py", line' in out and out.count("error[rank") == 1, out[-5000:]


def test_a_rank_that_is_stopped_is_named():
    run = ended("mpirun", "torch", "stops", {"HVD_TRAIN_WATCHDOG_S": "3"})
    assert run.returncode == 5, run.stdout[-2000:] + run.stderr[-3000:]
    assert "error[rank 1]: is stopped (SIGSTOP), for more than 3 s\n" in run.stdout + run.stderr
