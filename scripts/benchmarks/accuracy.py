"""The cost of each compression in accuracy: SINGA's CNN on Fashion-MNIST, 2 ranks, several seeds.

Learning rate and batch size are those of scripts/configs/fashion_mnist.yaml, with 5 epochs. The table has the
validation accuracy of each seed, and the difference of the mean from that without compression, in points.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import mean

import tables
from compare import machine
from work import FASHION, ROOT

# name: the keys under exchange.
SETTINGS: dict[str, dict] = {
    "none": {},
    "fp16": {"compression": "fp16"},
    "bf16": {"compression": "bf16"},
    "int8": {"compression": "int8"},
    "int4": {"compression": "int4"},
    "topk 1 %": {"compression": "topk", "ratio": 0.01},
    "threshold 0.001": {"compression": "threshold", "threshold": 0.001},
    "powersgd rank 4": {"compression": "powersgd", "rank": 4},
    "delayed": {"mode": "delayed"},
    "partial 0.25": {"mode": "partial", "partial_fraction": 0.25},
    "local_sgd 8": {"mode": "local_sgd", "local_steps": 8},
}


def accuracy(framework: str, exchange: dict, seed: int, epochs: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        sets = [f"framework={framework}", f"max_epochs={epochs}", f"exchange={json.dumps(exchange)}"]
        sets += ["tensorboard=false", "checkpoint.every_n_epochs=0", f"check_val_every_n_epoch={epochs}"]
        line = [str(ROOT / ".venv" / "bin" / "hvd-train"), "fit", "-np", "2", "--seed", str(seed), "--run-dir", folder]
        line += ["-c", str(ROOT / "scripts" / "configs" / "fashion_mnist.yaml")]
        subprocess.run([*line, *(w for s in sets for w in ("--set", s))], stdout=subprocess.DEVNULL, check=True)
        return json.loads((Path(folder) / "summary.json").read_text())["val_accuracy"]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench accuracy", description=__doc__)
    parser.add_argument("--frameworks", default="pytorch,tensorflow")
    parser.add_argument("--compressions", default=",".join(SETTINGS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "runs" / "bench-accuracy", help="folder")
    options = parser.parse_args(arguments)
    if not FASHION.exists():
        parser.error(f"there is no {FASHION}: apt install dataset-fashion-mnist")
    options.output.mkdir(parents=True, exist_ok=True)
    about = [f"scripts/bench accuracy {' '.join(arguments)}".strip(), machine(), time.strftime("%Y-%m-%d")]
    results: dict[str, dict[str, list[float]]] = {}
    for framework in options.frameworks.split(","):
        results[framework] = {}
        for name in options.compressions.split(","):
            runs = [accuracy(framework, SETTINGS[name], seed, options.epochs) for seed in range(options.seeds)]
            results[framework][name] = runs
            print(f"{framework:<12}{name:<18}" + "  ".join(f"{x:.4f}" for x in runs), flush=True)
            (options.output / "accuracy.json").write_text(
                json.dumps({"about": about, "results": results}, indent=1) + "\n"
            )
    rows = []
    for framework, ways in results.items():
        base = mean(ways["none"]) if "none" in ways else None
        for name, runs in ways.items():
            points = "" if base is None else f"{100 * (mean(runs) - base):+.2f}"
            rows.append([framework, name, *(f"{x:.4f}" for x in runs), f"{mean(runs):.4f}", points])
    header = ["framework", "exchange", *(f"seed {s}" for s in range(options.seeds)), "mean", "points"]
    (options.output / "accuracy.md").write_text("\n\n".join([*about, tables.markdown(header, rows)]))
    print(tables.markdown(header, rows))
