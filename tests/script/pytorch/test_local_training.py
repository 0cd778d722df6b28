"""Local training in PyTorch scripts (``ht.distribute(mode="outer")``): formula, files, loops, mistakes."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from tests.launching import ROOT, launch
from tests.script.outer_formula import ROUND, STEPS, STREAMED, by_formula, first, streamed_by_formula

LONG = pytest.mark.long("one and two ranks run it in every run")
SIZES = [1, 2, pytest.param(3, marks=LONG)]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Return the facts of all ranks of a world, which is launched once and finds the files of the worlds before."""
    done: dict[int, list[dict]] = {}
    folder = tmp_path_factory.mktemp("local")

    def get(size: int) -> list[dict]:
        if size not in done:
            run = launch(size, "mpirun", ["-m", "tests.script.pytorch.local_worker", str(folder)])
            assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
            done[size] = [json.loads((folder / f"facts.{size}.{rank}.json").read_text()) for rank in range(size)]
        return done[size]

    return get


EVERY_ROUND = range(ROUND, STEPS + 1, ROUND)


@pytest.mark.parametrize("size", SIZES)
def test_the_ranks_follow_the_formula(worlds, size):
    local, shared, velocity = by_formula(size, range(1, STEPS + 1), EVERY_ROUND, first(5))
    for rank, facts in enumerate(worlds(size)):
        for loop in ("local", "parts", "closure", "compiled"):
            np.testing.assert_allclose(facts[loop], local[rank], rtol=1e-12, err_msg=loop)
        np.testing.assert_allclose(facts["within"], shared, rtol=1e-12)
        np.testing.assert_allclose(facts["velocity"], velocity, rtol=1e-12)
        for name in ("nested", "state_dict", "pickled"):
            assert facts[name] == facts["within"], name
        np.testing.assert_allclose(facts["compiled state_dict"], shared, rtol=1e-12)
        assert facts["after"] == facts["copy"] == facts["local"]
        assert facts["within"] == worlds(size)[0]["within"]


