"""What is drawn depends on (seed, epoch, index) alone, is what it is said to be, and changes no shape."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from hvd_train.config import (
    Config,
    DataConfig,
    FrontEndConfig,
    TaskConfig,
    changed,
    explain,
    load_config,
)
from hvd_train.config.keys.transforms import TRANSFORMS
from hvd_train.data import augment, transforms
from hvd_train.data.catalog import open_data
from hvd_train.data.loader import Loader
from hvd_train.errors import ConfigError, DataError
from hvd_train.frontends.serial import Serial
from hvd_train.protocol import Field, Groups
from tests.frontends.test_contract import FRAMEWORKS, module
from tests.own_models import noisy

IMAGES = (load_digits().images[:90, ..., None] * 15.9375).astype(np.uint8)
LABELS = load_digits().target[:90]
FLIP, CROP, CUTOUT = "random_horizontal_flip", {"name": "random_crop", "padding": 2}, {"name": "cutout", "size": 3}
NORMALIZE = {"name": "normalize", "mean": 0.3, "std": 0.35}
OWN = {"name": "own_transforms:own", "options": {"most": 40}}
ALL = [FLIP, "random_vertical_flip", CROP, OWN, CUTOUT, NORMALIZE]


def opened(*listed, inputs=IMAGES, labels=LABELS, own=noisy, **keys):
    sys.modules["own_transforms"] = SimpleNamespace(own=own, pair=lambda: ((inputs, labels), (inputs, labels)))
    task = keys.pop("task", TaskConfig())
    config = DataConfig.model_validate({"name": "own_transforms:pair", "transforms": list(listed)} | keys)
    return open_data(config, task)


def drawn(*listed, epoch=0, seed=0, **keys):
    """All samples in their order, as training takes them."""
    source = opened(*listed, **keys).train
    return source.drawn(np.arange(len(source)), seed, epoch)[0]["input"]


def test_a_sample_of_an_epoch_is_the_same_in_every_world_and_after_a_resume():
    source, seen = opened(*ALL).train, {}
    for size in (1, 2, 3):
        for consumed in (0, 34):
            for rank in range(size):
                one = Loader(source, global_batch=17, accumulate=2, rank=rank, size=size, seed=5)
                for work in one._steps(3, consumed):
                    for batch in work().micro_batches:
                        for i, x in zip(batch.indices, batch.inputs["input"], strict=False):
                            assert (seen.setdefault(int(i), x) == x).all()
    assert len(seen) == len(IMAGES)
    assert (np.stack([seen[i] for i in range(90)]) == drawn(*ALL, seed=5, epoch=3)).all()


@pytest.mark.parametrize("one", [FLIP, CROP, CUTOUT, OWN])
def test_epochs_seeds_and_places_in_the_list_draw_anew(one):
    found = [drawn(one), drawn(one, epoch=1), drawn(one, seed=1)]
    twice = drawn(FLIP, FLIP)
    assert not (found[0] == found[1]).all() and not (found[0] == found[2]).all()
    assert not (twice == IMAGES).all(), "the second flip would undo the first"


def test_bytes_stay_bytes_and_nothing_is_written_into_the_data():
    before = IMAGES.copy()
    assert drawn(*ALL).dtype == np.uint8 and (before == IMAGES).all()

    def writes(image, rng):
        image += rng.integers(0, 2, image.shape, np.uint8)
        return image

    held = IMAGES.astype(np.float32)  # handed over as they lie in memory
    fetched = Held(held)
    sys.modules["own_transforms"] = SimpleNamespace(
        own=lambda image, rng: np.multiply(image, rng.random(), out=image), pair=lambda: (fetched, fetched)
    )
    config = DataConfig(name="own_transforms:pair", transforms=[{"name": "own_transforms:own"}])
    copy = held.copy()
    found = open_data(config).train.drawn(np.arange(90), 0, 0)[0]["input"]
    assert not (found == copy).all() and (held == copy).all()
    assert not (drawn(OWN | {"options": {}}, own=writes) == IMAGES).all() and (before == IMAGES).all()


class Held:
    num_classes, fingerprint = 10, "held"

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def fetch(self, indices):
        found = self.values[: len(indices)] if (indices == np.arange(len(indices))).all() else self.values[indices]
        return found, LABELS[indices]


@pytest.mark.parametrize(("name", "axis"), [("random_horizontal_flip", 2), ("random_vertical_flip", 1)])
def test_flips(name, axis):
    mirrored, found = np.flip(IMAGES, axis), drawn(name)
    turned = (found == mirrored).all((1, 2, 3))
    assert ((found == IMAGES).all((1, 2, 3)) | turned).all() and 25 < turned.sum() < 65
    assert (drawn({"name": name, "p": 1}) == mirrored).all() and (drawn({"name": name, "p": 0}) == IMAGES).all()


@pytest.mark.parametrize(("mode", "fill"), [("constant", 0), ("constant", 7), ("edge", 0), ("reflect", 0)])
def test_crops_are_windows_of_the_padded_image(mode, fill):
    one = {"name": "random_crop", "size": 8, "padding": 2, "padding_mode": mode, "fill": fill}
    values = {"constant_values": fill} if mode == "constant" else {}
    places = set()
    found = np.concatenate([drawn(one, epoch=epoch) for epoch in range(5)])
    for image, crop in zip(np.tile(IMAGES, (5, 1, 1, 1)), found, strict=True):
        padded = np.pad(image, ((2, 2), (2, 2), (0, 0)), mode, **values)
        at = [(y, x) for y in range(5) for x in range(5) if (padded[y : y + 8, x : x + 8] == crop).all()]
        assert at
        places |= set(at)
    assert len(places) == 25


def test_cutouts_are_squares_cut_off_at_the_border():
    found = drawn(CUTOUT | {"fill": 200}, inputs=np.zeros((90, 8, 6, 2), np.uint8))
    corners = set()
    for image in found:
        assert (image[..., 0] == image[..., 1]).all()
        rows, columns = (np.flatnonzero((image[..., 0] == 200).any(axis)) for axis in (1, 0))
        assert (image == 200).sum() == 2 * len(rows) * len(columns) and set(np.unique(image)) <= {0, 200}
        for inside, side in ((rows, 8), (columns, 6)):
            assert len(inside) == 3 or (len(inside) == 2 and (inside[0] == 0 or inside[-1] == side - 1))
        corners.add((int(rows[0]), int(columns[0])))
    assert len(corners) > 25
    untouched = (drawn(CUTOUT | {"p": 0.3}) == IMAGES).all((1, 2, 3))
    assert 45 < untouched.sum() < 80


def square(seed=0, kind=np.uint8, side=9, channels=3):
    values = np.random.default_rng(seed).integers(0, 256, (side, side, channels))
    return values.astype(kind) if kind == np.uint8 else values / 255


def test_an_image_is_turned_as_pillow_turns_it():
    smooth = np.kron(square(side=3)[..., :1], np.ones((11, 11, 1), np.uint8))
    ours = augment.rotated(smooth, 30, 0)[..., 0].astype(int)
    theirs = Image.fromarray(smooth[..., 0]).rotate(30, Image.Resampling.BILINEAR)
    inside = augment.rotated(np.ones_like(smooth), 30, 0)[..., 0] > 0
    gap = abs(ours - np.asarray(theirs).astype(int))[inside]
    assert np.quantile(gap, 0.95) <= 2, "they differ at the border alone"


def test_rotations_stay_within_their_angle():
    found = drawn({"name": "random_rotation", "degrees": 10}, inputs=np.full((90, 15, 15, 1), 200, np.uint8))
    assert (found[:, 5:10, 5:10] == 200).all() and (found == 0).any((1, 2, 3)).sum() > 60
    ramp = np.broadcast_to(np.arange(15.0, dtype=np.float32)[:, None, None], (90, 15, 15, 1)).copy()
    slopes = np.diff(drawn({"name": "random_rotation", "degrees": 10}, inputs=ramp)[:, 7, 5:10, 0], axis=1).mean(1)
    angles = np.degrees(np.arcsin(slopes))  # along a row, a plane that is turned rises by the sine
    assert abs(angles).max() < 10.01 and angles.min() < -7 and angles.max() > 7 and len(np.unique(angles)) > 80


def test_resized_crops():
    whole = {"name": "random_resized_crop", "scale": [1.0, 1.0], "ratio": [1.0, 1.0]}
    assert (drawn(whole) == IMAGES).all(), "the whole image is the image"
    ramp = np.broadcast_to(np.arange(16.0, dtype=np.float32)[:, None, None], (90, 16, 16, 1)) * 10
    found = drawn({"name": "random_resized_crop", "scale": [0.25, 0.25], "ratio": [1, 1]}, inputs=ramp.copy())
    steps = np.diff(found[:, 2:-2, 8, 0], axis=1)
    np.testing.assert_allclose(steps, 5, rtol=1e-4)  # half of the side, stretched to the whole
    tops = found[:, 0, 8, 0]
    assert tops.min() < 15 and tops.max() > 60 and len(np.unique(tops)) > 80


def test_erased_rectangles_have_the_area_and_the_shape_that_is_asked_for():
    one = {"name": "random_erasing", "p": 1, "scale": [0.1, 0.3], "ratio": [0.5, 2.0], "fill": 9}
    found = drawn(one, inputs=np.zeros((90, 40, 30, 1), np.uint8))[..., 0] == 9
    for image in found:
        rows, columns = np.flatnonzero(image.any(1)), np.flatnonzero(image.any(0))
        assert image.sum() == len(rows) * len(columns), "one rectangle"
        assert 0.085 < image.mean() < 0.32 and 0.45 < len(columns) / len(rows) < 2.2
    assert 25 < (drawn({"name": "random_erasing"}) == IMAGES).all((1, 2, 3)).sum() < 75


def test_a_narrow_image_into_which_no_rectangle_fits_stays_as_it_is():
    """As in torchvision. A third of these images were erased as a whole, and kept their class."""
    found = drawn({"name": "random_erasing", "p": 1}, inputs=np.full((90, 8, 200, 1), 9, np.uint8)) == 0
    shares = found.mean((1, 2, 3))
    assert shares.max() < 0.33 and 10 < (shares == 0).sum() < 60


@pytest.mark.parametrize("key", ["brightness", "contrast", "saturation"])
def test_colours_change_as_in_pillow(key):
    """A factor on all values, on the distance from the mean grey, on that from each pixel's grey."""
    from PIL import ImageEnhance

    images = np.stack([square(k, side=12) for k in range(90)])
    found, changed_ = drawn({"name": "color_jitter", key: 0.5}, inputs=images), 0
    enhance = {"brightness": "Brightness", "contrast": "Contrast", "saturation": "Color"}[key]
    for image, ours in zip(images, found, strict=True):
        enhancer = getattr(ImageEnhance, enhance)(Image.fromarray(image))
        gaps = [abs(np.asarray(enhancer.enhance(f)).astype(int) - ours).max() for f in np.linspace(0.5, 1.5, 201)]
        assert min(gaps) <= 3, "there is a factor that gives it"
        changed_ += int(np.argmin(gaps) != 100)
    assert changed_ > 80


