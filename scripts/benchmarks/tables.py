"""The results of compare.py, link.py and modes.py as Markdown and as pictures."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.mode_comparison.results import milliseconds


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]]
    return "\n".join(lines) + "\n"


def comparison(framework: str, results: dict[str, dict[str, dict]]) -> str:
    """Return a table. results: {model: {engine: figures}}."""
    header = [
        "model",
        "engine",
        "samples/s",
        "ours is faster by",
        "95 % interval",
        "CPU s/step",
        "peak MB",
        "same losses",
    ]
    rows = []
    for model, engines in results.items():
        for engine, figures in engines.items():
            if "error" in figures:
                rows.append([model, engine, figures["error"].replace("|", "/"), "", "", "", "", ""])
                continue
            low, high = figures["interval"]
            rows.append(
                [
                    model,
                    engine,
                    f"{figures['samples_per_second']:,.0f}",
                    "" if engine == "ours" else f"{figures['ours_is_faster_by']:.2f}",
                    "" if engine == "ours" else f"{low:.2f} to {high:.2f}",
                    f"{figures['cpu_seconds_per_step']:.4f}",
                    f"{figures['peak_rss_mb']:,}",
                    figures["same_losses"],
                ]
            )
    return f"### {framework}\n\n" + markdown(header, rows)


def overview(results: dict[str, dict[str, dict[str, dict]]]) -> str:
    """Return a row per framework and model: our speed relative to each engine. results: {framework: ...}."""
    parts = []
    for framework, models in results.items():
        names = [n for n in dict.fromkeys(e for engines in models.values() for e in engines) if n != "ours"]
        rows = []
        for model, engines in models.items():
            row = [model, f"{engines['ours']['samples_per_second']:,.0f}"]
            for name in names:
                figures = engines.get(name, {})
                row.append(f"{figures['ours_is_faster_by']:.2f}" if "ours_is_faster_by" in figures else "-")
            rows.append(row)
        parts.append(markdown([framework, "ours, samples/s", *names], rows))
    return "\n".join(parts)


def _coloured(names: list[str]) -> list[tuple[str, Any]]:
    """Return (name, colour): ours in blue, other engines in orange, engines without an exchange in grey."""
    from matplotlib import colormaps

    blue = [name for name in names if name.startswith("ours")]
    grey = [name for name in names if name.startswith(("copies", "one process"))]
    orange = [name for name in names if name not in blue + grey]
    colours = []
    for family, members in (("Blues", blue), ("Oranges", orange), ("Greys", grey)):
        shades = np.linspace(0.85, 0.3, len(members))
        colours += [(name, colormaps[family](shade)) for name, shade in zip(members, shades, strict=True)]
    return colours


def picture(results: dict[str, dict[str, dict[str, dict]]], path: Path) -> None:
    """Draw a panel per framework: each model's throughput relative to ours. results: {framework: ...}."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(results), 1, figsize=(11, 4 * len(results)), squeeze=False)
    for axis, (framework, models) in zip(axes[:, 0], results.items(), strict=True):
        names = _coloured(list(dict.fromkeys(e for engines in models.values() for e in engines)))
        width = 0.85 / len(names)
        for k, (name, colour) in enumerate(names):
            places, heights, errors = [], [], [[], []]
            for m, engines in enumerate(models.values()):
                figures = engines.get(name, {})
                if "samples_per_second" not in figures:
                    continue
                share = 1 / figures["ours_is_faster_by"]
                low, high = (1 / x for x in reversed(figures["interval"]))
                places.append(m + (k - len(names) / 2 + 0.5) * width)
                heights.append(share)
                errors[0].append(max(share - low, 0))
                errors[1].append(max(high - share, 0))
            axis.bar(places, heights, width, yerr=errors, label=name, color=colour, error_kw={"lw": 0.8})
        axis.axhline(1, color="black", lw=0.8)
        axis.set_xticks(range(len(models)), models)
        axis.set_ylabel("throughput, ours = 1")
        axis.set_title(f"{framework}, 2 ranks")
        axis.legend(fontsize=8, ncol=1, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def over_link(framework: str, results: dict[str, dict]) -> str:
    """Return a row per engine. results: {rate: {"gbit_per_second": [before, after], "steps": {engine: figures}}}."""
    names = list(dict.fromkeys(name for one in results.values() for name in one["steps"]))
    header = ["engine"]
    for rate, one in results.items():
        header += [f"{rate} (measured {one['gbit_per_second'][0]:.2g} Gbit/s): ms/step", "faster than none"]
    rows = []
    for name in names:
        row = [name]
        for one in results.values():
            figures = one["steps"].get(name, {})
            if "milliseconds" in figures:
                choice = f" ({figures['taken']})" if "taken" in figures else ""
                low, high = figures["interval"]
                row += [f"{figures['milliseconds']:,.0f}{choice}"]
                row += [f"{figures['faster_than_none']:.2f} ({low:.2f} to {high:.2f})"]
            else:
                row += [figures.get("error", "-").replace("|", "/"), ""]
        rows.append(row)
    return f"### {framework}\n\n" + markdown(header, rows)


def link_picture(results: dict[str, dict[str, dict]], path: Path) -> None:
    """Draw a panel per framework and rate: milliseconds per step of each engine."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rates = list(dict.fromkeys(rate for one in results.values() for rate in one))
    figure, axes = plt.subplots(len(results), len(rates), figsize=(4.2 * len(rates), 3.4 * len(results)), squeeze=False)
    for row, (framework, one) in zip(axes, results.items(), strict=True):
        for axis, rate in zip(row, rates, strict=True):
            steps = {
                n: f["milliseconds"] for n, f in one.get(rate, {"steps": {}})["steps"].items() if "milliseconds" in f
            }
            colours = ["#4477aa" if name.startswith("ours") else "#999999" for name in steps]
            axis.barh(list(steps), list(steps.values()), color=colours)
            axis.invert_yaxis()
            axis.set_title(f"{framework}, {rate}: ms per step", fontsize=9)
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _of_ways(figures: dict[str, list[dict]]) -> dict[tuple[str, str, str, int], dict[str, float]]:
    """Return {key: {way: median ms per step}}. figures: {framework-rate-model-ranks: ways}; key: these four."""
    found = {}
    for key, results in figures.items():
        framework, rate, model, ranks = key.split("-")
        ms = {one["way"]["name"]: [run["ms"] for run in one["figures"]] for one in results if one["figures"]}
        found[framework, rate, model, int(ranks)] = {name: float(np.median(values)) for name, values in ms.items()}
    return found


def of_ways(figures: dict[str, list[dict]]) -> str:
    """Return a table for each model: a row for each way, with ms per step for each framework and link."""
    found, tables = _of_ways(figures), []
    for model in dict.fromkeys(model for _, _, model, _ in found):
        columns = {column: ways for column, ways in found.items() if column[2] == model}
        header = [f"{model}, ms a step", *(f"{framework}, {rate}, {n} ranks" for framework, rate, _, n in columns)]
        ways = dict.fromkeys(way for column in columns.values() for way in column)
        rows = [[way, *(milliseconds(x[way]) if way in x else "-" for x in columns.values())] for way in ways]
        tables.append(markdown(header, rows))
    return "\n\n".join(tables)


def ways_picture(figures: dict[str, list[dict]], path: Path) -> None:
    """Draw a row of panels for each framework: ms per step of each model over links, or over several ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = _of_ways(figures)
    frameworks, models = (list(dict.fromkeys(column[k] for column in columns)) for k in (0, 2))
    size = (4 * len(models) + 2, 3.6 * len(frameworks))
    figure, axes = plt.subplots(len(frameworks), len(models), figsize=size, squeeze=False)
    for axis, (framework, model) in zip(axes.flat, product(frameworks, models), strict=True):
        chosen = {(rate, n): x for (f, rate, m, n), x in columns.items() if (f, m) == (framework, model)}
        over_ranks = len({n for _, n in chosen}) > 1
        ways = list(dict.fromkeys(way for x in chosen.values() for way in x))
        for k, way in enumerate(ways):
            places = [str(n) if over_ranks else rate for (rate, n), x in chosen.items() if way in x]
            values = [x[way] for x in chosen.values() if way in x]
            line = "-" if k < 10 else "--"
            axis.plot(places, values, marker="o", markersize=3, color=f"C{k % 10}", linestyle=line, label=way)
        axis.set_yscale("log")
        axis.set(xlabel="ranks" if over_ranks else "link", ylabel="ms a step", title=f"{model}, {framework}")
        axis.grid(alpha=0.3, which="both")
    for row in axes:
        row[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
