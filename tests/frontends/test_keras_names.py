"""``model.init_from`` with files of Keras, which numbers the layers of a class through all models of a process."""

from __future__ import annotations

import numpy as np
import pytest

import hvd_train
from hvd_train.checkpoint.store import newest
from hvd_train.errors import ConfigError
from tests.cli.test_fine_tuning import NUMBERED
from tests.update.test_parameter_groups import DATA


def dense(units=8, **keys):
    import keras

    return keras.layers.Dense(units, **keys)


def sequential(input_shape, num_classes):
    import keras

    return keras.Sequential([keras.Input(input_shape), *(dense() for _ in range(3)), dense(num_classes)])


def shorter(input_shape, num_classes):
    import keras

    return keras.Sequential([keras.Input(input_shape), dense(), dense(), dense(num_classes)])


def functional(input_shape, num_classes):
    import keras

    x = inputs = keras.Input(input_shape)
    for _ in range(3):
        x = dense()(x)
    return keras.Model(inputs, dense(num_classes)(x))


def subclassed(input_shape, num_classes):
    import keras

    class Mine(keras.Model):
        def __init__(self):
            super().__init__()
            self.c, self.a, self.b = dense(), dense(), dense()
            self.head = dense(num_classes)
            self.scale = self.add_weight(shape=(8,), initializer="ones", name="scale")

        def call(self, x):
            return self.head(self.a(self.b(self.c(x))) * self.scale)

    return Mine()


def nested(input_shape, num_classes):
    """The inner model's layers are numbered first, and those that attention is made of have one name each."""
    import keras

    inner = keras.Sequential([keras.Input((2, 8)), dense(), dense()])
    x = inputs = keras.Input(input_shape)
    x = keras.layers.Reshape((2, 8))(dense(16)(x))
    for _ in range(2):
        x = inner(x) + keras.layers.MultiHeadAttention(2, 4)(x, x)
    x = keras.layers.Bidirectional(keras.layers.SimpleRNN(4))(x)
    return keras.Model(inputs, dense(num_classes)(x))


def encoders(input_shape, num_classes, order=("left", "right"), more=True):
    """The layers within have one name in both, or numbers of Keras."""
    import keras

    x = inputs = keras.Input(input_shape)
    for name in order:
        x = keras.Sequential([keras.Input((6,)), dense(6, name="proj"), *[dense(6)] * more], name=name)(x)
    return keras.Model(inputs, dense(num_classes, name="head")(x))


def made(build, before=0, classes=3):
    """Return a model as a notebook has it that made ``before`` layers of each class before, with random weights."""
    import keras

    keras.backend.clear_session()
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    for _ in range(before):
        dense(), keras.Sequential(), keras.layers.MultiHeadAttention(1, 1), keras.layers.SimpleRNN(1)
    model = build((6,), classes)
    model(np.zeros((2, 6), np.float32))
    rng = np.random.default_rng(1)
    model.set_weights([rng.normal(size=x.shape) for x in model.get_weights()])
    return model


def first_weights(folder, build, path, **keys):
    return trained(folder, build, {"init_from": {"path": str(path), **keys}})


def trained(folder, model, keys=()):
    config = {"framework": "tensorflow", "tensorboard": False, "run_dir": str(folder), "global_batch_size": 60}
    config |= {"max_epochs": 1, "optim": {"lr": 1e-30}, "model": dict(keys)}
    hvd_train.fit(config, model=model, data=DATA)
    tree = newest(folder / "checkpoints", print).tree
    return {key.partition("/")[2]: x for key, x in tree.items() if key.startswith("weights/")}


def check_equal(weights, model):
    """Every weight here is that which Keras' ``load_weights`` gives."""
    assert len(weights) == len(model.weights)
    for v in model.weights:
        assert (weights[v.path.replace("/", ".")] == v.numpy()).all(), v.path


@pytest.mark.parametrize(
    ("build", "before"), [(sequential, 0), (sequential, 1), (functional, 1), (subclassed, 1), (nested, 1)]
)
def test_layers_are_paired_as_keras_pairs_them(tmp_path, capsys, build, before):
    source = made(build, before)
    source.compile("adam", "mse")
    source.fit(np.zeros((2, 6)), np.zeros((2, 3)), verbose=0)  # slots of an optimizer are in the file, too
    source.save_weights(tmp_path / "a.weights.h5")
    weights = first_weights(tmp_path / "run", build, tmp_path / "a.weights.h5")
    right = made(build)
    right.load_weights(tmp_path / "a.weights.h5")
    check_equal(weights, right)
    printed = capsys.readouterr().out
    assert "kept as drawn" not in printed and "left in the file" not in printed
    assert ("numbered the file's layers after others: dense_" in printed) == bool(before)


def test_an_archive_and_a_new_head(tmp_path, capsys):
    """The head of another size stays as it is; the layers before it are found after other models, as the page says."""
    source = made(shorter, 1, classes=5)
    source.save(tmp_path / "a.keras")
    weights = first_weights(tmp_path / "run", shorter, tmp_path / "a.keras")
    for k, layer in enumerate(source.layers[:2]):
        name = "dense" + f"_{k}" * bool(k)
        assert (weights[f"sequential.{name}.kernel"] == layer.kernel.numpy()).all(), name
    printed = capsys.readouterr().out
    assert NUMBERED in printed and "1 rank, global batch 60, 1 step per epoch\n" in printed
    assert "  left in the file: dense_3.0 ((8, 5) in the file, (8, 3) in the model)\n" in printed


