"""Start this command again on several ranks, with the same arguments except those that start ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hvd_train.errors import ConfigError
from hvd_train.run_folder.terminal import say

if TYPE_CHECKING:
    from hvd_train.config import Config

# Options that start ranks, each with a value, which ranks must not get.
WITH_VALUE = (
    "-np", "--num-proc", "--launcher", "--max-restarts", "--min-np", "--spares", "-H", "--hosts", "--hostfile",
    "--network-interfaces", "--nnodes", "--nproc-per-node",
)  # fmt: skip
# As in -np2, -Hhost:4, --hosts=host:4.
JOINED = ("-np", "-H", *(f"{option}=" for option in WITH_VALUE if option.startswith("--")))


def rank_words() -> list[str]:
    """Return this command's arguments without those that start ranks."""
    words, value = [], False
    for word in sys.argv[1:]:
        if value:
            value = False
        elif word in WITH_VALUE:
            value = True
        elif word != "--dry-run" and not word.startswith(JOINED):
            words.append(word)
    return words


def start_ranks(num_proc: int, launcher: str, verbose: bool) -> NoReturn:
    """Start this command on ``num_proc`` ranks of this host, and exit with its code."""
    from hvd_train.launch.start import launch

    sys.exit(launch(num_proc, launcher, rank_words(), verbose))


def run_here_or_on_ranks(num_proc: int | None, launcher: str, verbose: bool, job: Callable[[], int]) -> NoReturn:
    """Run ``job`` in this process, or this command on the ranks of ``-np``, and exit with its code."""
    from hvd_train.launch.start_plan import starts_ranks

    if starts_ranks(num_proc):
        start_ranks(num_proc or 1, launcher, verbose)
    open_rendezvous()
    sys.exit(job())


def check_run_folder(config: Config, resume: str | None, overwrite: bool) -> None:
    """Raise ConfigError if ``fit`` would refuse the run folder."""
    from hvd_train.run_folder.layout import check_free

    check_free(Path(config.run_dir), resume, overwrite)


def note_refusal(config: Config, resume: str | None, overwrite: bool) -> None:
    """Print on stderr why ``fit`` would refuse the run folder. For dry runs, where that is no error."""
    try:
        check_run_folder(config, resume, overwrite)
    except ConfigError as error:
        say(f"note: this would be refused: {error}", err=True)


def open_rendezvous() -> None:
    """Let the other ranks find this one, if the launcher does not connect them."""
    from hvd_train.launch.environment import world
    from hvd_train.launch.rendezvous import client as rendezvous

    rendezvous.prepare(world())
