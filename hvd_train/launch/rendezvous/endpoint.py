"""The place of a rendezvous server, how to ask it, and what Horovod reads in a rank that knows it."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import secrets
from dataclasses import dataclass
from typing import Any

from hvd_train.launch.world import World

ANSWER_SECONDS = 5.0
LOOPBACK = "127.0.0.1"


def proof(token: str, port: int, nonce: str) -> str:
    """Return what shows that the server at this port knows the token.

    The port is part of it, so that nobody can pass the question on to the true server: that listens at another port.
    """
    return hmac.new(token.encode(), f"server {port} {nonce}".encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class Endpoint:
    """The place of a server. ``interface``: by which others reach this rank, empty if Gloo is to take the host name's;
    ``cross``: (place among the ranks with this local rank, their number)."""

    address: str
    port: int
    token: str
    interface: str = ""
    cross: tuple[int, int] = (0, 1)

    def answers(self) -> bool:
        """Return whether a server answers there that knows the token."""
        nonce = secrets.token_hex(16)  # a new question each time: an old answer cannot be used again
        try:
            connection = http.client.HTTPConnection(self.address, self.port, timeout=ANSWER_SECONDS)
            connection.request("GET", f"/proof/{nonce}")
            answer = connection.getresponse().read(1024)
            connection.close()
        except (OSError, http.client.HTTPException):
            return False
        return hmac.compare_digest(answer, proof(self.token, self.port, nonce).encode())

    def ask(
        self, what: str, content: dict[str, Any], seconds: float = ANSWER_SECONDS
    ) -> tuple[str, int, dict[str, Any]]:
        """Send a request, and return our own address on the way to the server, the HTTP status and the answer."""
        connection = http.client.HTTPConnection(self.address, self.port, timeout=seconds)
        connection.connect()
        local_address = connection.sock.getsockname()[0]
        connection.request("POST", f"/{self.token}/{what}", json.dumps(content))
        answer = connection.getresponse()
        return local_address, answer.status, json.loads(answer.read() or b"{}")

    def horovod_variables(self, world: World, host: str) -> dict[str, str]:
        """Return what Horovod reads in the rank ``world`` on ``host`` to find the others over Gloo."""
        variables = {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            # Horovod asks for http://ADDR:PORT/scope/key.
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{self.address}:{self.port}/{self.token}",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.port),
            "HOROVOD_HOSTNAME": host,
            "HOROVOD_RANK": str(world.rank),
            "HOROVOD_SIZE": str(world.size),
            "HOROVOD_LOCAL_RANK": str(world.local_rank),
            "HOROVOD_LOCAL_SIZE": str(world.local_size),
            "HOROVOD_CROSS_RANK": str(self.cross[0]),
            "HOROVOD_CROSS_SIZE": str(self.cross[1]),
        }
        if self.interface:
            variables |= {"HOROVOD_GLOO_IFACE": self.interface, "NCCL_SOCKET_IFNAME": self.interface}
        return variables


def interface_of(address: str) -> str:
    """Return the network interface with this address, or nothing if there is none."""
    import psutil

    names = (name for name, kinds in psutil.net_if_addrs().items() for kind in kinds if kind.address == address)
    return next(names, "")
