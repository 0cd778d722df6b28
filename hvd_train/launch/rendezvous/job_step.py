"""What identifies ranks that were started together, so that they can find one another."""

from __future__ import annotations

import hashlib
import hmac
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvd_train.errors import ConfigError
from hvd_train.launch.rendezvous.endpoint import LOOPBACK

PORT = "HVD_TRAIN_PORT"
PORTS = range(16384, 32768)  # below the ephemeral ports, which the system assigns to any program
TRIES = 16  # several, because another step or program on the node may use the first ones


@dataclass(frozen=True)
class JobStep:
    """One start of ranks by ``launcher`` on ``nodes`` nodes.

    ``name`` is unique, also among requeues of a job. ``first_node`` has rank 0's server or a signpost; ``node`` is this
    rank's. ``resolve`` returns a node's address.
    """

    name: str
    launcher: str
    first_node: str
    node: str
    nodes: int
    resolve: Callable[[str], str]

    def ports(self, environ: Mapping[str, str]) -> list[int]:
        """Return the ports that the step's servers may use."""
        if PORT in environ:
            text = environ[PORT]
            if not text.isdigit() or not 0 < int(text) <= 65536 - TRIES:
                fix = f"set it to a number from 1 to {65536 - TRIES}, or unset it"
                raise ConfigError(f"'{text}' is not a port", where=f"environment variable {PORT}", fix=fix, common=True)
            return [int(text) + k for k in range(TRIES)]
        # Ports derived from the name mostly differ from those of other steps on the node.
        return [PORTS[zlib.crc32(f"{self.name}:{k}".encode()) % len(PORTS)] for k in range(TRIES)]

    def token(self, secret: bytes) -> str:
        """Return the token of this step's ranks, from which the secret cannot be computed."""
        return hmac.new(secret, f"step {self.name}".encode(), hashlib.sha256).hexdigest()

    def address(self) -> str:
        """Return the first node's IPv4 address, for this rank."""
        return LOOPBACK if self.node == self.first_node else self.resolve(self.first_node)
