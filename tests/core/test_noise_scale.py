"""The gradient noise scale: estimates from made-up gradients of known variance, and from the steps of a training."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_train.core.callbacks.noise_log import FEWEST, NoiseLog, missing, words
from hvd_train.core.hooks import Hook
from hvd_train.core.noise_scale import NoiseScale, estimate, small_batch, t_quantile
from hvd_train.frontends.serial import Serial
from hvd_train.protocol import Groups
from hvd_train.update.gradient_norms import GradientNorms
from tests.core.test_loop import Recorder, config, same, trainer, whole
from tests.rank_threads import run_ranks

SIGNAL, NOISE = 4.0, 900.0  # |G|^2 and the sum of the variances of a sample's gradient


def groups_of(rng, sizes, lines=12, steps=5, entries=40, labels=None):
    """Groups of steps whose ranks have ``sizes`` samples. ``labels``: draws the labels of so many samples."""
    mean = np.zeros(entries)
    mean[0] = math.sqrt(SIGNAL)
    deviation = np.sqrt(NOISE * np.arange(1, entries + 1) / np.arange(1, entries + 1).sum())
    rows = []
    for _ in range(lines):
        row = np.zeros(5)
        for _ in range(steps):
            counts = [labels(n) if labels else np.ones(n) for n in sizes]
            # The sum over samples of c (mean + noise).
            draws = [math.sqrt(c @ c) * rng.normal(size=entries) for c in counts]
            sums = [c.sum() * mean + deviation * draw for c, draw in zip(counts, draws, strict=True)]
            # Each rank's part of the mean over the labels of all ranks.
            total = sum(c.sum() for c in counts)
            parts = [x / total for x in sums]
            for n, c, part in zip(sizes, counts, parts, strict=True):
                factor, per_small = small_batch(c.sum(), total, total, n)
                row[[0, 2]] += factor * part @ part, per_small
            row[[1, 3, 4]] += sum(parts) @ sum(parts), 1 / sum(sizes), 1
        rows.append(row)
    return np.array(rows)


@pytest.mark.parametrize("sizes", [[8, 8], [8, 8, 8], [4, 4, 4, 4], [9, 8, 8], [1, 20], [12, 0, 3]])
def test_signal_and_noise_have_no_bias_and_the_interval_covers(sizes):
    rng = np.random.default_rng(0)
    found = [estimate(groups_of(rng, sizes)) for _ in range(150)]
    for values, true in ([f.signal for f in found], SIGNAL), ([f.noise for f in found], NOISE):
        assert abs(np.mean(values) - true) < 4 * np.std(values) / math.sqrt(len(values))
    covered = np.mean([f.low <= NOISE / SIGNAL <= (math.inf if f.high is None else f.high) for f in found])
    assert 0.82 <= covered <= 0.97, covered
    assert all(f.steps == 60 and f.low is not None for f in found)


def test_labels_that_are_counted_weigh_parts_of_a_batch():
    """Labels of a sample vary, and its gradient is their sum: the noise is that of samples."""
    rng = np.random.default_rng(1)
    draw = lambda n: rng.integers(1, 4, n).astype(float)  # noqa: E731
    found = [estimate(groups_of(rng, [30, 30], labels=draw)) for _ in range(150)]
    # A gradient is weighted by c / mean c: the mean of the squares of weights is 14 / 3 / 4.
    for values, true in ([f.signal for f in found], SIGNAL), ([f.noise for f in found], NOISE * 14 / 12):
        assert abs(np.mean(values) - true) < 4 * np.std(values) / math.sqrt(len(values)) + 0.01 * true


def test_a_gradient_lost_in_noise_has_no_upper_bound():
    rng = np.random.default_rng(2)
    rows = groups_of(rng, [1, 1], lines=4, steps=1)
    found = estimate(rows)
    assert found.high is None and found.low is not None
    rows[:, 1] = rows[:, 0] / 2  # the whole gradient is what noise alone makes
    none = estimate(rows)
    assert none.scale is None or none.scale > 1e6
    assert none.high is None


def test_few_groups_have_no_interval_and_equal_batches_no_estimate():
    rng = np.random.default_rng(3)
    few = estimate(groups_of(rng, [300, 300], lines=2))
    assert few.scale and few.low is None and few.high is None and words(few) == ""
    same_batch = estimate(groups_of(rng, [8, 0], lines=4))
    assert math.isnan(same_batch.signal) and same_batch.scale is None and words(same_batch) == ""


@pytest.mark.parametrize(("freedom", "quantile"), [(2, 2.920), (3, 2.353), (7, 1.895), (19, 1.729), (1000, 1.646)])
def test_quantiles_are_those_of_tables(freedom, quantile):
    assert t_quantile(freedom) == pytest.approx(quantile, rel=0.015)


def test_words():
    of = lambda **keys: NoiseScale(**{"signal": 1.0, "noise": 1.0, "steps": 9} | keys)  # noqa: E731
    assert words(of(scale=1234.4, low=900.2, high=1800.0)) == "noise scale 1,234 (90%: 900 to 1,800)"
    assert words(of(scale=None, low=900.0, high=None)) == "noise scale above 900 (90%)"
    assert words(of(scale=2.0, low=0.0, high=None)) == ""


# ---- in a training


class NoiseRecorder(Recorder):
    def __init__(self):
        super().__init__()
        self.noise = []

    def noise_scale(self, *args):
        self.noise.append(args)


class Gradients(Hook):
    """Compute the gradient of each rank's part of each step by hand, from the weights before it."""

    def __init__(self):
        self.parts, self.weights = [], None

    def on_start(self, trainer):
        self.weights = {k: x.copy() for k, x in trainer.frontend.w.items()}

    def on_step(self, trainer, info):
        step = info.batch
        parts = []
        for batch in step.micro_batches:
            (x,), (y,) = batch.inputs.values(), batch.labels.values()
            x, y = x[: batch.count].astype(np.float64), y[: batch.count]
            z = x @ self.weights["w"] + self.weights["b"]
            error = np.exp(z - z.max(1, keepdims=True))
            error /= error.sum(1, keepdims=True)
            error[np.arange(len(x)), y] -= 1
            parts.append((batch.count, np.concatenate([(x.T @ error).ravel(), error.sum(0)])))
        self.parts.append((step.count, parts))
        self.on_start(trainer)


