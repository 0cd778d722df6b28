"""Connections between hosts, where both sides prove that they know a token without sending it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

HELLO_SECONDS = 5.0  # for the proof of a connection, from its first byte to the last
LARGE_BYTES = 64 << 10
SMALL_SEGMENT = 536  # TCP segment size that every network carries (RFC 879), so that no MTU drops reports


def listener(ports: Sequence[int]) -> socket.socket:
    for port in ports:
        with suppress(OSError):
            return socket.create_server(("", port), backlog=1024)
    raise OSError("no free port")


def connect(address: str, port: int, seconds: float, small: bool) -> socket.socket:
    """Connect over IPv4. ``small``: limit both sides to small packets. Raises OSError."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if small:
            # Before connecting, because TCP negotiates the segment size in its first packets.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT)
        connection.settimeout(seconds)
        connection.connect((address, port))
    except OSError:
        connection.close()
        raise
    return connection


def echo(connection: socket.socket) -> None:
    """Send large messages back."""
    while True:
        connection.sendall(read_exactly(connection, LARGE_BYTES))


def read_exactly(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = connection.recv(min(count, 1 << 16))
        if not part:
            raise ConnectionError("closed")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _proof(token: str, *words: object) -> str:
    return hmac.new(token.encode(), " ".join(map(str, words)).encode(), hashlib.sha256).hexdigest()


def _read_line(connection: socket.socket, seconds: float) -> bytes:
    """Read a line of up to 256 bytes within ``seconds`` in all."""
    # Byte by byte, so that the bytes after the line stay for the next reader.
    stop, line = time.monotonic() + seconds, b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.01, stop - time.monotonic()))
        part = connection.recv(1)
        if not part or len(line) > 256 or time.monotonic() > stop:
            raise ConnectionError("no hello")
        line += part
    return line


def greet(connection: socket.socket, token: str, hosts: int) -> tuple[int, str]:
    """Verify a leaf's proof, on the hub. Returns its host and kind of connection."""
    # The random numbers of both sides are in each proof, so a recorded proof cannot be replayed. The first word
    # prevents reflecting one side's proof as the other's.
    mine = secrets.token_hex(16)
    connection.sendall(f"{mine}\n".encode())
    words = _read_line(connection, HELLO_SECONDS).decode("ascii", "replace").split()
    theirs, host, kind, proof = words if len(words) == 4 else ("", "", "", "")
    right = hmac.compare_digest(proof.encode(), _proof(token, "host", mine, theirs, host, kind).encode())
    if not right or not host.isdigit() or not 0 < int(host) < hosts:
        raise ConnectionError("a stranger")
    connection.sendall(f"{_proof(token, 'hub', theirs, mine)}\n".encode())
    connection.settimeout(None)
    return int(host), kind


def introduce(connection: socket.socket, token: str, host: int, kind: str) -> None:
    """Prove to the hub that this host knows the token, and verify the hub's proof."""
    theirs, mine = _read_line(connection, HELLO_SECONDS).decode("ascii", "replace").strip(), secrets.token_hex(16)
    proof = _proof(token, "host", theirs, mine, host, kind)
    connection.sendall(f"{mine} {host} {kind} {proof}\n".encode())
    answer = _read_line(connection, HELLO_SECONDS).strip()
    if not hmac.compare_digest(answer, _proof(token, "hub", mine, theirs).encode()):
        raise ConnectionError("a stranger")
    connection.settimeout(None)
