"""A rank of a launched world, or the one process that it is compared with: ``worker.py FOLDER CASE ...``.

Each case is a small Keras script of a user's; results go to FOLDER/CASE.SIZE.RANK.npz. The global batch is the same for
every world size.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import random
import sys
import time
import warnings
from pathlib import Path

import numpy as np

from hvd_train.frameworks import FRAMEWORKS, swift

with swift(FRAMEWORKS["tensorflow"].beside):
    import keras

import hvd_train.keras as hk
from hvd_train.core import meeting
from hvd_train.data.formats import read_digits
from hvd_train.errors import TrainError
from hvd_train.keras import api
from tests.seconds import counted

GLOBAL = 48
BATCH = GLOBAL // hk.size()  # a rank
DRAWN = 2 * GLOBAL + 20  # samples of the case that looks at random numbers
COUNT = 500  # 500 = 10 global batches of 48 and a rest of 20, which 3 ranks share 7, 7, 6
SECONDS = 240  # of one case: a hang ends with a traceback that says where
WIDE = 128  # a layer that is large enough to be compressed
TENSORFLOW = keras.backend.backend() == "tensorflow"
FOLDER = Path(sys.argv[1])


def digits(count: int = COUNT):
    images, labels = read_digits()
    return images[:count].reshape(-1, 64) / 16, labels[:count].astype("int64")


def network(dropout: float = 0.0, batchnorm: bool = False, hidden: int = 32):
    layers = [keras.Input((64,)), keras.layers.Dense(hidden, "tanh", kernel_regularizer=keras.regularizers.L2(1e-3))]
    layers += [keras.layers.BatchNormalization()] if batchnorm else []
    layers += [keras.layers.Dropout(dropout)] if dropout else []
    return keras.Sequential([*layers, keras.layers.Dense(10)])


def compiled(model=None, optimizer=None, loss=None, **options):
    model = model or network()
    loss = loss or cross_entropy()
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], **options)
    return model


def fit(model, *data, epochs=2, **options):
    options = {"batch_size": BATCH, "epochs": epochs, "shuffle": False, "verbose": 0} | options
    return model.fit(*data, **options).history


def trained(model, history=None, **more):
    """What a case hands back: weights, the optimizer's variables, the logs of the epochs."""
    found = {f"weights/{i}": np.array(w) for i, w in enumerate(model.get_weights())}
    found |= {f"history/{k}": np.array(v) for k, v in (history or {}).items()}
    return found | {k: np.asarray(v) for k, v in more.items()}


def arrays():
    x, y = digits()
    model = hk.distribute(compiled())
    history = fit(model, x, y, validation_data=digits(157))
    score = model.evaluate(x[:101], y[:101], batch_size=BATCH, verbose=0)
    return trained(model, history, score=score, predicted=model.predict(x[:101], batch_size=7, verbose=0))


def simple(optimizer, hidden=32, exchange=None, **options):
    def case():
        model = hk.distribute(compiled(network(hidden=hidden), optimizer(), **options), **exchange or {})
        return trained(model, fit(model, *digits()))

    return case


def cross_entropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


class TwoInputs(keras.Model):
    """Inputs in a dictionary, a train_step of its own, an embedding (sparse gradient), a layer that nothing uses."""

    def __init__(self):
        super().__init__()
        self.embedding, self.dense = keras.layers.Embedding(17, 3), keras.layers.Dense(10)
        self.unused = keras.layers.Dense(4)

    def build(self, shape=None):
        self.embedding.build((None, 64))
        self.dense.build((None, 64 * 3 + 64))
        self.unused.build((None, 5))
        self.built = True

    def call(self, inputs):
        embedded = keras.ops.reshape(self.embedding(inputs["pixels"]), (-1, 64 * 3))
        return self.dense(keras.ops.concatenate([embedded, inputs["image"]], -1))


class OwnStep(keras.Model):
    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        variables = self.trainable_variables
        if TENSORFLOW:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                found = self(x, training=True)
                loss = self.compute_loss(x=x, y=y, y_pred=found, sample_weight=weight)
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        else:
            self.zero_grad()
            found = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=found, sample_weight=weight)
            loss.backward()
            self.optimizer.apply([v.value.grad for v in variables], variables)
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, found)
        return self.get_metrics_result()


def own_step():
    inputs = keras.Input((64,))
    model = hk.distribute(compiled(OwnStep(inputs, keras.layers.Dense(10)(inputs))))
    return trained(model, fit(model, *digits(), validation_data=digits(157)))


class OwnLogs(OwnStep):
    """Its step gives more than the metrics' results, and something else than the result of one of them."""

    def train_step(self, data):
        found = super().train_step(data)
        return found | {"accuracy": found["accuracy"] * 0 + 2, "more": found["loss"] * 0 + 3}


class Named(OwnStep):
    """Its step gives results by the metrics' names, as in Keras' guide: those of compile as a dict of their own."""

    def train_step(self, data):
        super().train_step(data)
        return {metric.name: metric.result() for metric in self.metrics}


def own_logs():
    x, y = digits()
    found = {}
    for kind in (OwnLogs, Named):
        inputs = keras.Input((64,))
        model = kind(inputs, keras.layers.Dense(1, "sigmoid")(inputs))
        model.compile(SGD(0.1), "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")])
        history = fit(hk.distribute(model), x, (y % 2)[:, None], validation_data=(x[:99], y[:99, None] % 2))
        del history["loss"]  # its metric counts batches
        found |= {f"{kind.__name__} {key}": value for key, value in trained(model, history).items()}
    return found


def rates():
    """A learning rate is multiplied once, however often its optimizer is compiled again."""
    model, optimizer = network(), Adam(0.01 / hk.size())
    for _ in range(2):
        hk.distribute(compiled(model, optimizer), lr_scaling="linear")
        history = fit(model, *digits(), epochs=1)
    return trained(model, history)


def two_inputs():
    x, y = digits()
    model = TwoInputs()
    model.build()
    model = hk.distribute(compiled(model))
    inputs = {"image": x, "pixels": (x * 16).astype("int32")}
    history = fit(model, inputs, y, sample_weight=np.linspace(0.5, 2, COUNT), validation_split=0.2)
    return trained(model, history, predicted=model.predict(inputs, verbose=0))


def class_weight():
    model = hk.distribute(compiled())
    return trained(model, fit(model, *digits(), class_weight={i: 1 + i / 10 for i in range(10)}))


def summed():
    """A summed loss of 2 outputs, one of which counts more, beside a mean."""
    x, y = digits()
    inputs = keras.Input((64,))
    hidden = keras.layers.Dense(16, "tanh", kernel_regularizer=keras.regularizers.L2(1e-2))(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(10, name="a")(hidden), keras.layers.Dense(1, name="b")(hidden)])
    losses = [cross_entropy(reduction="sum"), keras.losses.MeanSquaredError()]
    model.compile(SGD(0.001), loss=losses, loss_weights=[0.5, 2.0])
    targets = [y, x[:, :1]] if hk.size() == 1 else (y, x[:, :1])
    history = fit(hk.distribute(model), x, targets, validation_data=(x[:96], [t[:96] for t in targets]))
    return trained(model, {key: history[key] for key in ("loss", "val_loss")})


def sequences():
    """(COUNT, 7) whole numbers from 0, which is masked, to 9: samples differ in how many of them count."""
    x = np.round(digits()[0][:, 20:27] * 9).astype("int64")
    return x, (x + np.arange(7)) % 5


def reader(kind=keras.Model):
    inputs = keras.Input((7,), dtype="int64")
    embedded = keras.layers.Embedding(10, 4, mask_zero=True)(inputs)
    regularized = keras.layers.Dense(5, kernel_regularizer=keras.regularizers.L2(1e-2))
    return kind(inputs, regularized(keras.layers.LSTM(4, return_sequences=True)(embedded)))


