"""News for the process that started ranks on several hosts: all have connected, one was lost, the job ends.

mpirun and its daemons can wait for ever for an unreachable host. So the process of rank 0's host (``heartbeat.py``)
writes news into shared memory that this process has opened, and this process ends the launcher.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hvd_train.errors import CommunicationError
from hvd_train.launch.hosts import check_way_back, is_here
from hvd_train.launch.launchers.base import Launcher
from hvd_train.launch.status import VERDICT, StatusTable, host_key, supported

LOOK_SECONDS, PATIENCE_SECONDS = 0.1, 5.0  # between polls; for the launcher to end after the news of the job's end
MEET_SECONDS = 60.0  # for ranks whose hosts cannot reach one another over TCP


class HostNews:
    """The news from rank 0's host (``launch/heartbeat.py``), if it is this host. ``variables``: for the launcher."""

    def __init__(self, hosts: Sequence[str], launcher: Launcher) -> None:
        self._hosts, self._table = list(hosts), StatusTable(0) if supported() else None
        # A firewall may let only MPI's ports through.
        ports = any(name.startswith("OMPI_MCA_") and "port" in name for name in os.environ)
        self._asks = bool(launcher.endless_programs) and not ports and is_here(hosts[0])
        self.variables = {VERDICT: f"{self._table.path} {host_key()}"} if self._table else {}

    @property
    def last(self) -> dict[str, Any]:
        return self._table.news() if self._table else {}

    @property
    def lost(self) -> str:
        """Return the first ranks that were lost, with their hosts; "" if none was lost."""
        return ", ".join(self.last.get("lost", []))

    def wait(self, child: subprocess.Popen) -> None:
        """Wait for the launcher, and kill it after news of the end: mpirun may wait for ever for a daemon that it
        cannot reach, and crashes on SIGTERM."""
        stop, begun, line = math.inf, time.monotonic(), ""
        while self._table and child.poll() is None:
            news, now = self.last, time.monotonic()
            if self._asks and not news and now > begun + MEET_SECONDS / 2:
                self._asks, line = False, check_way_back([host for host in self._hosts if not is_here(host)])
            if line and not news and now > begun + MEET_SECONDS:
                print(f"error: {line}", file=sys.stderr, flush=True)
                self._table.publish({"code": CommunicationError.exit_code})
            if stop == math.inf and "code" in news:
                stop = now + PATIENCE_SECONDS
            if now > stop:
                child.kill()
            with suppress(subprocess.TimeoutExpired):
                child.wait(LOOK_SECONDS)
        child.wait()
