"""A rank's side of the rendezvous, for launchers that do not bring their ranks together (srun).

All that ranks have in common is what the launcher tells them and the user's secret. From these follow a token and a few
ports (``step.py``), so that no rank must send either:

1. Rank 0 opens a server on its node, at the first of the ports that is free (``server.py``).
2. The others try the ports on the step's first node. A server proves by a hash of their random number that it knows the
   token, before a rank names it.
3. If rank 0 is on another node (``srun -m arbitrary``, a heterogeneous job), the first rank of the first node opens a
   server, too: a signpost. Rank 0 reports its place there, and the others are sent on.
4. Each rank posts "join" with its place, and is answered when all have come or one has failed: the verdict.
5. Rank 0's server stays open. Horovod's Gloo exchanges addresses there, and ranks report how they end.
"""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hvd_train.errors import CommunicationError, ConfigError, TrainError
from hvd_train.launch.environment import world
from hvd_train.launch.launchers import named
from hvd_train.launch.launchers.base import number
from hvd_train.launch.rendezvous.endpoint import ANSWER_SECONDS, LOOPBACK, Endpoint, interface_of
from hvd_train.launch.rendezvous.secret import SECRET, make_secret, read_secret
from hvd_train.launch.rendezvous.server import LAST_WORDS_SECONDS, START, RendezvousServer
from hvd_train.launch.rendezvous.step import PORT, TRIES, Step
from hvd_train.launch.world import World

START_SECONDS = 600  # for all ranks to come
PARTING_SECONDS = 1.0
PAUSES = (0.2, 2.0)  # seconds between two looks for the server: at first, and at last
COME_SECONDS = 30.0  # for ranks that start later than others
# What looking for a server, or asking it, raises while it is not there.
ABSENT = (OSError, http.client.HTTPException, ValueError)


