"""Predicted against measured: ``hvd-train plan`` beside real trainings, for models, frameworks, ranks and links.

On this host a cell is a model, a framework and a number of ranks. A study (``hvd-train scale --weak``) measures it,
half before and half after the plan, so that a drift of the machine hits both. The plan tries these ranks too, also
more than cores. Over links (``--rates``, network namespaces as root) a cell is a training on as many hosts as there are
cores, and on more hosts a rehearsal: ranks that sleep the steps' own times and exchange for real.

Baselines: linear (N times one rank), and a scaling law through the study's smaller numbers of ranks, where there are
two or more: the universal law where there are three, else Amdahl's.

With ``--target`` the models are also trained to it, ``--seeds`` times on each number of ranks, once with the global
batch kept (strong) and once with a rank's batch kept (weak). The seconds on the most ranks are predicted from the
samples/s of the plan and the samples that trainings on fewer ranks needed.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import modes
from compare import machine
from work import MODELS, ROOT, settings

from hvd_train.config import Config, load_config, resolved_yaml
from hvd_train.errors import TrainError
from hvd_train.insight import calibration, plan
from hvd_train.insight.prediction import Link, Prediction
from hvd_train.launch.start import environment
from hvd_train.report.text_tables import table
from hvd_train.scaling import study as studies
from hvd_train.scaling.points import aim, measured

CHOICE = 1.05  # a choice is good if the best takes at most so much less time
REHEARSED = 4.0  # seconds of a rehearsal
TRAINED = 60.0  # seconds of trainings over a link, with their starts
TO_TARGET = ("framework", "model", "kind", "ranks", "samples", "measured", "predicted", "error")
COLUMNS = ("framework", "model", "where", "ranks", "how", "measured", "predicted", "error", "inside", "linear", "law")


def say(text: str) -> None:
    print(text, flush=True)


def study(file: Path, folder: Path, ranks: Sequence[int], repeats: int, seconds: float) -> dict[int, list[float]]:
    """Measure, or go on to so many repeats; return samples/s of each run, by ranks."""
    words = ["scale", "-c", str(file), "--weak", "--ranks", ",".join(map(str, ranks)), "--seconds", f"{seconds:g}"]
    words += ["--repeats", str(repeats), "--run-dir", str(folder), *(["--resume"] if folder.exists() else [])]
    line = [sys.executable, "-m", "hvd_train", *words]
    done = subprocess.run(line, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        say(done.stderr[-2000:])
    return {one.ranks: [run.rate for run in one.runs] for one in measured(studies.load(folder)).known}


def on_this_host(name: dict, config: Config, options: Any, folder: Path) -> tuple[list[dict], calibration.Calibration]:
    """Return the cells of this host, and the calibration."""
    file, cores = folder / "job.yaml", calibration.host_cores()
    file.write_text(resolved_yaml(config))
    ranks = [int(n) for n in options.ranks.split(",")]
    half = max(options.repeats // 2, 1)
    study(file, folder / "study", ranks, half, options.seconds)
    placements = calibration.placements(cores, config.threads, [n for n in ranks if n <= calibration.TRIED * cores])
    start = calibration.on_ranks("auto")
    found = calibration.measure(config, placements, options.plan_seconds, start, folder / "plan", lambda line: None)
    rates = study(file, folder / "study", ranks, options.repeats, options.seconds)
    rows = [row for row in plan.rows(config, found, ranks=ranks, studied=rates) if row.studied]
    cells = []
    for row in rows:
        true, others = float(row.studied or 0), list(plan.baselines(rows, row).values())
        linear, law = ([rate / true - 1 for rate in others] + [None, None])[:2]
        cells.append(name | compared(row.at, true) | {"where": "here", "how": row.source, "linear": linear, "law": law})
    return cells, found


def to_target(name: dict, config: Config, found: calibration.Calibration, options: Any, folder: Path) -> list[dict]:
    """Return the cells of trainings to the target: seconds measured and predicted on each number of ranks but the
    fewest."""
    cells = []
    ranks = [int(n) for n in options.ranks.split(",")]
    lasting = {"max_epochs": options.epochs, "check_val_every_n_epoch": 1}
    for kind in (plan.STRONG, plan.WEAK):
        file, own = folder / f"{kind}.yaml", folder / f"target-{kind}"
        file.write_text(resolved_yaml(load_config(base=config.model_dump(mode="json") | lasting)))
        words = ["scale", "-c", str(file), f"--{kind}", "--ranks", options.ranks, "--seconds", "1", "--repeats", "1"]
        words += ["--target", options.target, "--seeds", str(options.seeds), "--run-dir", str(own)]
        subprocess.run([sys.executable, "-m", "hvd_train", *words], cwd=ROOT, env=environment(), check=True)
        aimed = aim(measured(studies.load(own)))
        rows = plan.rows(plan.with_batches(config, kind), found, ranks=ranks, aim=aimed)
        best = {n: max((row.at for row in rows if row.at.ranks == n), key=lambda at: at.threads) for n in ranks}
        for n in ranks[1:]:
            one = aimed.trainings[n] if aimed else None
            samples = aimed.samples(one.batch, n) if aimed and one else None
            if not one or not samples or not math.isfinite(true := median(one.seconds or [math.inf])):
                say(f"{name['model']}, {kind}, {n} ranks: the target was not reached")
                continue
            cell = {"kind": kind, "ranks": n, "samples": f"{median(one.samples):,.0f}, expected {samples:,.0f}"}
            taken = samples / best[n].rate
            cells.append(name | cell | {"measured": true, "predicted": taken, "error": taken / true - 1})
    return cells


def compared(at: Prediction, true: float) -> dict[str, Any]:
    """Return a prediction beside the measured samples/s."""
    inside = at.ranks * at.batch / at.high <= true <= at.ranks * at.batch / at.low
    error = at.rate / true - 1
    return {"ranks": at.ranks, "measured": true, "predicted": at.rate, "error": error, "inside": inside}


def over_links(name: dict, config: Config, found: calibration.Calibration, options: Any, folder: Path) -> list[dict]:
    """Return the cells of rehearsals over links."""
    cells, model = [], found.model(config.exchange.compression)
    key = max((key for key in model.placements if key[0] == 1), key=lambda key: -key[1])
    for rate in filter(None, options.rates.split(",")):
        for hosts in map(int, options.hosts.split(",")):
            where, batch, exchange = plan.parse_link(rate), plan.batch_of_rank(config, hosts), None
            if hosts > found.cores:  # they are namespaces of one machine, whose ranks take turns to copy and add
                turns = hosts / found.cores
                exchange = turns * model.exchange(hosts, 1, Link(math.inf, 0.0))
                exchange += model.exchange(hosts, 1, where) - model.exchange(hosts, 1, Link(math.inf, 0.0))
            at = model.predict(hosts, 1, key[1], where, batch, exchange)
            own = plan.slept_as(model, key, at.batch)
            trains = hosts <= found.cores  # a core for each host
            try:
                with modes.started(rate, hosts, folder) as (start, _):
                    if trains:
                        true = trained(config, hosts, start, folder / f"{rate}-{hosts}")
                    else:
                        taken = calibration.rehearse(config, hosts, own, REHEARSED, start, folder / f"{rate}-{hosts}")
                        true = hosts * at.batch / (sum(taken) / len(taken))
            except TrainError as error:
                say(f"{name['model']}, {rate}, {hosts} hosts: {error}")
                continue
            cell = compared(at, true) | {"where": rate, "how": "trained" if trains else "rehearsed"}
            cells.append(name | cell | {"linear": hosts * at.batch / at.own / true - 1, "law": None})
    return cells


def trained(config: Config, hosts: int, start: calibration.Start, folder: Path) -> float:
    """Return samples/s of a real training, of one rank of one thread on each host."""
    key = (hosts, 1)
    found = calibration.measure(config, [key], TRAINED, start, folder, lambda line: None)
    return median(run["batch"] / calibration.point_of(run, key).step for run in found.figures[key])


def summary(cells: Sequence[dict]) -> list[str]:
    """Return the figures over all cells, and the cells that lose."""
    lines = []
    kinds = {
        "tried": "measured",
        "extrapolated on this host": "predicted",
        "trained over links": "trained",
        "over links": "rehearsed",
    }
    for title, how in kinds.items():
        some = [one for one in cells if one["how"] == how]
        if not some:
            continue
        errors = [abs(one["error"]) for one in some]
        text = (
            f"{title}: {len(some)} cells, median error {100 * median(errors):.1f} %, largest {100 * max(errors):.1f} %"
        )
        text += f"; {sum(one['inside'] for one in some)} of {len(some)} within the 90 % interval"
        for law in ("linear", "law"):
            if values := [abs(one[law]) for one in some if one[law] is not None]:
                text += f"; {law}: median error {100 * median(values):.1f} %"
        lines.append(text)
    groups: dict[tuple, list[dict]] = {}
    for one in cells:
        if one["where"] == "here":
            groups.setdefault((one["framework"], one["model"]), []).append(one)
    good = 0
    for group in groups.values():
        taken = max(group, key=lambda one: one["predicted"])
        good += max(one["measured"] for one in group) <= CHOICE * taken["measured"]
    if groups:
        lines.append(f"choice of ranks: within 5 % of the best in {good} of {len(groups)}")
    lost = [one for one in cells if not one["inside"]]
    lines += [
        f"outside its interval: {one['framework']}, {one['model']}, {one['where']}, {one['ranks']} ranks: "
        f"{100 * one['error']:+.1f} %"
        for one in lost
    ]
    return lines


def summary_to_target(cells: Sequence[dict], target: str) -> list[str]:
    """Return the table of the trainings to the target, and the figures over it."""
    if not cells:
        return []
    rows = [
        [one["framework"], one["model"], one["kind"], str(one["ranks"]), one["samples"], f"{one['measured']:.3g}",
         f"{one['predicted']:.3g}", shown(one, "error")]
        for one in cells
    ]  # fmt: skip
    errors = [abs(one["error"]) for one in cells]
    figures = f"median error {100 * median(errors):.1f} %, largest {100 * max(errors):.1f} %"
    return ["", table(TO_TARGET, rows), f"seconds to {target}: {len(cells)} cells, {figures}"]


def shown(cell: dict, column: str) -> str:
    value = cell[column]
    if column in ("measured", "predicted"):
        return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{100 * value:+.1f} %"
    return "-" if value is None else str(value)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench insight", description=__doc__)
    parser.add_argument("--frameworks", default="pytorch,tensorflow")
    parser.add_argument("--models", default="cnn,mlp,resnet,thin,gpt", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--ranks", default="1,2,4", help="on this host")
    parser.add_argument("--rates", default="", help="links to rehearse over, as in 100mbit,1gbit,10gbit (as root)")
    parser.add_argument("--hosts", default="2,4,8", help="hosts of the rehearsals")
    parser.add_argument("--repeats", type=int, default=4, help="runs of a study for each number of ranks")
    parser.add_argument("--seconds", type=float, default=5.0, help="of steps of each run of the study")
    parser.add_argument("--plan-seconds", type=float, default=60.0)
    parser.add_argument("--target", help="also train until then, as in val_accuracy=0.9")
    parser.add_argument("--seeds", type=int, default=3, help="trainings to the target")
    parser.add_argument("--epochs", type=int, default=10, help="of a training to the target, at most")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "runs" / "bench-insight", help="folder")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    about = [f"scripts/bench insight {' '.join(arguments)}".strip(), machine(), time.strftime("%Y-%m-%d")]
    cells: list[dict] = []
    trained: list[dict] = []
    for framework in options.frameworks.split(","):
        for model in options.models.split(","):
            name = {"framework": framework, "model": model}
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                config = load_config(base=settings(framework, model, {}) | {"run_dir": str(folder / "run")})
                try:
                    some, found = on_this_host(name, config, options, folder)
                    some += over_links(name, config, found, options, folder)
                    trained += to_target(name, config, found, options, folder) if options.target else []
                except TrainError as error:  # the other cells are kept
                    say(f"{framework}, {model}: {error}")
                    continue
            cells += some
            say(table(COLUMNS, [[shown(one, key) for key in COLUMNS] for one in some]))
            found_so_far = {"about": about, "cells": cells, "to_target": trained}
            (options.output / "insight.json").write_text(json.dumps(found_so_far, indent=1) + "\n")
    rows = table(COLUMNS, [[shown(one, key) for key in COLUMNS] for one in cells])
    last = [*summary(cells), *summary_to_target(trained, options.target)]
    (options.output / "insight.txt").write_text("\n".join([*about, "", rows, "", *last]) + "\n")
    say("\n".join(["", *last, f"{options.output}: insight.json, insight.txt"]))
