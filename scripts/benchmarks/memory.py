"""Memory and CPU share of each rank on BERT, whose outputs are large.

A parallel training that gathers all outputs on rank 0 ("gathered": torch.nn.DataParallel's method, with processes)
needs more of one rank than of the others, which wait for it. Engines run alone, one after the other.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import psutil
from compare import SLOW_WARM_STEPS, Engine, Running, machine, on_this_host
from tables import markdown
from work import MODELS, ROOT

BACK = {"MALLOC_TRIM_THRESHOLD_": str(1 << 17)}  # the C library returns what a step frees to the kernel
ENGINES = {
    "ours, PyTorch": (Engine("pytorch", "ours", "mpirun"), {}),
    "ours, PyTorch, no memory kept": (Engine("pytorch", "ours", "mpirun"), BACK),
    "DDP": (Engine("pytorch", "DDP", "torchrun"), {}),
    "gathered on rank 0": (Engine("pytorch", "gathered", "torchrun"), {}),
    "ours, TensorFlow": (Engine("tensorflow", "ours", "mpirun"), {}),
    "ours, TensorFlow, no memory kept": (Engine("tensorflow", "ours", "mpirun"), BACK),
}


def measured(engine: Engine, variables: dict[str, str], model: str, steps: int) -> list[dict[str, float]]:
    """Return each rank's peak resident memory (MB), CPU seconds a step, and their share of the wall time."""

    def lines(engine: Engine, work: list[str]) -> list[tuple[list[str], dict[str, str]]]:
        return [(line, extra | variables) for line, extra in on_this_host(engine, work)]

    with tempfile.TemporaryDirectory() as folder:
        one = Running(engine, model, Path(folder), lines, SLOW_WARM_STEPS)
        try:
            problem = one.warm()
            if problem:
                raise RuntimeError(f"{engine.name}: {problem}")
            processes = [psutil.Process(pid) for pid in one.pids]
            one.go()
            first, began, before = int(one.maps[0][0]), time.monotonic(), [cpu(p) for p in processes]
            while one.maps[0][0] - first < steps:
                time.sleep(0.05)
                if any(p.poll() is not None for p in one.parents):
                    raise RuntimeError(f"{engine.name} ended: {one.log.read_text()[-300:]}")
            done, wall = int(one.maps[0][0]) - first, time.monotonic() - began
            used = [cpu(p) - b for p, b in zip(processes, before, strict=True)]
            return [
                {"peak_mb": peak(p.pid), "cpu_seconds_per_step": u / done, "utilization": u / wall}
                for p, u in zip(processes, used, strict=True)
            ]
        finally:
            one.end()


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def peak(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(x.split()[1]) / 1024 for x in status.splitlines() if x.startswith("VmHWM"))


def above(values: list[float]) -> str:
    return f"{max(values) / min(values) - 1:.1%}"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench memory", description=__doc__)
    parser.add_argument("--model", default="bert", choices=MODELS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "runs" / "bench-memory.json")
    options = parser.parse_args(arguments)
    results: dict[str, list[dict[str, float]]] = {}
    rows = []
    for name, (engine, variables) in ENGINES.items():
        results[name] = ranks = measured(engine, variables, options.model, options.steps)
        columns = {key: [rank[key] for rank in ranks] for key in ranks[0]}
        rows.append(
            [name]
            + [f"{x:,.0f}" for x in columns["peak_mb"]]
            + [above(columns["peak_mb"])]
            + [f"{x:.2f}" for x in columns["cpu_seconds_per_step"]]
            + [above(columns["cpu_seconds_per_step"])]
            + [f"{x:.0%}" for x in columns["utilization"]]
        )
        print(f"{name}: {ranks}", flush=True)
    header = ["engine", "MB, rank 0", "rank 1", "one above the other", "CPU s a step, rank 0", "rank 1"]
    print(f"\n{options.model}, {options.steps} steps; {machine()}\n")
    print(markdown([*header, "one above the other", "utilization, rank 0", "rank 1"], rows))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n")
