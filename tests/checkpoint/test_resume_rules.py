"""The rules of resuming: what follows of each change, and that nothing follows where nothing changed."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

from hvd_train.checkpoint.manifest import Progress
from hvd_train.checkpoint.resume_rules import (
    RULES,
    Resumption,
    RunFacts,
    carry_over,
    check_config,
    check_tree,
    why_left_behind,
)
from hvd_train.config import load_config
from hvd_train.errors import CheckpointError, ConfigError

DATA = {"train": {"samples": 100, "fingerprint": "a"}, "val": {"samples": 20, "fingerprint": "b"}}
CONFIG = load_config(None, ["precision=16-mixed", "early_stopping={monitor: val_loss, patience: 3}"])
FACTS = RunFacts.of(CONFIG, "pytorch", "topk", DATA, 2)
BEGUN = Progress(
    step=9, epoch=2, consumed=30, seen=230, epoch_sums=[1.0, 2.0], best=0.5, waited=3, stopped=True, loss_scale=8.0,
    good_steps=5, skipped=1, pending=[[1.0, 2.0]],
)  # fmt: skip


def resumed(**changes) -> tuple[dict, list[str]]:
    """(what of the progress is another one, the lines)."""
    r = Resumption(copy.deepcopy(BEGUN), FACTS, replace(FACTS, **changes), sums=2, loss_scale=65536.0)
    notes = carry_over(r)
    return {name: x for name, x in vars(r.progress).items() if x != getattr(BEGUN, name)}, notes


def test_an_epoch_whose_steps_are_done_is_not_begun_anew_for_another_order():
    done = replace(BEGUN, ending=True)
    carry_over(Resumption(done, FACTS, replace(FACTS, order="seed 1"), sums=2, loss_scale=8.0))
    assert done == replace(BEGUN, ending=True)
    keys = ([], [], ["seed=1"], ["data.sampling=balanced"], ["data.lengths.block=64"], ["data.lengths.block=128"])
    orders = [RunFacts.of(load_config(None, each), "pytorch", "none", DATA, 2).order for each in keys]
    assert orders[0] == orders[1] and len(set(orders)) == 5


def test_another_network_is_a_new_run():
    """``--allow-change`` alone ends at a table of shapes."""
    before, now = (load_config(None, ["model.name=mlp", f"model.hidden=[{width}]"]) for width in (16, 8))
    with pytest.raises(ConfigError, match=r"give --allow-change model.hidden; for another network begin a new run"):
        check_config(before, now, [])
    check_config(before, now, ["model.hidden"])
    with pytest.raises(CheckpointError, match=r"in the model\n  undo the change, or begin a new run with --run-dir"):
        check_tree({"weights/w": np.zeros(8)}, {"weights/w": np.zeros(16)})
    with pytest.raises(ConfigError, match=r"give --allow-change seed$"):
        check_config(before, load_config(None, ["model.name=mlp", "model.hidden=[16]", "seed=1"]), [])


def test_nothing_follows_where_nothing_changed():
    assert resumed() == ({}, [])
    assert resumed(ranks=3, framework="tensorflow", mode="partial") == ({}, []), "these are of each rank's own state"


ANEW = {"consumed": 0, "epoch_sums": [], "pending": []}
FORGOTTEN = {"best": None, "waited": 0, "stopped": False}


@pytest.mark.parametrize(
    ("changes", "expected", "line"),
    [
        ({"precision": "32"}, {"loss_scale": 65536.0, "good_steps": 0, "skipped": 0}, "precision 16-mixed -> 32: loss"),
        ({"early_stopping": "max of val_r2"}, FORGOTTEN, "earlier best values"),
        ({"patience": 5}, {"stopped": False}, "patience 3 -> 5, of which 3 are used"),
        ({"patience": 2}, {}, ""),
        ({"data": DATA | {"train": {"samples": 90, "fingerprint": "c"}}}, ANEW, "changed: epoch 3 starts over"),
        ({"order": "seed 1"}, ANEW, "the order of samples changed: epoch 3 starts over"),
        ({"task": FACTS.task | {"metrics": ["top5"]}}, {"epoch_sums": [], "pending": []}, ""),
        ({"task": FACTS.task | {"loss": "mse"}}, {"epoch_sums": [], "pending": []} | FORGOTTEN, "the loss is"),
        ({"data": DATA | {"val": {"samples": 20, "fingerprint": "c"}}}, FORGOTTEN, "the validation data changed"),
    ],
)
def test_what_follows_of_a_change(changes, expected, line):
    progress, notes = resumed(**changes)
    assert progress == expected and len(notes) == bool(line) and line in "".join(notes)


@pytest.mark.parametrize(
    ("monitor", "part", "forgotten"),
    [("val_loss", "val", True), ("val_loss", "train", False), ("train_loss", "train", True), ("none", "val", False)],
)
def test_a_plateau_compares_values_of_the_same_data(monitor, part, forgotten):
    """Of harder ones no value would be as good as the best before, and the rate would fall at every patience."""
    plateau = f"min of {monitor}" if monitor != "none" else monitor
    before = replace(FACTS, plateau=plateau, early_stopping="none", best="none")
    now = replace(before, data=DATA | {part: {"samples": 20, "fingerprint": "c"}})
    progress = Progress(step=10, epoch=2, rate_factor=0.5, plateau_best=0.3, plateau_waited=1, stopped=True)
    notes = carry_over(Resumption(progress, before, now, sums=2, loss_scale=1.0))
    kept = (progress.plateau_best, progress.plateau_waited) == (0.3, 1)
    assert kept != forgotten and ("earlier best values" in "".join(notes)) == forgotten
    assert progress.rate_factor == 0.5 and progress.stopped, "it did not end by early stopping"


COUNTED = ["task={loss: mse, metrics: [r2, 'mine:off']}"]


@pytest.mark.parametrize(
    ("before", "now", "monitor", "why"),
    [
        ([], ["task.loss=mse"], "val_loss", "the loss is different"),
        ([], ["task.metrics=[accuracy, top5]"], "val_accuracy", ""),
        (COUNTED, ["task={loss: mse, metrics: [r2, 'yours:off']}"], "val_off", "the metric off is a different"),
        (COUNTED, ["task={loss: mse, metrics: [r2, 'yours:off']}"], "val_r2", ""),
        ([], ["limit_val_batches=1", "batch_size=4"], "val_loss", "the validation data are read differently"),
        ([], ["limit_val_batches=1", "batch_size=10"], "val_loss", ""),  # on two ranks these are all 20 samples
        ([], ["data.transforms=[{name: normalize, mean: 1, std: 2}]"], "val_loss", "the validation data are read"),
        ([], ["data.transforms=[random_horizontal_flip]"], "val_loss", ""),
        ([], ["data.transforms=[random_horizontal_flip]"], "train_loss", "the training data are read"),
        ([], ["data.lengths.max_length=8"], "val_loss", "the validation data are read differently"),
        (["data.lengths.block=64"], ["data.lengths.block=128"], "val_loss", ""),
    ],
)
def test_values_of_the_same_alone_are_compared(before, now, monitor, why):
    first, second = (RunFacts.of(load_config(None, keys), "pytorch", "none", DATA, 2) for keys in (before, now))
    for measures in ((first.measure, second.measure), (second.measure, first.measure)):
        found = measures[0].difference(measures[1], monitor)
        assert found.startswith(why) and bool(found) == bool(why)
    rules = {"early_stopping": f"min of {monitor}", "plateau": f"min of {monitor}", "best": monitor}
    p = Progress(step=10, epoch=2, best=0.5, waited=1, plateau_best=0.5, plateau_waited=1)
    notes = carry_over(Resumption(p, replace(first, **rules), replace(second, **rules), sums=2, loss_scale=1.0))
    assert (p.best, p.plateau_best) == ((None, None) if why else (0.5, 0.5))
    assert len(notes) == bool(why) and all("early stopping, optim.plateau, checkpoint.save_top_k" in x for x in notes)


@pytest.mark.parametrize(
    ("key", "ranks", "line"),
    [
        ("batch_size=32", 1, "the global batch is 32 on 1 rank, and was 64 on 2 ranks (to keep it: --set batch_size="),
        ("batch_size=32", 2, ""),
        ("global_batch_size=64", 1, ""),
    ],
)
def test_a_line_tells_of_another_global_batch(key, ranks, line):
    """It was halved on half of the ranks, at the same learning rate, without a word."""
    before, now = (RunFacts.of(load_config(None, [key]), "pytorch", "none", DATA, n) for n in (2, ranks))
    r = Resumption(copy.deepcopy(BEGUN), before, now, sums=2, loss_scale=1.0)
    notes = [note for note in carry_over(r) if "global batch" in note]
    assert len(notes) == bool(line) and "".join(notes).startswith(line)
    larger = replace(before, global_batch=128)  # --allow-change batch_size
    assert not any("global batch" in x for x in carry_over(replace(r, now=larger)))


def test_state_of_a_rank_stays_with_what_made_it():
    assert why_left_behind(FACTS, FACTS, same_shapes=True) == ""
    assert why_left_behind(FACTS, FACTS, same_shapes=False) == "their shapes differ"
    other = replace(FACTS, ranks=1, mode="partial")
    assert why_left_behind(FACTS, other, same_shapes=False) == f"ranks 2 -> 1, mode {FACTS.mode} -> partial"


def test_the_table_says_of_each_change_what_follows():
    assert len({rule.change for rule in RULES}) == len(RULES)
    assert all(rule.follows or rule.allowed == "refused" for rule in RULES)
