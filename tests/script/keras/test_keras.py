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
    "arrays", "accumulation", "clipnorm", "global_clipnorm", "clipvalue_ema", "run_eagerly", "own_step", "own_logs",
    "rates", "two_inputs",
    "class_weight", "py_dataset", "self_shuffled", "overflow", "undivided", "callbacks", "backup", "tf_data",
    "steps_per_execution", "adamw", "adam_accumulation", "nothing_left_out", "residual", "saved", "jit_compile",
    "summed", "masked", "masked_own_step", "masked_sum", "masked_weighted_mean", "masked_steps_per_execution",
    "weighted_mean", "weighted_batch", "own_losses", "fine_tuning", "vae", "gan", "unbuilt", "loader", "loop",
    "loop_graph", "loop_dataset", "loop_gan", "loop_sums", "steps", "masked_scores",
    "states", "outputs", "lengths",
]  # fmt: skip
# A case of its kind runs in every run: of gradients that are clipped or added up, of weighted losses, of loops.
SIBLINGS = [
    "accumulation", "clipnorm", "clipvalue_ema", "adamw", "nothing_left_out", "masked_sum", "masked_weighted_mean",
    "masked_steps_per_execution", "weighted_batch", "loop_graph", "loop_gan", "backup",
]  # fmt: skip
# What may depend on whether two ranks meet or three: shares of 7, 7 and 6, means of three, batches that data makes.
ON_THREE = ["arrays", "py_dataset", "masked", "own_losses", "loop_sums"]
# "draws" after "loader", which loads torch: nobody has seeded it, and the other generators stay alike all the same.
NOT_ALONE = ["main_rank", "stops", "compressed", "gan_compressed", "draws", "slow", "batchnorm_and_dropout", "frozen"]
THREE_NOT_ALONE = ["frozen"]
LOCAL = ("own/", "files")  # what a rank has for itself
ON_TORCH = [
    "arrays", "clipnorm", "own_step", "two_inputs", "py_dataset", "residual", "saved", "summed", "masked_own_step",
    "own_losses", "gan", "unbuilt", "loader", "loop", "loop_gan", "steps", "masked_scores",
    "states", "outputs",
]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    """(framework, size) -> {case: [what each rank has]}; each world is launched once."""
    done: dict[tuple[str, int], dict[str, list[dict]]] = {}
    failed: dict[tuple[str, int], str] = {}  # a world takes more than a minute: one that fails is not tried again

    def get(size: int, launcher: str = "", backend: str = "tensorflow") -> dict[str, list[dict]]:
        assert (backend, size) not in failed, failed[backend, size]
        if (backend, size) not in done:
            folder = tmp_path_factory.mktemp(f"{backend}{size}")
            cases = [*CASES, *NOT_ALONE] if backend == "tensorflow" else [*ON_TORCH, *NOT_ALONE[:6]]
            if size == 1:
                cases = [case for case in cases if case not in NOT_ALONE]
            else:
                cases += ["apart", *(["refused"] if backend == "tensorflow" else [])]
            if not request.config.getoption("--long"):
                kept = [*ON_THREE, *THREE_NOT_ALONE] if size == 3 else [c for c in cases if c not in SIBLINGS]
                cases = [case for case in cases if case in kept]
            line = [str(HERE / "worker.py"), str(folder), *cases]
            run = launch(size, launcher, line, KERAS_BACKEND=backend)
            if run.returncode:
                failed[backend, size] = f"{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
            assert run.returncode == 0, failed[backend, size]
            names = {path.name.split(".")[0] for path in folder.glob(f"*.{size}.0.npz")}
            done[backend, size] = {
                n: [dict(np.load(folder / f"{n}.{size}.{r}.npz")) for r in range(size)] for n in names
            }
            if "saved" in names:
                done[backend, size]["saved"][0]["own/file"] = folder / "saved.keras"
        return done[backend, size]

    return get


