"""A signal to one rank: all stop at the same step, and the run goes on to the bits of one that nobody stopped."""

from __future__ import annotations

import json
import signal
import threading
import time

import pytest

from hvd_train.checkpoint import store
from hvd_train.checkpoint.store import find
from hvd_train.checkpoint.writer import Writer
from hvd_train.compression.sparse import Threshold
from hvd_train.core import control_sync
from hvd_train.core.agreement import collectively
from hvd_train.core.control_sync import ControlSync, StopSource
from hvd_train.core.hooks import Hook
from hvd_train.errors import CheckpointError, Interrupted
from hvd_train.frontends.serial import Serial
from hvd_train.run_folder import log as log_module
from hvd_train.run_folder.log import NullLog, RunLog
from hvd_train.run_folder.metrics_file import MetricsFile
from tests.core.test_loop import config, final, same, trainer, without_speed
from tests.rank_threads import run_ranks
from tests.run_folder.test_log import Disk


class Signal(StopSource):
    """Comes to one rank, ``after`` calls of ``at`` that name this phase."""

    def __init__(self, phase, after, number=signal.SIGTERM):
        self.phase, self.left, self.number = phase, after, number

    def at(self, phase, step):
        if phase == self.phase:
            self.left -= 1
            self.asked = self.asked or (self.number if self.left == 0 else 0)


@pytest.fixture
def every_turn(monkeypatch):
    monkeypatch.setattr(control_sync, "MOST_SECONDS", 0.0)


def interrupted(size, c, folder, stop_source, resume=False, **options):
    """The step at which all ranks left; None: the signal came too late."""

    def work(communicator):
        log = RunLog(folder, tensorboard=False, total_epochs=3) if communicator.rank == 0 else NullLog()
        made = trainer(communicator, c, folder, log, resume=resume, **options)
        if communicator.rank == 0 and resume:
            log.resumed_at, log.evaluates_again = made.progress.step, made.progress.ending
        made.stop_source = stop_source if communicator.rank == size - 1 else StopSource()
        try:
            made.fit()
        except Interrupted as error:
            assert error.exit_code == (130 if stop_source.number == signal.SIGINT else 75)
            return made.progress.step
        finally:
            log.close()
        return None

    steps = run_ranks(size, work)
    assert len(set(steps)) == 1, f"the ranks left at different steps: {steps}"
    return steps[0]


def ranked(folder):
    """The checkpoints that are kept for their value, best first."""
    return [(value, step) for value, step, _ in store._ranked(folder / "checkpoints", "val_loss", "min")]


