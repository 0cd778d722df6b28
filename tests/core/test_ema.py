"""An exponential mean of the weights: what is evaluated and saved, on any number of ranks, over a kill and a change."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from hvd_train.checkpoint import store
from hvd_train.core.hooks import Hook
from hvd_train.frontends.serial import Serial
from hvd_train.update import make_update
from hvd_train.update.averaged_update import AveragedUpdate
from hvd_train.update.ema import ExponentialMean
from tests.core.test_loop import Recorder, check_kills, config, final, same, trainer

TRAINING = "exchange/training_weights/"
DELAYED = {"mode": "delayed", "delay": 2, "compensation": 0.3}


def averaging(decay=0.9, every=1, **exchange):
    """What builds the update of a run with a mean."""

    def kind(frontend, built):
        made = make_update(config(exchange=exchange).exchange, frontend, lambda over: built, Serial())
        return AveragedUpdate(made, partial(ExponentialMean, decay=decay, every=every), frontend)

    return kind


class Weights(Hook):
    """The weights of training after each step."""

    def __init__(self):
        self.seen = []

    def on_step(self, trainer, info):
        self.seen.append(trainer.frontend.state())


@pytest.mark.parametrize("every", [1, 3])
def test_the_mean_is_evaluated_and_saved_and_training_goes_on_with_the_weights(tmp_path, every):
    plain, hook, log = Weights(), Weights(), Recorder()
    _, without, _, _ = final(1, config(), tmp_path / "plain", hooks=[plain])
    summary, tree, _, made = final(1, config(), tmp_path / "mean", hooks=[hook], log=log, kind=averaging(0.8, every))
    assert all(same(a, b) for a, b in zip(plain.seen, hook.seen, strict=True)), "training takes no mean"
    # (w0 is that of rank 0, with which the run began.)
    mean = trainer(Serial(), config(), tmp_path / "first").frontend.state()
    for step, state in enumerate(plain.seen, 1):
        if step % every == 0:
            mean = {key: mean[key] + 0.2 * (x - mean[key]) for key, x in state.items() if key.startswith("weights/")}
    for key, x in mean.items():
        np.testing.assert_allclose(tree[key], x, rtol=1e-12)
        assert (tree[TRAINING + key[len("weights/") :]] == without[key]).all()
    saved = store.newest(tmp_path / "mean/checkpoints", pytest.fail)
    assert all((saved.model[key] == tree[key]).all() for key in mean)
    # Its evaluation is that of the mean.
    made.frontend._assign(mean)
    sums = made.frontend.evaluate_batch(made.frontend.to_device(next(made.val_loader.evaluation())))
    assert summary["val_loss"] != pytest.approx(final(1, config(), tmp_path / "again")[0]["val_loss"], rel=1e-3)
    assert np.isfinite(sums).all()


@pytest.mark.parametrize("exchange", [{}, DELAYED], ids=["allreduce", "delayed"])
def test_n_ranks_are_one(tmp_path, exchange):
    one = final(1, config(exchange=exchange), tmp_path / "1", kind=averaging(every=2, **exchange))
    for size in (2, 3, 4):
        summary, tree, *_ = final(
            size, config(exchange=exchange), tmp_path / str(size), kind=averaging(every=2, **exchange)
        )
        assert summary["val_loss"] == pytest.approx(one[0]["val_loss"], rel=1e-12)
        for key, x in one[1].items():
            if not key.startswith("statistics/"):
                np.testing.assert_allclose(tree[key], x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("exchange", [{}, DELAYED], ids=["allreduce", "delayed"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_kill_at_any_step_changes_no_bit(tmp_path, size, exchange):
    c = config(checkpoint={"every_n_steps": 2}, exchange=exchange)
    check_kills(size, c, tmp_path, slice(0, None, 3), kind=averaging(every=3, **exchange))


def test_a_run_goes_on_without_the_mean_and_with_one(tmp_path):
    """Without it training goes on as if there had never been one; one that begins later begins at the weights."""
    whole = final(2, config(max_epochs=3), tmp_path / "whole")[1]
    final(2, config(max_epochs=2), tmp_path / "left", kind=averaging())
    tree = final(3, config(max_epochs=3), tmp_path / "left", resume=True)[1]
    for key, x in whole.items():
        if not key.startswith("statistics/"):
            np.testing.assert_allclose(tree[key], x, rtol=1e-10, atol=1e-12)
    final(2, config(max_epochs=3), tmp_path / "later")
    later = final(2, config(max_epochs=4), tmp_path / "later", resume=True, kind=averaging(decay=1 - 1e-12))[1]
    np.testing.assert_allclose(later["weights/w"], whole["weights/w"], rtol=1e-9)
