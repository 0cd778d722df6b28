"""Help that teaches, and commands that only list."""

from __future__ import annotations

import sys

import click
import pytest
from click.testing import CliRunner

from hvd_train.cli.launching import rank_words
from hvd_train.cli.main import COMMANDS as COMMANDS_AND_WORKERS
from hvd_train.cli.main import cli
from tests.cli.running import run

COMMANDS = [
    "fit", "run", "find-lr", "modes", "plan", "sweep", "scale", "submit", "eval", "predict", "verify", "export",
    "compare", "explain", "report", "sync", "watch", "doctor", "config", "models", "data", "guide", "init",
]  # fmt: skip


def shown(*words: str) -> str:
    return CliRunner().invoke(cli, words, prog_name="hvd-train").output


def test_help_lists_the_commands_in_the_order_of_a_first_session():
    text = shown("--help")
    listed = [line.split()[0] for line in text.split("Commands:")[1].splitlines() if line.strip()]
    assert listed == COMMANDS
    assert "mpirun -np 8 hvd-train fit -c job.yaml" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command):
    text = shown(command, "-h")
    assert f"Usage: hvd-train {command}" in text and len(text.splitlines()) > 5 and shown(command, "--help") == text


def test_a_bare_command_is_its_help():
    text = run(code=2).stderr
    assert text.startswith("Usage: hvd-train") and "error" not in text and len(text.splitlines()) > 8


def test_version():
    assert shown("--version").startswith("hvd-train, version ")


def test_ranks_get_no_option_that_starts_ranks(monkeypatch):
    starting = ["-np", "2", "-np2", "-Ha:1", "--hosts=a:1", "--launcher", "mpirun", "--dry-run", "--nnodes=1"]
    monkeypatch.setattr(sys, "argv", ["hvd-train", "fit", *starting, "-c", "job.yaml", "--set", "seed=1", "-v"])
    assert rank_words() == ["fit", "-c", "job.yaml", "--set", "seed=1", "-v"]


def test_every_row_of_the_table_is_a_command():
    for name in COMMANDS_AND_WORKERS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None and command.name == name and command.hidden == (name not in COMMANDS)


def test_models_and_data_are_listed():
    models = shown("models")
    assert "cnn " in models and "mlp " in models and "pytorch, tensorflow" in models
    data = shown("data")
    assert all(f"\n{name} " in data for name in ["digits", "idx", "npz", "npy", "hdf5", "imagefolder", "synthetic"])