def rows(folder):
    """The results that were logged, but for the speed."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k != "samples_per_second"} for row in found if row["event"] in ("train", "val")
    ]


@pytest.mark.parametrize("phase", ["training", "evaluation", "saving"])
@pytest.mark.parametrize(("size", "compressor"), [(1, None), (2, Threshold(0.01)), (3, None)])
def test_interrupted_at_any_moment_and_gone_on_is_the_run(tmp_path, every_turn, size, compressor, phase):
    c = config(accumulate_grad_batches=2, log_every_n_steps=5, checkpoint={"every_n_steps": 4, "save_top_k": 2})
    quiet = StopSource()
    quiet.number = 0
    assert interrupted(size, c, tmp_path / "whole", quiet, compressor=compressor) is None
    whole = final(size, c, tmp_path / "whole", compressor=compressor, resume=True)
    for after in range(1, 23, 1 if size == 1 else 3) if phase == "training" else range(1, 4):
        folder = tmp_path / str(after)
        stop_source = Signal(phase, after)
        step = interrupted(size, c, folder, stop_source, compressor=compressor)
        assert stop_source.asked and (step is not None or after > 20 or phase != "training")
        if step is not None:
            assert find(folder / "checkpoints")[-1][0] == step
            assert interrupted(size, c, folder, quiet, resume=True, compressor=compressor) is None
        again = final(size, c, folder, compressor=compressor, resume=True)
        assert same(again[1], whole[1]), f"{phase} {after}"
        assert all(same(a, b) for a, b in zip(again[2], whole[2], strict=True))
        assert without_speed(again[0]) == without_speed(whole[0])
        assert ranked(folder) == ranked(tmp_path / "whole") and len(ranked(folder)) >= 2
        assert rows(folder) == rows(tmp_path / "whole"), "each line of the log once, with the same bits"


@pytest.mark.parametrize("size", [1, 3])
def test_a_log_that_cannot_be_written_ends_all_ranks_and_the_run_is_saved(tmp_path, every_turn, monkeypatch, size):
    """At any of its lines. Code 4 on all ranks at one step, and what goes on is the run."""
    c = config(checkpoint={"every_n_steps": 100, "every_n_epochs": 0})
    whole = final(size, c, tmp_path / "whole")
    steps = set()
    for room in range(0, 5600, 900 if size > 1 else 300):

        class Full(MetricsFile):
            def __init__(self, run_dir, room=room):
                super().__init__(run_dir)
                self._stream.close()
                self._stream = Disk(room)

        folder = tmp_path / str(room)

        def work(communicator, folder=folder):
            log = RunLog(folder, tensorboard=False, total_epochs=3) if communicator.rank == 0 else NullLog()
            made = trainer(communicator, c, folder, log)
            try:
                summary = made.fit()
                collectively(communicator, lambda: log.summary(summary))
            except CheckpointError as error:
                assert "No space left on device" in str(error) and error.exit_code == 4
                assert f"the run is saved at step {made.progress.step}, and" in str(error)
                return made.progress.step
            return None

        with monkeypatch.context() as patched:
            patched.setattr(log_module, "MetricsFile", Full)
            found = run_ranks(size, work)
        assert len(set(found)) == 1
        if found[0] is None:  # there was room for all
            break
        assert find(folder / "checkpoints")[-1][0] == found[0]
        steps.add(found[0])
        again = final(size, c, folder, resume=True)
        assert same(again[1], whole[1]) and without_speed(again[0]) == without_speed(whole[0])
    assert len(steps) > 2 and found[0] is None


@pytest.mark.parametrize(
    ("size", "left", "longest", "steps"), [(1, 60, 0, None), (1, 60, 20, 4), (2, 60, 0, None), (2, 5, 0, 1)]
)
def test_ranks_leave_while_the_batch_job_has_the_time_that_a_save_takes(
    tmp_path, every_turn, monkeypatch, size, left, longest, steps
):
    """With a save of 20 s a minute is too little; what a save takes is known after the first one, in step 3."""
    begin = Writer.begin

    def slow(self, path, work):
        self.longest = longest
        begin(self, path, work)

    monkeypatch.setattr(Writer, "begin", slow)
    stop_source = StopSource()
    stop_source.number, stop_source.job_end = signal.SIGUSR1, time.time() + left
    found = interrupted(size, config(checkpoint={"every_n_steps": 3}), tmp_path, stop_source)
    assert found == steps and (steps is None or find(tmp_path / "checkpoints")[-1][0] == steps)


def test_statistics_that_nothing_takes_are_refused(tmp_path, every_turn):
    c = config()
    step = interrupted(2, c, tmp_path, Signal("training", 2))
    found = store.load(store.place(tmp_path / "checkpoints", step))
    for tree in found.local:
        tree["statistics/mean"] = tree.pop("statistics/norm.mean")

    def restored(communicator):
        return trainer(communicator, c, tmp_path).restore(found if communicator.rank == 0 else None)

    with pytest.raises(CheckpointError, match=r"statistics of a rank, which this model lacks: statistics/mean;"):
        run_ranks(2, restored)


def test_interrupted_again_and_again(tmp_path, every_turn):
    """A step at a time: nothing is lost on the way, and early stopping counts as ever."""
    c = config(max_epochs=2, early_stopping={"monitor": "val_loss", "patience": 1, "min_delta": 0.01})
    whole = final(2, c, tmp_path / "whole")
    taken, resume = [], False
    while (step := interrupted(2, c, tmp_path / "cut", Signal("training", 2), resume=resume)) is not None:
        taken.append(step)
        resume = True
        assert len(taken) < 40
    again = final(2, c, tmp_path / "cut", resume=True)
    assert taken[:6] == [1, 2, 3, 4, 5, 6] and same(again[1], whole[1])
    assert without_speed(again[0]) == without_speed(whole[0])


@pytest.mark.parametrize("rule", [{"save_last": False, "save_top_k": 0}, {"save_last": False, "every_n_steps": 1}])
def test_an_interruption_is_saved_whatever_the_configuration_saves(tmp_path, every_turn, rule):
    step = interrupted(2, config(checkpoint=rule), tmp_path, Signal("training", 11), compressor=None)
    assert find(tmp_path / "checkpoints")[-1][0] == step


def test_a_wish_to_stop_waits_for_its_line_whatever_the_clock_says(tmp_path, monkeypatch):
    """When a run ends must not depend on how often the ranks sync."""

    class Stop(Hook):
        def on_step(self, trainer, taken):
            if trainer.progress.step == 4:
                trainer.stop("enough")

    ends = []
    for seconds in (0.0, 1000.0):
        for name in ("SECONDS", "MOST_SECONDS"):
            monkeypatch.setattr(control_sync, name, seconds)
        folder = tmp_path / str(seconds)
        ends.append(final(2, config(log_every_n_steps=6), folder, hooks=[Stop()])[0]["steps"])
    assert ends == [6, 6]


@pytest.fixture
def clock(monkeypatch):
    """The seconds of the only clock, which the test moves."""
    seconds = [0.0]
    monkeypatch.setattr(control_sync.time, "monotonic", lambda: seconds[0])
    return seconds


def test_syncs_are_a_span_of_time_apart(clock):
    sync, synced = ControlSync(Serial()), []
    for turn in range(1, 400):
        clock[0] += 0.01
        if sync.due():
            assert sync.sync("report") == ["report"]
            synced.append(turn)
    assert synced[:5] == [1, 3, 7, 15, 31] and {b - a for a, b in zip(synced[6:], synced[7:], strict=False)} <= {24, 25}
    clock[0] += 1000  # an evaluation
    sync.begin()
    before = len(synced)
    for turn in range(400, 500):
        clock[0] += 0.01
        if sync.due():
            sync.sync(None)
            synced.append(turn)
    assert len(synced) - before >= 3


def test_log_lines_after_each_step_do_not_postpone_the_syncs_by_the_clock(clock):
    sync, synced = ControlSync(Serial()), []
    for turn in range(1, 200):
        clock[0] += 0.01
        if sync.due():
            synced.append(turn)
        sync.sync(None)
    assert synced[:5] == [1, 3, 7, 15, 31] and {b - a for a, b in zip(synced[6:], synced[7:], strict=False)} <= {24, 25}


def test_a_sync_does_not_wait_for_what_travels_unless_it_takes_long(clock):
    sync, synced = ControlSync(Serial()), []
    for turn in range(1, 1200):
        clock[0] += 0.01
        # From turn 300 on something travels for 20 of 30 turns, from turn 600 on always.
        if sync.due(turn >= 600 or (turn >= 300 and turn % 30 < 20)):
            sync.sync(None)
            synced.append(turn)
    assert all(turn % 30 >= 20 for turn in synced if 300 <= turn < 600)
    assert len([turn for turn in synced if 300 <= turn < 600]) == 10
    late = [b - a for a, b in zip(synced, synced[1:], strict=False) if b >= 700]
    assert late and set(late) <= {round(100 * control_sync.MOST_SECONDS) - 1, round(100 * control_sync.MOST_SECONDS)}


def test_the_ranks_sync_after_each_slow_step(clock):
    sync = ControlSync(Serial())
    for _ in range(10):
        clock[0] += 3.0
        assert sync.due()
        sync.sync(None)


def test_all_ranks_sync_after_the_same_iterations_whatever_their_clocks_say(monkeypatch):
    class Clocks(threading.local):
        now = 0.0

        def monotonic(self):
            return self.now

    clocks = Clocks()
    monkeypatch.setattr(control_sync, "time", clocks)

    def work(communicator):
        sync, synced = ControlSync(communicator), []
        for turn in range(1, 100):
            clocks.now += 0.01 * (1 + communicator.rank)
            due = sync.due()
            assert communicator.everyone(due) == [due] * 3
            if due:
                sync.sync(None)
                synced.append(turn)
        return synced

    assert len(run_ranks(3, work)[0]) > 5
