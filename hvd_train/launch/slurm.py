"""How ranks that a plain ``srun`` started find one another: without ssh, without MPI, without PMIx.

Rank 0 opens a desk on its node, at one of a few ports that follow from job and step. The others look for it on the
step's first node, and each side proves that it knows the user's secret. Where rank 0 is on another node (``srun -m
arbitrary``, a heterogeneous job), the first rank of the first node opens a desk too, which hears from rank 0 where it
is and sends the others there. Rank 0's desk waits until all ranks have
come, then serves as the rendezvous of Horovod's Gloo: Horovod's own (``horovod.runner.http.http_server``) answers
whoever asks, this one only who names the step's token. What the ranks then send each other is Gloo's, unguarded.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import http.client
import json
import os
import re
import secrets
import socket
import socketserver
import subprocess
import tempfile
import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hvd_train.errors import CommunicationError, ConfigError, TrainError
from hvd_train.launch.environment import World, node_names, node_of, number, tasks_per_node, world
from hvd_train.launch.local import mpi_built

SECRET, PORT = "HVD_TRAIN_SECRET", "HVD_TRAIN_PORT"
START, START_SECONDS = "HOROVOD_START_TIMEOUT", 600  # horovodrun's name for the same
PORTS = range(16384, 32768)  # below those that systems give away themselves
TRIES = 16
ANSWER_SECONDS, PARTING_SECONDS = 5.0, 1.0
PAUSES = (0.2, 2.0)  # between two looks for the desk: at first, and at last
WORD_SECONDS = 3.0  # for rank 0 to end as well
COME_SECONDS = 30.0  # for ranks that start later than others
REQUEST_SECONDS = 5.0  # for a request to show the token, from its first byte to the last
STRANGERS = 64  # connections that have not shown the token, and as many again as there are ranks
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Step:
    """One ``srun``. ``name``: no other step has it, nor this one after a requeue; ``host``: the first node, where rank
    0 can be asked for; ``node``: the place of ``own``, this rank's, among ``per_node`` (tasks of each)."""

    name: str
    host: str
    node: int
    own: str
    per_node: list[int]

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Step:
        names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        node = node_of(environ)
        host = node_names(environ.get("SLURM_STEP_NODELIST", "localhost"))[0]
        own = environ.get("SLURMD_NODENAME", f"node {node}" if node else host)
        per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", environ["SLURM_STEP_NUM_TASKS"]))
        return cls(".".join(environ.get(name, "0") for name in names), host, node, own, per_node)

    def ports(self, environ: Mapping[str, str]) -> list[int]:
        if PORT in environ:
            text = environ[PORT]
            if not text.isdigit() or not 0 < int(text) <= 65536 - TRIES:
                raise ConfigError(f"'{text}' is no port", where=f"environment variable {PORT}", common=True)
            return [int(text) + k for k in range(TRIES)]
        return [PORTS[zlib.crc32(f"{self.name}:{k}".encode()) % len(PORTS)] for k in range(TRIES)]


@dataclass(frozen=True)
class Met:
    """The place of the desk. ``interface``: by which others reach this rank; empty: Gloo takes the host name's;
    ``cross``: (place among the ranks with this local rank, their number)."""

    world: World
    address: str
    port: int
    token: str
    interface: str = ""
    cross: tuple[int, int] = (0, 1)


_met: Met | None = None
_desk: Desk | None = None
_signpost: Desk | None = None  # of a rank on the first node, where rank 0 is not
_given_up = False  # on rank 0


