"""``hvd-train verify``: run the same few steps on N ranks and on one, in both frameworks, and compare in 64 bits.

Each world is launched as a separate job, with the same code as a training (``record.py``). This process reads their
records.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_train.config import Config, resolved_yaml
from hvd_train.errors import ConfigError, amount
from hvd_train.frameworks import FRAMEWORKS
from hvd_train.launch.start import launch
from hvd_train.report.text_tables import table
from hvd_train.run_folder.terminal import say
from hvd_train.verify.difference import TOLERANCE, Difference, Runs, findings, rows
from hvd_train.verify.page import Curves, write
from hvd_train.verify.record import Record

SHOWN = 24  # maximum table rows in the terminal; the page has all
REASON = (
    f"tolerance: {TOLERANCE:g} of a tensor's largest entry, in 64 bits: sums in another order move it by about 1e-13, "
    "a fault by 1e-6 and more. In 32 bits the same drift grows with each step, so it is shown and decides nothing."
)


@dataclass(frozen=True)
class Comparison:
    """A comparison of two worlds: rows in 64 bits and, row by row, in the configured precision."""

    title: str
    rows: list[Difference]
    native_rows: list[Difference]
    findings: list[str]


def verify(
    config: Config,
    num_proc: int,
    steps: int,
    launcher: str = "auto",
    report: Path | None = None,
    verbose: bool = False,
    module: str = "hvd_train",
) -> int:
    """Run the worlds, compare them and print the result.

    Returns 0 if all is equal, 1 if not, or the exit code of a world that failed.

    ``module``: run by the workers, with the command line of ``hvd_train``.
    """
    exchange = _exchange(config)
    if steps <= exchange.get("delay", 0):
        what = f"the first {amount(exchange['delay'], 'step')} of a training apply nothing, so nothing is compared"
        raise ConfigError(what, where="exchange.delay", fix=f"give --steps {exchange['delay'] + 1} or more")
    frameworks, notes = _frameworks(config)
    notes += _notes(config)
    with tempfile.TemporaryDirectory(prefix="hvd-train-verify-") as temporary:
        worlds: dict[tuple[str, int], tuple[Runs, Record | None]] = {}
        for framework in frameworks:
            for size in (num_proc, 1):
                folder = Path(temporary) / f"{framework}-{size}"
                folder.mkdir()
                for name, one in _plans(config, framework, num_proc, steps, folder).items():
                    # Workers read their configurations from the folder, and write their records there.
                    (folder / f"{name}.yaml").write_text(
                        resolved_yaml(one if size > 1 else one.without_stages().on_one_device()), encoding="utf-8"
                    )
                say(f"{_title(framework, size)}: {steps} steps ...")
                code = launch(size, launcher, ["record", str(folder)], verbose, module)
                if code:
                    return code
                worlds[framework, size] = _read(folder, framework, size, config.precision)
    comparisons = list(_comparisons(worlds, frameworks, num_proc))
    head = (
        f"{config.model.name} on {config.data.name}, {config.optim.name}, {amount(steps, 'step')}, "
        f"global batch {config.batch_words(num_proc)}"
    )
    say("\n".join(text(head, notes, comparisons, config.precision)), styled=True)
    if report is not None:
        curves = {
            runs.title: (runs.training.losses, native.losses if native else None) for runs, native in worlds.values()
        }
        report_page(report, head, notes, comparisons, curves, config.precision)
    return int(any(c.findings for c in comparisons))


def _frameworks(config: Config) -> tuple[list[str], list[str]]:
    """Return (frameworks to compare, notes): the configuration's, and all other installed ones that have the model."""
    chosen, name = FRAMEWORKS[config.framework], config.model.name
    if config.task.has_user_functions:
        return [chosen.name], [f"task names functions for {chosen.name}: only the ranks are compared"]
    others = [other for other in FRAMEWORKS.values() if other is not chosen and chosen.has(name) and other.has(name)]
    others = [other for other in others if other.installed() or not other.optional]
    installed = [chosen.name, *(other.name for other in others if other.installed())]
    rest = "" if len(installed) > 1 else ": only the ranks are compared"
    if not others:
        return installed, [f"the model is in {chosen.name} alone{rest}"]
    return installed, [f"{other.name} is not installed{rest}" for other in others if not other.installed()]


def _notes(config: Config) -> list[str]:
    notes = ["dropout is off: masks depend on the rank"]
    exchange = config.exchange
    if config.swa:
        notes.append("swa is left out: it begins with the last epochs")
    if exchange.compression != "none" or not exchange.spec.exact or exchange.op != "average":
        notes.append("gradients travel whole and are averaged: exchange.compression, mode and op change the numbers")
    return notes


