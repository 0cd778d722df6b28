"""Ranks over Gloo wait for one another before they connect.

Gloo gives a rank up that comes more than 30 seconds after another one, and its error ends the process. On a busy
machine, or with a slow file server, one rank may load its framework for longer than that.
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

ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"  # of our own servers it ends in a token
START_SECONDS = 600  # for all ranks to come
PAUSES = (0.02, 0.2)  # seconds between two looks: at first, and at last


def wait_for_ranks(here: World, environ: Mapping[str, str] = os.environ) -> None:
    """Wait until all ranks that a server of ours brings together are ready to connect.

    Raises CommunicationError if one does not come within ``HOROVOD_START_TIMEOUT`` seconds.
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
            what = f"{name_ranks(sorted(missing))} did not come within {seconds} s"
            fix = f"look for what ended or held them; {START} sets the time"
            raise CommunicationError(what, where=here.launcher, fix=fix)
        if missing:
            time.sleep(pause)
            pause = min(1.5 * pause, PAUSES[1])


def _ask(server: str, token: str, method: str, rank: int) -> int:
    """Return the HTTP status of a request for a rank's mark; 0: no answer."""
    connection = http.client.HTTPConnection(server, timeout=ANSWER_SECONDS)
    with suppress(OSError, http.client.HTTPException), closing(connection):
        connection.request(method, f"/{token}/ready/{rank}", b"ready" if method == "PUT" else None)
        return connection.getresponse().status
    return 0
