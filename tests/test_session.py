"""All ranks leave a session together, a failure says what it is, and a part of a world keeps the places on the host."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hvd_train import session
from hvd_train.errors import CommunicationError, ConfigError, LostRankError
from hvd_train.frameworks import FRAMEWORKS
from hvd_train.frontends.serial import Serial
from hvd_train.launch.world import World
from hvd_train.session import Session

LOST = LostRankError("a rank is gone")


class Noted(Serial):
    """A communicator that notes what is asked of it; an OSError is the loss of a rank."""

    def __init__(self, expected_size=1):
        self.size, self.calls = expected_size, []

    def open(self):
        self.calls.append("open")

    def barrier(self):
        self.calls.append("barrier")

    def close(self):
        self.calls.append("close")

    def failure(self, error=None):
        return LOST if isinstance(error, OSError) else None


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(session, "Serial", Noted)
    return Session(SimpleNamespace())


def test_all_ranks_meet_at_the_end_of_a_session(alone):
    with alone.opened() as communicator:
        assert communicator is alone.communicator and communicator.calls == ["open"]
    assert communicator.calls == ["open", "barrier", "close"]


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (OSError("broken pipe"), LostRankError, "a rank is gone"),
        (MemoryError(), CommunicationError, "out of memory: MemoryError; lower batch_size"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), CommunicationError, "out of memory: DefaultCPU"),
        (KeyError("a"), KeyError, "a"),
    ],
)
def test_a_failure_says_what_it_is_and_waits_for_nobody(alone, raised, kind, text):
    with pytest.raises(kind, match=text), alone.opened():
        raise raised
    assert alone.communicator.calls == ["open"]


def test_a_part_of_the_world_keeps_the_places_on_the_host(monkeypatch):
    """A sweep's group of two of four ranks: a rank still takes the GPU of its place on the host."""
    monkeypatch.setattr(FRAMEWORKS["pytorch"].__class__, "make_communicator", lambda self, size: Noted(size))
    whole = World(3, 4, 3, 4, "mpirun")
    third = Session(SimpleNamespace(), framework="pytorch", world=whole, settings={"ranks": 4, "host": "a"})
    opened = third.open(SimpleNamespace(size=2))
    assert (opened.size, opened.part.size, opened.local_rank, opened.local_size) == (2, 2, 3, 4)
    assert third.settings == {"ranks": 2, "host": "a"}
    with pytest.raises(
        ConfigError, match="3 stages do not divide 4 ranks; parallel.pipeline: 3; start 3, 6, 9, .* ranks"
    ):
        Session(SimpleNamespace(), framework="pytorch", world=whole).open(stages=3)
    alone = third.open(SimpleNamespace(size=1))
    assert (alone.size, alone.local_rank) == (1, 3) and third.settings["ranks"] == 1


def test_a_framework_that_is_there_and_cannot_be_imported(monkeypatch, tmp_path):
    """A damaged TensorFlow was "not installed"."""
    (tmp_path / "damaged_framework.py").write_text("raise OSError('libtorch.so: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    record = replace(FRAMEWORKS["pytorch"], module="damaged_framework", packages=("damaged_framework",))
    monkeypatch.setitem(FRAMEWORKS, "pytorch", record)
    told = "pytorch cannot be imported: OSError: libtorch.so: cannot open .*; framework: pytorch; .*(install|setup)"
    with pytest.raises(ConfigError, match=told):
        Session.prepare("pytorch")