def reading(loss, kind=keras.Model, weights=False, **options):
    """``loss`` over masked places; ``weights``: of samples, which differ much from rank to rank."""

    def case():
        model = reader(kind)
        model.compile(SGD(0.1), loss=loss(), **options)
        weight = np.linspace(0.01, 3, COUNT)[:, None] ** 2 if weights else None
        return trained(model, fit(hk.distribute(model), *sequences(), sample_weight=weight))

    return case


def weighted(reduction):
    def case():
        model = network()
        model.compile(SGD(0.05), cross_entropy(reduction=reduction))
        return trained(model, fit(hk.distribute(model), *digits(), sample_weight=np.linspace(0.01, 3, COUNT) ** 2))

    return case


def own_mean(y, found):
    return keras.ops.mean(cross_entropy(reduction=None)(y, found))


def own_sum(y, found):
    return keras.ops.sum(cross_entropy(reduction=None)(y, found)) / 10


def own_root(y, found):
    return keras.ops.sqrt(own_mean(y, found))


def own_pairs(y, found):
    return keras.ops.logsumexp(found @ keras.ops.transpose(found), -1) / 100


def own_losses():
    """Functions that give one number for a batch: a mean, a sum, and what is neither, which is told, as are losses that
    compare the samples of a batch."""
    found = {}
    for loss in (own_mean, own_sum, own_root, own_pairs):
        keras.utils.set_random_seed(3)
        model = network()
        model.compile(SGD(0.02), loss)
        hk.distribute(model)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            history = fit(model, *digits(), epochs=1)
        told = [str(w.message) for w in told if "over samples" in str(w.message)]
        found[f"own/{loss.__name__}"] = np.array(told)
        if loss in (own_mean, own_sum):
            found |= {f"{loss.__name__}/{k}": v for k, v in trained(model, history).items()}
    return found | {f"batches/{k}": v for k, v in own_batches().items()}


def own_batches():
    """The sum in ``train_on_batch``, and scored after it, with ``test_on_batch`` as the first to see it."""
    x, y = digits()
    keras.utils.set_random_seed(3)
    model = network()
    model.compile(SGD(0.02), own_sum)
    hk.distribute(model)
    model.test_on_batch(x[:9], y[:9])
    for start in range(hk.rank() * BATCH, 3 * GLOBAL, GLOBAL):
        model.train_on_batch(x[start : start + BATCH], y[start : start + BATCH])
    return trained(model, score=model.evaluate(x, y, batch_size=BATCH, verbose=0))


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y, batch=BATCH):
        super().__init__()
        self.x, self.y, self.batch = x, y, batch

    def __len__(self):
        return -(-len(self.x) // self.batch)

    def __getitem__(self, i):
        rows = slice(i * self.batch, (i + 1) * self.batch)
        return self.x[rows], self.y[rows]


def py_dataset():
    x, y = digits()
    model = hk.distribute(compiled())
    history = fit(model, Batches(x, y), batch_size=None, validation_data=Batches(x[:99], y[:99]))
    return trained(model, history, predicted=model.predict(Batches(x, y), verbose=0))


def steps():
    """Steps of an epoch, of a validation, of ``evaluate`` and ``predict``: fewer than the data have, and more."""
    x, y = digits()
    few = {"steps_per_epoch": 4, "epochs": 5, "validation_steps": 2, "validation_freq": 2}
    arrays = {"validation_data": (x[:157], y[:157], x[:157, 3])}
    ways = {
        "few": ((x, y), few | arrays),
        "later": ((x, y), few | {"initial_epoch": 2, "validation_data": Batches(x[:157], y[:157])}),
        "many": ((x, y), {"steps_per_epoch": 15, "class_weight": {i: 1 + i / 10 for i in range(10)}}),
        "no batch_size": ((x, y), {"steps_per_epoch": 7, "validation_steps": 3, "batch_size": None} | arrays),
        "sequence": ((Batches(x, y),), few | {"batch_size": None}),
    }
    if TENSORFLOW:
        import tensorflow as tf

        stream = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda *sample: True).batch(BATCH)
        ways["stream"] = ((stream,), few | {"batch_size": None, "validation_data": stream})
        endless = {"batch_size": None, "validation_data": stream.repeat(), "epochs": 2}
        ways["repeated"] = ((stream.repeat(),), few | endless)
    ways["loader"] = ((torch_loader(COUNT),), few | {"batch_size": None, "validation_data": torch_loader(157)})
    found = {}
    for name, (given, options) in ways.items():
        keras.utils.set_random_seed(3)
        model = hk.distribute(compiled())
        found |= {f"{name} {k}": v for k, v in trained(model, fit(model, *given, **options)).items()}
    for name, given in {"arrays": (x, y), "sequence": (Batches(x, y),)}.items():
        options = {"steps": 3, "verbose": 0} | ({"batch_size": BATCH} if name == "arrays" else {})
        found[f"{name} score"] = np.asarray(model.evaluate(*given, **options))
        found[f"{name} predicted"] = model.predict(given[0], **options)
    return found


def masked_scores():
    """Losses whose value depends on where batches are cut, in evaluation: masked and weighted means, sums."""
    x, y = sequences()
    weight = np.repeat(np.linspace(0.01, 3, COUNT)[:, None] ** 2, 7, 1)
    losses = {
        "mean": cross_entropy,
        "sum": lambda: cross_entropy(reduction="sum"),
        "weighted": lambda: cross_entropy(reduction="mean_with_sample_weight"),
        "own": lambda: lambda y, found: keras.ops.sum(cross_entropy(reduction=None)(y, found)) / 10,
    }
    scored = {
        "mean": ["arrays", "few", "fewer", "sequence", "dataset", "stream"],
        "sum": ["arrays", "few", "stream"],
        "weighted": ["arrays"],
        "own": ["arrays", "sequence"],
    }
    found = {}
    for name, loss in losses.items():
        keras.utils.set_random_seed(3)
        model = reader()
        model.compile(SGD(0.01), loss=loss(), metrics=["accuracy"])
        hk.distribute(model)
        weighted = name in ("mean", "weighted")
        given = {
            "arrays": (x, y, *([weight] if weighted else [])),
            "few": (x[:60], y[:60]),
            "fewer": (x[:5], y[:5]),
            "sequence": (Batches(x[:157], y[:157]),),
        }
        if TENSORFLOW:
            import tensorflow as tf

            slices = tf.data.Dataset.from_tensor_slices((x[:157], y[:157]))
            given["dataset"] = (slices.batch(BATCH),)
            given["stream"] = (slices.filter(lambda *sample: True).batch(BATCH),)
        for kind in scored[name]:
            if kind not in given:  # Keras on PyTorch
                continue
            data = given[kind]
            options = {"batch_size": BATCH, "sample_weight": data[2] if len(data) > 2 else None}
            options = options if kind in ("arrays", "few", "fewer") else {}
            found[f"{name} {kind}"] = np.asarray(model.evaluate(*data[:2], verbose=0, **options))
        history = fit(model, x, y, epochs=2, validation_data=given["arrays"], validation_freq=[2])
        found |= {f"{name} {k}": np.asarray(v) for k, v in history.items()}
    return found


def own_error(y, found):
    """A number for a whole batch, as many scripts have it."""
    return keras.ops.mean(keras.ops.abs(keras.ops.cast(y, found.dtype) - keras.ops.mean(found, -1)))


