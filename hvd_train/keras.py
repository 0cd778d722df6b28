"""Data parallelism for your Keras 3 script, on TensorFlow or PyTorch, in two lines::

    import hvd_train.keras as hk

    model.compile(...)
    hk.distribute(model)
    model.fit(x, y, batch_size=64, epochs=5)  # 64 a rank

Start it with ``horovodrun -np N python train.py`` or ``mpirun -np N python train.py``. Alone it trains as before.
"""

from hvd_train.script.keras.api import (
    barrier,
    distribute,
    global_weights,
    is_main,
    print,
    rank,
    size,
    times,
    tqdm,
)
from hvd_train.script.keras.loop import reduce, shard

__all__ = [
    "barrier", "distribute", "global_weights", "is_main", "print", "rank", "reduce", "shard", "size", "times",
    "tqdm",
]  # fmt: skip