def by_mpi(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the ranks of a step meet in MPI: where srun was told to (--mpi=pmix), or the user says so."""
    if environ.get("HOROVOD_CONTROLLER"):
        return environ["HOROVOD_CONTROLLER"].lower() == "mpi"
    return "PMIX_RANK" in environ and mpi_built()


def meet(here: World) -> None:
    """To be called before ``hvd.init()``: sets Horovod's variables in a rank of a step that MPI does not join.

    Raises CommunicationError on all ranks where one has ended, or does not come within ``HOROVOD_START_TIMEOUT``
    seconds, and ConfigError where no port is free or the secret cannot be had.
    """
    global _met
    if not srun_alone(here):
        return
    step, seconds = Step.of(os.environ), number(os.environ, START, START_SECONDS)
    _met = met = (_receive if here.rank == 0 else _join)(here, step, seconds)
    os.environ.update(over_gloo(here, step.own, met.cross, met.address, met.port, met.token))
    if met.interface:
        os.environ.setdefault("HOROVOD_GLOO_IFACE", met.interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", met.interface)


def over_gloo(here: World, host: str, cross: tuple[int, int], address: str, port: int, token: str) -> dict[str, str]:
    """What Horovod reads in a rank on ``host`` that finds the others at a desk; ``cross``: (its place among the ranks
    of its local rank, their number)."""
    return {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        # Horovod asks for http://ADDR:PORT/scope/key.
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{address}:{port}/{token}",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_RANK": str(here.rank),
        "HOROVOD_SIZE": str(here.size),
        "HOROVOD_LOCAL_RANK": str(here.local_rank),
        "HOROVOD_LOCAL_SIZE": str(here.local_size),
        "HOROVOD_CROSS_RANK": str(cross[0]),
        "HOROVOD_CROSS_SIZE": str(cross[1]),
    }


def prepare(here: World) -> None:
    """Rank 0 of such a step opens its desk; the sooner, the better are the others told that a rank has ended."""
    if not srun_alone(here):
        return
    if here.rank == 0:
        open_desk(here)
    elif here.local_rank == 0:
        _open_signpost(here)


def srun_alone(here: World) -> bool:
    """Whether srun started this rank without MPI: it says who is who, but joins nobody, and ends nobody when one
    fails."""
    return here.launcher == "srun" and not by_mpi()


def _receive(here: World, step: Step, seconds: int) -> Met:
    """Rank 0 waits for the others at its desk, which stays open as long as its process lives."""
    desk = open_desk(here)
    verdict = desk.wait(seconds)
    if "failed" in verdict:
        time.sleep(PARTING_SECONDS)  # until the others have read it
        raise _failure(verdict)
    network = interface_of(verdict["address"])
    return Met(here, LOOPBACK, desk.server_port, desk.token, network, _cross(here, verdict["locals"]))


def _cross(here: World, locals_: list[int]) -> tuple[int, int]:
    """Return Horovod's cross rank and size from all local ranks. They must follow the order of ranks, or it ends."""
    return locals_[: here.rank].count(here.local_rank), locals_.count(here.local_rank)


def _failure(verdict: Mapping[str, Any]) -> CommunicationError:
    error = CommunicationError(verdict["failed"], where="srun", fix=verdict["fix"], common=True)
    error.exit_code = verdict["code"]
    return error


def _join(here: World, step: Step, seconds: int) -> Met:
    """Another rank looks for the desk and joins the world there."""
    global _given_up
    stop, reason, pause = time.monotonic() + seconds, "no answer", PAUSES[0]
    while (left := stop - time.monotonic()) > 0:
        try:
            found = _find(here, step)
            if isinstance(found, Met):
                given = {"rank": here.rank, "local": here.local_rank}
                own, status, verdict = _ask(found, "join", given, left + ANSWER_SECONDS)
                if status == 200:
                    _close_signpost()
                    address = verdict["address"] if own.startswith("127.") else own
                    cross = _cross(here, verdict["locals"])
                    return replace(found, interface=interface_of(address), cross=cross)
                if status == 409:
                    raise _failure(verdict)
            else:
                reason = found
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = str(error)
        time.sleep(min(pause, max(0, stop - time.monotonic())))
        pause = min(1.5 * pause, PAUSES[1])
    _given_up = True
    what = f"rank 0 was not found on {step.host} within {seconds} s: {reason}"
    raise CommunicationError(what, where="srun", fix=f"look for what ended or held it; {START} sets the time")


def _find(here: World, step: Step) -> Met | str:
    """Rank 0's desk, or why it was not found."""
    try:
        token = _token(step, read_secret())
    except FileNotFoundError as error:
        return f"no secret in {error.filename}; if the hosts share no home, set {SECRET} for all ranks"
    address, ports = _address(step), step.ports(os.environ)
    silent = False
    for port in ports:
        if is_desk(address, port, token):
            found = Met(here, address, port, token)
            _, status, where = _ask(found, "where", {}, ANSWER_SECONDS)
            if status == 200:
                return replace(found, **where)
            silent = True
    if silent:
        return f"{step.host} has not heard from rank 0, which is on another node"
    return f"nobody who knows the secret of this step is at port {', '.join(map(str, ports))}"


def part(here: World, text: str, code: int, seconds: float = COME_SECONDS) -> bool | None:
    """Before a rank ends with an error. Rank 0 answers those who wait or end as well, and before the ranks have met
    those who start later; another rank looks for the desk, ``seconds`` long, and reports. True: rank 0 has told the
    same; None: nobody was found."""
    with suppress(TrainError, OSError, http.client.HTTPException, ValueError):
        if here.rank == 0:
            open_desk(here).say(text, code, WORD_SECONDS if _met else COME_SECONDS)
            return False
        found, stop = _met, time.monotonic() + seconds
        while found is None and not _given_up and time.monotonic() < stop:
            near = _find(here, Step.of(os.environ))
            if isinstance(near, Met):
                found = near
            else:
                time.sleep(PAUSES[0])
        if found is not None:
            given = {"rank": here.rank, "code": code, "text": text}
            same = False
            with suppress(OSError):  # it has heard, and may end before it answers
                same = _ask(found, "part", given, WORD_SECONDS + ANSWER_SECONDS)[2]["same"]
            stop = time.monotonic() + COME_SECONDS
            while _signpost and time.monotonic() < stop and is_desk(found.address, found.port, found.token):
                time.sleep(PAUSES[0])  # until rank 0 has told all who are sent there from here
            return same
    return None


def code_of_lost(default: int) -> int:
    """The exit code with which the first lost rank ended, if it could tell."""
    ended: Mapping[str, int] = {}
    if _desk is not None:
        ended = {str(rank): code for rank, code in _desk.ended.items()}
    elif _met is not None:
        with suppress(OSError, http.client.HTTPException, ValueError):
            ended = _ask(_met, "ended", {}, ANSWER_SECONDS)[2]
    return next(iter(ended.values()), default)


def placed() -> World | None:
    """This rank's place in a step that srun alone leads."""
    here = _met.world if _met else world()
    return here if srun_alone(here) else None


def _address(step: Step) -> str:
    """Return the first node's IPv4 address, for this rank."""
    return LOOPBACK if step.own == step.host else _resolve(step.host)


@functools.cache
def _resolve(host: str) -> str:
    """A node that no name service knows has an address in Slurm's own configuration."""
    with suppress(OSError):
        return socket.gethostbyname(host)
    shown = ""
    with suppress(subprocess.TimeoutExpired):
        line = ["scontrol", "show", "node", host]
        shown = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False).stdout
    found = re.search(r"\bNodeAddr=(\S+)", shown)
    if found is None:
        raise ValueError(f"the host name {host} cannot be resolved")
    return socket.gethostbyname(found[1])


