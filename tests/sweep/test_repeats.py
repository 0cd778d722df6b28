"""Folds and seeds: which samples are held out, what is compared, and what is refused."""

from __future__ import annotations

import csv
import json
import statistics

import numpy as np
import pytest
from matplotlib.axes import Axes

from hvd_train.config import load_config
from hvd_train.data.arrays import Arrays
from hvd_train.sweep.folder import Sweep, begin, load
from hvd_train.sweep.repeats import best_group, groups, repeats, shown
from hvd_train.sweep.results import finish
from hvd_train.sweep.rungs import ladder
from hvd_train.sweep.trials import plan
from tests.cli.running import commands, run

TINY = ("--set", "data.name=digits", "--set", "model.name=mlp", "--set", "model.hidden=[8]", "--set", "max_epochs=1")


@pytest.mark.parametrize("parts", [2, 3, 5, 7])
def test_every_sample_is_held_out_once_and_folds_are_of_one_size(parts):
    labels = np.repeat(np.arange(10), np.arange(11, 21))
    data = Arrays(np.arange(len(labels), dtype=np.float32)[:, None], labels, "here", 10)
    held = [data.fold(part, parts) for part in range(parts)]
    numbers = [val.fetch(np.arange(len(val)))[0]["input"][:, 0] for _, val in held]
    assert sorted(np.concatenate(numbers)) == list(range(len(labels)))
    sizes = [len(part) for part in numbers]
    assert max(sizes) - min(sizes) <= 10
    for (train, val), part in zip(held, numbers, strict=True):
        rest = train.fetch(np.arange(len(train)))[0]["input"][:, 0]
        assert len(train) + len(val) == len(labels) and not set(rest) & set(part)
        counts = np.bincount(val.fetch(np.arange(len(val)))[1]["label"], minlength=10)
        assert (abs(counts - np.arange(11, 21) / parts) <= 1).all(), "each class is divided alike"


def test_the_only_sample_of_a_class_is_never_held_out():
    data = Arrays(np.zeros((5, 1), np.float32), np.array([0, 1, 1, 1, 1]), "here", 2)
    for part in range(2):
        train, _ = data.fold(part, 2)
        assert 0 in train.fetch(np.arange(len(train)))[1]["label"]


def made(tmp_path, results, **spaces):
    """A sweep of two rates whose trials have ended with these losses."""
    again = repeats(spaces.get("folds"), spaces.get("seeds"), 4)
    trials = plan(None, [word for word in TINY if "=" in word], ["optim.lr=0.1,0.2"], None, 0, tmp_path, again)
    sweep = Sweep(tmp_path, trials, ladder(trials, None), list(again))
    begin(sweep, resume=False)
    for trial, loss in zip(trials, results, strict=True):
        if loss is not None:
            summary = {"val_loss": loss, "val_samples": 9, "samples_per_second": 1.0}
            (tmp_path / trial.name / "summary.json").write_text(json.dumps(summary))
    return sweep


def test_combinations_are_compared_by_their_mean(tmp_path):
    sweep = made(tmp_path, [1.0, 5.0, 3.0, 2.5, 2.4, 2.6], seeds=3)
    assert [trial.values["seed"] for trial in sweep.trials] == [4, 5, 6] * 2
    first, second = groups(sweep)
    assert first.means["val_loss"] == (3.0, statistics.stdev([1.0, 5.0, 3.0])) and second.means["val_loss"][0] == 2.5
    assert best_group(sweep).values == {"optim.lr": 0.2}, "not that of the luckiest trial"
    assert shown(sweep)[1] == [["0.1", "3", "3.0000 ± 2.0000"], ["0.2", "3", "2.5000 ± 0.1000"]]
    assert load(tmp_path).repeats == ("seed",)


@pytest.mark.parametrize(("losses", "stars"), [([1.0, 5.0, 3.5, 2.0], [3.5, 2.0]), ([None, 2.0, None, 3.0], [2.0])])
def test_the_picture_marks_all_trials_of_the_best_combination(tmp_path, monkeypatch, losses, stars):
    """Not its first one alone, which may be worse than others, or have failed."""
    marked, scatter = [], Axes.scatter

    def watched(self, x, y, **keys):
        marked.extend([list(y)] if keys.get("marker") == "*" else [])
        return scatter(self, x, y, **keys)

    monkeypatch.setattr(Axes, "scatter", watched)
    assert "best: optim.lr=" in finish(made(tmp_path, losses, folds=2))
    assert marked and all(values == stars for values in marked)


def test_a_combination_that_lacks_a_trial_is_not_the_best(tmp_path):
    assert best_group(made(tmp_path, [1.0, None, 2.0, 2.0], folds=2)).values == {"optim.lr": 0.2}


