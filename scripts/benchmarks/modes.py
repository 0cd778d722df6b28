"""Compare every way to train in parallel, as ``hvd-train modes`` does: CNN, MLP and GPT over slow links.

Links are those of scripts/bench link (a network namespace for each rank, as root); ``--rates here`` uses none.
``--set exchange.mode=local_sgd --set exchange.local_steps=1000000`` makes local_sgd a step without any exchange.
``--accuracy`` adds the validation accuracy of SINGA's CNN on Fashion-MNIST, on this host: 5 epochs, 3 seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean

import link
import tables
from compare import Engine, machine
from work import FASHION, RANKS, ROOT, settings

from hvd_train.config import Config, load_config, resolved_yaml
from hvd_train.errors import ConfigError
from hvd_train.frameworks import KERNELS
from hvd_train.launch import logged
from hvd_train.launch.start import environment
from hvd_train.mode_comparison import results
from hvd_train.mode_comparison.turns import Limits, Result, Start, measure, on_ranks
from hvd_train.mode_comparison.ways import Way, ways

HERE = "here"


def over_the_link(agent: Path, ranks: int) -> Start:
    """Return a function that starts each rank in its own namespace."""
    lines = link.over_the_link(agent, ranks)
    more = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow", "PYTHONPATH": str(ROOT), **KERNELS}

    def start(words: list[str]) -> tuple[list[str], dict[str, str]]:
        ((line, extra),) = lines(Engine("", "modes", "mpirun"), ["-m", "hvd_train", *words])
        return line, environment() | more | {"HVD_TRAIN_TERMINAL": "0", "HOROVOD_STALL_CHECK_DISABLE": "1"} | extra

    return start


@contextmanager
def started(rate: str, ranks: int, folder: Path) -> Iterator[tuple[Start, str]]:
    """Yield a function that starts ranks, and the link's name with its measured speed."""
    if rate == HERE:
        yield on_ranks(["-np", str(ranks)]), "on this host"
        return
    with link.hosts(ranks):
        link.throttle(rate, ranks)
        yield over_the_link(link.remote_shell(folder), ranks), f"{rate}, measured {link.measured(rate):.2g} Gbit/s"


def accuracies(way: Way, config: Config, seeds: int) -> list[float] | str:
    """Return the validation accuracy of each seed, or why the way cannot run."""
    values = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            data = way.keys(config, RANKS) | {"seed": seed, "run_dir": str(folder / "run"), "tensorboard": False}
            data |= {"check_val_every_n_epoch": config.max_epochs}
            data["checkpoint"] |= {"every_n_epochs": 0, "save_last": False, "save_top_k": 0}
            try:
                (folder / "job.yaml").write_text(resolved_yaml(load_config(base=data)))
            except ConfigError as error:
                return str(error)
            line = [sys.executable, "-m", "hvd_train", "fit", "-np", str(RANKS), "-c", str(folder / "job.yaml")]
            if code := logged.run(line, environment(), folder / "log"):
                return logged.reason(folder / "log", code)
            values.append(json.loads((folder / "run" / "summary.json").read_text())["val_accuracy"])
    return values


def accuracy_table(framework: str, chosen: Sequence[Way], epochs: int, seeds: int) -> str:
    config = load_config(
        ROOT / "scripts" / "configs" / "fashion_mnist.yaml", [f"framework={framework}", f"max_epochs={epochs}"]
    )
    rows, base = [], None
    for way in chosen:
        runs = accuracies(way, config, seeds)
        if isinstance(runs, str):
            rows.append([way.name, *["-"] * (seeds + 1), f"cannot run: {runs.split(';')[0]}"])
            continue
        base = mean(runs) if base is None else base
        rows.append([way.name, *(f"{x:.4f}" for x in runs), f"{mean(runs):.4f}", f"{100 * (mean(runs) - base):+.2f}"])
        print(f"{framework}, {way.name}: {rows[-1][1:]}", flush=True)
    header = ["way", *(f"seed {seed}" for seed in range(seeds)), "mean", f"points from {chosen[0].name}"]
    return f"### {framework}, Fashion-MNIST, {epochs} epochs\n\n{tables.markdown(header, rows)}"


