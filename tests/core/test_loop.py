"""The loop on a NumPy model with ranks that are threads: N ranks are one, a resumed run is the run, limits hold."""

from __future__ import annotations

import json
import math
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_train.checkpoint import store
from hvd_train.checkpoint.serialize import weights_sha256
from hvd_train.compression import make
from hvd_train.compression.sparse import Threshold
from hvd_train.config import Config
from hvd_train.core import saving
from hvd_train.core.callbacks.advice import OneThreadAdvice
from hvd_train.core.callbacks.speed import Speed
from hvd_train.core.hooks import Hook
from hvd_train.core.learning_rate import Schedule
from hvd_train.core.loop import Trainer
from hvd_train.core.step import forward_seed
from hvd_train.data.arrays import Arrays
from hvd_train.errors import CheckpointError, CommunicationError, ConfigError, NonFiniteError
from hvd_train.frontends.serial import Serial
from hvd_train.protocol import Entry, Groups, Placement
from hvd_train.run_folder.log import NullLog, RunLog
from hvd_train.update import make_update
from hvd_train.update.exchange import Exchange
from hvd_train.update.replicated import Replicated
from hvd_train.update.state import read, training_state
from tests.limits import SECONDS
from tests.numpy_frontend import NumpyFrontEnd
from tests.rank_threads import Threads, World, run_ranks

N, VAL, FEATURES, CLASSES = 53, 17, 5, 3
rng = np.random.default_rng(0)
CENTRES = rng.normal(size=(CLASSES, FEATURES))


def data(n, start):
    labels = np.arange(start, start + n) % CLASSES
    noise = np.random.default_rng(start).normal(size=(n, FEATURES))
    return Arrays((CENTRES[labels] + noise).astype(np.float32), labels, f"test {start}", CLASSES)


TRAIN, VALIDATION = data(N, 0), data(VAL, 1000)


class Stop(Exception):
    """Stands for a kill: raised in the middle of a step's bookkeeping."""


class KillingLog(NullLog):
    """Ends the rank after ``steps`` steps, as a kill between two steps does."""

    def __init__(self, steps):
        self.left = steps

    def progress(self, *args):
        self.left -= 1
        if self.left == 0:
            raise Stop


class Recorder(NullLog):
    def __init__(self):
        self.trains, self.vals, self.messages = [], [], []

    def train(self, *args):
        self.trains.append(args)

    def val(self, *args):
        self.vals.append(args)

    def message(self, text):
        if " is slow: " not in text:  # as ranks are on a busy machine
            self.messages.append(text)

    def notice(self, kind, text):
        self.message(text)


def config(**keys):
    settings = {"global_batch_size": 8, "max_epochs": 3, "optim": {"lr": 0.1, "momentum": 0.9}, "log_every_n_steps": 3}
    return Config.model_validate(settings | keys)


class Watched(NumpyFrontEnd):
    """Counts the steps that it took; the loss of step number ``poison_at`` (from 0) is not a number."""

    def __init__(self, *arguments, poison_at=None, **options):
        super().__init__(*arguments, **options)
        self.steps, self.poison_at = 0, poison_at

    def train_step(self, *arguments):
        sums = super().train_step(*arguments)
        self.steps += 1
        return sums * [np.nan, 1, 1] if self.steps - 1 == self.poison_at else sums


def trainer(ranks, c, folder, log=None, compressor=None, resume=False, hooks=(), until=None, kind=None, **options):
    """``ranks``: a communicator of all ranks, or the groups."""
    groups = ranks if isinstance(ranks, Groups) else Groups.of(ranks)
    frontend = Watched.of(groups, FEATURES, CLASSES, **options)

    def build(over):
        return Exchange(
            frontend.specs(), frontend.packing, compressor or make("none"), over, frontend.ops, None, small=0
        )

    update = kind(frontend, build(groups.data)) if kind else make_update(c.exchange, frontend, build, Serial())
    made = Trainer(c, frontend, update, TRAIN, VALIDATION, Path(folder), log or NullLog(), hooks=hooks, until=until)
    found = store.newest(Path(folder) / "checkpoints", pytest.fail) if resume and groups.world.rank == 0 else None
    made.restore(found)
    return made


def whole(made):
    """Weights, running statistics and slots."""
    return training_state(made.frontend, made.update)


def local_state(made):
    return read(made.update.state(), Placement.PER_RANK)


def final(size, c, folder, **options):
    """(summary, state, local state) of rank 0's view after a whole run; all ranks must agree."""

    def work(communicator):
        made = trainer(communicator, c, folder, **options)
        return made.fit(), whole(made), local_state(made), made

    results = run_ranks(size, work)
    for _, tree, _, _ in results:
        kinds = ("weights/", "slots/") if c.exchange.mode == "allreduce" else ("weights/",)
        equal = {k for k in tree if k.startswith(kinds)}
        assert all((tree[k] == results[0][1][k]).all() for k in equal), "ranks end with the same bits"
    return results[0][0], results[0][1], [r[2] for r in results], results[0][3]


def same(a, b):
    return a.keys() == b.keys() and all((a[k] == b[k]).all() for k in a)


def without_speed(summary):
    return {k: v for k, v in summary.items() if k not in ("samples_per_second", "time")}


def killed(size, c, folder, steps, **options):
    """A run that is killed after so many steps."""
    with pytest.raises(Stop):
        run_ranks(size, lambda com: trainer(com, c, folder, KillingLog(steps), **options).fit())


def check_kills(size, c, folder, moments=slice(None), **options):
    """A kill changes nothing: weights, slots, each rank's own state and the summary are those of a run without one."""
    whole = final(size, c, folder / "whole", **options)
    for steps in range(1, whole[0]["steps"] + 1)[moments]:
        killed(size, c, folder / str(steps), steps, **options)
        again = final(size, c, folder / str(steps), resume=True, **options)
        assert same(again[1], whole[1]) and without_speed(again[0]) == without_speed(whole[0]), f"killed after {steps}"
        assert all(same(a, b) for a, b in zip(again[2], whole[2], strict=True))


