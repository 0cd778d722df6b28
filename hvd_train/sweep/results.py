"""Write and print the results of a sweep: a table, results.csv, results.png, best.yaml."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_train.config import resolved_yaml
from hvd_train.errors import ConfigError
from hvd_train.files import put
from hvd_train.report.plots import new_figure, set_ticks, write_figure
from hvd_train.report.text_tables import table
from hvd_train.run_folder.terminal import say
from hvd_train.sweep import repeats
from hvd_train.sweep.folder import Sweep, state
from hvd_train.sweep.halving import best_first
from hvd_train.sweep.trials import Trial

LETTERS = 24  # of a value in the picture, and of all values along an axis before they are rotated


def rows(sweep: Sweep) -> tuple[list[str], list[list[Any]]]:
    """Return (header, rows) for results.csv: values, state and results of each trial."""
    trials = sweep.trials
    states = [state(sweep, trial) for trial in trials]
    halved = ["rung"] if len(sweep.rungs) > 1 else []
    metrics = list(dict.fromkeys(key for one in states for key in one.summary if _metric(key)))
    header = ["trial", *trials[0].values, "state", *halved, *metrics, "samples_per_second"]
    lines = []
    for trial, one in zip(trials, states, strict=True):
        values = repeats.cells(trial.values)
        word = one.word if one.word != "failed" else f"failed: {one.error}"
        rung = [one.rung] * len(halved)
        lines.append([trial.name, *values, word, *rung, *(one.summary.get(key) for key in (*metrics, header[-1]))])
    return header, lines


def _metric(key: str) -> bool:
    return key.startswith("val_") and key != "val_samples"


def shown(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows) as text for the terminal, with rounded numbers."""
    header, lines = rows(sweep)
    digits = {header[-1]: ",.0f"}
    at = header.index("state")
    cells = [[_cell(name, x, digits) for name, x in zip(header, row, strict=True)] for row in lines]
    return header, [[*row[:at], row[at].partition(":")[0], *row[at + 1 :]] for row in cells]


def _cell(name: str, value: Any, digits: dict[str, str]) -> str:
    if value is None:
        return ""
    measured = isinstance(value, float) and (_metric(name) or name in digits)
    return format(value, digits.get(name, ".4f")) if measured else str(value)[:60]


def best(sweep: Sweep) -> Trial | None:
    """Return the best of the trials that completed the most rungs, or None."""
    states = [state(sweep, trial) for trial in sweep.trials]
    last = max(one.rung for one in states)
    # A trial that was stopped early may have a good value by chance.
    ranked = best_first(sweep, [t for t, one in zip(sweep.trials, states, strict=True) if one.rung == last])
    return ranked[0] if ranked else None


def left(sweep: Sweep) -> int:
    """Return the number of trials that have not ended, which ``--resume`` runs."""
    return sum(state(sweep, trial).word in ("waiting", "running", "paused") for trial in sweep.trials)


def report(sweep: Sweep, code: int = 0) -> int:
    """Print the results of a sweep, or a notice if ``code`` stopped it; return the exit code."""
    if code:
        say("stopped; --resume goes on", err=True)
        return code
    say(finish(sweep), styled=True)
    return 5 if left(sweep) else 0


def finish(sweep: Sweep) -> str:
    """Write results.csv, results.png and best.yaml; return the table and the lines below it as text.

    Raises ConfigError if all trials failed.
    """
    folder, trials = sweep.folder, sweep.trials
    states = [state(sweep, trial) for trial in trials]
    _write_csv(folder / "results.csv", *rows(sweep))
    failed = [one for one in states if one.word == "failed"]
    if len(failed) == len(trials):
        raised = ConfigError(f"all {len(trials)} trials failed, the first with: {failed[0].error}", where=str(folder))
        # If all failed with the same code, that one tells the cause.
        raised.exit_code = failed[0].code if len({one.code for one in failed}) == 1 else 1
        raise raised
    lines = [table(*shown(sweep))]
    if sweep.repeats:
        lines += ["", *_of_repeats(sweep)]
    first = best(sweep)
    if first is not None and not sweep.repeats:
        value = state(sweep, first).summary[first.config.checkpoint.monitor]
        lines.append(_write_best(sweep, [first], f"{first.name} ({first.description})", f"{value:.4f}", first.name))
    if first is None and not left(sweep):
        lines.append(f"best: none, as no trial has a value of {trials[0].config.checkpoint.monitor}")
    if left(sweep):
        lines.append(f"{left(sweep)} of {len(trials)} trials have not ended; --resume runs them")
    if failed:
        lines.append(f"{len(failed)} of {len(trials)} trials failed, the first with: {failed[0].error}")
    return "\n".join(lines)


