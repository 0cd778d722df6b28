"""The table and the plot of the compared ways to train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvd_train.compression.table import SMALL
from hvd_train.config import Config
from hvd_train.errors import amount
from hvd_train.mode_comparison.turns import Limits, Result
from hvd_train.mode_comparison.ways import PLAIN, Way
from hvd_train.report.plots import losses
from hvd_train.report.text_tables import table

LAST = 0.25  # the part of the samples over which losses are averaged: one batch is too noisy


def loss_after(one: Result, samples: float) -> float:
    """Return the mean loss over the last quarter of the first ``samples`` samples."""
    within = [loss for at, loss in one.curve if (1 - LAST) * samples < at <= samples]
    # If no logged point is in it, take the next one.
    return sum(within) / len(within) if within else next(loss for at, loss in one.curve if at >= samples)


def header_and_rows(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Return the table, with the losses after the samples and the seconds that all ways have reached."""
    ran = [one for one in results if not one.problem]
    samples = min(one.samples for one in ran)
    seconds = min(one.samples * one.seconds_per_sample for one in ran)
    header = ["way", "sent a step", "ms a step", "memory"]
    gpu = any(one.middle("gpu_memory") for one in ran)
    header += ["GPU memory"] if gpu else []
    header += [f"loss after {samples:,} samples", f"after {seconds:.3g} s", "N ranks = 1 rank"]
    rows = []
    for one in results:
        if one.problem:
            rows.append([one.way.name, *["-"] * (len(header) - 2), f"cannot run: {one.problem.split(';')[0]}"])
            continue
        row = [one.way.name, size(one.middle("sent")), milliseconds(one.middle("ms")), size(one.middle("memory"))]
        row += [size(one.middle("gpu_memory"))] if gpu else []
        row += [f"{loss_after(one, samples):.4f}", f"{loss_after(one, seconds / one.seconds_per_sample):.4f}"]
        rows.append([*row, one.way.exact])
    return header, rows


def size(count: float) -> str:
    """Format a number of bytes with its unit."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def notes(results: Sequence[Result], config: Config, limits: Limits) -> list[str]:
    """Return explanations and warnings about the table."""
    lines = [
        "sent: by the rank that sends most; memory: of the rank that takes most; "
        f"{amount(limits.turns, 'turn')}, median; a loss is the mean over the last quarter of the samples"
    ]
    # A quarter of the steps is warm-up.
    rare = [one for one in results if not one.problem and 2 * one.way.interval(config) > limits.steps]
    if rare:
        listed = ", ".join(f"{one.way.name} ({one.way.interval(config)})" for one in rare)
        lines.append(f"steps between two exchanges: {listed}; of {limits.steps} steps they show too little")
    if whole := _uncompressed(results):
        listed = ", ".join(one.way.name for one in whole)
        lines.append(f"{listed}: nothing is compressed; tensors with fewer than {SMALL:,} entries travel whole")
    return lines


def _uncompressed(results: Sequence[Result]) -> list[Result]:
    """Return the ways whose compressor sends as many bytes as the same way without it."""
    ran = [one for one in results if not one.problem]
    plain = {_without_compression(one.way): one.middle("sent") for one in ran if one.way.compression == PLAIN}
    compressed = [one for one in ran if one.way.compression != PLAIN]
    return [
        one
        for one in compressed
        if one.middle("sent") and one.middle("sent") == plain.get(_without_compression(one.way))
    ]


def _without_compression(way: Way) -> tuple[object, ...]:
    """Return the settings of a way except its compressor."""
    return way.mode, way.sharded, way.pipeline


def text(results: Sequence[Result], config: Config, limits: Limits) -> str:
    return "\n".join([table(*header_and_rows(results)), "", *notes(results, config, limits)])


def picture(results: Sequence[Result], path: Path) -> None:
    """Plot the losses over samples and over seconds."""
    ran = [one for one in results if not one.problem]
    curves = {one.way.name: [(at, loss_after(one, at)) for at, _ in one.curve] for one in ran}
    losses(curves, {one.way.name: one.seconds_per_sample for one in ran}, path)
