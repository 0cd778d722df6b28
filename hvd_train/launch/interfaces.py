"""The network interfaces of this host, by their IPv4 addresses."""

from __future__ import annotations

import socket
from collections.abc import Iterator


def _all() -> Iterator[tuple[str, str]]:
    import psutil

    for name, kinds in psutil.net_if_addrs().items():
        yield from ((name, kind.address) for kind in kinds if kind.family == socket.AF_INET)


def interfaces() -> list[tuple[str, str]]:
    """Return (name, address) of each interface except loopback."""
    return [(name, address) for name, address in _all() if not address.startswith("127.")]


def interface_of(address: str) -> str:
    """Return the network interface with this address, "" if there is none."""
    return next((name for name, its in _all() if its == address), "")
