"""Ranks over Gloo wait for one another before they connect.

Gloo ends the process if a rank arrives more than 30 seconds after another one. On a busy machine, or with a slow file
server, importing a framework may take longer than that.
"""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Mapping
from contextlib import closing, suppress

from hvd_train.errors import CommunicationError, name_ranks
from hvd_train.launch.launchers.base import number
from hvd_train.launch.rendezvous.endpoint import ANSWER_SECONDS
from hvd_train.launch.rendezvous.server import START
from hvd_train.launch.world import World

ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"  # ends in a token for our own servers
START_SECONDS = 600  # for all ranks to arrive
PAUSES = (0.02, 0.2)  # seconds between polls: at first, and at most


def wait_for_ranks(here: World, environ: Mapping[str, str] = os.environ) -> None:
    """Wait until all ranks that use one of our servers are ready to connect.

    Raises CommunicationError if one does not arrive within ``HOROVOD_START_TIMEOUT`` seconds.
    """
    server, _, token = environ.get(ADDRESS, "").partition("/")
    if not token:  # MPI, or horovodrun's own server
        return
    seconds = number(environ, START, START_SECONDS)
    stop, pause, missing = time.monotonic() + seconds, PAUSES[0], set(range(here.size))
    while missing:
        if here.rank in missing:
            _ask(server, token, "PUT", here.rank)
        missing = {rank for rank in missing if _ask(server, token, "GET", rank) != http.client.OK}
        if missing and time.monotonic() > stop:
            what = f"{name_ranks(sorted(missing))} did not join within {seconds} s"
            fix = f"look for what ended or blocked them; {START} sets the time"
            raise CommunicationError(what, where=here.launcher, fix=fix)
        if missing:
            time.sleep(pause)
            pause = min(1.5 * pause, PAUSES[1])


def _ask(server: str, token: str, method: str, rank: int) -> int:
    """Send a request for the key that marks a rank as ready. Returns the HTTP status, 0 without an answer."""
    connection = http.client.HTTPConnection(server, timeout=ANSWER_SECONDS)
    with suppress(OSError, http.client.HTTPException), closing(connection):
        connection.request(method, f"/{token}/ready/{rank}", b"ready" if method == "PUT" else None)
        return connection.getresponse().status
    return 0