def interface_of(address: str) -> str:
    """The network interface with this address; nothing where there is none."""
    import psutil

    found = (n for n, kinds in psutil.net_if_addrs().items() for k in kinds if k.address == address)
    return next(found, "")


# --- the secret


def read_secret() -> bytes:
    """From the environment, or from the user's own file; FileNotFoundError where rank 0 has not made it yet."""
    given = os.environ.get(SECRET)
    if given:
        return given.encode()
    path = _path()
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ConfigError("others may read the secret", where=str(path), fix=f"remove it, or set {SECRET}")
        return file.read()


def _path() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "hvd_train" / "secret"


def make_secret() -> bytes:
    """As ``read_secret``; makes the file where there is none: whole, or not at all."""
    with suppress(FileNotFoundError):
        return read_secret()
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)  # for the user alone
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_hex(32).encode())
        with suppress(FileExistsError):
            os.link(temporary, path)
        os.unlink(temporary)
    except OSError as error:
        what = f"the secret of this user's ranks cannot be written: {error.strerror}"
        raise ConfigError(what, where=str(path), fix=f"set {SECRET} for all ranks") from error
    return read_secret()


def _token(step: Step, secret: bytes) -> str:
    """What this step's ranks show: it tells nothing of the secret."""
    return hmac.new(secret, f"step {step.name}".encode(), hashlib.sha256).hexdigest()


def _proof(token: str, port: int, nonce: str) -> str:
    """That this very port is the desk's: one who only passes questions on listens at another."""
    return hmac.new(token.encode(), f"desk {port} {nonce}".encode(), hashlib.sha256).hexdigest()


# --- the desk


def open_desk(here: World) -> Desk:
    """Of rank 0, once a process, at the first of the step's ports that is free."""
    global _desk
    if _desk is None:
        step = Step.of(os.environ)
        _desk = _open(here, step)
        _desk.locals[0] = here.local_rank
        if step.own != step.host:
            threading.Thread(target=_report_place, args=[here, step, _desk], name="place", daemon=True).start()
    return _desk


def _open_signpost(here: World) -> None:
    """Open the signpost of the first rank on a step's first node, if that is not rank 0."""
    global _signpost
    step = Step.of(os.environ)
    if step.own == step.host and _signpost is None:
        _signpost = _open(here, step)
        _signpost.place = {}


