"""The command line: its commands, a file each, and error handling."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import Any

import click

from hvd_train import __version__
from hvd_train.cli import standard_streams

# In the order of a first session. A command's module is imported on demand, and imports what it needs only when it
# runs: help must not wait for NumPy, nor any command import a framework before a job starts.
COMMANDS = {
    "fit": "fit.fit",
    "run": "run.run",
    "find-lr": "find_lr.find_lr",
    "modes": "modes.modes",
    "measure": "modes.measure",
    "plan": "plan.plan",
    "calibrate": "plan.calibrate",
    "sweep": "sweep.sweep",
    "scale": "scale.scale",
    "submit": "submit.submit",
    "ended": "submit.ended",
    "requeue": "submit.requeue",
    "eval": "evaluate.evaluate",
    "predict": "predict.predict",
    "verify": "verify.verify",
    "record": "verify.record",
    "export": "export.export",
    "compare": "compare.compare",
    "explain": "explain.explain",
    "report": "report.report",
    "sync": "sync.sync",
    "watch": "watch.watch",
    "doctor": "doctor.doctor",
    "probe": "doctor.probe",
    "config": "config.config",
    "models": "models.models",
    "data": "data.data",
    "guide": "guide.guide",
    "init": "init.init",
}


class Commands(click.Group):
    """The commands of ``COMMANDS``, in that order."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.commands = dict.fromkeys(COMMANDS, click.Command(None))  # command names, for suggestions

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name].partition(".")
        return getattr(import_module(f"hvd_train.cli.{module}"), function)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="hvd-train")
def cli() -> None:
    """Train PyTorch and Keras 3 / TensorFlow models in data parallel over Horovod.

    \b
    A first run (digits data, a small CNN, two ranks on this host):
      hvd-train fit -np 2 --set data.image_size=28 --set max_epochs=5 --run-dir runs/first
    The same in the other framework, from the same configuration:
      hvd-train fit -np 2 --set data.image_size=28 --set max_epochs=5 --set framework=tensorflow --run-dir runs/second
    On a cluster, let the launcher start the ranks:
      mpirun -np 8 hvd-train fit -c job.yaml
      hvd-train fit -np 8 -H host1:4,host2:4 -c job.yaml
      srun -n 8 hvd-train fit -c job.yaml
    """


def main() -> None:
    """Run a command. User errors become lines on stderr and an exit code, never a traceback."""
    # Training continues after the reader of its output has left, because the run folder has everything.
    standard_streams.guard("stderr", *(["stdout"] if sys.argv[1:2] in (["fit"], ["sweep"], ["scale"]) else []))
    try:
        if sys.argv[1:2] == ["fit"]:  # a signal may come at any moment
            from hvd_train.launch.signals import listen

            listen().reset()
        cli.main(prog_name="hvd-train", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except (Exception, KeyboardInterrupt) as error:
        end_with(error)
    finally:
        standard_streams.drain()


def end_with(error: BaseException) -> None:
    """Print an error, and exit with its code."""
    # Imported here, because help does not need it.
    from hvd_train.launch.failed_rank import exit_rank, exit_with_error, print_error, rank_tag

    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        exit_rank(error.exit_code)
    if isinstance(error, click.ClickException):
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "hvd-train"
        text = _as_setting(error) or " ".join(error.format_message().split())  # click lists one choice a line
        print_error(text, [f"error{rank_tag()}: {text} See '{command} --help'."], error.exit_code)
        exit_rank(error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        exit_rank(130)
    if isinstance(error, standard_streams.ReaderLeftError):
        exit_rank(0)
    exit_with_error(error)


def _as_setting(error: click.ClickException) -> str:
    """Return the message for a configuration file without ``-c``, or an option that is a key (``--max-epochs 3``).

    "" for other errors.
    """
    if not isinstance(error, click.UsageError) or not error.ctx:
        return ""
    if not any(parameter.name == "sets" for parameter in error.ctx.command.params):
        return ""
    if file := re.fullmatch(r".*unexpected extra argument \((\S+\.ya?ml)\)", error.message):
        return f"Unexpected argument '{file[1]}'. Give -c {file[1]}."
    if not isinstance(error, click.NoSuchOption):
        return ""
    from hvd_train.config import explain

    name = error.option_name.lstrip("-").replace("-", "_")
    # --epochs means max_epochs, which is less nested than swa.epochs.
    ends = (f".{name}", f".max_{name}")
    keys = sorted((key for key, *_ in explain() if f".{key}".endswith(ends)), key=lambda key: key.count("."))
    words = sys.argv[1:]
    given = next((word for word in words if word.partition("=")[0] == error.option_name), error.option_name)
    follows = words[words.index(given) + 1 :][:1] if given in words else []
    value = given.partition("=")[2] or (follows[0] if follows and not follows[0].startswith("--") else "VALUE")
    return f"No such option '{error.option_name}'. Give --set {keys[0]}={value}." if keys else ""
