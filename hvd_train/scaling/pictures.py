"""The pictures of a study."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from hvd_train.core.shares import IN_STEPS
from hvd_train.report.plots import FAR, INK, new_figure, set_ticks, share_style
from hvd_train.scaling.points import Measured, Point

WIDTH, HEIGHT = 6.4, 4.2
BEYOND = 2.0  # laws are drawn up to so many times the largest number of ranks


def of(measured: Measured) -> dict[str, Callable[[], Any]]:
    """Return {name: function that makes the figure} of all pictures that the measurements allow."""
    found: dict[str, Callable[[], Any]] = {
        "speedup": partial(speedup, measured),
        "shares": partial(shares, measured),
        "hours": partial(hours, measured),
    }
    if any(one.trainings for one in measured.points):
        found["target"] = partial(target, measured)
    return found


def speedup(measured: Measured) -> Any:
    """Draw the speed-up over ranks: all runs, the ideal line, and the laws with their bands."""
    from matplotlib.ticker import NullLocator

    figure = new_figure(WIDTH, HEIGHT)
    axis = figure.add_subplot()
    known = measured.known
    first, fits = known[0], measured.fits[0]
    unit = first.rate / first.ranks  # samples/s of one rank, by the fewest ranks
    most = max(one.ranks for one in known)
    line = np.geomspace(first.ranks, most * (BEYOND if fits else 1.0), 200)
    axis.plot(line, line, color=INK, linestyle="--", linewidth=1, label="ideal")
    for k, one in enumerate(fits):
        color = f"C{k + 1}"
        axis.plot(line, one.law.rate(line) / unit, color=color, linewidth=1.5, label=f"{one.name} law (90 %)")
        if band := one.band(line):
            axis.fill_between(line, band[0] / unit, band[1] / unit, color=color, alpha=0.15, linewidth=0)
    for hollow in (False, True):
        chosen = [one for one in known if one.crowded is hollow]
        if chosen:
            name = "measured, ranks share cores" if hollow else "measured"
            _points(axis, chosen, unit, name, hollow)
    axis.set(xlabel="ranks", ylabel="speed-up")
    axis.set_xscale("log")
    axis.set_yscale("log")
    set_ticks(axis, [*(one.ranks for one in known), *([int(most * BEYOND)] if fits else [])], log=True)
    tops = [one.rate / unit for one in known]
    low, high = 0.8 * min(*tops, first.ranks), 1.3 * max(*tops, line[-1])
    axis.set_ylim(low, high)
    powers = [2.0**k for k in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    axis.set_yticks(powers, [f"{x:g}" for x in powers])
    axis.yaxis.set_minor_locator(NullLocator())
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="upper left")
    return figure


def _points(axis: Any, chosen: Sequence[Point], unit: float, label: str, hollow: bool) -> None:
    runs = [(one.ranks, run.rate / unit) for one in chosen for run in one.runs]
    style: dict[str, Any] = {"color": "C0", "zorder": 3}
    axis.plot(*zip(*runs, strict=True), linestyle="", marker=".", markersize=4, alpha=0.5, **style)
    middles = [(one.ranks, one.rate / unit) for one in chosen]
    fill = "none" if hollow else "full"
    axis.plot(*zip(*middles, strict=True), linestyle="", marker="o", markersize=8, fillstyle=fill, label=label, **style)
    for ranks, x in middles:
        axis.annotate(f"{x:.2f}", (ranks, x), textcoords="offset points", xytext=(6, -11), fontsize=8, color=INK)


def shares(measured: Measured) -> Any:
    """Draw what a step's time consists of, a bar for each number of ranks; above it the milliseconds."""
    figure = new_figure(WIDTH, HEIGHT)
    axis = figure.add_subplot()
    known = measured.known
    places, below = list(range(len(known))), np.zeros(len(known))
    for name in IN_STEPS:
        heights = np.array([one.shares.get(name, 0.0) for one in known])
        if heights.max() < 0.0005:
            continue
        axis.bar(places, heights, bottom=below, width=0.65, **share_style(name))
        below = below + heights
    for place, one in zip(places, known, strict=True):
        ms = f"{one.milliseconds[0]:.3g} ms"
        axis.annotate(ms, (place, 1.0), textcoords="offset points", xytext=(0, 3), ha="center", fontsize=8, color=INK)
    axis.set_xticks(places, [f"{one.ranks}{'*' * one.crowded}" for one in known])
    axis.set(xlabel="ranks", ylabel="share of a step's time", ylim=(0, 1.08))
    axis.yaxis.set_major_formatter("{x:.0%}")
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=8, handlelength=2.5)
    return figure