def _close_signpost() -> None:
    """All have come."""
    global _signpost
    if _signpost is not None:
        _signpost.shutdown()
        _signpost.server_close()
        _signpost = None


def _report_place(here: World, step: Step, desk: Desk) -> None:
    """Rank 0 on another node tells the first node where its desk is, until the ranks have met or failed."""
    while not desk.settled:
        with suppress(OSError, http.client.HTTPException, ValueError):
            token, address = desk.token, _address(step)
            for port in step.ports(os.environ):
                if is_desk(address, port, token):
                    _ask(Met(here, address, port, token), "here", {"port": desk.server_port}, ANSWER_SECONDS)
        time.sleep(PAUSES[0])


def _open(here: World, step: Step) -> Desk:
    token, ports = _token(step, make_secret()), step.ports(os.environ)
    for port in ports:
        with suppress(OSError):
            desk = Desk("" if len(step.per_node) > 1 else LOOPBACK, port, token, here.size)
            threading.Thread(target=desk.serve_forever, name="rendezvous", daemon=True).start()
            return desk
    what = f"no free port on {step.own}: {', '.join(map(str, ports))} are taken"
    raise ConfigError(what, where="srun", fix=f"set {PORT} to the first of {TRIES} others")


class Desk(ThreadingHTTPServer):
    """Receives the ranks, then keeps what Horovod's Gloo puts there: scope, key -> bytes.

    Closed to whoever does not name the token. Connections that have not named it are few and short: a new one ends the
    oldest. When the ranks have met, no address but theirs is listened to. ``place``: rank 0's, where this desk is not
    rank 0's own; empty until that has told it.
    """

    place: dict[str, Any] | None = None

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str, port: int, token: str, size: int) -> None:
        super().__init__((host, port), _Handler)
        self.token, self.size = token, size
        self.kept: dict[tuple[str, str], bytes] = {}
        self.ended: dict[int, int] = {}  # rank: exit code, in the order in which they told
        self._address = LOOPBACK  # this host's, as ranks of other nodes see it
        self._strangers: dict[socket.socket, float] = {}  # since when, oldest first
        self._guard = threading.Lock()  # of _strangers
        self._known = {LOOPBACK}  # addresses of the ranks that came
        self.locals = {0: 0}  # rank: its local rank
        self._came, self._heard = {0}, {0}
        self._said: str | None = None  # by rank 0, before it ended
        self._verdict: dict[str, Any] | None = None  # which all who have come are told
        self._changed = threading.Condition()

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's looks its own name up, which may take long
        self.server_port = self.server_address[1]

    def verify_request(self, request: Any, client_address: Any) -> bool:
        verdict = self._verdict
        return verdict is None or "failed" in verdict or client_address[0] in self._known

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            self._strangers[request] = time.monotonic()
            oldest = next(iter(self._strangers)) if len(self._strangers) > STRANGERS + self.size else None
        if oldest is not None:
            self._turn_away(oldest)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Called between requests, twice a second at least."""
        with self._guard:
            late = [one for one, since in self._strangers.items() if time.monotonic() - since > REQUEST_SECONDS]
        for connection in late:
            self._turn_away(connection)

    def _turn_away(self, connection: socket.socket) -> None:
        """End a connection whose thread waits for the rest of a request."""
        self.trust(connection)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def trust(self, connection: socket.socket) -> None:
        """This connection has shown the token, or has ended."""
        with self._guard:
            self._strangers.pop(connection, None)

    def shutdown_request(self, request: Any) -> None:
        self.trust(request)
        super().shutdown_request(request)

    def wait(self, seconds: int) -> dict[str, Any]:
        """For all ranks to come: the address by which others see this host; or what ``failed``."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._came) == self.size or self.ended, seconds)
            missing = sorted(set(range(self.size)) - self._came)
            if self.ended:
                self._fail(*next(iter(self.ended.items())))
            elif missing:
                ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
                fix = f"look for what ended or held them; {START} sets the time"
                failed = f"{ranks} did not come within {seconds} s"
                self._verdict = {"failed": failed, "fix": fix, "code": CommunicationError.exit_code}
            else:
                self._verdict = {"address": self._address, "locals": [self.locals[rank] for rank in range(self.size)]}
            self._changed.notify_all()
            assert self._verdict is not None
            return self._verdict

    def _fail(self, rank: int, code: int) -> None:
        failed = f"rank {rank} ended with exit code {code} before the ranks had met"
        self._verdict = {"failed": failed, "fix": "its own line says why", "code": code}

    @property
    def settled(self) -> bool:
        """Return whether the ranks have met, or never will."""
        return self._verdict is not None

    def join(self, rank: int, local: int, address: str, peer: str) -> tuple[int, dict[str, Any]]:
        """Answer a rank that came from ``peer`` by that address of ours: HTTP's status and the verdict, when there is
        one. 410: it has come before, in an earlier command of this step."""
        with self._changed:
            if rank in self._came or not 0 < rank < self.size:
                return 410, {}
            if self._verdict is None:
                self._came.add(rank)
                self.locals[rank] = local
                self._known.add(peer)
                if not address.startswith("127."):
                    self._address = address
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._verdict is not None)
            assert self._verdict is not None
            return 409 if "failed" in self._verdict else 200, self._verdict

    def part(self, rank: int, code: int, text: str) -> dict[str, Any]:
        """For a rank that ends: whether rank 0 tells the same."""
        with self._changed:
            self.ended.setdefault(rank, code)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._said is not None, WORD_SECONDS)
            return {"same": self._said == text}

    def heard(self, rank: int) -> None:
        """This rank has its answer, with rank 0's last words if there were any."""
        with self._changed:
            if self._said is not None:
                self._heard.add(rank)
                self._changed.notify_all()

    def say(self, text: str, code: int, seconds: float) -> None:
        """Rank 0's last words, for those who ask within ``seconds``, or until all have."""
        with self._changed:
            self._said = text
            if self._verdict is None:
                self._fail(0, code)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._heard) == self.size, seconds)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is the other side's to tell."""


