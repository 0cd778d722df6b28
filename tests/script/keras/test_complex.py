"""Complex numbers in Keras scripts: a cast to a type that travels would drop their imaginary part."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvd_train.keras as hk
from hvd_train.compression.uncompressed import Uncompressed
from hvd_train.errors import ConfigError
from hvd_train.frontends.serial import Serial
from hvd_train.script.keras.backends import OnTensorFlow
from hvd_train.script.keras.gradients import Reduction


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_reduce_refuses_complex_numbers(op):
    """The sum of 1.5 + 2j was the whole number 1, and the mean 1.5."""
    with pytest.raises(ConfigError, match="a value is of complex64, which cannot be exchanged; hk.reduce; "):
        hk.reduce({"x": 1.0, "z": np.array([1.5 + 2j], np.complex64)}, op=op)
    assert float(hk.reduce(1.5, op=op)) == 1.5 and int(hk.reduce(True, op=op)) == 1


def test_complex_weights_are_refused():
    """Their gradients travelled as float32."""
    weight = keras.Variable(np.array([1 + 2j]), dtype="complex64", name="phase")
    with pytest.raises(ConfigError, match="'phase' is of complex64, which cannot be exchanged; hk.distribute; "):
        Reduction([weight], Uncompressed(), Serial(), OnTensorFlow())
