"""The HTTP server where ranks find one another. It waits for all of them, then serves Horovod's Gloo.

Horovod's own server (``horovod.runner.http.http_server``) answers anybody. This one answers only requests whose path
begins with the token. Gloo's own connections between ranks have no such protection.

- ``GET /proof/NONCE``: a hash that proves to a rank that the server knows the token, before the rank sends it.
- ``GET``, ``PUT``, ``DELETE /TOKEN/SCOPE/KEY``: Horovod's key-value store.
- ``POST /TOKEN/join``: a rank joins; answered when all have. ``report_exit``: a rank ends with an error. ``ended``: the
  ranks that have reported that. ``place``, ``report_place``: rank 0's server, on a signpost.
"""

from __future__ import annotations

import hmac
import json
import socket
import socketserver
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hvd_train.errors import CommunicationError, name_ranks
from hvd_train.launch.rendezvous.endpoint import LOOPBACK, proof

START = "HOROVOD_START_TIMEOUT"  # horovodrun's name: seconds for all ranks to join
LAST_WORDS_SECONDS = 3.0  # for rank 0 to end, too
REQUEST_SECONDS = 5.0  # for a request up to its token, from its first byte
STRANGERS = 64  # connections without the token so far; the number of ranks is added


class RendezvousServer(ThreadingHTTPServer):
    """Server of the rendezvous, then key-value store of Horovod's Gloo: (scope, key) -> bytes.

    Serves only requests with the token. Connections without it are limited in number and time: a new one closes the
    oldest. Once all ranks have joined, only their addresses are served.
    """

    # Address and port of rank 0's server, if this is a signpost; empty until rank 0 has reported them.
    place: dict[str, Any] | None = None

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str, port: int, token: str, size: int) -> None:
        super().__init__((host, port), _Handler)
        self.token, self.size = token, size
        self.values: dict[tuple[str, str], bytes] = {}
        self.ended: dict[int, int] = {}  # rank: exit code, in the order of their reports
        self._address = LOOPBACK  # this host's address, as seen from other nodes
        self._strangers: dict[socket.socket, float] = {}  # {connection: time of its start}, oldest first
        self._guard = threading.Lock()  # of _strangers
        self._known = {LOOPBACK}  # addresses of the ranks that joined
        self.locals = {0: 0}  # {rank: its local rank}
        self._came, self._answered = {0}, {0}
        self._last_words: str | None = None  # rank 0's error, before it ended
        self._verdict: dict[str, Any] | None = None  # the answer to all that have joined
        self._changed = threading.Condition()

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's looks up its host name, which may be slow
        self.server_port = self.server_address[1]

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether to serve this address; once all ranks have joined, only theirs."""
        verdict = self._verdict
        return verdict is None or "failed" in verdict or client_address[0] in self._known

    def process_request(self, request: Any, client_address: Any) -> None:
        # Each connection has a thread, so idle ones must be few and short.
        with self._guard:
            self._strangers[request] = time.monotonic()
            oldest = next(iter(self._strangers)) if len(self._strangers) > STRANGERS + self.size else None
        if oldest is not None:
            self._disconnect(oldest)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close connections that have not sent the token in time. Called between requests, at least twice a second."""
        with self._guard:
            late = [one for one, since in self._strangers.items() if time.monotonic() - since > REQUEST_SECONDS]
        for connection in late:
            self._disconnect(connection)

    def _disconnect(self, connection: socket.socket) -> None:
        """Close a connection whose thread waits for the rest of a request."""
        self.trust(connection)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def trust(self, connection: socket.socket) -> None:
        """Record that a connection has sent the token, or has ended."""
        with self._guard:
            self._strangers.pop(connection, None)

    def shutdown_request(self, request: Any) -> None:
        self.trust(request)
        super().shutdown_request(request)

    def wait(self, seconds: int) -> dict[str, Any]:
        """Wait for all ranks. Returns the verdict: this host's address as seen from others, or what ``failed``."""
        with self._changed:
            # A rank that ends before all have joined will never join, so stop waiting.
            self._changed.wait_for(lambda: len(self._came) == self.size or self.ended, seconds)
            missing = sorted(set(range(self.size)) - self._came)
            if self.ended:
                self._fail(*next(iter(self.ended.items())))
                self._last_words = ""  # rank 0 waits here, so it has no error of its own to report
            elif missing:
                ranks = name_ranks(missing)
                fix = f"look for what ended or blocked them; {START} sets the time"
                failed = f"{ranks} did not join within {seconds} s"
                self._verdict = {"failed": failed, "fix": fix, "code": CommunicationError.exit_code}
            else:
                self._verdict = {"address": self._address, "locals": [self.locals[rank] for rank in range(self.size)]}
            self._changed.notify_all()
            assert self._verdict is not None
            return self._verdict

    def _fail(self, rank: int, code: int) -> None:
        failed = f"rank {rank} ended with exit code {code} before all ranks had joined"
        self._verdict = {"failed": failed, "fix": "its own line says why", "code": code}

    @property
    def complete(self) -> bool:
        """Return whether all ranks have joined."""
        return self._verdict is not None and "failed" not in self._verdict

    def add_rank(self, rank: int, local: int, address: str, peer: str) -> tuple[int, dict[str, Any]]:
        """Record a rank that connected from ``peer`` to our ``address``, and wait for the verdict.

        Returns the HTTP status and the verdict.
        """
        with self._changed:
            # 410: the rank has joined before. This server still belongs to an earlier command of the same step.
            if rank in self._came or not 0 < rank < self.size:
                return 410, {}
            if self._verdict is None:
                self._came.add(rank)
                self.locals[rank] = local
                self._known.add(peer)
                # A rank of this node connects over loopback, an address that is useless to other nodes.
                if not address.startswith("127."):
                    self._address = address
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._verdict is not None)
            assert self._verdict is not None
            return 409 if "failed" in self._verdict else 200, self._verdict

    def report_exit(self, rank: int, code: int, text: str) -> dict[str, Any]:
        """Record that a rank ends with an error. Answers whether rank 0 reports the same error."""
        with self._changed:
            # If rank 0 has the same error it also ends about now, and only its line is printed. So wait for its report.
            self.ended.setdefault(rank, code)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._last_words is not None, LAST_WORDS_SECONDS)
            return {"same": self._last_words == text}

    def note_answered(self, rank: int) -> None:
        """Record that this rank has its answer, with rank 0's error if there was one."""
        with self._changed:
            if self._last_words is not None:
                self._answered.add(rank)
                self._changed.notify_all()

    def report_exit_of_rank_0(self, text: str, code: int, seconds: float) -> None:
        """Serve rank 0's error until all ranks have asked, at most ``seconds``."""
        with self._changed:
            # This server ends with rank 0, so wait until all other ranks have read the error, or the time is over.
            self._last_words = text
            if self._verdict is None:
                self._fail(0, code)
            self._changed.notify_all()
        self.wait_until_answered(seconds)

    def wait_until_answered(self, seconds: float) -> None:
        """Wait until all other ranks have read that one has failed. Later ones would search for a server in vain."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._answered) == self.size, seconds)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a broken connection: the other side reports it."""