class _Handler(BaseHTTPRequestHandler):
    timeout = 30.0  # for a request to arrive
    server: Desk

    def log_message(self, format: str, *args: Any) -> None:
        return

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _words(self) -> list[str] | None:
        """What follows the token in the path; None: the token is wrong, and that is answered."""
        _, token, *words = self.path.split("/")
        if hmac.compare_digest(token.partition(":")[0].encode(), self.server.token.encode()):
            self.server.trust(self.connection)
            return words
        self._answer(403)
        return None

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        if self.path.startswith("/desk/"):
            self._answer(200, _proof(self.server.token, self.server.server_port, self.path[6:]).encode())
        elif words := self._words():
            found = self.server.kept.get((words[0], words[1]))
            self._answer(404 if found is None else 200, found or b"")

    def do_PUT(self) -> None:
        if words := self._words():
            self.server.kept[words[0], words[1]] = self._body()
            self._answer(200)

    def do_DELETE(self) -> None:
        if words := self._words():
            self.server.kept.pop((words[0], words[1]), None)
            self._answer(200)

    def do_POST(self) -> None:
        if words := self._words():
            given, status = json.loads(self._body() or b"{}"), 200
            reply: Any = self.server.ended
            if words[0] == "join":
                came = {"address": self.connection.getsockname()[0], "peer": self.client_address[0]}
                status, reply = self.server.join(**given, **came)
            elif words[0] == "part":
                reply = self.server.part(**given)
            elif words[0] == "here" and self.server.place is not None:
                self.server.place = {"address": self.client_address[0], "port": int(given["port"])}
            elif words[0] == "where":
                reply = self.server.place or {}
                status = 404 if self.server.place == {} else 200
            self._answer(status, json.dumps(reply).encode())
            if words[0] in ("join", "part"):
                self.server.heard(given["rank"])


def is_desk(address: str, port: int, token: str) -> bool:
    """Return whether a desk answers there that knows the token."""
    nonce = secrets.token_hex(16)
    try:
        connection = http.client.HTTPConnection(address, port, timeout=ANSWER_SECONDS)
        connection.request("GET", f"/desk/{nonce}")
        proof = connection.getresponse().read(1024)
        connection.close()
    except (OSError, http.client.HTTPException):
        return False
    return hmac.compare_digest(proof, _proof(token, port, nonce).encode())


def _ask(found: Met, what: str, given: dict[str, Any], seconds: float) -> tuple[str, int, dict[str, Any]]:
    """Our own address on the way to the desk, HTTP's status, the answer."""
    connection = http.client.HTTPConnection(found.address, found.port, timeout=seconds)
    connection.connect()
    own = connection.sock.getsockname()[0]
    connection.request("POST", f"/{found.token}/{what}", json.dumps(given))
    answer = connection.getresponse()
    return own, answer.status, json.loads(answer.read() or b"{}")
