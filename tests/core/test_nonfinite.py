"""A number that is none: all ranks see it at the same step and do the same, and no checkpoint takes it in."""

from __future__ import annotations

import math
import signal
from typing import Any

import numpy as np
import pytest

from hvd_train.checkpoint import store
from hvd_train.compression import make
from hvd_train.core import control_sync
from hvd_train.data.arrays import Arrays
from hvd_train.errors import Interrupted, NonFiniteError
from hvd_train.protocol import Placement
from hvd_train.run_folder import metrics_file
from hvd_train.run_folder.log import NullLog, RunLog
from hvd_train.update.state import read
from tests.core import test_loop, test_swa
from tests.core.test_loop import CLASSES, Recorder, config, final, same, steps_saved, trainer
from tests.numpy_frontend import NumpyFrontEnd
from tests.rank_threads import run_ranks

EPOCHS = 3


class Bad(Arrays):
    """``bad``: samples that come with a NaN, which arrays themselves refuse."""

    bad: Any = 30

    def fetch(self, indices):
        inputs, labels = super().fetch(indices)
        for x in inputs.values():
            x[np.isin(indices, self.bad), 2] = np.nan
        return inputs, labels


def bad_data():
    inputs, labels = test_loop.TRAIN.fetch(np.arange(test_loop.N))
    return Bad(inputs, labels, "bad", CLASSES)


@pytest.fixture
def one_bad_sample(monkeypatch):
    """Each epoch has one step with it, on whichever rank."""
    monkeypatch.setattr(test_loop, "TRAIN", bad_data())


def close(a, b):
    for key, array in a.items():
        assert np.isfinite(array).all(), key
        if not key.startswith("statistics/"):
            np.testing.assert_allclose(b[key], array, rtol=1e-10, atol=1e-12)


def test_skip_leaves_the_step_out_on_all_ranks(tmp_path, one_bad_sample):
    c = config(on_nonfinite="skip", log_every_n_steps=1)
    log = Recorder()
    summary, tree, _, _ = final(1, c, tmp_path / "1", checks=True, log=log)
    assert summary["skipped_steps"] == EPOCHS and summary["train_samples"] == EPOCHS * test_loop.N
    told = [text for text in log.messages if "not finite" in text]
    assert len(told) == EPOCHS and "the training loss of rank 0 is not finite, nothing was changed" in told[0]
    assert len(log.trains) == summary["steps"] - EPOCHS and all(math.isfinite(row[2]["loss"]) for row in log.trains)
    for size in (2, 3):
        other, again, _, _ = final(size, c, tmp_path / str(size), checks=True)
        assert other["skipped_steps"] == EPOCHS
        close(tree, again)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_the_statistics_of_a_mean_leave_it_out_as_training_did(tmp_path, one_bad_sample, policy):
    """The pass over the samples after the last epoch took it in, and the run ended with statistics of NaN."""
    c = config(on_nonfinite=policy, max_epochs=4, checkpoint={"every_n_steps": 2}, log_every_n_steps=2)
    trees = [
        final(size, c, tmp_path / str(size), kind=test_swa.kind, checks=policy == "skip")[1]["statistics/norm.mean"]
        for size in (1, 2)
    ]
    assert np.isfinite(trees).all()
    np.testing.assert_allclose(*trees, rtol=1e-12)


def test_skip_lets_the_loss_scale_find_its_way(tmp_path, monkeypatch):
    """Overflows of 16 bits are told by ``finite`` while the loss is a number: more of them than may be left out."""
    finite, left = NumpyFrontEnd.finite, [13]

    def overflows(frontend):
        left[0] -= 1
        return finite(frontend) and left[0] < 0

    monkeypatch.setattr(NumpyFrontEnd, "finite", overflows)
    c = config(on_nonfinite="skip", precision="16-mixed")
    summary, _, _, run = final(1, c, tmp_path, checks=True)
    assert summary["skipped_steps"] == 13 and run.progress.loss_scale == 2.0**3


