"""Data parallelism for your PyTorch script in three lines, started by horovodrun, mpirun or srun, or alone:

    import hvd_train.torch as ht

    model, optimizer = ht.distribute(model, optimizer)
    loader = ht.shard(loader)

The loop stays as it is: gradients are the mean over all ranks when ``backward()`` returns, before they are unscaled,
clipped or applied. A script that was started alone is a world of one: the same code, and nothing is exchanged.
"""

from hvd_train.torch.api import (
    barrier,
    device,
    distribute,
    global_weights,
    is_main,
    no_sync,
    print,
    rank,
    shard,
    size,
    sum,
    tqdm,
)
from hvd_train.torch.checkpoint import load, save

__all__ = [
    "barrier", "device", "distribute", "global_weights", "is_main", "load", "no_sync", "print", "rank", "save", "shard",
    "size", "sum", "tqdm",
]  # fmt: skip