@pytest.mark.parametrize("name", sorted(augment.BUILT_IN))
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_any_shape_keeps_its_type_and_a_sample_does_not_depend_on_the_others(name, kind):
    options = {"random_crop": {"padding": 1}, "cutout": {"size": 2}, "random_rotation": {"degrees": 45}}
    options["color_jitter"] = {"brightness": 0.3, "contrast": 0.3}
    one = {"name": name} | options.get(name, {})
    for shape in ((1, 1, 1), (5, 9, 1), (9, 5, 3), (2, 2, 4)):
        inputs = np.random.default_rng(1).integers(0, 255, (90, *shape)).astype(kind)
        source = opened(one, inputs=inputs, images=True).train
        together = source.drawn(np.arange(20), 3, 2)[0]["input"]
        assert together.dtype == kind and together.shape == (20, *shape) and np.isfinite(together).all()
        alone = np.concatenate([source.drawn(np.array([k]), 3, 2)[0]["input"] for k in range(20)])
        assert (alone == together).all()


def test_validation_and_evaluations_are_not_varied():
    data = opened(*ALL)
    assert data.train.sample == data.val.sample and len(data.train) == 90
    for source in (data.train, data.val):
        (batch,) = Loader(source, global_batch=90).evaluation()
        assert (batch.inputs["input"] == IMAGES).all()