# ---- N ranks are one


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("batch", [1, 8, 53, 100])
def test_n_ranks_equal_one(tmp_path, batch, accumulate):
    c = config(global_batch_size=batch, accumulate_grad_batches=accumulate, max_epochs=2)
    one = final(1, c, tmp_path / "1")
    for size in (2, 3, 4, 5):
        summary, tree, _, _ = final(size, c, tmp_path / str(size))
        for key in ("epochs", "steps", "train_samples", "val_samples", "val_accuracy"):
            assert summary[key] == one[0][key]
        assert summary["val_loss"] == pytest.approx(one[0]["val_loss"], rel=1e-12)
        for key, array in one[1].items():
            if not key.startswith("statistics/"):  # those of a rank's own samples: their mean is another number
                np.testing.assert_allclose(tree[key], array, rtol=1e-10, atol=1e-12)


def test_ranks_that_share_the_data_are_a_group_of_their_own(tmp_path):
    """Two groups of two ranks train twice as two ranks do: samples, gradients and sums are divided by two, not four."""
    c = config(max_epochs=2)
    groups = [World(2), World(2)]

    def work(communicator):
        part = Threads(groups[communicator.rank // 2], communicator.rank % 2)
        made = trainer(Groups(communicator, data=part), c, tmp_path / "4")
        assert (made.communicator.size, made.train_loader.size, made.train_loader.rank) == (4, 2, part.rank)
        return made.fit(), whole(made)

    summary, tree, _, _ = final(2, c, tmp_path / "2")
    for of_rank, state in run_ranks(4, work):
        measured = {name: of_rank[name] for name in ("samples_per_second", "time")}
        assert of_rank == summary | {"world_size": 4} | measured
        assert same(state, tree)


def test_one_rank_is_plain_gradient_descent(tmp_path):
    """The same training written out: full batches in the loader's order, momentum, mean loss."""
    c = config(max_epochs=2)
    _, tree, _, made = final(1, c, tmp_path)
    start = NumpyFrontEnd.of(made.communicator, FEATURES, CLASSES)
    w, m = np.vstack([start.w["w"], start.w["b"]]), 0.0
    for epoch in range(2):
        for step in made.train_loader.epoch(epoch):
            (x,), (y,) = (named.values() for named in TRAIN.fetch(step.micro_batches[0].indices))
            x = np.hstack([x.astype(np.float64), np.ones((len(x), 1))])
            p = np.exp(x @ w)
            p /= p.sum(axis=1, keepdims=True)
            p[np.arange(len(y)), y] -= 1
            m = 0.9 * m + x.T @ p / len(y)
            w = w - 0.1 * m
    np.testing.assert_allclose(np.vstack([tree["weights/w"], tree["weights/b"]]), w, rtol=1e-9)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_sample_counts_once(tmp_path, size):
    log = Recorder()
    c = config(max_epochs=3, log_every_n_steps=2)
    summary = final(size, c, tmp_path, log=log)[0]
    assert summary["train_samples"] == 3 * N and summary["val_samples"] == VAL
    per_epoch = {}
    for epoch, _, results, _, _ in log.trains:
        per_epoch[epoch] = per_epoch.get(epoch, 0) + results["samples"]
    assert per_epoch == {0: N * size, 1: N * size, 2: N * size}, "each rank's lines add up to the epoch"


# ---- resume


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("compressor", [None, Threshold(0.01)], ids=["none", "threshold"])
def test_resumed_after_a_kill_at_any_step_is_bit_identical(tmp_path, size, compressor):
    c = config(checkpoint={"every_n_steps": 2}, accumulate_grad_batches=2)
    check_kills(size, c, tmp_path, compressor=compressor)


# Each rank trains by its gradients, and weights are joined now and then: the loop knows none of them by name.
MODES = {
    "partial": {"mode": "partial", "partial_fraction": 0.3},
    "local_sgd": {"mode": "local_sgd", "local_steps": 3},
    "delayed": {"mode": "delayed", "delay": 2, "compensation": 0.3},
    "outer": {"mode": "outer", "outer_steps": 3},
    "outer-start": {"mode": "outer", "outer_steps": 4, "outer_start": 6, "outer_momentum": 0},
    "streaming": {"mode": "streaming", "outer_steps": 6, "fragments": 2, "stream_delay": 2},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 3])
def test_a_mode_resumes_bit_for_bit_after_a_kill_at_any_step(tmp_path, size, mode):
    check_kills(size, config(checkpoint={"every_n_steps": 2}, exchange=MODES[mode]), tmp_path)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 4)])