def longest_steps(measured: Sequence[Result]) -> str:
    """Return the longest step of each way as a multiple of its median; only for ways with one step per call."""
    ran = [one for one in measured if one.figures]
    # Queued steps take no time until they run together in one call.
    least = min((one.middle("ms") for one in ran), default=0.0) / 4
    ratios = [
        f"{one.way.name} {one.middle('longest_ms') / one.middle('median_ms'):.2g}"
        for one in ran
        if one.middle("median_ms") > least
    ]
    return f"the longest step, in medians of a way's steps: {', '.join(ratios) or 'several steps run in one call'}"


def plain(measured: Sequence[Result]) -> list[dict]:
    return [asdict(one) for one in measured]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench modes", description=__doc__)
    parser.add_argument("--frameworks", default="pytorch,tensorflow")
    parser.add_argument("--models", default="cnn,mlp,gpt")
    parser.add_argument("--rates", default="100mbit,1gbit", help=f"of {', '.join(link.RATES)}, {HERE}")
    parser.add_argument("--modes", help="these ways alone, as hvd-train modes takes them")
    parser.add_argument("--ranks", default=str(RANKS), help="each on a host of its own; several numbers with commas")
    parser.add_argument("--set", action="append", default=[], help="a key of the configuration, KEY=VALUE; repeatable")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=20.0, help="of steps, of a way in a turn, at most")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--epochs", type=int, default=5, help="of --accuracy")
    parser.add_argument("--seeds", type=int, default=3, help="of --accuracy")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "runs" / "bench-modes", help="folder")
    parser.add_argument("--add", action="store_true", help="to what an earlier call has left in this folder")
    options = parser.parse_args(arguments)
    if options.accuracy and not FASHION.exists():
        parser.error(f"there is no {FASHION}: apt install dataset-fashion-mnist")
    counts, limits = [int(n) for n in options.ranks.split(",")], Limits(options.steps, options.seconds, options.turns)
    options.output.mkdir(parents=True, exist_ok=True)
    page, data = (options.output / name for name in ("modes.md", "modes.json"))
    before = options.add and data.exists()
    parts = [page.read_text().rstrip()] if before else []
    parts += [f"scripts/bench modes {' '.join(arguments)}".strip(), machine(), time.strftime("%Y-%m-%d")]
    figures: dict[str, list[dict]] = json.loads(data.read_text()) if before else {}

    def keep(part: str) -> None:
        parts.append(part)
        print(f"\n{part}", flush=True)
        page.write_text("\n\n".join(parts) + "\n")

    for framework in options.frameworks.split(","):
        work = product(filter(None, options.rates.split(",")), options.models.split(","), counts)
        for rate, model, ranks in work:
            config = load_config(None, options.set, base=settings(framework, model, {}))
            chosen = ways(options.modes, ranks)
            with tempfile.TemporaryDirectory() as folder, started(rate, ranks, Path(folder)) as (start, where):
                report = partial(print, f"{framework}, {rate}, {model}, {ranks} ranks:", flush=True)
                measured = measure(config, chosen, ranks, limits, start, Path(folder) / "runs", report)
            name = f"{framework}-{rate}-{model}-{ranks}"
            results.picture(measured, options.output / f"{name}.png")
            figures[name] = plain(measured)
            data.write_text(json.dumps(figures, indent=1) + "\n")
            shown = tables.markdown(*results.header_and_rows(measured))
            notes = "\n".join([*results.notes(measured, config, limits), longest_steps(measured)])
            title = f"### {framework}, {model}, {ranks} ranks, {where}"
            keep(f"{title}\n\n{shown}\n{notes}\n\n![losses]({name}.png)")
        if options.accuracy:
            keep(accuracy_table(framework, ways(options.modes, RANKS), options.epochs, options.seeds))
    if figures:
        (options.output / "overview.md").write_text(tables.of_ways(figures) + "\n")
        tables.ways_picture(figures, options.output / "overview.png")
    print(f"\n{options.output}: modes.md, overview.md, modes.json, and a picture of each table")
