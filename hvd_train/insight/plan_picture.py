"""The picture of a plan: samples/s and node-hours against hours, predictions beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_train.insight.plan import Row
from hvd_train.report.plots import new_figure, set_ticks, write_figure

PREDICTED, MEASURED, REHEARSED, STUDY = "C0", "C3", "C2", "k"


def picture(found: Sequence[Row], path: Path, studied: Mapping[int, Sequence[float]] | None = None) -> None:
    """Draw the rows of a plan. ``studied``: {number of ranks: samples/s of each run} of a scaling study."""
    figure = new_figure(11, 4.6)
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    _rates(left, found, studied or {})
    _costs(right, found)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    write_figure(figure, path)


def _fastest(found: Sequence[Row], source: Sequence[str]) -> list[Row]:
    """Return the fastest row for each number of ranks."""
    best: dict[int, Row] = {}
    for row in found:
        if row.source in source and (row.at.ranks not in best or row.at.rate > best[row.at.ranks].at.rate):
            best[row.at.ranks] = row
    return [best[n] for n in sorted(best)]


def _rates(axis: Any, found: Sequence[Row], studied: Mapping[int, Sequence[float]]) -> None:
    line = _fastest(found, ("measured", "predicted"))
    xs, middle = [row.at.ranks for row in line], [row.at.rate for row in line]
    low = [row.at.ranks * row.at.batch / row.at.high for row in line]
    high = [row.at.ranks * row.at.batch / row.at.low for row in line]
    axis.plot(xs, middle, "-", color=PREDICTED, label="plan")
    axis.fill_between(xs, low, high, color=PREDICTED, alpha=0.2, linewidth=0, label="90 % interval")
    one = middle[0] / xs[0]
    axis.plot(xs, [one * n for n in xs], "--", color="gray", linewidth=1, label="ideal")
    for source, color, mark in (
        ("measured", MEASURED, "o"),
        ("predicted", PREDICTED, "s"),
        ("rehearsed", REHEARSED, "D"),
    ):
        rows = [row for row in found if row.source == source]
        if rows:
            points = [row.at.ranks for row in rows], [row.at.rate for row in rows]
            axis.plot(*points, mark, color=color, markersize=6, label=source, linestyle="none")
    if studied:
        points = [n for n, rates in studied.items() for _ in rates], [x for rates in studied.values() for x in rates]
        axis.plot(*points, "x", color=STUDY, markersize=7, label="study", linestyle="none")
    axis.set(xlabel="ranks", ylabel="samples/s", yscale="log")
    set_ticks(axis, [*xs, *(row.at.ranks for row in found), *studied], log=True)
    _plain(axis.yaxis)
    axis.grid(alpha=0.3)


def _plain(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1000 else f"{x:g}"))


def _costs(axis: Any, found: Sequence[Row]) -> None:
    """Draw node-hours over hours: what is further left is sooner done, what is lower is cheaper."""
    rows = [row for row in found if row.source != "rehearsed"]
    last = max(row.hours(row.at.step) for row in rows)
    for row in rows:
        x, y, at = row.hours(row.at.step), row.node_hours, row.at
        low, high = x - row.hours(at.low), row.hours(at.high) - x
        color = MEASURED if row.source == "measured" else PREDICTED
        axis.errorbar(x, y, xerr=[[low], [high]], fmt="o" if row.source == "measured" else "s", color=color, capsize=2)
        words = f"{at.ranks} rank" + "s" * (at.ranks > 1)
        words = f"{at.hosts} hosts, {words}" if at.hosts > 1 else words
        words += f" x {at.threads} threads" if at.threads > 1 else ""
        # What was measured is labelled below, so that the labels of two points with equal costs do not overlap.
        height = -13 if row.source == "measured" else 5
        side = {"xytext": (-6, height), "ha": "right"} if x > 0.6 * last else {"xytext": (6, height), "ha": "left"}
        axis.annotate(words, (x, y), textcoords="offset points", fontsize=8, **side)
    axis.set(xlabel="hours of the training", ylabel="node-hours", xscale="log", yscale="log")
    axis.margins(0.15)
    _plain(axis.xaxis)
    _plain(axis.yaxis)
    axis.grid(alpha=0.3)