def test_gradients_under_way_go_on_on_another_number_of_ranks(tmp_path, before, after):
    c = config(checkpoint={"every_n_steps": 2}, exchange=MODES["delayed"])
    whole = final(1, c, tmp_path / "whole")
    for killed_at in (3, 4, 9):
        folder = tmp_path / str(killed_at)
        killed(before, c, folder, killed_at)
        again = final(after, c, folder, resume=True)
        for key, array in whole[1].items():
            if not key.startswith("statistics/"):
                np.testing.assert_allclose(again[1][key], array, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_evaluations_and_checkpoints_change_no_number_of_a_mode(tmp_path, mode):
    seldom = config(exchange=MODES[mode], check_val_every_n_epoch=3, checkpoint={"every_n_epochs": 0})
    often = config(exchange=MODES[mode], check_val_every_n_epoch=1, checkpoint={"every_n_steps": 2})
    (_, first, *_), (_, second, *_) = (final(3, c, tmp_path / str(k)) for k, c in enumerate((seldom, often)))
    assert all((first[k] == second[k]).all() for k in first if k.startswith(("weights/", "slots/")))


@pytest.mark.parametrize(
    "keys",
    [
        {"schedule": "multistep", "schedule_unit": "steps", "milestones": [9], "gamma": 0.1},
        {"schedule": "inverse_sqrt", "warmup_steps": 20},
    ],
)
def test_what_a_schedule_counts_in_steps_are_those_of_the_run(tmp_path, keys):
    """Also where its length is in epochs: on twice as many ranks a rate that had fallen was the first one again."""
    c = config(global_batch_size=None, batch_size=4, log_every_n_steps=1, optim={"lr": 0.1, **keys})
    killed(1, c, tmp_path, 16)
    log = Recorder()
    summary, _, _, made = final(2, c, tmp_path, log=log, resume=True)
    seen = {step: rate for _, step, _, rate, _ in log.trains}
    assert summary["epochs"] == 3 and min(seen) == 15
    assert seen == {step: made.schedule.rate(step - 1) for step in seen}


@pytest.mark.parametrize(
    ("length", "keys"),
    [
        ({"max_epochs": None, "max_steps": 60}, {"schedule": "cosine", "warmup_epochs": 2}),
        ({"max_epochs": None, "max_steps": 60}, {"warmup_epochs": 2}),
        ({"max_epochs": None, "max_steps": 60}, {"schedule": "inverse_sqrt", "warmup_epochs": 2}),
        ({"max_epochs": 5}, {"schedule": "cosine", "warmup_steps": 20}),
        ({"max_epochs": 5}, {"schedule": "exponential", "gamma": 0.5, "warmup_steps": 20}),
        ({"max_epochs": 5}, {"schedule": "exponential", "gamma": 0.9, "schedule_unit": "steps", "warmup_epochs": 2}),
    ],
)
@pytest.mark.parametrize("killed_at", [16, 40])
def test_the_rate_does_not_leap_on_other_ranks_where_the_warmup_has_another_unit(tmp_path, length, keys, killed_at):
    """On 1, then 2, then 1 rank again; 14 and 7 steps an epoch. A warm-up of 28 steps became one of 14 steps."""
    c = config(
        global_batch_size=None, batch_size=4, log_every_n_steps=1, checkpoint={"every_n_steps": 1},
        optim={"lr": 0.1, **keys}, **length,
    )  # fmt: skip
    first = Schedule.of(c, -(-N // c.global_batch(1)), 1)
    for ranks, steps in ((1, killed_at), (2, 4)):
        killed(ranks, c, tmp_path, steps, resume=True)
    log = Recorder()
    final(1, c, tmp_path, log=log, resume=True)
    (epoch, step, _, rate, _), *_ = log.trains
    assert step == killed_at + 3, "15 or 39 steps of one rank, then 3 of two"
    if first.counts_steps:
        assert [rate for *_, rate, _ in log.trains] == [first.rate(k - 1) for _, k, *_ in log.trains]
    else:  # each step of two ranks is two of one
        assert abs(rate - first.rate(killed_at - 1 + 2 * 3)) <= 0.006


def test_an_epoch_that_is_over_on_fewer_ranks_takes_no_further_step(tmp_path):
    """Two steps of two ranks are the four of one rank that limit_train_batches allows an epoch; a fifth was made."""
    keys = {"global_batch_size": None, "batch_size": 4, "limit_train_batches": 4, "log_every_n_steps": 1}
    c, log = config(**keys, checkpoint={"every_n_steps": 1}, optim={"lr": 0.1, "schedule": "cosine"}), Recorder()
    killed(2, c, tmp_path, 3)
    hook = EpochLosses()
    summary, _, _, made = final(1, c, tmp_path, log=log, resume=True, hooks=[hook])
    assert (summary["epochs"], summary["steps"], summary["train_samples"]) == (3, 2 + 4 + 4, 3 * 16)
    assert [rate for *_, rate, _ in log.trains] == [made.schedule.rate(step) for step in range(4, 12)]
    assert [epoch for epoch, *_ in log.vals] == [0, 1, 2]
    assert all(1e-3 < loss < 10 for loss in hook.seen), "the first epoch has the loss of its two steps"


def test_an_epoch_that_began_with_a_smaller_batch_takes_all_its_samples(tmp_path):
    """After 1 step of 4 samples the 49 others are 7 steps of 8: the epoch of 7 steps left out the last sample."""
    c = config(global_batch_size=None, batch_size=4, checkpoint={"every_n_steps": 1}, max_epochs=1)
    killed(1, c, tmp_path, 2)
    summary, *_ = final(2, c, tmp_path, resume=True)
    assert (summary["steps"], summary["train_samples"]) == (1 + 7, N)


class EpochLosses(Hook):
    def __init__(self):
        self.seen = []

    def on_epoch(self, trainer, epoch):
        self.seen.append(epoch.metrics["train_loss"])


def test_a_line_of_the_log_waits_until_nothing_travels(tmp_path):
    """Its sums would wait behind the transfer, which a delay is to hide."""
    log = Recorder()
    streaming = {"mode": "streaming", "outer_steps": 10, "fragments": 2, "stream_delay": 2}
    c = config(exchange=streaming, log_every_n_steps=1, max_epochs=None, max_steps=19, check_val_every_n_epoch=9)
    assert final(2, c, tmp_path, log=log)[0]["steps"] == 19
    lines = sorted({step for _, step, *_ in log.trains})
    ends = [7, 14]  # of epochs: each has a line whatever travels
    travels = [5, 6, 10, 11, 15, 16]
    assert lines == [step for step in range(1, 20) if step not in travels or step in ends]


@pytest.mark.parametrize("keys", [{}, {"save_last": False}, {"every_n_epochs": 0, "save_last": False, "save_top_k": 0}])
@pytest.mark.parametrize("size", [1, 3])
def test_left_at_an_epoch_and_gone_on_with_is_bit_identical(tmp_path, size, keys):
    """Learning rates follow the whole length; nothing is evaluated or averaged more often than in one go."""
    c = config(max_epochs=5, optim={"lr": 0.1, "schedule": "cosine"}, check_val_every_n_epoch=2, checkpoint=keys)
    whole = final(size, c, tmp_path / "whole")
    for until in (2, 2, 4):
        cut = final(size, c, tmp_path / "cut", resume=True, until=until)
        assert cut[0]["paused_at"] == cut[0]["epochs"] == until
    again = final(size, c, tmp_path / "cut", resume=True, until=5)
    assert same(again[1], whole[1]) and without_speed(again[0]) == without_speed(whole[0])


def test_what_is_left_twice_stays_the_best(tmp_path):
    """The checkpoint at which a run is left keeps the value that it is ranked by."""
    c = config(checkpoint={"save_last": False})
    for _ in range(2):
        final(1, c, tmp_path, resume=True, until=1)
        assert store.resolve(tmp_path, "best").name == "step-00000007"


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2), (2, 5)])
def test_resumed_on_another_world_the_same_samples_follow(tmp_path, before, after):
    c = config(checkpoint={"every_n_steps": 3})
    whole = final(before, c, tmp_path / "whole")
    killed(before, c, tmp_path / "cut", 10)
    again = final(after, c, tmp_path / "cut", resume=True)
    assert again[0]["train_samples"] == whole[0]["train_samples"] and again[0]["steps"] == whole[0]["steps"]
    for key, array in whole[1].items():
        if not key.startswith("statistics/"):
            np.testing.assert_allclose(again[1][key], array, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_resumed_on_another_world_a_schedule_over_steps_goes_on(tmp_path, before, after):
    """The place in the epoch is another number of steps there: the rate would leap to the end, or back."""
    c = config(global_batch_size=None, batch_size=4, max_epochs=None, max_steps=20, log_every_n_steps=1)
    c = c.model_copy(update={"optim": c.optim.model_copy(update={"schedule": "cosine", "warmup_steps": 3})})
    killed(before, c, tmp_path, 16)
    log = Recorder()
    summary, _, _, made = final(after, c, tmp_path, log=log, resume=True)
    told = {step: rate for _, step, _, rate, _ in log.trains}
    assert summary["steps"] == 20 and min(told) == 15
    assert told == {step: made.schedule.rate(step - 1) for step in told}


def test_stopped_by_max_steps_and_gone_on_is_the_run(tmp_path):
    whole = final(1, config(), tmp_path / "whole")
    for steps in range(1, whole[0]["steps"]):
        final(1, config(max_steps=steps), tmp_path / str(steps))
        again = final(1, config(), tmp_path / str(steps), resume=True)
        assert same(again[1], whole[1]) and without_speed(again[0]) == without_speed(whole[0])


def test_ranks_that_wait_for_a_save_meet_meanwhile(tmp_path, monkeypatch):
    """Horovod ends ranks that wait for one another for ten minutes, and a large checkpoint may take longer."""
    monkeypatch.setattr(saving, "WAIT_SECONDS", 0.02)
    real, meetings, often = store.save, [], threading.Event()

    def slow(*given):
        assert often.wait(SECONDS)
        real(*given)

    monkeypatch.setattr(store, "save", slow)

    def work(communicator):
        made = trainer(communicator, config(max_steps=1), tmp_path)
        send = communicator.broadcast_bytes

        def meet(data, root=0):
            meetings.append(communicator.rank)
            if meetings.count(0) > 10:
                often.set()
            return send(data, root)

        communicator.broadcast_bytes = meet
        return made.fit()["steps"]

    assert run_ranks(2, work) == [1, 1]
    assert meetings.count(0) == meetings.count(1) > 10
    assert store.newest(tmp_path / "checkpoints", pytest.fail).step == 1


def test_gone_on_from_an_older_checkpoint_its_own_are_the_newest(tmp_path, capsys):
    """Later ones are of the run that was left: none of its own would stay beside them, and --resume auto take them."""

    def run(c, start=None, until=None):
        log = RunLog(tmp_path, tensorboard=False, total_epochs=3)
        made = trainer(Serial(), c, tmp_path, log, until=until)
        log.resumed_at = start and start.step
        made.restore(start)
        made.fit()
        log.close()

    folder = tmp_path / "checkpoints"
    run(config(checkpoint={"save_top_k": 9}))
    assert [step for step, _ in store.find(folder)] == [7, 14, 21]
    run(config(max_steps=9), store.load(folder / "step-00000007"))
    assert [step for step, _ in store.find(folder)] == [7, 9]
    (left,) = folder.glob("left-*")
    assert str(left) in capsys.readouterr().out
    assert [store.load(path).step for _, path in store.find(left)] == [14, 21]
    run(config(), store.load(folder / "step-00000007"), until=1)
    assert [step for step, _ in store.find(folder)] == [7]


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    first = final(2, config(), tmp_path)
    again = final(2, config(), tmp_path, resume=True)
    assert same(first[1], again[1]) and without_speed(first[0]) == without_speed(again[0])
    longer = final(2, config(max_epochs=5), tmp_path, resume=True)
    assert same(longer[1], final(2, config(max_epochs=5), tmp_path / "five")[1])


def test_a_checkpoint_of_another_model_is_refused_on_all_ranks(tmp_path):
    final(1, config(), tmp_path)

    def work(communicator):
        frontend = NumpyFrontEnd.of(communicator, FEATURES + 1, CLASSES)
        parts = frontend.specs(), frontend.packing, make("none"), communicator, frontend.ops, None
        made = Trainer(
            config(), frontend, Replicated(frontend, Exchange(*parts)), TRAIN, VALIDATION, tmp_path, NullLog()
        )
        with pytest.raises(CheckpointError, match="weights/w: .* in the checkpoint") as caught:
            made.restore(store.newest(made.folder, pytest.fail) if communicator.rank == 0 else None)
        return str(caught.value)

    assert len(run_ranks(2, work)) == 2


class Parts(Replicated):
    """Each rank says that it has a part of each slot."""

    def state(self):
        rank, size = self.frontend.groups.data.rank, self.frontend.groups.data.size
        return [
            Entry(
                entry.name,
                Placement.SHARDED,
                lambda read=entry.read: np.array_split(read().ravel(), size)[rank],
                entry.read().shape,
            )
            for entry in super().state()
        ]


@pytest.mark.parametrize("size", [1, 3])
def test_parts_of_slots_are_joined_in_a_checkpoint_and_go_on(tmp_path, size):
    """The checkpoint is that of slots which are whole on each rank, and each may go on from the other's."""
    kinds = {"whole": Replicated, "parts": Parts}
    saved = {}
    for name, kind in kinds.items():
        final(size, config(max_steps=10), tmp_path / name, kind=kind)
        saved[name] = store.newest(tmp_path / name / "checkpoints", pytest.fail)
    assert any(x.any() for x in saved["parts"].optimizer.values())
    assert same(saved["whole"].optimizer, saved["parts"].optimizer) and same(saved["whole"].model, saved["parts"].model)
    whole = final(size, config(), tmp_path / "all")[0]["weights_sha256"]
    for name, kind in zip(kinds, reversed(kinds.values()), strict=True):
        assert final(size, config(), tmp_path / name, kind=kind, resume=True)[0]["weights_sha256"] == whole


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("before", "after"), [("16-mixed", "32"), ("32", "16-mixed"), ("16-mixed", "16-mixed")])
def test_the_loss_scale_belongs_to_its_precision(tmp_path, size, before, after):
    """Here arithmetic is exact in every precision, so the run that changes it is the one that does not."""
    whole = final(size, config(precision=after), tmp_path / "whole")
    final(size, config(precision=before, max_steps=10), tmp_path / "cut")
    saved = store.newest(tmp_path / "cut" / "checkpoints", pytest.fail).progress
    assert saved.loss_scale == (1.0 if before == "32" else 2.0**16)
    again = final(size, config(precision=after), tmp_path / "cut", resume=True)
    assert same(again[1], whole[1])
    progress = again[3].progress
    assert progress.loss_scale == (1.0 if after == "32" else 2.0**16)
    assert progress.good_steps == {"32": 0, "16-mixed": 21 if before == after else 11}[after]