def outputs():
    """All that ``history`` and ``evaluate`` say of several outputs: their losses, metrics and weighted metrics."""
    x, y = digits()
    found = {}
    weight = np.linspace(0.1, 2, COUNT) ** 2

    def heads(structure, kind=keras.Model):
        inputs = keras.Input((64,))
        hidden = keras.layers.Dense(16, "tanh", kernel_regularizer=keras.regularizers.L2(1e-2))(inputs)
        a, b = keras.layers.Dense(10, name="a")(hidden), keras.layers.Dense(1, name="b")(hidden)
        return kind(inputs, structure(a=a, b=b))

    def texts(structure):
        inputs = keras.Input((7,), dtype="int64")
        hidden = keras.layers.LSTM(4, return_sequences=True)(keras.layers.Embedding(10, 4, mask_zero=True)(inputs))
        return keras.Model(inputs, structure(a=keras.layers.Dense(5, name="a")(hidden), b=hidden[:, -1]))

    def pair(a, b):
        return [a, b]

    both = {"a": y, "b": x[:, 30:31]}
    by_name = {
        "loss": {"a": cross_entropy(), "b": "mse"},
        "loss_weights": {"a": 0.5, "b": 2.0},
        "metrics": {"a": ["accuracy", own_error], "b": "mae"},
        "weighted_metrics": {"a": "accuracy", "b": "mse"},
    }
    in_order = {"loss": [cross_entropy(reduction="sum"), keras.losses.Huber()], "metrics": [["accuracy"], ["mae"]]}
    words, tags = sequences()
    masked = {"loss": [cross_entropy(), "mae"], "metrics": [["accuracy"], ["mse"]], "loss_weights": [1.0, 0.3]}
    ways = {
        "dict": (heads(dict), by_name, x, both, {"a": weight, "b": weight[::-1]}),
        "list": (heads(pair), in_order, x, [y, x[:, 30:31]], None),
        "one": (
            heads(pair),
            {"loss": "mse", "weighted_metrics": [["mae"], ["mae"]]},
            x,
            [x[:, :10], x[:, 30:31]],
            weight,
        ),
        "masked": (texts(pair), masked, words, [tags, x[:, :4]], None),
        "eager": (heads(dict), by_name | {"run_eagerly": True}, x, both, None),
        "single": (network(), {"loss": cross_entropy(), "metrics": [own_error, "accuracy"]}, x, y, None),
    }
    if TENSORFLOW:
        ways["execution"] = (heads(dict), by_name | {"steps_per_execution": 3}, x, both, None)
        ways["stream"] = (heads(dict), by_name, x, both, None)
    for name, (model, options, given, targets, weights) in ways.items():
        keras.utils.set_random_seed(3)
        model.compile(SGD(0.01), **options)
        hk.distribute(model)

        def some(rows, given=given, targets=targets, weights=weights):
            parts = (given, targets) if weights is None else (given, targets, weights)
            return keras.tree.map_structure(lambda a: a[rows], parts)

        chosen = {"validation_data": some(slice(0, 157)), "class_weight": None}
        if name == "single":
            chosen["class_weight"] = {k: 1 + k / 10 for k in range(10)}
        if name == "stream":
            import tensorflow as tf

            def stream(count):
                return tf.data.Dataset.from_tensor_slices(some(slice(0, count))).batch(BATCH)

            history = fit(model, stream(COUNT), batch_size=None, validation_data=stream(157))
        else:
            history = fit(model, *some(slice(None))[:2], sample_weight=weights, **chosen)
        found |= {f"{name} {k}": np.asarray(v) for k, v in history.items()}
        x_y_weight = (*some(slice(0, 101)), None)[:3]
        score = model.evaluate(*x_y_weight[:2], BATCH, 0, x_y_weight[2], return_dict=True)
        found |= {f"{name} score {k}": np.asarray(v) for k, v in score.items()}
        found[f"{name} score"] = np.asarray(model.evaluate(*x_y_weight[:2], BATCH, 0))
        found |= {f"{name} {k}": v for k, v in trained(model).items()}
    return found


class Dense2d(keras.layers.Layer):
    """A RaggedTensor's rows, padded."""

    def call(self, x):
        return x.to_tensor() if hasattr(x, "ragged_rank") else x

    def compute_output_spec(self, x):
        return keras.KerasTensor((x.shape[0], None), x.dtype)


def lengths():
    """Texts of different lengths: padded batches, with a mask and without, TensorFlow's texts, ragged rows."""
    import tensorflow as tf

    x, y = digits()
    rows = [1 + np.round(image[20 : 23 + k % 7] * 9).astype("int64") for k, image in enumerate(x)]
    tags = [row % 5 for row in rows]
    tokens, words = keras.Input((None,), dtype="int64"), keras.Input((), dtype="string")
    vectors = keras.layers.TextVectorization(vocabulary=[f"w{k}" for k in range(1, 11)])

    def padded(count, targets):
        spec = tf.TensorSpec([None], tf.int64), tf.TensorSpec([None] * targets[0].ndim, tf.int64)
        pairs = tf.data.Dataset.from_generator(lambda: zip(rows[:count], targets, strict=False), output_signature=spec)
        return pairs.apply(tf.data.experimental.assert_cardinality(count)).padded_batch(BATCH)

    def pooled(inputs, ids, **embedding):
        hidden = keras.layers.Embedding(14, 4, **embedding)(ids)
        pool = keras.layers.GlobalAveragePooling1D() if embedding else keras.layers.GlobalMaxPooling1D()
        return keras.Model(inputs, keras.layers.Dense(10)(pool(hidden)))

    masked = keras.layers.LSTM(4, return_sequences=True)(keras.layers.Embedding(12, 4, mask_zero=True)(tokens))
    ragged = keras.Input((None,), ragged=True, dtype="int64")
    models = {
        "masked": keras.Model(tokens, keras.layers.Dense(5)(masked)),
        "padded": pooled(tokens, tokens),
        "texts": pooled(words, vectors(words), mask_zero=True),  # the layer pads what it gets
        "ragged": pooled(ragged, Dense2d()(ragged), mask_zero=True),
        "stream": pooled(tokens, tokens),
    }
    texts = tf.constant([" ".join(f"w{k}" for k in row) for row in rows])
    given = {
        "masked": lambda count: (padded(count, tags),),
        "padded": lambda count: (padded(count, y),),
        "texts": lambda count: (texts[:count], y[:count]),
        "ragged": lambda count: (tf.ragged.constant(rows)[:count], y[:count]),
        "stream": lambda count: (padded(count, y).filter(lambda *batch: True),),
    }
    found = {}
    for name, model in models.items():
        keras.utils.set_random_seed(3)
        hk.distribute(compiled(model))  # Keras alone squares each word's part of a gradient in Adam, not their sum
        size = BATCH if name in ("texts", "ragged") else None
        some = given[name](157)
        validation = some[0] if len(some) == 1 else some
        history = fit(model, *given[name](COUNT), batch_size=size, validation_data=validation)
        found |= {f"{name} {k}": v for k, v in trained(model, history).items()}
        found[f"{name} score"] = np.array(model.evaluate(*given[name](101), batch_size=size, verbose=0))
        if name != "masked":
            found[f"{name} predicted"] = model.predict(given[name](101)[0], batch_size=size, verbose=0)
    return found


class Scaled(keras.layers.Layer):
    """Holds a number that no configuration tells."""

    factor = None

    def call(self, x):
        return x if self.factor is None else x * self.factor


