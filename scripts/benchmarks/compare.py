"""Compare our speed with other engines on the same work: the ranks of all engines are started once, and take turns.

All engines of a model wait stopped (SIGSTOP), so that they cost nothing. In each round each one runs for some seconds,
in random order. Ratios are taken within a round. The table has their median with its 95 % bootstrap interval. "ours
again" is a second copy of ours: its interval shows the noise of the machine. CPU seconds per step and peak memory are
the kernel's counts.

``--before CHECKOUT``: compare each engine of ours with the same one of another checkout, pair by pair.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import tables
from work import MODELS, RANKS, ROOT

from hvd_train.frameworks import KERNELS
from hvd_train.launch.launchers.installed import find_tool
from hvd_train.launch.start import command, environment

START_SECONDS, QUIET_SECONDS = 600, 0.3
WARM_STEPS, SLOW_WARM_STEPS = 24, 8  # a step of ResNet-18 takes up to a second
SLOW = ("resnet", "bert", "pyramidnet")
LARGE = {"ours", "ours again", "DDP", "MultiWorker", "copies", "one process"}  # on BERT, PyramidNet
# Engines that wait at the same time as ours: they must fit into memory (the MLP: 2 GB for two ranks).
TOGETHER = dict.fromkeys(MODELS, 20) | {"mlp": 6, "bert": 2, "pyramidnet": 2}
TOLERANCE = 2e-3  # relative, of the first losses: float32 with sums in another order
PAIRS_A_START = 2  # rounds of ours and before, without a restart
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Engine:
    """An engine to start: ``launcher`` mpirun, gloo (horovodrun --gloo), torchrun, workers (TF_CONFIG), copies, one."""

    framework: str
    name: str
    launcher: str
    exchange: dict = field(default_factory=dict)
    root: Path = ROOT  # the checkout whose code runs


# See engines.py. They run if they are named: other checkouts may not have them.
WITH_MORE_KEYS = ("ours (compiled)", "ours (ema)", "ours (groups)")


def engines(framework: str, model: str) -> list[Engine]:
    ours = [
        Engine(framework, "ours", "mpirun"),
        Engine(framework, "ours again", "mpirun"),
        Engine(framework, "ours (Gloo)", "gloo"),
        Engine(framework, {"pytorch": "ours (own loop)", "tensorflow": "ours (model.fit)"}[framework], "mpirun"),
    ]
    ours += [Engine(framework, name, "mpirun") for name in WITH_MORE_KEYS]
    if framework == "tensorflow":
        names = "ours (step by step)", "ours (model.fit by 10)"
        ours += [Engine(framework, name, "mpirun") for name in names]
    alone = [
        Engine(framework, "copies", "copies"),
        Engine(framework, "one process", "one"),
    ]
    if framework == "pytorch":
        peers = [Engine(framework, name, "torchrun") for name in ("DDP", "DDP fp16", "DDP PowerSGD")]
        if model in ("cnn", "resnet"):  # the memory layout that ours chooses itself
            peers.append(Engine(framework, "DDP (channels last)", "torchrun"))
            alone.append(Engine(framework, "copies (channels last)", "copies"))
        peers += [Engine(framework, name, "torchrun") for name in ("Lightning", "Accelerate")]
        if find_spec("horovod"):  # scripts/setup --bindings both
            peers.append(Engine(framework, "Horovod", "mpirun"))
        return [*ours, *peers, *alone]
    # Legacy Keras does not support the layers of these two.
    peers = [] if model in ("gpt", "thin") else [Engine(framework, "MultiWorker", "workers")]
    return [*ours, *peers, *alone]


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in held]
    for s in held:
        s.close()
    return ports


Lines = Callable[[Engine, list[str]], list[tuple[list[str], dict[str, str]]]]


def on_this_host(engine: Engine, work: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Return the command lines that start an engine's ranks, each with its environment."""
    python, launcher = sys.executable, engine.launcher
    if launcher == "mpirun" and engine.name == "Horovod":  # with the flags of Horovod's documentation
        flags = ["--bind-to", "none", "--map-by", "slot:oversubscribe"]
        return [([str(find_tool("mpirun")), "-np", str(RANKS), *flags, python, *work], {})]
    if launcher in ("mpirun", "gloo"):
        return [(command(RANKS, {"gloo": "horovodrun"}.get(launcher, launcher), [], program=[python, *work]), {})]
    if launcher == "torchrun":
        line = [str(find_tool("torchrun")), "--nproc-per-node", str(RANKS), "--rdzv-backend", "c10d"]
        return [
            ([*line, "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}", *work], {"GLOO_SOCKET_IFNAME": "lo"}),
        ]
    if launcher == "workers":
        hosts = [f"127.0.0.1:{port}" for port in free_ports(RANKS)]
        places = [{"cluster": {"worker": hosts}, "task": {"type": "worker", "index": i}} for i in range(RANKS)]
        return [([python, *work], {"TF_CONFIG": json.dumps(p), "RANK": str(i)}) for i, p in enumerate(places)]
    if launcher == "copies":
        return [(["taskset", "-c", str(i), python, *work], {"COPY": str(i)}) for i in range(RANKS)]
    return [([python, *work], {})]


