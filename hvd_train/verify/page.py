"""The HTML page of ``hvd-train verify``, a single file with picture and tables."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hvd_train.errors import ConfigError

STYLE = """body { font: 15px/1.5 sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; font-size: 13px } th, td { text-align: left; padding: 2px 14px 2px 0 }
td { font-family: monospace; border-top: 1px solid #ddd } img { max-width: 100% }
.good { color: #06702b } .bad { color: #b00020 } .bad, .good { font-weight: bold; white-space: pre-line }"""

Curves = Mapping[str, tuple[np.ndarray, np.ndarray | None]]  # title -> losses in 64 bits, in the user's precision


def write(
    path: Path,
    title: str,
    notes: Sequence[str],
    sections: Sequence[tuple[str, list[list[str]], list[str]]],
    curves: Curves,
    precision: str,
    tolerance: float,
) -> None:
    """Write the page, or its figures as JSON if ``path`` ends in .json. Raises ConfigError if it cannot be written.

    ``sections``: (title, rows of [compared, where, in 64 bits(, in the configured precision)], what differs).
    """
    failed = sum(bool(findings) for _, _, findings in sections)
    verdict = f"{failed} of {len(sections)} comparisons differ" if failed else "all comparisons are equal"
    header = ["compared", "where", "in 64 bits", f"in {precision}"]
    if path.suffix == ".json":
        named = [{"title": name, "rows": rows, "findings": findings} for name, rows, findings in sections]
        figures = {"title": title, "verdict": verdict, "notes": notes, "header": header, "comparisons": named}
        _put(path, json.dumps(figures, indent=1) + "\n")
        return
    picture = base64.b64encode(_picture(curves, precision, tolerance)).decode()
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>hvd-train verify</title><style>{STYLE}</style>",
        f"<h1>hvd-train verify</h1><p>{html.escape(title)}</p>",
        _verdict([verdict], failed == 0),
        "<ul>" + "".join(f"<li>{html.escape(note)}</li>" for note in notes) + "</ul>",
        f"<img alt='loss per step' src='data:image/png;base64,{picture}'>",
    ]
    for name, rows, findings in sections:
        parts += [f"<h2>{html.escape(name)}</h2>", _verdict(findings or ["equal"], not findings)]
        parts.append(_table(header[: len(rows[0])], rows))
    _put(path, "\n".join(parts) + "\n</html>\n")


def _put(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the page cannot be written: {error.strerror}", where=str(path)) from error


def _verdict(lines: Sequence[str], good: bool) -> str:
    return f"<p class='{'good' if good else 'bad'}'>" + "\n".join(html.escape(line) for line in lines) + "</p>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table><tr>{head}</tr>\n{body}</table>"


def _picture(curves: Curves, precision: str, tolerance: float) -> bytes:
    """Draw the loss per step in 64 bits and in the configured precision, and below the distance from the last curve."""
    import matplotlib

    # Without a display.
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    labels = ["64", precision][: 2 if precision != "64" else 1]
    figure, axes = pyplot.subplots(
        2, len(labels), figsize=(6 * len(labels), 6), layout="constrained", sharex=True, squeeze=False,
        height_ratios=(2, 1),
    )  # fmt: skip
    titles = list(curves)
    for column, label in enumerate(labels):
        losses = [curves[title][column] for title in titles]
        reference = losses[-1]
        assert reference is not None
        steps = np.arange(1, len(reference) + 1)
        for k, (title, curve) in enumerate(zip(titles, losses, strict=True)):
            assert curve is not None
            # Equal curves overlap, so the first is drawn widest to keep each visible.
            axes[0, column].plot(steps, curve, color=f"C{k}", linewidth=1.5 + 2.0 * (len(titles) - 1 - k), label=title)
            if k < len(titles) - 1:
                away = np.abs(curve - reference) / np.abs(reference)
                axes[1, column].plot(steps, np.maximum(away, 1e-17), "o-", color=f"C{k}", markersize=3)
        axes[0, column].set(title=f"loss in {label} bits" if label.isdigit() else f"loss in {label}")
        axes[0, column].legend(fontsize=8)
        axes[1, column].set(
            xlabel="step", ylabel=f"relative distance from\n{titles[-1]}", yscale="log", ylim=(1e-18, 10)
        )
        if label == "64":
            axes[1, column].axhline(tolerance, color="gray", linewidth=1, linestyle="--", label="tolerance")
            axes[1, column].legend(fontsize=8)
        axes[1, column].xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, format="png")
    pyplot.close(figure)
    return buffer.getvalue()
