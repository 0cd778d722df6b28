"""Hooks that the configuration names, through the command line."""

from __future__ import annotations

import json

import pytest

from hvd_train.core.hooks import Hook, unknown_events
from tests.cli.running import commands, run

HOOKS = """
import hvd_train


class Best(hvd_train.Hook):
    def on_epoch(self, trainer, epoch):
        if epoch.number == 1:
            trainer.stop("good enough")


class Needs(hvd_train.Hook):
    def __init__(self, more):
        self.more = more


none = dict
"""
TINY = ("--set", "data.name=digits", "--set", "model.name=mlp", "--set", "model.hidden=[8]", "--set", "max_epochs=9")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_hooks.py").write_text(HOOKS)
    return tmp_path


def test_a_hook_of_the_configuration_is_called_on_all_ranks(folder):
    words = (*TINY, "--set", "hooks=[my_hooks:Best]", "--run-dir", "run")
    done = run("fit", "-np", "2", *words, cwd=folder)
    assert json.loads((folder / "run/summary.json").read_text())["epochs"] == 2 and "good enough" in done.stdout
    # An evaluation calls none, and needs none of the code.
    (folder / "my_hooks.py").unlink()
    assert json.loads(run("eval", "--run-dir", "run", cwd=folder).stdout.splitlines()[-1])["samples"] == 359


MISTAKES = {
    "[Best]": "hooks: name a class as package.module:Class, not 'Best'",
    "[my_hooks:Worst]": "my_hooks.py has no function 'Worst'; hooks: my_hooks:Worst",
    "[my_hooks:Bets]": "has no function 'Bets'; hooks: my_hooks:Bets; did you mean 'Best'?",
    "[my_hooks:Needs]": "it cannot be created: TypeError: Needs.__init__() missing 1 required positional argument",
    "[my_hooks:none]": "it gives dict, which is not a hook; hooks: my_hooks:none; derive its class from",
}


def test_mistakes_are_told_in_one_line_and_nothing_is_written(folder):
    lines = [["fit", *TINY, "--set", f"hooks={hooks}", "--run-dir", "run"] for hooks in MISTAKES]
    for line, done in zip(MISTAKES.values(), commands(*lines, cwd=folder), strict=True):
        assert done.code == 2 and done.err.count("\n") == 1 and line in done.err, done
    assert not (folder / "run").exists()


def test_a_method_that_is_no_event_is_named():
    """As those of Keras and Lightning are called."""

    class Halved(Hook):
        on_time = 3

        def on_epoch(self, trainer, epoch):
            """Called."""

        def on_epoch_begin(self, epoch, logs=None):
            """Never called."""

    (line,) = unknown_events(Halved())
    assert line.startswith("Halved.on_epoch_begin is never called: the events are on_start, on_step, ")
    assert unknown_events(Hook()) == []
