"""``hvd-train run``: start a script, or any program, on several ranks."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

import click

from hvd_train.cli import options
from hvd_train.errors import ConfigError

if TYPE_CHECKING:
    from hvd_train.launch.hosts import Hosts


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@options.num_proc
@options.launcher(in_allocation=True)
@options.hosts
@click.option("--nnodes", type=click.IntRange(min=1), help="Use only this many of the hosts, or of Slurm's.")
@click.option("--nproc-per-node", type=click.IntRange(min=1), help="Ranks on each host, instead of -np.")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Start all ranks again when one dies, at most this many times: the script resumes by itself (ht.load).",
)
@click.option(
    "--stall-seconds",
    type=options.NumberRange(min=0),
    help="End all ranks when one makes no progress for so long (0: never; without: 600). For ranks of hvd_train.",
)
@click.option("--tag", is_flag=True, help="Put the rank before each line of output, as in '[1] loss 0.3'.")
@click.option("--torchrun", is_flag=True, help="Set torchrun's variables too, for scripts with torch.distributed.")
@options.verbose
@click.argument("program", metavar="[--] PROGRAM ...", nargs=-1, type=click.UNPROCESSED, required=True)
def run(
    num_proc: int | None,
    launcher: str,
    hosts: Hosts | None,
    nnodes: int | None,
    nproc_per_node: int | None,
    max_restarts: int,
    stall_seconds: float | None,
    tag: bool,
    torchrun: bool,
    verbose: bool,
    program: tuple[str, ...],
) -> NoReturn:
    """Start a script, or any program, on N ranks of this host or of others, and wait for them.

    \b
      hvd-train run -np 2 -- python train.py --lr 0.1
      hvd-train run -np 4 -H host1:2,host2:2 -- python train.py
      hvd-train run -np 2 --max-restarts 3 -- python train.py
      hvd-train run -np 2 --torchrun -- python ddp.py
    """
    from hvd_train.launch.launchers.installed import find_program
    from hvd_train.launch.rank_program import wrapped
    from hvd_train.launch.start_plan import InAllocation, Restarts, plan
    from hvd_train.launch.watchdog import VARIABLE
    from hvd_train.run_folder.terminal import warn

    if program[0].startswith("-"):
        raise click.NoSuchOption(program[0])
    if program[0].endswith(".py") and not os.access(program[0], os.X_OK):
        fix = f"hvd-train run ... -- python {' '.join(program)}"
        raise ConfigError(f"{program[0]} is a script, which python runs", where="hvd-train run", fix=fix)
    if not torchrun and (script := _for_torchrun(program)):
        warn(f"{script} uses torch.distributed, which needs torchrun's variables: add --torchrun")
    if stall_seconds is not None:
        os.environ[VARIABLE] = f"{stall_seconds:g}"
    ranks = plan(num_proc, launcher, hosts, nnodes, nproc_per_node, Restarts(max_restarts), dry_run=False)
    elsewhere = isinstance(ranks, InAllocation) or bool(hosts and hosts.elsewhere)
    address = "" if isinstance(ranks, InAllocation) else next(iter(hosts.slots)) if hosts and elsewhere else "127.0.0.1"
    line = wrapped(program if elsewhere else find_program(program), tag, torchrun, address)
    if ranks is None:  # a single rank, or a rank that another launcher has started
        os.execv(line[0], line)
    sys.exit(ranks.run_program(line, verbose))


def _for_torchrun(program: tuple[str, ...]) -> str:
    """Return the script among the words of a command that opens torch.distributed by itself, or ""."""
    for word in program:
        if word.endswith(".py") and os.path.isfile(word):
            with open(word, encoding="utf-8", errors="replace") as file:
                text = file.read()
            return word if "init_process_group(" in text and "hvd_train" not in text and "RANK" not in text else ""
    return ""
