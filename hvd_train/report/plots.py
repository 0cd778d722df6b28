"""Plots of runs, as image files."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_train.core.shares import SHOWN, WORDS
from hvd_train.errors import CheckpointError, amount, printable
from hvd_train.run_folder import metrics_file
from hvd_train.run_folder.safe_reading import number
from hvd_train.run_folder.terminal import warn


def epochs(rows: Sequence[dict[str, Any]], event: str, value: str) -> tuple[list[int], list[float]]:
    """Return (epoch numbers from 1, mean of ``value`` in each), weighted by the samples of each log line."""
    # A training line covers the samples since the one before. Of several evaluations in an epoch, the last one counts.
    sums: dict[int, tuple[float, float]] = {}
    for row in rows:
        if row["event"] == event and number(row.get(value)) and number(row.get("samples")):
            total, count = sums.get(row["epoch"], (0.0, 0.0)) if event == "train" else (0.0, 0.0)
            sums[row["epoch"]] = (total + row[value] * row["samples"], count + row["samples"])
    return list(sums), [total / max(count, 1) for total, count in sums.values()]


def steps(rows: Sequence[dict[str, Any]], event: str, value: str) -> tuple[list[int], list[float]]:
    """Return (step, ``value``) of all log lines of an event, as two lists."""
    points = [(row["step"], row[value]) for row in rows if row["event"] == event and number(row.get(value))]
    return [step for step, _ in points], [x for _, x in points]


def _label(name: str) -> str:
    """Escape a name for matplotlib, which renders "$" as a formula and hides labels that begin with "_"."""
    return " " * name.startswith("_") + printable(name, one_line=True).replace("$", r"\$")


BY = {"epoch": epochs, "step": steps}
COLUMNS, LEGEND_COLUMNS, MOST_POINTS = 3, 4, 1000
INK = "#010203"  # stands for the colour of the text around a picture, where there is one
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---", "+++", "ooo")
NAMED = {"lr": "learning rate", "samples_per_second": "samples/s"}
MARKS, STYLES = "os^Dvp*Xh<>", {"train": "--", "val": "-"}
FEW, GAP = 8, 0.1  # values that get a label each; their minimum distance, as a fraction of the axis
LETTER = 0.025  # the width of a letter of a label, as a fraction of an axis 3.6 inches wide
FAR = 4  # ratio of largest to smallest above which the axis is logarithmic
READABLE = 40  # most classes whose names and counts are legible


Runs = Sequence[tuple[str, Sequence[dict[str, Any]]]]  # (name, lines of the log) of each run


def curves(run_dirs: Sequence[Path], picture: Path, by: str = "epoch") -> None:
    """Plot loss and metrics of all runs by epoch or step; training dashed, validation solid."""
    runs = []
    for run_dir, name in zip(run_dirs, names(run_dirs), strict=True):
        rows, damaged = metrics_file.read(run_dir)
        runs.append((name, rows))
        if damaged:
            warn(f"{amount(damaged, 'damaged line')} of {run_dir / metrics_file.NAME} left out")
    write_figure(curve_figure(runs, metrics(runs), by), picture)


def names(run_dirs: Sequence[Path]) -> list[str]:
    """Return short names for run folders: their own if these differ, else their paths."""
    short = [run_dir.resolve().name for run_dir in run_dirs]
    return short if len(set(short)) == len(short) else [str(run_dir) for run_dir in run_dirs]


def metrics(runs: Runs) -> list[str]:
    """Return the names of all metrics that were evaluated, loss first."""
    lines = [row for _, rows in runs for row in rows if row["event"] == "val"]
    return [*dict.fromkeys(["loss", *(key for row in lines for key in row if key not in metrics_file.FIXED)])]


def curve_figure(
    runs: Runs, values: Sequence[str], by: str, events: Sequence[str] = ("train", "val"), legend: bool = True
) -> Any:
    """Make a figure with an axis for each of the ``values``, and the curves of all runs on it."""
    from matplotlib.ticker import MaxNLocator

    across, down = min(COLUMNS, len(values)), -(-len(values) // COLUMNS)
    figure = new_figure(5 * across, 3.8 * down)
    axes = [figure.add_subplot(down, across, k + 1) for k in range(len(values))]
    for k, (name, rows) in enumerate(runs):
        # Curves of equal runs coincide: markers at different positions keep each visible.
        line: dict[str, Any] = {"color": f"C{k % 10}", "linewidth": 1.5, "alpha": 0.9, "markersize": 5}
        line |= {"marker": MARKS[k % len(MARKS)], "markevery": (0.2 * k / len(runs), 0.2)}
        for axis, value in zip(axes, values, strict=True):
            for event in events:
                label = _label(f"{name}, {event}" if len(events) > 1 else name)
                axis.plot(*_thinned(*BY[by](rows, event, value)), STYLES[event], label=label, **line)
    for axis, value in zip(axes, values, strict=True):
        axis.set(xlabel=by, ylabel=_label(NAMED.get(value, value.replace("_", " "))))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    if legend:  # one for all axes: within the axes it would hide the curves
        _add_legend(figure, axes[0], "outside lower center")
    return figure


def legend_figure(runs: Runs) -> Any:
    """Make a figure of the legend alone, for several figures without one."""
    from matplotlib import pyplot

    drawn = curve_figure([(name, ()) for name, _ in runs], ["loss"], "step", legend=False)
    columns = min(LEGEND_COLUMNS, max(len(runs), 2))  # a run has a column, if they are few
    figure = new_figure(2.3 * columns, 0.1 + 0.2 * -(-2 * len(runs) // columns))
    _add_legend(figure, drawn.axes[0], "center", columns)
    pyplot.close(drawn)
    return figure


def shares_figure(shares: Mapping[str, Sequence[float]], parts: Sequence[str]) -> Any:
    """Make a figure with a bar for each name, divided into ``parts`` of SHOWN."""
    figure = new_figure(10, 0.8 + 0.4 * len(shares))
    axis = figure.add_subplot()
    names, left = [*map(_label, shares)], [0.0] * len(shares)
    for k, part in enumerate(parts):
        widths = [one[k] for one in shares.values()]
        axis.barh(range(len(shares)), widths, left=left, **share_style(part))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.set_yticks(range(len(shares)), names)
    axis.invert_yaxis()
    axis.set(xlim=(0, 1), xlabel="share of the time")
    axis.xaxis.set_major_formatter("{x:.0%}")
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, handlelength=3)
    return figure


def share_style(part: str) -> dict[str, Any]:
    """Return the look of a part of SHOWN, which is the same in all pictures, and its label."""
    place = SHOWN.index(part) if part in SHOWN else len(SHOWN)
    look = {"color": f"C{place % 10}", "edgecolor": INK, "linewidth": 0.5, "alpha": 0.7}
    return look | {"hatch": HATCHES[place % len(HATCHES)], "label": _label(WORDS.get(part, part))}


def _add_legend(figure: Any, axis: Any, place: str, columns: int = LEGEND_COLUMNS) -> None:
    handles, labels = axis.get_legend_handles_labels()
    columns = min(columns, len(labels))
    figure.legend(handles, labels, loc=place, ncols=columns, fontsize=8, handlelength=4)


def _thinned(xs: Sequence[float], ys: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Return at most ``MOST_POINTS`` points: means over neighbours, where there are more."""
    group = -(-len(xs) // MOST_POINTS)
    if group <= 1:
        return xs, ys
    starts = range(0, len(xs), group)
    means = [[math.fsum(part) / len(part) for part in (v[k : k + group] for k in starts)] for v in (xs, ys)]
    return means[0], means[1]


def set_ticks(axis: Any, values: Sequence[float], log: bool) -> None:
    """Put the ticks of the x axis at the values if they are few, without labels that would overlap."""
    from matplotlib.ticker import NullFormatter, NullLocator

    if log:
        axis.set_xscale("log")
    different = sorted(set(values))
    low, high = (math.log(different[k]) if log else different[k] for k in (0, -1))
    if len(different) > FEW:
        if log:
            axis.xaxis.set_minor_formatter(NullFormatter())
        return
    kept: list[float] = []
    for x in different:
        at = [(math.log(one) if log else one) for one in (*kept[-1:], x)]
        letters = sum(len(f"{one:g}") for one in (*kept[-1:], x)) / 2
        if not kept or at[-1] - at[0] >= max(GAP, LETTER * (letters + 1)) * (high - low):
            kept.append(x)
    axis.set_xticks(kept, [f"{x:g}" for x in kept])
    axis.xaxis.set_minor_locator(NullLocator())


def rates(steps: Sequence[int], values: Sequence[float], steps_per_epoch: int, title: str, picture: Path) -> None:
    """Plot the learning rate over steps, with epochs on the upper axis."""
    figure = new_figure(7, 3.8)
    axis = figure.add_subplot()
    axis.plot(steps, values)
    axis.set(xlabel="step", ylabel="learning rate", title=title)
    axis.grid(alpha=0.3)
    scale: Any = (lambda x: x / steps_per_epoch, lambda x: x * steps_per_epoch)
    axis.secondary_xaxis("top", scale).set_xlabel("epoch")
    write_figure(figure, picture)


def range_test(
    values: Sequence[float], losses: Sequence[float], means: Sequence[float], suggested: float | None, picture: Path
) -> None:
    """Plot the loss of each step and its running mean over the learning rate, on a logarithmic axis."""
    figure = new_figure(7, 3.8)
    axis = figure.add_subplot()
    axis.semilogx(values, losses, color="C0", alpha=0.3, label="loss of a step")
    axis.semilogx(values, means, color="C0", label="running mean")
    if suggested is not None:
        axis.axvline(suggested, color="C3", linestyle="--", label=f"suggestion {suggested:.2g}")
    # A loss that explodes would flatten the rest of the curve.
    axis.set(xlabel="learning rate", ylabel="loss", ylim=(None, 1.5 * max(means[0], min(means))))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    write_figure(figure, picture)


def losses(curves: Mapping[str, Sequence[tuple[int, float]]], seconds: Mapping[str, float], picture: Path) -> None:
    """Plot losses over samples and over seconds.

    ``curves``: {name: (samples, loss) pairs}; ``seconds``: {name: seconds per sample}.
    """
    figure = new_figure(12, 4.5)
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    for k, (name, points) in enumerate(curves.items()):
        # Ten colors, then the same ones dashed.
        line: dict[str, Any] = {"color": f"C{k % 10}", "linestyle": "-" if k < 10 else "--", "linewidth": 1.2}
        samples, values = zip(*points, strict=True)
        left.plot(samples, values, label=name, **line)
        right.plot([at * seconds[name] for at in samples], values, **line)
    left.set(xlabel="samples of all ranks", ylabel="training loss")
    right.set(xlabel="seconds")
    if max(seconds.values()) > FAR * min(seconds.values()):
        right.set_xscale("log")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=8)
    write_figure(figure, picture)


