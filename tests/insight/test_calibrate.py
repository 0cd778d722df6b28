"""What the ranks of a calibration record."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from hvd_train.core.hooks import Epoch
from hvd_train.jobs import calibrate
from hvd_train.jobs.calibrate import Recorder


class Alone:
    """A world of one rank."""

    def broadcast_bytes(self, data, root=0):
        return data


class Clock:
    def __init__(self):
        self.now, self.waited = 100.0, 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(calibrate.time, "perf_counter", clock)
    return clock


def trainer_of(clock):
    frontend = SimpleNamespace(queued=[], traced=0, waited=lambda fresh: clock.waited)
    return SimpleNamespace(frontend=frontend, communicator=Alone(), progress=SimpleNamespace(stopped=False))


def take(recorder, trainer, clock, steps, seconds, waited=0.0, sync=True):
    """Take ``steps`` that run in one call of so many seconds."""
    for step in range(steps):
        trainer.frontend.queued = [step] if step < steps - 1 else []
        if step == steps - 1:
            clock.now, clock.waited = clock.now + seconds, clock.waited + waited
        recorder.on_step(trainer, SimpleNamespace(due=SimpleNamespace(sync=sync and step == steps - 1)))


def test_first_calls_trace_and_evaluations_belong_to_no_step(clock):
    recorder, trainer = Recorder(10.0), trainer_of(clock)
    recorder.on_start(trainer)
    take(recorder, trainer, clock, 1, 30.0)  # traces, and does not count as time that has passed
    take(recorder, trainer, clock, 4, 20.0)  # the first call of four steps
    for _ in range(3):
        take(recorder, trainer, clock, 4, 0.8, waited=0.2, sync=False)
    clock.now, clock.waited = clock.now + 50, clock.waited + 7  # an evaluation
    recorder.on_epoch_end(trainer, Epoch(0, True, {}, 0.1, 1.0, 1))
    take(recorder, trainer, clock, 4, 1.2, waited=0.4, sync=False)
    # The warm-up is a share of the time since the first call, which the evaluation is part of.
    before, after = recorder.calls
    assert before == pytest.approx([4, 0.2, 0.05]) and after == pytest.approx([4, 0.3, 0.1])


def test_a_call_that_traces_another_graph_does_not_count(clock):
    """TensorFlow takes another graph from the ninth call on, where steps run one by one."""
    recorder, trainer = Recorder(10.0), trainer_of(clock)
    recorder.on_start(trainer)
    for call in range(8):
        trainer.frontend.traced = 1 + (call >= 6)
        take(recorder, trainer, clock, 1, 9.0 if call in (0, 6) else 0.25, sync=False)
    assert [row[1] for row in recorder.calls] == pytest.approx([0.25])


def test_all_ranks_leave_at_a_sync_after_the_seconds_and_some_calls(clock):
    recorder, trainer = Recorder(1.0), trainer_of(clock)
    recorder.on_start(trainer)
    stopped = []
    for _ in range(12):
        take(recorder, trainer, clock, 1, 0.25)
        stopped.append(trainer.progress.stopped)
    first = stopped.index(True)
    assert first == 5 and len(recorder.calls) >= calibrate.LEAST_CALLS
    # few calls end it as well, if each takes long
    recorder, trainer = Recorder(1.0), trainer_of(clock)
    recorder.on_start(trainer)
    for _ in range(3):
        take(recorder, trainer, clock, 1, 3.0)
    assert trainer.progress.stopped and json.dumps(recorder.calls)
