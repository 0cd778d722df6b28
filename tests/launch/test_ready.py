"""Ranks over Gloo wait for the last one before they connect."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvd_train.errors import CommunicationError
from hvd_train.launch.rendezvous import ready
from hvd_train.launch.rendezvous.endpoint import LOOPBACK
from hvd_train.launch.rendezvous.ready import ADDRESS, wait_for_ranks
from hvd_train.launch.rendezvous.server import START, RendezvousServer
from hvd_train.launch.world import World
from tests.limits import SECONDS

TOKEN = "0" * 64


@pytest.fixture
def environ():
    with RendezvousServer(LOOPBACK, 0, TOKEN, 3) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {ADDRESS: f"{LOOPBACK}:{server.server_port}/{TOKEN}"}
        server.shutdown()


def place(rank):
    return World(rank, 3, rank, 3, "horovodrun")


def test_all_go_on_once_the_last_one_has_come(environ, monkeypatch):
    """However late: the others have looked for it in vain by then, several times."""
    looks, real = threading.Semaphore(0), ready._ask

    def ask(server, token, method, rank):
        status = real(server, token, method, rank)
        if rank == 2 and status == 404:
            looks.release()
        return status

    monkeypatch.setattr(ready, "_ask", ask)
    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(wait_for_ranks, place(rank), environ) for rank in (0, 1)]
        assert all(looks.acquire(timeout=SECONDS) for _ in range(6))
        assert not any(one.done() for one in early)
        wait_for_ranks(place(2), environ)
        assert [one.result(SECONDS) for one in early] == [None, None]


def test_who_does_not_come_is_named(environ):
    with pytest.raises(CommunicationError, match="ranks 1, 2 did not join within 0 s; horovodrun; look for "):
        wait_for_ranks(place(0), environ | {START: "0"})


@pytest.mark.parametrize("address", [{}, {ADDRESS: "10.0.0.1"}, {ADDRESS: "10.0.0.1:7"}])
def test_other_servers_are_not_asked(address):
    wait_for_ranks(place(0), address)
