"""Keras scripts with ``hk.distribute(sharded=True)`` on real ranks: the numbers of whole slots, on any number."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.launching import ROOT, launch

HERE = ROOT / "tests" / "script" / "keras"
LONG = pytest.mark.long("two ranks run it in every run")
OPTIMIZERS = ["sharded_few", "sharded_more", "sharded_rest"]
CASES = ["sharded_few", "sharded_loop", "sharded_gone_on", "sharded_savers", "sharded_refused", "sharded_gan"]
OF_TENSORFLOW = ["sharded_steps_per_execution", "sharded_graph"]
# (ranks, launcher, backend): Keras takes some losses in 32 bits on PyTorch.
WORLDS = [
    (2, "mpirun", "tensorflow"),
    (2, "horovodrun", "torch"),
    pytest.param((3, "horovodrun", "tensorflow"), marks=LONG),
]
TOLERANCE = {"tensorflow": 1e-9, "torch": 2e-6}
SIGNS = ("lion", "of the user")  # a gradient near 0 has another sign where it is rounded otherwise


@pytest.fixture(scope="module")
def worlds(tmp_path_factory, request):
    """(size, launcher, backend) -> {case: [what each rank has]}."""
    done: dict[tuple[str, int], dict[str, list[dict]]] = {}
    folders = {backend: tmp_path_factory.mktemp(backend) for backend in TOLERANCE}

    def get(size: int, launcher: str, backend: str) -> dict[str, list[dict]]:
        if size > 1:
            get(1, launcher, backend)  # whose model the others go on from
        if (backend, size) not in done:
            cases = [*CASES, *(OF_TENSORFLOW if backend == "tensorflow" else [])]
            cases += OPTIMIZERS[1:] if request.config.getoption("--long") else []
            run = launch(
                size, launcher, [str(HERE / "worker.py"), str(folders[backend]), *cases], KERAS_BACKEND=backend
            )
            assert run.returncode == 0, f"{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
            path = folders[backend]
            done[backend, size] = {
                case: [dict(np.load(path / f"{case}.{size}.{rank}.npz")) for rank in range(size)] for case in cases
            }
        return done[backend, size]

    return get


def part(values: dict, name: str) -> dict[str, np.ndarray]:
    """Return what stands under ``name``."""
    return {key.removeprefix(f"{name}/"): x for key, x in values.items() if key.startswith(f"{name}/")}


def assert_equal(values: dict, *names: str) -> None:
    first, *others = [part(values, name) for name in names]
    assert first
    for name, other in zip(names[1:], others, strict=True):
        for key, x in first.items():
            np.testing.assert_array_equal(other[key], x, err_msg=f"{name} {key}")


def assert_close(one: dict, other: dict, tolerance: float) -> None:
    assert other.keys() <= one.keys()
    for key, x in other.items():
        scale = np.max(np.abs(one[key]), initial=1e-3)
        np.testing.assert_allclose(x, one[key], rtol=0, atol=tolerance * scale, err_msg=key)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_bits_are_those_of_whole_slots(worlds, world):
    """Weights, and all slots as they are saved, of every rank."""
    ranks = worlds(*world)
    for values in (values for case in OPTIMIZERS if case in ranks for values in ranks[case]):
        names = {key.split("/")[0].removesuffix(" divided") for key in values if not key.startswith("own/")}
        assert len(names) > 2
        for name in names:
            assert_equal(values, name, f"{name} divided")
    for values in ranks["sharded_gan"]:
        assert_equal(values, "gan", "gan divided")


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_each_rank_keeps_its_part_of_the_slots(worlds, world):
    size, ranks = world[0], worlds(*world)["sharded_few"]
    whole, parts = ranks[0]["own/adam fused kept"], [values["own/adam fused divided kept"] for values in ranks]
    assert all(abs(kept - whole / size) <= 8 for kept in parts) and sum(parts) - size * 2 == whole - 2


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_ranks_equal_one_process(worlds, world):
    backend = world[2]
    one, many = worlds(1, "", backend), worlds(*world)
    for case, ranks in many.items():
        single = one[case][0]
        kept = {k: x for k, x in ranks[0].items() if k in single and not k.startswith(("own/", *SIGNS))}
        for values in ranks:
            for key, x in kept.items():
                np.testing.assert_array_equal(values[key], x, err_msg=key)
        if case != "sharded_refused":
            assert_close(single, kept, TOLERANCE[backend])


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_saved_model_goes_on(worlds, world):
    """In parts, whole, loaded into a divided one, compiled again, and from what one process saved."""
    values = worlds(*world)["sharded_gone_on"][0]
    assert_equal(values, "0", "read False", "read True", "weights")
    assert_equal(values, "again plain", "again")
    assert_close(part(values, "0"), part(values, "from sharded1"), TOLERANCE[world[2]])


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_callbacks_save_whole_slots_on_rank_0(worlds, world):
    values, single = worlds(*world)["sharded_savers"][0], worlds(1, "", world[2])["sharded_savers"][0]
    assert_equal(values, "restored plain", "restored")
    assert_close(part(single, "best"), part(values, "best"), TOLERANCE[world[2]])
    assert list(values["own/files"]) == ["best.keras", "often.weights.h5"]  # a backup goes when training has ended


@pytest.mark.parametrize("world", [(1, "", "tensorflow"), *WORLDS], ids=str)
def test_what_cannot_be_divided_is_refused(worlds, world):
    for values in worlds(*world)["sharded_refused"]:
        assert list(values["refused"]) == ["adafactor", "centralized", "lamb", "muon", "trusted"]


def test_the_guides_example(tmp_path):
    """As shown, on two ranks."""
    page, call = (ROOT / "hvd_train" / "guide" / "own-script.md").read_text(), "hk.distribute(model, sharded=True"
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if call in block]
    (tmp_path / "train.py").write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{block}")
    run = launch(2, "mpirun", [str(tmp_path / "train.py")])
    assert run.returncode == 0, run.stderr[-3000:]
    (kept,) = re.findall(r"optimizer state of this rank: (\d+) numbers", run.stdout)
    assert abs(int(kept) - (64 * 512 + 512 + 512 * 10 + 10)) < 8  # Adam's two slots, halved
    assert (tmp_path / "model.keras").exists()
