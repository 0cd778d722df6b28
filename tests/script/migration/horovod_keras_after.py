"""The same script with hvd_train.keras: it runs under horovodrun and mpirun, and alone."""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits

import hvd_train.keras as hk

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--in-order", action="store_true")
args = parser.parse_args()
keras.utils.set_random_seed(0)

images, labels = load_digits(return_X_y=True)
x, y = images / 16, labels  # all of it: fit divides it

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.SGD(args.lr, momentum=0.9), loss=loss, metrics=["accuracy"])
hk.distribute(model, lr_scaling="linear")

callbacks = [keras.callbacks.ModelCheckpoint(args.folder + "/digits.keras")]  # rank 0 alone writes

model.fit(x, y, batch_size=args.batch_size, epochs=2, shuffle=not args.in_order, callbacks=callbacks, verbose=2)
np.savez(f"{args.folder}/after.{hk.size()}.{hk.rank()}.npz", *model.get_weights())