def states():
    """Layers that ``adapt`` gave a rank's part of the data, vocabularies in each rank's own order: rank 0's holds."""
    x, y = digits()
    part = slice(40 * hk.rank(), 300)
    found, told = {}, []
    inputs = {"image": keras.Input((64,), name="image")}
    normalization, bins = keras.layers.Normalization(), keras.layers.Discretization(num_bins=4)
    noisy = x + 0.3 * np.sin(np.arange(64 * COUNT)).reshape(COUNT, 64)
    normalization.adapt(noisy[part])
    bins.adapt(x[part, 20:28])
    given = {"image": x}
    layers = [normalization(inputs["image"]), keras.ops.cast(bins(inputs["image"]), "float64")]
    if TENSORFLOW:  # Keras on PyTorch takes no texts
        words = [f"w{k}" for k in range(17)]
        words = words[hk.rank() :] + words[: hk.rank()]
        given["text"] = np.array([f"w{a} w{b} w{c}" for a, b, c in (x[:, 20:23] * 16).astype(int)], object)
        given["word"] = np.array([f"w{k}" for k in (x[:, 30] * 16).astype(int)], object)
        inputs |= {name: keras.Input((), dtype="string", name=name) for name in ("text", "word")}
        texts = keras.layers.TextVectorization(output_sequence_length=3, vocabulary=words)
        weighed = keras.layers.TextVectorization(20, output_mode="tf_idf", pad_to_max_tokens=True)
        weighed.adapt(given["text"][part])
        embedded = keras.layers.Embedding(20, 3)(texts(inputs["text"]))
        layers += [keras.layers.Flatten()(embedded), keras.ops.cast(weighed(inputs["text"]), "float64")]
        layers += [keras.layers.StringLookup(vocabulary=words, output_mode="one_hot")(inputs["word"])]
        layers[-1] = keras.ops.cast(layers[-1], "float64")
    model = keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Concatenate()(layers)))
    compiled(model).predict({k: v[:9] for k, v in given.items()}, verbose=0)  # traced with this rank's own state
    for run in ("first", "again"):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            hk.distribute(compiled(model, SGD(0.05)))
        told += [str(w.message) for w in warned if "rank 0's state" in str(w.message)]
        found[f"{run} score"] = np.array(model.evaluate(given, y, batch_size=BATCH, verbose=0))
        found |= {f"{run} {k}": v for k, v in trained(model, fit(model, given, y, epochs=1)).items()}
        found[f"{run} predicted"] = model.predict(given, verbose=0)
        normalization.adapt(noisy[: 99 - hk.rank()])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model.predict(given, verbose=0)  # adapted since
        scaled = Scaled()
        scaled.factor = np.full(64, 1.0 + hk.rank())
        hk.distribute(compiled(keras.Sequential([keras.Input((64,)), scaled, keras.layers.Dense(10)])))
    told += [str(w.message) for w in warned if "rank" in str(w.message)]
    return found | {"own/told": np.array(told)}


class Autoencoder(keras.Model):
    """As in Keras' guide: no call, a step of its own for x alone, several losses and trackers; without noise, so that
    worlds can be compared."""

    def __init__(self):
        super().__init__()
        inputs, code = keras.Input((64,)), keras.Input((4,))
        self.encoder = keras.Model(inputs, [keras.layers.Dense(4)(inputs), keras.layers.Dense(4)(inputs)])
        self.decoder = keras.Model(code, keras.layers.Dense(64, "sigmoid")(code))
        self.built = not TENSORFLOW  # Keras on PyTorch asks for it, as its guide does
        self.trackers = [keras.metrics.Mean(name=name) for name in ("total", "kl")]

    @property
    def metrics(self):
        return self.trackers

    def losses_of(self, x):
        mean, log_variance = self.encoder(x)
        found = self.decoder(mean + keras.ops.exp(log_variance / 2) * keras.ops.sin(mean * 9))
        kl = keras.ops.mean(keras.ops.square(mean) + keras.ops.exp(log_variance) - log_variance - 1)
        return keras.ops.mean(
            keras.ops.sum(keras.losses.binary_crossentropy(x[..., None], found[..., None]), 1)
        ) + kl, kl

    def train_step(self, data):
        assert not isinstance(data, tuple | list), data
        loss, kl = descent(self.optimizer, self.trainable_weights, lambda: self.losses_of(data))
        for tracker, value in zip(self.trackers, (loss, kl), strict=True):
            tracker.update_state(value, sample_weight=keras.ops.shape(data)[0])
        return {tracker.name: tracker.result() for tracker in self.trackers}


def descent(optimizer, weights, losses):
    """A step down the first of ``losses()``; gives all of them."""
    if TENSORFLOW:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            found = losses()
        optimizer.apply(tape.gradient(found[0], weights), weights)
        return found
    import torch

    found = losses()
    gradients = torch.autograd.grad(found[0], [w.value for w in weights])
    with torch.no_grad():
        optimizer.apply(gradients, weights)
    return [x.detach() for x in found]


def vae():
    model = Autoencoder()
    model.compile(keras.optimizers.Adam(0.01))
    return trained(hk.distribute(model), fit(model, digits()[0]))


class Gan(keras.Model):
    """As in Keras' guide: two optimizers, given to a compile of its own; the noise is made from the images."""

    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(WIDE, "tanh"), keras.layers.Dense(1)]
        )
        self.generator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64, "sigmoid")])
        self.built = not TENSORFLOW

    def compile(self, d_optimizer, g_optimizer, loss):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_of = d_optimizer, g_optimizer, loss

    def train_step(self, real):
        noise = keras.ops.sin(real[:, 20:24] * 50)
        fake, count = self.generator(noise), keras.ops.shape(real)[0]
        labels = keras.ops.concatenate([keras.ops.ones((count, 1)), keras.ops.zeros((count, 1))])
        both = keras.ops.stop_gradient(keras.ops.concatenate([fake, real]))
        d = descent(
            self.d_optimizer,
            self.discriminator.trainable_weights,
            lambda: [self.loss_of(labels, self.discriminator(both))],
        )
        g = descent(
            self.g_optimizer,
            self.generator.trainable_weights,
            lambda: [self.loss_of(labels[count:], self.discriminator(self.generator(noise)))],
        )
        return {"d_loss": d[0], "g_loss": g[0]}


def gan(**exchange):
    def case():
        model = Gan()
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9), loss)
        hk.distribute(model, **exchange)
        fit(model, digits()[0])
        return trained(model)

    return case


class Endpoint(keras.layers.Layer):
    """Takes the targets as an input and adds the loss."""

    def call(self, targets, logits):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.add_loss(loss(targets, logits))
        return keras.ops.softmax(logits)