def test_what_the_model_is_to_give_is_the_varied_sample():
    source = opened(FLIP, NORMALIZE, target="inputs").train
    inputs, labels = source.drawn(np.arange(90), 0, 0)
    assert (inputs["input"] == labels["label"]).all() and not (inputs["input"] == IMAGES).all()
    assert source.sample.labels["label"] == source.sample.inputs["input"]
    (step,) = Loader(source, global_batch=90).epoch(0)
    (batch,) = step.micro_batches
    assert (batch.inputs["input"] == inputs["input"][batch.indices]).all()


def test_an_own_function_gets_all_inputs_by_name():
    def swap(sample, rng):
        return {"a": sample["b"], "b": sample["a"] + (rng.random() < 0.5)}

    values = {"a": np.arange(90.0), "b": -np.arange(90.0)}
    source = opened({"name": "own_transforms:own"}, inputs=values, own=swap).train
    inputs, _ = source.drawn(np.arange(90), 0, 0)
    assert (inputs["a"] == values["b"]).all() and set(inputs["b"] - values["a"]) == {0, 1}
    assert source.sample.inputs["a"] == Field((), "float32")


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_normalizing_on_the_device_has_numpys_bits(framework, kind):
    images = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3)).astype(kind)
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    data = opened({"name": "normalize", "mean": mean, "std": std}, inputs=images, labels=np.arange(6))
    (batch,) = Loader(data.train, global_batch=6).evaluation()
    config = Config(framework=framework, model={"name": "mlp", "hidden": [2]}, device="cpu")
    frontend = module(framework).open_frontend(FrontEndConfig.of(config), Groups.of(Serial()), data.sample)
    placed = frontend.to_device(batch)[0]["input"]
    if framework == "pytorch":
        placed = placed.permute(0, 2, 3, 1)
    else:  # within a graph, which would multiply by the inverse if it could
        from hvd_train.frontends.tensorflow.graphs import graph as _graph

        (field,) = data.sample.inputs.values()
        placed = _graph(lambda x: frontend._ready(x, field))(placed)
    placed = np.asarray(placed)
    values = images / np.float32(255) if kind == np.uint8 else images
    assert (placed == (values - np.float32(mean)) / np.float32(std)).all()
    assert (batch.inputs["input"] == images).all(), "what the loader holds is not written into"


