"""The mean of the weights of the last epochs, with batch statistics of its own, on any number of ranks, over a kill."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from hvd_train.checkpoint import store
from hvd_train.config import load_config
from hvd_train.core.hooks import Hook
from hvd_train.errors import ConfigError
from hvd_train.frontends.serial import Serial
from hvd_train.update import make_update
from hvd_train.update.averaged_update import AveragedUpdate
from hvd_train.update.epoch_mean import EpochMean
from tests.core.test_control_sync import Signal, every_turn, interrupted
from tests.core.test_loop import TRAIN, Recorder, check_kills, config, final, same, without_speed
from tests.numpy_frontend import NumpyFrontEnd

__all__ = ["every_turn"]  # a fixture
EPOCHS = 4
TRAINING = "exchange/training_weights/"
DELAYED = {"mode": "delayed", "delay": 2, "compensation": 0.3}


def averaging(**exchange):
    """What builds the update of a run that takes the mean of its last 3 epochs."""

    def build(frontend, built):
        made = make_update(config(exchange=exchange).exchange, frontend, lambda over: built, Serial())
        return AveragedUpdate(made, partial(EpochMean, epochs=3), frontend)

    return build


kind = averaging()


class EpochEnds(Hook):
    def __init__(self):
        self.seen = []

    def on_epoch(self, trainer, epoch):
        self.seen.append(trainer.frontend.state())


def mean_of(states):
    return {k: np.mean([state[k] for state in states], 0) for k in states[0] if k.startswith("weights/")}


def test_it_is_the_mean_of_the_last_epochs_with_the_statistics_of_all_samples(tmp_path):
    hook = EpochEnds()
    final(1, config(max_epochs=EPOCHS), tmp_path / "plain", hooks=[hook])
    _, tree, _, _ = final(1, config(max_epochs=EPOCHS), tmp_path / "swa", kind=kind)
    for key, x in mean_of(hook.seen[-3:]).items():
        np.testing.assert_allclose(tree[key], x, rtol=1e-12)
        assert (tree[TRAINING + key.removeprefix("weights/")] == hook.seen[-1][key]).all()
    (x,) = TRAIN.fetch(np.arange(len(TRAIN)))[0].values()
    np.testing.assert_allclose(tree["statistics/norm.mean"], x.mean(dtype=np.float64), rtol=1e-12)
    newest, before = [store.load(path) for _, path in reversed(store.find(tmp_path / "swa/checkpoints"))][:2]
    assert all((newest.model[key] == x).all() for key, x in tree.items() if key in newest.model)
    np.testing.assert_allclose(before.model["weights/w"], hook.seen[-2]["weights/w"], rtol=1e-12)


@pytest.mark.parametrize("exchange", [{}, DELAYED], ids=["allreduce", "delayed"])
def test_n_ranks_are_one(tmp_path, exchange):
    c = config(max_epochs=EPOCHS, exchange=exchange)
    one = final(1, c, tmp_path / "1", kind=averaging(**exchange))
    for size in (2, 3, 4):
        summary, tree, *_ = final(size, c, tmp_path / str(size), kind=averaging(**exchange))
        assert summary["val_loss"] == pytest.approx(one[0]["val_loss"], rel=1e-12)
        for key, x in one[1].items():
            if not key.startswith("exchange/training_statistics/"):  # each rank's, as without a mean
                np.testing.assert_allclose(tree[key], x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2])
def test_a_kill_at_any_step_changes_no_bit(tmp_path, size):
    c = config(max_epochs=EPOCHS, checkpoint={"every_n_steps": 2})
    check_kills(size, c, tmp_path, slice(2, None, 4), kind=kind)


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_is_interrupted_as_it_ends_ends_with_the_same_bits(tmp_path, every_turn, size):
    """In the pass over the samples, and in the evaluation after it."""
    c, left = config(max_epochs=EPOCHS), 0
    whole = final(size, c, tmp_path / "whole", kind=kind)
    before = (EPOCHS - 1) * 4  # calls of earlier evaluations
    for after in range(before + 1, before + 11, 3):
        folder = tmp_path / str(after)
        left += interrupted(size, c, folder, Signal("evaluation", after), kind=kind) is not None
        again = final(size, c, folder, kind=kind, resume=True)
        assert same(again[1], whole[1]) and without_speed(again[0]) == without_speed(whole[0]), after
    assert left >= 3


@pytest.mark.parametrize("size", [1, 2])
def test_a_longer_run_is_the_one_that_was_as_long_from_the_start(tmp_path, size):
    """With epochs 6 to 8; epochs 3 to 5, of which the first run had two; and epochs that the mean goes on with."""
    for epochs in (EPOCHS + 4, EPOCHS + 1):
        whole = final(size, config(max_epochs=epochs), tmp_path / str(epochs), kind=kind)
        folder = tmp_path / f"to {epochs}"
        final(size, config(max_epochs=EPOCHS), folder, kind=kind)
        tree = final(size, config(max_epochs=epochs), folder, kind=kind, resume=True)[1]
        if epochs - 3 >= EPOCHS:
            assert same(tree, whole[1])
        else:  # of epochs 5 alone: what the first run added up is a mean, and holds epoch 2
            last = {key: x for key, x in whole[1].items() if key.startswith(TRAINING)}
            assert last and all((tree[f"weights/{key.removeprefix(TRAINING)}"] == x).all() for key, x in last.items())


def test_a_longer_run_has_the_statistics_of_its_own_end_where_none_are_gathered(tmp_path, monkeypatch):
    """A buffer of a layer of another kind, which the pass over the samples leaves as it is."""
    monkeypatch.setattr(NumpyFrontEnd, "take_statistics", lambda frontend: None)
    whole = final(1, config(max_epochs=EPOCHS + 4), tmp_path / "whole", kind=kind)
    final(1, config(max_epochs=EPOCHS), tmp_path / "left", kind=kind)
    assert same(final(1, config(max_epochs=EPOCHS + 4), tmp_path / "left", kind=kind, resume=True)[1], whole[1])


def test_a_run_goes_on_without_the_mean_as_if_there_had_been_none(tmp_path):
    whole = final(2, config(max_epochs=EPOCHS + 1), tmp_path / "whole")[1]
    final(2, config(max_epochs=EPOCHS), tmp_path / "left", kind=kind)
    assert same(final(2, config(max_epochs=EPOCHS + 1), tmp_path / "left", resume=True)[1], whole)


def test_a_run_that_a_hook_ends_has_the_mean_of_what_there_is(tmp_path):
    class Stopping(EpochEnds):
        def on_epoch(self, trainer, epoch):
            super().on_epoch(trainer, epoch)
            if epoch.number == 2:
                trainer.stop("enough")

    hook, log = Stopping(), Recorder()
    summary, tree, _, _ = final(1, config(max_epochs=EPOCHS), tmp_path / "one", kind=kind, hooks=[hook], log=log)
    assert summary["epochs"] == 3
    assert "swa: the weights are the mean of those after epochs 2 to 3" in log.messages
    for key, x in mean_of(hook.seen[1:3]).items():
        np.testing.assert_allclose(tree[key], x, rtol=1e-12)
    hook, log = Stopping(), Recorder()
    tree = final(1, config(max_epochs=EPOCHS + 2), tmp_path / "none", kind=kind, hooks=[hook], log=log)[1]
    assert all((tree[key] == x).all() for key, x in hook.seen[2].items())
    assert "swa: the run ended before the first epoch of the mean; it has the weights of its last step" in log.messages


def test_more_epochs_than_the_training_has_are_refused():
    with pytest.raises(ConfigError, match="swa.epochs: needs max_epochs of 3 at least"):
        load_config(None, ["swa.epochs=3", "max_epochs=2"])
