"""The range test of the learning rate, and the picture of the rates of a training."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_train.config import OptimConfig, load_config
from hvd_train.jobs.find_lr import Rates, _of_groups, _try, smooth, suggestion
from hvd_train.jobs.job import opened_job
from hvd_train.jobs.rates import draw_rates
from tests.cli.running import commands, run

TINY = ("--set", "data.name=digits", "--set", "model.name=mlp", "--set", "model.hidden=[16]")


def test_rates_grow_by_the_same_factor():
    rates = Rates(1e-4, 1.0, 5)
    assert [rates.at(k) for k in range(5)] == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1])


def test_equal_losses_have_an_equal_running_mean():
    assert smooth([2.0] * 20) == pytest.approx([2.0] * 20)


def test_the_suggestion_is_where_the_loss_falls_fastest():
    rates = np.geomspace(1e-6, 10, 100)
    losses = 1 - 1 / (1 + np.exp(-4 * np.log(rates / 0.01)))  # a step down with its middle at 0.01
    assert suggestion(list(rates), list(losses)) == pytest.approx(0.01, rel=0.1)
    assert suggestion(list(rates), list(1 - losses)) is None, "a loss that only grows"
    # Beyond the lowest loss training has diverged; there a loss falls from great heights.
    diverged = [*losses, 50, 40, 5]
    assert suggestion([*rates, 20, 30, 40], diverged) == pytest.approx(0.01, rel=0.1)
    assert suggestion(list(rates[:4]), list(losses[:4])) is None, "too few steps"
    assert suggestion(list(rates), [2.3] * 100) is None, "nothing learns"


@pytest.mark.parametrize("steps", [40, 100, 400])
def test_a_fall_stands_above_the_noise(steps):
    """Of losses that only vary there is no suggestion; of a fall that stands above it, always its place."""
    rates = list(np.geomspace(1e-6, 10, steps))
    found = []
    for seed in range(200):
        noise = np.random.default_rng(seed).normal(0, 1, steps)
        assert suggestion(rates, list(2.3 + 0.5 * noise)) is None
        found.append(suggestion(rates, list(2.3 - 2 / (1 + (np.array(rates) / 0.01) ** -1.0) + 0.1 * noise)))
    assert None not in found and min(found) > 0.001 and max(found) < 0.1


def test_small_batches_give_no_suggestion_or_a_good_one():
    """Four seeds, batches of 4: 100 steps are too noisy, 400 tell the rate."""
    config = [*TINY[1::2], "batch_size=4", "threads=1", "tensorboard=false"]

    def suggested(seed, steps):
        with opened_job(load_config(None, [*config, f"seed={seed}", f"max_steps={steps}"]), False) as job:
            return suggestion(*_try(job, Rates(1e-6, 10.0, steps)))

    for steps, least in ((100, 0), (400, 3)):
        rates = [rate for seed in range(4) if (rate := suggested(seed, steps))]
        assert all(0.02 < rate < 0.3 for rate in rates) and len(rates) >= least


def test_the_rates_of_groups_go_with_the_suggestion():
    """They were tried at their ratio to optim.lr; as numbers of their own they would stay where they were."""
    groups = [{"match": "a.*", "freeze": True}, {"match": "b.*", "lr": 0.002}, {"match": "c.*", "lr": 0.5}]
    optim = OptimConfig.model_validate({"lr": 0.01, "groups": groups})
    assert _of_groups(optim, 0.2) == [
        "optim.groups were tried at their ratio to optim.lr: with it set optim.groups.1.lr to 0.04 and "
        "optim.groups.2.lr to 10"
    ]
    assert _of_groups(OptimConfig(), 0.2) == []


def test_two_ranks_suggest_what_one_does_and_write_the_picture_alone(tmp_path):
    """The global batch is given, so the losses are those of one rank, to rounding."""
    words = ("find-lr", *TINY, "--set", "framework=tensorflow", "--set", "global_batch_size=64", "--steps", "80")
    one = run(*words, "--set", "threads=1", cwd=tmp_path).stdout
    two = run(*words, "--set", "threads=1", "-np", "2", "-o", "lr.png", cwd=tmp_path).stdout
    assert two.splitlines() == [*one.splitlines(), "picture: lr.png"]
    rate = float(one.splitlines()[-1].partition("optim.lr=")[2].split()[0])
    assert 1e-3 < rate < 2, "digits and an MLP learn with 0.1"
    assert [path.name for path in tmp_path.iterdir()] == ["lr.png"]


def test_mistakes_of_a_range_and_the_rates_of_a_training(tmp_path):
    job = ("--set", "optim.schedule=one_cycle", "--set", "optim.lr=0.1", "--set", "max_epochs=4")
    empty, high, drawn = commands(
        ["find-lr", *TINY, "--from", "1", "--to", "0.1"],
        ["find-lr", *TINY, "--from", "1e30", "--to", "1e35", "--steps", "10"],
        ["config", *TINY, *job, "--plot", "lr", "-np", "2"],
        cwd=tmp_path,
    )
    assert (empty.code, empty.err) == (2, "error: --from 1 is not below --to 0.1; give a range that grows\n")
    assert high.code == 0 and "no suggestion" in high.out
    told = "92 steps of 64 samples, 23 an epoch: learning rate 0.004 at first, 0.1 at most, 4e-07 at last"
    assert drawn.out == f"{told}\npicture: lr.png\n" and (tmp_path / "lr.png").stat().st_size > 10_000


def test_stages_share_the_samples_of_a_replica(tmp_path):
    """Four ranks in two stages train with a global batch of two, and so twice as many steps."""
    keys = ["data.name=digits", "model.name=mlp", "parallel.pipeline=2", "batch_size=32", "max_epochs=4"]
    words = draw_rates(load_config(None, keys), 4, tmp_path / "lr.png")
    assert words.startswith("92 steps of 64 samples, 23 an epoch: ")
