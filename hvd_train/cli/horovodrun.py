"""``horovodrun -np N PROGRAM ...`` for the users of Horovod's command, over the launchers of ``hvd-train fit -np``.

Horovod's own puts the environment on command lines, and unpickles what its ports receive (CVE-2024-10190).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from hvd_train import __version__
from hvd_train.cli import options
from hvd_train.cli.main import end_with

if TYPE_CHECKING:
    from hvd_train.launch.hosts import Hosts


@click.command(
    context_settings={
        "help_option_names": ["-h", "--help"],
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }
)
@options.num_proc
@options.hosts
@click.option("--mpi", is_flag=True, help="Exchange over MPI (default: if it is there).")
@click.option("--gloo", is_flag=True, help="Exchange over Gloo, without MPI.")
@options.verbose
@click.version_option(__version__, prog_name="horovodrun of hvd_train")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, required=True)
def horovodrun(
    num_proc: int | None, hosts: Hosts | None, mpi: bool, gloo: bool, verbose: bool, program: tuple[str, ...]
) -> NoReturn:
    """Start PROGRAM on N ranks, of this host or of others, and wait for them.

    \b
      horovodrun -np 2 python train.py
      horovodrun -np 4 -H host1:2,host2:2 hvd-train fit -c job.yaml
    """
    from hvd_train.errors import ConfigError
    from hvd_train.launch.launchers import startable
    from hvd_train.launch.start import launch

    if program[0].startswith("-"):
        raise click.NoSuchOption(program[0])
    if mpi and gloo:
        raise ConfigError("ranks exchange over MPI or over Gloo", where="--mpi --gloo", fix="give one of them")
    total = sum(hosts.slots.values()) if hosts else 1
    library = "mpi" if mpi else "gloo" if gloo else ""
    launcher = next((one for one in startable() if one.library == library), None)
    if mpi and launcher and not launcher.usable():
        what = f"{launcher.tool}, or an engine for its MPI, is missing"
        raise ConfigError(what, where="--mpi", fix=f"{launcher.install}, or use --gloo")
    name = launcher.name if launcher else "auto"
    sys.exit(launch(num_proc or total, name, [], verbose, program=program, hosts=hosts))


def main() -> None:
    try:
        horovodrun.main(prog_name=Path(__file__).stem, standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except (Exception, KeyboardInterrupt) as error:
        end_with(error)


if __name__ == "__main__":
    main()