# ---- mistakes


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ("[flip]", "data.transforms.0.name: unknown 'flip'; did you mean 'random_horizontal_flip'?"),
        ("[Normalise]", "data.transforms.0.name: unknown 'Normalise'; did you mean 'normalize'?"),
        ("[{padding: 4}]", "data.transforms.0.name: unknown ''"),
        ("[random_crop]", "data.transforms.0.padding: random_crop needs it"),
        ("[cutout]", "data.transforms.0.size: cutout needs it"),
        ("[{name: cutout, size: 2, mean: 3}]", "data.transforms.0.mean: cutout takes size, fill, p"),
        ("[{name: cutout, side: 2}]", "data.transforms.0.side: unknown key; did you mean 'data.transforms.0.size'?"),
        ("[{name: cutout, size: 0}]", "data.transforms.0.size: must be > 0, not 0"),
        ("[{name: random_vertical_flip, p: 2}]", "data.transforms.0.p: must be <= 1.0, not 2"),
        ("[{name: normalize, mean: 1, std: [1, 0]}]", "data.transforms.0.std: must be > 0"),
        ("[{name: normalize, mean: .nan, std: 1}]", "data.transforms.0.mean: must be finite"),
        ("[{name: normalize, mean: 0, std: 1}, random_vertical_flip]", "normalize must stand last"),
        ("random_vertical_flip", "data.transforms: must be a list"),
    ],
)
def test_mistakes_in_the_configuration(listed, words):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"data.transforms={listed}"])
    assert words in str(caught.value) and "\n" not in str(caught.value)