def test_skip_without_an_end_is_an_error(tmp_path, monkeypatch):
    all_bad = bad_data()
    all_bad.bad = np.arange(test_loop.N)
    monkeypatch.setattr(test_loop, "TRAIN", all_bad)

    def work(communicator):
        made = trainer(communicator, config(on_nonfinite="skip", max_epochs=9), tmp_path, checks=True)
        with pytest.raises(NonFiniteError, match="for 10 steps in a row") as caught:
            made.fit()
        return made.progress.step, caught.value.common

    assert run_ranks(2, work) == [(10, True)] * 2


def test_rollback_goes_on_from_the_last_checkpoint_with_the_samples_that_follow(tmp_path, one_bad_sample):
    """The same on any number of ranks."""
    c = config(on_nonfinite="rollback", log_every_n_steps=2, checkpoint={"every_n_steps": 2})
    log = Recorder()
    whole = final(1, c, tmp_path / "1", log=log)
    told = [text for text in log.messages if "goes on with the weights of" in text]
    assert len(told) == EPOCHS and whole[0]["train_samples"] == EPOCHS * test_loop.N
    for size in (2, 3):
        close(whole[1], final(size, c, tmp_path / str(size))[1])


def test_rollback_where_an_epoch_has_one_line(tmp_path):
    """Of which nothing is left then, and nothing is told of the epoch's training."""
    c = config(on_nonfinite="rollback", log_every_n_steps=50, max_epochs=2)
    for size in (1, 2):
        folder = tmp_path / str(size)
        log = RunLog(folder, tensorboard=False, total_epochs=2, quiet=True)
        summary = final(size, c, folder, log=log, poison_at=9)[0]
        assert summary["epochs"] == 2 and summary["train_loss"] is None and summary["val_loss"] > 0
        row, *_ = (row for row in metrics_file.read(folder)[0] if row["event"] == "rollback")
        what = {"checkpoint": "step-00000007", "why": "the training loss is nan"}
        assert row == {"event": "rollback", "epoch": 2, "step": 14, **what}


def test_an_epoch_that_was_left_out_is_not_the_best(tmp_path, monkeypatch):
    """All steps of the second one."""
    finite = NumpyFrontEnd.finite
    monkeypatch.setattr(NumpyFrontEnd, "finite", lambda own: finite(own) and not 7 < own.steps <= 14)
    rule = {"monitor": "train_loss", "save_top_k": 1, "save_last": False}
    log = Recorder()
    early = {"monitor": "train_loss", "patience": 2}
    c = config(on_nonfinite="skip", checkpoint=rule, early_stopping=early, max_epochs=4)
    summary = final(1, c, tmp_path, checks=True, log=log)[0]
    assert summary["skipped_steps"] == 7 and summary["epochs"] == 4
    assert store.resolve(tmp_path, "best", "train_loss").name == "step-00000028"


def test_steps_that_were_left_out_count_over_a_resume(tmp_path, one_bad_sample):
    final(1, config(on_nonfinite="skip", max_epochs=1), tmp_path, checks=True)
    again = final(1, config(on_nonfinite="skip"), tmp_path, checks=True, resume=True)
    assert again[0]["skipped_steps"] == EPOCHS


def test_rollback_finds_the_newest_whatever_else_is_kept(tmp_path, one_bad_sample):
    rule = {"every_n_steps": 2, "save_last": False, "save_top_k": 1, "monitor": "val_loss"}
    c = config(on_nonfinite="rollback", checkpoint=rule, check_val_every_n_epoch=1)
    log = Recorder()
    assert final(1, c, tmp_path, log=log)[0]["train_samples"] == EPOCHS * test_loop.N
    assert len([text for text in log.messages if "goes on with the weights of" in text]) == EPOCHS


def test_rollback_without_a_checkpoint_is_the_end(tmp_path):
    def work(communicator):
        made = trainer(communicator, config(on_nonfinite="rollback"), tmp_path, poison_at=1)
        with pytest.raises(NonFiniteError, match="there is no checkpoint yet"):
            made.fit()
        return True

    assert run_ranks(2, work) == [True] * 2


