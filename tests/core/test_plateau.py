"""A learning rate that falls when an evaluation does not improve: when, by how much, on all ranks, over a resume."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hvd_train.config import Config
from hvd_train.core.callbacks.plateau import Plateau
from hvd_train.core.hooks import Epoch
from tests.core.test_loop import Recorder, check_kills, config, final


def factors(values, **rule):
    """The factor on the rate after an evaluation of each value."""
    settings = {"monitor": "val_loss", "factor": 0.5, "patience": 2} | rule
    made = Config.model_validate({"optim": {"plateau": settings}})
    progress = SimpleNamespace(rate_factor=1.0, plateau_best=None, plateau_waited=0)
    training = SimpleNamespace(config=made, progress=progress, log=Recorder())
    hook, seen = Plateau(made.optim.plateau), []
    for value in values:
        hook.on_epoch(training, Epoch(0, True, {"val_loss": 0.0, settings["monitor"]: value}, 0.1, 1.0, 1))
        seen.append(progress.rate_factor)
    return seen


@pytest.mark.parametrize(
    ("values", "rule", "expected"),
    [
        ([3, 2, 1, 0], {}, [1, 1, 1, 1]),
        ([3, 3, 3, 3, 3], {}, [1, 1, 0.5, 0.5, 0.25]),
        ([3, 4, 2, 3, 3], {}, [1, 1, 1, 1, 0.5]),
        ([3, 3, 3, 3, 3, 3, 3], {"cooldown": 2}, [1, 1, 0.5, 0.5, 0.5, 0.5, 0.25]),
        ([3, 3, 3, 3, 1, 1, 1, 1], {"cooldown": 2}, [1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]),
        ([3, 2.9, 2.8, 2.0], {"min_delta": 0.5}, [1, 1, 0.5, 0.5]),
        ([float("nan"), float("nan"), 3, 3], {}, [1, 1, 1, 1]),
        ([0.1, 0.2, 0.3], {"monitor": "val_accuracy", "patience": 1}, [1, 1, 1]),
        ([0.3, 0.2, 0.1], {"monitor": "val_accuracy", "patience": 1}, [1, 0.5, 0.25]),
    ],
)
def test_the_rate_falls_after_so_many_evaluations_without_improvement(values, rule, expected):
    assert factors(values, **rule) == expected


RULE = {"monitor": "train_loss", "mode": "max", "patience": 1, "factor": 0.5}  # a loss that falls never improves


@pytest.mark.parametrize("size", [1, 3])
def test_all_ranks_lower_it_together_and_no_lower_than_the_lowest(tmp_path, size):
    log = Recorder()
    c = config(max_epochs=6, optim={"lr": 0.01, "min_lr": 0.002, "plateau": RULE})
    final(size, c, tmp_path, log=log)
    rates = dict.fromkeys(args[3] for args in log.trains)
    assert list(rates) == [0.01, 0.005, 0.0025, 0.002]
    assert log.messages[0] == "learning rate times 0.5 (0.5 in all): train_loss has not improved for 1 evaluation"


@pytest.mark.parametrize("size", [1, 2])
def test_it_is_kept_over_a_kill(tmp_path, size):
    c = config(max_epochs=4, checkpoint={"every_n_steps": 3}, optim={"lr": 0.05, "momentum": 0.9, "plateau": RULE})
    check_kills(size, c, tmp_path, slice(0, None, 4))


def test_a_rule_that_is_taken_away_gives_the_rate_back(tmp_path):
    with_rule = config(max_epochs=3, optim={"lr": 0.01, "plateau": RULE})
    assert final(1, with_rule, tmp_path)[3].progress.rate_factor == 0.25
    log = Recorder()
    final(1, config(max_epochs=4, optim={"lr": 0.01}), tmp_path, log=log, resume=True)
    assert {args[3] for args in log.trains} == {0.01}
