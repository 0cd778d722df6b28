"""Real trainings with planted faults: ``hvd-train explain`` names each first, and foretells what its cure gives."""

from __future__ import annotations

import pytest

from hvd_train.engine.library import MISSING, horovod
from tests.cli.running import commands
from tests.insight.planted import FAULTS, foretold, sleeping, trained, tried

pytestmark = pytest.mark.skipif(horovod() == MISSING, reason="Horovod is missing")


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_a_slow_loader_of_a_rank_is_found(tmp_path, framework):
    """It sleeps 16 x 10 ms for each batch: more than anything else takes, also on a busy machine."""
    model = {"name": "mlp", "hidden": [32]}
    trained(tmp_path, "run", {"framework": framework, "model": model, "max_epochs": 1, **sleeping(0.01, rank=1)}, 2)
    line = ["explain", "run", "--picture", "shares.png", "--trace", "timeline.json"]
    (told,) = commands(line, cwd=tmp_path)
    assert told.code == 0, told.err
    assert told.out.startswith(f"{framework}, mlp: 2 ranks on 1 host; a step takes ")
    assert "\n1. input of one rank (" in told.out and ": rank 1 waits " in told.out
    assert (tmp_path / "shares.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "timeline.json").exists()


@pytest.mark.long("two trainings each, and nothing else may run beside them")
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_first_and_its_gain_is_that_of_the_cure(tmp_path, name):
    """Within 10 %, or it is a bound, in one of three tries: other programs may slow down one of the two trainings."""
    one = FAULTS[name]
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        found, real = tried(folder, one)
        assert found and found[0].cause == one.cause, found
        if foretold(found[0], real):
            return
    pytest.fail(f"foretold {found[0].gain_words}, measured {real:.2f}")