@pytest.mark.parametrize("more", [False, True])
def test_names_of_the_user_stand_above_places(tmp_path, more):
    """Two encoders of one shape, which the model here uses in another order; a number within is then another's."""

    def turned(input_shape, num_classes):
        return encoders(input_shape, num_classes, ("right", "left"), more)

    source = made(lambda *shape: encoders(*shape, more=more))
    source.save_weights(tmp_path / "a.weights.h5")
    rename = {}
    if more:
        with pytest.raises(ConfigError, match="dense of the file stands where dense_1 does here, and") as caught:
            first_weights(tmp_path / "run", turned, tmp_path / "a.weights.h5")
        rename = eval(str(caught.value).partition("model.init_from.rename: ")[2])
    weights = first_weights(tmp_path / "run", turned, tmp_path / "a.weights.h5", rename=rename)
    names = {"left.dense": "left.dense_1", "right.dense_1": "right.dense"}
    for v in source.weights:
        layer, _, last = v.path.replace("/", ".").rpartition(".")
        assert (weights[f"{names.get(layer, layer)}.{last}"] == v.numpy()).all(), v.path


def test_numbers_and_places_that_differ_are_refused_with_a_cure(tmp_path):
    """Another model's layer was made among those of the file, and the model here has one more."""
    import keras

    def source(input_shape, num_classes):
        layers = [dense(), dense(), dense(), dense(num_classes)]
        return keras.Sequential([keras.Input(input_shape), layers[0], *layers[2:]])

    source = made(source)
    source.save_weights(tmp_path / "a.weights.h5")
    with pytest.raises(ConfigError, match="dense_2 of the file stands where dense_1 does here, and") as caught:
        first_weights(tmp_path / "run", sequential, tmp_path / "a.weights.h5")
    assert "\n" not in str(caught.value)
    cure = eval(str(caught.value).partition("model.init_from.rename: ")[2])
    assert cure == {"dense.*": "dense.*", "dense_2.*": "dense_1.*", "dense_3.*": "dense_2.*"}
    cure["dense_3.*"] = "dense_3.*"  # the user knows better
    weights = first_weights(tmp_path / "run", sequential, tmp_path / "a.weights.h5", rename=cure)
    for name, layer in zip(("dense", "dense_1", "dense_3"), source.layers, strict=True):
        assert (weights[f"sequential.{name}.kernel"] == layer.kernel.numpy()).all(), name


def test_checkpoints_of_built_models(tmp_path, capsys):
    """A model of a notebook has the numbers that it got there, also in the checkpoints of its run."""
    built = made(sequential, 1)
    source = trained(tmp_path / "before", built)
    for name, model in (("function", sequential), ("built", made(sequential, 2))):
        weights = first_weights(tmp_path / name, model, tmp_path / "before")
        assert "numbered the file's layers after others: sequential_" in capsys.readouterr().out
        for (_, x), (_, y) in zip(in_order(weights), in_order(source), strict=True):
            assert (x == y).all()


def in_order(weights):
    """Return weights by the numbers of their layers."""
    return sorted(weights.items(), key=lambda pair: (int((pair[0].split(".")[1] + "_0").split("_")[1]), pair[0][-4:]))


def test_checkpoints_of_built_models_with_another_head(tmp_path):
    source = trained(tmp_path / "before", made(sequential, 1))
    with pytest.raises(ConfigError, match="sequential_1.dense_1 of the file stands where sequential.dense d") as caught:
        first_weights(tmp_path / "run", shorter, tmp_path / "before")
    assert "\n" not in str(caught.value)
    cure = eval(str(caught.value).partition("model.init_from.rename: ")[2])
    weights = first_weights(tmp_path / "run", shorter, tmp_path / "before", rename=cure)
    for k in (0, 1):
        x = weights["sequential.dense" + f"_{k}" * bool(k) + ".kernel"]
        assert (x == source[f"sequential_1.dense_{k + 1}.kernel"]).all()


def test_a_layer_without_a_place_here_is_left(tmp_path, capsys):
    """A file of a list of layers, and a class with attributes: after other models nothing says which is which."""
    made(sequential, 1).save_weights(tmp_path / "a.weights.h5")
    with pytest.raises(ConfigError, match="nothing of the file fits the model: it has dense_1.0"):
        first_weights(tmp_path / "run", subclassed, tmp_path / "a.weights.h5")
    source = made(sequential)
    source.save_weights(tmp_path / "a.weights.h5")
    weights = first_weights(tmp_path / "run", subclassed, tmp_path / "a.weights.h5")
    assert (weights["mine.dense_2.kernel"] == source.layers[2].kernel.numpy()).all(), "no model was made before"


def test_a_file_without_names_of_layers(tmp_path):
    """As Keras wrote them until 3.5: places alone."""
    import h5py

    source = made(encoders, 1)
    source.save_weights(tmp_path / "a.weights.h5")
    with h5py.File(tmp_path / "a.weights.h5", "a") as opened:
        opened.visititems(lambda path, group: group.attrs.pop("name", None))
    weights = first_weights(tmp_path / "run", encoders, tmp_path / "a.weights.h5")
    right = made(encoders)
    right.load_weights(tmp_path / "a.weights.h5")
    check_equal(weights, right)