class Late(keras.Model):
    """Has no weights before it has seen a batch: inputs in a dictionary, two outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.hidden = keras.layers.Dense(8, "tanh"), keras.layers.Dense(10)

    def call(self, inputs, training=None):
        found = self.first(inputs["image"])
        return [self.hidden(keras.ops.concatenate([found, inputs["more"][0]], -1)), found]


def unbuilt():
    """Models without weights, x alone, lists of inputs and of targets, in and out of ``fit``."""
    x, y = digits()
    found = {}
    late = Late()
    losses = [keras.losses.SparseCategoricalCrossentropy(from_logits=True), keras.losses.MeanSquaredError()]
    late.compile(SGD(0.1), losses)
    hk.distribute(late)
    inputs, targets = {"image": x, "more": [x[:, :3]]}, [y, x[:, :8]]
    validation = ({"image": x[:96], "more": [x[:96, :3]]}, [y[:96], x[:96, :8]])
    history = fit(late, inputs, targets, validation_data=validation, sample_weight=x[:, 3] + 1)
    # Keras' own figures of each loss are means over batches, however many samples one has.
    found["late"] = trained(late, {name: history[name] for name in ("loss", "val_loss")})
    found["predicted"] = {str(i): p for i, p in enumerate(late.predict(inputs, verbose=0))}
    sequential = keras.Sequential([keras.layers.Dense(16, "tanh"), keras.layers.Dense(10)])
    compiled(sequential)
    hk.distribute(sequential)
    found["score"] = {"": sequential.evaluate(x, y, verbose=0)}  # its first sight of data
    found["sequential"] = trained(sequential, fit(sequential, Batches(x, y), batch_size=None))
    image, label = keras.Input((64,), name="image"), keras.Input((), dtype="int64", name="label")
    ended = keras.Model({"image": image, "label": label}, Endpoint()(label, keras.layers.Dense(10)(image)))
    ended.compile(SGD(0.1))
    hk.distribute(ended)
    found["endpoint"] = trained(ended, fit(ended, {"image": x, "label": y}))
    pair = [keras.Input((64,)), keras.Input((3,))]
    two = keras.Model(pair, keras.layers.Dense(1)(keras.layers.Concatenate()(pair)))
    two.compile(SGD(0.01), "mse")
    hk.distribute(two)
    found["lists"] = trained(two, fit(two, [x, x[:, :3]], y / 10, validation_split=0.2))
    return {f"{name} {key}": np.asarray(value) for name, case in found.items() for key, value in case.items()}


class Shuffled(Batches):
    """Shuffles itself, as is usual, and augments what it gives."""

    def __init__(self, x, y, rng=np.random, noise=False):
        super().__init__(x, y)
        self.rng, self.noise, self.order = rng, noise, np.arange(len(x))

    def __getitem__(self, i):
        rows = self.order[i * self.batch : (i + 1) * self.batch]
        noise = [random.random(), np.random.random()] if self.noise else []
        return self.x[rows], self.y[rows], *([np.tile(noise, (len(rows), 1))] if self.noise else [])

    def on_epoch_end(self):
        self.rng.shuffle(self.order)


def self_shuffled():
    """With seeds it is the order that one process has."""
    model = hk.distribute(compiled())
    return trained(model, fit(model, Shuffled(*digits()), batch_size=None, epochs=3))


class Drawing(keras.Model):
    """A step that tells what it got and what it draws."""

    def __init__(self, eager):
        super().__init__()
        self.layer, self.own, self.eager = keras.layers.Dense(1), keras.random.SeedGenerator(5), eager
        self.layer.build((None, 1))
        self.built = True

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        ids, *noise = data if isinstance(data, tuple | list) else (data,)
        drawn = [keras.random.normal(()), keras.random.normal((), seed=self.own)]
        if TENSORFLOW:
            import tensorflow as tf

            drawn += [tf.random.normal(())]
        else:
            import torch

            drawn += [torch.randn(())]
        drawn += [random.random(), np.random.random()] if self.eager else []
        drawn += [x[0, i] for x in noise if len(x.shape) == 2 for i in range(2)]
        drawn = keras.ops.stack([keras.ops.cast(x, "float64") for x in drawn])
        ids = keras.ops.concatenate([keras.ops.cast(ids, "float64"), -keras.ops.ones((BATCH,), "float64")])[:BATCH]
        return {"ids": ids, "drawn": drawn}  # of one length on all ranks, as logs are averaged


class Told(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append({k: np.ravel(keras.ops.convert_to_numpy(v)) for k, v in logs.items()})


def draws():
    """[what a fit's steps got, what they drew] of this rank, with seeds and without."""
    found = {}
    ids = np.arange(DRAWN, dtype="float64")
    given = {
        "sequence": lambda: Shuffled(ids, ids, noise=run != "other seeds"),
        "arrays": lambda: ids,
        "divided": lambda: Batches(ids, ids),
    }
    if TENSORFLOW:
        import tensorflow as tf

        def shuffling():
            yield from np.random.permutation(ids)

        spec = tf.TensorSpec((), tf.float64)
        counted = tf.data.experimental.assert_cardinality(DRAWN)
        given["dataset"] = lambda: tf.data.Dataset.from_tensor_slices(ids).shuffle(99).batch(BATCH)
        given["generator"] = lambda: (
            tf.data.Dataset.from_generator(shuffling, output_signature=spec).apply(counted).batch(BATCH)
        )
    for run in ("first", "again", "other seeds"):
        for kind, make in given.items() if run != "other seeds" else [("sequence", given["sequence"])]:
            keras.utils.clear_session()
            keras.utils.set_random_seed(7)
            if run == "other seeds":
                random.seed(hk.rank())
                np.random.seed(hk.rank())
            eager, told = kind in ("arrays", "generator"), Told()
            model = Drawing(eager)
            model.compile("sgd", run_eagerly=eager)
            hk.distribute(model, shard=kind != "divided")
            after = []
            for _ in range(2):
                with warnings.catch_warnings(record=True) as warned:
                    model.fit(make(), batch_size=BATCH, epochs=2, verbose=0, callbacks=[told])
                after += [random.random(), np.random.random(), float(keras.random.normal(()))]
            ids_of = np.concatenate([step["ids"] for step in told.steps])
            found[f"own/{run} {kind} ids"] = ids_of[ids_of >= 0]
            found[f"own/{run} {kind} drawn"] = np.concatenate([step["drawn"] for step in told.steps])
            found[f"own/{run} {kind} after"] = np.array(after)
            found[f"own/{run} {kind} told"] = np.array([str(w.message) for w in warned if "eager" in str(w.message)])
    return found


def tf_data():
    import tensorflow as tf

    x, y = digits()
    model = hk.distribute(compiled())
    data = (
        tf.data.Dataset.from_tensor_slices((x, y))
        .shuffle(99, seed=5, reshuffle_each_iteration=False)
        .batch(GLOBAL)
        .rebatch(BATCH)
    )
    data = data.apply(tf.data.experimental.assert_cardinality(-(-COUNT // BATCH)))
    validation = tf.data.Dataset.from_tensor_slices((x[:99], y[:99])).batch(BATCH)
    first = fit(model, data, batch_size=None, epochs=1, validation_data=validation)
    again = fit(model, data.repeat(), batch_size=None, epochs=2, steps_per_epoch=4)
    ids = keras.Input((), dtype="int64")
    words = keras.Model(ids, keras.layers.StringLookup(vocabulary=["a", "\u00e9", "ccc"], invert=True)(ids))
    words.compile("sgd", "mse")
    texts = hk.distribute(words).predict(y[:9] % 4, verbose=0)
    return trained(
        model,
        first | {f"again {k}": v for k, v in again.items()},
        predicted=model.predict(validation, verbose=0),
        lengths=[len(text.decode()) for text in texts],
    )


def torch_loader(count):
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    x, y = digits(count)
    return DataLoader(TensorDataset(torch.tensor(x), torch.tensor(y)), batch_size=BATCH)


def loader():
    """PyTorch's DataLoader, in fit and to be scored."""
    model = hk.distribute(compiled())
    history = fit(model, torch_loader(COUNT), batch_size=None, validation_data=torch_loader(157))
    return trained(model, history, predicted=model.predict(torch_loader(101), verbose=0))


def loop(kind="eager"):
    """A loop of the user's own: two epochs, uneven at the end; the loss of even steps."""

    def case():
        x, y = digits()
        model, optimizer, loss_of, losses = network(), Adam(0.01), cross_entropy(), []
        hk.distribute(model, optimizer)

        def step(x, y):
            found = descent(optimizer, model.trainable_weights, lambda: [loss_of(y, model(x)) + sum(model.losses)])
            return hk.reduce({"loss": found[0], "samples": keras.ops.shape(x)[0]})

        if kind != "eager":
            import tensorflow as tf

            step = tf.function(step)
        if kind == "dataset":
            batches = hk.shard(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
        else:
            batches = hk.shard(x, y, batch_size=BATCH)
            next(iter(batches)) if hk.rank() == 0 else None
        for _ in range(2):
            for part in batches:
                found = step(*part)
                losses.append(float(found["loss"])) if len(part[0]) == BATCH else None
        total = float(hk.reduce(len(losses), op="sum")) / hk.size()
        return trained(model, losses=losses, steps=len(batches) if kind != "dataset" else 0, total=total)

    return case


def main_rank():
    """What rank 0 alone prints and shows, and what it says of a validation that each rank adds up for itself."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        hk.print(hk.size(), "ranks", flush=True)
    hk.loop._unshared.cache_clear()  # cases before may have reduced in a graph
    batches = hk.shard(np.arange(20.0 * hk.size()), batch_size=2)
    bar = hk.tqdm(batches, file=(shown := io.StringIO()))
    assert len(list(bar)) == 10 and hk.is_main() == (hk.rank() == 0)
    told = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        hk.reduce(1.0)
        for _ in range(3):
            told.append(len([w for w in warned if "made no step" in str(w.message)]))
            list(batches)
    return {"own/printed": printed.getvalue(), "own/shown": "10/10" in shown.getvalue(), "own/told": told}


def loop_gan():
    """Two models with an optimizer each, in a loop of the user's own; the noise is a part of the data."""
    x = digits(COUNT)[0]
    generator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64, "sigmoid")])
    discriminator = keras.Sequential([keras.Input((64,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)])
    first, second = Adam(0.01), SGD(0.1, momentum=0.9)
    hk.distribute(generator, first)
    hk.distribute(discriminator, second)
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    def step(real, noise):
        ones = keras.ops.ones((len(real), 1))
        fake = keras.ops.stop_gradient(generator(noise))
        weights = discriminator.trainable_weights
        descent(second, weights, lambda: [loss_of(ones, discriminator(real)) + loss_of(ones * 0, discriminator(fake))])
        descent(first, generator.trainable_weights, lambda: [loss_of(ones, discriminator(generator(noise)))])

    batches = hk.shard(x, np.sin(x[:, 20:24] * 50), batch_size=BATCH, shuffle=False)
    for _ in range(2):
        for real, noise in batches:
            step(real, noise)
    found = {f"generator {k}": v for k, v in trained(generator).items()}
    return found | trained(discriminator)


def batchnorm_and_dropout():
    model = hk.distribute(compiled(network(dropout=0.5, batchnorm=True)))
    history = fit(model, *digits(), validation_data=digits(99), shuffle=True)
    seeds = [
        np.array(keras.ops.convert_to_numpy(v)) for v in model.variables if v.path.endswith("seed_generator_state")
    ]
    found = trained(model, history) | {f"loop {k}": v for k, v in statistics_of_a_loop().items()}
    return {k: v for k, v in found.items() if v.dtype.kind == "f"} | {"own/seed": np.array(seeds[0])}


def statistics_of_a_loop():
    """At the end of a loop of the user's own; rank 0 has gone through the batches alone before."""
    model, optimizer, loss_of = network(batchnorm=True), SGD(0.1), cross_entropy()
    hk.distribute(model, optimizer)
    batches = hk.shard(*digits(), batch_size=BATCH)
    list(batches) if hk.rank() == 0 else None
    batches.set_epoch(0)

    def step(x, y):
        descent(optimizer, model.trainable_weights, lambda: [loss_of(y, model(x, training=True))])

    for x, y in batches:
        step(x, y)
    found = trained(model)
    if TENSORFLOW:
        import tensorflow as tf

        traced = tf.function(step)
        for x, y in hk.shard(tf.data.Dataset.from_tensor_slices(digits()).batch(BATCH)):
            traced(x, y)
        found |= {f"dataset {k}": v for k, v in trained(model).items()}
    return found


def overflow():
    x, y = digits()
    x[60] = np.inf  # of global step 1, on one rank: its gradient is not a number
    model = compiled(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0))
    hk.distribute(model)
    fit(model, x, y, epochs=1)
    scale = float(keras.ops.convert_to_numpy(model.optimizer.dynamic_scale))
    return trained(model, scale=scale, iterations=int(model.optimizer.inner_optimizer.iterations))


def compressed():
    model = hk.distribute(compiled(network(hidden=WIDE)), compression="topk", ratio=0.05)
    return trained(model, fit(model, *digits(), shuffle=True))


def residual():
    """What the gradients ask for is applied or waits in a residual: gradients here do not depend on the weights."""
    x, _ = digits()
    y = np.sin(np.arange(COUNT * WIDE)).reshape(COUNT, WIDE)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(WIDE, use_bias=False)])
    model.compile(SGD(1.0), lambda y, found: keras.ops.sum(y * found, -1))
    hk.distribute(model, compression="topk", ratio=0.05)
    fit(model, x, y)
    (weight,) = model.get_weights()
    if hk.size() == 1:
        return {"asked": weight}
    rank = model.fit.__self__
    (left,) = rank._sum([keras.ops.convert_to_numpy(v) for state in rank.reduction._states for v in state])
    assert np.abs(left).max() > 0.1, np.abs(left).max()
    return {"asked": weight - left.reshape(weight.shape)}