WORLDS = [(2, "mpirun", "tensorflow"), (3, "horovodrun", "tensorflow")]
LONG = pytest.mark.long("two ranks run it in every run, and no part of it depends on their number")
SIBLING = pytest.mark.long("another case of its kind runs in every run")


def long(case: str, size: int = 2):
    """The mark of a case."""
    return SIBLING if case in SIBLINGS else LONG if size == 3 and case not in [*ON_THREE, *THREE_NOT_ALONE] else ()


def assert_same(case: str, one: dict, ranks: list[dict], tolerance: float = 1e-9) -> None:
    for key, value in ranks[0].items():
        if key.startswith(LOCAL):
            continue
        for rank, other in enumerate(ranks):
            np.testing.assert_array_equal(other[key], value, err_msg=f"{case} {key}: rank {rank} has other bits")
        reference = one[key]
        scale = np.max(np.abs(reference), initial=1e-3)
        np.testing.assert_allclose(value, reference, rtol=0, atol=tolerance * scale, err_msg=f"{case} {key}")


def grid() -> list:
    """(world..., case): all cases in all worlds."""
    return [pytest.param(*world, case, marks=long(case, world[0])) for world in WORLDS for case in CASES]


@pytest.mark.parametrize(("size", "launcher", "backend", "case"), grid())
def test_ranks_equal_one_process(results, case, size, launcher, backend):
    assert_same(case, results(1)[case][0], results(size, launcher, backend)[case])


@pytest.mark.parametrize("case", [pytest.param(case, marks=long(case)) for case in ON_TORCH])
def test_on_torch(results, case):
    # Keras 3.15 takes this loss in float32 on PyTorch, whatever floatx is: its gradients hold no more.
    assert_same(case, results(1, backend="torch")[case][0], results(2, "mpirun", "torch")[case], 2e-6)


@pytest.mark.parametrize(
    ("size", "launcher", "backend", "case"),
    [
        pytest.param(*world, case, marks=long(case, world[0]))
        for world in (*WORLDS, (2, "mpirun", "torch"))
        for case in ("stops", "compressed", "gan_compressed")
    ],
)
def test_ranks_stay_together(results, case, size, launcher, backend):
    ranks = results(size, launcher, backend)[case]
    for rank in ranks[1:]:
        for key, value in ranks[0].items():
            np.testing.assert_array_equal(rank[key], value, err_msg=key)
    if case == "stops":  # the wish of step 2 (NaN: 0) holds after the next step
        assert list(ranks[0]["steps"]) == [4, 2]


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_a_slow_rank_is_named(results, backend):
    printed = [str(rank["own/told"]) for rank in results(2, "mpirun", backend)["slow"]]
    assert re.search(SLOW, printed[0]) and not printed[1], printed


@pytest.mark.parametrize(("size", "launcher", "backend"), [WORLDS[0], pytest.param(*WORLDS[1], marks=LONG)])
def test_masks_differ_and_statistics_agree(results, size, launcher, backend):
    ranks = results(size, launcher, backend)["batchnorm_and_dropout"]
    assert len({rank["own/seed"][0] for rank in ranks}) == size
    for key in ranks[0]:
        if key != "own/seed":
            np.testing.assert_array_equal(ranks[1][key], ranks[0][key], err_msg=key)


