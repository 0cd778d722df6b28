"""Local training in Keras scripts (``hk.distribute(mode="outer")``): the formula, loops, files, mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.launching import launch
from tests.script.outer_formula import ROUND, STEPS, STREAMED, by_formula, first, streamed_by_formula

ROOT = Path(__file__).parents[3]
LONG = pytest.mark.long("two ranks on TensorFlow run it in every run")
# (ranks, launcher, backend)
WORLDS = [
    (2, "mpirun", "tensorflow"),
    pytest.param((2, "horovodrun", "torch"), marks=LONG),
    pytest.param((3, "horovodrun", "tensorflow"), marks=LONG),
]
EPOCH_ENDS = [3, 6, STEPS]  # steps after which ranks join
TOLERANCE = {"tensorflow": 1e-12, "torch": 1e-6}  # Keras takes some losses in 32 bits on PyTorch


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Return the facts of all ranks of a world, which is launched once."""
    done: dict[tuple, list[dict]] = {}

    def get(world: tuple[int, str, str]) -> list[dict]:
        size, launcher, backend = world
        if world not in done:
            folder = tmp_path_factory.mktemp("local")
            run = launch(size, launcher, ["-m", "tests.script.keras.local_worker", str(folder)], KERAS_BACKEND=backend)
            assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
            done[world] = [json.loads((folder / f"facts.{size}.{rank}.json").read_text()) for rank in range(size)]
        return done[world]

    return get


def after_epochs(ranks: int, epochs: int) -> list[np.ndarray]:
    """Return the global weights after each epoch."""
    numbers, joins = [*range(1, STEPS + 1)] * epochs, [STEPS * e + s for e in range(epochs) for s in EPOCH_ENDS]
    return [by_formula(ranks, numbers[: STEPS * e], joins, first(5))[1] for e in range(1, epochs + 1)]


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_the_ranks_follow_the_formula(worlds, world):
    """In ``fit`` and in loops, whose passes end like epochs."""
    ends, rtol = after_epochs(world[0], 3), TOLERANCE[world[2]]
    for facts in worlds(world):
        ways = ["fit", "accumulated", "eager"]
        ways += ["several in one execution", "loop", "loop in a graph"] if world[2] == "tensorflow" else []
        for way in ways:
            np.testing.assert_allclose(facts[way], ends[1], rtol=rtol, err_msg=way)
        np.testing.assert_allclose(facts["again"], ends[2], rtol=rtol)
        np.testing.assert_allclose(facts["val_loss"], [np.mean(w**2) for w in ends[:2]], rtol=max(rtol, 1e-6))
        np.testing.assert_allclose(facts["best"], max(ends, key=lambda w: np.mean(w**2)), rtol=rtol)
        assert facts["fit"] == worlds(world)[0]["fit"]


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_parts_join_while_the_ranks_train_on(worlds, world):
    """With ``mode="streaming"``: at the end of an epoch all parts join at once."""
    size, tolerance = world[0], {"rtol": TOLERANCE[world[2]], "atol": 1e-3 * TOLERANCE[world[2]]}
    local, shared = streamed_by_formula(size, range(1, STREAMED + 1), (), 5)
    _, joined = streamed_by_formula(size, [*range(1, STEPS + 1)] * 2, (STEPS, 2 * STEPS), 5)
    for rank, facts in enumerate(worlds(world)):
        np.testing.assert_allclose(facts["streamed"], local[rank], **tolerance)
        np.testing.assert_allclose(facts["streamed within"], shared, **tolerance)
        np.testing.assert_allclose(facts["streamed fit"], joined, **tolerance)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_one_rank_stops_all(worlds, world):
    _, shared, _ = by_formula(world[0], range(1, ROUND + 2), [ROUND, ROUND + 1], first(5))
    for facts in worlds(world):
        np.testing.assert_allclose(facts["stopped"], shared, rtol=TOLERANCE[world[2]])
        assert facts["epochs"] == 1


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_what_scores_and_saves_has_the_global_weights(worlds, world):
    local, shared, _ = by_formula(world[0], range(1, ROUND + 2), [ROUND], first(5))
    rtol = TOLERANCE[world[2]]
    for rank, facts in enumerate(worlds(world)):
        np.testing.assert_allclose(facts["local"], local[rank], rtol=rtol)
        np.testing.assert_allclose(facts["within"], shared, rtol=rtol)
        np.testing.assert_allclose(facts["loss"], np.mean(shared**2), rtol=max(rtol, 1e-6))
        np.testing.assert_allclose(facts["predicted"], shared, rtol=max(rtol, 1e-6))
        assert facts["saved"] == facts["loaded"] == facts["within"] and facts["after"] == facts["local"]
        assert facts["nothing learned since"] == facts["loss"]


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_backup_goes_on_with_the_same_bits(worlds, world):
    for facts in worlds(world):
        assert facts["backup"] and facts["moved"] and facts["told"]


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_running_statistics_are_the_mean_at_the_last_join(worlds, world):
    for facts in worlds(world):
        np.testing.assert_allclose(facts["mean"], facts["expected mean"], rtol=1e-6)


MODE = r"hk\.distribute\(mode=\.\.\.\)"
REFUSED = {
    "two optimizers": rf"local training takes one optimizer, and there are 2; {MODE}; leave mode out, or",
    "loss scale": r"LossScaleOptimizer does not go with mode='outer', because.*; hk\.distribute; take mixed_bfloat16",
    "ema": r"use_ema does not go with mode='outer', because.*; hk\.distribute; leave one of them out",
    "sharded": r"sharded=True does not go with mode='outer'",
    "lr_scaling": r"lr_scaling does not go with mode='outer'",
    "load within": rf"weights loaded within global_weights would be lost; {MODE}; leave the context before the load",
}


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_mistake_is_one_line(worlds, world):
    for facts in worlds(world):
        assert facts["refused"].keys() == REFUSED.keys()
        for case, message in facts["refused"].items():
            assert re.match(REFUSED[case], message), message


def test_the_guides_example(tmp_path):
    """As shown, on two ranks."""
    page, call = (ROOT / "hvd_train" / "guide" / "own-script.md").read_text(), 'hk.distribute(model, mode="outer"'
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if call in block]
    (tmp_path / "train.py").write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{block}")
    run = launch(2, "mpirun", [str(tmp_path / "train.py")])
    assert run.returncode == 0 and re.fullmatch(r"accuracy 0\.[89]\d+\n", run.stdout), run.stdout + run.stderr[-3000:]
    assert (tmp_path / "digits.keras").exists()