def matrix(counts: Any, names: Sequence[str], picture: Path) -> None:
    """Plot a confusion matrix (K, K): colors show shares of each row, numbers show counts."""
    size = min(3 + 0.45 * len(names), 16)
    figure = new_figure(size, size)
    axis = figure.add_subplot()
    shares = counts / counts.sum(1, keepdims=True).clip(min=1)
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axis.set(xlabel="predicted", ylabel="true")
    if len(names) <= READABLE:
        classes = range(len(names))
        axis.set_xticks(classes, names, rotation=90)
        axis.set_yticks(classes, names)
        for i in classes:
            for j in classes:
                if counts[i, j]:
                    color = "white" if shares[i, j] > 0.5 else "black"
                    axis.text(j, i, f"{counts[i, j]:.0f}", ha="center", va="center", color=color, fontsize=8)
    write_figure(figure, picture)


def images(pixels: Any, titles: Sequence[str], picture: Path) -> None:
    """Plot images (n, height, width, channels) with titles, in color for 3 channels, else the first channel in gray."""
    across = min(4, len(titles))
    down = -(-len(titles) // across)
    figure = new_figure(2.2 * across, 2.6 * down)
    for k, (image, title) in enumerate(zip(pixels, titles, strict=True)):
        axis = figure.add_subplot(down, across, k + 1)
        low, high = float(image.min()), float(image.max())
        image = (image - low) / ((high - low) or 1.0)  # for any range of stored values
        axis.imshow(image if image.shape[-1] == 3 else image[..., 0], cmap="gray", vmin=0, vmax=1)
        axis.set_title(title, fontsize=9)
        axis.axis("off")
    write_figure(figure, picture)


def new_figure(width: float, height: float) -> Any:
    """Make a figure of this size in inches; needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.figure(figsize=(width, height), layout="constrained")


def svg(make: Callable[[], Any], title: str) -> str:
    """Return the figure of ``make`` as an SVG element. Its text stays text, in the colour of the page."""
    from matplotlib import pyplot, rc_context

    colored = ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color", "grid.color")
    style: Any = dict.fromkeys(colored, INK) | {"svg.fonttype": "none", "svg.hashsalt": title, "legend.frameon": False}
    buffer = io.StringIO()
    with rc_context(style):
        figure = make()
        figure.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
        pyplot.close(figure)
    element = buffer.getvalue().partition("<svg ")[2].replace(INK, "currentColor")
    element = re.sub(r'<g id="[^"]*"', "<g", element)  # which several figures on a page would repeat
    return f'<svg role="img" aria-label="{html.escape(printable(title, one_line=True))}" {element}'


def write_figure(figure: Any, picture: Path) -> None:
    """Write a figure and close it. Raises CheckpointError."""
    from matplotlib import pyplot

    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, dpi=120)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"the picture cannot be written: {reason}", where=str(picture)) from error
    finally:
        pyplot.close(figure)
