"""How ``fit`` starts its ranks: in an allocation, or on hosts that this process starts and watches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from hvd_train.config import Config
from hvd_train.errors import ConfigError
from hvd_train.launch.environment import BEGAN, command_began, world
from hvd_train.launch.hosts import Hosts, look, spread
from hvd_train.launch.launchers import AUTO, NONE, choose, named
from hvd_train.launch.launchers.base import Launcher, Layout
from hvd_train.launch.launchers.installed import find_program, python
from hvd_train.launch.snapshots import in_memory
from hvd_train.launch.spares import Spares
from hvd_train.launch.start import command, launch, start
from hvd_train.launch.supervise import supervise


def starts_ranks(num_proc: int | None) -> bool:
    """Return whether this process must start the ranks of ``-np`` rather than be one of them."""
    here = world()
    if num_proc is not None and here.launcher and here.size != num_proc:
        raise ConfigError(
            f"-np {num_proc} inside a world of {here.size} ranks",
            where=f"started by {here.launcher}",
            fix="leave out -np",
        )
    return num_proc not in (None, 1) and not here.launcher


@dataclass(frozen=True)
class Restarts:
    """What to do after a lost rank: at most ``most`` restarts, with ``spares`` standby processes."""

    most: int = 0
    min_np: int | None = None
    spares: int = 0

    def check(self) -> None:
        if self.spares and not self.most:
            what = "spares take the place of ranks at a restart"
            raise ConfigError(what, where="--spares", fix="give --max-restarts")
        if self.min_np and not self.most:
            raise ConfigError("only a restart can use fewer ranks", where="--min-np", fix="give --max-restarts")


def _program(words: Sequence[str]) -> list[str]:
    return [*python("hvd_train"), *words]


@dataclass(frozen=True)
class InAllocation:
    """Ranks on the hosts of a scheduler's allocation."""

    launcher: Launcher
    layout: Layout

    def command(self, words: Sequence[str]) -> list[str]:
        return self.launcher.command(self.layout, _program(words))

    def check(self) -> None:
        """Raise ConfigError for wrong options, and only then for a missing allocation."""
        self.command([])
        self.launcher.check()

    def run(self, words: Sequence[str], config: Config, verbose: bool, once: bool) -> int:
        return self.run_program(_program(words), verbose)

    def run_program(self, program: Sequence[str], verbose: bool) -> int:
        """Run any program on the ranks. Returns the exit code."""
        self.check()
        return start(self.launcher, self.layout, program, verbose)


@dataclass(frozen=True)
class Launched:
    """Ranks on this host, or on other hosts over ssh."""

    num_proc: int
    launcher: str
    hosts: Hosts | None
    restarts: Restarts

    def command(self, words: Sequence[str]) -> list[str]:
        if self.hosts:
            self.hosts.needed(self.num_proc)
        return command(self.num_proc, choose(self.launcher).name, words, hosts=self.hosts)

    def check(self) -> None:
        """Raise ConfigError for wrong options, and CommunicationError for a host that cannot run ranks."""
        self.command([])
        if self.hosts:
            look(self.hosts.needed(self.num_proc))

    def run(self, words: Sequence[str], config: Config, verbose: bool, once: bool) -> int:
        """Run ``hvd-train WORDS`` on the ranks. Returns the exit code. ``once``: no restart from a checkpoint."""
        os.environ[BEGAN] = str(command_began())  # restarts are part of the time that the training takes
        if self.hosts or once:
            return launch(self.num_proc, self.launcher, words, verbose, hosts=self.hosts)
        most, framework, threads = self.restarts.most, config.framework, config.threads
        snapshots = in_memory(bool(most and config.checkpoint.snapshot_every_n_steps))
        with snapshots, closing(Spares(self.restarts.spares, framework, threads, self.num_proc, verbose)) as spares:
            return supervise(
                self.num_proc,
                self.launcher,
                list(words),
                Path(config.run_dir),
                most,
                verbose,
                config.watchdog_s,
                spares,
                self.restarts.min_np,
            )

    def run_program(self, program: Sequence[str], verbose: bool) -> int:
        """Run any program on the ranks. Returns the exit code."""
        if not self.restarts.most:
            return launch(self.num_proc, self.launcher, [], verbose, program=program, hosts=self.hosts)
        return supervise(
            self.num_proc, self.launcher, [], None, self.restarts.most, verbose, program=find_program(program)
        )


def plan(
    num_proc: int | None,
    launcher: str,
    hosts: Hosts | None,
    nnodes: int | None,
    nproc_per_node: int | None,
    restarts: Restarts,
    dry_run: bool,
) -> InAllocation | Launched | None:
    """Return how to start ranks as the options of ``fit`` say; None if this process is a rank or trains alone."""
    restarts.check()
    chosen = NONE if launcher == AUTO else named(launcher)
    if chosen.in_allocation and not world().launcher:
        if hosts or restarts.most:
            option = "--hosts" if hosts else "--max-restarts"
            raise ConfigError(f"{launcher} takes no {option}", fix=chosen.no_hosts)
        return InAllocation(chosen, Layout(num_proc, None, nnodes, nproc_per_node))
    if nnodes or nproc_per_node:
        hosts, num_proc = spread(hosts, num_proc, nnodes, nproc_per_node)
    if not (starts_ranks(num_proc) or restarts.most or hosts or (dry_run and num_proc)):
        return None
    if num_proc is None:
        option = "--max-restarts" if restarts.most else "--hosts"
        raise ConfigError(f"{option} needs -np, the number of ranks", fix="give -np, or leave it out")
    if hosts and not hosts.elsewhere:
        hosts.needed(num_proc)
        hosts = None
    if hosts and restarts.most:
        fix = "leave it out, and start again with --resume auto"
        raise ConfigError("ranks of several hosts are not started again", where="--max-restarts", fix=fix)
    return Launched(num_proc, launcher, hosts, restarts)
