"""``report``: a page of runs, from whole folders and from what is left of one, and in a browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from hvd_train.checkpoint import store
from hvd_train.errors import CheckpointError, ConfigError
from hvd_train.report import page, plots
from hvd_train.report.run import ReportedRun
from hvd_train.run_folder.lock import Lock
from hvd_train.verify import page as proof
from tests.limits import SECONDS

CONFIG = "framework: pytorch\nmodel: {name: mlp}\ndata: {name: digits}\noptim: {lr: %s}\nmax_epochs: 6\n"
SUMMARY = {"steps": 60, "epochs": 6, "val_loss": 0.5, "samples_per_second": 1234.5, "skipped_steps": 2}
ENVIRONMENT = {"versions": {"torch": "2.0", "numpy": "2"}, "host": "node1", "ranks": 2, "threads": 4}
ENVIRONMENT |= {"hosts": {"node1": 2, "node2": 1}}
NASTY = "<script>alert(1)</script>&\"'$x_1\x1b[2J-->"
VOID = {"meta", "link", "br", "img", "hr"}


def rows(epochs=6, factor=1.0):
    for epoch in range(1, epochs + 1):
        for event in ("train", "val"):
            numbers = {"loss": factor / epoch, "top_5": 1 - factor / epoch / 2, "samples": 20, "lr": 0.1 / epoch}
            yield {"event": event, "epoch": epoch, "step": 10 * epoch, **numbers, "samples_per_second": 100.0 * epoch}


def write(folder, lines, config=CONFIG % 0.1, **files):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


class Page(HTMLParser):
    """Checks that tags match, and collects text, tables and what a page would load."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.tables, self.loads, self.tags = [], [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(set(names)) == len(names), (tag, names)
        self.tags.append(tag)
        self.loads += [x for name, x in attributes if name in ("src", "href", "xlink:href", "data") and x[:1] != "#"]
        self.open += [tag] * (tag not in VOID)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag == "th":
            assert dict(attributes)["scope"] in ("col", "row")
        elif tag == "svg":
            assert dict(attributes)["role"] == "img" and dict(attributes)["aria-label"]

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1].append(data)


def made(folder, *runs):
    page.report(runs, folder / "new" / "page.html")
    text = (folder / "new" / "page.html").read_text()
    return Page(text), text


def test_a_page_of_several_runs(tmp_path):
    verified = {"title": "mlp, 20 steps", "verdict": "all comparisons are equal", "header": ["compared", "where", "x"]}
    verified["comparisons"] = [{"title": "2 ranks against 1", "rows": [["loss", "step 1", "1.8e-16"]]}]
    more = [{"event": "straggler", "epoch": k, "step": 10 * k, "rank": 1, "share": 0.3} for k in (5, 6)]
    times = {"seconds": 2.0, "steps": 10, "input": 0.5, "compute": 1.5, "bubble": 0.0, "memory_bytes": 300_000_000}
    more += [{"event": "time", "epoch": k, "step": 10 * k, **times} for k in range(1, 7)]
    more += [{"event": "rollback", "epoch": 2, "step": k, "why": "the training loss is nan"} for k in (15, 17)]
    summary = SUMMARY | {"time": {"allocation": 99.0, "effective": 0.83}}
    one = write(tmp_path / "one", [*rows(), *more], summary=summary, environment=ENVIRONMENT, verify=verified)
    two = write(tmp_path / "two", rows(4, 2.0), CONFIG % 0.2)
    starts = [{"event": "start", "time": 5.0, "began": 4.0, "step": step} for step in (0, 20, 30)]
    (two / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in starts))
    (two / "failures").mkdir()
    (two / "failures" / "20260101-rank1.txt").write_text("x")
    found, text = made(tmp_path, one, two)
    assert text.startswith("<!doctype html>") and not found.loads and "script" not in found.tags
    assert not re.search(r"url\((?!#)|@import", text) and len(text) < 200_000
    overview, times, differs, same, software, proof_table = found.tables
    assert overview[0] == [
        "run", "state", "framework", "model", "data", "ranks", "epochs", "steps", "val loss", "val top 5", "samples/s",
    ]  # fmt: skip
    assert overview[1] == ["one", "done", "pytorch", "mlp", "digits", "2", "6", "60", "0.1667", "0.9167", "1,234"]
    assert overview[2][:2] == ["two", "stopped after step 40 or later"]
    assert ["input", "25.0%"] in times and ["of these in steps that count", "83.0%"] in times
    assert ["seconds of the allocation", "99"] in times and ["memory of a rank, MB", "300"] in times
    assert ["optim.lr", "0.1", "0.2"] in differs and ["max_epochs", "6"] in same
    assert ["ranks of each host", "node1: 2, node2: 1", "-"] in software
    assert ["torch", "2.0", "-"] in software and proof_table[1] == ["loss", "step 1", "1.8e-16"]
    said = "".join(found.text)
    for words in (
        "one: Rank 1 was slow in 2 lines of the log: the others waited for it 30% of each step.",
        "one: 2 steps were skipped: a gradient was not finite.",
        "one: The training went back to its last checkpoint 2 times, at steps 15, 17: the training loss is nan.",
        "two: The training was started 3 times: again from steps 20, 30.",
        "two: A rank failed: failures/20260101-rank1.txt.",
        "one: mlp, 20 steps: all comparisons are equal.",
    ):
        assert words in said
    assert found.tags.count("svg") == 6 and "currentColor" in text and plots.INK not in text
    assert all(f"{name}, {event}" in said for name in ("one", "two") for event in ("train", "val"))