@pytest.mark.parametrize(
    ("size", "launcher", "backend"), [WORLDS[0], pytest.param(*WORLDS[1], marks=LONG), (2, "mpirun", "torch")]
)
def test_ranks_draw_other_numbers_for_the_same_order(results, size, launcher, backend):
    ranks = results(size, launcher, backend)["draws"]
    for name in {key.rsplit(" ", 1)[0] for key in ranks[0] if key.endswith(" drawn")}:
        ids, drawn, after = ([rank[f"{name} {k}"] for rank in ranks] for k in ("ids", "drawn", "after"))
        if "divided" not in name:  # 2 fits of 2 epochs
            assert sorted(np.concatenate(ids)) == sorted(4 * list(range(116))), name
        # random, numpy.random and tf.random stay with the data set's order, and a step that runs eagerly has no other.
        pipeline = 3 * len(drawn[0]) // 5 * (size - 1) * ("generator" in name)
        messages = [rank[f"{name} told"] for rank in ranks]
        assert list(map(len, messages)) == [int("generator" in name), *[0] * (size - 1)], messages
        several = len(set(np.concatenate(drawn))) + pipeline
        assert several >= 0.99 * sum(map(len, drawn)), f"{name}: {several} of {sum(map(len, drawn))} differ"
        for rank in ranks:
            np.testing.assert_array_equal(rank[f"{name} after"], after[0]) if "other" not in name else None
            if name.startswith("own/first"):
                again = name.replace("first", "again")
                np.testing.assert_array_equal(rank[f"{again} drawn"], rank[f"{name} drawn"], err_msg=name)
                np.testing.assert_array_equal(rank[f"{again} ids"], rank[f"{name} ids"], err_msg=name)


def test_overflow_on_one_rank_skips_the_step_on_all(results):
    for rank in results(2, "mpirun")["overflow"]:
        assert rank["scale"] == 4.0 and rank["iterations"] == 10  # of 11 steps; the scale is halved once


def test_rank_0_alone_writes_and_what_it_writes_is_plain_keras(results):
    first, other = results(2, "mpirun")["callbacks"]
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


@pytest.mark.parametrize(("backend", "tolerance"), [("tensorflow", 1e-9), ("torch", 2e-6)])
def test_a_saved_model_trains_on_without_us(results, tmp_path, backend, tolerance):
    case = results(2, "mpirun", backend)["saved"][0]
    line = [sys.executable, "-c", PLAIN, str(case["own/file"]), str(tmp_path / "found.npz")]
    env = {**environment(), "KERAS_BACKEND": backend, "PYTHONPATH": ""}
    run = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    read = dict(np.load(tmp_path / "found.npz"))
    assert_same("saved", case, [read], tolerance)


def test_a_compiled_graph_is_named_in_one_line_on_rank_0(results):
    first, second = results(2, "mpirun")["jit_compile"]
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
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_ranks_that_came_apart_are_named(results, backend, case, where, says):
    for rank in results(2, "mpirun", backend)["apart"]:
        message = str(rank[f"own/{case}"])
        assert message.startswith("5 ") and says in message and f"; {where}; " in message and "rank 1" in message


@pytest.mark.parametrize(("size", "launcher", "backend"), WORLDS)
def test_weights_that_are_not_trained(results, size, launcher, backend):
    """What all ranks hold keeps its bits (a mean of 3 would not, a sum of the largest numbers is none)."""
    for rank in results(size, launcher, backend)["frozen"]:
        assert rank["same"]
        np.testing.assert_allclose(rank["weights/1"], [1 + 1.5 * (size - 1), 1], rtol=1e-12)
        assert rank["seen"] == 5  # rank 0's


def test_a_loss_that_cannot_be_joined_is_named(results):
    for backend in ("tensorflow", "torch"):
        first, second = results(2, "mpirun", backend)["own_losses"]
        for name in ("own_root", "own_pairs", "own_known", "own_ones", "circle"):
            (line,) = first[f"own/{name}"]
            assert line.startswith(f"the loss {name} is neither a mean nor a sum over samples")
        assert not any(rank[f"own/{name}"].size for rank in (first, second) for name in ("own_mean", "own_sum"))
        (line,) = first["own/correlation"]
        assert line.startswith("the metric pearson_correlation with axis=0") and not second["own/correlation"].size
        (line,) = first["own/metrics"]
        assert line.startswith("the metric recall_of_classes is not a mean over the samples of a batch")


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_rank_0_alone_prints_and_says_what_no_rank_added_up(results, backend):
    first, other = results(2, "mpirun", backend)["main_rank"]
    assert str(first["own/printed"]) == "2 ranks\n" and first["own/shown"]
    assert not str(other["own/printed"]) and not other["own/shown"]
    assert list(first["own/told"]) == [0, 0, 1] and not any(other["own/told"])


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_layers_of_other_states_are_named(results, backend):
    first, other = results(2, "mpirun", backend)["states"]
    messages = list(first["own/told"])
    assert len(messages) == 4 and not other["own/told"].size
    names = ["normalization", "discretization", *(["text_vectorization", "lookup"] if backend == "tensorflow" else [])]
    assert all(name in messages[0] for name in names)
    assert all("normalization: ranks adapted" in x for x in messages[1:3])
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
    for rank in results(2, "mpirun")["refused"]:
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


