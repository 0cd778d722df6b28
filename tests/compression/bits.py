"""What a rank computes after an exchange, under so many threads: bits.py FRAMEWORK THREADS prints {operation: bits}."""

import hashlib
import json
import os
import sys

import numpy as np

from hvd_train.config import OptimConfig

OPTIONS = {
    "sgd": OptimConfig(name="sgd", momentum=0.9, weight_decay=0.01),
    "adamw": OptimConfig(name="adamw", weight_decay=0.01),
}

framework, threads = sys.argv[1], int(sys.argv[2])
if framework == "pytorch":
    import torch

    from hvd_train.frontends.pytorch.ops import TorchOps

    torch.set_num_threads(threads)
    ops = TorchOps(torch.device("cpu"))
else:
    os.environ |= {"TF_ENABLE_ONEDNN_OPTS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    import tensorflow as tf

    from hvd_train.frontends.tensorflow.ops import TensorFlowOps

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    ops = TensorFlowOps()

rng, found = np.random.default_rng(0), {}
for dtype in ("float32", "float64"):

    def drawn(*shape, dtype=dtype):
        return ops.from_numpy(rng.normal(size=shape).astype(dtype))

    for n, m, r in ((513, 2049, 4), (1000, 777, 32), (50_000, 31, 4), (10_000, 333, 16)):
        left, right = drawn(n, r), drawn(m, r)
        found[f"orthonormal {dtype} {n} {r}"] = ops.orthonormal(left)
        found[f"matmul {dtype} {n} {m} {r}"] = ops.matmul(left, right, transpose_b=True)
        found[f"sum_of_squares {dtype} {n} {m}"] = ops.sum_of_squares(drawn(n, m))
    indices = ops.from_numpy(rng.integers(0, 10**6, 400_000).astype(np.int32))
    found[f"scatter {dtype}"] = ops.scatter(10**6, indices, drawn(400_000))
    found[f"int8 {dtype}"] = ops.matmul(drawn(1, 3), drawn(3, 10**6))
    w, g, m, v = (drawn(1_000_003) for _ in range(4))
    if framework == "pytorch":
        from hvd_train.frontends.pytorch.optimizers import make_kernel

        for name, o in OPTIONS.items():
            kernel, weight = make_kernel(o, ops), w.clone()
            slots = [[torch.zeros_like(w)] for _ in kernel.slots]
            steps = [torch.zeros(())]
            for _ in range(3):
                kernel([weight], [g], slots, steps, 0.1)
            found[f"{name} {dtype}"] = weight
    else:
        from hvd_train.frontends.tensorflow.optimizers import make_kernel

        for name, o in OPTIONS.items():
            kernel, weight = make_kernel(o), tf.Variable(w)
            slots = [tf.Variable(tf.zeros_like(w)) for _ in kernel.slots]
            for step in range(3):
                kernel(weight, g, slots, tf.constant(step + 1, tf.int64), tf.constant(0.1, dtype))
            found[f"{name} {dtype}"] = weight.value()
digests = {key: hashlib.sha256(ops.to_numpy(x).tobytes()).hexdigest() for key, x in found.items()}
print(json.dumps(digests))
