"""Help that teaches, and commands that only list."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from hvd_train.cli.main import COMMANDS as COMMANDS_AND_WORKERS
from hvd_train.cli.main import cli
from tests.cli.running import ROOT, SECONDS, run

COMMANDS = [
    "fit",
    "find-lr",
    "modes",
    "sweep",
    "submit",
    "eval",
    "predict",
    "verify",
    "export",
    "compare",
    "watch",
    "doctor",
    "config",
    "models",
    "data",
    "guide",
    "init",
]


def test_help_lists_the_commands_in_the_order_of_a_first_session():
    text = run("--help").stdout
    listed = [line.split()[0] for line in text.split("Commands:")[1].splitlines() if line.strip()]
    assert listed == COMMANDS
    assert "mpirun -np 8 hvd-train fit -c job.yaml" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command):
    for flag in ("-h", "--help"):
        text = run(command, flag).stdout
        assert f"Usage: hvd-train {command}" in text and len(text.splitlines()) > 5


def test_a_bare_command_is_its_help():
    for arguments in ((), ("config", "--help")):
        done = run(*arguments, code=0 if arguments else 2)
        text = done.stdout or done.stderr
        assert text.startswith("Usage: hvd-train") and "error" not in text and len(text.splitlines()) > 8


def test_version():
    assert run("--version").stdout.startswith("hvd-train, version ")


def test_every_row_of_the_table_is_a_command():
    for name in COMMANDS_AND_WORKERS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None and command.name == name and command.hidden == (name not in COMMANDS)


def test_models_and_data_are_listed():
    models = run("models").stdout
    assert "cnn " in models and "mlp " in models and "pytorch, tensorflow" in models
    data = run("data").stdout
    assert all(f"\n{name} " in data for name in ["digits", "idx", "npz", "npy", "hdf5", "imagefolder", "synthetic"])


def test_a_closed_pipe_is_no_error():
    line = f"{sys.executable} -m hvd_train config --explain | head -1"
    done = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.stderr == ""
