"""A script that catches whatever comes, while the other rank ends or does something else.

python -m tests.script.lost_rank API KIND: API is torch, or Keras' backend as "tensorflow" or "keras torch".
"""

import os
import signal
import sys
import time

api, kind = sys.argv[1:]


def wedged():
    """In code of the user's own, for ever."""
    while True:
        time.sleep(0.1)


if api == "torch":
    import torch

    import hvd_train.torch as ht

    model = torch.nn.Linear(4, 2)
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if kind == "moved":  # by gradients that no optimizer has seen
        (gradient,) = torch.autograd.grad(model(torch.full((1, 4), 1.0 + ht.rank())).square().sum(), model.weight)
        model.weight.data -= 0.1 * gradient
        print("trained")
        sys.exit(0)
    for step in range(10_000):
        try:
            if step == 3 and kind == "leaves" and ht.rank() == 1:
                sys.exit(0)
            if step == 3 and kind == "stops" and ht.rank() == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            if step == 3 and kind == "loops" and ht.rank() == 1:
                wedged()
            if step == 3 and kind == "apart" and ht.rank() == 0:
                ht.sum(1)
            if step == 3 and kind == "shapes":
                ht.sum(*range(2 + ht.rank()))
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        except RuntimeError as error:  # out of memory: take the next batch
            print("caught", type(error).__name__)
        except Exception as error:
            print("caught", type(error).__name__)
            if kind == "shapes":
                raise
else:
    os.environ["KERAS_BACKEND"] = api.split()[-1]
    from hvd_train.frameworks import FRAMEWORKS, fast_import

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with fast_import(FRAMEWORKS["tensorflow"].unneeded):
        import keras
    import numpy as np

    import hvd_train.keras as hk

    class Apart(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3 and kind == "leaves" and hk.rank() == 1:
                sys.exit(0)
            if batch == 3 and kind == "loops" and hk.rank() == 1:
                wedged()
            if batch == 3 and kind == "apart" and hk.rank() == 0:
                self.model.evaluate(x, y, verbose=0)

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 500

        def __getitem__(self, k):
            if k == 40 and hk.rank() == 1:
                wedged()
            return np.ones((4, 4), np.float32), np.zeros(4)

    keras.utils.set_random_seed(0)
    x, y = np.ones((4000, 4), np.float32), np.zeros(4000)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    if kind == "shapes":
        hk.reduce(x[: 2 + hk.rank()])
    if kind == "moved":
        hk.distribute(model, keras.optimizers.SGD(0.1))
        model.layers[0].bias.assign_add([1e-3 + hk.rank(), 0.0])  # by an update of the script's own
        print("trained")
        sys.exit(0)
    if kind == "drift":
        import tensorflow as tf

        hk.distribute(model, optimizer := keras.optimizers.SGD(0.1))

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        batches = hk.shard(x, batch_size=4)
        for k in range(200):
            if k == 5 and hk.rank() == 1:
                model.layers[0].bias.assign_add([1e-6, 0.0])
            next(iter(batches))
            step(x[:4])
        print("trained")
        sys.exit(0)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    hk.distribute(model)
    try:
        if kind == "loads":
            model.fit(Batches(), verbose=0)
        else:
            model.fit(x, y, batch_size=2, verbose=0, callbacks=[Apart()])
    except Exception as error:
        print("caught", type(error).__name__)
print("trained")
