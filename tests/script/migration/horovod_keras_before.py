"""Digits with horovod.keras, as its examples are written. Under Keras 3 the first callback fails; left out, the ranks'
weights come apart, silently."""

import sys

import horovod.keras as hvd
import keras
import numpy as np
from sklearn.datasets import load_digits

hvd.init()
keras.utils.set_random_seed(hvd.rank())

images, labels = load_digits(return_X_y=True)
x, y = images[hvd.rank() :: hvd.size()] / 16, labels[hvd.rank() :: hvd.size()]

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05 * hvd.size(), momentum=0.9))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(sys.argv[1] + "/digits.keras"))

model.fit(x, y, batch_size=32, epochs=2, callbacks=callbacks, verbose=2 if hvd.rank() == 0 else 0)
np.savez(f"{sys.argv[1]}/before.{hvd.size()}.{hvd.rank()}.npz", *model.get_weights())
