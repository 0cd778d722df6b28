"""A user's own Keras script on N ranks equals the same script alone with the same global batch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hvd_train.errors import ConfigError
from hvd_train.launch.start import environment
from hvd_train.launch.world import World
from tests.launching import ROOT, launch

HERE = Path(__file__).parent
SLOW = r"step \d+: rank 1 is slow: the others wait for it \d\d% of each step, [\d.]+ ms, since step \d+\n"
CASES = [
    "arrays", "global_clipnorm", "run_eagerly", "own_step", "own_logs", "rates", "two_inputs", "class_weight",
    "py_dataset", "self_shuffled", "overflow", "undivided", "callbacks", "tf_data", "steps_per_execution",
    "adam_accumulation", "residual", "saved", "jit_compile", "summed", "masked", "masked_own_step", "weighted_mean",
    "own_losses", "fine_tuning", "vae", "gan", "unbuilt", "loader", "loop", "loop_dataset", "loop_sums", "steps",
    "masked_scores", "states", "outputs", "lengths", "float8", "taken", "taken_graph", "image_folder",
    "over_samples", "uneven_number",
]  # fmt: skip
# What may depend on whether two ranks meet or three: shares of 7, 7 and 6, means of three, batches that data makes.
ON_THREE = ["arrays", "py_dataset", "masked", "loop_sums", "taken"]
# Keras on PyTorch has its own step; what it shares with TensorFlow is tried there.
ON_TORCH = [
    "arrays", "own_step", "two_inputs", "py_dataset", "residual", "saved", "summed", "masked_own_step", "own_losses",
    "gan", "unbuilt", "loader", "loop", "steps", "masked_scores", "states", "outputs", "float8", "taken",
    "over_samples",
]  # fmt: skip
# "draws" after "loader", which loads torch: nobody has seeded it, and the other generators stay alike all the same.
NOT_ALONE = ["left_statistics", "main_rank", "stops", "compressed", "gan_compressed", "draws", "slow", "same_work"]
LOCAL = ("own/", "files")  # what a rank has for itself
WORLDS = {
    (2, "tensorflow"): [*CASES, *NOT_ALONE, "batchnorm_and_dropout", "frozen", "apart", "refused"],
    (3, "tensorflow"): [*ON_THREE, "frozen"],
    (2, "torch"): [*ON_TORCH, *NOT_ALONE, "apart"],
}
ALONE = {"tensorflow": CASES, "torch": ON_TORCH}
# Keras 3.15 takes this loss in float32 on PyTorch, whatever floatx is: its gradients hold no more.
TOLERANCE = {"tensorflow": 1e-9, "torch": 2e-6}
BACKENDS = pytest.mark.parametrize("backend", TOLERANCE)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(size, backend) -> {case: [what each rank has]}; each world is launched once."""
    done: dict[tuple[int, str], dict[str, list[dict]]] = {}
    failed: dict[tuple[int, str], str] = {}  # a world takes more than a minute: one that fails is not tried again

    def get(size: int, backend: str = "tensorflow") -> dict[str, list[dict]]:
        key = size, backend
        assert key not in failed, failed[key]
        if key not in done:
            folder, cases = tmp_path_factory.mktemp(f"{backend}{size}"), WORLDS.get(key, ALONE[backend])
            line = [str(HERE / "worker.py"), str(folder), *cases]
            run = launch(size, "horovodrun" if size == 3 else "mpirun", line, KERAS_BACKEND=backend)
            if run.returncode:
                failed[key] = f"{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
            assert run.returncode == 0, failed[key]
            done[key] = {c: [dict(np.load(folder / f"{c}.{size}.{r}.npz")) for r in range(size)] for c in cases}
            done[key].get("saved", [{}])[0]["own/file"] = folder / "saved.keras"
        return done[key]

    return get


def assert_same(case: str, one: dict, ranks: list[dict], tolerance: float) -> None:
    for key, value in ranks[0].items():
        if key.startswith(LOCAL):
            continue
        for rank, other in enumerate(ranks):
            np.testing.assert_array_equal(other[key], value, err_msg=f"{case} {key}: rank {rank} has other bits")
        reference = one[key]
        scale = np.max(np.abs(reference), initial=1e-3)
        np.testing.assert_allclose(value, reference, rtol=0, atol=tolerance * scale, err_msg=f"{case} {key}")


