"""A script as users have it, with dropout: train_keras.py fit|loop [KIND]."""

import sys

import hvd_train.keras as hk

import keras  # isort: skip
from sklearn.datasets import load_digits

way, kind = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
images, labels = load_digits(return_X_y=True)
x, y = (images[:110] / 16).astype("float32"), labels[:110]
model = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(10)]
)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
if way == "fit":
    model.compile(keras.optimizers.Adam(0.01), loss_of, metrics=["accuracy"])
    hk.distribute(model)
    model.fit(x, y, batch_size=12, epochs=3, verbose=0)
else:
    import tensorflow as tf

    optimizer = keras.optimizers.Adam(0.01)
    hk.distribute(model, optimizer)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True)) * (1 + hk.rank() if kind == "rank" else 1)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    for _ in range(3):
        for batch in hk.shard(x, y, batch_size=12):
            step(*batch)
print("trained to the end")