@pytest.mark.parametrize("size", [1, 2])
def test_residuals_that_belong_to_something_else_are_left_behind(tmp_path, monkeypatch, size):
    """To another compressor, whose residuals have the same shapes; or to kernels in another order of axes: PyTorch's
    images and kernels lie channels last on a CPU, and mostly not on a GPU."""

    def work(communicator, compressor, name, axes="channels first", fit=False):
        monkeypatch.setattr(NumpyFrontEnd, "axes", axes)
        c = config(max_steps=5, exchange={"compression": name})
        made = trainer(communicator, c, tmp_path, compressor=compressor)
        made.compression = name
        found = store.newest(made.folder, pytest.fail) if communicator.rank == 0 and not fit else None
        notes = made.fit() and [] if fit else made.restore(found)
        return notes, sum(np.abs(x).sum() for x in local_state(made).values())

    first, other = (Threshold(0.05), "threshold"), (make("topk", ratio=0.5), "topk")
    kept = run_ranks(size, lambda c: work(c, *first, fit=True))
    assert all(total > 0 for _, total in kept)
    assert run_ranks(size, lambda c: work(c, *first)) == kept
    line = "per-rank state (residuals) is not restored: {}"
    found = run_ranks(size, lambda c: work(c, *other))
    assert found == [([line.format("compression threshold -> topk")], 0)] * size
    found = run_ranks(size, lambda c: work(c, *first, "channels last"))
    assert found == [([line.format("axes channels first -> channels last")], 0)] * size


