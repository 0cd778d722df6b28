"""Data parallelism for your PyTorch script in three lines, with or without horovodrun, mpirun or srun:

    import hvd_train.torch as ht

    model, optimizer = ht.distribute(model, optimizer)
    loader = ht.shard(loader)

The training loop does not change: when ``backward()`` returns, gradients are the mean over all ranks, ready to be
unscaled, clipped or applied. Without a launcher the script is a world of one, and nothing is exchanged.
"""

from hvd_train.script.pytorch.api import (
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
    times,
    tqdm,
)
from hvd_train.script.pytorch.checkpoint import load, save

__all__ = [
    "barrier", "device", "distribute", "global_weights", "is_main", "load", "no_sync", "print", "rank", "save", "shard",
    "size", "sum", "times", "tqdm",
]  # fmt: skip