def jit_compile():
    model = compiled(jit_compile=True)
    with warnings.catch_warnings(record=True) as told:
        hk.distribute(model)
    return trained(model, fit(model, *digits())) | {"own/told": np.array([str(w.message) for w in told])}


def saved():
    """What a plain Keras process is to read, and where it is to come from there with another epoch."""
    x, y = digits()
    model = hk.distribute(compiled(optimizer=Adam(0.01)))
    fit(model, x, y)
    predicted = model.predict(x[:101], verbose=0)
    if hk.rank() == 0:  # and the others do not wait for it
        model.save(FOLDER / "saved.keras")
    model.save(FOLDER / "by_all.keras")
    model.save_weights(FOLDER / "by_all.weights.h5")
    if TENSORFLOW:
        model.export(FOLDER / "exported", verbose=False)
    hk.barrier()
    read = keras.saving.load_model(FOLDER / "by_all.keras")
    for own, other in zip(model.get_weights(), read.get_weights(), strict=True):
        np.testing.assert_array_equal(other, own)
    return trained(model, fit(model, x, y, epochs=1), predicted=predicted)


def undivided():
    """Data that the user has divided."""
    x, y = digits(480)
    starts = np.arange(0, 480, GLOBAL) + hk.rank() * BATCH
    model = hk.distribute(compiled(), shard=False)
    mine = (starts[:, None] + np.arange(BATCH)).ravel()
    return trained(model, fit(model, x[mine], y[mine]))


class StopOnOne(keras.callbacks.Callback):
    """A user's own: one rank alone wants to stop, in the third step."""

    def on_train_batch_end(self, batch, logs=None):
        if hk.rank() == hk.size() - 1 and batch == 2:
            self.model.stop_training = True


def callbacks():
    c, folder = keras.callbacks, FOLDER / f"own{hk.size()}.{hk.rank()}"
    x, y = digits()
    model = hk.distribute(compiled())
    chosen = [
        c.EarlyStopping("val_loss", patience=1, min_delta=0.02),
        c.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.2, cooldown=0),
        c.CSVLogger(str(folder / "log.csv")),
        c.ModelCheckpoint(str(folder / "best.keras"), save_best_only=True),
    ]
    if hk.rank() == 0:
        folder.mkdir()
    history = fit(model, x, y, epochs=12, validation_data=digits(157), callbacks=chosen)
    saved = keras.saving.load_model(FOLDER / f"own{hk.size()}.0" / "best.keras") if hk.rank() == 0 else model
    return trained(model, history, epochs=len(history["loss"]), files=sorted(p.name for p in folder.glob("*"))) | {
        "own/class": type(saved.optimizer).__module__
    }


