"""``hvd-train doctor`` on one host: what is installed, what is missing, and whether two ranks can communicate."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from hvd_train.engine.library import (
    MISSING,
    MPI,
    TENSORFLOW_OP,
    built,
    damage,
    file_of,
    horovod,
    lacking,
    missing_fix,
    use_stock,
)
from hvd_train.errors import ConfigError, TrainError, amount
from hvd_train.frameworks import FRAMEWORKS, version
from hvd_train.installation import PIP_MPI, install_fix, replace_fix
from hvd_train.launch.environment import rank_settings, threads
from hvd_train.launch.launchers import startable
from hvd_train.launch.launchers.base import Launcher
from hvd_train.launch.launchers.installed import find_tool, mpi_built
from hvd_train.launch.start import command, environment
from hvd_train.launch.world import World
from hvd_train.protocol import Communicator
from hvd_train.report.text_tables import table
from hvd_train.session import Session

SECONDS, RANKS = 300, 2  # importing a framework from a busy file server may take minutes
SIZES = {"4 KB": 1 << 10, "1 MB": 1 << 18, "32 MB": 1 << 23}  # name: float32 values
REPEATS = {"4 KB": 20, "1 MB": 10, "32 MB": 3}
# Run in separate processes, because a framework or a library may crash while it is loaded.
LOOK = """
import importlib, json, sys
from hvd_train.engine import library
package, module, horovod = sys.argv[1:]
out = {}
try:
    out["version"] = importlib.import_module(package).__version__
    out["gpus"] = importlib.import_module(module).gpus()
    if library.use_stock():
        out.update(mpi=False, gloo=False, nccl=False)
        if library.horovod() != library.MISSING:
            hvd = importlib.import_module(horovod)
            out.update(mpi=bool(hvd.mpi_built()), gloo=bool(hvd.gloo_built()), nccl=bool(hvd.nccl_built()))
except Exception as error:
    out["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps(out))
"""
LOAD = """
import sys
from hvd_train.engine import library
library.load(sys.argv[1])
"""


def _engine() -> tuple[dict[str, bool], list[tuple[str, str, str]]]:
    """Return what the engine's libraries can do, and a table row for each that cannot be used."""
    if missing := lacking():
        row = ("engine", f"needs a processor with {missing} (2013 or newer)", "take another host")
        return dict.fromkeys(("mpi", "gloo", "nccl"), False), [row]
    files = {name: file_of(name) for name in built()}
    faults = {name: damage(file) or _load_error(name) for name, file in files.items()}
    loaded = [name for name, why in faults.items() if not why]
    rows = []
    if TENSORFLOW_OP.exists() and (why := damage(TENSORFLOW_OP)):
        rows.append((f"engine, {TENSORFLOW_OP.name}", why, replace_fix()))
    for name, why in faults.items():
        no_mpi = bool(MPI[name]) and MPI[name] in why
        if why and not (no_mpi and loaded):  # a wheel has a library for each MPI, of which a host needs one
            rows.append((f"engine, {name}.so", why, "" if no_mpi else replace_fix()))
    return {"mpi": any(MPI[name] for name in loaded), "gloo": bool(loaded), "nccl": False}, rows


def _load_error(name: str) -> str:
    """Return why a library of the engine cannot be loaded; "" if it can."""
    line = [sys.executable, "-P", "-c", LOAD, name]
    done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode > 0:
        return done.stderr.strip().splitlines()[-1].removeprefix("OSError: ")
    return "crashes while it is loaded" if done.returncode else ""


def _look(framework: str) -> dict:
    record = FRAMEWORKS[framework]
    # Use a rank's environment variables, which affect what is loaded and printed.
    line = [sys.executable, "-P", "-c", LOOK, record.packages[0], record.module, record.horovod]
    env = {**os.environ, **record.settings, **record.quiet}
    try:
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"cannot be loaded within {SECONDS} s"}
    except (ValueError, IndexError):
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        return {"error": f"crashes while it is loaded ({how})"}


def doctor(verbose: bool) -> int:
    """Print a table of what is installed, and test it. Returns the exit code.

    0 means that at least one framework works on two ranks, and nothing installed is broken.
    """
    rows: list[tuple[str, str, str]] = [
        ("Python", platform.python_version(), ""),
        ("cores", f"{os.cpu_count()} ({len(os.sched_getaffinity(0))} usable)", ""),
        *(
            (
                one.name,
                find_tool(one.tool or one.name) or ("missing" if one.tool else "built in"),
                "" if _usable(one) else one.install,
            )
            for one in startable()
        ),
        ("Horovod", horovod(), "" if horovod() != MISSING else missing_fix()),
    ]
    records = [one for one in FRAMEWORKS.values() if version(one.packages[0]) or not one.optional]
    engine, faults = ({}, []) if use_stock() else _engine()
    rows += faults
    unusable = [one for one in records if use_stock() and not one.horovod]
    rows += [(one.name, "needs the engine", install_fix("--bindings both")) for one in unusable]
    all_facts = {one.name: engine | _look(one.name) for one in records if one not in unusable}
    for framework, facts in all_facts.items():
        record = FRAMEWORKS[framework]
        if version(record.packages[0]) is None:
            rows.append((framework, "missing", record.install))
        elif "error" in facts:
            rows.append((framework, facts["error"], record.repair))
        else:
            parts = ", ".join(
                name.upper() if name != "gloo" else "Gloo" for name in ("mpi", "gloo", "nccl") if facts[name]
            )
            what = f"{facts['version']}; Horovod with {parts or 'nothing'}; {facts['gpus']} GPUs"
            rows.append((framework, what, _advice(facts, record.tested)))
    print(table(["what", "found", "what to do"], rows), flush=True)
    print(f"\nwhat each of {RANKS} ranks on this host gets (what you set yourself stays):", flush=True)
    print(table(["setting", "value", "chosen by"], _settings()), flush=True)
    # Test each framework with each launcher of the same library.
    usable = [framework for framework, facts in all_facts.items() if "error" not in facts]
    print(f"\n{RANKS}-rank allreduce on this host (the time of a call, and bytes / time):", flush=True)
    probes = [(f, one) for f in usable for one in startable() if _can(all_facts[f], one)]
    results = [_probe(framework, one.name, verbose) for framework, one in probes]
    nothing = "not tried: neither a framework nor a launcher for it works here; see 'what to do' above"
    print(table(["framework", "launcher", *SIZES, "verdict"], results) if results else nothing)
    broken = any(
        "error" in facts and version(FRAMEWORKS[framework].packages[0]) for framework, facts in all_facts.items()
    )
    return 0 if results and not faults and not broken and all(row[-1] == "ok" for row in results) else 1


