"""``hvd-train doctor``, and one rank of its allreduce test."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from hvd_train.cli import options
from hvd_train.cli.launching import rank_words
from hvd_train.errors import ConfigError
from hvd_train.frameworks import FRAMEWORKS
from hvd_train.launch.launchers import AUTO

if TYPE_CHECKING:
    from hvd_train.launch.hosts import Hosts


@click.command()
@options.hosts
@options.any_launcher
@options.verbose
def doctor(hosts: Hosts | None, launcher: str, verbose: bool) -> None:
    """Print what is installed and what is missing, then time a 2-rank allreduce in each framework.

    Over several hosts: a row for each, the speed between them, and in what they differ (exit code 1).

    \b
    hvd-train doctor -H node1:2,node2:2             as fit is started, with one rank on each host
    mpirun -np 2 --hostfile hosts.txt hvd-train doctor
    srun -N 2 hvd-train doctor
    """
    from hvd_train.launch.environment import world
    from hvd_train.launch.hosts import Hosts

    started = world().launcher
    if (hosts or launcher != AUTO) and started:
        raise ConfigError("the ranks are started already", where=f"by {started}", fix="leave out --hosts, --launcher")
    if started:
        from hvd_train.doctor.host_table import hosts as compare_hosts

        sys.exit(compare_hosts())
    if hosts:
        from hvd_train.launch.start import launch

        # One rank on each host is enough, because facts and links belong to the host.
        one_each = Hosts(dict.fromkeys(hosts.slots, 1), hosts.interfaces)
        sys.exit(launch(len(one_each.slots), launcher, rank_words(), verbose, hosts=one_each))
    if launcher != AUTO:
        raise ConfigError(
            "no hosts are named", where="--launcher", fix="give --hosts too, or leave it out: all are tried"
        )
    from hvd_train.doctor import host

    sys.exit(host.doctor(verbose))


@click.command(hidden=True)
@click.option("--framework", type=click.Choice(list(FRAMEWORKS)), required=True)
def probe(framework: str) -> None:
    """Run one rank of the doctor's allreduce test."""
    from hvd_train.doctor import host

    sys.exit(host.probe(framework))