def test_a_mean_without_trials_whose_value_is_not_a_number_is_told_and_not_the_best(tmp_path):
    """A fold that diverged made its combination better: the mean was of the others, under "trials 2"."""
    sweep = made(tmp_path, [1.0, 9.0, 2.0, 2.0], folds=2)
    summary = {"val_loss": None, "val_samples": 9, "samples_per_second": 1.0}
    (tmp_path / "trial-001" / "summary.json").write_text(json.dumps(summary))
    assert best_group(sweep).values == {"optim.lr": 0.2}
    line = "val_loss of optim.lr=0.1 is not a number in 1 of 2 trials: its mean is of the others"
    assert finish(sweep).count(line) == 1


def test_the_best_configuration_keeps_a_fold_that_was_not_repeated(tmp_path):
    """With --seeds alone best.yaml lost data.fold of the user, and held out other samples than all trials."""
    for place, (values, wanted) in enumerate([({"seeds": 2}, [0, 4]), ({"folds": 2}, None)]):
        again = repeats(values.get("folds"), values.get("seeds"), 4)
        sets = [word for word in TINY if "=" in word] + ["data.fold=[0, 4]"]
        folder = tmp_path / str(place)
        trials = plan(None, sets, ["optim.lr=0.1"], None, 0, folder, again)
        sweep = Sweep(folder, trials, ladder(trials, None), list(again))
        begin(sweep, resume=False)
        for trial in trials:
            (folder / trial.name / "summary.json").write_text(json.dumps({"val_loss": 1.0, "samples_per_second": 1.0}))
        finish(sweep)
        assert load_config(folder / "best.yaml").data.fold == wanted


@pytest.mark.parametrize("failed", [0, 1])
def test_a_combination_that_was_drawn_twice_counts_once(tmp_path, failed):
    """Its seeds are the same, so 1 and 5 twice had the deviation 2.31 in place of 2.83, of "4 trials"."""
    again = repeats(None, 2, 4)
    trials = plan(None, [word for word in TINY if "=" in word], ["optim.lr=0.1"], 2, 0, tmp_path, again)
    sweep = Sweep(tmp_path, trials, ladder(trials, None), list(again))
    begin(sweep, resume=False)
    for trial in trials[failed:]:
        summary = {"val_loss": 1.0 if trial.values["seed"] == 4 else 5.0, "samples_per_second": 1.0}
        (tmp_path / trial.name / "summary.json").write_text(json.dumps(summary))
    (one,) = groups(sweep)
    assert one.means["val_loss"] == (3.0, statistics.stdev([1.0, 5.0])) and one.ended == len(one.trials) == 2


def test_both_together(tmp_path):
    sweep = made(tmp_path, range(12), folds=3, seeds=2)
    values = [tuple(map(str, trial.values.values())) for trial in sweep.trials]
    assert len(set(values)) == 12 and len(groups(sweep)) == 2


MISTAKES = [
    (["--folds", "3", "--halving", "2", "--param", "optim.lr=1,2,3,4"], "leave out --folds"),
    (["--seeds", "3", "--param", "seed=1,2"], "the key is varied twice; --param seed"),
    (["--folds", "1"], "1 is not in the range x>=2"),
    (["--set", "data.fold=[3, 3]", "--seeds", "2"], "data.fold: [k, n] with k below n"),
]


def test_mistakes(tmp_path):
    x, y = np.zeros((6, 2), np.float32), np.array([0, 1] * 3)
    np.savez(tmp_path / "data.npz", train_x=x, train_y=y, val_x=x, val_y=y)
    whole = ["fit", "--set", "data={name: npz, path: data.npz, fold: [0, 2]}", "--set", "model.name=mlp"]
    lines = [["sweep", *TINY, *words, "--run-dir", "sweep"] for words, _ in MISTAKES]
    *told, of_parts = commands(*lines, whole, cwd=tmp_path)
    for (_, line), done in zip(MISTAKES, told, strict=True):
        assert done.code == 2 and line in done.err and done.err.count("\n") == 1, done
    assert of_parts.code == 3, of_parts
    assert "the data have a validation part of their own; data.fold; leave it out" in of_parts.err
    assert [path.name for path in tmp_path.iterdir()] == ["data.npz"]


def test_folds_are_trained_and_compared(tmp_path):
    out = run("sweep", *TINY, "--folds", "2", "--run-dir", "sweep", "-np", "2", cwd=tmp_path).stdout
    trials = [json.loads((tmp_path / f"sweep/trial-00{k}/summary.json").read_text()) for k in range(2)]
    assert sum(one["val_samples"] for one in trials) == 1797
    (row,) = csv.DictReader((tmp_path / "sweep/means.csv").read_text().splitlines())
    assert float(row["val_loss"]) == pytest.approx(statistics.fmean(one["val_loss"] for one in trials))
    assert "best: all trials, val_loss " in out and " ± " in out
    assert load_config(tmp_path / "sweep/best.yaml").data.fold is None
