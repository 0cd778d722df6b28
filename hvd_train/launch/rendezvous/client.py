"""A rank's side of the rendezvous, for launchers that do not connect their ranks (srun).

Ranks share only the launcher's variables and the user's secret. From these each computes the same token and a few ports
(``step.py``), so neither must be sent:

1. Rank 0 opens a server on its node, at the first free port (``server.py``).
2. The others try the ports on the step's first node. A server first proves, by a hash of the rank's random number, that
   it knows the token.
3. If rank 0 is on another node (``srun -m arbitrary``, a heterogeneous job), the first rank of the first node opens a
   server, too: a signpost. Rank 0 reports its address there, and the others are redirected.
4. Each rank posts "join" with its rank. The answer (the verdict) comes when all have joined or one has failed.
5. Rank 0's server stays open: Horovod's Gloo exchanges addresses there, and ranks report their exit codes.
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
from hvd_train.launch.interfaces import interface_of
from hvd_train.launch.launchers import named
from hvd_train.launch.launchers.base import number
from hvd_train.launch.rendezvous.endpoint import ANSWER_SECONDS, LOOPBACK, Endpoint
from hvd_train.launch.rendezvous.job_step import PORT, TRIES, JobStep
from hvd_train.launch.rendezvous.secret import SECRET, make_secret, read_secret
from hvd_train.launch.rendezvous.server import LAST_WORDS_SECONDS, START, RendezvousServer
from hvd_train.launch.world import World

START_SECONDS = 600  # for all ranks to join
PARTING_SECONDS = 1.0
PAUSES = (0.2, 2.0)  # seconds between attempts to find the server: at first, and at most
COME_SECONDS = 30.0  # for ranks that start later than others
# Errors of requests to a server that is not there (yet).
ABSENT = (OSError, http.client.HTTPException, ValueError)


class Rendezvous:
    """The rendezvous of this rank with the others of its step."""

    def __init__(self, world: World, step: JobStep) -> None:
        self._world, self._step = world, step
        self._met: Endpoint | None = None  # rank 0's server, once all ranks have joined
        self._server: RendezvousServer | None = None  # of rank 0
        self._signpost: RendezvousServer | None = None  # the signpost on the first node, if rank 0 is elsewhere
        self._gave_up = False

    def prepare(self) -> None:
        """Open this rank's server, if any: early, so that other ranks can report errors before they join."""
        if self._world.rank == 0:
            self.open_server()
        elif self._world.local_rank == 0 and self._signpost is None and self._step.node == self._step.first_node:
            self._signpost = self._open()
            self._signpost.place = {}

    def open_server(self) -> RendezvousServer:
        """Return rank 0's server, opened at the first call on the step's first free port."""
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
        """Report the address of rank 0's server to the signpost on the first node, until all ranks have joined.

        After a failure, ranks that start later are still redirected from there, until this process ends.
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
        """Keep this rank's signpost open until rank 0's server has answered all redirected ranks and ended."""
        stop = time.monotonic() + COME_SECONDS
        while self._signpost and time.monotonic() < stop and server.answers():
            time.sleep(PAUSES[0])

    # ---- all ranks join

    def join_world(self) -> None:
        """Wait for the other ranks, and set Horovod's variables.

        Raises CommunicationError on all ranks if one has ended, or does not join within ``HOROVOD_START_TIMEOUT``
        seconds, and ConfigError if no port is free or the secret cannot be read.
        """
        seconds = number(os.environ, START, START_SECONDS)
        self._met = met = self._receive(seconds) if self._world.rank == 0 else self._come(seconds)
        variables = met.horovod_variables(self._world, self._step.node)
        for name in ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME"):  # unless the user has set it
            if name in os.environ:
                variables.pop(name, None)
        os.environ.update(variables)

    def _receive(self, seconds: int) -> Endpoint:
        """Wait for the others at rank 0's server, which stays open until the process ends."""
        server = self.open_server()
        verdict = server.wait(seconds)
        if "failed" in verdict:
            # The server ends with this process, so it stays until the others have read the verdict. A rank that is late
            # may never come.
            server.wait_until_answered(COME_SECONDS if server.ended else PARTING_SECONDS)
            raise self._failure(verdict)
        network = interface_of(verdict["address"])
        return Endpoint(LOOPBACK, server.server_port, server.token, network, self._cross(verdict["locals"]))

    def _come(self, seconds: int) -> Endpoint:
        """Find rank 0's server, and wait there for the verdict."""
        stop, reason, pause = time.monotonic() + seconds, "no answer", PAUSES[0]
        while (left := stop - time.monotonic()) > 0:
            try:
                endpoint = self.find()
                if isinstance(endpoint, Endpoint):
                    place = {"rank": self._world.rank, "local": self._world.local_rank}
                    # The answer comes when all ranks have joined, so it may take as long as the slowest.
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
        fix = f"look for what ended or blocked it; {START} sets the time"
        raise CommunicationError(what, where=self._step.launcher, fix=fix)

    def find(self) -> Endpoint | str:
        """Return the address of rank 0's server, or why it was not found."""
        try:
            token = self._step.token(read_secret())
        except FileNotFoundError as error:
            return f"no secret in {error.filename}; if the hosts share no home, set {SECRET} for all ranks"
        address, ports = self._step.address(), self._step.ports(os.environ)
        silent = False
        # One of the ports may belong to another step's or user's server, without the token: then try the next.
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
        """Return Horovod's cross rank and size from all local ranks. Horovod requires them in the order of ranks."""
        # The number of earlier nodes that have a rank with the same local rank.
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

        Returns whether rank 0 has reported the same error; None if no server answers.

        Rank 0 also answers ranks that wait or end, and, before all have joined, those that start later. Other ranks
        search for the server for ``seconds``.
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
                with suppress(OSError):  # the server has the report, and may end before it answers
                    same = endpoint.ask("report_exit", report, LAST_WORDS_SECONDS + ANSWER_SECONDS)[2]["same"]
                self._keep_signpost(endpoint)
                return same
        return None

    def exit_code_of_lost(self, default: int) -> int:
        """Return the exit code that the first lost rank reported, else ``default``."""
        # The server keeps the order of the reports. The first is the cause of the others.
        codes: Mapping[Any, int] = {}
        if self._server is not None:
            codes = self._server.ended
        elif self._met is not None:
            with suppress(*ABSENT):
                codes = self._met.ask("ended", {})[2]
        return next(iter(codes.values()), default)


_current: Rendezvous | None = None  # of this process


def rendezvous_of(here: World) -> Rendezvous | None:
    """Return the rendezvous of a rank, or None if its launcher connects the ranks."""
    global _current
    launcher = named(here.launcher)
    if launcher.joins_ranks(os.environ):
        return None
    if _current is None:
        _current = Rendezvous(here, launcher.step(os.environ))
    return _current


def current() -> Rendezvous | None:
    """Return this process's rendezvous, also after ``join_world``, which sets another launcher's variables."""
    return _current or rendezvous_of(world())


def prepare(here: World) -> None:
    """Open this rank's server if the launcher does not connect the ranks."""
    if rendezvous := rendezvous_of(here):
        rendezvous.prepare()


def join_world(here: World) -> None:
    """Wait for the other ranks if the launcher does not connect them. Must be called before ``hvd.init()``."""
    if rendezvous := rendezvous_of(here):
        rendezvous.join_world()


def exit_code_of_lost(default: int) -> int:
    """Return the exit code that the first lost rank reported, else ``default``."""
    return _current.exit_code_of_lost(default) if _current else default
