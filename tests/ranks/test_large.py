"""Many ranks, and many steps: no error at the end, and no memory that grows."""

from __future__ import annotations

import json

import pytest

from tests.cli.running import ROOT, run

TINY = ["-c", str(ROOT / "scripts" / "configs" / "tiny.yaml"), "--set", "tensorboard=false"]


@pytest.mark.long("16 and 32 processes, each with a framework")
@pytest.mark.parametrize("ranks", [16, 32])
def test_many_ranks_come_to_a_normal_end(tmp_path, ranks):
    done = run("fit", "-np", str(ranks), *TINY, "--set", "max_steps=4", "--run-dir", "run", cwd=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == ranks and summary["steps"] == 4 and "error" not in done.stderr


@pytest.mark.long("100 000 steps take a minute or two")
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_memory_stays_as_it_is(tmp_path, framework):
    keys = ["max_steps=100000", "max_epochs=100000", "check_val_every_n_epoch=500", "checkpoint.every_n_epochs=500"]
    sets = [word for key in (*keys, f"framework={framework}") for word in ("--set", key)]
    run("fit", *TINY, *sets, "--run-dir", "run", cwd=tmp_path)
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    memory = {row["step"]: row["memory_bytes"] for row in rows if row["event"] == "time"}
    first = max(bytes_ for step, bytes_ in memory.items() if step <= 10_000)
    assert max(memory) == 100_000 and memory[100_000] - first < 20e6, (first, memory[100_000])