@pytest.mark.parametrize(
    ("size", "backend", "case"),
    [(*world, case) for world, cases in WORLDS.items() for case in cases if case in ALONE[world[1]]],
)
def test_ranks_equal_one_process(results, size, backend, case):
    assert_same(case, results(1, backend)[case][0], results(size, backend)[case], TOLERANCE[backend])


@BACKENDS
@pytest.mark.parametrize("case", ["stops", "compressed", "gan_compressed"])
def test_ranks_stay_together(results, case, backend):
    ranks = results(2, backend)[case]
    for rank in ranks[1:]:
        for key, value in ranks[0].items():
            np.testing.assert_array_equal(rank[key], value, err_msg=key)
    if case == "stops":  # the wish of step 2 (NaN: 0) holds after the next step
        assert list(ranks[0]["steps"]) == [4, 2]


@BACKENDS
def test_a_step_on_other_data_in_an_open_loop_is_told(results, backend):
    first, other = results(2, backend)["taken"]
    (line,) = first["own/told"]
    assert line.startswith("it is not known which batch a step belongs to") and not other["own/told"].size


@BACKENDS
def test_statistics_of_a_loop_that_is_left_are_told_and_averaged_at_the_barrier(results, backend):
    first, other = results(2, backend)["left_statistics"]
    (line,) = first["own/told"]
    assert "call hk.barrier() after the loop" in line and not other["own/told"].size
    mean = (first["own/before"] + other["own/before"]) / 2
    assert np.abs(first["own/before"] - other["own/before"]).max() > 1e-6
    for rank in (first, other):
        np.testing.assert_allclose(rank["weights/4"], mean, rtol=1e-6)


@BACKENDS
def test_a_loop_that_is_not_divided_is_told(results, backend):
    first, other = results(2, backend)["same_work"]
    assert not any(first[f"own/{kind}"].size for kind in ("divided", "added"))
    assert not any(value.size for value in other.values())
    for kind in ("alike", "graph") if backend == "tensorflow" else ("alike",):
        (line,) = first[f"own/{kind}"]
        assert line.startswith("all ranks computed the same gradients") and "hk.shard" in line


@BACKENDS
def test_a_slow_rank_is_named(results, backend):
    printed = [str(rank["own/told"]) for rank in results(2, backend)["slow"]]
    assert re.search(SLOW, printed[0]) and not printed[1], printed


def test_masks_differ_and_statistics_agree(results):
    first, other = results(2)["batchnorm_and_dropout"]
    assert first.pop("own/seed")[0] != other.pop("own/seed")[0]
    for key in first:
        np.testing.assert_array_equal(other[key], first[key], err_msg=key)


@BACKENDS
def test_ranks_draw_other_numbers_for_the_same_order(results, backend):
    ranks = results(2, backend)["draws"]
    for name in {key.rsplit(" ", 1)[0] for key in ranks[0] if key.endswith(" drawn")}:
        ids, drawn, after = ([rank[f"{name} {k}"] for rank in ranks] for k in ("ids", "drawn", "after"))
        if "divided" not in name:  # 2 fits of 2 epochs
            assert sorted(np.concatenate(ids)) == sorted(4 * list(range(116))), name
        # random, numpy.random and tf.random stay with the data set's order, and a step that runs eagerly has no other.
        pipeline = 3 * len(drawn[0]) // 5 * ("generator" in name)
        messages = [rank[f"{name} told"] for rank in ranks]
        assert list(map(len, messages)) == [int("generator" in name), 0], messages
        several = len(set(np.concatenate(drawn))) + pipeline
        assert several >= 0.99 * sum(map(len, drawn)), f"{name}: {several} of {sum(map(len, drawn))} differ"
        for rank in ranks:
            np.testing.assert_array_equal(rank[f"{name} after"], after[0]) if "other" not in name else None
            again = name.replace("first", "again")
            if again != name and f"{again} drawn" in rank:
                np.testing.assert_array_equal(rank[f"{again} drawn"], rank[f"{name} drawn"], err_msg=name)
                np.testing.assert_array_equal(rank[f"{again} ids"], rank[f"{name} ids"], err_msg=name)


