"""The page about a study for a proposal: a table, pictures, laws, and how it was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_train.config import leaves, load_config
from hvd_train.errors import CheckpointError, amount
from hvd_train.files import put
from hvd_train.insight.plan import WEAK
from hvd_train.insight.scaling_laws import UNIVERSAL
from hvd_train.report import plots
from hvd_train.report.html_page import escaped, heading, shown, table
from hvd_train.report.html_page import write as write_page
from hvd_train.run_folder import safe_reading
from hvd_train.scaling import pictures, results
from hvd_train.scaling.points import Measured
from hvd_train.scaling.runs import WARM
from hvd_train.scaling.turns import PRECISE

CAPTIONS = {
    "speedup": "Speed-up over ranks. Small dots are single runs, the bands are 90 % intervals of the laws.",
    "shares": "What a step's time consists of; above each bar the median time of a step.",
    "hours": "What the configured training costs, and how long it takes.",
    "target": "The way to the target: a line for each training.",
}
# Keys of the configuration that are shown also with their defaults.
ALWAYS = ("framework", "model.name", "data.name", "optim.name", "precision", "exchange.mode", "exchange.compression")
OWN = ("run_dir", "code_dir", "loggers", "tensorboard")
SETUP = {
    "launcher": "launcher",
    "host": "host of rank 0",
    "cores": "cores of this host",
    "threads": "threads of a rank",
}
METHOD = """
Each figure comes from {runs} trainings with the real model and data, of {steps} steps each. The first {warm} of the
steps are not timed. The numbers of ranks took turns, so that slow changes of the machine affect all alike. Runs were
repeated until the 90 % interval of a step's mean time (Student) was within {precise}, or until a limit. {batch}. Step
times are of all timed steps, as medians over runs; samples/s come from the mean time of a step. The speed-up compares
samples/s with those on {first}; the efficiency is the speed-up divided by the ranks. Exchange is how long the rank
that waits least waits for transfers; wait is what the others wait longer. Hours are the steps of the configured
training times their mean time, without start, evaluation and checkpoints; node-hours are hours times nodes. The laws
are fitted to the medians by least squares of relative deviations, with sigma from 0 to 1 and kappa not negative; their
intervals come from a bootstrap over repeats.
"""
STRONG_BATCH = "The global batch is {batch} samples on all numbers of ranks (strong scaling)"
WEAK_BATCH = "Each rank keeps its batch, so the global batch grows with the ranks (weak scaling)"
TARGET_METHOD = """
For the target {target}, {trainings} with different seeds ran to the configured end on each number of ranks. Samples and
seconds are those of the first evaluation that reached it, as medians; seconds are those of steps. A training that never
reached it counts as the slowest.
"""


def write(measured: Measured, folder: Path) -> Path:
    """Write index.html and results.csv into ``folder``; return the page's path. Raises CheckpointError."""
    page = folder / "index.html"
    config = measured.study.config
    title = f"Scaling of {config.framework}, {config.model.name} on {config.data.name}"
    write_page(page, title, [part for one in (_result, _pictures, _laws, _method, _setup) for part in one(measured)])
    try:
        put(folder / results.CSV, results.csv_text(measured).encode())
    except OSError as error:
        raise CheckpointError(f"the table cannot be written: {error.strerror}", where=str(folder)) from error
    return page


def _result(measured: Measured) -> Iterator[str]:
    yield heading("Result")
    yield _paragraph(results.summary(measured))
    yield table(results.title(measured).capitalize() + ".", *results.speed_table(measured))
    yield table("Cost of the configured training's steps.", *results.cost_table(measured))
    yield table("Shares of a step's time, over all ranks.", *results.shares_table(measured))
    if any(one.factors for one in measured.known):
        caption = (
            "Factors of the efficiency within a step: parallel efficiency = load balance x communication efficiency."
        )
        yield table(caption, *results.factors_table(measured))
    if notes := measured.notes():
        yield "<ul>" + "".join(f"<li>{escaped(note[0].upper() + note[1:])}.</li>" for note in notes) + "</ul>"


def _pictures(measured: Measured) -> Iterator[str]:
    yield heading("Pictures")
    figures = {name: _figure(name, make) for name, make in pictures.of(measured).items()}
    wide = figures.pop("target", "")
    yield "<div class='curves'>" + "".join(figures.values()) + "</div>" + wide


def _figure(name: str, make: Callable[[], Any]) -> str:
    caption = f"<figcaption>{escaped(CAPTIONS[name])}</figcaption>"
    return f"<figure>{plots.svg(make, CAPTIONS[name])}{caption}</figure>"


def _laws(measured: Measured) -> Iterator[str]:
    fits, notes = measured.fits
    yield heading("Laws of scaling")
    yield "<ul>" + "".join(f"<li>{escaped(line)}.</li>" for line in [*results.law_sentences(fits), *notes]) + "</ul>"
    if any(one.name == UNIVERSAL for one in fits):
        yield _paragraph(
            "N ranks are N / (1 + sigma (N-1) + kappa N (N-1)) times as fast as one (Gunther's universal scalability "
            "law); with kappa = 0 it is Amdahl's law. The speed is largest on sqrt((1 - sigma) / kappa) ranks."
        )


def _method(measured: Measured) -> Iterator[str]:
    yield heading("Method")
    yield _paragraph(method(measured))


def method(measured: Measured) -> str:
    """Return how the figures were measured."""
    study, first = measured.study, measured.known[0]
    counts = sorted({len(one.runs) for one in measured.known})
    values = {
        "runs": f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}",
        "batch": WEAK_BATCH if study.kind == WEAK else STRONG_BATCH.format(batch=f"{study.batch(first.ranks):,}"),
        "steps": study.steps,
        "warm": results.percent(WARM),
        "precise": results.percent(PRECISE),
        "first": amount(first.ranks, "rank"),
        "target": study.target,
        "trainings": amount(study.seeds, "training"),
    }
    return " ".join((METHOD + TARGET_METHOD * bool(study.target)).format(**values).split())


def _setup(measured: Measured) -> Iterator[str]:
    yield heading("Configuration and software")
    defaults = dict(leaves(load_config().resolved().model_dump(mode="json")))
    config = dict(leaves(measured.study.config.resolved().model_dump(mode="json")))
    keys = [key for key in config if key not in OWN and (key in ALWAYS or config[key] != defaults.get(key))]
    yield table(
        "The main keys, and all that differ from their defaults.",
        ["key", "value"],
        [[k, shown(config[k])] for k in keys],
    )
    columns = {f"{amount(one.ranks, 'rank')}": _environment(measured, one.ranks) for one in measured.known}
    rows = [[name, *(shown(one.get(key, "-")) for one in columns.values())] for key, name in SETUP.items()]
    versions = next((one.get("versions") for one in columns.values()), None)
    if isinstance(versions, dict):
        rows += [[name, *[shown(version)] * len(columns)] for name, version in versions.items()]
    yield table("", ["", *columns], rows)


def _environment(measured: Measured, ranks: int) -> dict[str, Any]:
    for number in measured.study.numbers(ranks, "run"):
        run_dir = Path(measured.study.short_run(ranks, number, measured.study.steps or 1).config.run_dir)
        with suppress(FileNotFoundError, CheckpointError):
            return safe_reading.json_object(run_dir / "environment.json")
    return {}


def _paragraph(text: str) -> str:
    return f"<p>{escaped(text)}</p>"
