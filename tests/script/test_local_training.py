"""What local training in scripts of both frameworks shares: laws in NumPy, on ranks that are threads."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from hvd_train.config import load_config
from hvd_train.errors import CommunicationError, ConfigError, NonFiniteError
from hvd_train.frontends.base import started_at_once
from hvd_train.protocol import Packing
from hvd_train.script.shared.local_training import LocalTraining, ScriptWeights, Variable, named
from tests.numpy_frontend import NumpyOps
from tests.rank_threads import run_ranks
from tests.script.outer_formula import LR, OUTER, RATE, ROUND, STEPS, by_formula, first, gradient

SIZES = [1, 2, 3, 4]
ENTRIES = 5


class Script:
    """A model of two weights and a statistic, and its loop."""

    def __init__(self, communicator, entries: int = ENTRIES, **options):
        self.rank, self.start = communicator.rank, first(entries)
        self.parts, self.statistic = np.split(self.start.copy(), [2]), np.zeros(2)
        exchange = load_config(None, [f"exchange.{name}={value}" for name, value in (OUTER | options).items()]).exchange
        weights = ScriptWeights(
            [self.variable(k) for k in range(2)],
            NumpyOps(),
            Packing(1 << 20, 1 << 20),
            named(communicator, 0),
            started_at_once,
        )
        statistic = Variable("mean", lambda: self.statistic, lambda x: self.statistic.__setitem__(..., x))
        self.local = LocalTraining(weights, [statistic], exchange, communicator, "hx.distribute")

    def variable(self, k: int) -> Variable:
        return Variable(f"w{k}", lambda: self.parts[k], lambda x: self.parts[k].__setitem__(..., x))

    @property
    def w(self) -> np.ndarray:
        return np.concatenate(self.parts)

    def step(self, number: int) -> None:
        self.local.begin_step()
        for part, g in zip(self.parts, np.split(gradient(self.w, self.rank, number), [2]), strict=True):
            part -= LR * g
        self.statistic[:] = self.rank, number
        self.local.stepped()

    def steps(self, count: int) -> None:
        for number in range(1, count + 1):
            self.step(number)


@pytest.mark.parametrize("size", SIZES)
def test_the_formula(size):
    def work(communicator):
        script = Script(communicator)
        script.steps(STEPS)
        local, state = script.w, script.local.state()
        velocity = np.concatenate([state[name] for name in sorted(state)])
        with script.local.global_weights():
            within, statistic = script.w, script.statistic.copy()
        assert np.array_equal(script.w, local) and np.array_equal(script.statistic, [script.rank, STEPS])
        return local, within, velocity, statistic

    local, shared, velocity = by_formula(size, range(1, STEPS + 1), range(ROUND, STEPS + 1, ROUND), first(ENTRIES))
    for rank, result in enumerate(run_ranks(size, work)):
        for found, expected in zip(result, (local[rank], shared, velocity), strict=False):
            np.testing.assert_allclose(found, expected, rtol=1e-12)
        np.testing.assert_allclose(result[3], [(size - 1) / 2, STEPS // ROUND * ROUND], rtol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_joins_when_they_are_asked_for(size):
    """After steps 1, 2 and 3 by hand, and after three more by itself; a join without a step changes nothing."""

    def work(communicator):
        script = Script(communicator)
        for number in (1, 2, 3):
            script.step(number)
            script.local.synchronize()
            before = script.w
            script.local.synchronize()
            assert np.array_equal(script.w, before) and not script.local.update.diverged
        script.steps(ROUND)
        assert not script.local.update.diverged
        return script.w

    _, shared, _ = by_formula(size, [1, 2, 3, 1, 2, 3], [1, 2, 3, 6], first(ENTRIES))
    for w in run_ranks(size, work):
        np.testing.assert_allclose(w, shared, rtol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_a_round_begins_with_what_the_model_has(size):
    """In the middle of a round, with the outer momentum; looks at the global weights change no bit."""

    def work(communicator):
        script = Script(communicator)
        script.steps(ROUND + 1)
        for part in script.parts:
            part[:] = 7.0
        script.local.begin_round()
        for number in range(1, ROUND + 1):
            if script.rank == 0:
                with script.local.global_weights():
                    assert (script.w == 7.0).all()
            script.step(number)
        return script.w

    _, _, velocity = by_formula(size, range(1, ROUND + 1), [ROUND], first(ENTRIES))
    _, shared, _ = by_formula(size, range(1, ROUND + 1), [ROUND], np.full(ENTRIES, 7.0), velocity)
    for w in run_ranks(size, work):
        np.testing.assert_allclose(w, shared, rtol=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rounds", [0, 1])
def test_weights_that_are_set_between_two_rounds_are_the_global_ones(size, rounds):
    """As where a script loads a part of its model. An outer step must not draw them back to what was there before."""

    def work(communicator):
        script = Script(communicator)
        script.steps(rounds * ROUND)
        script.parts[1][:] = 7.0
        before = script.w
        script.step(1)
        with script.local.global_weights():
            assert np.array_equal(script.w, before)
        for number in range(2, ROUND + 1):
            script.step(number)
        return before, script.w

    numbers = range(1, rounds * ROUND + 1)
    _, _, velocity = by_formula(size, numbers, [ROUND] * rounds, first(ENTRIES))
    for before, w in run_ranks(size, work):
        _, shared, _ = by_formula(size, range(1, ROUND + 1), [ROUND], before, velocity)
        np.testing.assert_allclose(w, shared, rtol=1e-12)


def test_what_each_rank_sets_for_itself_is_a_part_of_its_steps():
    """As noise that differs between ranks: the next join counts from the weights that all had."""

    def work(communicator):
        script = Script(communicator, outer_momentum=0.0)
        script.parts[0][:] += script.rank
        for number in range(1, ROUND):
            script.step(number)
        before = script.w
        script.step(ROUND)
        return before, script.w

    ranks = run_ranks(3, work)
    last = [w - LR * gradient(w, rank, ROUND) for rank, (w, _) in enumerate(ranks)]
    shared = first(ENTRIES) - RATE * (first(ENTRIES) - np.mean(last, axis=0))
    for _, w in ranks:
        np.testing.assert_allclose(w, shared, rtol=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("compression", ["topk", "int8", "fp16", "threshold"])
def test_what_is_compressed_stays_equal_on_all_ranks(size, compression):
    def work(communicator):
        script = Script(communicator, 9_000, compression=compression)
        script.steps(2 * ROUND)
        return script.w

    _, exact, _ = by_formula(size, [*range(1, 2 * ROUND + 1)], [ROUND, 2 * ROUND], first(9_000))
    ends = run_ranks(size, work)
    assert all(np.array_equal(w, ends[0]) for w in ends) and not np.array_equal(ends[0], first(9_000))
    assert np.abs(ends[0] - exact).max() < 2.0 * size


def test_any_rank_may_ask_to_stop():
    def work(communicator):
        script = Script(communicator)
        script.local.stop_requested = script.rank == 2
        seen = []
        for number in range(1, ROUND + 1):
            script.step(number)
            seen.append(script.local.stops)
        return seen

    assert run_ranks(3, work) == [[False] * (ROUND - 1) + [True]] * 3


def test_ranks_that_are_not_in_step_end_together():
    """One has made a step more, or begun a round by itself."""

    def more(script):
        script.steps(1 + (script.rank == 1))
        script.local.synchronize()

    def again(script):
        script.step(1)
        if script.rank == 1:
            script.local.begin_round()
        script.steps(2 * ROUND)

    def work(communicator):
        messages = []
        for change in (more, again):
            with pytest.raises(CommunicationError) as error:
                change(Script(communicator))
            messages.append(str(error.value))
        return messages

    for first_message, second in run_ranks(3, work):
        assert first_message.startswith("the ranks have made unequal numbers of steps: 1, 2, 1 on rank 0, 1, ...; hx.")
        assert second.startswith("the ranks have made unequal numbers of steps: 3, 4, 3 on rank 0, 1, ...; hx.")


@pytest.mark.parametrize("options", [{}, {"compression": "topk"}], ids=str)
def test_weights_that_are_not_finite_end_all_ranks(options):
    """Before they travel: a compressor would hide them and keep them."""

    def work(communicator):
        script = Script(communicator, 9_000, **options)
        script.parts[1][3] = np.nan if script.rank == 1 else 0.0
        with pytest.raises(NonFiniteError) as error:
            script.steps(ROUND)
        return str(error.value)

    for message in run_ranks(2, work):
        assert message.startswith("the weights of 1 rank are not finite after step 3; hx.distribute(mode=...); lower")


def test_what_would_be_lost_is_refused():
    def work(communicator):
        script = Script(communicator)
        script.step(1)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                script.local.warn_if_never_synchronized()
        with script.local.global_weights():
            for refused in (lambda: script.step(2), script.local.check_load):
                with pytest.raises(ConfigError, match="would be lost"):
                    refused()
        assert np.array_equal(script.w, by_formula(2, [1], [], first(ENTRIES))[0][script.rank])
        return [str(w.message) for w in seen]

    told, silent = run_ranks(2, work)
    assert len(told) == 1 and told[0].startswith("no synchronization in 1 step") and not silent


def test_a_state_goes_on_on_another_number_of_ranks():
    def begun(communicator):
        script = Script(communicator)
        script.steps(ROUND)
        return script.w, script.local.state()

    w, state = run_ranks(2, begun)[0]

    def work(communicator):
        script = Script(communicator)
        script.step(1)  # what is loaded takes its place
        script.local.take_global()
        script.parts[0][:], script.parts[1][:] = np.split(w, [2])
        script.local.begin_round()
        script.local.load(state)
        script.steps(ROUND)
        return script.w

    _, shared, velocity = by_formula(2, range(1, ROUND + 1), [ROUND], first(ENTRIES))
    for size in (1, 3):
        _, expected, _ = by_formula(size, range(1, ROUND + 1), [ROUND], shared, velocity)
        for found in run_ranks(size, work):
            np.testing.assert_allclose(found, expected, rtol=1e-12)
