"""Shared memory within TensorFlow's graphs: what a step waits for, and variables that are assigned."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_train.errors import ConfigError
from hvd_train.frontends.tensorflow.graphs import graph
from hvd_train.frontends.tensorflow.host_memory import CommonWeights, after_reads


class Alone:
    """The memory of one rank that shares with nobody."""

    def share(self, tensors):
        return [self.aligned(x) for x in tensors]

    @staticmethod
    def aligned(x):
        memory = np.zeros(x.nbytes + 64, np.uint8)
        first = -memory.ctypes.data % 64
        place = memory[first : first + x.nbytes].view(x.dtype)
        place[:] = x
        return place


@pytest.fixture
def common():
    variables = [keras.Variable(np.arange(6.0).reshape(2, 3)), keras.Variable(np.ones(4))]
    return CommonWeights(Alone(), variables)


def test_variables_read_what_another_rank_writes(common):
    first, second = common.variables
    common._arrays[0][4] = 40
    assert first.numpy().tolist() == [[0, 1, 2], [3, 40, 5]] and second.numpy().tolist() == [1] * 4


def test_an_assigned_variable_hands_its_values_on_and_reads_again(common):
    refreshed = []
    common.refresh = lambda: refreshed.append(True)
    common.attach()
    assert not refreshed
    first = common.variables[0]
    first.assign(np.full((2, 3), 7.0))
    common.assigned = {v.path for v in common.variables}
    common.attach()
    assert refreshed == [True] and common._arrays[0].tolist() == [7] * 6
    common._arrays[0][0] = 8
    assert first.numpy()[0, 0] == 8
    common.attach()
    assert refreshed == [True]


def test_a_model_that_assigns_its_weights_is_refused(common):
    common.variables[1].assign(np.zeros(4))
    with pytest.raises(ConfigError) as raised:
        common.attach()
    assert str(raised.value).startswith("the model changes its own weights, which ranks of one host share (as Spectral")


def test_a_variable_without_entries_was_not_assigned():
    common = CommonWeights(Alone(), [keras.Variable(np.zeros((0, 3))), keras.Variable(np.ones(()))])
    common.attach()


def test_a_step_of_a_graph_reads_what_was_written_before_it(common):
    first = common.variables[0]
    total = graph(lambda: tf.reduce_sum(first.value)).get_concrete_function()
    for k in range(3):
        common._arrays[0][:] = k
        assert float(total()) == 6 * k


def test_what_is_computed_from_weights_comes_before_the_gradients(common):
    """A value that no gradient needs, such as a penalty's, would else be computed while others move the weights."""
    first = common.variables[0]

    def step():
        penalty = tf.reduce_sum(tf.square(first.value), name="penalty")
        unused = tf.tile(first.value, [2, 1], name="unused")
        (gradient,) = after_reads([2 * first.value.read_value()], common.variables, penalty)
        return gradient, unused

    made = graph(step).get_concrete_function().graph
    (identity,) = [op for op in made.get_operations() if op.type == "Identity" and len(op.control_inputs) > 1]
    assert {op.name for op in identity.control_inputs} >= {"penalty", "unused"}
