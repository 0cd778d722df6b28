"""``hvd-train submit``: write a batch script, submit it with ``sbatch``, and follow the job's output."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hvd_train.errors import ConfigError
from hvd_train.launch.launchers.installed import python
from hvd_train.launch.launchers.srun import Srun
from hvd_train.launch.rendezvous.secret import SECRET
from hvd_train.launch.signals import JOB_END
from hvd_train.run_folder.terminal import say

WHERE = "hvd-train submit"
# Anchored at line starts, where user-chosen names cannot occur.
SHOWN = (r"^ +JobState=(\S+) Reason=(\S+)", r"^ +Requeue=.* ExitCode=(\d+):(\d+)", r"^ +StdOut=(.*)$")
# Empty if the job has no time limit. Then ranks stop only at the signal.
END_LINE = f'export {JOB_END}=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s 2>/dev/null)'
POLL_SECONDS = 2.0
HERE = python("hvd_train")
OPTIONS = ("nodes", "ntasks_per_node", "cpus_per_task", "gpus_per_node", "time", "partition", "account")
RUNNING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "STAGE_OUT")


class Shell(str):
    """Shell code that is not quoted."""


@dataclass(frozen=True)
class BatchJob:
    """A Slurm job. ``settings``: section ``slurm`` of the configuration, with the command line's changes."""

    settings: Mapping[str, Any]
    name: str
    output: str | None

    @cached_property
    def container(self) -> list[str]:
        return contained(self.settings["container"])

    def hvd_train(self, words: Sequence[str]) -> list[str]:
        """Return the command ``hvd-train WORDS``, within the container if any, where Python has another path."""
        return ["hvd-train", *words] if self.container else [*HERE, *words]

    def script(
        self,
        command: Sequence[str],
        run_dir: str | None = None,
        options: Mapping[str, object] = MappingProxyType({}),
        first: Sequence[str] = (),
        then: Sequence[Sequence[str]] = (),
    ) -> str:
        """Return the batch script that runs ``command`` on all ranks, with a requeue if configured.

        ``run_dir``: where ``requeue`` reads the progress of the run. The other arguments are those of ``script``.
        """
        settings, times = self.settings, self.settings["requeue"]
        every = {"job-name": self.name, **{key.replace("_", "-"): settings[key] for key in OPTIONS}}
        every |= {"output": self.output, **options}
        if times:
            every |= {"requeue": True, "signal": f"USR1@{settings['save_before']}", "open-mode": "append"}
            again = [*HERE, "requeue", "--times", str(times), *(["--run-dir", run_dir] if run_dir else [])]
            first, then = [starts(times), *first, END_LINE], [again, *then]
        else:
            every["no-requeue"] = True  # a second start would find the run folder in use, and overwrite the output
        return script([*self.container, *command], every, settings["modules"], then, settings["lines"], first)


def check_requeue(times: int | None, resume: str | None, overwrite: bool) -> None:
    """Raise ConfigError if each requeue would start from the beginning."""
    anew = "--overwrite" if overwrite else "--resume" if resume not in (None, "auto", "last") else ""
    if times and anew:
        fix = "give another --run-dir, or remove the folder" if overwrite else "give --resume auto"
        raise ConfigError("each start of the job would begin anew", where=f"submit: --requeue {anew}", fix=fix)