def stops():
    """(steps after a rank's own wish to stop, steps after a NaN on one rank): equal on all ranks, and no hang."""
    found = []
    for extra in (StopOnOne(), keras.callbacks.TerminateOnNaN()):
        x, y = digits()
        if not isinstance(extra, StopOnOne):
            x[GLOBAL - 1] = np.nan  # the last rank's, step 0
        model = hk.distribute(compiled())
        fit(model, x, y, epochs=3, callbacks=[extra])
        found.append(int(model.optimizer.iterations))
    found = {"own/steps" if hk.size() == 1 else "steps": np.array(found)}
    return found | drawn_validation() | (wrapped() if not TENSORFLOW else {})


def drawn_validation():
    """Nobody can divide it, so every rank scores it, and each draws other samples."""
    x, y = digits()

    def drawing():
        while True:
            rows = np.random.randint(0, COUNT, 9)
            yield x[rows], y[rows]

    keras.utils.set_random_seed(3)
    model = hk.distribute(compiled(optimizer=SGD(0.5)))
    best = keras.callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True)
    options = {"validation_data": drawing(), "validation_steps": 2, "callbacks": [best]}
    found = trained(model, fit(model, x, y, epochs=6, **options))
    return {f"drawn {k}": v for k, v in found.items()}


def wrapped():
    """A PyTorch module within a Keras model: what it gathers is no variable of Keras."""
    import torch

    norm = torch.nn.BatchNorm1d(64).double()
    norm.running_mean += hk.rank()
    model = keras.Sequential([keras.Input((64,)), keras.layers.TorchModuleWrapper(norm), keras.layers.Dense(10)])
    hk.distribute(compiled(model))
    fit(model, *digits(), epochs=1)
    return {"wrapped": norm.running_mean.numpy(), "wrapped predicted": model.predict(digits(9)[0], verbose=0)}


def backup():
    """Two fits as two processes would run them: the second restores what rank 0 of the first left."""
    x, y = digits()
    folder = FOLDER / f"backup{hk.size()}.{hk.rank()}"
    model = hk.distribute(compiled(optimizer=keras.optimizers.Adam(0.01)))
    fit(model, x, y, epochs=2, callbacks=[keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)])
    other = hk.distribute(compiled(optimizer=keras.optimizers.Adam(0.01)))
    history = fit(other, x, y, epochs=3, callbacks=[keras.callbacks.BackupAndRestore(folder)])
    return trained(other, history, epochs=len(history["loss"]))


class Look(keras.callbacks.Callback):
    """Looks at a data set on one rank alone, after the first epoch."""

    def __init__(self, data):
        super().__init__()
        self.data = data

    def on_epoch_end(self, epoch, logs=None):
        if hk.rank() == 1 and epoch == 0:
            next(iter(self.data))


class Lengths(keras.utils.PyDataset):
    """Rows of 4 places, then of 8."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return np.ones((6, 4 if i < 2 else 8, 3))


def refused():
    """What each misuse is answered with, on this rank; the world goes on afterwards."""
    x, y = digits()
    shared = keras.optimizers.SGD(0.1)
    hk.distribute(compiled(optimizer=shared))
    two = hk.distribute(compiled())
    anew, again = hk.distribute(compiled()), hk.distribute(compiled())
    compiled(anew, anew.optimizer)
    compiled(again)
    divided = hk.distribute(compiled(), shard=False)
    unbuilt_alone = hk.distribute(compiled(keras.Sequential([keras.layers.Dense(10)])))
    frozen = network()
    frozen.layers[0].trainable = False
    frozen = hk.distribute(compiled(frozen))
    frozen.layers[0].trainable = True
    any_length = keras.Input((None, 3))
    long = hk.distribute(compiled(keras.Model(any_length, keras.layers.Dense(2)(any_length))))
    went_on = compiled()
    went_on.train_on_batch(x[:BATCH], y[:BATCH])
    pairs = keras.Input((4, 16), batch_size=10)
    keeps = keras.Model(pairs, keras.layers.Dense(10)(keras.layers.LSTM(4, stateful=True)(pairs)))
    hk.distribute(compiled(keeps))
    untaught = keras.layers.StringLookup()
    if hk.rank():
        untaught.adapt(np.array(["a", "b"]))
    scheduled = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))

    def look(validates):
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(COUNT, seed=5).batch(BATCH)
        given = (x, y) if validates else (data,)
        size = {"batch_size": BATCH if validates else None, "validation_data": data if validates else None}
        fit(hk.distribute(compiled()), *given, epochs=3, callbacks=[Look(data)], **size)

    misuses = {
        "twice": lambda: hk.distribute(two),
        "not compiled": lambda: hk.distribute(network()),
        "not built": lambda: unbuilt_alone.optimizer.apply([], []),
        "compiled again": lambda: fit(anew, x, y),
        "compiled again, then a batch": lambda: again.train_on_batch(x[:BATCH], y[:BATCH]),
        "other lengths predicted": lambda: long.predict(Lengths(), verbose=0),
        "other calls": lambda: fit(two, x, y) if hk.rank() else two.evaluate(x, y, verbose=0),
        "shared optimizer": lambda: hk.distribute(compiled(optimizer=shared)),
        "unseen variable": lambda: fit(frozen, x, y),
        "no reduction": lambda: hk.distribute(compiled(loss=cross_entropy(reduction=None))),
        "schedule": lambda: hk.distribute(compiled(optimizer=scheduled), lr_scaling="linear"),
        "trained before": lambda: hk.distribute(went_on, lr_scaling="linear"),
        "stateful": lambda: keeps.predict(x.reshape(-1, 4, 16), batch_size=10, verbose=0),
        "no such compression": lambda: hk.distribute(compiled(), compression="zip"),
        "ratio beyond 1": lambda: hk.distribute(compiled(), compression="topk", ratio=2.0),
        "few samples": lambda: fit(two, x[: hk.size() - 1], y[: hk.size() - 1]),
        "other data on a rank": lambda: fit(two, x + hk.rank(), y),
        "unseeded data": lambda: fit(two, np.random.default_rng().permuted(x, axis=0), y),
        "unseeded batches": lambda: fit(two, Batches(np.random.default_rng().permuted(x, axis=0), y), batch_size=None),
        "unseeded data to score": lambda: two.evaluate(np.random.default_rng().permuted(x, axis=0), y, verbose=0),
        "own unseeded order": lambda: fit(two, Shuffled(x, y, np.random.default_rng()), batch_size=None),
        "other batch_size on a rank": lambda: fit(two, x, y, batch_size=BATCH + hk.rank()),
        "other batches on a rank": lambda: fit(two, Batches(x, y, BATCH + hk.rank()), batch_size=None),
        "other network on a rank": lambda: hk.distribute(
            compiled(keras.Sequential([keras.Input((64,)), keras.layers.Dense(10 + hk.rank())]))
        ),
        "other settings of a layer": lambda: hk.distribute(
            compiled(keras.Sequential([keras.Input((64,)), keras.layers.Rescaling(hk.rank()), keras.layers.Dense(10)]))
        ),
        "a vocabulary on rank 1 alone": lambda: hk.distribute(
            compiled(keras.Sequential([keras.Input((7,), dtype="string"), untaught, keras.layers.Embedding(9, 2)]))
        ),
        "unequal steps": lambda: fit(divided, x[: 200 + 99 * hk.rank()], y[: 200 + 99 * hk.rank()]),
        "a look at shuffled data": lambda: look(False),
        "a look at shuffled data to score": lambda: look(True),
        "generator": lambda: fit(two, ((x[:9], y[:9]) for _ in range(5)), batch_size=None),
    }
    told = {}
    for name, misuse in misuses.items():
        try:
            misuse()
        except TrainError as error:
            told[name] = f"{error.exit_code} {error}"
    return {f"own/{name}": np.array(text) for name, text in told.items()}


class OwnPlateau(keras.callbacks.Callback):
    """A user's own: goes by what this rank alone has seen."""

    def on_epoch_end(self, epoch, logs=None):
        if hk.rank() == 1 and epoch == 1:
            self.model.optimizer.learning_rate = 0.025


