"""Errors survive the way from one process to another, as from those that fetch samples."""

from __future__ import annotations

import pickle
import signal

import pytest

from hvd_train import errors
from hvd_train.errors import DataError, Interrupted, RankError, TrainError


@pytest.mark.parametrize(
    "error",
    [
        *(kind("what", where="there", fix="do this") for kind in TrainError.__subclasses__() if kind is not RankError
          and kind is not Interrupted),
        errors.LostRankError("gone", common=True, ranks=[1, 2]),
        Interrupted(signal.SIGTERM, 7),
        RankError("KeyError", "'a'", 2, "its traceback", 3),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_an_error_can_be_sent(error):
    sent = pickle.loads(pickle.dumps(error))
    assert type(sent) is type(error) and str(sent) == str(error) and vars(sent) == vars(error)
    assert sent.exit_code == error.exit_code


def test_its_message():
    assert str(DataError("what", where="where", fix="fix")) == "what; where; fix"
