"""``steps.jsonl``: it stays small, and knows after any end which seconds counted."""

from __future__ import annotations

import json

import pytest

from hvd_train.run_folder import step_times
from hvd_train.run_folder.step_times import NAME, StepTimes, read


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds, which a test changes."""
    now = [1000.0]
    monkeypatch.setattr(step_times.time, "time", lambda: now[0])
    return now


def window(step, counted):
    return {"epoch": 1, "step": step, "steps": 10, "counted": counted, "seconds": {}, "cells": [[1, 2, 3, 4]]}


def test_a_run_without_interruption(tmp_path, clock):
    times = StepTimes(tmp_path, 900.0, 0)
    clock[0] = 1100.0
    times.window(window(10, 80.0))
    assert times.allocation(80.0) == (80.0, 200.0)
    times.flush()
    start, steps = read(tmp_path)
    assert start == {"time": 1000.0, "event": "start", "began": 900.0, "step": 0}
    assert steps == {"time": 1100.0, "event": "steps", **window(10, 80.0), "of_windows": 1}


def test_steps_after_the_checkpoint_are_lost_and_their_time_is_not(tmp_path, clock):
    """Killed at step 30, and started again by the same command from step 20; then by another one."""
    times = StepTimes(tmp_path, 900.0, 0)
    for step, counted, now in ((10, 40.0, 1050.0), (20, 80.0, 1100.0), (30, 120.0, 1150.0)):
        clock[0] = now
        times.window(window(step, counted))
        if step == 20:
            times.saved(20, counted)
    times.flush()  # as the clock does
    clock[0] = 1200.0
    again = StepTimes(tmp_path, 900.0, 20)
    assert again.allocation(0.0) == (80.0, 300.0)
    clock[0] = 1300.0
    again.window(window(40, 90.0))
    again.saved(40, 90.0)
    clock[0] = 5000.0
    third = StepTimes(tmp_path, 4990.0, 40)
    assert third.allocation(0.0) == (170.0, 400.0 + 10.0)


def test_a_start_at_step_0_counts_nothing_of_before(tmp_path, clock):
    times = StepTimes(tmp_path, 900.0, 0)
    clock[0] = 1100.0
    times.window(window(10, 80.0))
    times.flush()
    clock[0] = 2000.0
    assert StepTimes(tmp_path, 1990.0, 0).allocation(0.0) == (0.0, 200.0 + 10.0)


def test_the_larger_the_file_the_fewer_windows_it_gets(tmp_path, monkeypatch):
    monkeypatch.setattr(step_times, "LEVEL_BYTES", 2000)
    times = StepTimes(tmp_path, 0.0, 0)
    for k in range(1000):
        times.window(window(10 * k, float(k)))
    times.flush()
    rows = [row for row in read(tmp_path) if row["event"] == "steps"]
    assert (tmp_path / NAME).stat().st_size < 2000 * 9
    assert {1, 2, 4, 8} <= {row["of_windows"] for row in rows} and rows[-1]["step"] > 9000
    more = StepTimes(tmp_path, 0.0, 10_000)  # goes on where it was
    more.window(window(10_000, 1.0))
    more.flush()
    assert read(tmp_path)[-1]["of_windows"] >= 16


# Lines that are cut short, that are no row, and rows without an event or with one that is unknown.
DAMAGED = [b'{"time": 1, "event": "st', b'{"event": "start"}\n', b"[1]\n", b"\0\0\0\n", b"{}\n"]
DAMAGED += [
    b'{"time": 950, "step": 9, "counted": 7}\n',
    b'{"event": ["start"], "time": 950, "step": 9, "counted": 7}\n',
]


@pytest.mark.parametrize("tail", DAMAGED)
def test_a_damaged_line_is_left_out_and_loses_no_other(tmp_path, clock, tail):
    times = StepTimes(tmp_path, 900.0, 0)
    times.saved(20, 80.0)
    with open(tmp_path / NAME, "ab") as stream:
        stream.write(tail)
    again = StepTimes(tmp_path, 900.0, 20)
    assert again.allocation(1.0) == (81.0, 100.0)
    assert [row["event"] for row in read(tmp_path)] == ["start", "saved", "start"]


def test_a_full_disk_ends_nothing(tmp_path, clock):
    (tmp_path / NAME).symlink_to("/dev/full")
    times = StepTimes(tmp_path, 900.0, 0)
    times.saved(20, 80.0)
    assert times.allocation(80.0) == (80.0, 100.0)


def test_a_window_takes_24_bytes_a_cell_and_rank_at_most(tmp_path):
    """What the guide says: four numbers of up to 5 digits."""
    ranks, cells = 4, 16
    row = json.dumps({"cells": [[12345, 54321, 1234, 999] * cells] * ranks}, separators=(",", ":"))
    assert len(row) / ranks / cells < 24