WHOLE = np.arange(90 * 64).reshape(90, 8, 8, 1)
FAULTS = {
    "shape": (dict(own=lambda x, rng: x[1:]), ["made input (7, 8, 1) uint8 of sample 0, not input (8, 8, 1) uint8"]),
    "type": (dict(own=lambda x, rng: x / 255), ["(8, 8, 1) float64", "not input (8, 8, 1) uint8"]),
    "several": (dict(own=lambda x, rng: np.stack([x, x])), ["made input (2, 8, 8, 1)"]),
    "nothing": (dict(own=lambda x, rng: None), ["made input () object"]),
    "names": (
        dict(own=lambda x, rng: {"a": x["a"]}, inputs={"a": IMAGES, "b": IMAGES}),
        ["made a (8, 8, 1) uint8 of sample 0, not a (8, 8, 1) uint8, b (8, 8, 1) uint8"],
    ),
    "raises": (dict(own=lambda x, rng: x[99]), ["failed on sample 0: IndexError"]),
    "other generator": (
        dict(own=lambda x, rng: x + np.random.randint(0, 2, x.shape, np.uint8)),
        ["makes other values of the same sample and rng", "draw from rng alone"],
    ),
    "no rng": (dict(own=lambda x: x), ["failed on sample 0: TypeError"]),
    "nan": (dict(own=lambda x, rng: x * np.float32("nan"), inputs=IMAGES.astype(np.float32)), ["NaN", "sample 0"]),
    "missing": (dict(listed=[{"name": "own_transforms:none"}]), ["has no function 'none'"]),
    "no image": (dict(listed=[FLIP], inputs=np.ones((90, 4))), ["input of shape (4,) is not an image"]),
    "several inputs": (dict(listed=[FLIP], inputs={"a": IMAGES, "b": IMAGES}), ["there are a, b", "input: ..."]),
    "size": (dict(listed=[CROP | {"size": 6}]), ["size 6 of images of 8 x 8"]),
    "windows": (
        dict(listed=[{"name": "random_resized_crop"}], inputs=np.ones((90, 8, 200, 1), np.uint8)),
        ["no window of these areas and aspect ratios fits into images of 8 x 200", "ratio"],
    ),
    "fill": (dict(listed=[CROP | {"fill": 300}]), ["fill: 300 does not fit into uint8"]),
    "fraction": (dict(listed=[CUTOUT | {"fill": 0.5}]), ["fill: 0.5 does not fit into uint8"]),
    "whole": (dict(listed=[NORMALIZE], inputs=WHOLE), ["input of (8, 8, 1) int64 holds whole numbers"]),
    "channels": (dict(listed=[NORMALIZE | {"std": [1, 2, 3]}]), ["3 numbers for input of shape (8, 8, 1)", "std"]),
    "places": (
        dict(listed=[FLIP], labels=IMAGES[..., 0], inputs=IMAGES, task=TaskConfig(loss="mse")),
        ["labels per pixel (label) would not move"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_does_not_fit_is_told_when_the_data_are_opened(name):
    keys, words = FAULTS[name]
    keys = {"listed": [{"name": "own_transforms:own"}], **keys}
    with pytest.raises(DataError) as caught:
        opened(*keys.pop("listed"), **keys)
    text = str(caught.value)
    assert all(word in text for word in words) and "data.transforms.0: " in text and "\n" not in text, text


def test_a_fault_of_a_later_sample_names_it():
    source = opened({"name": "own_transforms:own"}, own=lambda x, rng: x[: 8 - (x == IMAGES[41]).all()]).train
    with pytest.raises(DataError, match="of sample 41, not"):
        list(Loader(source, global_batch=8).epoch(0))


def test_the_help_names_all():
    assert list(transforms.catalog()) == list(TRANSFORMS)
    rows = {row[0]: row[1:3] for row in explain()}
    assert rows["data.transforms"] == ("list of sections", "[]") and rows["data.transforms.p"] == ("real|null", "null")


def test_a_resumed_run_keeps_its_transforms_and_may_change_its_workers():
    old = load_config(None, [f"data.transforms={ALL}"])
    assert changed(old, load_config(None, [f"data.transforms={ALL}", "data.workers=3"])) == []
    assert [key for key, _, _ in changed(old, load_config(None, ["data.transforms=[random_vertical_flip]"]))] == [
        "data.transforms"
    ]


def test_own_functions_are_code_that_a_foreign_run_folder_may_not_name():
    config = load_config(None, ["data.transforms=[random_vertical_flip, 'evil:run']"])
    assert "evil:run" in config.user_code["data.transforms"]


@pytest.mark.parametrize(("loss", "told"), [("mse", True), ("own:loss", True), ("bce", False)])
def test_labels_that_may_be_places_in_an_image_are_told(loss, told):
    """Boxes and points stayed where they were while the image was flipped, without a word."""
    boxes = np.random.default_rng(0).random((len(IMAGES), 4)).astype(np.float32)
    remarks = opened(FLIP, CROP, CUTOUT, labels=boxes, task=TaskConfig(loss=loss)).remarks
    line = "labels 'label' are 4 numbers, which random_horizontal_flip, random_crop does not change"
    assert [one.startswith(line) for one in remarks] == [True] * told
    for quiet in ({"labels": boxes[:, 0]}, {"labels": boxes, "target": "inputs"}):
        assert not opened(FLIP, task=TaskConfig(loss="mse"), **quiet).remarks
    assert not opened(CUTOUT, labels=boxes, task=TaskConfig(loss="mse")).remarks


def test_what_a_source_says_is_kept_where_its_inputs_are_the_labels():
    data = opened(inputs=IMAGES[..., 0].astype(np.int64), target="inputs", task=TaskConfig(loss="mse"))
    assert "reach the model as whole numbers" in data.train.note


@pytest.mark.parametrize(("dtype", "top"), [("float32", 1.0), ("uint8", 255)])
def test_each_step_of_a_color_jitter_ends_in_the_range_of_images(dtype, top):
    """As torchvision's: fractions went up to 1.64, and contrast was taken of what brightness had left the range by."""
    images = np.array([[[[0.9] * 3, [0.2] * 3]]], dtype) if top == 1 else np.array([[[[230] * 3, [51] * 3]]], dtype)
    draws = SimpleNamespace(uniform=lambda count: np.ones((1, count)))
    config = SimpleNamespace(brightness=0.5, contrast=0.5, saturation=0.0)
    found = augment._color_jitter(images.copy(), draws, config)
    bright = np.clip(images * 1.5, 0, top)
    expected = np.clip(bright.mean() + 1.5 * (bright - bright.mean()), 0, top)
    np.testing.assert_allclose(found, expected, atol=1e-6 if top == 1 else 1)
