"""``hvd-train config``."""

from __future__ import annotations

from hvd_train.config import explained
from hvd_train.report import text_tables
from tests.cli.running import ROOT, run


def test_config_prints_a_file_that_gives_itself(tmp_path):
    text = run("config", "--set", "optim.lr=0.3", "--set", "framework=tensorflow").stdout
    (tmp_path / "job.yaml").write_text(text)
    assert run("config", "-c", "job.yaml", cwd=tmp_path).stdout == text
    assert "lr: 0.3" in text and "framework: tensorflow" in text


def test_config_explains_every_key():
    rows = run("config", "--explain").stdout.splitlines()
    assert rows[0].split() == ["key", "type", "default", "meaning"]
    assert len(rows) > 50 and any(row.startswith("optim.weight_decay ") for row in rows)


def test_config_explains_a_section_or_a_key():
    section = run("config", "--explain", "early-stopping", "--set", "seed=1").stdout.splitlines()
    assert {row.split(".")[0].split()[0] for row in section[1:]} == {"early_stopping"} and len(section) > 4
    (_, row) = run("config", "--explain", "optim.lr").stdout.splitlines()
    assert row.split()[:3] == ["optim.lr", "real", "0.01"]
    told = run("config", "--explain", "optim.lrr", code=2).stderr
    assert told == "error: optim.lrr: unknown key; did you mean 'optim.lr'?; config --explain\n"


def test_explanations_are_as_wide_as_the_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    lines = text_tables.explanations(explained("")).splitlines()
    assert len(lines) > 200 and max(map(len, lines)) <= 60
    assert lines[0] == 'framework: pytorch | tensorflow; default "pytorch"' and lines[1].startswith("    the framework")


def test_example_configurations_are_valid():
    files = sorted((ROOT / "scripts" / "configs").glob("*.yaml"))
    assert len(files) >= 3
    for file in files:
        run("config", "-c", str(file))