# ---- limits and cadence


def steps_saved(folder):
    return [step for step, _ in store.find(folder / "checkpoints")]


@pytest.mark.parametrize(
    ("keys", "steps", "samples"),
    [
        ({"max_epochs": 2}, 14, 2 * N),
        ({"max_epochs": 3, "max_steps": 5}, 5, 40),
        ({"max_epochs": 1, "max_steps": 50}, 7, N),
        ({"max_epochs": 2, "limit_train_batches": 2}, 4, 32),
        ({"max_epochs": 2, "limit_train_batches": 99}, 14, 2 * N),
    ],
    ids=str,
)
def test_training_ends_where_it_should(tmp_path, keys, steps, samples):
    summary = final(2, config(**keys), tmp_path)[0]
    assert (summary["steps"], summary["train_samples"]) == (steps, samples)
    assert summary["val_samples"] == VAL, "the end is always evaluated"


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ({"every_n_epochs": 1}, [7, 14, 21]),
        ({"every_n_epochs": 2}, [14, 21]),
        ({"every_n_epochs": 0}, [21]),
        ({"every_n_epochs": 0, "every_n_steps": 5}, [5, 10, 15, 20, 21]),
        ({"every_n_epochs": 1, "every_n_steps": 7}, [7, 14, 21]),
    ],
    ids=str,
)
def test_checkpoints_come_when_asked(tmp_path, monkeypatch, rule, kept):
    monkeypatch.setattr(store, "prune", lambda *args, **kwargs: None)
    final(1, config(checkpoint=rule), tmp_path)
    assert steps_saved(tmp_path) == kept


@pytest.mark.parametrize(("every", "epochs"), [(1, [0, 1, 2]), (2, [1, 2]), (5, [2])])
def test_evaluations_come_when_asked(tmp_path, every, epochs):
    log = Recorder()
    final(1, config(check_val_every_n_epoch=every), tmp_path, log=log)
    assert [row[0] for row in log.vals] == epochs


class Rows(Recorder):
    def __init__(self):
        super().__init__()
        self.rows, self.shown = [], []

    def epoch_line(self, **row):
        self.rows.append(row)

    def progress(self, epoch, done, total, speed):
        self.shown.append((done, total))


def test_a_row_counts_the_samples_of_its_own_seconds(tmp_path):
    """With a limit, too; and progress goes to its end."""
    log = Rows()
    final(1, config(max_epochs=2, limit_train_batches=2), tmp_path, log=log)
    assert log.shown == 2 * [(8, 16), (16, 16)]
    assert [row["samples_per_second"] * row["seconds"] for row in log.rows] == pytest.approx([16, 16])
    assert all("notes" in row for row in log.rows)


@pytest.mark.parametrize(("monitor", "mode"), [("train_loss", "min"), ("train_loss", "max")])
def test_the_best_checkpoint_in_words(tmp_path, monitor, mode):
    """One within an epoch is of that epoch."""
    rule = {"every_n_steps": 3, "save_top_k": 9, "monitor": monitor, "mode": mode}
    assert store.best(tmp_path / "checkpoints", monitor, mode) == ""
    final(1, config(checkpoint=rule), tmp_path)
    words = store.best(tmp_path / "checkpoints", monitor, mode)
    path = store.resolve(tmp_path, "best", monitor, mode)
    saved = store.load(path)
    value, epoch = saved.meta["monitor"][monitor], -(-saved.step // 7)
    assert words == f"{monitor} {value:.4f} in epoch {epoch}, checkpoint {path.name}"
    assert (saved.step == 21) == (mode == "min")


def test_limit_val_batches(tmp_path):
    assert final(2, config(limit_val_batches=1), tmp_path)[0]["val_samples"] == 8


# ---- early stopping, non-finite losses


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("mode", "epochs"), [("max", 3), ("min", 20)])
def test_all_ranks_stop_early_together(tmp_path, size, mode, epochs):
    """A loss that falls never improves by "max": training ends after the first value and two that are no better."""
    log = Recorder()
    rule = {"monitor": "train_loss", "patience": 2, "mode": mode}
    c = config(max_epochs=20, early_stopping=rule, optim={"lr": 0.001, "momentum": 0.0})
    summary, *_ = final(size, c, tmp_path, log=log)
    assert summary["epochs"] == epochs
    assert bool(log.messages) == (epochs < 20)
    if epochs < 20:
        again = final(size, c, tmp_path, resume=True)[0]
        assert again["epochs"] == epochs, "a run that stopped early does not go on when resumed"


