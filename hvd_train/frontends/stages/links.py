"""Tensors between the stages of one replica: a TCP connection between each two of its ranks.

Horovod has no send and receive, and mpi4py does not connect ranks under Gloo. A message has a word that the receiver
knows beforehand, so ranks that are out of step raise an error instead of confusing two tensors.
"""

from __future__ import annotations

import hmac
import json
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_train.errors import SOME_RANK, CommunicationError, LostRankError
from hvd_train.launch.peers import host_addresses
from hvd_train.protocol import Communicator, allgather_json

CONNECT_SECONDS = 30.0
LOOPBACK = "127.0.0.1"
TOKEN_BYTES = 32
HEAD = struct.Struct("<Iq")  # bytes of the description, bytes of the tensor


class Message(NamedTuple):
    """A serialized tensor; ``kind`` names its dtype, which NumPy may not have."""

    kind: str
    shape: tuple[int, ...]
    data: np.ndarray  # (bytes,) uint8


class Link:
    """A connection to another rank. Sending never blocks, because both sides may send at the same time."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._failed = connection, False
        self._queue: queue.SimpleQueue[tuple[bytes, np.ndarray] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="stage link", daemon=True)
        self._thread.start()

    def send(self, word: str, message: Message) -> None:
        """Send a tensor, whose memory must not change until the other side has it."""
        if self._failed:
            raise LostRankError(f"{SOME_RANK} was lost")
        described = json.dumps([word, message.kind, message.shape]).encode()
        self._queue.put((HEAD.pack(len(described), message.data.nbytes) + described, message.data))

    def receive(self, word: str) -> Message:
        """Wait for the next tensor, which must have this ``word``. Raises LostRankError if the other rank has ended."""
        described, length = HEAD.unpack(self._read(HEAD.size).tobytes())
        there, kind, shape = json.loads(self._read(described).tobytes())
        if there != word:
            what = f"the stages diverged: {word} is awaited, and {there} came"
            raise CommunicationError(what, fix="call the same on all ranks")
        return Message(kind, tuple(shape), self._read(length))

    def close(self) -> None:
        """Send what is queued, then close."""
        self._queue.put(None)
        self._thread.join()
        self._connection.close()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                described, data = item
                self._connection.sendall(described)
                self._connection.sendall(data.data)
            except OSError:  # the next call from the main thread reports it
                self._failed = True

    def _read(self, length: int) -> np.ndarray:
        """Read ``length`` bytes as (length,) uint8."""
        received = np.empty(length, np.uint8)
        view, done = received.data, 0
        while done < length:
            try:
                count = self._connection.recv_into(view[done:])
            except OSError:
                count = 0
            if not count:
                raise LostRankError(f"{SOME_RANK} was lost")
            done += count
        return received


class Links:
    """The connections of a rank to the other stages of its replica. All ranks of the replica make the same calls."""

    def __init__(self, stage: int, links: dict[int, Link]) -> None:
        self.stage, self.size, self._links = stage, len(links) + 1, links
        self.waited = 0.0  # seconds

    @classmethod
    def connect(cls, world: Communicator, stages: int) -> Links:
        """Connect the ranks of each replica; all ranks of ``world`` call this. Rank is replica x stages + stage."""
        stage, first = world.rank % stages, world.rank - world.rank % stages
        here = world.local_size == world.size
        token = secrets.token_bytes(TOKEN_BYTES)
        with socket.create_server((LOOPBACK if here else "", 0), backlog=stages) as listener:
            listener.settimeout(CONNECT_SECONDS)
            offer = [token.hex(), [LOOPBACK] if here else host_addresses(), listener.getsockname()[1]]
            offers = allgather_json(world, offer, "stages")
            links: dict[int, Link] = {}
            try:
                for other, one in enumerate(offers[first : first + stage]):
                    links[other] = Link(_reach(one, stage))
                while len(links) < stages - 1:
                    connection, other = _accept(listener, token)
                    if stage < other < stages and other not in links:
                        links[other] = Link(connection)
            except OSError as error:
                what = f"the stages of a replica cannot connect: {error}"
                fix = "let no firewall stand between the ranks of a replica"
                raise CommunicationError(what, fix=fix) from error
        world.barrier()
        return cls(stage, links)

    def send(self, stage: int, word: str, message: Message) -> None:
        self._links[stage].send(word, message)

    def receive(self, stage: int, word: str) -> Message:
        began = time.perf_counter()
        message = self._links[stage].receive(word)
        self.waited += time.perf_counter() - began
        return message

    def sum(self, x: np.ndarray, stages: Sequence[int], word: str) -> np.ndarray:
        """Return the sum over some stages, this one included, in their order: the same bits on each."""
        x = np.ascontiguousarray(x)
        message = Message(x.dtype.name, x.shape, x.reshape(-1).view(np.uint8))
        others = [stage for stage in stages if stage != self.stage]
        for stage in others:
            self.send(stage, word, message)
        parts = {stage: self.receive(stage, word).data.view(x.dtype).reshape(x.shape) for stage in others}
        parts[self.stage] = x
        total = parts[stages[0]].copy()
        for stage in stages[1:]:
            total += parts[stage]
        return total

    def gather(self, data: bytes, word: str) -> list[bytes]:
        """Collect the data of all stages on stage 0, in their order; the others return []."""
        if self.stage:
            self.send(0, word, Message("bytes", (len(data),), np.frombuffer(data, np.uint8)))
            return []
        return [data, *(self.receive(stage, word).data.tobytes() for stage in range(1, self.size))]

    def close(self) -> None:
        for link in self._links.values():
            link.close()


def _reach(offer: Sequence[Any], stage: int) -> socket.socket:
    """Connect to a rank at the first of its addresses that answers."""
    token, places, port = offer
    error: OSError = ConnectionError("no address")
    for address in places:
        try:
            connection = socket.create_connection((address, port), CONNECT_SECONDS / len(places))
            connection.sendall(bytes.fromhex(token) + bytes([stage]))
            if connection.recv(1) == b"\1":
                return connection
            connection.close()
        except OSError as failed:
            error = failed
    raise error


def _accept(listener: socket.socket, token: bytes) -> tuple[socket.socket, int]:
    """Accept the next connection of a rank that knows the token; return it and the rank's stage."""
    while True:
        connection, _ = listener.accept()
        connection.settimeout(CONNECT_SECONDS)
        word = b""
        while len(word) < TOKEN_BYTES + 1 and (more := connection.recv(TOKEN_BYTES + 1 - len(word))):
            word += more
        if len(word) == TOKEN_BYTES + 1 and hmac.compare_digest(word[:TOKEN_BYTES], token):
            connection.sendall(b"\1")
            return connection, word[TOKEN_BYTES]
        connection.close()