def measured(size, c, folder):
    """(rows of the log, hooks of all ranks, final state) of a training that measures."""
    logs, hooks = [NoiseRecorder() for _ in range(size)], [Gradients() for _ in range(size)]

    def work(communicator):
        rank = communicator.rank
        made = trainer(communicator, c, folder, logs[rank], hooks=[hooks[rank]])
        made.update.exchange.norms = GradientNorms(made.frontend.ops, 1 / size)
        made.fit()
        return whole(made)

    return logs, hooks, run_ranks(size, work)


def by_hand(hooks, every, alone):
    """The sums of all measured steps: as the columns of ``estimate``."""
    total = np.zeros(5)
    for number in range(every - 1, len(hooks[0].parts), every):
        count = hooks[0].parts[number][0]
        ranks = [hook.parts[number][1] for hook in hooks]
        large = sum(part for rank in ranks for _, part in rank) / count
        small = [ranks[0][0]] if alone else [(sum(n for n, _ in r), sum(part for _, part in r)) for r in ranks]
        together = sum(n for n, _ in small)
        for n, part in small:
            if n:
                total[[0, 2]] += n / together * (part / n) @ (part / n), 1 / together
        total[[1, 3, 4]] += large @ large, 1 / count, 1
    return total


@pytest.mark.parametrize(("size", "accumulate"), [(1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (4, 1), (4, 2)])
def test_a_training_measures_the_gradients_of_its_steps(tmp_path, size, accumulate):
    """Batches of 8 of 53 samples: the last step of an epoch has 5, in uneven parts."""
    keys = {"accumulate_grad_batches": accumulate, "max_epochs": 2, "log_every_n_steps": 1}
    c = config(**keys, noise_scale_every_n_steps=2)
    logs, hooks, states = measured(size, c, tmp_path / "on")
    assert all(log.noise == logs[0].noise for log in logs), "ranks have equal numbers"
    (epoch, step, row) = logs[0].noise[-1]
    assert (epoch, step, row["steps"]) == (1, 14, 7)
    assert [r["steps"] for *_, r in logs[0].noise] == [3, 7]  # the last FEWEST lines, of both epochs
    sums = by_hand(hooks, 2, alone=size == 1)
    expected = estimate(np.array([sums]))
    assert row["signal"] == pytest.approx(expected.signal, rel=1e-9)
    assert row["noise"] == pytest.approx(expected.noise, rel=1e-9)
    assert (row["noise_scale"] is None) == (expected.signal <= 0)
    _, _, without = measured(size, config(**keys), tmp_path / "off")
    assert all(same(a, b) for a, b in zip(states, without, strict=True)), "no number of the training moves"


def test_lines_of_several_steps_and_of_an_epoch(tmp_path):
    c = config(max_epochs=4, log_every_n_steps=3, noise_scale_every_n_steps=1)
    logs, hooks, _ = measured(2, c, tmp_path)
    # Lines end after steps 3, 6, 7, 9, 12, 14, ..., and later rows have the last 8 of them.
    assert [row["steps"] for *_, row in logs[0].noise] == [7, 14, 21 - 3, 28 - 9]
    assert FEWEST == 8
    for hook in hooks:
        hook.parts = hook.parts[9:]
    expected = estimate(np.array([by_hand(hooks, 1, alone=False)]))
    assert logs[0].noise[-1][2]["noise"] == pytest.approx(expected.noise, rel=1e-9)


def test_what_cannot_be_measured_is_told(tmp_path):
    log = NoiseRecorder()
    c = config(max_epochs=1, noise_scale_every_n_steps=1)
    run_ranks(1, lambda com: trainer(com, c, tmp_path, log).fit())
    (told,) = [text for text in log.messages if "noise" in text]
    assert told.startswith("note: noise_scale_every_n_steps: the noise scale is not measured, because one rank needs")
    assert not log.noise

    def of(size=2, compression="none", **task):
        task = {"compares_samples": False, "weighted_by_data": False, "objectives": [0], **task}
        frontend = SimpleNamespace(task=SimpleNamespace(**task))
        groups = SimpleNamespace(data=SimpleNamespace(size=size))
        return missing(SimpleNamespace(frontend=frontend, groups=groups, compression=compression, config=c))

    assert not of() and not of(weighted_by_data=True)
    assert "int8" in of(compression="int8") and "compares" in of(compares_samples=True)
    assert "several losses" in of(weighted_by_data=True, objectives=[0, 1])


def test_a_step_that_is_left_out_does_not_count(tmp_path):
    """Step 4 is not finite: the gradients of the others are those without it."""
    c = config(max_epochs=1, log_every_n_steps=1, noise_scale_every_n_steps=1, on_nonfinite="skip")
    log = NoiseRecorder()

    def work(communicator):
        made = trainer(communicator, c, tmp_path, log if communicator.rank == 0 else None, checks=True)
        made.update.exchange.norms = GradientNorms(made.frontend.ops, 1 / 2)
        add = made.frontend.add_gradients

        def poisoned(placed, scale, seed):
            sums = add(placed, scale, seed)
            if made.progress.step == 3:
                made.frontend.gradients["b"] += np.nan
            return sums

        made.frontend.add_gradients = poisoned
        made.fit()

    run_ranks(2, work)
    (row,) = [row for *_, row in log.noise]
    assert row["steps"] == 6 and math.isfinite(row["signal"])


def test_norms_of_a_rolled_back_step_that_are_not_finite_are_dropped():
    noise = NoiseLog(SimpleNamespace(config=config(), groups=Groups.of(Serial())))
    noise._sent = [1.0, 1]
    noise.add_line(None, np.array([np.nan, 1, 1]))
    assert noise.epoch_ended(None, 0) == ""