def test_an_accuracy_that_grows_improves(tmp_path):
    """Nobody says so: with the smallest as best the run would end, and the checkpoint of its worst epoch be kept."""
    monitor = {"monitor": "train_accuracy"}
    c = config(max_epochs=6, early_stopping=monitor | {"patience": 2}, checkpoint=monitor | {"save_last": False})
    told = []

    class Watch(Hook):
        def on_epoch(self, trainer, epoch):
            told.append(epoch.metrics["train_accuracy"])

    assert final(1, c, tmp_path, hooks=[Watch()])[0]["epochs"] == 6
    (kept,) = (tmp_path / "checkpoints").iterdir()
    assert store.load(kept).meta["monitor"]["train_accuracy"] == max(told) > min(told)


def test_min_delta_counts_small_gains_as_none(tmp_path):
    rule = {"monitor": "train_loss", "patience": 1, "min_delta": 1e9}
    assert final(1, config(max_epochs=9, early_stopping=rule), tmp_path)[0]["epochs"] == 2


def test_patience_is_kept_over_a_resume(tmp_path):
    rule = {"monitor": "train_loss", "patience": 3, "mode": "max"}
    slow = {"optim": {"lr": 0.001, "momentum": 0.0}, "early_stopping": rule}
    whole = final(1, config(max_epochs=20, **slow), tmp_path / "whole")[0]["epochs"]
    final(1, config(max_epochs=2, **slow), tmp_path / "cut")
    final(1, config(max_steps=17, **slow), tmp_path / "cut", resume=True)  # within the third epoch
    assert final(1, config(max_epochs=20, **slow), tmp_path / "cut", resume=True)[0]["epochs"] == whole == 4


@pytest.mark.parametrize("numbers", [True, False])
def test_another_rule_of_early_stopping_begins_anew(tmp_path, numbers):
    """What an accuracy was at its best says nothing of a loss; a run that the old one ended goes on, also where none of
    its values was a number."""
    rules = {"first": {"monitor": "val_accuracy", "mode": "max", "patience": 1}, "then": {"patience": 2}}
    slow = {"optim": {"lr": 0.001, "momentum": 0.0}}
    first = final(1, config(max_epochs=9, early_stopping=rules["first"], **slow), tmp_path)[0]
    assert first["epochs"] < 9

    def work(communicator):
        made = trainer(communicator, config(max_epochs=9, early_stopping=rules["then"], **slow), tmp_path)
        found = store.newest(tmp_path / "checkpoints", pytest.fail)
        assert found.progress.stopped and found.progress.waited and found.progress.best is not None
        found.meta["progress"]["best"] = found.progress.best if numbers else None
        return made.restore(found), made.fit()

    ((notes, summary),) = run_ranks(1, work)
    assert notes == ["early stopping: max of val_accuracy -> min of val_loss; earlier best values do not count"]
    assert summary["epochs"] == 9


def test_a_run_that_stopped_early_goes_on_with_more_patience(tmp_path):
    slow = {"optim": {"lr": 0.001, "momentum": 0.0}, "max_epochs": 9}
    rule = {"monitor": "train_loss", "mode": "max", "patience": 2}
    assert final(1, config(early_stopping=rule, **slow), tmp_path)[0]["epochs"] == 3

    def work(patience, communicator):
        made = trainer(communicator, config(early_stopping=rule | {"patience": patience}, **slow), tmp_path)
        notes = made.restore(store.newest(tmp_path / "checkpoints", pytest.fail))
        return notes, made.complete, made.fit()["epochs"]

    ((notes, complete, epochs),) = run_ranks(1, partial(work, 2))
    assert (notes, epochs) == ([], 3) and "early stopping ended the run; a larger early_stopping.patience" in complete
    ((notes, complete, epochs),) = run_ranks(1, partial(work, 4))
    assert (notes, complete, epochs) == (["early stopping: patience 2 -> 4, of which 2 are used"], "", 5)


def test_a_run_that_has_come_to_its_end_says_so_and_keeps_its_speed(tmp_path):
    def log():
        return RunLog(tmp_path, tensorboard=False, total_epochs=2)

    def run(resume):
        own = log()
        summary, *_, made = final(1, config(max_epochs=2), tmp_path, log=own, resume=resume)
        own.summary(summary)
        own.close()
        return json.loads((tmp_path / "summary.json").read_text()), made.complete

    first, _ = run(False)
    again, complete = run(True)
    assert again == first | {"time": again["time"]} and first["samples_per_second"] > 0
    assert complete == "nothing is left to train: max_epochs 2 is reached; a larger one continues"


def test_the_error_of_compression_is_that_of_gradients_as_they_are(tmp_path, monkeypatch):
    """A threshold is no threshold for gradients that are multiplied by the loss scale."""
    asked = []
    monkeypatch.setattr(
        NumpyFrontEnd, "compression_error", lambda own, placed, scale, seed: asked.append(scale) or np.ones(5)
    )
    monkeypatch.setattr(NullLog, "compression_error", lambda *_: None)
    made = config(
        precision="16-mixed", max_steps=2, exchange={"compression": "threshold", "compression_error_every_n_steps": 1}
    )
    final(1, made, tmp_path, checks=True)
    assert asked == [1 / 8, 1 / 8]


@pytest.mark.parametrize("size", [1, 3])
def test_a_loss_that_is_not_finite_ends_all_ranks(tmp_path, size):

    def work(communicator):
        poison = {"poison_at": 4} if communicator.rank == size - 1 else {}
        made = trainer(communicator, config(checkpoint={"every_n_steps": 3}), tmp_path, **poison)
        with pytest.raises(NonFiniteError, match=r"epoch 1, up to step 6.*lower optim\.lr") as caught:
            made.fit()
        assert caught.value.common
        return True

    assert run_ranks(size, work) == [True] * size
    assert steps_saved(tmp_path) == [3], "what was saved before stays; nothing poisoned is saved"


