"""One HTML page, complete in itself: no script, no network. It is good on a screen and in print."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hvd_train import __version__, files
from hvd_train.errors import CheckpointError, printable
from hvd_train.report.text_tables import cell
from hvd_train.run_folder import safe_reading

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


def write(page: Path, title: str, parts: Iterable[str]) -> None:
    """Write a page of these parts, which are HTML. Raises CheckpointError."""
    made = f"Made by hvd_train {__version__}, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}."
    lines = [
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{escaped(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>",
        f"<h1>{escaped(title)}</h1>\n<p class='dim'>{escaped(made)}</p>",
        *parts,
        "</main>\n</body>\n</html>\n",
    ]
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        files.put(page, "\n".join(lines).encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise CheckpointError(f"the page cannot be written: {error.strerror}", where=str(page)) from error


def heading(title: str) -> str:
    return f"<h2>{escaped(title)}</h2>"


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a table. The first cell of a row is its heading; columns of numbers are aligned to the right."""
    numeric = [all(_is_number(row[k]) for row in rows) for k in range(len(header))]
    kinds = [" class='number'" if one else "" for one in numeric]
    head = "".join(f"<th scope='col'{kind}>{escaped(name)}</th>" for kind, name in zip(kinds, header, strict=True))
    body = []
    for first, *rest in rows:
        cells = "".join(f"<td{kind}>{escaped(x)}</td>" for kind, x in zip(kinds[1:], rest, strict=True))
        body.append(f"<tr><th scope='row'>{escaped(first)}</th>{cells}</tr>")
    head = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
    named = f"<caption>{escaped(caption)}</caption>" if caption else ""
    lines = "\n".join(body)
    table = f"<table>{named}{head}\n<tbody>{lines}</tbody></table>"
    return f"<div class='wide' tabindex='0'>{table}</div>"  # the focus lets a keyboard scroll a wide one


def _is_number(value: object) -> bool:
    return re.fullmatch(r"-?[\d.,]+( ?%)?[*]?|-?", str(value)) is not None


def number(value: object, form: str = ".4f") -> str:
    return cell(value, form) if safe_reading.number(value) else "-"


def shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def escaped(value: object) -> str:
    """Escape text from a run folder, which another user may have written."""
    return html.escape(printable(str(value)))