def _write_csv(path: Path, header: list[str], body: list[list[Any]]) -> None:
    text = io.StringIO()
    csv.writer(text).writerows([header, *body])
    put(path, text.getvalue().encode())


def _of_repeats(sweep: Sweep) -> list[str]:
    """Write means.csv, best.yaml and results.png; return the table of means and the best combination as lines."""
    _write_csv(sweep.folder / "means.csv", *repeats.rows(sweep))
    lines, one = [table(*repeats.shown(sweep)), *repeats.notes(sweep)], repeats.best_group(sweep)
    if one is not None:
        mean = repeats.cell(*one.means[one.trials[0].config.checkpoint.monitor])
        lines.append(_write_best(sweep, one.trials, one.description, mean, f"{one.description} by its mean"))
    return lines


def _write_best(sweep: Sweep, trials: Sequence[Trial], what: str, value: str, title: str) -> str:
    """Write best.yaml and results.png; return the line about the best trials. ``title``: in the picture."""
    config, file = trials[0].config, sweep.folder / "best.yaml"
    # It uses all data and the first seed. A fold that the user's configuration sets is kept.
    data = config.data.model_copy(update={"fold": None} if repeats.FOLD in sweep.repeats else {})
    # A folder of its own, so that training with best.yaml does not overwrite the trial.
    chosen = config.model_copy(update={"run_dir": str(sweep.folder / "best"), "data": data})
    put(file, resolved_yaml(chosen).encode())
    picture(sweep.folder / "results.png", sweep, trials, title)
    return f"best: {what}, {config.checkpoint.monitor} {value}; {file}"


def picture(path: Path, sweep: Sweep, best_trials: Sequence[Trial], title: str) -> None:
    """Plot the monitored value over each parameter. The best trials are marked; trials stopped early are hollow.

    ``best_trials``: one, or all trials of the combination with the best mean. ``title``: their name in the legend.
    """
    monitor = best_trials[0].config.checkpoint.monitor
    trials, states = sweep.trials, [state(sweep, trial) for trial in sweep.trials]
    done = [trial for trial, one in zip(trials, states, strict=True) if one.summary.get(monitor) is not None]
    values = [states[trial.number].summary[monitor] for trial in done]
    filled = ["C0" if states[trial.number].word == "done" else "none" for trial in done]
    keys = [key for key in trials[0].values if len({json.dumps(trial.values[key]) for trial in trials}) > 1]
    keys = keys or list(trials[0].values)
    figure = new_figure(4.2 * len(keys), 3.6)
    axes = figure.subplots(1, len(keys), sharey=True, squeeze=False)[0]
    for axis, key in zip(axes, keys, strict=True):
        at = [trial.values[key] for trial in done]
        numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in at)
        x_values = at if numbers else [str(x) if len(str(x)) <= LETTERS else f"{str(x)[:LETTERS]}..." for x in at]
        axis.scatter(x_values, values, facecolors=filled, edgecolors="C0", label="trial")
        # Some folds of the best combination may have failed.
        marked = [k for k, trial in enumerate(done) if trial.number in {one.number for one in best_trials}]
        stars: dict[str, Any] = {"marker": "*", "s": 200, "color": "C1", "label": f"best: {title}"}
        axis.scatter([x_values[k] for k in marked], [values[k] for k in marked], **stars)
        if numbers:
            set_ticks(axis, at, log=min(at) > 0 and max(at) >= 8 * min(at))
        elif sum(map(len, set(x_values))) > LETTERS:
            axis.tick_params("x", rotation=90)
        axis.set(xlabel=key)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(monitor)
    axes[0].legend(fontsize=8)
    write_figure(figure, path)