@pytest.mark.parametrize("mode", ["allreduce", "local_sgd", "partial", "outer"])
def test_a_signal_before_the_line_that_tells_of_a_loss_goes_back_and_saves(tmp_path, monkeypatch, mode):
    """The save looks at what no line of the log has told yet."""
    monkeypatch.setattr(control_sync, "MOST_SECONDS", 0.0)  # the ranks sync after each step

    def work(communicator):
        keys = {"checkpoint": {"every_n_steps": 2}, "log_every_n_steps": 50, "exchange": {"mode": mode}}
        made = trainer(communicator, config(on_nonfinite="rollback", **keys), tmp_path)
        step = made.frontend.train_step

        def spoiling(*given, **named):
            sums = step(*given, **named)
            if made.frontend.steps == 3:
                made.stop_source.asked = signal.SIGTERM
                return np.concatenate([[np.nan], sums[1:]])  # the sum of losses
            return sums

        made.frontend.train_step = spoiling
        with pytest.raises(Interrupted):
            made.fit()
        return made.progress.step

    first, second = run_ranks(2, work)
    assert first == second == steps_saved(tmp_path)[-1]


@pytest.mark.parametrize("policy", ["stop", "rollback"])
def test_weights_that_are_not_finite_are_never_saved(tmp_path, policy):
    """A step may spoil them although its loss is finite, and be the one that is saved."""

    def work(communicator):
        made = trainer(
            communicator, config(on_nonfinite=policy, checkpoint={"every_n_steps": 2}), tmp_path, log=NullLog()
        )
        step = made.frontend.train_step

        def spoiling(*given, **named):
            sums = step(*given, **named)
            if made.frontend.steps == 4:
                made.frontend.w["b"][1] = np.inf
            return sums

        made.frontend.train_step = spoiling
        if policy == "stop":
            with pytest.raises(NonFiniteError, match=r"weights/b is not finite; nothing was saved; epoch 1, step 4"):
                made.fit()
        else:
            made.fit()
        return {key: x for key, x in made.frontend.state().items() if key.startswith("weights/")}

    trees = run_ranks(2, work)
    assert steps_saved(tmp_path) == [2] if policy == "stop" else same(*trees)
    assert policy == "stop" or all(np.isfinite(x).all() for x in trees[0].values())


def test_a_residual_that_is_not_finite_is_never_saved(tmp_path):
    """fp16 sends the largest number that it knows in the place of an infinite one, and keeps the rest."""

    def work(communicator):
        every_two = config(checkpoint={"every_n_steps": 2})
        made = trainer(communicator, every_two, tmp_path, log=NullLog(), compressor=make("fp16", 2))
        step = made.frontend.train_step

        def spoiling(*given, **named):
            sums = step(*given, **named)
            if made.frontend.steps == 4 and communicator.rank == 1:
                residuals = read(made.update.state(), Placement.PER_RANK)
                made.update.load({key: np.full_like(x, np.inf) for key, x in residuals.items()}, Placement.PER_RANK)
            return sums

        made.frontend.train_step = spoiling
        with pytest.raises(NonFiniteError, match=r" of rank 1 is not finite; nothing was saved; epoch 1, step 4"):
            made.fit()

    run_ranks(2, work)
    assert steps_saved(tmp_path) == [2]


def test_a_signal_after_weights_were_spoilt_saves_those_that_it_goes_back_to(tmp_path):
    """What says that it saved has saved: the checkpoint of that very step, with finite weights."""

    def work(communicator):
        c = config(on_nonfinite="rollback", checkpoint={"every_n_steps": 2})
        made = trainer(communicator, c, tmp_path, log=NullLog())
        step = made.frontend.train_step

        def spoiling(*given, **named):
            sums = step(*given, **named)
            if made.frontend.steps == 3:
                made.frontend.w["b"][1] = np.inf
                made.stop_source.asked = signal.SIGTERM
            return sums

        made.frontend.train_step = spoiling
        with pytest.raises(Interrupted) as caught:
            made.fit()
        return str(caught.value).split(",")[0], made.progress.step

    (told, step), other = run_ranks(2, work)
    assert other == (told, step) and told.endswith(f"at step {step}") and steps_saved(tmp_path)[-1] == step
    kept = store.load(store.place(tmp_path / "checkpoints", step))
    assert all(np.isfinite(x).all() for key, x in kept.tree.items() if key.startswith("weights/"))
