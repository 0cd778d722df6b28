"""The address of a rendezvous server, requests to it, and the variables from which Horovod finds it."""

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
    """Return the proof that the server at this port knows the token.

    The port is part of it, so that an impostor cannot relay the request to the true server at another port.
    """
    return hmac.new(token.encode(), f"server {port} {nonce}".encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class Endpoint:
    """The address of a server. ``interface``: the network interface of this rank, "" to let Gloo use the host name's.
    ``cross``: Horovod's cross rank and size."""

    address: str
    port: int
    token: str
    interface: str = ""
    cross: tuple[int, int] = (0, 1)

    def answers(self) -> bool:
        """Return whether a server there proves that it knows the token."""
        nonce = secrets.token_hex(16)  # a new nonce each time, so that old answers cannot be replayed
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
        """Send a request. Returns our own address towards the server, the HTTP status and the answer."""
        connection = http.client.HTTPConnection(self.address, self.port, timeout=seconds)
        connection.connect()
        local_address = connection.sock.getsockname()[0]
        connection.request("POST", f"/{self.token}/{what}", json.dumps(content))
        answer = connection.getresponse()
        return local_address, answer.status, json.loads(answer.read() or b"{}")

    def horovod_variables(self, world: World, host: str) -> dict[str, str]:
        """Return the variables from which Horovod's Gloo in rank ``world`` on ``host`` finds the other ranks."""
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
