"""Interrupted runs go on, on as many ranks and on others, with the results that commit 62bf91a had, in 64 bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.launching import launch
from tests.resume.runs import CUT, END, EVALUATED, FRAMEWORKS, RESUMED, config_of, write_data

HERE = Path(__file__).parent
SECONDS = 300  # of a world of some ten short runs
TOLERANCE = 1e-9  # relative, in float64: another kind of CPU adds in another order
RESULTS = json.loads((HERE / "recorded.json").read_text())
SCRIPTS = {"pytorch": ("torch_script", "ckpt"), "tensorflow": ("keras_script", "keras")}
WORLDS = [(framework, ranks) for framework in FRAMEWORKS for ranks in (2, 1)]
# TensorFlow traces each case on each rank.
LONG = pytest.mark.long("trained by the same code in both frameworks; PyTorch runs these in every run")
LONG_RUNS = {"tensorflow": ("plain", "partial", "regression", "npz"), "pytorch": ()}
KEPT_APART = "per-rank state ({}) is not restored: ranks 2 -> 1"


def cases(names, worlds) -> list:
    """(name, framework, ...) of each pair; some are long."""
    return [
        pytest.param(name, *world, marks=LONG if name in LONG_RUNS[world[0]] else ())
        for name in names
        for world in worlds
    ]


def work_of(framework: str, ranks: int) -> list[dict]:
    """On two ranks the runs begin and go on there; on one rank they go on as two ranks have left them."""
    kind, suffix = SCRIPTS[framework]
    script = {"kind": kind, "name": "script"}
    work = []
    if ranks == 2:
        work.append(script | {"save": f"{framework}/script.{suffix}"})
        work += [{"kind": "fit", "name": name, "config": config_of(framework, name, CUT)} for name in RESUMED]
        work.append({"kind": "copy", "name": "copy", "folder": framework, "to": f"one/{framework}"})
    work.append(script | {"load": f"{framework}/script.{suffix}", "save": f"{framework}/again.{suffix}"})
    for name in RESUMED:
        work.append({"kind": "fit", "name": name, "config": config_of(framework, name, END), "resume": "last"})
    if ranks == 1:
        for name in EVALUATED:
            work.append({"kind": "fit", "name": name, "config": config_of(framework, name)})
            work.append({"kind": "evaluate", "name": name, "run_dir": f"{framework}/{name}"})
    return work


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    """Results of a framework on so many ranks, by the name of the run; each world is started once."""
    done: dict[tuple[str, int], dict[str, dict]] = {}
    folders: dict[str, Path] = {}

    def get(framework: str, ranks: int) -> dict[str, dict]:
        if (framework, ranks) not in done:
            if framework not in folders:
                folders[framework] = tmp_path_factory.mktemp(framework)
                (folders[framework] / framework).mkdir()
            folder = folders[framework]
            if ranks == 1:
                get(framework, 2)
                folder = folder / "one"
                write_data(folder)
            skipped = () if request.config.getoption("--long") else LONG_RUNS[framework]
            work = [case for case in work_of(framework, ranks) if case["name"] not in skipped]
            (folder / "work.json").write_text(json.dumps({framework: work}))
            run = launch(ranks, "mpirun", [str(HERE / "world.py"), framework, str(folder)], seconds=SECONDS)
            assert run.returncode == 0, f"{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
            places = {case["name"]: folder / f"results/{framework}-{case['name']}.json" for case in work}
            done[framework, ranks] = {name: json.loads(place.read_text()) for name, place in places.items()}
        return done[framework, ranks]

    return get


def assert_equal(result: dict, expected: dict) -> None:
    assert result["tensors"].keys() == expected["tensors"].keys()
    for name, measures in expected["tensors"].items():
        size = max(measures[0], 1e-12)
        assert np.allclose(result["tensors"][name], measures, rtol=0, atol=TOLERANCE * size), name
    for key in expected.keys() - {"tensors", "weights_sha256"}:
        assert result[key] == close_to(expected[key]), key


def close_to(value):
    return value if isinstance(value, str) else pytest.approx(value, rel=TOLERANCE)


@pytest.mark.parametrize(("name", "framework", "ranks"), cases(RESUMED, WORLDS))
def test_an_interrupted_run_goes_on(results, name, framework, ranks):
    result, expected = results(framework, ranks)[name], RESULTS[f"{framework} {name} {ranks}"]
    assert result["steps"] == END
    assert_equal(result, expected)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_on_other_ranks_tells_that_residuals_are_dropped(results, framework):
    for ranks, times in ((2, 0), (1, 1)):
        for name, kept in (("topk", "residuals"), ("local_sgd", "slots, weights")):
            assert results(framework, ranks)[name]["output"].count(KEPT_APART.format(kept)) == times, (ranks, name)
    plain = results(framework, 1).get("plain", {"output": ""})
    assert "per-rank state" not in plain["output"], "nothing was kept"


@pytest.mark.parametrize(("name", "framework"), cases(EVALUATED, [(framework,) for framework in FRAMEWORKS]))
def test_a_trained_run_is_evaluated(results, name, framework):
    result, expected = results(framework, 1)[name], RESULTS[f"{framework} {name} 1"]
    assert {key: result[key] for key in expected} == {key: close_to(value) for key, value in expected.items()}


@pytest.mark.parametrize(("framework", "ranks"), WORLDS)
def test_a_script_goes_on_from_its_checkpoint(results, framework, ranks):
    assert_equal(results(framework, ranks)["script"], RESULTS[f"{framework} script {ranks}"])
