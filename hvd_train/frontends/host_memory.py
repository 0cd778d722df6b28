"""Shared memory between the ranks of a host: gradients are not copied over sockets, and the weights exist once.

Each rank has a region that the others can read, and a socket to each of them. The region is a memfd, so a killed rank
leaves no file. Messages over the sockets say which part of a region may be read. A message is a system call, so its
receiver sees all that was written before it. If a rank is killed, its sockets close, and the others raise.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import socket
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from hvd_train.errors import SOME_RANK, LostRankError
from hvd_train.launch.status import host_key
from hvd_train.protocol import Communicator, Tensor, allgather_json

# 0: no shared memory. K > 1: each K consecutive ranks count as one host.
VARIABLE = "HVD_TRAIN_HOST_MEMORY"
# For a Keras model that changes weights in its forward pass.
CHANGED_BY_MODEL = "the model changes its own weights, which ranks of one host share"
UNSHARE = f"set optim.sharded: false; or {VARIABLE}=0 in the environment, with true"
CONNECT_SECONDS = 30.0
PAGEMAP = "/proc/self/pagemap"
ALIGN = 64  # bytes; each array begins at a multiple
MESSAGE = struct.Struct("<I")
CREDENTIALS = struct.Struct("3i")  # SO_PEERCRED: pid, user, group

Pieces = Sequence[tuple[int, int]]  # (first entry, end) of each, without those of other ranks
# (memory, dtype of this tensor, entries, first byte) -> a flat tensor in that memory.
View = Callable[[mmap.mmap, Any, int, int], Tensor]


class HostMemory:
    """Memory regions of all ranks of a host, and messages between these ranks. All ranks must make the same calls.

    ``hosts``: the ranks of each host, in order; ``rank``: the index of this rank within its host.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket], view: View, hosts: Sequence[Sequence[int]]) -> None:
        self.rank, self.size, self._peers, self._view = rank, len(peers) + 1, peers, view
        self.hosts = hosts
        self.waited = 0.0  # seconds
        self._received = {peer: Counter[int]() for peer in peers}
        self._sent = Counter[int]()
        self._ended: set[int] = set()

    @classmethod
    def of(
        cls, communicator: Communicator, view: View, usable: bool = True, one_host: bool = False
    ) -> HostMemory | None:
        """Connect the ranks of each host; None if one cannot share memory, or hosts have unequal numbers of ranks.

        All ranks of ``communicator`` call this. ``usable``: this rank's tensors are in host memory. ``one_host``: None,
        too, if there are several hosts.
        """
        if communicator.size == 1:
            return None
        address = f"\0hvd-train-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen(communicator.size)
            listener.settimeout(CONNECT_SECONDS)
            offer = [_memory_key(communicator.rank) if usable else "", address, os.getpid()]
            offers = allgather_json(communicator, offer, "host")
            hosts = _hosts([key for key, *_ in offers])
            if one_host and len(hosts) > 1:
                hosts = []
            mine = next((ranks for ranks in hosts if communicator.rank in ranks), [communicator.rank])
            place, peers = mine.index(communicator.rank), dict[int, socket.socket]()
            if hosts:
                with suppress(OSError, struct.error):
                    peers = _connect(place, listener, [(offers[rank][1], offers[rank][2]) for rank in mine])
        met = bool(hosts) and len(peers) == len(mine) - 1
        if all(one == b"\1" for one in communicator.allgather_bytes(bytes([met]), "host")):
            return cls(place, peers, view, hosts)
        for one in peers.values():
            one.close()
        return None

    # ---- memory

    def allocate(self, lengths: Sequence[int]) -> list[mmap.mmap]:
        """Make a region of ``lengths[k]`` bytes on each rank k; return the regions of all ranks, in rank order."""
        regions = []
        for length, descriptor in zip(lengths, self._descriptors(lengths), strict=True):
            regions.append(mmap.mmap(descriptor, max(length, 1)))
            os.close(descriptor)
        return regions

    def _descriptors(self, lengths: Sequence[int]) -> list[int]:
        """Make a file in memory of ``lengths[k]`` bytes on each rank k; return those of all ranks, to be closed."""
        mine = os.memfd_create("hvd-train-host", os.MFD_CLOEXEC)
        os.ftruncate(mine, max(lengths[self.rank], 1))
        for peer in self._peers.values():
            try:
                socket.send_fds(peer, [b"memory"], [mine])
            except OSError as error:
                raise LostRankError(f"{SOME_RANK} was lost") from error
        return [mine if rank == self.rank else self._receive_descriptor(rank) for rank in range(len(lengths))]

    def _receive_descriptor(self, rank: int) -> int:
        while True:
            word, descriptors, *_ = socket.recv_fds(self._peers[rank], 16, 1)
            if descriptors:
                return descriptors[0]
            if not word:
                raise LostRankError(f"{SOME_RANK} was lost")
            self._received[rank][MESSAGE.unpack(word)[0]] += 1  # a message of the previous sum

    def share(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return flat tensors in memory common to all ranks, with the values of rank 0's ``tensors``.

        ``copies`` has the same tensors for reading; what this rank writes to them, it alone sees.
        """
        starts = offsets([x.nbytes for x in tensors])
        length = max(starts[-1], 1)
        descriptors = self._descriptors([length if rank == 0 else 0 for rank in range(self.size)])
        memory = mmap.mmap(descriptors[0], length)
        own = mmap.mmap(descriptors[0], length, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        for descriptor in descriptors:
            os.close(descriptor)
        common, copies = (
            [self._view(part, x.dtype, len(x), start) for x, start in zip(tensors, starts, strict=False)]
            for part in (memory, own)
        )
        self.copies = Copies(own, copies)
        self._posts = self.allocate([8] * self.size)
        if self.rank == 0:
            for place, x in zip(common, tensors, strict=True):
                place[:] = x
        self.barrier("shared")
        return common

    def post(self, number: int) -> None:
        """Publish an integer of 64 bits; the other ranks read it by ``posted`` after the next barrier."""
        self._posts[self.rank][:] = number.to_bytes(8, "little")

    def posted(self) -> list[int]:
        """Return what each rank has posted. Call it between two barriers: after the second, ranks may post again."""
        return [int.from_bytes(one[:], "little") for one in self._posts]

    # ---- messages

    def send(self, what: str) -> None:
        """Send the message ``what`` to all others. Blocks only while a receiver does not read."""
        word = MESSAGE.pack(zlib.crc32(what.encode()))
        for peer in self._peers.values():
            while True:
                try:
                    peer.send(word, socket.MSG_DONTWAIT)
                    break
                except BlockingIOError:
                    # All ranks may be sending while none reads, so read messages meanwhile.
                    living = {one: rank for rank, one in self._peers.items() if rank not in self._ended}
                    for one in select.select(living, [peer], [])[0]:
                        self._receive(living[one])
                except OSError as error:
                    raise LostRankError(f"{SOME_RANK} was lost") from error
        self._sent[zlib.crc32(what.encode())] += 1

    def wait(self, what: str) -> None:
        """Wait until all others have sent this message as often as this rank. Raises LostRankError if one has ended."""
        word, began = zlib.crc32(what.encode()), time.perf_counter()
        for rank in self._peers:
            while self._received[rank][word] < self._sent[word]:
                if rank in self._ended:
                    raise LostRankError(f"{SOME_RANK} was lost")
                self._receive(rank)
        self.waited += time.perf_counter() - began

    def _receive(self, rank: int) -> None:
        """Receive the next message of a rank, or note that it has ended, which is no error after the last sum."""
        message = b""
        with suppress(OSError):
            message = self._peers[rank].recv(MESSAGE.size)
        if message:
            self._received[rank][MESSAGE.unpack(message)[0]] += 1
        else:
            self._ended.add(rank)

    def barrier(self, name: str) -> None:
        self.send(name)
        self.wait(name)

    # ---- sums

    def sums(self, lengths: Sequence[int]) -> HostSums:
        """Allocate memory for sums of flat tensors, the k-th of at most ``lengths[k]`` bytes."""
        starts = offsets(lengths)
        return HostSums(self, self.allocate([starts[-1]] * self.size), starts, self._view)


class Copies:
    """Flat tensors over the memory that ranks share, mapped copy-on-write: a page that this rank writes is its own.

    So code of a user that changes weights changes them on this rank, as if each rank had its own.
    """

    def __init__(self, memory: mmap.mmap, tensors: list[Tensor]) -> None:
        self.tensors, self._memory = tensors, memory
        self._first = np.frombuffer(memory, np.uint8).ctypes.data // mmap.PAGESIZE
        self._pages = -(-len(memory) // mmap.PAGESIZE)

    def changed(self) -> bool:
        """Return whether this rank has written to any page. It takes 4 us for each MB."""
        with open(PAGEMAP, "rb", buffering=0) as pages:
            entries = np.frombuffer(os.pread(pages.fileno(), 8 * self._pages, 8 * self._first), np.uint64)
        # proc(5): a page that is there (bit 63) or swapped out (62), and of no file (61).
        return bool((((entries >> np.uint64(61)) & np.uint64(1)) < ((entries >> np.uint64(62)) > 0)).any())

    def drop(self) -> None:
        """Give up this rank's own pages: the tensors have the common values again."""
        self._memory.madvise(mmap.MADV_DONTNEED)


def pages_are_known() -> bool:
    """Return whether the kernel says which pages of this process are its own."""
    try:
        with open(PAGEMAP, "rb", buffering=0) as pages:
            return len(pages.read(8)) == 8
    except OSError:
        return False


class HostSums:
    """Sums of flat tensors over the ranks of this host. A rank publishes what the others read."""

    def __init__(self, host: HostMemory, regions: Sequence[mmap.mmap], starts: Sequence[int], view: View) -> None:
        self._host, self._regions, self._starts, self._view = host, regions, starts, view

    def start(self, place: int, x: Tensor, pieces: Sequence[Pieces]) -> Callable[[], Tensor]:
        """Publish ``x``, of which the k-th rank of the host reads ``pieces[k]``, without waiting for the others.

        Returns a function that waits for the sum of this rank's pieces and returns them concatenated. Parts are added
        in rank order.
        """
        host, rank = self._host, self._host.rank
        host.wait(f"{place} read")  # of the previous sum
        of_ranks = [self._view(region, x.dtype, len(x), self._starts[place]) for region in self._regions]
        # In a region the pieces of a rank are contiguous, so that one addition is enough.
        starts = [0]
        for of_rank in pieces:
            offset = starts[-1]
            for first, last in of_rank:
                # A rank reads its own piece directly from ``x`` if it has only one.
                if len(starts) - 1 != rank or len(of_rank) > 1:
                    of_ranks[rank][offset : offset + last - first] = x[first:last]
                offset += last - first
            starts.append(offset)
        host.send(f"{place} written")

        def finish() -> Tensor:
            host.wait(f"{place} written")
            parts = [one[starts[rank] : starts[rank + 1]] for one in of_ranks]
            if len(pieces[rank]) == 1:
                ((first, last),) = pieces[rank]
                parts[rank] = x[first:last]
            total = parts[0] + parts[1]
            for part in parts[2:]:
                total += part
            host.send(f"{place} read")
            return total

        return finish


def offsets(lengths: Sequence[int]) -> list[int]:
    """Return the offset of each array, rounded up to a multiple of ``ALIGN``, and the end of the last one."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + -(-length // ALIGN) * ALIGN)
    return starts


def _memory_key(rank: int) -> str:
    """Return a key that is equal on ranks that share memory; "" if this rank shares none."""
    wanted = os.environ.get(VARIABLE, "1")
    if wanted == "0":
        return ""
    try:  # a sandbox may forbid it
        os.close(os.memfd_create("hvd-train-probe", os.MFD_CLOEXEC))
    except OSError:
        return ""
    return f"{host_key()} {rank // int(wanted)}" if wanted.isdecimal() and int(wanted) > 1 else host_key()


def _hosts(keys: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host; [] if a rank shares no memory or hosts have unequal numbers of ranks."""
    hosts = [[rank for rank, one in enumerate(keys) if one == key] for key in dict.fromkeys(keys)]
    if "" in keys or len(hosts[0]) == 1 or len({len(ranks) for ranks in hosts}) > 1:
        return []
    return hosts


def _connect(rank: int, listener: socket.socket, places: Sequence[tuple[str, int]]) -> dict[int, socket.socket]:
    """Return {rank: socket} of all others. ``places``: (address, pid) of each rank. Raises OSError."""
    pids = {pid for _, pid in places}
    peers: dict[int, socket.socket] = {}
    for other, (address, _) in enumerate(places[:rank]):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.settimeout(CONNECT_SECONDS)
        peer.connect(address)
        if not _is_one_of(peer, pids):
            raise ConnectionError("another process has this address")
        peer.send(MESSAGE.pack(rank))
        peers[other] = peer
    stop = time.monotonic() + CONNECT_SECONDS
    while len(peers) < len(places) - 1 and time.monotonic() < stop:
        peer, _ = listener.accept()
        if _is_one_of(peer, pids):
            peer.settimeout(CONNECT_SECONDS)
            peers[MESSAGE.unpack(peer.recv(MESSAGE.size))[0]] = peer
        else:
            peer.close()
    for peer in peers.values():
        peer.settimeout(None)
    return peers


def _is_one_of(peer: socket.socket, pids: Collection[int]) -> bool:
    """Return whether the peer is one of these processes and runs as this user."""
    pid, user, _ = CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return pid in pids and user == os.getuid()