def test_overflow_on_one_rank_skips_the_step_on_all(results):
    for rank in results(2)["overflow"]:
        assert rank["scale"] == 4.0 and rank["iterations"] == 10  # of 11 steps; the scale is halved once


def test_rank_0_alone_writes_and_what_it_writes_is_plain_keras(results):
    first, other = results(2)["callbacks"]
    assert list(first["files"]) == ["best.keras", "log.csv"] and not other["files"].size
    assert str(first["own/class"]).startswith("keras.")


PLAIN = """
import sys
import keras, numpy as np
from sklearn.datasets import load_digits
keras.config.set_floatx("float64")
images, labels = load_digits(return_X_y=True)
x, y = images[:500] / 16, labels[:500]
model = keras.saving.load_model(sys.argv[1])
predicted = model.predict(x[:101], verbose=0)
assert type(model.optimizer).__module__.startswith("keras.") and "update_step" not in vars(model.optimizer)
model.fit(x, y, batch_size=48, shuffle=False, verbose=0)
assert "hvd_train" not in sys.modules and "horovod" not in sys.modules
np.savez(sys.argv[2], predicted=predicted, **{f"weights/{i}": w for i, w in enumerate(model.get_weights())})
"""


@BACKENDS
def test_a_saved_model_trains_on_without_us(results, tmp_path, backend):
    case = results(2, backend)["saved"][0]
    line = [sys.executable, "-c", PLAIN, str(case["own/file"]), str(tmp_path / "found.npz")]
    env = {**environment(), "KERAS_BACKEND": backend, "PYTHONPATH": ""}
    run = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    read = dict(np.load(tmp_path / "found.npz"))
    assert_same("saved", case, [read], TOLERANCE[backend])


def test_a_compiled_graph_is_named_in_one_line_on_rank_0(results):
    first, second = results(2)["jit_compile"]
    (line,) = first["own/told"]
    assert line.startswith("jit_compile is off: ") and "\n" not in line and not second["own/told"].size


@pytest.mark.parametrize(
    ("case", "where", "says"),
    [
        (
            "callback",
            "model.fit, epoch 2",
            "the ranks differ (learning rate of SGD: 0.1 on rank 0",
        ),
        ("loop", "model.train_on_batch", "differ from those of rank"),
        ("rate", "model.train_on_batch", "(learning rate of SGD: 0.1 on rank 0"),
        ("scored", "model.predict", "first in sequential"),
        ("by hand", "the end of a pass over hk.shard", "pass them to optimizer.apply"),
        ("summed", "hk.reduce", "first in sequential"),
        ("within", "model.train_on_batch", "; make the optimizer of inner an attribute of this model"),
    ],
)
@BACKENDS
def test_ranks_that_came_apart_are_named(results, backend, case, where, says):
    for rank in results(2, backend)["apart"]:
        message = str(rank[f"own/{case}"])
        assert message.startswith("5 ") and says in message and f"; {where}; " in message and "rank 1" in message


@pytest.mark.parametrize("size", [2, 3])
def test_weights_that_are_not_trained(results, size):
    """What all ranks hold keeps its bits (a mean of 3 would not, a sum of the largest numbers is none)."""
    for rank in results(size)["frozen"]:
        assert rank["same"]
        np.testing.assert_allclose(rank["weights/1"], [1 + 1.5 * (size - 1), 1], rtol=1e-12)
        assert rank["seen"] == 5  # rank 0's


def test_a_loss_that_cannot_be_joined_is_named(results):
    for backend in ("tensorflow", "torch"):
        first, second = results(2, backend)["own_losses"]
        for name in ("own_root", "own_pairs", "own_known", "own_ones", "circle"):
            (line,) = first[f"own/{name}"]
            assert line.startswith(f"the loss {name} is neither a mean nor a sum over samples")
        assert not any(rank[f"own/{name}"].size for rank in (first, second) for name in ("own_mean", "own_sum"))
        (line,) = first["own/zero"]
        assert line.startswith("the loss summed_squares is 0 or not a number for the first samples")
        assert not any(told.size for told in (first["own/sample"], second["own/sample"], second["own/zero"]))
        assert not first["own/annealed"].size
        *counted, by_hand = first["own/weighted_metric"]
        np.testing.assert_allclose(counted, by_hand, rtol=1e-6)
        (line,) = first["own/listed"]
        assert line.startswith("the metric listed keeps its state outside of Keras' variables: each rank has")
        (line,) = first["own/weighed"]
        assert line.startswith("the loss own_mean is neither a mean nor a sum over samples")
        line, dice = first["own/correlation"]
        assert line.startswith("the metric pearson_correlation with axis=0") and not second["own/correlation"].size
        maximum, *lines = first["own/metrics"]
        assert maximum.startswith("the variables of the metric largest are no sums over samples")
        for name, line in zip(["dice", "recall_of_classes", "log", "whole"], [dice, *lines], strict=True):
            assert line.startswith(f"the metric {name} is not a mean over the samples of a batch")