def test_times_that_are_none(tmp_path):
    """Shares are from 0 to 1, and the memory of a run that does not tell it is not 0."""
    time = {"event": "time", "epoch": 6, "step": 60, "seconds": 2.0, "steps": 10, "input": 0.5, "compute": 1.5}
    one = write(tmp_path / "one", [*rows(), time | {"memory_bytes": 3e8}])
    two = write(tmp_path / "two", [*rows(), time | {"rest": -1.0}])
    lines = [row for table in made(tmp_path, one, two)[0].tables for row in table]
    assert ["input", "25.0%", "25.0%"] in lines and ["memory of a rank, MB", "300", "-"] in lines


def test_what_users_write_is_escaped(tmp_path):
    """Names of folders, metrics, keys, hosts and models stay text, in the page and in its pictures."""
    lines = [row | {NASTY: 0.5} for row in rows()]
    config = json.dumps({"framework": NASTY, "model": {"name": NASTY}, NASTY: [NASTY], "optim": NASTY})
    told = {"title": NASTY, "header": [NASTY] * 3, "comparisons": [{"title": NASTY, "rows": [[NASTY, NASTY, "1"]]}]}
    run = tmp_path / NASTY.replace("/", "")
    write(
        run,
        lines,
        config,
        environment={"host": NASTY, "hosts": {NASTY: NASTY}, "versions": {NASTY: NASTY}},
        verify=told,
    )
    found, text = made(tmp_path, run)
    assert "script" not in found.tags and "\x1b" not in text
    assert "<script>alert(1)</script>" in "".join(found.text)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"summary": "{", "environment": "[]", "verify": "nonsense"},
        {"summary": {"steps": "x", "time": 3, "samples_per_second": "y", "skipped_steps": []}},
        {"environment": {"versions": 3, "ranks": {"a": 1}, "host": None, "hosts": [3]}},
        {"verify": {"comparisons": 3, "header": 5}},
        {"verify": {"comparisons": [3, {"title": "t", "rows": [["a"], ["b", "c", "d", "e"]]}], "header": ["a"]}},
    ],
)
def test_a_part_that_is_damaged_is_left_out(tmp_path, files):
    lines = [*rows(2), {"event": "val", "epoch": 3, "step": 30, "loss": None, "lr": "x"}]
    lines += [{"event": "time", "epoch": 3, "step": 30, "seconds": "a", "input": None}]
    lines += [{"event": "straggler", "epoch": 3, "step": 30, "rank": "a", "share": []}]
    run = write(tmp_path / "a", lines, "3", **files)
    found, _ = made(tmp_path, run)
    assert "The validation loss had no finite value in epoch 3." in "".join(found.text)


