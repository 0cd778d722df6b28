"""A script that catches whatever comes, while the other rank ends or does something else.

lost_rank.py API KIND: API is torch, or Keras' backend as "tensorflow" or "keras torch".
"""

import os
import sys

api, kind = sys.argv[1:]
if api == "torch":
    import torch

    import hvd_train.torch as ht

    model = torch.nn.Linear(4, 2)
    model, optimizer = ht.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(10_000):
        try:
            if step == 3 and kind == "leaves" and ht.rank() == 1:
                sys.exit(0)
            if step == 3 and kind == "apart" and ht.rank() == 0:
                ht.sum(1)
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        except RuntimeError as error:  # out of memory: take the next batch
            print("caught", type(error).__name__)
        except Exception as error:
            print("caught", type(error).__name__)
else:
    os.environ["KERAS_BACKEND"] = api.split()[-1]
    import hvd_train.keras as hk

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras
    import numpy as np

    class Apart(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3 and kind == "leaves" and hk.rank() == 1:
                sys.exit(0)
            if batch == 3 and kind == "apart" and hk.rank() == 0:
                self.model.evaluate(x, y, verbose=0)

    keras.utils.set_random_seed(0)
    x, y = np.ones((4000, 4), np.float32), np.zeros(4000)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    hk.distribute(model)
    try:
        model.fit(x, y, batch_size=2, verbose=0, callbacks=[Apart()])
    except Exception as error:
        print("caught", type(error).__name__)
print("trained")