@BACKENDS
def test_rank_0_alone_prints_and_says_what_no_rank_added_up(results, backend):
    first, other = results(2, backend)["main_rank"]
    assert str(first["own/printed"]) == "2 ranks\n" and first["own/shown"]
    assert not str(other["own/printed"]) and not other["own/shown"]
    assert list(first["own/told"]) == [0, 0, 1] and not any(other["own/told"])


@BACKENDS
def test_layers_of_other_states_are_named(results, backend):
    first, other = results(2, backend)["states"]
    messages = list(first["own/told"])
    assert len(messages) == 4 and not other["own/told"].size
    names = ["normalization", "discretization", *(["text_vectorization", "lookup"] if backend == "tensorflow" else [])]
    assert all(name in messages[0] for name in names)
    assert all("normalization: ranks had adapted" in x for x in messages[1:3])
    assert messages[3].startswith("attributes of layers differ") and "scaled.factor" in messages[3]


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        ("twice", "distributed already"),
        ("not compiled", "call model.compile"),
        ("not built", "model.build"),
        ("compiled again", "after each compile"),
        ("compiled again, then a batch", "after each compile"),
        ("other calls", "call                 rank 0: model.evaluate"),
        ("other lengths predicted", "rows of the shapes (4, 2), (8, 2)"),
        ("shared optimizer", "its own optimizer"),
        ("unseen variable", "call compile and hk.distribute again"),
        ("no reduction", "sum_over_batch_size"),
        ("schedule", "hk.size()"),
        ("trained before", "made steps before"),
        ("stateful", "stateful=True goes on from batch to batch"),
        ("no such compression", "zip"),
        ("ratio beyond 1", "ratio"),
        ("few samples", "start fewer ranks"),
        ("other data on a rank", "shard=False"),
        ("unseeded data", "keras.utils.set_random_seed(n)"),
        ("unseeded batches", "keras.utils.set_random_seed(n)"),
        ("unseeded data to score", "keras.utils.set_random_seed(n)"),
        ("own unseeded order", "Shuffled differs between ranks"),
        ("other batch_size on a rank", "batch_size           rank 1: 25"),
        ("other batches on a rank", "batch_size           rank 1: 25"),
        ("other network on a rank", "rank 1"),
        ("other settings of a layer", ": scale rank 1: 1"),
        ("a vocabulary on rank 1 alone", "string_lookup has no state on rank 0"),
        ("unequal steps", ".take(...)"),
        ("a look at shuffled data", "model.fit, epoch 2; look at the data set"),
        ("a look at shuffled data to score", "model.fit, validation_data; look at the data set"),
        ("generator", "shard=False"),
    ],
)
def test_refused_on_all_ranks(results, misuse, says):
    for rank in results(2)["refused"]:
        message = str(rank[f"own/{misuse}"])
        assert message.startswith("2 ") and says in message


def test_the_gpu_is_chosen_as_fit_does(monkeypatch):
    """Slurm's --gpus-per-task shows each rank one GPU, which is number 0 to all of them."""
    import torch

    from hvd_train.script.keras import api

    chosen = []
    monkeypatch.setattr(api.keras.backend, "backend", lambda: "torch")
    world = World(rank=1, size=2, local_rank=1, local_size=2, launcher="srun")
    monkeypatch.setattr(api, "launched_world", lambda: world)
    for name, value in {"is_available": lambda: True, "device_count": lambda: 1, "set_device": chosen.append}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    api._share_cores()
    monkeypatch.delenv("SLURM_GPUS_PER_TASK")
    with pytest.raises(ConfigError, match="local rank 1 has no GPU"):
        api._share_cores()
    assert chosen == [0]


