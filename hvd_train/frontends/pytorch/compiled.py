"""Models that ``torch.compile`` translates (``model.compile``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hvd_train.config.keys.model import CompileConfig
from hvd_train.errors import ConfigError, reason

WHERE = "model.compile"
SHAPES = 64  # compiled for one model at most; PyTorch's 8 are too few for buckets of lengths, and it says nothing
PLACE = re.compile(r'^\s*File "(.*)", line (\d+)', re.MULTILINE)  # of the user's code, in PyTorch's messages
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


class Compiled:
    """Compiles ``model`` in place, so that the names of its weights stay. The first batches take the time for it.

    Full training batches run compiled, the others eagerly: each further size, and evaluations, would be compiled again.
    What runs compiled follows from the batch alone, so that a resumed run computes the same bits.
    """

    def __init__(self, model: torch.nn.Module, options: CompileConfig) -> None:
        if not hasattr(torch.compiler, "set_stance"):
            raise ConfigError(f"torch {torch.__version__} is too old", where=WHERE, fix="install torch 2.6 or newer")
        # Imported here: it loads PyTorch's compiler.
        from torch._dynamo import config, exc, list_backends

        if options.mode not in MODES:
            raise ConfigError(f"{options.mode!r} is none of {', '.join(MODES)}", where=f"{WHERE}.mode")
        if options.backend not in list_backends(exclude_tags=()):  # the others are for debugging
            what = f"{options.backend!r} is none of {', '.join(list_backends())}"
            raise ConfigError(what, where=f"{WHERE}.backend")
        self._failed = exc.TorchDynamoException
        config.recompile_limit = max(config.recompile_limit, SHAPES)
        named = {"mode": options.mode} if options.backend == "inductor" else {}
        model.compile(fullgraph=options.fullgraph, dynamic=options.dynamic, backend=options.backend, **named)

    @contextmanager
    def running(self, compiled: bool) -> Iterator[None]:
        """Return a context in which calls of the model run compiled, or eagerly."""
        if not compiled:
            with torch.compiler.set_stance("force_eager"):
                yield
            return
        try:
            yield
        except self._failed as error:
            place = "".join(f" (line {line} of {file})" for file, line in PLACE.findall(str(error))[-1:])
            what = f"PyTorch cannot compile the model: {reason(error)}{place}"
            raise ConfigError(what, where=WHERE, fix="leave it out") from error
