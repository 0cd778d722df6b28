"""Functions that ``torch.compile`` runs as Python: its graphs cannot contain a transfer."""

from __future__ import annotations

from typing import Any

# torch.compiler.disable would load torch's compiler, and slow down each call.
from torch._C._dynamo import eval_frame


def eager(function: Any) -> Any:
    """Make ``torch.compile`` break its graph at ``function``, and not compile what it calls. Returns the function."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True
    return function
