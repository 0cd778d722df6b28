"""``hvd-train report``: one HTML page about runs, complete in itself: no script, no network, pictures as SVG."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from hvd_train import __version__, files
from hvd_train.config import leaves, load_config
from hvd_train.errors import CheckpointError, printable
from hvd_train.report import plots
from hvd_train.report.run import ReportedRun
from hvd_train.report.text_tables import cell
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
STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --paper: #fff; --line: #c9ced4; --soft: #f3f5f7; --dim: #5a646e }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --paper: #14181c; --line: #434b54; --soft: #1f252b; --dim: #a3adb7 } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 70rem;
  margin: 0 auto; padding: 1.5rem 1.25rem 4rem }
h1 { font-size: 1.7rem; margin: 0 } h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem }
p { margin: .4rem 0; max-width: 46rem } .dim, figcaption { color: var(--dim) }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: .4rem 0 1rem }
caption { text-align: left; color: var(--dim); padding-bottom: .25rem }
th, td { text-align: left; vertical-align: top; padding: .25rem 1rem .25rem 0; border-top: 1px solid var(--line) }
td { overflow-wrap: break-word; max-width: 26rem }
thead th { border: 0; font-weight: 600 } tbody th { font-weight: 400 }
td.number, th.number { text-align: right; white-space: nowrap } caption { white-space: nowrap }
.wide { overflow-x: auto } .wide:focus-visible { outline: 2px solid }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: .5rem 1rem }
figure { margin: 0; break-inside: avoid } svg { display: block; width: 100%; height: auto }
.legend svg { width: auto; max-width: 100% }
pre { background: var(--soft); padding: .75rem; overflow-x: auto; font-size: .8rem } summary { cursor: pointer }
@media print {
  :root { color-scheme: light; --ink: #000; --paper: #fff; --line: #999; --dim: #333 }
  @page { size: A4; margin: 16mm } body { font-size: 10pt; max-width: none; padding: 0 } details { display: none }
  .curves { grid-template-columns: repeat(2, 1fr) } h2 { break-after: avoid } tr { break-inside: avoid }
  .wide { overflow: visible } table { font-size: 8.5pt } caption { white-space: normal }
  thead { display: table-header-group } }
"""


