"""``hvd-train config``."""

from __future__ import annotations

from click.testing import CliRunner

from hvd_train.cli.main import cli
from hvd_train.config import explained
from hvd_train.report import text_tables
from tests.cli.running import run


def printed(*words: str) -> str:
    return CliRunner().invoke(cli, ["config", *words], catch_exceptions=False).stdout


def test_config_prints_a_file_that_gives_itself(tmp_path):
    text = printed("--set", "optim.lr=0.3", "--set", "framework=tensorflow")
    (tmp_path / "job.yaml").write_text(text)
    assert printed("-c", str(tmp_path / "job.yaml")) == text
    assert "lr: 0.3" in text and "framework: tensorflow" in text


def test_config_explains_all_keys_a_section_or_a_key():
    rows = printed("--explain").splitlines()
    assert rows[0].split() == ["key", "type", "default", "meaning"]
    assert len(rows) > 50 and any(row.startswith("optim.weight_decay ") for row in rows)
    section = printed("--explain", "early-stopping", "--set", "seed=1").splitlines()
    assert {row.split(".")[0].split()[0] for row in section[1:]} == {"early_stopping"} and len(section) > 4
    (_, row) = printed("--explain", "optim.lr").splitlines()
    assert row.split()[:3] == ["optim.lr", "real", "0.01"]
    told = run("config", "--explain", "optim.lrr", code=2).stderr
    assert told == "error: optim.lrr: unknown key; did you mean 'optim.lr'?; config --explain\n"


def test_explanations_are_as_wide_as_the_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    lines = text_tables.explanations(explained("")).splitlines()
    assert len(lines) > 200 and max(map(len, lines)) <= 60
    assert lines[0] == 'framework: pytorch | tensorflow | jax; default "pytorch"' and lines[1].startswith(
        "    the framework"
    )
