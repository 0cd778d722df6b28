"""The HTTP server at which ranks find one another. It waits for all of them, then serves Horovod's Gloo.

Horovod's own server (``horovod.runner.http.http_server``) answers whoever asks. This one answers only who names the
token, the first part of each path. What the ranks then send each other is Gloo's, without any such guard.

- ``GET /proof/NONCE``: a hash, by which a rank sees that the server knows the token, before it sends the token.
- ``GET``, ``PUT``, ``DELETE /TOKEN/SCOPE/KEY``: Horovod's key-value store.
- ``POST /TOKEN/join``: a rank has come; answered when all have. ``report_exit``: a rank ends with an error. ``ended``:
  who has reported that. ``place``, ``report_place``: where rank 0's server is, of a signpost.
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

START = "HOROVOD_START_TIMEOUT"  # horovodrun's name: seconds for all ranks to come
LAST_WORDS_SECONDS = 3.0  # for rank 0 to end as well
REQUEST_SECONDS = 5.0  # for a request to show the token, from its first byte to the last
STRANGERS = 64  # connections that have not shown the token, and as many again as there are ranks


class RendezvousServer(ThreadingHTTPServer):
    """Receives the ranks, then keeps what Horovod's Gloo puts there: (scope, key) -> bytes.

    Closed to whoever does not name the token. Connections that have not named it are few and short: a new one ends the
    oldest. When all ranks have come, no address but theirs is listened to.
    """

    # Address and port of rank 0's server, if this one only leads there; empty until rank 0 has reported them.
    place: dict[str, Any] | None = None

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str, port: int, token: str, size: int) -> None:
        super().__init__((host, port), _Handler)
        self.token, self.size = token, size
        self.values: dict[tuple[str, str], bytes] = {}
        self.ended: dict[int, int] = {}  # rank: exit code, in the order of their reports
        self._address = LOOPBACK  # this host's, as ranks of other nodes see it
        self._strangers: dict[socket.socket, float] = {}  # since when, oldest first
        self._guard = threading.Lock()  # of _strangers
        self._known = {LOOPBACK}  # addresses of the ranks that came
        self.locals = {0: 0}  # rank: its local rank
        self._came, self._answered = {0}, {0}
        self._last_words: str | None = None  # of rank 0, before it ended
        self._verdict: dict[str, Any] | None = None  # the answer to all who have come
        self._changed = threading.Condition()

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's looks its own name up, which may take long
        self.server_port = self.server_address[1]

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether to listen to this address: once all ranks have come, only to theirs."""
        verdict = self._verdict
        return verdict is None or "failed" in verdict or client_address[0] in self._known

    def process_request(self, request: Any, client_address: Any) -> None:
        # Each connection has a thread, so those that send nothing must be few and short.
        with self._guard:
            self._strangers[request] = time.monotonic()
            oldest = next(iter(self._strangers)) if len(self._strangers) > STRANGERS + self.size else None
        if oldest is not None:
            self._disconnect(oldest)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End connections that have not shown the token in time. Called between requests, at least twice a second."""
        with self._guard:
            late = [one for one, since in self._strangers.items() if time.monotonic() - since > REQUEST_SECONDS]
        for connection in late:
            self._disconnect(connection)

    def _disconnect(self, connection: socket.socket) -> None:
        """End a connection whose thread waits for the rest of a request."""
        self.trust(connection)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def trust(self, connection: socket.socket) -> None:
        """Note that a connection has shown the token, or has ended."""
        with self._guard:
            self._strangers.pop(connection, None)

    def shutdown_request(self, request: Any) -> None:
        self.trust(request)
        super().shutdown_request(request)

    def wait(self, seconds: int) -> dict[str, Any]:
        """Wait for all ranks, and return the verdict: the address by which others see this host, or what ``failed``."""
        with self._changed:
            # A rank that ends before all have come will never come, so nobody waits for it.
            self._changed.wait_for(lambda: len(self._came) == self.size or self.ended, seconds)
            missing = sorted(set(range(self.size)) - self._came)
            if self.ended:
                self._fail(*next(iter(self.ended.items())))
                self._last_words = ""  # rank 0 waits here, so it has no error of its own to report
            elif missing:
                ranks = name_ranks(missing)
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
    def complete(self) -> bool:
        """Return whether all ranks have come."""
        return self._verdict is not None and "failed" not in self._verdict

    def add_rank(self, rank: int, local: int, address: str, peer: str) -> tuple[int, dict[str, Any]]:
        """Note a rank that came from ``peer`` to this ``address`` of ours, and wait for the verdict.

        Returns the HTTP status and the verdict.
        """
        with self._changed:
            # 410: the rank has come before, in an earlier command of the same step, whose server this still is.
            if rank in self._came or not 0 < rank < self.size:
                return 410, {}
            if self._verdict is None:
                self._came.add(rank)
                self.locals[rank] = local
                self._known.add(peer)
                # A rank of this node comes by the loopback, and that address says nothing to other nodes.
                if not address.startswith("127."):
                    self._address = address
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._verdict is not None)
            assert self._verdict is not None
            return 409 if "failed" in self._verdict else 200, self._verdict

    def report_exit(self, rank: int, code: int, text: str) -> dict[str, Any]:
        """Note a rank that ends with an error, and answer whether rank 0 reports the same error."""
        with self._changed:
            # If rank 0 has the same error it ends about now, too, and only its line is printed. So wait for its words.
            self.ended.setdefault(rank, code)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._last_words is not None, LAST_WORDS_SECONDS)
            return {"same": self._last_words == text}

    def note_answered(self, rank: int) -> None:
        """Note that this rank has its answer, with rank 0's last words if there were any."""
        with self._changed:
            if self._last_words is not None:
                self._answered.add(rank)
                self._changed.notify_all()

    def report_exit_of_rank_0(self, text: str, code: int, seconds: float) -> None:
        """Keep rank 0's last words for those who ask within ``seconds``, or until all have asked."""
        with self._changed:
            # This server ends with rank 0. It stays until all other ranks have read the words, or the time is over.
            self._last_words = text
            if self._verdict is None:
                self._fail(0, code)
            self._changed.notify_all()
        self.wait_until_answered(seconds)

    def wait_until_answered(self, seconds: float) -> None:
        """Wait until all other ranks have read that one has failed. Those that start later would wait for a server."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._answered) == self.size, seconds)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that breaks: the other side reports it."""


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
        """Return what follows the token in the path; None if the token is wrong, which is answered here."""
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