SCRIPT = """
import keras, numpy as np, hvd_train.keras as hk
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
hk.distribute(model, shard=False)
model.fit(np.zeros((40 + 40 * hk.rank(), 4)), np.zeros((40 + 40 * hk.rank(), 1)), verbose=0)
"""


def test_an_error_is_a_table_without_traceback(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    run = launch(2, "horovodrun", [str(tmp_path / "script.py")])
    assert run.returncode == 2
    output = run.stdout + run.stderr
    assert output.count("the ranks differ") == 1 and "rank 1: 3" in output and "Traceback" not in output


ON_ONE = """
import keras, numpy as np, hvd_train.keras as hk
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
hk.distribute(model)
if hk.rank() == 0:
    model.predict(np.zeros((40, 4)), verbose=0)
"""


WRITER = """
import keras, numpy as np, hvd_train.keras as hk
class Board(keras.callbacks.TensorBoard):
    def on_epoch_end(self, epoch, logs=None):
        self.model.predict(np.zeros((40, 4)), verbose=0)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
hk.distribute(model).fit(np.zeros((40, 4)), np.zeros((40, 1)), verbose=0, callbacks=[Board("logs")])
"""


def test_a_callback_of_rank_0_that_predicts_is_named_at_once(tmp_path):
    """It waited for the other rank until a limit of the launcher, and no callback was named."""
    (tmp_path / "script.py").write_text(WRITER)
    run = launch(2, "mpirun", [str(tmp_path / "script.py")], tmp_path)
    output = run.stdout + run.stderr
    what = "error[rank 0]: the callback Board writes files, so it acts on rank 0 alone, and calls model.predict"
    assert run.returncode == 2 and what in output and "Traceback" not in output, output[-3000:]


def test_predict_on_one_rank_alone_ends(tmp_path):
    (tmp_path / "script.py").write_text(ON_ONE)
    run = launch(2, "horovodrun", [str(tmp_path / "script.py")])
    output = run.stdout + run.stderr
    assert run.returncode == 5 and "Traceback" not in output
    assert "rank 1 came to the end of the script, and this rank waits for it; model.predict; fit, evaluate" in output


def weights(folder: Path, name: str, size: int) -> list[dict]:
    return [dict(np.load(folder / f"{name}.{size}.{rank}.npz")) for rank in range(size)]


def test_migrated_script(tmp_path):
    script = str(ROOT / "tests" / "script" / "migration" / "horovod_keras_after.py")
    for size, batch, rate in ((1, 64, 0.1), (2, 32, 0.05)):  # the rate is multiplied by the number of ranks
        options = ["--batch-size", str(batch), "--lr", str(rate), "--in-order"]
        run = launch(size, "mpirun", [script, str(tmp_path), *options])
        assert run.returncode == 0, run.stdout + run.stderr
    (one,), (first, second) = weights(tmp_path, "after", 1), weights(tmp_path, "after", 2)
    for key, value in first.items():
        np.testing.assert_array_equal(second[key], value)
        np.testing.assert_allclose(value, one[key], atol=1e-4 * np.abs(one[key]).max())


@pytest.mark.long("it tests Horovod, not this project")
def test_stock_horovod_averages_nothing(tmp_path):
    """Why there is anything to migrate from. Its broadcast fails under Keras 3; without it, and from equal first
    weights, the ranks' weights come apart, and nobody says so."""
    pytest.importorskip("horovod")  # scripts/setup --bindings both
    source = (ROOT / "tests" / "script" / "migration" / "horovod_keras_before.py").read_text()
    bare = source.replace("set_random_seed(hvd.rank())", "set_random_seed(0)").replace("callbacks=callbacks, ", "")
    assert bare.count("callbacks=") == 0
    (tmp_path / "bare.py").write_text(bare)
    run = launch(2, "mpirun", [str(tmp_path / "bare.py"), str(tmp_path)])
    assert run.returncode == 0, run.stdout + run.stderr
    first, second = weights(tmp_path, "before", 2)
    assert any(np.abs(first[key] - second[key]).max() > 1e-3 for key in first)
