"""The results of a study: the tables of the terminal, results.csv, sentences about the laws, and the pictures."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_train.core.shares import IN_STEPS, WORDS
from hvd_train.errors import CheckpointError, ConfigError, amount
from hvd_train.files import put
from hvd_train.insight.plan import STRONG, WEAK
from hvd_train.insight.scaling_laws import AMDAHL, Fit
from hvd_train.report.plots import write_figure
from hvd_train.report.text_tables import table
from hvd_train.scaling import pictures
from hvd_train.scaling.points import EXACT, Measured, Point

CSV = "results.csv"
GOOD = 0.7  # efficiency that is still called good
POOR = 0.15  # deviation of a law that is too large to believe it
VAGUE = 0.15  # uncertainty of a step's time, from which on a choice of ranks may be wrong
# Columns of results.csv, and the attributes of Factors.
FACTORS = {
    "parallel_efficiency": "parallel",
    "load_balance": "load_balance",
    "communication_efficiency": "communication",
    "serialization": "serialization",
    "preparation": "preparation",
    "transfer": "transfer",
}


def columns(measured: Measured, one: Point) -> dict[str, Any]:
    """Return the values of a point by their names in results.csv; None: not known."""
    row: dict[str, Any] = {"ranks": one.ranks, "global_batch": one.batch, "runs": len(one.runs)}
    names = ["nodes", "cores", "crowded", "step_ms", "step_ms_p95", "step_ms_uncertainty", "samples_per_second"]
    names += ["speedup", "efficiency", *(f"share_{name}" for name in IN_STEPS), *FACTORS, "hours", "node_hours"]
    row |= dict.fromkeys(names)
    if one.runs:
        middle, high = one.milliseconds
        run, hours = one.runs[0], measured.hours(one)
        row |= {"nodes": run.hosts, "cores": run.cores, "crowded": int(one.crowded), "step_ms": middle}
        row |= {"step_ms_p95": high, "step_ms_uncertainty": one.uncertainty, "samples_per_second": one.rate}
        row |= {"speedup": measured.speedup(one), "efficiency": measured.efficiency(one)}
        row |= {f"share_{name}": x for name, x in one.shares.items()}
        row |= {name: getattr(one.factors, key) for name, key in FACTORS.items()} if one.factors else {}
        row |= {"hours": hours, "node_hours": hours * run.hosts}
    if measured.study.target:
        names = ["samples_to_target", "seconds_to_target", "trainings_that_reached_it", "trainings"]
        row |= dict(zip(names, one.to_target(), strict=True))
    row["problem"] = one.problem
    return row


def csv_text(measured: Measured) -> str:
    """Return results.csv."""
    rows = [columns(measured, one) for one in measured.points]
    text = io.StringIO()
    csv.writer(text).writerows([[*rows[0]], *([*row.values()] for row in rows)])
    return text.getvalue()


def speed_table(measured: Measured) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows) as text: the times and the speed-up of each number of ranks."""
    header = ["nodes", "ranks", "cores", "global batch", "step ms", "90 %", "p95 ms", "samples/s", "speed-up"]
    rows = []
    for one in measured.points:
        x = columns(measured, one)
        row = [_shown(x["nodes"]), _ranks(one), _shown(x["cores"]), f"{one.batch:,}"]
        row += [number(x["step_ms"]), _half(x["step_ms_uncertainty"]), number(x["step_ms_p95"])]
        row += [_shown(x["samples_per_second"], ",.0f"), _shown(x["speedup"], ".2f"), percent(x["efficiency"])]
        rows.append([*row, str(len(one.runs))])
    return [*header, "efficiency", "runs"], rows


def cost_table(measured: Measured) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows) as text: what the configured training and the way to the target cost."""
    target = measured.study.target
    header = ["ranks", "hours", "node-hours"]
    header += [f"samples to {target}", "seconds to it", "trainings that reached it"] if target else []
    rows = []
    for one in measured.points:
        x = columns(measured, one)
        row = [_ranks(one), number(x["hours"]), number(x["node_hours"])]
        if target:
            reached, ended = x["trainings_that_reached_it"], x["trainings"]
            row += [_shown(x["samples_to_target"], ",.0f"), number(x["seconds_to_target"])]
            row += [f"{reached} of {ended}" if ended else "-"]
        rows.append(row)
    return header, rows


def _ranks(one: Point) -> str:
    return f"{one.ranks}{'*' * one.crowded}"


def shares_table(measured: Measured) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows) as text: the shares of a step's time."""
    names = [name for name in IN_STEPS if any(one.shares.get(name, 0) >= 0.0005 for one in measured.known)]
    rows = [[_ranks(one), *(percent(one.shares.get(name), 1) for name in names)] for one in measured.known]
    return ["ranks", *(WORDS.get(name, name) for name in names)], rows


def factors_table(measured: Measured) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows) as text: the factors of the steps' parallel efficiency."""
    rows = []
    for one in measured.known:
        values = [getattr(one.factors, key, None) for key in FACTORS.values()]
        rows.append([_ranks(one), *(_shown(x, ".3f") for x in values)])
    return ["ranks", *(name.replace("_", " ") for name in FACTORS)], rows