def _settings() -> list[tuple[str, str, str]]:
    """List the settings of a rank of ``-np``: threads, binding, and variables of Horovod, MPI and the frameworks."""
    rank = World(0, RANKS, 0, RANKS)
    count = threads("auto", rank)
    chosen = {k: v for framework in FRAMEWORKS for k, v in rank_settings(rank, framework, count, False).items()}
    rows = [("threads", str(count), "hvd_train" if "OMP_NUM_THREADS" not in os.environ else "you")]
    share = len(os.sched_getaffinity(0)) // RANKS
    rows.append(("binding (-np)", f"to {amount(share, 'core')} each" if share else "none", "hvd_train"))
    for name, value in chosen.items():
        rows.append((name, os.environ.get(name, value), "you" if name in os.environ else "hvd_train"))
    return rows


def _can(facts: dict, launcher: Launcher) -> bool:
    return _usable(launcher) and facts[launcher.library]


def _usable(launcher: Launcher) -> bool:
    try:
        return launcher.usable()
    except ConfigError:  # there is no Horovod, which has a row of its own
        return False


def _advice(facts: dict, tested: str) -> str:
    if facts["gpus"] and not facts["nccl"]:
        return "GPUs, but Horovod has no NCCL: run scripts/setup --gpu"
    # Where the engine has MPI and the host has none, the row of mpirun says how to get it.
    if not facts["mpi"] and not mpi_built():
        return f"for MPI: {install_fix('--mpi wheel', PIP_MPI)}"
    known = not tested or facts["version"].split(".")[:2] == tested.split(".")
    return "" if known else f"hvd_train is tested with {tested}"


def _probe(framework: str, launcher: str, verbose: bool) -> tuple[str, ...]:
    line = command(RANKS, launcher, ["probe", "--framework", framework])
    try:
        done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return (framework, launcher, *["-"] * len(SIZES), f"no answer in {SECONDS} s")
    answers = [text[text.index("{") :] for text in done.stdout.splitlines() if '"allreduce"' in text]
    if done.returncode or not answers:
        if verbose:
            print(done.stdout, done.stderr, file=sys.stderr)
        return (framework, launcher, *["-"] * len(SIZES), f"failed with exit code {done.returncode} (see -v)")
    seconds = json.loads(answers[0])["allreduce"]
    return (framework, launcher, *shown(seconds), "ok")


def shown(seconds: Mapping[str, float]) -> list[str]:
    """Return a table cell for each of ``SIZES``."""
    return [f"{1e3 * seconds[name]:.2f} ms, {4 * size / seconds[name] / 1e9:.2f} GB/s" for name, size in SIZES.items()]


def probe(framework: str) -> int:
    """Run one rank of the doctor's test: check the sums of allreduces, and time them. Rank 0 prints JSON."""
    session = Session.prepare(framework)
    with session.opened() as communicator:
        seconds = reduced(communicator, session.module.cpu_ops())
        if communicator.rank == 0:
            print(json.dumps({"allreduce": seconds}), flush=True)
    return 0


def reduced(communicator: Communicator, ops: Any) -> dict[str, float]:
    """Return {name of ``SIZES``: median seconds of an allreduce}. Raises TrainError if a sum is wrong."""
    seconds = {}
    for name, size in SIZES.items():
        # Rank r adds r + 1, so the sum is n (n + 1) / 2, exact in float32. Checked, because a wrong sum is worse than
        # none.
        x = ops.from_numpy(np.full(size, communicator.rank + 1, np.float32))
        total = ops.to_numpy(communicator.synchronize(communicator.allreduce_async(x, f"check {name}")))
        expected = communicator.size * (communicator.size + 1) / 2
        if not (total == expected).all():
            raise TrainError(f"the ranks' sum is {total[0]}, not {expected}", where=f"allreduce of {name}")
        times = []
        for _ in range(REPEATS[name]):
            start = perf_counter()
            communicator.synchronize(communicator.allreduce_async(x, f"time {name}"))
            times.append(perf_counter() - start)
        seconds[name] = median(times)
    return seconds
