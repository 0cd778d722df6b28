"""What every user of this machine can read of a job: the command lines of all processes, in all network namespaces."""

from __future__ import annotations

import os
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# As a user's shell may hold them, and what ranks prove to one another that they know.
NAMES = ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "HVD_TRAIN_SECRET")
TOKEN = re.compile(rb"HOROVOD_GLOO_RENDEZVOUS_ADDR=[^/\0]*/([0-9a-f]{64})")


@contextmanager
def none_tells_a_secret() -> Iterator[dict[str, str]]:
    """Variables for a job, whose values must stand in no command line of any process as long as the block runs, nor
    may the token under which its ranks meet."""
    secrets = {name: uuid.uuid4().hex for name in NAMES}
    seen, tokens, ended = set[bytes](), set[bytes](), threading.Event()

    def look() -> None:
        while not ended.wait(0.05):
            for process in os.listdir("/proc"):
                if process.isdigit():
                    with suppress(OSError):
                        seen.add(Path(f"/proc/{process}/cmdline").read_bytes())
                        tokens.update(TOKEN.findall(Path(f"/proc/{process}/environ").read_bytes()))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield secrets
    finally:
        ended.set()
        thread.join()
    assert any(re.search(rb"hvd[-_]train", line) for line in seen)  # ranks were there to be read
    for secret in (*(value.encode() for value in secrets.values()), *tokens):
        told = [line.replace(b"\0", b" ") for line in seen if secret in line]
        assert not told, f"{secret!r} stands in {told}"