@pytest.mark.parametrize("size", SIZES)
def test_ranks_join_at_the_end_of_a_pass(worlds, size):
    _, shared, _ = by_formula(size, [1, 2, 3, 4] * 2, (3, 4, 7, 8), first(5))
    for facts in worlds(size):
        np.testing.assert_allclose(facts["passes"], shared, rtol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_parts_join_while_the_ranks_train_on(worlds, size):
    """With ``mode="streaming"``: at the end of a pass all parts join at once."""
    for steps, key in ((STREAMED - 1, "streamed"), (STREAMED, "arrived")):
        local, shared = streamed_by_formula(size, range(1, steps + 1), (), 5)
        for rank, facts in enumerate(worlds(size)):
            np.testing.assert_allclose(facts[key], local[rank], rtol=1e-12, atol=1e-15, err_msg=key)
    _, joined = streamed_by_formula(size, [1, 2, 3, 4, 5] * 2, (5, 10), 5)
    for facts in worlds(size):
        np.testing.assert_allclose(facts["streamed within"], shared, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(facts["streamed passes"], joined, rtol=1e-12, atol=1e-15)
        assert facts["streamed again"][0] == facts["streamed again"][1] == worlds(size)[0]["streamed again"][0]
        assert facts["streamed names"] == ["exchange/outer_momentum/w", "exchange/outer_momentum/z"]


@pytest.mark.parametrize("size", SIZES)
def test_a_run_goes_on_from_the_global_weights(worlds, size):
    """With the outer momentum of the file, whatever the number of ranks was; a round begins."""
    for facts in worlds(size):
        ends = {name.removeprefix("gone on from state"): x for name, x in facts.items() if "gone on" in name}
        assert str(size) in ends
        for ranks, end in ends.items():
            _, shared, velocity = by_formula(int(ranks), range(1, STEPS + 1), EVERY_ROUND, first(5))
            _, shared, _ = by_formula(size, range(1, ROUND + 1), [ROUND], shared, velocity)
            np.testing.assert_allclose(end, shared, rtol=1e-12)
        assert facts["same bits"] == [True, True]
        assert facts["half loaded"]


@pytest.mark.parametrize("size", SIZES)
def test_a_file_without_outer_momentum_is_told_once(worlds, size):
    """And the momentum is zero then, also in the middle of a training."""
    for rank, facts in enumerate(worlds(size)):
        for *told, moves in facts["told of files"]["plain"]:
            assert len(told) == (rank == 0) and not moves
            assert all("the outer momentum begins with zeros" in line for line in told)
        assert facts["told of files"]["adam"] == [[True], [True]]


@pytest.mark.parametrize("size", SIZES)
def test_another_optimizer_of_the_model_is_refused(worlds, size):
    for facts in worlds(size):
        first, wrapper = facts["others"]
        assert not wrapper
        assert ("this Adam is not the optimizer of the model's local training" in first) == (size > 1)


@pytest.mark.parametrize("size", SIZES)
def test_running_statistics_are_the_mean_at_the_last_join(worlds, size):
    for facts in worlds(size):
        np.testing.assert_allclose(facts["mean"], facts["expected mean"], rtol=1e-6)
        assert facts["statistics within"] == worlds(size)[0]["statistics within"]


MODE = r"ht\.distribute\(mode=\.\.\.\)"
REFUSED = {
    "fragments": r"the model has 2 tensors, and none is divided; exchange\.fragments: 3",
    "compressed streaming": r"compression: topk does not go with exchange\.mode: streaming",
    "delayed": r"mode='delayed' works only with hvd-train fit; ht\.distribute; a script takes one of allreduce, outer",
    "unknown": r"mode: unknown 'outr'; did you mean 'outer'\?",
    "option": r"outer_start: only with hvd-train fit",
    "foreign": r"outer_steps: only with hvd-train fit.*and mode='outer' with outer_steps, outer_lr",
    "two optimizers": r"local training takes one model and one optimizer",
    "sharded": r"sharded=True does not go with mode='outer', because each rank moves.*; ht\.distribute; leave one",
    "sync_batchnorm": r"sync_batchnorm=True does not go with mode='outer'",
    "average": r"average=False does not go with mode='outer'",
    "step within": rf"a step within global_weights would be lost; {MODE}; leave the context before the next step",
    "load within": rf"weights loaded within global_weights would be lost; {MODE}; leave the context before the load",
    "pickled": rf"the pickled model would have this rank's weights; {MODE}; save model\.state_dict\(\), or pickle wit",
    "unfrozen": r"a parameter of shape \(3,\) is trained since ht\.distribute, and never synchronized",
    "never synchronized": r"no synchronization in 1 step: the global weights are still the first ones; .*; set outer",
    "rate": r"the ranks differ \(learning rate of group 0: 0\.2 on rank 0 and 0\.1 on rank.*step 3 of the model",
    "reloaded": rf"the ranks have made unequal numbers of steps: 4, 3.* on rank 0, 1, \.\.\.; {MODE}; make equally",
}


@pytest.mark.parametrize("size", SIZES)
def test_a_mistake_is_one_line(worlds, size):
    for rank, facts in enumerate(worlds(size)):
        assert len(facts["refused"]) == len(REFUSED) - 2 * (size == 1)
        for case, message in facts["refused"].items():
            if case != "never synchronized" or rank == 0:
                assert re.match(REFUSED[case], message), message


def test_the_guides_example(tmp_path):
    """As shown, on two ranks."""
    page, call = (ROOT / "hvd_train" / "guide" / "own-script.md").read_text(), 'optimizer, mode="outer"'
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if call in block]
    (tmp_path / "train.py").write_text(block)
    run = launch(2, "mpirun", [str(tmp_path / "train.py")], tmp_path)
    assert run.returncode == 0 and re.fullmatch(r"accuracy 0\.[89]\d+\n", run.stdout), run.stdout + run.stderr[-3000:]
    assert (tmp_path / "outer.safetensors").exists()