def script(
    program: Sequence[str],
    options: Mapping[str, object],
    modules: Sequence[str],
    then: Sequence[Sequence[str]] = (),
    more: Sequence[str] = (),
    first: Sequence[str] = (),
) -> str:
    """Return a batch script that starts ``program`` with srun.

    ``options``: sbatch's long options; None: the site's default, True: without a value. ``more``: literal options,
    ``--NAME[=VALUE]``. ``first``: lines to run before. ``then``: commands to run afterwards, each with the exit code of
    the previous one as last argument.
    """
    # Each job generates its own secret (below). Slurm passes the environment to all ranks, so no file is needed.
    chosen = {name: value for name, value in options.items() if value is not None}
    lines = [
        f"#SBATCH --{name}" + ("" if value is True else f"={_word(value, name)}") for name, value in chosen.items()
    ]
    for name, equals, value in (option.partition("=") for option in more):
        lines.append(f"#SBATCH {name}{equals}{_word(value, name) if equals else ''}")
    loads = [f"module load {_word(name, 'module')} || exit 2" for name in modules]
    # srun takes most of the job's options from the environment, but not this one.
    each = f" --cpus-per-task={options['cpus-per-task']}" if options.get("cpus-per-task") else ""
    *commands, last = [f"{Srun.tool}{each} {_words(program)}", *(f"{_words(command)} $?" for command in then)]
    shell = "#!/bin/bash -l" if modules else "#!/bin/bash"  # a login shell defines 'module'
    return "\n".join(
        [
            shell,
            *lines,
            *loads,
            f'export PATH={_word(Path(sys.executable).parent, "PATH")}:"$PATH"',
            f"export {SECRET}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
            *first,
            *commands,
            f"exec {last}",
            "",
        ]
    )


def starts(times: int) -> str:
    """Return a line that ends a job that Slurm itself has restarted more often, after node failures."""
    line = f"the job is not started again: --requeue allows {times}"
    return f'[ "${{SLURM_RESTART_COUNT:-0}}" -le {times} ] || {{ echo "{line}" >&2; exit 5; }}'


def contained(command: str | None) -> list[str]:
    """Split a container's command into words."""
    try:
        return shlex.split(command or "")
    except ValueError as error:
        raise ConfigError(f"{command!r} is not a command: {error}", where=f"{WHERE}: container") from error


def _words(command: Sequence[str]) -> str:
    return " ".join(_word(word, "command") for word in command)


def _word(value: object, name: str) -> str:
    """Quote a word for a shell, and for sbatch, whose lines have the same quoting rules."""
    text = str(value)
    if not text.isprintable():
        raise ConfigError(f"{text!r} holds a character that is not printable", where=f"{WHERE}: {name}")
    return text if isinstance(value, Shell) else shlex.quote(text)


def submit(text: str) -> str:
    """Submit the script. Returns the job id."""
    if shutil.which("sbatch") is None:
        fix = "submit from a host of the cluster, or see the script with --dry-run"
        raise ConfigError("sbatch is not installed", where=WHERE, fix=fix)
    done = subprocess.run(["sbatch", "--parsable"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.replace("sbatch: error: ", "").split())
        raise ConfigError(f"sbatch refuses the job: {reason}", where=WHERE)
    return done.stdout.strip().partition(";")[0]


def follow(job: str) -> int:
    """Print the job's states and output until it ends. Returns its exit code. Ctrl-C does not stop the job."""
    last, place = "", 0
    while True:
        state, reason, code, output = _state(job)
        if state != last:
            say(f"job {job}: {state.lower()}{f' ({reason})' if reason else ''}", err=True)
            last = state
        with suppress(OSError), output.open("rb") as file:
            file.seek(place)
            new = file.read()
            place += len(new)
            sys.stdout.buffer.write(new)
            sys.stdout.buffer.flush()
        if state not in RUNNING:
            return code or int(state != "COMPLETED")
        time.sleep(POLL_SECONDS)


def _state(job: str) -> tuple[str, str, int, Path]:
    """Return (state, pending reason, exit code, output file) of a job. Raises ConfigError once Slurm has purged it."""
    line = ["scontrol", "show", "job", job]
    shown = subprocess.run(line, capture_output=True, text=True, check=False).stdout
    matches = [re.search(pattern, shown, re.MULTILINE) for pattern in SHOWN]
    if None in matches:
        raise ConfigError(f"Slurm does not know job {job}", where=WHERE, fix="see 'sacct'")
    (state, reason), (code, number), (output,) = (match.groups() for match in matches if match)
    waits = reason if state == "PENDING" and reason != "None" else ""
    return state, waits, 128 + int(number) if int(number) else int(code), Path(output)
