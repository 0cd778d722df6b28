"""``scale --branch``: larger batches from a checkpoint over the same samples, and the largest whose loss recovers."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml

from hvd_train.errors import ConfigError
from hvd_train.scaling.branches import Branch, largest, parse_times
from tests.cli.running import commands, run

JOB = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [16]},
    "batch_size": 4,
    "max_epochs": 2,
    "tensorboard": False,
    "optim": {"lr": 0.02, "schedule": "cosine", "warmup_epochs": 1},
    "checkpoint": {"every_n_epochs": 1},
}


def branch(times, loss):
    return Branch(times, 8 * times, 0.1, 10, loss, 1.0)


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ([1.0, 1.0, 1.009, 1.2], 4),
        ([1.0, 0.9, 1.02, 0.9], 2),  # one larger than a batch that does not recover is luck
        ([1.0, 1.02], 1),
        ([1.0, None, 1.0], 1),
        ([1.0], 1),
        ([None, 1.0], None),
        ([-5.0, -5.0, -4.96, -4.9], 4),  # a loss of yours may be negative
        ([], None),
    ],
)
def test_the_largest_batch_whose_loss_recovers(losses, best):
    found = largest([branch(1 << k, loss) for k, loss in enumerate(losses)])
    assert (found and found.times) == best


def test_multiples():
    assert parse_times("4x, 2x") == [1, 2, 4]
    for wrong in ("2", "x", "0x", "2x,,4x", "-2x"):
        with pytest.raises(ConfigError, match="is no multiple of the batch; .*list them, as in --batch 1x,2x,4x"):
            parse_times(wrong)


LONG = pytest.mark.long("PyTorch's branches are tried each time")


@pytest.fixture(scope="module", params=["pytorch", pytest.param("tensorflow", marks=LONG)])
def trained(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("branches")
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB | {"framework": request.param}))
    run("fit", "-c", "job.yaml", "-np", "2", "--run-dir", "runs/first", cwd=folder)
    return folder


def test_branches_of_a_run(trained):
    """The same samples in 1, 2, 8 times larger batches; the rate grows with the batch, as SGD needs it."""
    line = ["scale", "--branch", "runs/first", "--batch", "1x,2x,8x", "--samples", "640", "--ranks", "2"]
    told = run(*line, cwd=trained).stdout
    assert told.startswith("from step 360, over 640 samples\n")
    assert "is the largest batch whose loss recovers (within 1 %)" in told or "No larger batch pays" in told
    with open(trained / "runs" / "branches" / "branches.csv") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["global_batch"] for row in rows] == ["8", "16", "64"]
    assert [row["steps"] for row in rows] == ["80", "40", "10"]
    rates = [float(row["learning_rate"]) for row in rows]
    assert rates == pytest.approx([rates[0], 2 * rates[0], 8 * rates[0]]) and rates[0] > 0
    # The rate that the checkpoint's step had, near the end of the cosine.
    assert rates[0] < 0.001
    assert all(0 < float(row["val_loss"]) < 5 and float(row["seconds"]) > 0 and not row["problem"] for row in rows)
    for folder, batch in (("batch-1x", 8), ("batch-8x", 64)):
        config = yaml.safe_load((trained / "runs" / "branches" / folder / "config.yaml").read_text())
        assert config["global_batch_size"] == batch and config["optim"]["schedule"] == "constant"
        steps = (trained / "runs" / "branches" / folder / "summary.json").read_text()
        assert f'"steps": {360 + 640 // batch}' in steps
    again = run(*line, code=2, cwd=trained).stderr
    assert "the folder holds branches already; runs/branches; --resume trains what is missing" in again
    (trained / "runs" / "branches" / "batch-2x" / "summary.json").unlink()
    other = [*line[:-3], "1280", *line[-2:], "--resume"]
    assert "the folder holds branches with another samples; " in run(*other, code=2, cwd=trained).stderr
    more = run(*line, "--resume", cwd=trained)
    assert more.stdout.splitlines()[0] == told.splitlines()[0]


def test_mistakes(trained):
    lines = {
        ("scale", "-c", "job.yaml", "--batch", "2x"): "--batch and --samples are those of branches; give --branch",
        ("scale", "--branch", "runs/none"): "runs/none",
        ("scale", "--branch", "runs/first", "--ranks", "1,2"): "branches train on one number of ranks",
        ("scale", "--branch", "runs/first", "--samples", "100"): "100 samples are fewer than 10 steps of 8 x 4; ",
        ("scale", "--branch", "runs/first", "--weak"): "branches are compared by their loss",
        ("scale", "--branch", "runs/first", "--repeats", "2"): "branches are compared by their loss",
    }
    for told, expected in zip(commands(*lines, cwd=Path(trained)), lines.values(), strict=True):
        assert told.code in (2, 4) and expected in told.err and told.err.count("\n") == 1, told
