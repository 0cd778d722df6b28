"""``hvd-train modes``: its ways, its figures, its table and picture, on real ranks in both frameworks."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_train.config import load_config
from hvd_train.config.modes import ALLREDUCE, MODES
from hvd_train.errors import ConfigError
from hvd_train.frontends.serial import LocalWindow
from hvd_train.frontends.traffic import MeteredCommunicator, MeteredLinks, Traffic
from hvd_train.mode_comparison.results import header_and_rows, loss_after, notes, size
from hvd_train.mode_comparison.turns import Limits, Result, trial
from hvd_train.mode_comparison.ways import stages, standard, way, ways
from tests.cli.running import commands, run

TINY = ("--set", "data.name=digits", "--set", "model.name=mlp", "--set", "model.hidden=[128]", "--set", "threads=1")
LONG = 900  # seconds: each way starts ranks of its own
WEIGHTS = 64 * 128 + 128 + 128 * 10 + 10


def test_every_mode_is_a_way():
    names = standard()
    assert names[0] == "synchronous" and names[-1] == "pipeline" and len(set(names)) == len(names)
    assert {*MODES} - {ALLREDUCE} <= {*names} and {"sharded", "bf16", "int8", "int4", "outer+int8"} <= {*names}


def test_which_ways_train_as_one_rank_does():
    exact = {name: way(name).exact for name in standard()}
    assert {name for name, word in exact.items() if word == "yes"} == {"synchronous", "sharded", "delayed", "pipeline"}
    assert {name for name, word in exact.items() if word == "nearly"} == {"bf16", "int8", "int4"}


@pytest.mark.parametrize("name", [*standard(), "topk", "delayed+powersgd", "outer+topk"])
def test_a_way_is_a_configuration_of_the_users_without_what_belongs_to_others(tmp_path, name):
    sets = ["exchange.mode=outer", "exchange.outer_steps=6", "exchange.outer_momentum=0.5", "optim.lr=0.3"]
    sets += ["early_stopping.patience=2", "batch_size=16", "optim.plateau.patience=2", "hooks=['a:B']", "loggers=[csv]"]
    config = trial(load_config(None, sets), way(name), 4, Limits(48), tmp_path)
    assert config.optim.lr == 0.3 and config.max_steps == 48 and config.log_every_n_steps == 2
    assert config.global_batch_size == 64 and not (config.hooks or config.loggers) and not config.early_stopping
    uses = "outer_steps" in MODES[config.exchange.mode].options
    assert config.exchange.outer_steps == (6 if uses else 30) and config.optim.sharded == (name == "sharded")
    assert config.parallel.pipeline == (2 if name == "pipeline" else 1)


def test_stages_of_a_pipeline_divide_the_ranks():
    assert [stages(ranks) for ranks in (2, 3, 4, 9)] == [2, 3, 2, 3]
    config = load_config(None, ["parallel.pipeline=4", "batch_size=8", "model.name=gpt"])
    assert way("pipeline").keys(config, 8)["parallel"]["pipeline"] == 4
    assert (
        way("int8").keys(config, 8)["global_batch_size"] == 16 == way("pipeline").keys(config, 8)["global_batch_size"]
    )


@pytest.mark.parametrize(
    ("names", "ranks", "told"),
    [
        ("synchron", 2, "unknown 'synchron'; did you mean 'synchronous'? there are synchronous, sharded, fp16"),
        ("int8,outer+async", 2, "async does not go together with another mode; --modes outer+async"),
        (None, 1, "a single rank has nothing to exchange; -np; give -np 2, or more"),
    ],
)
def test_mistakes_in_names(names, ranks, told):
    with pytest.raises(ConfigError) as error:
        ways(names, ranks)
    assert str(error.value).startswith(told)


MISTAKES = {
    "": "the number of ranks is missing; -np; give -np 2",
    "-np 4 -H a:1,b:1": "4 ranks on hosts with 2 slots; -H a:1,b:1; -np 2, or more slots",
    "-np 2 --launcher srun": "this is not a Slurm allocation; --launcher srun; ",
    "-np 2 --modes sharded+async --turns 1": "no way of training runs, the first for this: optim.sharded: ",
}


def test_mistakes_of_the_command(tmp_path):
    told = commands(*(["modes", *words.split()] for words in MISTAKES), cwd=tmp_path)
    for done, words in zip(told, MISTAKES.values(), strict=True):
        assert done.code == 2 and f"error: {words}" in done.err, done
    assert not [*tmp_path.iterdir()]


class Given:
    """A communicator that sends nothing; every verb gives its tensor back."""

    rank, size, mpi = 1, 4, True

    def __getattr__(self, name):
        return lambda x, *rest: x


def test_bytes_are_counted():
    traffic, x = Traffic(), np.zeros(100, np.float32)
    metered = MeteredCommunicator(Given(), traffic)
    metered.allreduce_async(x, "a")
    assert traffic.total() == 2 * 3 / 4 * 400
    metered.allgather_async(x[:10], "b")
    assert traffic.total() == 600 + 3 * 40
    assert metered.alltoall_async(x, [10, 70, 10, 10], "c") is x
    metered.reduce_scatter_async(x, [10, 70, 10, 10], "d")
    assert traffic.total() == pytest.approx(720 + 2 * 120)
    assert metered.mpi and metered.broadcast_bytes(b"control") == b"control"
    metered._communicator.window = LocalWindow
    metered._communicator.rank, window = 0, metered.window(8, "float32")
    window.add(0, np.ones(8, np.float32))  # another rank's
    window._rank = 0
    window.read(0, np.zeros(8, np.float32))  # its own
    assert traffic.total() == pytest.approx(960 + 32)
    MeteredLinks(Given(), traffic).sum(x, [0, 1, 2], "tied")
    assert traffic.total() == pytest.approx(992 + 2 * 400)


def result(name, ms, curve, **figures):
    return Result(
        way(name),
        [{"ms": ms, "seconds_per_sample": ms / 10_000, "sent": 0, "memory": 5e8, "gpu_memory": 0} | figures],
        curve,
    )


def test_losses_after_the_same_samples_and_the_same_seconds():
    slow = result("synchronous", 100.0, [(10 * k, 1.0 / k) for k in range(1, 11)], sent=2.5e6)
    fast = result("outer", 50.0, [(10 * k, 2.0 / k) for k in range(1, 13)])
    broken = Result(way("async"), problem="Gloo cannot; exchange.mode; use mpirun")
    assert loss_after(slow, 100) == pytest.approx(np.mean([1 / 8, 1 / 9, 1 / 10]))
    assert loss_after(slow, 3) == 1.0
    header, rows = header_and_rows([slow, fast, broken])
    assert header == [
        "way",
        "sent a step",
        "ms a step",
        "memory",
        "loss after 100 samples",
        "after 0.6 s",
        "N ranks = 1 rank",
    ]
    assert rows[0] == ["synchronous", "2.5 MB", "100", "500 MB", "0.1120", "0.1833", "yes"]
    assert rows[1][4:] == [
        f"{2 * np.mean([1 / 8, 1 / 9, 1 / 10]):.4f}",
        f"{2 * np.mean([1 / 10, 1 / 11, 1 / 12]):.4f}",
        "no",
    ]
    assert rows[2] == ["async", "-", "-", "-", "-", "-", "cannot run: Gloo cannot"]
    assert "outer (30); of 40 steps" in notes([slow, fast, broken], load_config(), Limits(40))[1]
    assert len(notes([slow, fast, broken], load_config(), Limits(120))) == 1
    whole, less = (result("int8", 90.0, slow.curve, sent=sent) for sent in (2.5e6, 0.7e6))
    told = "int8: nothing is compressed; tensors with fewer than 4,096 entries travel whole"
    assert notes([slow, whole, broken], load_config(), Limits(120))[1:] == [told]
    assert not notes([slow, less, broken], load_config(), Limits(120))[1:]
    assert header_and_rows([result("outer", 2348.5, slow.curve)])[1][0][2] == "2,348"
    slow.figures.append(slow.figures[0] | {"ms": 300.0, "seconds_per_sample": 0.03, "gpu_memory": 2e9})
    header, rows = header_and_rows([slow])
    assert rows[0][2] == "200" and header[4] == "GPU memory" and rows[0][4] == "1 GB"


def test_sizes():
    assert [size(x) for x in (0, 305, 2440, 1.25e8, 3e12)] == ["0 B", "305 B", "2.44 kB", "125 MB", "3e+03 GB"]


def cells(text):
    """Return {way: the cells of its row} of a table in a pipe."""
    rows = [[cell for cell in line.split("  ") if cell] for line in text.split("\n\n")[0].splitlines()]
    return {row[0]: [cell.strip() for cell in row[1:]] for row in rows}


def assert_measured(row, sent):
    assert row[0] == sent
    assert float(row[1].replace(",", "")) > 0 and row[2].endswith(" MB") and float(row[2][:-3]) > 100
    assert all(0 < float(loss) < 5 for loss in row[3:5])


def test_the_command(tmp_path):
    """A way that cannot run is a row; the picture is all that is left."""
    names = "synchronous,int8,local_sgd,pipeline,sharded+async"
    words = ("--modes", names, "--steps", "32", "--turns", "1", "-o", "modes.png")
    done = run("modes", "-np", "2", *TINY, *words, cwd=tmp_path, seconds=LONG)
    assert done.stdout.endswith("\npicture: modes.png\n") and "turn 1 of 1, int8: " in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["modes.png"]
    assert (tmp_path / "modes.png").stat().st_size > 20_000
    rows = cells(done.stdout)
    assert [*rows][1:] == names.split(",") and rows["way"][-1] == "N ranks = 1 rank"
    assert_measured(rows["synchronous"], size(4 * WEIGHTS))
    assert_measured(rows["local_sgd"], size(4 * WEIGHTS / 8))
    assert WEIGHTS < 1000 * float(rows["int8"][0].removesuffix(" kB")) < 1.5 * WEIGHTS
    assert rows["pipeline"][0].endswith("kB") and rows["pipeline"][3] == rows["synchronous"][3], "the same numbers"
    assert rows["sharded+async"][-1].startswith("cannot run: optim.sharded: ")


def test_the_command_in_tensorflow(tmp_path):
    """Bytes are counted in graphs. Over Gloo no rank can go without waiting."""
    words = ("--modes", "synchronous,async", "--steps", "16", "--turns", "1", "--launcher", "horovodrun")
    words += ("--set", "framework=tensorflow")
    rows = cells(run("modes", "-np", "2", *TINY, *words, cwd=tmp_path, seconds=LONG).stdout)
    assert_measured(rows["synchronous"], size(4 * WEIGHTS))
    assert rows["async"][-1].startswith("cannot run: exchange.mode: async does not go with ranks started with Gloo")
    assert not [*tmp_path.iterdir()]