class _Handler(BaseHTTPRequestHandler):
    timeout = 30.0  # for a request to arrive
    server: RendezvousServer

    def log_message(self, format: str, *args: Any) -> None:
        return

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _words(self) -> list[str] | None:
        """Return the path after the token. Answers the request and returns None if the token is wrong."""
        _, token, *words = self.path.split("/")
        if hmac.compare_digest(token.partition(":")[0].encode(), self.server.token.encode()):
            self.server.trust(self.connection)
            return words
        self._answer(403)
        return None

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        if self.path.startswith("/proof/"):
            self._answer(200, proof(self.server.token, self.server.server_port, self.path[7:]).encode())
        elif words := self._words():
            value = self.server.values.get((words[0], words[1]))
            self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        if words := self._words():
            self.server.values[words[0], words[1]] = self._body()
            self._answer(200)

    def do_DELETE(self) -> None:
        if words := self._words():
            self.server.values.pop((words[0], words[1]), None)
            self._answer(200)

    def do_POST(self) -> None:
        if words := self._words():
            sent, status = json.loads(self._body() or b"{}"), 200
            reply: Any = self.server.ended
            if words[0] == "join":
                way = {"address": self.connection.getsockname()[0], "peer": self.client_address[0]}
                status, reply = self.server.add_rank(**sent, **way)
            elif words[0] == "report_exit":
                reply = self.server.report_exit(**sent)
            elif words[0] == "report_place" and self.server.place is not None:
                self.server.place = {"address": self.client_address[0], "port": int(sent["port"])}
            elif words[0] == "place":
                reply = self.server.place or {}
                status = 404 if self.server.place == {} else 200
            self._answer(status, json.dumps(reply).encode())
            if words[0] in ("join", "report_exit"):
                self.server.note_answered(sent["rank"])