OTHER = pytest.mark.long("under the other launcher it runs in every run")


@pytest.mark.parametrize("launcher", [pytest.param("mpirun", marks=OTHER), "horovodrun"])
def test_an_error_is_a_table_without_traceback(tmp_path, launcher):
    (tmp_path / "script.py").write_text(SCRIPT)
    run = launch(2, launcher, [str(tmp_path / "script.py")])
    assert run.returncode == 2 or launcher == "horovodrun" and run.returncode
    output = run.stdout + run.stderr
    assert output.count("the ranks differ") == 1 and "rank 1: 3" in output and "Traceback" not in output


ALONE = """
import keras, numpy as np, hvd_train.keras as hk
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
hk.distribute(model)
if hk.rank() == 0:
    model.CALL(np.zeros((40, 4)), verbose=0)
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


@pytest.mark.parametrize(("launcher", "call"), [("mpirun", "evaluate"), ("horovodrun", "predict")])
def test_evaluate_and_predict_on_one_rank_alone_end(tmp_path, launcher, call):
    (tmp_path / "script.py").write_text(ALONE.replace("CALL", call))
    run = launch(2, launcher, [str(tmp_path / "script.py")])
    output = run.stdout + run.stderr
    assert run.returncode == 5 and "Traceback" not in output
    assert f"rank 1 came to the end of the script, and this rank waits for it; model.{call}; fit, evaluate" in output


def weights(folder: Path, name: str, size: int) -> list[dict]:
    return [dict(np.load(folder / f"{name}.{size}.{rank}.npz")) for rank in range(size)]


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("horovodrun", marks=OTHER)])
def test_migrated_script(tmp_path, launcher):
    script = str(ROOT / "tests" / "script" / "migration" / "horovod_keras_after.py")
    for size, batch, rate in ((1, 64, 0.1), (2, 32, 0.05)):  # the rate is multiplied by the number of ranks
        options = ["--batch-size", str(batch), "--lr", str(rate), "--in-order"]
        run = launch(size, launcher, [script, str(tmp_path), *options])
        assert run.returncode == 0, run.stdout + run.stderr
    (one,), (first, second) = weights(tmp_path, "after", 1), weights(tmp_path, "after", 2)
    for key, value in first.items():
        np.testing.assert_array_equal(second[key], value)
        np.testing.assert_allclose(value, one[key], atol=1e-4 * np.abs(one[key]).max())


@pytest.mark.long("it tests Horovod, not this project")
def test_stock_horovod_averages_nothing(tmp_path):
    """Why there is anything to migrate from. Its broadcast fails under Keras 3; without it, and from equal first
    weights, the ranks' weights come apart, and nobody says so."""
    source = (ROOT / "tests" / "script" / "migration" / "horovod_keras_before.py").read_text()
    bare = source.replace("set_random_seed(hvd.rank())", "set_random_seed(0)").replace("callbacks=callbacks, ", "")
    assert bare.count("callbacks=") == 0
    (tmp_path / "bare.py").write_text(bare)
    run = launch(2, "mpirun", [str(tmp_path / "bare.py"), str(tmp_path)])
    assert run.returncode == 0, run.stdout + run.stderr
    first, second = weights(tmp_path, "before", 2)
    assert any(np.abs(first[key] - second[key]).max() > 1e-3 for key in first)
