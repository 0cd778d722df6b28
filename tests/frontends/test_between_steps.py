"""Between steps an update reads and takes weights, and exchanges in the background, in every front-end alike."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.frontends.test_contract import ALL, FRAMEWORKS, batch, opened, stepped, weights
from tests.limits import SECONDS


@pytest.mark.parametrize("framework", ALL)
def test_weights_of_a_bucket_are_read_and_taken(framework):
    frontend = stepped(opened(framework), [batch()])
    update, before = frontend.update, weights(frontend)
    flats = [update.optimizer.weights(b) + 0 for b in range(len(update.buckets))]
    stepped(frontend, [batch(1), batch(2)])
    frontend.run_queued()
    assert any((before[k] != x).any() for k, x in weights(frontend).items())
    for b, flat in enumerate(flats):
        update.optimizer.take(b, flat)
    assert all((before[k] == x).all() for k, x in weights(frontend).items())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_weights_of_images_are_taken_in_their_places(framework):
    model = {"name": "cnn", "hidden": 5}
    first = opened(framework, model, shape=(28, 28, 1))
    other = opened(framework, model, shape=(28, 28, 1), seed=7)
    for b in range(len(first.update.buckets)):
        other.update.optimizer.take(b, first.update.optimizer.weights(b))
    assert all((x == weights(other)[k]).all() for k, x in weights(first).items())


@pytest.mark.parametrize("framework", ALL)
def test_a_compiled_function_sees_all_steps_and_changes_cells(framework):
    frontend = opened(framework, steps_per_execution=4) if framework == "tensorflow" else opened(framework)
    ops, cell = frontend.ops, frontend.ops.keep(np.zeros(1))
    calls = []

    def add(amount):
        calls.append(amount)
        cell.write(cell.read() + amount + 0 * ops.sum(ops.cast(frontend.update.optimizer.weights(0), "float64"), 0))

    compiled = frontend.compiled(add)
    for k in (1, 2, 3):
        stepped(frontend, [batch(k)])
        compiled(ops.from_numpy(np.array([float(k)])))
        assert not frontend.queued
    assert ops.to_numpy(cell.read()).tolist() == [6.0]
    assert len(calls) == (1 if framework == "tensorflow" else 3)  # traced once


@pytest.mark.parametrize("framework", ALL)
def test_a_transfer_in_the_background_is_waited_for_where_its_result_is_asked_for(framework):
    frontend, may_end, started = opened(framework), threading.Event(), threading.Event()

    def start(x):
        started.set()
        return x + 1

    def finish(x):
        assert may_end.wait(SECONDS)
        return [2 * x]

    wait = frontend.in_background(start, finish)(frontend.ops.from_numpy(np.ones(3)))
    assert started.wait(SECONDS)
    stepped(frontend, [batch()])
    frontend.run_queued()
    may_end.set()
    (result,) = wait()
    assert frontend.ops.to_numpy(result).tolist() == [4.0] * 3


@pytest.mark.parametrize("framework", ALL)
def test_an_error_in_the_background_is_raised_where_its_result_is_asked_for(framework):
    frontend = opened(framework)

    def finish(x):
        raise RuntimeError("a rank was lost")

    wait = frontend.in_background(lambda x: x, finish)(frontend.ops.from_numpy(np.ones(3)))
    with pytest.raises(RuntimeError, match="a rank was lost"):
        wait()
