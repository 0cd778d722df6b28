"""Measure a TCP connection between two hosts: round trip, bytes/s, and clock offset.

The answering host listens on a free port. A client must send the token, which the ranks exchange over Horovod.
"""

from __future__ import annotations

import hmac
import math
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Round trips to time, seconds to send for the speed, seconds to wait for an answer, bytes of a write.
PINGS, STREAM_SECONDS, ANSWER_SECONDS, PIECE = 50, 0.3, 10.0, 1 << 20


@dataclass(frozen=True)
class HostLink:
    """The connection to one interface of the answering host, by its IPv4 address.

    ``error``: why the rest is unknown. ``round_trip`` in s. ``offset``: this host's clock minus the other's, in s.
    ``speed``: bytes/s to the other host.
    """

    interface: str
    address: str
    error: str = ""
    round_trip: float = 0.0
    speed: float = 0.0
    offset: float = 0.0


class _Answers(socketserver.StreamRequestHandler):
    """Reads the token, answers pings with this host's clock, then counts bytes until the end and sends their number."""

    timeout, disable_nagle_algorithm = ANSWER_SECONDS, True

    def handle(self) -> None:
        token = self.server.token  # type: ignore[attr-defined]
        try:
            if not hmac.compare_digest(self.rfile.read(len(token)), token):
                return
            for _ in range(PINGS):
                self.rfile.read(1)
                self.wfile.write(struct.pack("<d", time.time()))
            count = 0
            while data := self.rfile.read1(PIECE):
                count += len(data)
            self.wfile.write(struct.pack("<q", count))
        except OSError:  # the other side reports it
            return


@contextmanager
def answering(token: bytes) -> Iterator[int]:
    """Answer on all interfaces during the block. Yields the port."""
    with socketserver.ThreadingTCPServer(("", 0), _Answers) as server:
        server.daemon_threads, server.token = True, token  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def measure(interface: str, address: str, port: int, token: bytes) -> HostLink:
    """Measure the connection to a host that is ``answering`` there."""
    try:
        with socket.create_connection((address, port), timeout=ANSWER_SECONDS) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answers = link.makefile("rb")
            link.sendall(token)
            best, offset = math.inf, 0.0
            for _ in range(PINGS):
                begun, wall = time.perf_counter(), time.time()
                link.sendall(b"?")
                (theirs,) = struct.unpack("<d", answers.read(8))
                took = time.perf_counter() - begun
                # The other host reads its clock about half way through the round trip, so the shortest one is most
                # accurate.
                if took < best:
                    best, offset = took, wall + took / 2 - theirs
            begun, piece = time.perf_counter(), bytes(PIECE)
            while time.perf_counter() < begun + STREAM_SECONDS:
                link.sendall(piece)
            # The other side counts the bytes and answers, so bytes still in buffers do not count as sent.
            link.shutdown(socket.SHUT_WR)
            (count,) = struct.unpack("<q", answers.read(8))
            return HostLink(interface, address, "", best, count / (time.perf_counter() - begun), offset)
    except (OSError, struct.error) as error:
        return HostLink(interface, address, getattr(error, "strerror", None) or "no answer")
