"""The time of a training on ranks that are threads: sleeps are found, and what was lost does not count."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from hvd_train.checkpoint.manifest import Progress
from hvd_train.core.callbacks.time_log import TimeLog
from hvd_train.core.hooks import Hook
from hvd_train.core.process_usage import USAGE
from hvd_train.core.shares import SHOWN
from hvd_train.core.time_account import COMPUTE, IN_CELL, INPUT
from hvd_train.errors import Interrupted
from hvd_train.run_folder import metrics_file, step_times
from hvd_train.run_folder.log import NullLog, RunLog
from tests.core.test_loop import Stop, config, trainer
from tests.rank_threads import run_ranks

SLEEP = 0.03


class Sleeper(Hook):
    """Makes one rank sleep in its loader, its steps, or its hooks, in each step."""

    def __init__(self, place, rank):
        self.place, self.rank = place, rank

    def on_start(self, trainer):
        if trainer.communicator.rank != self.rank:
            return
        if self.place == "input":
            fetch = trainer.train_loader._step

            def slow(*args):
                time.sleep(SLEEP)
                return fetch(*args)

            trainer.train_loader._step = slow
        if self.place == "compute":
            step = trainer.frontend.add_gradients

            def longer(*args):
                time.sleep(SLEEP)
                return step(*args)

            trainer.frontend.add_gradients = longer

    def on_step(self, trainer, info):
        if self.place == "rest" and trainer.communicator.rank == self.rank:
            time.sleep(SLEEP)


def run(size, c, folder, hooks=lambda: [], resume=False, kind_of_log=RunLog, **options):
    """(summary of rank 0 or None, rows of metrics.jsonl about time, rows of steps.jsonl)."""

    def work(communicator):
        log = None
        if communicator.rank == 0:
            log = kind_of_log(folder, tensorboard=False, total_epochs=c.max_epochs, quiet=True)
            log.resumed_at = 0 if resume else None
        made = trainer(communicator, c, folder, log=log, hooks=hooks(), resume=resume, **options)
        if log:
            log.resumed_at = made.progress.step if resume else None
        try:
            return made.fit()
        except (Interrupted, Stop):
            return None
        finally:
            if log:
                log.close()

    summaries = run_ranks(size, work)
    assert all(one == summaries[0] or one["time"] == summaries[0]["time"] for one in summaries if one)
    rows = [row for row in metrics_file.read(folder)[0] if row["event"] == "time"]
    return summaries[0], rows, step_times.read(folder)


@pytest.mark.parametrize("place", ["input", "compute", "rest"])
def test_a_sleep_on_one_rank_is_its_part_and_the_wait_of_the_others(tmp_path, place):
    # Two micro-batches: the first is computed in add_gradients.
    c = config(max_epochs=2, accumulate_grad_batches=2, log_every_n_steps=50)
    summary, rows, steps = run(2, c, tmp_path, lambda: [Sleeper(place, 1)])
    seconds = next(row["seconds"] for row in reversed(steps) if "seconds" in row)
    slept = 12 * SLEEP  # of 14 steps; the first one belongs to the start
    assert seconds[place][1] > 0.8 * slept > 2 * seconds[place][0]
    assert seconds["wait"][0] > 0.7 * slept > 2 * seconds["wait"][1]
    assert 0 < summary["time"]["effective"] <= 1


def test_the_rows_add_up_to_the_run(tmp_path):
    began = time.monotonic()
    summary, rows, steps = run(2, config(), tmp_path)
    passed = time.monotonic() - began
    times = summary["time"]
    assert list(times) == [*SHOWN, "allocation", "effective"]
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 7), (2, 14), (3, 21)]
    assert sum(row["steps"] for row in rows) == 21 - 1
    for row in rows:
        assert sum(row[name] for name in SHOWN) == pytest.approx(row["seconds"], abs=1e-5)
        assert min(row[name] for name in SHOWN) >= 0 and row["memory_bytes"] > 1 << 20
    for name in ("input", "compute", "start", "evaluate"):  # the last checkpoint comes after the last row
        assert sum(row[name] for row in rows) == pytest.approx(times[name], abs=2e-3)
    assert sum(times[name] for name in SHOWN) < passed + 0.1
    windows = [row for row in steps if row["event"] == "steps"]
    assert sum(row["steps"] for row in windows) == 20
    for row in windows:
        for cells in row["cells"]:
            assert len(cells) == len(IN_CELL) * -(-row["steps"] // row["cell_steps"])
    assert times["effective"] == pytest.approx(windows[-1]["counted"] / times["allocation"], abs=1e-2)


def test_a_log_line_after_each_step_does_not_exchange_times_after_each(tmp_path):
    _, _, steps = run(2, config(max_epochs=30, log_every_n_steps=1, checkpoint={"every_n_epochs": 0}), tmp_path)
    windows = [row["steps"] for row in steps if row["event"] == "steps"]
    assert sum(windows) == 30 * 7 - 1
    assert len(windows) < 100, "one of each epoch, and some by the clock"
    lines = [row for row in metrics_file.read(tmp_path)[0] if row["event"] == "train"]
    assert [row["step"] for row in lines] == list(range(1, 30 * 7 + 1))


def test_what_was_lost_does_not_count(tmp_path):
    """Killed in step 13, after a checkpoint at step 10, and started again."""

    class Killed(RunLog):
        def progress(self, epoch, done, *args):
            if (epoch, done) == (1, 48):
                raise Stop

    c = config(checkpoint={"every_n_steps": 5, "every_n_epochs": 0}, log_every_n_steps=1, accumulate_grad_batches=2)
    _, _, before = run(1, c, tmp_path, lambda: [Sleeper("compute", 0)], kind_of_log=Killed)
    kept = next(row["counted"] for row in reversed(before) if row["event"] == "saved")
    assert [row["step"] for row in before if row["event"] == "saved"] == [5, 10]
    spent = before[-1]["counted"]
    assert spent - kept > 0.9 * SLEEP, "a step after the checkpoint"
    summary, rows, after = run(1, c, tmp_path, resume=True)
    assert [row["step"] for row in after if row["event"] == "start"] == [0, 10]
    counted = summary["time"]["effective"] * summary["time"]["allocation"]
    last = next(row["counted"] for row in reversed(after) if row["event"] == "steps")
    assert counted == pytest.approx(last, abs=0.01) and kept < counted
    assert after[: len(before)] == before


def test_steps_that_were_skipped_or_rolled_back_do_not_count():
    """A window of 10 steps of 2 seconds each, in which 3 were skipped; after it a checkpoint, and two windows more."""
    progress = Progress()
    training = SimpleNamespace(progress=progress, groups=SimpleNamespace(links=None), log=NullLog())
    training.frontend = SimpleNamespace(specs=list)
    process = {"usage": [0.0] * len(USAGE), "place": ["host", [0]], "sync": 0.0}
    window = [10, [4 * 10**9, 14 * 10**9, 10**9, 10**9, 0, 0, 2 * 10**9, 0], 1 << 20, [], process]
    log = TimeLog(2)
    log.add(training, [window, window])
    assert log.counted == 20
    progress.step, progress.skipped = 20, 3
    log.add(training, [window, window])
    assert log.counted == 20 + 14
    log.saved(training)
    for step in (30, 40):
        progress.step = step
        log.add(training, [window, window])
    assert log.counted == 20 + 14 + 40
    log.rolled_back(20, open_steps=0)
    assert log.counted == 20 + 14 and not log.lost
    log.rolled_back(20, open_steps=3)
    assert log.lost
    for counted in (0, 20):  # the window with the lost steps, and the next one
        log.add(training, [window, window])
        assert log.counted == 20 + 14 + counted
    log.rolled_back(0, open_steps=0)
    assert log.counted == 0


def test_ranks_that_take_different_numbers_of_steps_in_a_window_share_them():
    """Each takes 12 steps in all: the windows have as many, and not the sum of the most of each window."""
    written = []
    log, steps = TimeLog(2), SimpleNamespace(ranks=lambda row: None, steps=written.append)
    training = SimpleNamespace(progress=Progress(), groups=SimpleNamespace(links=None), log=steps)
    training.frontend = SimpleNamespace(specs=list)
    process = {"usage": [0.0] * len(USAGE), "place": ["host", [0]], "sync": 0.0}
    for pair in ((4, 1), (0, 3), (2, 5), (6, 3)):
        log.add(training, [[one, [10**9] * 8, 1 << 20, [1] * 4 * one, process] for one in pair])
    assert sum(row["steps"] for row in written) == 12
    assert all(row["steps"] > 0 for row in written)


@pytest.mark.parametrize("mode", ["local_sgd", "delayed", "async", "parameter_server", "outer"])
def test_all_modes_are_measured(tmp_path, mode):
    exchange = {"mode": mode} | ({"local_steps": 2} if mode == "local_sgd" else {})
    summary, rows, steps = run(3, config(exchange=exchange), tmp_path)
    assert sum(row["steps"] for row in rows) > 0
    for row in steps:
        for name, seconds in row.get("seconds", {}).items():
            assert len(seconds) == 3 and min(seconds) >= 0, name
    assert 0 < summary["time"]["effective"] <= 1


def test_a_step_costs_microseconds(tmp_path):
    """What the loop adds to a step: four readings of two clocks."""
    from hvd_train.core.time_account import TimeAccount

    account = TimeAccount(lambda fresh: 0.0)
    best = 1.0
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(200):
            account.enter(INPUT)
            account.enter(COMPUTE)
            account.stepped(False)
            account.hooks_ended(False)
        best = min(best, (time.perf_counter() - began) / 200)
        account.window()
    assert best < 30e-6
    print(f"{1e6 * best:.1f} us a step")


def test_a_notice_that_repeats_is_told_once_and_counted(tmp_path, capsys):
    log = RunLog(tmp_path, tensorboard=False, total_epochs=2)
    for step in (1, 4, 5):
        log.notice("steps skipped", f"step {step}: nothing was changed")
    line = {"epoch": 0, "step": 7, "values": {"train_loss": 1.0}, "lr": 0.1, "samples_per_second": 3.0, "seconds": 1.0}
    log.epoch_line(**line, notes=["input 41 %"])
    log.epoch_line(**line)
    first, header, row, other = capsys.readouterr().out.splitlines()
    assert first == "step 1: nothing was changed" and row.endswith("1.0  input 41 %; 2 more steps skipped")
    assert other.endswith("     1.0")
