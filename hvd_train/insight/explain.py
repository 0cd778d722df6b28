"""``hvd-train explain``: where the time of a run goes, and what would make it faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.config import leaves
from hvd_train.core.shares import SHOWN, WORDS, duration
from hvd_train.errors import CheckpointError, amount
from hvd_train.insight import recorded_steps
from hvd_train.insight.factors import factors
from hvd_train.insight.findings import Case, findings
from hvd_train.report import plots
from hvd_train.report.text_tables import table
from hvd_train.run_folder import safe_reading, step_times

BRIEF_SECONDS = 5.0  # of steps; less says little
MOST_ROWS = 16  # ranks that the table shows


def case_of(run_dir: Path, after_step: int = 0) -> Case:
    """Read the run in a folder. Raises ConfigError if no steps are recorded in it."""
    recorded = recorded_steps.read(run_dir, after_step)
    environment: dict[str, Any] = {}
    with suppress(FileNotFoundError, CheckpointError):
        environment = safe_reading.json_object(run_dir / "environment.json")
    config = dict(leaves(safe_reading.yaml_object(run_dir / "config.yaml")))
    return Case(recorded, config, environment, step_times.totals(run_dir))


def explained(case: Case) -> Iterator[str]:
    """Yield the paragraphs of the explanation."""
    recorded = case.recorded
    hosts = len(set(recorded.hosts))
    where = f" on {amount(hosts, 'host')}" if hosts else ""
    median, late = (1000 * seconds for seconds in recorded.quantiles(0.5, 0.95))
    model = f"{case.setting('framework', 'unknown')}, {case.setting('model.name', 'unknown')}: "
    yield (
        f"{model}{amount(recorded.ranks, 'rank')}{where}; a step takes {median:,.2f} ms, 1 of 20 longer than"
        f" {late:,.2f} ms (in {amount(int(recorded.steps.sum()), 'recorded step')})"
    )
    yield _ranks(case)
    yield _factors(case)
    counted, allocated = case.allocation
    if allocated:
        began = f"; the start took {min(case.part('start') / allocated, 1):.0%}" if case.recorded.starts == 1 else ""
        began = began or f"; there were {case.recorded.starts} starts"
        yield f"{min(counted / allocated, 1):.0%} of {duration(allocated)} went into steps that count{began}."
    if case.on_gpu:
        yield "The ranks compute on GPUs, behind their processes: slow ranks and transfers cannot be told apart here."
    found = findings(case)
    if case.in_steps < BRIEF_SECONDS:
        yield f"The steps took {case.in_steps:.1f} seconds in all: too short to judge. A longer run says more."
    if not found:
        yield "Nothing was found that would be worth a change."
    for place, one in enumerate(found, 1):
        gain = f" ({one.gain_words})" if one.gain_words else ""
        yield f"{place}. {one.cause}{gain}: {one.evidence}.\n   {one.cure}"


def _ranks(case: Case) -> str:
    """Return the table of shares, a row for each rank; of many ranks those that differ most from the mean."""
    recorded, (names, shares) = case.recorded, _shares(case)
    apart = np.abs(shares - shares.mean(axis=0)).sum(axis=1)
    ranks = sorted(np.argsort(-apart, kind="stable")[:MOST_ROWS].tolist())
    several = len(set(recorded.hosts)) > 1
    header = ["rank", *["host"] * several, *(WORDS.get(name, name) for name in names)]
    rows = [
        [str(rank), *recorded.hosts[rank : rank + 1] * several, *(f"{x:.1%}" for x in shares[rank])] for rank in ranks
    ]
    if recorded.ranks > 1:
        rows.append(["mean", *[""] * several, *(f"{x:.1%}" for x in shares.mean(axis=0))])
    return table(header, rows)


def _shares(case: Case) -> tuple[list[str], np.ndarray]:
    """Return the parts that take half a percent of a rank's time or more, and their shares, (ranks, parts)."""
    names = [name for name in SHOWN if name != "start"]
    spent = case.recorded.spent[:, [SHOWN.index(name) for name in names]]
    shares = spent / np.maximum(spent.sum(axis=1, keepdims=True), 1e-12)
    kept = [k for k in range(len(names)) if shares[:, k].max() >= 0.005]
    return [names[k] for k in kept], shares[:, kept]


def _factors(case: Case) -> str:
    one = factors(case.recorded) if case.in_lockstep or (case.recorded.ranks == 1 and not case.on_gpu) else None
    if one is None:
        return ""
    return (
        f"parallel efficiency {one.parallel:.3f} = load balance {one.load_balance:.3f} x serialization"
        f" {one.serialization:.3f} x input and log {one.preparation:.3f} x transfer {one.transfer:.3f}"
    )


def draw(case: Case, picture: Path) -> None:
    """Draw the shares of each rank's time. Raises CheckpointError if the file cannot be written."""
    names, shares = _shares(case)
    bars = {case.named([rank]): shares[rank].tolist() for rank in range(case.recorded.ranks)}
    figure = plots.shares_figure(bars, names)
    plots.write_figure(figure, picture)
