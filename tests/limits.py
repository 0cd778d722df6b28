"""How long a test waits for what should come. It ends a hang; a test that passes never waits so long.

Whether a test passes must not depend on how busy the machine is. So every limit that only guards against a hang is
this one, many times what any case needs on a quiet machine.
"""

import time
from collections.abc import Callable
from typing import Any

SECONDS = 300.0


def until(ready: Callable[[], Any], pause: float = 0.05) -> Any:
    """What it gives as soon as that counts as true."""
    stop = time.monotonic() + SECONDS
    while not (found := ready()):
        assert time.monotonic() < stop, "it does not come to that"
        time.sleep(pause)
    return found