def _exchange(config: Config) -> dict[str, Any]:
    """Return the exchange keys that change no results, and those of a mode in which N ranks equal one."""
    exchange = config.exchange
    keys = ("overlap", "mode", *exchange.spec.options) if exchange.spec.exact else ("overlap",)
    return {key: getattr(exchange, key) for key in keys}


def _plans(config: Config, framework: str, num_proc: int, steps: int, folder: Path) -> dict[str, Config]:
    """Return {name: configuration} of a world's runs: the training in 64 bits and as configured, and one plain step."""
    data: dict[str, Any] = config.model_dump(mode="json")
    data |= {
        "framework": framework,
        "batch_size": None,
        "global_batch_size": config.global_batch_size_on(num_proc),
        "max_steps": steps,
        "max_epochs": None,
        "swa": None,
        "precision": "64",
        # Switch off all that changes results, takes time or writes files.
        "exchange": _exchange(config),
        "checkpoint": {"every_n_epochs": 0, "save_top_k": 0, "save_last": False},
        "early_stopping": None,
        "agreement_every_n_steps": 0,
        "check_val_every_n_epoch": 1 << 30,
        "limit_val_batches": 1,
        "log_every_n_steps": steps,
        "tensorboard": False,
        "run_dir": str(folder),
    }
    # One step of rate 1 without momentum: first weights - last weights is the gradient.
    plain: dict[str, Any] = {"optim": {"name": "sgd", "lr": 1.0}, "gradient_clip_val": 0.0, "max_steps": 1}
    plain["exchange"] = {"overlap": config.exchange.overlap}
    plans = {"64": data, "gradient": data | plain}
    if config.precision != "64":
        plans[config.precision] = data | {"precision": config.precision}
    return {name: Config.model_validate(plan) for name, plan in plans.items()}


def _read(folder: Path, framework: str, size: int, precision: str) -> tuple[Runs, Record | None]:
    runs = Runs(_title(framework, size), Record.read(folder / "64", size), Record.read(folder / "gradient", size))
    return runs, Record.read(folder / precision, size) if precision != "64" else None


def _title(framework: str, size: int) -> str:
    return f"{amount(size, 'rank')} of {framework}"


def _comparisons(
    worlds: dict[tuple[str, int], tuple[Runs, Record | None]], frameworks: list[str], num_proc: int
) -> Iterator[Comparison]:
    """Compare N ranks with one in each framework, then one framework with the other."""
    pairs = [((framework, 1), (framework, num_proc)) for framework in frameworks]
    pairs += [((frameworks[0], 1), (other, 1)) for other in frameworks[1:]]
    for first, second in pairs:
        (a, native_a), (b, native_b) = worlds[first], worlds[second]
        native = rows(Runs(a.title, native_a), Runs(b.title, native_b)) if native_a and native_b else []
        yield Comparison(f"{b.title} against {a.title}", rows(a, b), native, findings(a, b))


def cells(comparison: Comparison) -> list[list[str]]:
    """Return table rows: what, where, the difference in 64 bits and, if it is not 64, in the configured precision."""
    native = {row.what: f"{row.difference:.1e}" for row in comparison.native_rows}
    return [
        [row.what, row.place, f"{row.difference:.1e}", *([native.get(row.what, "-")] if native else [])]
        for row in comparison.rows
    ]


def report_page(
    path: Path, head: str, notes: list[str], comparisons: list[Comparison], curves: Curves, precision: str
) -> None:
    sections = [(c.title, cells(c), c.findings) for c in comparisons]
    write(path, head, [*notes, REASON], sections, curves, precision, TOLERANCE)
    say(f"report: {path}")


def text(head: str, notes: list[str], comparisons: list[Comparison], precision: str) -> Iterator[str]:
    yield f"\n{head}"
    yield from (f"note: {note}" for note in notes)
    for comparison in comparisons:
        yield f"\n{comparison.title}"
        # Loss, rate and samples stay on top; tensors are sorted by difference.
        listed = sorted(zip(comparison.rows[3:], cells(comparison)[3:], strict=True), key=lambda x: -x[0].difference)
        shown = [*cells(comparison)[:3], *(row for _, row in listed[:SHOWN])]
        yield table(["compared", "where", "in 64 bits", f"in {precision}"][: len(shown[0])], shown)
        if len(listed) > SHOWN:
            yield f"and {len(listed) - SHOWN} tensors more, none farther apart than {listed[SHOWN][0].difference:.1e}"
        yield "equal" if not comparison.findings else "DIFFERENT: " + "\n  then: ".join(comparison.findings)
    failed = sum(bool(c.findings) for c in comparisons)
    yield f"\nverdict: {f'{failed} of {len(comparisons)} comparisons differ' if failed else 'equal'}"
    yield REASON