def report(run_dirs: Sequence[Path], page: Path) -> None:
    """Write the page about these runs. Raises ConfigError and CheckpointError."""
    runs = [ReportedRun(run_dir, name) for run_dir, name in zip(run_dirs, plots.names(run_dirs), strict=True)]
    title = f"Training report: {', '.join(run.name for run in runs)}"
    made = f"Made by hvd_train {__version__}, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}."
    sections = (_overview, _curves, _times, _configuration, _ranks, _checkpoints, _incidents, _verify)
    parts = [
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{_text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>",
        f"<h1>{_text(title)}</h1>\n<p class='dim'>{_text(made)}</p>",
        *(part for section in sections for part in section(runs)),
        "</main>\n</body>\n</html>\n",
    ]
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        files.put(page, "\n".join(parts).encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise CheckpointError(f"the page cannot be written: {error.strerror}", where=str(page)) from error


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
        rows.append([*row, *(_number(val.get(name)) for name in results), _number(speed, ",.0f")])
    yield _section("Result")
    if len(runs) == 1:
        yield _table("", ["", ""], [*zip(header, rows[0], strict=True)])
    else:
        yield _table("The last evaluation of each run.", header, rows)
    for run in runs:
        if best := run.best():
            yield f"<p>{_text(f'{run.name}: the best checkpoint has {best}.')}</p>"


def _curves(runs: Runs) -> Iterator[str]:
    """A picture of each metric, the learning rate and the speed."""
    drawn = [(run.name, run.rows) for run in runs]
    lines = [run.last("train") or run.last("val") for run in runs]
    by = "epoch" if min((line.get("epoch", 0) for line in lines), default=0) >= FEWEST_EPOCHS else "step"
    metrics = plots.metrics(drawn)
    if not any(lines):
        return
    yield _section("Curves")
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
    yield _section("Time")
    yield f"<figure>{plots.svg(partial(plots.shares_figure, shares, names), 'shares of the time of each run')}</figure>"
    rows = [[name, *(f"{shares[run.name][k]:.1%}" for run in told)] for k, name in enumerate(names)]
    for name, key, form in (
        ("seconds of the allocation", "allocation", ",.0f"),
        ("of these in steps that count", "effective", ".1%"),
    ):
        cells = [_number(run.allocation.get(key), form) for run in told]
        rows += [[name, *cells]] if any(cell != "-" for cell in cells) else []
    memory = [
        max((row["memory_bytes"] for row in run.rows if safe_reading.number(row.get("memory_bytes"))), default=0)
        for run in told
    ]
    rows += [["memory of a rank, MB", *(f"{x / 1e6:,.0f}" for x in memory)]] if any(memory) else []
    yield _table("Shares are means over ranks.", ["", *(run.name for run in told)], rows)


def _configuration(runs: Runs) -> Iterator[str]:
    """What differs from the defaults, what differs between the runs, and all keys of each."""
    defaults = dict(leaves(load_config().resolved().model_dump(mode="json")))
    keys = [key for key in dict.fromkeys(key for run in runs for key in run.config) if key not in OWN]
    chosen = [key for key in keys if key in ALWAYS or any(run.config.get(key) != defaults.get(key) for run in runs)]
    if not any(run.config for run in runs):
        return
    yield _section("Configuration")
    for caption, differing in (
        ("Where the runs differ.", True),
        (
            "The same in all runs." if len(runs) > 1 else "The main keys, and all that differ from their defaults.",
            False,
        ),
    ):
        rows = []
        for key in chosen:
            values = [_value(run.config.get(key, "-")) for run in runs]
            if (len(set(values)) > 1) is differing:
                rows.append([key, *(values if differing else values[:1])])
        if rows:
            yield _table(caption, ["key", *(run.name for run in runs)] if differing else ["key", "value"], rows)
    for run in runs:
        lines = "\n".join(f"{key}: {_value(value)}" for key, value in run.config.items())
        yield f"<details><summary>{_text(f'All keys of {run.name}')}</summary><pre>{_text(lines)}</pre></details>"


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
        rows.append([name, *(_value(run.environment.get(key, "-")) for run in runs)])
    hosts = [run.environment.get("hosts") for run in runs]
    if any(hosts):
        named = [one.items() if isinstance(one, dict) else () for one in hosts]
        rows.append(["ranks of each host", *(", ".join(f"{x}: {n}" for x, n in one) or "-" for one in named)])
    versions = [run.environment.get("versions") for run in runs]
    known = [one if isinstance(one, dict) else {} for one in versions]
    rows += [
        [name, *(_value(one.get(name, "-")) for one in known)] for name in dict.fromkeys(n for v in known for n in v)
    ]
    if any(run.environment for run in runs):
        yield _section("Ranks and software")
        yield _table("", ["", *(run.name for run in runs)], rows)


def _checkpoints(runs: Runs) -> Iterator[str]:
    rows = [[run.name, *row] for run in runs for row in run.checkpoints()]
    if rows:
        yield _section("Checkpoints")
        yield _table("", ["run", "checkpoint", "epoch", "value", "size", ""], rows)


def _incidents(runs: Runs) -> Iterator[str]:
    yield _section("Incidents")
    several = len(runs) > 1
    told = [f"{run.name}: {line}" if several else line for run in runs for line in run.incidents()]
    items = "".join(f"<li>{_text(line)}</li>" for line in told)
    yield f"<ul>{items}</ul>" if told else "<p>The run folder records none.</p>"


def _verify(runs: Runs) -> Iterator[str]:
    """The figures of ``hvd-train verify``, where it has left them in the run folder."""
    found = [run for run in runs if run.verify]
    if found:
        yield _section("Proof of equality")
    for run in found:
        yield f"<p>{_text(run.name)}: {_text(run.verify.get('title', ''))}: {_text(run.verify.get('verdict', ''))}.</p>"
        for name, header, rows in run.proofs():
            yield _table(name, header, rows)


def _section(title: str) -> str:
    return f"<h2>{_text(title)}</h2>"


def _table(caption: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a table. The first cell of a row is its heading; columns of numbers are aligned to the right."""
    numeric = [all(_is_number(row[k]) for row in rows) for k in range(len(header))]
    kinds = [" class='number'" if one else "" for one in numeric]
    head = "".join(f"<th scope='col'{kind}>{_text(name)}</th>" for kind, name in zip(kinds, header, strict=True))
    body = []
    for first, *rest in rows:
        cells = "".join(f"<td{kind}>{_text(x)}</td>" for kind, x in zip(kinds[1:], rest, strict=True))
        body.append(f"<tr><th scope='row'>{_text(first)}</th>{cells}</tr>")
    head = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
    named = f"<caption>{_text(caption)}</caption>" if caption else ""
    lines = "\n".join(body)
    table = f"<table>{named}{head}\n<tbody>{lines}</tbody></table>"
    return f"<div class='wide' tabindex='0'>{table}</div>"  # the focus lets a keyboard scroll a wide one


def _is_number(value: object) -> bool:
    return re.fullmatch(r"-?[\d.,]+%?|-?", str(value)) is not None


def _number(value: object, form: str = ".4f") -> str:
    return cell(value, form) if safe_reading.number(value) else "-"


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _text(value: object) -> str:
    """Escape text from a run folder, which another user may have written."""
    return html.escape(printable(str(value)))