def apart():
    """What ranks are told whose weights or learning rates are not the same."""
    x, y = digits()
    models = [hk.distribute(compiled()) for _ in range(4)]

    def on_one(model):
        if hk.rank() == 1:
            model.layers[-1].kernel.assign_add(np.full((32, 10), 1e-7))

    def batches(model, count, **options):
        for _ in range(count):
            model.train_on_batch(x[:BATCH], y[:BATCH])

    def loop(model):
        on_one(model)
        batches(model, 10)

    def rate(model):
        model.optimizer.learning_rate = 0.1 + 0.1 * hk.rank()
        batches(model, 2)

    def scored(model):
        on_one(model)
        model.predict(x, verbose=0)

    told = {}

    def callback(model):
        fit(model, x, y, epochs=9, callbacks=[OwnPlateau()])

    for name, misuse in {"callback": callback, "loop": loop, "rate": rate, "scored": scored}.items():
        try:
            misuse(models.pop())
        except TrainError as error:
            told[name] = f"{error.exit_code} {error}"
    return {f"own/{name}": np.array(text) for name, text in told.items()}


def slow():
    """What rank 0 tells where rank 1 takes 20 ms longer than the others, from step 20 on."""
    steps = 0

    def wait(batch, logs=None):
        nonlocal steps
        steps += 1
        time.sleep(0.02 if hk.rank() == 1 and steps >= 20 else 0)

    api._slow.cache_clear()
    own, meeting.MOST_SECONDS = meeting.MOST_SECONDS, 0.04
    model = hk.distribute(compiled())
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=wait)
    with contextlib.redirect_stderr(told := io.StringIO()):
        fit(model, *digits(), epochs=1, batch_size=5, callbacks=[callback])
    meeting.MOST_SECONDS = own
    return {"own/told": np.array(told.getvalue())}


class Fixed(keras.layers.Layer):
    """Weights that are not trained: ``fixed``, whose sum over the ranks is no number of 32 bits, and ``own``."""

    def build(self, shape):
        self.fixed = self.add_weight(shape=(99,), dtype="float32", trainable=False)
        self.own = self.add_weight(shape=(2,), initializer="ones", trainable=False)
        limit = np.finfo("float32").max
        self.fixed.assign(np.append(np.random.default_rng(0).normal(size=97), [-limit, limit]).astype("float32"))

    def call(self, x):
        return x


def frozen():
    """What is equal on all ranks keeps its bits and is not sent at an epoch's end; what differs becomes its mean."""
    model = keras.Sequential([keras.Input((64,)), Fixed(), keras.layers.Dense(10)])
    hk.distribute(compiled(model))
    fixed, own = model.layers[0].fixed, model.layers[0].own
    before = keras.ops.convert_to_numpy(fixed).copy()
    fit(model, *digits(), epochs=1)
    own.assign_add([3.0 * hk.rank(), 0.0])
    model.predict(digits()[0], verbose=0)
    return trained(model) | {"same": np.array_equal(keras.ops.convert_to_numpy(fixed), before)}


def fine_tuning():
    """Freeze, fit; unfreeze, compile, distribute, fit; another loss for the same optimizer, fit."""
    model = network()
    model.layers[0].trainable = False
    hk.distribute(compiled(model, SGD(0.1)))
    first = fit(model, *digits(), epochs=1)
    model.layers[0].trainable = True
    hk.distribute(compiled(model, Adam(0.01)))
    second = fit(model, *digits(), validation_data=digits(99))
    weights = trained(model)
    hk.distribute(compiled(model, model.optimizer, cross_entropy(reduction="sum")))
    model.optimizer.learning_rate = 1e-4
    third = fit(model, *digits(), epochs=1)
    found = trained(model, {f"{k}{n}": v for n, fitted in enumerate((first, second, third)) for k, v in fitted.items()})
    return (
        found | {f"second/{k}": v for k, v in weights.items()} | {"accuracy": model.evaluate(*digits(), verbose=0)[1]}
    )


SGD, Adam, AdamW = keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW
CASES = {
    "arrays": arrays,
    "accumulation": simple(lambda: SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)),
    "clipnorm": simple(lambda: SGD(0.1, clipnorm=0.05)),
    "global_clipnorm": simple(lambda: SGD(0.1, global_clipnorm=0.05, weight_decay=0.01)),
    "clipvalue_ema": simple(lambda: Adam(0.01, clipvalue=0.002, use_ema=True, ema_momentum=0.9)),
    "adamw": simple(lambda: AdamW(0.01, weight_decay=0.01)),
    "adam_accumulation": simple(lambda: Adam(0.01, gradient_accumulation_steps=2)),
    "nothing_left_out": simple(lambda: Adam(0.01), WIDE, {"compression": "topk", "ratio": 1.0}),
    "run_eagerly": simple(lambda: SGD(0.1), run_eagerly=True),
    "own_step": own_step,
    "own_logs": own_logs,
    "rates": rates,
    "two_inputs": two_inputs,
    "class_weight": class_weight,
    "py_dataset": py_dataset,
    "steps": steps,
    "masked_scores": masked_scores,
    "self_shuffled": self_shuffled,
    "states": states,
    "outputs": outputs,
    "draws": draws,
    "vae": vae,
    "gan": gan(),
    "gan_compressed": gan(compression="topk", ratio=0.05),
    "unbuilt": unbuilt,
    "overflow": overflow,
    "undivided": undivided,
    "callbacks": callbacks,
    "backup": backup,
    "stops": stops,
    "batchnorm_and_dropout": batchnorm_and_dropout,
    "compressed": compressed,
    "residual": residual,
    "saved": saved,
    "fine_tuning": fine_tuning,
    "frozen": frozen,
    "slow": slow,
    "summed": summed,
    "masked": reading(cross_entropy, weights=True),
    "masked_own_step": reading(cross_entropy, OwnStep),
    "masked_sum": reading(lambda: cross_entropy(reduction="sum")),
    "masked_weighted_mean": reading(lambda: cross_entropy(reduction="mean_with_sample_weight"), weights=True),
    "weighted_mean": weighted("mean_with_sample_weight"),
    "weighted_batch": weighted("sum_over_batch_size"),
    "own_losses": own_losses,
    "loader": loader,
    "loop": loop(),
    "loop_gan": loop_gan,
    "main_rank": main_rank,
}
if hk.size() > 1:
    CASES |= {"refused": refused, "apart": apart}
if TENSORFLOW:
    CASES |= {
        "tf_data": tf_data,
        "lengths": lengths,
        "jit_compile": jit_compile,
        "loop_graph": loop("graph"),
        "loop_dataset": loop("dataset"),
        "masked_steps_per_execution": reading(cross_entropy, steps_per_execution=3),
        "steps_per_execution": simple(lambda: SGD(0.1, momentum=0.9), steps_per_execution=3),
    }

if __name__ == "__main__":
    keras.config.set_floatx("float64")
    gc.freeze()  # clear_session collects, a third of a second for what the imports left
    for name in sys.argv[2:]:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        hk.loop._iterations.clear()  # steps of the cases before, which are not the same ones in each world
        with counted(f"Keras scripts on {keras.backend.backend()}", name):
            np.savez(FOLDER / f"{name}.{hk.size()}.{hk.rank()}.npz", **CASES[name]())
        if hk.rank() == 0:
            print("done", name, flush=True)
