"""``hvd-train report``: one HTML page about runs, with pictures as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hvd_train.config import leaves, load_config
from hvd_train.core.shares import WORDS
from hvd_train.report import plots
from hvd_train.report.html_page import escaped, heading, number, shown, table, write
from hvd_train.report.run import ReportedRun
from hvd_train.run_folder import safe_reading

FEWEST_EPOCHS = 4  # with fewer, curves are drawn over steps
OWN = ("run_dir", "code_dir", "loggers", "tensorboard")  # keys that say nothing about the result
# Keys that are shown also with their defaults.
ALWAYS = (
    "batch_size",
    "max_epochs",
    "optim.name",
    "optim.lr",
    "optim.schedule",
    "precision",
    "seed",
)


def report(run_dirs: Sequence[Path], page: Path) -> None:
    """Write the page about these runs. Raises ConfigError and CheckpointError."""
    runs = [ReportedRun(run_dir, name) for run_dir, name in zip(run_dirs, plots.names(run_dirs), strict=True)]
    title = f"Training report: {', '.join(run.name for run in runs)}"
    sections = (_overview, _curves, _times, _configuration, _ranks, _checkpoints, _incidents, _verify)
    write(page, title, (part for section in sections for part in section(runs)))


Runs = Sequence[ReportedRun]


def _overview(runs: Runs) -> Iterator[str]:
    """One row a run: what it trained, how far it came, and its results."""
    results = [name for name in plots.metrics([(run.name, run.rows) for run in runs])]
    header = ["run", "state", "framework", "model", "data", "ranks", "epochs", "steps"]
    header += [f"val {name.replace('_', ' ')}" for name in results] + ["samples/s"]
    rows = []
    for run in runs:
        train, val = run.last("train"), run.last("val")
        state = run.state.partition(": ")[0].partition("; ")[0]
        row = [run.name, state, *(run.config.get(key, "") for key in ("framework", "model.name", "data.name"))]
        row += [run.environment.get("ranks", ""), train.get("epoch", 0), train.get("step", 0)]
        speed = run.summary.get("samples_per_second") or train.get("samples_per_second")
        rows.append([*row, *(number(val.get(name)) for name in results), number(speed, ",.0f")])
    yield heading("Result")
    if len(runs) == 1:
        yield table("", ["", ""], [*zip(header, rows[0], strict=True)])
    else:
        yield table("The last evaluation of each run.", header, rows)
    for run in runs:
        if best := run.best():
            yield f"<p>{escaped(f'{run.name}: the best checkpoint has {best}.')}</p>"


def _curves(runs: Runs) -> Iterator[str]:
    """A picture of each metric, the learning rate and the speed."""
    drawn = [(run.name, run.rows) for run in runs]
    lines = [run.last("train") or run.last("val") for run in runs]
    by = "epoch" if min((line.get("epoch", 0) for line in lines), default=0) >= FEWEST_EPOCHS else "step"
    metrics = plots.metrics(drawn)
    if not any(lines):
        return
    yield heading("Curves")
    both: tuple[str, ...] = ("train", "val")
    figures = [(name, f"{name} by {by}, training and validation", both) for name in metrics]
    figures += [("lr", f"learning rate by {by}", ("train",)), ("samples_per_second", f"samples/s by {by}", ("train",))]
    legend = "legend: training dashed, validation solid, a mark for each run"
    yield f"<figure class='legend'>{plots.svg(partial(plots.legend_figure, drawn), legend)}</figure>"
    yield "<div class='curves'>"
    for value, title, events in figures:
        make: Callable[[], Any] = partial(plots.curve_figure, drawn, [value], by, events, legend=False)
        yield f"<figure>{plots.svg(make, title)}</figure>"
    yield "</div>"


def _times(runs: Runs) -> Iterator[str]:
    """What the time was spent on, where the run folders say so."""
    told = [run for run in runs if run.times]
    if not told:
        return
    names = [*dict.fromkeys(name for run in told for name, x in run.times.items() if x)]
    shares = {run.name: [run.times.get(name, 0.0) / sum(run.times.values()) for name in names] for run in told}
    yield heading("Time")
    yield f"<figure>{plots.svg(partial(plots.shares_figure, shares, names), 'shares of the time of each run')}</figure>"
    rows = [[WORDS.get(name, name), *(f"{shares[run.name][k]:.1%}" for run in told)] for k, name in enumerate(names)]
    for name, key, form in (
        ("seconds of the allocation", "allocation", ",.0f"),
        ("of these in steps that count", "effective", ".1%"),
    ):
        cells = [number(run.allocation.get(key), form) for run in told]
        rows += [[name, *cells]] if any(cell != "-" for cell in cells) else []
    memory = [
        max((row["memory_bytes"] for row in run.rows if safe_reading.number(row.get("memory_bytes"))), default=0)
        for run in told
    ]
    words = [f"{x / 1e6:,.0f}" if x > 0 else "-" for x in memory]
    rows += [["memory of a rank, MB", *words]] if any(memory) else []
    yield table("Shares are means over ranks.", ["", *(run.name for run in told)], rows)


def _configuration(runs: Runs) -> Iterator[str]:
    """What differs from the defaults, what differs between the runs, and all keys of each."""
    defaults = dict(leaves(load_config().resolved().model_dump(mode="json")))
    keys = [key for key in dict.fromkeys(key for run in runs for key in run.config) if key not in OWN]
    chosen = [key for key in keys if key in ALWAYS or any(run.config.get(key) != defaults.get(key) for run in runs)]
    if not any(run.config for run in runs):
        return
    yield heading("Configuration")
    for caption, differing in (
        ("Where the runs differ.", True),
        (
            "The same in all runs." if len(runs) > 1 else "The main keys, and all that differ from their defaults.",
            False,
        ),
    ):
        rows = []
        for key in chosen:
            values = [shown(run.config.get(key, "-")) for run in runs]
            if (len(set(values)) > 1) is differing:
                rows.append([key, *(values if differing else values[:1])])
        if rows:
            yield table(caption, ["key", *(run.name for run in runs)] if differing else ["key", "value"], rows)
    for run in runs:
        lines = "\n".join(f"{key}: {shown(value)}" for key, value in run.config.items())
        yield f"<details><summary>{escaped(f'All keys of {run.name}')}</summary><pre>{escaped(lines)}</pre></details>"


def _ranks(runs: Runs) -> Iterator[str]:
    """Ranks, hosts and versions, a column for each run."""
    rows = []
    for key, name in (
        ("ranks", "ranks"),
        ("ranks_on_this_host", "ranks on the host of rank 0"),
        ("host", "host of rank 0"),
        ("launcher", "launcher"),
        ("cores", "cores of this host"),
        ("threads", "threads of a rank"),
        ("compression", "compression"),
    ):
        rows.append([name, *(shown(run.environment.get(key, "-")) for run in runs)])
    hosts = [run.environment.get("hosts") for run in runs]
    if any(hosts):
        named = [one.items() if isinstance(one, dict) else () for one in hosts]
        rows.append(["ranks of each host", *(", ".join(f"{x}: {n}" for x, n in one) or "-" for one in named)])
    versions = [run.environment.get("versions") for run in runs]
    known = [one if isinstance(one, dict) else {} for one in versions]
    rows += [
        [name, *(shown(one.get(name, "-")) for one in known)] for name in dict.fromkeys(n for v in known for n in v)
    ]
    if any(run.environment for run in runs):
        yield heading("Ranks and software")
        yield table("", ["", *(run.name for run in runs)], rows)


def _checkpoints(runs: Runs) -> Iterator[str]:
    rows = [[run.name, *row] for run in runs for row in run.checkpoints()]
    if rows:
        yield heading("Checkpoints")
        yield table("", ["run", "checkpoint", "epoch", "value", "size", ""], rows)


def _incidents(runs: Runs) -> Iterator[str]:
    yield heading("Incidents")
    several = len(runs) > 1
    told = [f"{run.name}: {line}" if several else line for run in runs for line in run.incidents()]
    items = "".join(f"<li>{escaped(line)}</li>" for line in told)
    yield f"<ul>{items}</ul>" if told else "<p>The run folder records none.</p>"


def _verify(runs: Runs) -> Iterator[str]:
    """The figures of ``hvd-train verify``, where it has left them in the run folder."""
    found = [run for run in runs if run.verify]
    if found:
        yield heading("Proof of equality")
    for run in found:
        words = f"{run.name}: {run.verify.get('title', '')}: {run.verify.get('verdict', '')}."
        yield f"<p>{escaped(words)}</p>"
        for name, header, rows in run.proofs():
            yield table(name, header, rows)
