"""Ranks that train apart and join too rarely: a note says how many steps are not in the result, and they are not."""

from __future__ import annotations

import pytest

from hvd_train.core.missed_averages import notes
from tests.core.test_loop import config, final

OUTER = {"mode": "outer", "outer_steps": 4}
NEVER = "no average comes in the remaining {}, so the result has {}"
LAST = "the result lacks the last {} of {}, which are never averaged; let outer_steps divide the steps"


@pytest.mark.parametrize(
    ("exchange", "steps", "begin", "words"),
    [
        ({}, 3, 0, None),
        ({"mode": "local_sgd", "local_steps": 4}, 3, 0, None),  # whose result is the mean of all
        (OUTER, 8, 0, None),
        (OUTER, 3, 0, NEVER.format("3 steps", "the first weights")),
        (OUTER, 9, 8, NEVER.format("1 step", "those of step 8")),
        (OUTER, 8, 8, None),
        (OUTER, 3, 2, NEVER.format("1 step", "the first weights")),
        (OUTER, 7, 6, NEVER.format("1 step", "those of step 4")),  # what ranks learned since then is not in it
        (OUTER, 7, 3, LAST.format("3 steps", 7)),
        (OUTER | {"outer_start": 5}, 7, 6, NEVER.format("1 step", "those of step 5")),
        (OUTER, 10, 0, LAST.format("2 steps", 10)),
        (OUTER | {"outer_start": 9}, 11, 0, NEVER.format("2 steps", "those of step 9")),
        (OUTER | {"outer_start": 9}, 9, 0, None),
        ({"mode": "streaming", "outer_steps": 4, "fragments": 2}, 4, 0, NEVER.format("4 steps", "the first weights")),
        ({"mode": "streaming", "outer_steps": 4, "fragments": 2}, 5, 0, None),
        ({"mode": "async", "async_steps": 10}, 9, 0, NEVER.format("9 steps", "the first weights")),
    ],
)
def test_what_is_not_in_the_result_is_said(exchange, steps, begin, words):
    found = notes(config(exchange=exchange), steps, begin, 1)
    assert [line.split(": ", 3)[-1] for line in found] == ([words] if words else [])


def test_the_result_has_what_the_note_says(tmp_path):
    """3 of 7 steps are not in it."""
    trees = [final(2, config(exchange=OUTER, max_steps=n, max_epochs=None), tmp_path / str(n))[1] for n in (4, 7)]
    assert all((trees[0][key] == trees[1][key]).all() for key in trees[0] if key.startswith("weights/"))


@pytest.mark.parametrize(("patience", "every", "told"), [(3, 2, False), (1, 3, True), (1, 4, False)])
def test_rules_that_act_before_the_weights_change_are_said(patience, every, told):
    rules = {"early_stopping": {"patience": patience}, "check_val_every_n_epoch": every}
    found = notes(config(exchange=OUTER, **rules), 8, 0, 1)
    words = "note: early_stopping.patience: 1: that is 3 steps, and evaluations see other weights every 4; set a larger"
    assert [line.startswith(words) for line in found] == [True] * told
    plateau = {"optim": {"lr": 0.1, "plateau": {"patience": 1, "monitor": "train_loss"}}}
    assert notes(config(exchange=OUTER, **plateau), 8, 0, 1) == []