# ---- hooks


class Watching(Hook):
    """Notes what it sees, and asks to stop at an event on one rank."""

    def __init__(self, rank, asked=()):
        self.rank, self.asked, self.seen, self.evaluated = rank, asked, [], []

    def note(self, trainer, event, number):
        self.seen.append((event, number))
        if (event, number) == self.asked:
            trainer.stop("enough")

    def on_start(self, trainer):
        self.note(trainer, "start", trainer.progress.step)

    def on_step(self, trainer, taken):
        assert len(taken.local_sums) == len(taken.batch.micro_batches)
        assert taken.seconds > 0 and taken.learning_rate == 0.1
        self.note(trainer, "step", trainer.progress.step)

    def on_epoch(self, trainer, epoch):
        self.evaluated.append("val_loss" in epoch.metrics)
        self.note(trainer, "epoch", epoch.number)

    def on_checkpoint(self, trainer, path):
        assert self.rank or path.is_dir()
        self.note(trainer, "checkpoint", int(path.name[5:]))

    def on_end(self, trainer, summary):
        self.note(trainer, "end", summary["steps"])


def watched(size, c, folder, asked=(), rank=0):
    """(hooks of all ranks, summaries); ``rank`` asks to stop."""

    def work(communicator):
        hook = Watching(communicator.rank, asked if communicator.rank == rank else ())
        return hook, trainer(communicator, c, folder, hooks=[hook]).fit()

    return zip(*run_ranks(size, work), strict=True)


@pytest.mark.parametrize("size", [1, 2])
def test_hooks_see_all_that_happens_in_order(tmp_path, size):
    rule = {"checkpoint": {"every_n_steps": 10}, "check_val_every_n_epoch": 2}
    hooks, _ = watched(size, config(**rule), tmp_path)
    steps = [[("step", k) for k in range(first, last + 1)] for first, last in ((1, 7), (8, 10), (11, 14), (15, 20))]
    expected = [("start", 0), *steps[0], ("epoch", 0), *steps[1], *steps[2], ("epoch", 1), *steps[3], ("step", 21)]
    expected += [("epoch", 2), ("end", 21)]
    assert [[row for row in hook.seen if row[0] != "checkpoint"] for hook in hooks] == [expected] * size
    for seen in (hook.seen for hook in hooks):  # each once, when it is written: before the next one is begun
        assert seen == hooks[0].seen and [k for event, k in seen if event == "checkpoint"] == [7, 10, 14, 20, 21]
        begun = [("epoch", 0), ("step", 10), ("epoch", 1), ("step", 20), ("epoch", 2), ("end", 21)]
        for k, after, before in zip(
            [7, 10, 14, 20, 21], begun[:-1], [*begun[1:4], ("end", 21), ("end", 21)], strict=True
        ):
            assert seen.index(after) < seen.index(("checkpoint", k)) <= seen.index(before) + 1
    assert [hook.evaluated for hook in hooks] == [[False, True, True]] * size


def test_a_step_tells_what_was_made_and_what_follows(tmp_path):
    """The end of a step and of an epoch comes after all hooks."""
    events = []

    class First(Hook):
        def on_step(self, trainer, info):
            events.append(("step", info.log_due, info.check_due))
            assert info.local_counts is None and info.due.last == (trainer.progress.step % 7 == 0)

        def on_step_end(self, trainer, info):
            events.append("step end")

        def on_epoch_end(self, trainer, epoch):
            assert "val_loss" in epoch.metrics and epoch.samples == N and epoch.seconds > 0
            events.append("epoch end")

    class Second(Hook):
        def on_step(self, trainer, info):
            events.append("second")

        def on_epoch(self, trainer, epoch):
            events.append("epoch")

    trainer(Serial(), config(max_epochs=1, agreement_every_n_steps=5), tmp_path, hooks=[First(), Second()]).fit()
    due = [(log, check) for log, check in zip([0, 0, 1, 0, 0, 1, 1], [0, 0, 0, 0, 1, 0, 1], strict=True)]
    steps = [[("step", bool(log), bool(check)), "second", "step end"] for log, check in due]
    assert events == [*sum(steps, []), "epoch", "epoch end"]


@pytest.mark.parametrize("size", [1, 2])
def test_hooks_see_no_checkpoint_that_was_not_kept(tmp_path, size):
    """The loss falls: by "max" the first one stays the best, and no other stays at all."""
    rule = {"save_last": False, "monitor": "train_loss", "mode": "max"}
    hooks, _ = watched(size, config(checkpoint=rule), tmp_path)
    for hook in hooks:
        assert [k for event, k in hook.seen if event == "checkpoint"] == [7]
    assert steps_saved(tmp_path) == [7]


def test_training_goes_on_while_a_checkpoint_is_written_and_never_two_at_once(tmp_path, monkeypatch):
    """The write ends only when three more steps were taken; the one that is asked for meanwhile waits for it."""
    three_more, real, writing, most = threading.Event(), store.save, [], []

    def slow(folder, snapshot, moved):
        writing.append(snapshot.step)
        most.append(len(writing))
        assert snapshot.step != 5 or three_more.wait(SECONDS)
        real(folder, snapshot)
        writing.remove(snapshot.step)

    class Steps(Hook):
        def on_step(self, trainer, taken):
            if trainer.progress.step == 8:
                three_more.set()

    monkeypatch.setattr(store, "save", slow)
    rule = {"checkpoint": {"every_n_steps": 5, "every_n_epochs": 0}}
    whole = final(2, config(**rule), tmp_path, hooks=[Steps()])
    assert len(most) == 5 and max(most) == 1
    found = store.newest(tmp_path / "checkpoints", pytest.fail)
    assert same(found.tree, whole[1]) and found.step == 21
    monkeypatch.undo()
    before = store.load(store.find(tmp_path / "checkpoints")[-2][1])
    until = final(2, config(max_steps=20, **rule), tmp_path / "20")[1]
    assert same(before.tree, until), "what was copied, not what came after"


