"""How long a test waits for what should come. It ends a hang; a test that passes never waits so long.

Whether a test passes must not depend on how busy the machine is. So every limit that only guards against a hang is
this one, many times what any case needs on a quiet machine.
"""

SECONDS = 300.0