def number(value: float | None) -> str:
    """Format a number with three digits; "-" if it is not known."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def _half(share: float | None) -> str:
    """Format half an interval."""
    return "-" if share is None else f"±{percent(share, 1)}"


def _shown(value: Any, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def law_sentences(fits: Sequence[Fit]) -> list[str]:
    """Return a sentence for each law."""
    return [_law_sentence(one) for one in fits]


def _law_sentence(one: Fit) -> str:
    law, off = one.law, f"off by at most {percent(one.error, 1)}"
    if one.error > POOR:
        return f"{one.name} law: does not hold here, {off}"
    words = f"{one.name} law: sigma {_share(one, 'sigma')}"
    if one.name == AMDAHL:
        words += f": at most {1 / law.sigma:.3g} times as fast as one rank" if law.sigma > 0 else ""
    else:
        most = "more ranks are always faster" if math.isinf(law.best) else f"fastest on {law.best:.3g} ranks"
        words += f", kappa {_share(one, 'kappa')}: {most}{_range(one, 'best', '.3g')}"
    return f"{words}; {off}" if one.spare or one.error > EXACT else words


def _share(one: Fit, quantity: str) -> str:
    return f"{getattr(one.law, quantity):.3g}{_range(one, quantity, '.3g')}"


def _range(one: Fit, quantity: str, form: str) -> str:
    interval = one.interval(quantity)
    if interval is None:
        return ""
    low, high = (format(x, form) if math.isfinite(x) else "no limit" for x in interval)
    return f" (90 %: {low} to {high})"


def text(measured: Measured) -> str:
    """Return the tables, the laws and the notes for the terminal. Raises ConfigError if nothing was measured."""
    fits, about_fits = measured.fits
    blocks = [f"{title(measured)}\n{table(*speed_table(measured))}"]
    blocks.append(f"cost of the configured training's steps\n{table(*cost_table(measured))}")
    blocks.append(f"shares of a step's time\n{table(*shares_table(measured))}")
    if any(one.factors for one in measured.known):
        blocks.append(f"factors of the efficiency within a step\n{table(*factors_table(measured))}")
    blocks.append("\n".join([*law_sentences(fits), *about_fits, *measured.notes()]))
    blocks.append("\n".join([summary(measured), *advice(measured)]))
    return "\n\n".join(blocks)


def summary(measured: Measured) -> str:
    """Return the sentences that answer how many ranks to ask for."""
    known = measured.known
    first, fastest = known[0], max(known, key=lambda one: one.rate)
    most = max((one for one in known if measured.efficiency(one) >= GOOD), key=lambda one: one.ranks)
    ranks = amount(most.ranks, "rank")
    verb = "is" if most.ranks == 1 else "are"
    faster = f", {most.rate / first.rate:.2f} times as fast as {amount(first.ranks, 'rank')}" if most != first else ""
    hours = measured.hours(most)
    lines = [
        f"{ranks} {verb} the most whose efficiency (speed-up divided by ranks) is at least {percent(GOOD)}: "
        f"{most.rate:,.0f} samples/s{faster}. The configured training then takes {number(hours)} hours of steps, and "
        f"{number(hours * most.runs[0].hosts)} node-hours."
    ]
    if fastest == most:
        lines.append("This is also the fastest that was measured." if len(known) > 1 else "")
    else:
        lines.append(
            f"The fastest that was measured is {amount(fastest.ranks, 'rank')}, with {fastest.rate:,.0f} samples/s."
        )
    worst = max((one.uncertainty or 0.0 for one in (first, most, fastest)), default=0.0)
    if worst > VAGUE:
        lines.append(f"Times of steps are known to ±{percent(worst)} only, so another number of ranks may be better.")
    return " ".join(filter(None, lines))


def advice(measured: Measured) -> list[str]:
    """Return sentences about what to do next."""
    study, lines = measured.study, []
    if any((one.uncertainty or 0.0) > VAGUE for one in measured.known):
        lines.append(
            "step times differ much from run to run: measure on idle cores, or give more --repeats and --seconds"
        )
    if study.kind == STRONG and not study.config.global_batch_size and measured.known[-1].ranks > 1:
        size = study.batch(measured.known[0].ranks)
        lines.append(
            f"to train as measured on several ranks, write global_batch_size: {size} in place of batch_size; with "
            "batch_size, 'fit -np N' keeps the batch of each rank, as --weak does"
        )
    return lines


def title(measured: Measured) -> str:
    study = measured.study
    fixed = "each rank keeps its batch" if study.kind == WEAK else "the global batch stays"
    return f"{study.kind} scaling ({fixed}) of {study.config.framework}, {study.config.model.name}"


def check(measured: Measured) -> None:
    """Raise ConfigError if no run has ended."""
    if not measured.known:
        problem = next((one.problem for one in measured.points if one.problem), "no run has ended")
        raise ConfigError(f"nothing was measured: {problem}", where=str(measured.study.folder))


def write(measured: Measured) -> list[Path]:
    """Write results.csv and the pictures into the study's folder; return the pictures. Raises CheckpointError."""
    folder, written = measured.study.folder, []
    try:
        put(folder / CSV, csv_text(measured).encode())
    except OSError as error:
        raise CheckpointError(f"the table cannot be written: {error.strerror}", where=str(folder / CSV)) from error
    for name, make in pictures.of(measured).items():
        write_figure(make(), folder / f"{name}.png")
        written.append(folder / f"{name}.png")
    return written