def hours(measured: Measured) -> Any:
    """Draw node-hours over hours of the configured training: the cost of being sooner."""
    figure = new_figure(WIDTH, HEIGHT)
    axis = figure.add_subplot()
    known = measured.known
    unit, factor = _time_unit(max(measured.hours(one) for one in known))
    xs = [factor * measured.hours(one) for one in known]
    ys = [factor * measured.hours(one) * one.runs[0].hosts for one in known]
    axis.plot(xs, ys, color="C0", linewidth=1, alpha=0.5)
    for one, x, y in zip(known, xs, ys, strict=True):
        axis.plot([x], [y], "o", color="C0", fillstyle="none" if one.crowded else "full", markersize=8)
        label = f"{one.ranks} rank{'s' * (one.ranks > 1)}{'*' * one.crowded}"
        axis.annotate(label, (x, y), textcoords="offset points", xytext=(7, 5), fontsize=8, color=INK)
    axis.set(xlabel=f"{unit} of the configured training", ylabel=f"node-{unit}")
    axis.set_xlim(0, 1.2 * max(xs))
    axis.set_ylim(0, 1.2 * max(ys))
    axis.grid(alpha=0.3)
    return figure


def _time_unit(most_hours: float) -> tuple[str, float]:
    """Return hours, minutes or seconds, whichever suits an axis up to ``most_hours``, and how many are an hour."""
    return ("hours", 1.0) if most_hours >= 1 else ("minutes", 60.0) if most_hours >= 1 / 60 else ("seconds", 3600.0)


def target(measured: Measured) -> Any:
    """Draw the target's metric and the loss over samples and over seconds, a line for each training."""
    aim = measured.study.target
    assert aim is not None
    with_curves = [one for one in measured.points if one.trainings]
    several = aim.name != "val_loss" and any(x.losses for one in with_curves for x in one.trainings.values())
    figure = new_figure(2 * WIDTH, HEIGHT * (1 + several))
    axes = figure.subplots(1 + several, 2, squeeze=False)
    for row, name in enumerate([aim.name, *["val_loss"] * several]):
        for k, one in enumerate(with_curves):
            for number, training in enumerate(one.trainings.values()):
                style: dict[str, Any] = {"color": f"C{k % 10}", "linewidth": 1.2, "alpha": 0.8}
                style |= {"marker": "os^Dv"[k % 5], "markersize": 3}
                label = f"{one.ranks} rank{'s' * (one.ranks > 1)}" if number == 0 else None
                points = training.losses if row else training.curve
                for axis, at in zip(axes[row], (0, 1), strict=True):
                    axis.plot([x[at] for x in points], [x[2] for x in points], label=label, **style)
        for axis, what in zip(axes[row], ("samples of all ranks", "seconds of steps"), strict=True):
            axis.set(xlabel=what, ylabel=name.replace("_", " "))
            axis.grid(alpha=0.3)
    ends = [training.curve[-1][1] for one in with_curves for training in one.trainings.values()]
    if max(ends) > FAR * min(ends):
        for axis in axes[:, 1]:
            axis.set_xscale("log")
    for axis in axes[0]:
        axis.axhline(aim.value, color=INK, linestyle="--", linewidth=1, label="target")
    axes[0, 0].legend(fontsize=8)
    return figure