def test_a_run_that_goes_on_or_has_not_logged_yet(tmp_path):
    run = write(tmp_path / "a", rows(2))
    with Lock(run):
        found, _ = made(tmp_path, run)
    assert ["state", "goes on"] in found.tables[0] and ["epochs", "2"] in found.tables[0]
    found, _ = made(tmp_path, write(tmp_path / "b", []))
    assert ["steps", "0"] in found.tables[0] and "svg" not in found.tags


def test_checkpoints_are_listed(tmp_path, monkeypatch):
    """A checkpoint that cannot be read has a row that says so."""
    run = write(tmp_path / "a", rows(2))
    for step in (10, 20):
        (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    monkeypatch.setattr(store, "best", lambda *words: "val_loss 0.5 in epoch 1, checkpoint step-00000010")
    listed = ReportedRun(run, "a").checkpoints()
    assert [row[0] for row in listed] == ["step-00000010", "step-00000020"]
    assert listed[0][-1].startswith("best, ") and listed[1][-1].startswith("last, ")


def test_many_points_are_drawn_as_few(tmp_path):
    lines = [row | {"epoch": 1, "step": k} for k, row in enumerate(list(rows(1)) * 20_000)]
    _, text = made(tmp_path, write(tmp_path / "a", lines))
    assert len(text) < 400_000
    xs, ys = plots._thinned(range(2500), [float(k) for k in range(2500)])
    assert len(xs) == 834 and xs[0] == ys[0] == 1.0 and xs[-1] == 2499


def test_no_run_and_no_place(tmp_path):
    with pytest.raises(ConfigError, match="there is no such run folder"):
        made(tmp_path, tmp_path / "x")
    (tmp_path / "x").mkdir()
    with pytest.raises(ConfigError, match=r"holds no run: neither metrics.jsonl nor config.yaml"):
        made(tmp_path, tmp_path / "x")
    run = write(tmp_path / "a", rows(1))
    with pytest.raises(CheckpointError, match="the page cannot be written"):
        page.report([run], run / "metrics.jsonl" / "page.html")


def test_runs_of_one_name_are_named_by_their_paths(tmp_path):
    found, _ = made(tmp_path, *(write(tmp_path / name / "run", rows(1)) for name in "ab"))
    assert [row[0] for row in found.tables[0][1:]] == [str(tmp_path / name / "run") for name in "ab"]


def test_the_figures_of_verify(tmp_path):
    """``verify --report RUN/verify.json`` leaves what the page shows."""
    run = write(tmp_path / "a", rows(1))
    table = [["loss", "step 1", "1.8e-16"], ["lr", "", "0.0e+00"], ["samples", "", "0.0e+00"]]
    table += [[f"weights/{k}", "[0]", f"{k}.0e-16"] for k in range(9)]
    proof.write(run / "verify.json", "mlp", ["a note"], [("2 against 1", table, [])], {}, "64", 1e-9)
    (one,) = ReportedRun(run, "a").proofs()
    assert one[0] == "2 against 1" and [row[0] for row in one[2]][2:5] == ["samples", "weights/8", "weights/7"]
    found, _ = made(tmp_path, run)
    assert "a: mlp: all comparisons are equal." in "".join(found.text)


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="there is no browser")
def test_in_a_browser(tmp_path):
    """The browser reads the page as we wrote it, and prints it on few pages."""
    runs = [write(tmp_path / name, rows(6, k), CONFIG % k) for k, name in enumerate(("one", "a <b>&$_"), 1)]
    made(tmp_path, *runs)
    line = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}"]
    address = (tmp_path / "new" / "page.html").as_uri()
    run = {"check": True, "capture_output": True, "timeout": SECONDS}
    read = Page(subprocess.run([*line, "--dump-dom", address], **run).stdout.decode())
    assert read.tables[0][2][0] == "a <b>&$_" and read.tags.count("svg") == 5
    subprocess.run([*line, f"--print-to-pdf={tmp_path / 'page.pdf'}", address], **run)
    pages = re.findall(rb"/Type\s*/Page\b", (tmp_path / "page.pdf").read_bytes())
    assert 1 <= len(pages) <= 3
