"""Models whose samples are no single array of numbers with a class, called as they are, without the trainer."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

from hvd_train.core.initialization import first_weight
from hvd_train.frontends.named_arrays import TensorLayout
from tests.frontends.test_contract import FRAMEWORKS, module

T, WORDS = 7, 13
BERT = {"input_shape": {"tokens": (T,), "segments": (T,)}, "num_classes": {"words": WORDS, "next": 2}}
SMALL = BERT | {"width": 8, "depth": 2, "heads": 2, "dropout": 0.0}
IMAGES = {"hidden": [6], "code": 3}
VARYING = {"input_shape": {"tokens": (None,), "mask": (None,)}, "num_classes": 3, "vocabulary_size": WORDS}
CLASSIFIER = VARYING | {"max_length": 11, "width": 8, "depth": 2, "heads": 2, "dropout": 0.0}


def channels_first(x):
    return np.ascontiguousarray(np.moveaxis(x, -1, 1))


class Direct:
    """A model of 64 bits with the zoo's first weights; images are (n, height, width, channels) here."""

    def __init__(self, framework: str, name: str, **options) -> None:
        self.torch = framework == "pytorch"
        self.zoo = import_module(f"{'pt' if self.torch else 'tf'}_models.{name}")
        shape = options["input_shape"]
        self.images = not isinstance(shape, dict) and len(shape) == 3
        if self.torch and self.images:
            options["input_shape"] = (shape[2], *shape[:2])
        if self.torch:
            self.model = self.zoo.build(**options).double()
            self.weights = dict(self.model.named_parameters())
        else:
            self.model = float64(lambda: self.zoo.build(**options))
            self.weights = {v.path: v for v in self.model.trainable_variables}
        table = self.zoo.neutral(self.model)
        self.layouts = {own: TensorLayout.of(tuple(w.shape), table[own]) for own, w in self.weights.items()}
        for own, weight in self.weights.items():
            layout = self.layouts[own]
            first = layout.from_canonical(first_weight(layout.name, layout.shape, 0))
            if self.torch:
                weight.data.copy_(self._tensor(first))
            else:
                weight.assign(first)

    def _tensor(self, x):
        import torch

        return torch.from_numpy(np.array(x))

    def _call(self, inputs):
        if not self.torch:
            return self.model(inputs, training=True)
        if isinstance(inputs, dict):
            return self.model(**{name: self._tensor(x) for name, x in inputs.items()})
        return self.model(self._tensor(channels_first(inputs) if self.images else inputs))

    def outputs(self, inputs) -> dict[str, np.ndarray]:
        found = self._call(inputs)
        found = found if isinstance(found, dict) else {"": found}
        arrays = {name: x.detach().numpy() if self.torch else x.numpy() for name, x in found.items()}
        return {name: np.moveaxis(x, 1, -1) if self.torch and self.images else x for name, x in arrays.items()}

    def gradients(self, inputs, factors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Of the sum of outputs times ``factors``; by neutral name, in neutral order."""
        if self.torch:
            found = self._call(inputs)
            found = found if isinstance(found, dict) else {"": found}
            own = {k: channels_first(x) if self.images else x for k, x in factors.items()}
            sum((found[k] * self._tensor(x)).sum() for k, x in own.items()).backward()
            grads = {name: w.grad.numpy() for name, w in self.weights.items()}
        else:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                found = self._call(inputs)
                found = found if isinstance(found, dict) else {"": found}
                total = sum(tf.reduce_sum(found[k] * x) for k, x in factors.items())
            values = tape.gradient(total, [v.value for v in self.weights.values()])
            grads = {k: tf.convert_to_tensor(g).numpy() for k, g in zip(self.weights, values, strict=True)}
        return {self.layouts[own].name: self.layouts[own].to_canonical(g) for own, g in grads.items()}


def float64(make):
    """The Keras model that ``make`` builds, in 64 bits."""
    module("tensorflow")
    import keras

    before = keras.config.floatx(), keras.config.dtype_policy()
    try:
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        return make()
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def pairs(padding: int = 0, rows: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, WORDS, (rows, T))
    tokens[:, T - padding :] = 0
    return {"tokens": tokens, "segments": np.broadcast_to(np.arange(T) > T // 2, (rows, T)).astype(np.int64)}


def texts(longest: int = 6) -> dict[str, np.ndarray]:
    """Texts of 1, 3 and 6 tokens, padded to the longest."""
    mask = np.arange(longest) < np.array([[1], [3], [6]])
    return {"tokens": np.random.default_rng(0).integers(0, WORDS, mask.shape) * mask, "mask": mask}


CASES = {
    "text_classifier": ("text_classifier", CLASSIFIER, texts()),
    "text_classifier without blocks": ("text_classifier", CLASSIFIER | {"depth": 0}, texts()),
    "bert": ("bert", SMALL, pairs()),
    "bert padded": ("bert", SMALL, pairs(2)),
    "autoencoder": (
        "autoencoder",
        IMAGES | {"input_shape": (4, 3, 2)},
        np.random.default_rng(0).normal(size=(3, 4, 3, 2)),
    ),
    "mlp without classes": (
        "mlp",
        {"input_shape": (5,), "num_classes": None, "hidden": [6], "outputs": 2},
        np.random.default_rng(0).normal(size=(3, 5)),
    ),
    "autoencoder flat": ("autoencoder", IMAGES | {"input_shape": (5,)}, np.random.default_rng(0).normal(size=(3, 5))),
}


@pytest.mark.parametrize("case", CASES)
def test_both_frameworks_hold_the_same_network(case):
    """In 64 bits: outputs to 1e-12, gradients to 1e-10; every weight is reached."""
    name, options, inputs = CASES[case]
    one, other = (Direct(framework, name, **options) for framework in FRAMEWORKS)
    outputs = one.outputs(inputs), other.outputs(inputs)
    assert outputs[0].keys() == outputs[1].keys()
    for key in outputs[0]:
        np.testing.assert_allclose(outputs[0][key], outputs[1][key], rtol=0, atol=1e-12)
    factors = {k: np.random.default_rng(1).normal(size=x.shape) for k, x in outputs[0].items()}
    found = one.gradients(inputs, factors), other.gradients(inputs, factors)
    assert found[0].keys() == found[1].keys()
    for key, x in found[0].items():
        np.testing.assert_allclose(x, found[1][key], rtol=0, atol=1e-10, err_msg=key)
        assert not key.endswith(("kernel", "embedding")) or np.abs(x).max() > 1e-6, key


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_bert_looks_both_ways_but_never_at_padding(framework):
    model, given = Direct(framework, "bert", **SMALL), pairs(2)
    outputs = model.outputs(given)
    assert outputs["words"].shape == (3, T, WORDS) and outputs["next"].shape == (3, 2)
    for place, seen in ((T - 1, False), (T - 3, True)):
        other = given | {"segments": given["segments"].copy()}
        other["segments"][:, place] = 0
        moved = np.abs(model.outputs(other)["words"] - outputs["words"]).max(axis=(0, 2))
        assert moved[place] > 1e-6 and (np.delete(moved, place)[: T - 2] > 1e-9).all() == seen
        assert seen or np.delete(moved, place).max() == 0
    empty = {name: np.zeros_like(x) for name, x in given.items()}  # a row of padding, as the last batch has
    assert all(np.isfinite(x).all() for x in model.outputs(empty).values())


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("depth", [0, 2])
def test_padding_never_counts_in_a_text(framework, depth):
    """Nor does the length to which a batch is padded; a text that is longer than another one counts whole."""
    model = Direct(framework, "text_classifier", **CLASSIFIER | {"depth": depth})
    expected = model.outputs(texts())[""]
    longer = texts(9)
    longer["tokens"] = np.where(longer["mask"], np.pad(texts()["tokens"], ((0, 0), (0, 3))), 5)
    np.testing.assert_allclose(model.outputs(longer)[""], expected, rtol=0, atol=1e-15)
    changed = texts()
    changed["tokens"][:, 2] = (changed["tokens"][:, 2] + 1) % WORDS  # padding in the first text alone
    moved = np.abs(model.outputs(changed)[""] - expected).max(axis=1)
    assert moved[0] == 0 and (moved[1:] > 1e-9).all()
    swapped = texts()
    swapped["tokens"][2] = swapped["tokens"][2, ::-1]
    assert (np.abs(model.outputs(swapped)[""] - expected).max() > 1e-9) == (depth > 0)
    empty = {name: np.zeros_like(x) for name, x in texts().items()}
    assert np.isfinite(model.outputs(empty)[""]).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_size_of_bert(framework):
    module(framework)
    words = 100
    options = {"input_shape": {"tokens": (163,), "segments": (163,)}, "num_classes": {"words": words, "next": 2}}
    model = import_module(f"{'pt' if framework == 'pytorch' else 'tf'}_models.bert").build(**options)
    found = model.parameters() if framework == "pytorch" else model.trainable_variables
    sizes = [int(np.prod(tuple(x.shape))) for x in found]
    # A block has 12 w^2 + 13 w weights, w = 256: 3 + 1 + 4 + 4 kernels, biases 3 + 1 + 4 + 1, two norms 4.
    blocks, embeddings, norm = 8 * (12 * 256**2 + 13 * 256), (163 + 2 + words) * 256, 2 * 256
    heads = 256**2 + 256 + norm + words + 256**2 + 256 + 2 * 256 + 2
    assert (sum(sizes), len(sizes)) == (embeddings + norm + blocks + heads, 3 + 2 + 8 * 12 + 9)


@pytest.mark.parametrize("case", ["bert", "autoencoder", "text_classifier"])
def test_keras_saves_and_loads_them(case):
    name, options, inputs = CASES[case]
    model = Direct("tensorflow", name, **options)
    import keras

    again = float64(lambda: keras.models.model_from_json(model.model.to_json()))
    again.set_weights(model.model.get_weights())
    expected, found = model.outputs(inputs), again(inputs)
    for key, x in expected.items():
        np.testing.assert_allclose(found[key] if key else found, x, rtol=1e-13)


@pytest.mark.parametrize("zoo", ["pt_models", "tf_models"])
def test_bert_tells_what_it_needs(zoo):
    module("pytorch" if zoo == "pt_models" else "tensorflow")
    build = import_module(f"{zoo}.bert").build
    for wrong, what in (
        ({"input_shape": (7,)}, r"inputs tokens and segments, not \(7,\)"),
        ({"num_classes": 5}, "labels words and next, not 5"),
        ({"heads": 3}, "width 8 is no multiple of heads 3"),
    ):
        with pytest.raises(ValueError, match=what):
            build(**(SMALL | wrong))


@pytest.mark.parametrize("zoo", ["pt_models", "tf_models"])
def test_the_text_classifier_tells_what_it_needs(zoo):
    module("pytorch" if zoo == "pt_models" else "tensorflow")
    build = import_module(f"{zoo}.text_classifier").build
    for wrong, what in (
        ({"input_shape": (7,)}, r"inputs tokens and mask \(data.lengths\), not \(7,\)"),
        ({"vocabulary_size": 0}, "set model.vocabulary_size"),
        ({"num_classes": None}, "one label of classes, not None"),
        ({"heads": 3}, "width 8 is no multiple of heads 3"),
    ):
        with pytest.raises(ValueError, match=what):
            build(**(CLASSIFIER | wrong))