class Running:
    """The started ranks of one engine, stopped and continued together. ``label``: its name in tables."""

    def __init__(
        self, engine: Engine, model: str, folder: Path, lines: Lines, warm_steps: int = WARM_STEPS, least_steps: int = 4
    ) -> None:
        self.engine, self.model = engine, model
        self.label = engine.name if engine.root == ROOT else engine.name.replace("ours", "before")
        self.count = folder / f"{engine.framework}-{self.label}".replace(" ", "-")
        self.log = self.count.with_suffix(".log")
        self.ranks = 1 if engine.launcher == "one" else RANKS
        self.parents: list[subprocess.Popen] = []
        self.rates: list[float] = []
        self.cpu: list[float] = []
        self.peak = 0.0
        self.warm_steps, self.least_steps = warm_steps, least_steps
        self._start(lines)

    def _start(self, lines: Lines) -> None:
        engine = self.engine
        program = engine.root / "scripts" / "benchmarks" / "engines.py"
        work = [str(program), engine.framework, engine.name, self.model, "--count", str(self.count)]
        if engine.exchange:
            work += ["--exchange", json.dumps(engine.exchange)]
        env = environment() | {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
        env["PYTHONPATH"] = str(engine.root)
        env |= KERNELS  # the others get them too: the exchange is compared
        # Ranks that wait for their turn are neither stalled nor lost.
        env |= {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "36000"}
        if not engine.name.startswith("ours"):  # ours sets its own
            env["OMP_NUM_THREADS"] = str(os.cpu_count() if engine.launcher == "one" else 1)
        with open(self.log, "w") as log:
            for line, extra in lines(engine, work):
                self.parents.append(
                    subprocess.Popen(
                        line, env=env | extra, stdout=log, stderr=log, cwd=engine.root, start_new_session=True
                    )
                )

    def warm(self) -> str:
        """Wait until the steps run evenly, then stop the ranks; return what went wrong, or ""."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if any(p.poll() is not None for p in self.parents):
                return self._last_words()
            files = [self.count.with_name(f"{self.count.name}.{r}") for r in range(self.ranks)]
            if all(f.exists() and f.stat().st_size == 24 for f in files):
                self.maps = [np.memmap(f, np.int64, "r", shape=(3,)) for f in files]
                if all(m[0] >= self.warm_steps for m in self.maps):
                    self.pids = [int(m[2]) for m in self.maps]
                    self.stop()
                    return ""
            time.sleep(0.05)
        return f"no {self.warm_steps} steps in {START_SECONDS} s"

    def _last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return (errors[:1] or lines[-1:] or ["it ended without a word"])[0][:160]

    def stop(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)

    def go(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGCONT)

    def _mark(self) -> tuple[int, int]:
        while True:  # retry: the two numbers are not written at once
            first = int(self.maps[0][0]), int(self.maps[0][1])
            if first == (int(self.maps[0][0]), int(self.maps[0][1])):
                return first

    def _cpu(self) -> float:
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self.pids]
        return sum(int(f[11]) + int(f[12]) for f in fields) / TICK

    def block(self, seconds: float) -> None:
        """Run one turn: at least ``seconds`` and ``least_steps``, from the end of a step to the end of a step."""
        self.go()
        time.sleep(QUIET_SECONDS)
        steps, began = self._when(lambda mark, first: mark[0] > first[0], 0.001)
        cpu = self._cpu()
        enough = lambda mark, _: mark[0] - steps >= self.least_steps and mark[1] - began >= seconds * 1e9  # noqa: E731
        now_steps, now = self._when(enough, 0.02)
        self.cpu.append((self._cpu() - cpu) / (now_steps - steps))
        self.stop()
        self.rates.append((now_steps - steps) / (now - began) * 1e9 * RANKS * MODELS[self.model][2])

    def _when(self, reached: Callable, pause: float) -> tuple[int, int]:
        first, deadline = self._mark(), time.monotonic() + START_SECONDS
        while True:
            mark = self._mark()
            if reached(mark, first):
                return mark
            if time.monotonic() > deadline or any(p.poll() is not None for p in self.parents):
                raise RuntimeError(self._last_words())
            time.sleep(pause)

    def losses(self) -> np.ndarray | None:
        files = [Path(f"{self.count}.{r}.losses") for r in range(self.ranks)]
        files = [f for f in files if f.exists()]
        return np.mean([json.loads(f.read_text()) for f in files], axis=0) if files else None

    def end(self) -> None:
        """Record the peak memory, and end all processes, in whatever state they are."""
        for pid in getattr(self, "pids", []):
            with suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                peak = [int(x.split()[1]) for x in status.splitlines() if x.startswith("VmHWM")]
                self.peak = max([self.peak, *(k / 1024 for k in peak)])
        for parent in self.parents:
            with suppress(psutil.NoSuchProcess):
                top = psutil.Process(parent.pid)
                for process in [*top.children(recursive=True), top]:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            parent.wait()
        for pid in getattr(self, "pids", []):  # if the launcher has died, init is their parent
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def add_when_warm(running: list[Running], one: Running) -> dict[str, dict]:
    """Add a started engine to ``running`` when it is warm; return {its name: what went wrong} or {}."""
    running.append(one)  # first, so that it is ended with the others whatever happens
    problem = one.warm()
    if not problem:
        return {}
    one.end()
    running.remove(one)
    print(f"  {one.label}: {problem}", flush=True)
    return {one.label: {"error": problem}}


def in_turns(running: list[Running], rounds: int, seconds: float) -> dict[str, dict]:
    """Run all rounds; an engine that ends early is removed from ``running`` and reported."""
    failed = {}
    for _ in range(rounds):
        for one in random.sample(running, len(running)):
            try:
                one.block(seconds)
            except (RuntimeError, OSError) as error:
                one.end()
                running.remove(one)
                failed[one.label] = {"error": f"ended while it was measured: {error}"}
                print(f"  {one.label}: {error}", flush=True)
    return failed


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Return the median with its 95 % bootstrap interval."""
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return median(ratios), float(low), float(high)


def compare(framework: str, model: str, rounds: int, seconds: float, only: list[str] | None = None) -> dict:
    """Compare all engines of a framework on one model; return {engine: figures}, in samples/s of both ranks."""
    found = [e for e in engines(framework, model) if (e.name in only if only else e.name not in WITH_MORE_KEYS)]
    ours, *others = (e for e in found if only or TOGETHER[model] > 2 or e.name in LARGE)
    results: dict[str, dict] = {}
    for first in range(0, len(others), TOGETHER[model]):  # ours is in every group; keep the first group's figure
        results = group([ours, *others[first : first + TOGETHER[model]]], model, rounds, seconds) | results
    return results or group([ours], model, rounds, seconds)


def paired(framework: str, model: str, rounds: int, seconds: float, before: Path, only: list[str] | None) -> dict:
    """Compare each engine of ours with the same one of the checkout ``before``; "ours again" shows the noise.

    Two processes with the same code may differ by up to 5 % in speed while they live. So both are restarted every few
    rounds, in alternating order, and a ratio is the median over the rounds of such a start.
    """
    ours = [e for e in engines(framework, model) if e.name.startswith("ours")]
    ours = [e for e in ours if (e.name in only if only else e.name not in WITH_MORE_KEYS)]
    results: dict[str, dict] = {}
    for engine in ours:
        pair = [ours[0], engine] if engine.name == "ours again" else [engine, replace(engine, root=before)]
        orders = [pair[:: (-1) ** i] for i in range(-(-rounds // PAIRS_A_START))]
        starts = [group(order, model, PAIRS_A_START, seconds) for order in orders]
        names, first = list(starts[0]), starts[0]
        if all("rates" in start.get(name, {}) for start in starts for name in names):
            pairs = [zip(*(start[name]["rates"] for name in names), strict=True) for start in starts]
            ratio = interval([median(a / b for a, b in rounds) for rounds in pairs])
            first[names[1]] |= {"ours_is_faster_by": ratio[0], "interval": ratio[1:]}
            for name in names:
                values = [median(start[name]["rates"]) for start in starts]
                cpu = median(start[name]["cpu_seconds_per_step"] for start in starts)
                first[name] |= {"samples_per_second": median(values), "rates": values, "cpu_seconds_per_step": cpu}
        results = first | results
    return {name: results[name] for name in dict.fromkeys([*(e.name for e in ours), *results])}


def group(chosen: list[Engine], model: str, rounds: int, seconds: float) -> dict:
    """Run the engines in turns; ratios are relative to the first."""
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        running: list[Running] = []
        try:
            for engine in chosen:
                steps = SLOW_WARM_STEPS if model in SLOW else WARM_STEPS
                results |= add_when_warm(running, Running(engine, model, Path(folder), on_this_host, steps))
            results |= in_turns(running, rounds, seconds)
        finally:
            for one in running:
                one.end()
        base = running[0]
        reference = base.losses()
        for one in running:
            losses = one.losses()
            ratio = interval([b / r for b, r in zip(base.rates, one.rates, strict=True)])
            results[one.label] = {
                "samples_per_second": median(one.rates),
                "ours_is_faster_by": ratio[0],
                "interval": ratio[1:],
                "cpu_seconds_per_step": median(one.cpu),
                "peak_rss_mb": round(one.peak),
                "first_losses": None if losses is None else [round(float(x), 6) for x in losses],
                "same_losses": _same(one, losses, reference),
                "rates": [round(r, 1) for r in one.rates],
            }
    return results


def _same(one: Running, losses, reference) -> str:
    """Return whether the first losses equal ours: "yes", "no" with the difference, or "-" if they are not compared."""
    if losses is None or reference is None or one.engine.launcher == "copies":
        return "-"
    differ = float(np.max(np.abs(losses - reference) / np.abs(reference)))
    if differ < TOLERANCE:
        return "yes"
    cause = ", batch norm over all samples" if one.model == "resnet" and one.engine.launcher == "one" else ""
    return f"no ({differ:.1e}{cause})"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench compare", description=__doc__)
    parser.add_argument("--frameworks", default="pytorch,tensorflow")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--engines", default="", help="these alone, by name; 'ours' is always there")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="against the code there, pair by pair")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a block, at least four steps")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "runs" / "bench-compare", help="folder")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exits through the clean-up, which ends all ranks
    only = ["ours", *options.engines.split(",")] if options.engines else None
    options.output.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict] = {}
    words = [f"scripts/bench compare {' '.join(arguments)}".strip(), machine(), time.strftime("%Y-%m-%d"), ""]
    for framework in options.frameworks.split(","):
        results[framework] = {}
        for model in options.models.split(","):
            print(f"== {framework}, {model}: {options.rounds} rounds", flush=True)
            size = framework, model, options.rounds, options.seconds
            before = options.before and options.before.resolve()
            results[framework][model] = paired(*size, before, only) if before else compare(*size, only)
            print(tables.comparison(framework, {model: results[framework][model]}), flush=True)
            (options.output / "compare.json").write_text(
                json.dumps({"about": words, "results": results}, indent=1) + "\n"
            )
    text = "\n\n".join(
        [*words, tables.overview(results), *(tables.comparison(f, models) for f, models in results.items())]
    )
    (options.output / "compare.md").write_text(text)
    tables.picture(results, options.output / "compare.png")
    print(f"{options.output}: compare.json, compare.md, compare.png")


def machine() -> str:
    models = [x.partition(":")[2].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    memory = psutil.virtual_memory().total / 2**30
    return f"{models[0] if models else 'CPU'}, {os.cpu_count()} cores, {memory:.0f} GiB"