class Rendezvous:
    """The meeting of this rank with the others of its step."""

    def __init__(self, world: World, step: Step) -> None:
        self._world, self._step = world, step
        self._met: Endpoint | None = None  # rank 0's server, once all ranks have come
        self._server: RendezvousServer | None = None  # of rank 0
        self._signpost: RendezvousServer | None = None  # on the first node, if rank 0 is not there
        self._gave_up = False

    def prepare(self) -> None:
        """Open this rank's server, if it has one. Early, so that other ranks can report an error before they join."""
        if self._world.rank == 0:
            self.open_server()
        elif self._world.local_rank == 0 and self._signpost is None and self._step.node == self._step.first_node:
            self._signpost = self._open()
            self._signpost.place = {}

    def open_server(self) -> RendezvousServer:
        """Return rank 0's server, which is opened once, at the first of the step's ports that is free."""
        if self._server is None:
            self._server = self._open()
            self._server.locals[0] = self._world.local_rank
            if self._step.node != self._step.first_node:
                threading.Thread(target=self._report_place, args=[self._server], name="place", daemon=True).start()
        return self._server

    def _open(self) -> RendezvousServer:
        token, ports = self._step.token(make_secret()), self._step.ports(os.environ)
        for port in ports:
            with suppress(OSError):
                host = "" if self._step.nodes > 1 else LOOPBACK
                server = RendezvousServer(host, port, token, self._world.size)
                threading.Thread(target=server.serve_forever, name="rendezvous", daemon=True).start()
                return server
        what = f"no free port on {self._step.node}: {', '.join(map(str, ports))} are taken"
        raise ConfigError(what, where=self._step.launcher, fix=f"set {PORT} to the first of {TRIES} others")

    def _report_place(self, server: RendezvousServer) -> None:
        """Report the place of rank 0's server to the signpost on the first node, until all ranks have come.

        If one has failed, others that start later are still sent on from there, until this process ends.
        """
        while not server.complete:
            with suppress(*ABSENT):
                address = self._step.address()
                for port in self._step.ports(os.environ):
                    signpost = Endpoint(address, port, server.token)
                    if signpost.answers():
                        signpost.ask("report_place", {"port": server.server_port})
            time.sleep(PAUSES[0])

    def close(self) -> None:
        """Close this rank's servers."""
        self._close_signpost()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _close_signpost(self) -> None:
        if self._signpost is not None:
            self._signpost.shutdown()
            self._signpost.server_close()
            self._signpost = None

    def _keep_signpost(self, server: Endpoint) -> None:
        """Keep this rank's signpost until rank 0's server has answered all who are sent there, and has ended."""
        stop = time.monotonic() + COME_SECONDS
        while self._signpost and time.monotonic() < stop and server.answers():
            time.sleep(PAUSES[0])

    # ---- all ranks come

    def join_world(self) -> None:
        """Wait for the other ranks, and set Horovod's variables.

        Raises CommunicationError on all ranks if one has ended, or does not come within ``HOROVOD_START_TIMEOUT``
        seconds, and ConfigError if no port is free or the secret cannot be had.
        """
        seconds = number(os.environ, START, START_SECONDS)
        self._met = met = self._receive(seconds) if self._world.rank == 0 else self._come(seconds)
        variables = met.horovod_variables(self._world, self._step.node)
        for name in ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME"):  # the user's choice stands
            if name in os.environ:
                variables.pop(name, None)
        os.environ.update(variables)

    def _receive(self, seconds: int) -> Endpoint:
        """Wait for the others at rank 0's server, which stays open as long as the process lives."""
        server = self.open_server()
        verdict = server.wait(seconds)
        if "failed" in verdict:
            # The server ends with this process, so it stays until the others have read the verdict. A rank that has
            # not come within the limit may never do so.
            server.wait_until_answered(COME_SECONDS if server.ended else PARTING_SECONDS)
            raise self._failure(verdict)
        network = interface_of(verdict["address"])
        return Endpoint(LOOPBACK, server.server_port, server.token, network, self._cross(verdict["locals"]))

    def _come(self, seconds: int) -> Endpoint:
        """Look for rank 0's server, and wait there for the verdict."""
        stop, reason, pause = time.monotonic() + seconds, "no answer", PAUSES[0]
        while (left := stop - time.monotonic()) > 0:
            try:
                endpoint = self.find()
                if isinstance(endpoint, Endpoint):
                    place = {"rank": self._world.rank, "local": self._world.local_rank}
                    # The answer comes when all ranks have come, so it may take as long as the slowest.
                    local_address, status, verdict = endpoint.ask("join", place, left + ANSWER_SECONDS)
                    if status == 200:
                        self._close_signpost()  # all have come
                        address = verdict["address"] if local_address.startswith("127.") else local_address
                        cross = self._cross(verdict["locals"])
                        return replace(endpoint, interface=interface_of(address), cross=cross)
                    if status == 409:
                        self._keep_signpost(endpoint)
                        raise self._failure(verdict)
                else:
                    reason = endpoint
            except ABSENT as error:
                reason = str(error)
            time.sleep(min(pause, max(0, stop - time.monotonic())))
            pause = min(1.5 * pause, PAUSES[1])
        self._gave_up = True
        what = f"rank 0 was not found on {self._step.first_node} within {seconds} s: {reason}"
        fix = f"look for what ended or held it; {START} sets the time"
        raise CommunicationError(what, where=self._step.launcher, fix=fix)

    def find(self) -> Endpoint | str:
        """Return the place of rank 0's server, or why it was not found."""
        try:
            token = self._step.token(read_secret())
        except FileNotFoundError as error:
            return f"no secret in {error.filename}; if the hosts share no home, set {SECRET} for all ranks"
        address, ports = self._step.address(), self._step.ports(os.environ)
        silent = False
        # A server of another step or user may hold one of the ports: it does not know the token, so try the next.
        for port in ports:
            endpoint = Endpoint(address, port, token)
            if endpoint.answers():
                _, status, place = endpoint.ask("place", {})
                if status == 200:
                    return replace(endpoint, **place)
                silent = True
        if silent:
            return f"{self._step.first_node} has not heard from rank 0, which is on another node"
        return f"nobody who knows the secret of this step is at port {', '.join(map(str, ports))}"

    def _cross(self, locals_: list[int]) -> tuple[int, int]:
        """Return Horovod's cross rank and size from all local ranks. They must follow the order of ranks, or Horovod
        ends."""
        # Counted over lower ranks: as many nodes before this one have a rank with the same local rank.
        local = self._world.local_rank
        return locals_[: self._world.rank].count(local), locals_.count(local)

    def _failure(self, verdict: Mapping[str, Any]) -> CommunicationError:
        where, fix = self._step.launcher, verdict["fix"]
        error = CommunicationError(verdict["failed"], where=where, fix=fix, common=True)
        error.exit_code = verdict["code"]
        return error

    # ---- a rank ends

    def report_exit(self, text: str, code: int, seconds: float = COME_SECONDS) -> bool | None:
        """Report that this rank ends with an error.

        Returns True if rank 0 has reported the same, False if it has not, and None if no server answers.

        Rank 0 answers those who wait or end as well, and before all have come those who start later. Another rank
        looks for the server for ``seconds``.
        """
        with suppress(TrainError, *ABSENT):
            if self._world.rank == 0:
                later = LAST_WORDS_SECONDS if self._met else COME_SECONDS
                self.open_server().report_exit_of_rank_0(text, code, later)
                return False
            endpoint, stop = self._met, time.monotonic() + seconds
            while endpoint is None and not self._gave_up and time.monotonic() < stop:
                near = self.find()
                if isinstance(near, Endpoint):
                    endpoint = near
                else:
                    time.sleep(PAUSES[0])
            if endpoint is not None:
                report = {"rank": self._world.rank, "code": code, "text": text}
                same = False
                with suppress(OSError):  # the server knows then, and may end before it answers
                    same = endpoint.ask("report_exit", report, LAST_WORDS_SECONDS + ANSWER_SECONDS)[2]["same"]
                self._keep_signpost(endpoint)
                return same
        return None

    def exit_code_of_lost(self, default: int) -> int:
        """Return the exit code with which the first lost rank ended, if it could report it."""
        # The server keeps the order of the reports. The first is the cause, the others followed.
        codes: Mapping[Any, int] = {}
        if self._server is not None:
            codes = self._server.ended
        elif self._met is not None:
            with suppress(*ABSENT):
                codes = self._met.ask("ended", {})[2]
        return next(iter(codes.values()), default)


_current: Rendezvous | None = None  # of this process


def rendezvous_of(here: World) -> Rendezvous | None:
    """Return the rendezvous of a rank, or None if its launcher brings the ranks together."""
    global _current
    launcher = named(here.launcher)
    if launcher.joins_ranks(os.environ):
        return None
    if _current is None:
        _current = Rendezvous(here, launcher.step(os.environ))
    return _current


def current() -> Rendezvous | None:
    """Return this process' rendezvous, also after ``join_world``, when Horovod's variables name another launcher."""
    return _current or rendezvous_of(world())


def prepare(here: World) -> None:
    """Open the server of a rank whose launcher does not bring the ranks together."""
    if rendezvous := rendezvous_of(here):
        rendezvous.prepare()


def join_world(here: World) -> None:
    """Wait for the other ranks if the launcher does not bring them together. Must be called before ``hvd.init()``."""
    if rendezvous := rendezvous_of(here):
        rendezvous.join_world()


def exit_code_of_lost(default: int) -> int:
    """Return the exit code with which the first lost rank ended, if it could report it."""
    return _current.exit_code_of_lost(default) if _current else default