@pytest.mark.parametrize("error", [CheckpointError("the disk is full", where="disk"), RuntimeError("a bug")])
def test_a_write_that_fails_ends_all_ranks(tmp_path, monkeypatch, error):
    def fails(folder, snapshot, moved):
        raise error

    monkeypatch.setattr(store, "save", fails)
    steps = []

    def work(communicator):
        made = trainer(communicator, config(checkpoint={"every_n_steps": 2}), tmp_path)
        try:
            made.fit()
        except CheckpointError as told:
            assert told.common and str(told) == str(error)
            steps.append(made.progress.step)
            return
        pytest.fail("nothing was raised")

    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError, match="a bug"):
            run_ranks(2, work)
    else:
        run_ranks(2, work)
        assert steps[0] == steps[1] and 2 <= steps[0] <= 4, "with the next checkpoint, or sooner"


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("asked", "steps"), [(("step", 8), 9), (("step", 9), 9), (("epoch", 1), 14)])
def test_one_rank_that_asks_to_stop_stops_all(tmp_path, size, asked, steps):
    """With the next line of the log, or the epoch; evaluated, saved, and not gone on with."""
    c, log = config(), Recorder()
    _, summaries = watched(size, c, tmp_path, asked, rank=size - 1)
    assert [(s["steps"], s["val_samples"]) for s in summaries] == [(steps, VAL)] * size
    assert final(size, c, tmp_path, resume=True, log=log)[0]["steps"] == steps


def test_a_hook_that_raises_is_named(tmp_path):
    class Broken(Hook):
        def on_epoch(self, trainer, epoch):
            raise ValueError("no such column")

    made = trainer(Serial(), config(), tmp_path, hooks=[Broken()])
    with pytest.raises(ConfigError, match=r"^Broken.on_epoch raised ValueError: no such column; .*test_loop.py:\d+; "):
        made.fit()


# ---- numbers


def test_forward_seeds_differ_by_step_micro_batch_and_rank():
    seeds = [forward_seed(s, t, m, r) for s in range(2) for t in range(20) for m in range(3) for r in range(4)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize(
    ("load", "fast", "slow", "told"),
    [
        (9.0, 0.001, 0.1, ["threads: auto took 2, and other work shares the cores: "]),
        (1.0, 0.001, 0.1, []),  # nobody else is there
        (9.0, 0.001, 0.002, []),  # steps that take about as long each
        (9.0, 0.050, 0.5, []),  # large ones, which several threads share to good purpose
    ],
)
def test_one_thread_is_advised_where_several_wait_for_one_another(monkeypatch, load, fast, slow, told):
    """Once, with the measured speeds."""
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    speed, log, hook = Speed(), Recorder(), OneThreadAdvice(2)
    fake = SimpleNamespace(log=log, speeds=speed.spread)
    for step in range(100):
        speed.count(32, fast if step % 4 == 0 else slow, queued=False)
        taken = SimpleNamespace(log_due=step % 10 == 9, batch=SimpleNamespace(count=32))
        hook.on_step(fake, taken)
    assert [message[: len(words)] for message, words in zip(log.messages, told, strict=True)] == told
    if told:
        assert "431 samples/s, 32,000 in the fastest steps; " in log.messages[0]


def test_samples_per_second_leaves_out_the_first_steps():
    speed = Speed()
    for k in range(30):
        speed.count(8, 100.0 if k < 20 else 0.5, queued=False)
    assert speed.median() == pytest.approx(16)


def test_steps_that_run_in_one_call_count_together():
    speed = Speed()
    for queued in (True, True, False):
        speed.count(8, 0.0 if queued else 3.0, queued)
    assert speed.median() == pytest.approx(8)


def test_run_folder(tmp_path):
    """metrics.jsonl, summary and events of a real log, cut off and gone on: each line stands once."""
    c = config(checkpoint={"every_n_steps": 2})

    def log():
        return RunLog(tmp_path, tensorboard=True, total_epochs=3)

    first = log()
    final(1, config(max_steps=9), tmp_path, log=first)
    first.close()
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + '\n{"event": "train", "step": 10}\n{"event": "tr')
    second = log()
    second.resumed_at = 9
    summary = final(1, c, tmp_path, log=second, resume=True)[0]
    second.summary(summary)
    second.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    keys = {"event", "epoch", "step", "loss", "accuracy", "samples", "lr", "samples_per_second"}
    assert all(line.keys() == keys for line in lines if line["event"] != "time")
    trains = [line for line in lines if line["event"] == "train"]
    assert sum(line["samples"] for line in trains) == 3 * N
    assert [line["step"] for line in trains] == sorted({line["step"] for line in trains})
    assert {line["epoch"] for line in lines} == {1, 2, 3}
    assert all(math.isfinite(line["loss"]) and 0 <= line["accuracy"] <= 1 for line in lines if "loss" in line)
    kept = json.loads((tmp_path / "summary.json").read_text())
    assert kept == summary and kept["weights_sha256"] == weights_sha256(
        store.newest(tmp_path / "checkpoints", pytest.fail).model
    )


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"agreement_every_n_steps": 3}, "step 6"),
        ({"agreement_every_n_steps": 1000}, "step 7"),  # the end of the epoch: never saved
        ({"agreement_every_n_steps": 0}, None),
        ({"agreement_every_n_steps": 1, "exchange": {"mode": "local_sgd", "local_steps": 3}}, None),  # on purpose
    ],
)
def test_weights_that_differ_on_one_rank_end_the_training(tmp_path, keys, found):

    def work(communicator):
        made = trainer(communicator, config(**keys, log_every_n_steps=50), tmp_path)
        step = made.frontend.train_step

        def changed(*args):
            sums = step(*args)
            if made.progress.step == 5 and communicator.rank == 1:  # in step 6
                made.frontend.w["b"][0] += 1e-9
            return sums

        made.frontend.train_step = changed
        try:
            made.fit()
        except CommunicationError as error:
            return str(error)
        return None

    for told in run_ranks(3, work):
        if found is None:
            assert told is None
        else:
            assert told.startswith("the weights of rank 1 differ from those of ranks 0, 2, first in b; epoch ")
            assert f"{found}; " in told
