"""Data of the user: functions, arrays, objects with fetch, and how labels reach a loss."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_train.config import DataConfig, TaskConfig
from hvd_train.data import user_data
from hvd_train.data.catalog import open_data
from hvd_train.data.dataset import DataRequest
from hvd_train.errors import DataError
from hvd_train.protocol import Field
from tests.data.files import RNG, config, fault, for_testing, opened, taken

IDS = np.array([[1, 200, 3], [4, 5, 255]] * 4)
LABELS = np.arange(8) % 2


def source_of(inputs, labels=LABELS, **task):
    """open_data of a function that gives the pair for both parts."""
    sys.modules["own_pair"] = SimpleNamespace(pair=lambda: ((inputs, labels), (inputs, labels)))
    return open_data(config("own_pair:pair"), TaskConfig(**task)).train


def test_labels_at_each_place_of_an_image_are_images():
    depth = np.ones((8, 4, 5), np.float32)
    assert source_of(np.ones((8, 4, 5, 3), np.uint8), depth, loss="mse").sample.labels["label"].shape == (4, 5, 1)
    assert source_of(depth, depth, loss="mse").sample.labels["label"] == Field((4, 5), "float32")
    assert not Field((4, 5, 6), "int64", classes=3).image and Field((4, 5, 6), "float32").image  # as manifests tell


def test_a_function_may_give_a_test_part():
    part = np.ones((8, 3)), LABELS
    sys.modules["own_pair"] = SimpleNamespace(pair=lambda: (part, part, (part[0][:3], LABELS[:3])))
    assert len(for_testing("own_pair:pair")) == 3


class Frame:
    """What is used of a data frame of pandas."""

    def __init__(self, values, columns):
        self.values, self.columns = np.asarray(values), columns

    def __array__(self, dtype=None, copy=None):
        return self.values.astype(dtype or self.values.dtype)

    def __len__(self):
        return len(self.values)


def fetching(part):
    frame, labels = part
    return EightSamples(
        num_classes=2,
        fingerprint="frames",
        fetch=lambda rows: (Frame(frame.values[rows], frame.columns), labels[rows]),
    )


class EightSamples(SimpleNamespace):
    def __len__(self):
        return 8


def test_columns_of_data_frames_are_known_by_their_names():
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    train = Frame(x, ["age", "area", "rooms"]), LABELS
    turned = Frame(x[:, ::-1], ["rooms", "area", "age"]), LABELS
    sys.modules["own_frames"] = SimpleNamespace(
        same=lambda: (train, train),
        bare=lambda: (train, (x, LABELS)),
        turned=lambda: (train, turned),
        named=lambda: (({"a": train[0], "b": x}, LABELS), ({"a": turned[0], "b": x}, LABELS)),
        other=lambda: (turned, turned),
        fetched=lambda: (fetching(train), fetching(turned)),
        unnamed=lambda: ((Frame(x, range(3)), LABELS), (Frame(x, range(3)), LABELS)),
    )
    run = opened("own_frames:same").train.sample
    assert run.inputs["input"].columns == ("age", "area", "rooms")
    assert opened("own_frames:bare").train.sample == run
    assert opened("own_frames:unnamed").train.sample.inputs["input"].columns == ()
    for name in ("turned", "named", "fetched"):
        line = r"training samples age, area, rooms, of the validation samples rooms, area, age"
        with pytest.raises(DataError, match=line):
            opened(f"own_frames:{name}")
    # Another call gives them in another order, as for ``eval``: they are matched.
    request = DataRequest(run, "val")
    data = open_data(config("own_frames:other"), TaskConfig(), request=request)
    inputs, _ = data.parts["val"].fetch(np.arange(8))
    assert (inputs["input"] == x).all()


OWN = """
import numpy as np
class Mine:
    num_classes, fingerprint = 2, "mine"
    kind = np.float32
    def __len__(self): return 4
    def fetch(self, indices): return np.ones((len(indices), 3), self.kind), np.ones(len(indices), np.int64)
class Bytes(Mine):
    kind = np.uint8
class Uneven(Mine):
    def fetch(self, indices): return np.ones((len(indices), 2 + len(indices))), np.ones(len(indices), np.int64)
class Places(Mine):
    def fetch(self, indices): return np.ones((len(indices), 3), self.kind), np.ones((len(indices), 3), np.int64)
class Strange(Mine):
    label = 3
    def fetch(self, indices): return np.ones((len(indices), 3), self.kind), np.where(indices, self.label, 0)
class Ignored(Strange):
    label = -100
class Broken(Mine):
    def fetch(self, indices): return indices / {}
def pairs(n=4): return (np.ones((n, 3)), np.arange(n) % 2), (np.zeros((2, 3)), np.zeros(2, int))
def sources(): return Mine(), Mine()
def places(): return Places(), Places()
def one(): return Mine()
def nothing(): return None, None
def bytes(): return Bytes(), Mine()
def strange(): return Mine(), Strange()
def ignored(): return Mine(), Ignored()
def uneven(): return Uneven(), Uneven()
def broken(): return Mine(), Broken()
def raises(): raise KeyError("no key")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_data.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_data", raising=False)


def test_own_function(own):
    data = opened("own_data:pairs", options={"n": 6})
    assert (len(data.train), len(data.val), data.sample.num_classes, data.sample.input_shape) == (6, 2, 2, (3,))
    assert opened("own_data:sources").train.fingerprint == "mine"
    assert taken(opened("own_data:places").train, np.arange(2))[1].shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_dat:pairs", "there is no module 'own_dat'"),
        ("own_data:pair", "own_data.py has no function 'pair'"),
        ("own_data:", "has no function"),
        (":pairs", "cannot be imported"),
        ("own_data:one", "give (train, val), or (train, val, test)"),
        ("own_data:nothing", "NoneType has no __len__, fetch"),
        (
            "own_data:bytes",
            "the inputs differ: of the training samples input (3,) uint8, of the validation samples input (3,) float32",
        ),
        ("own_data:uneven", "fetch gives inputs of shape (4, 6) for 4 indices, not (4, 3)"),
        ("own_data:strange", "sample 1 holds a label out of [0, 2)"),
        ("own_data:ignored", "sample 1 holds a label out of [0, 2)"),
        ("own_data:broken", "val; "),
        ("own_data:raises", "KeyError"),
    ],
)
def test_own_faults(own, name, words):
    text = fault(name)
    assert words in text or words in text + "; "
    assert f"data.name: {name}" in text


def test_parts_by_their_names():
    parts = {"train": (IDS, LABELS), "val": (IDS[:4], LABELS[:4]), "test": (IDS[:2], LABELS[:2])}
    sys.modules["own_pair"] = SimpleNamespace(pair=lambda: parts)
    data = open_data(config("own_pair:pair"), TaskConfig())
    assert (len(data.train), len(data.val)) == (8, 4)
    sys.modules["own_pair"] = SimpleNamespace(pair=lambda: {"x": IDS, "y": LABELS})
    with pytest.raises(DataError, match="a dict with x, y; .*; give .train, val., .*, or one pair .inputs, labels."):
        open_data(config("own_pair:pair"), TaskConfig())


def test_texts_and_images_of_your_own_are_told_what_to_do():
    with pytest.raises(DataError, match="inputs are of type <U3; .*; of texts the tokens .*labeled_text"):
        source_of(np.array(["a b", "c d"] * 4))
    with pytest.raises(DataError, match="data of your own are not resized; data.image_size; resize images in your"):
        open_data(config("own_pair:pair", image_size=8), TaskConfig())


def test_own_options_that_do_not_fit(own):
    assert "unexpected keyword argument 'm'" in fault("own_data:pairs", options={"m": 1})


def test_bytes_are_divided_unless_they_are_ids_and_the_run_says_which():
    """They travel as bytes either way."""

    def divisor(source):
        assert source.fetch(np.arange(2))[0]["input"].dtype == np.uint8
        return source.sample.inputs["input"].divisor

    flat = source_of(IDS.astype(np.uint8))
    assert divisor(flat) == 255 and "divided by 255" in flat.note and "int32" in flat.note
    ids = source_of(IDS.astype(np.uint8), IDS[:, ::-1])
    assert divisor(ids) == 1 and np.array_equal(taken(ids, np.arange(2))[0], IDS[:2]) and "not divided" in ids.note
    column = source_of(IDS[:, :1].astype(np.uint8), LABELS[:, None])  # one number and one label a sample are no text
    assert divisor(column) == 255
    whole = source_of(IDS)
    assert np.array_equal(taken(whole, np.arange(2))[0], IDS[:2])
    assert "int64" in whole.note and "whole numbers" in whole.note and "float32" in whole.note
    assert source_of(IDS.astype(np.float32)).note == "" and source_of(list(IDS)).note == whole.note


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "uint32", "int64", "uint64", ">u8"])
def test_whole_numbers_stay_whole(dtype):
    most = 1 if dtype == "bool" else min(np.iinfo(dtype).max, (1 << 63) - 1)
    values = np.full((8, 3), most, dtype)
    source = source_of(values)
    found, field = taken(source, np.arange(8))[0], source.sample.inputs["input"]
    assert field.whole and found.dtype == field.dtype and (found == values).all()
    if dtype in ("uint64", ">u8"):
        values[5, 1] = 1 << 63
        with pytest.raises(DataError, match="sample 5 holds a number of more than 63 bits"):
            source_of(values).fetch(np.arange(8))


def test_named_inputs_travel_as_they_are():
    """Several inputs have names, each its own type; a dict of one is one input; an object gives the same."""
    named = {"tokens": IDS.astype(np.int32), "mask": IDS > 3, "image": np.ones((8, 4, 5), np.uint8)}
    source = source_of(named)
    inputs, labels = source.fetch(np.array([6, 1]))
    assert source.sample.input_shape == {"tokens": (3,), "mask": (3,), "image": (4, 5)}
    assert {name: x.dtype.name for name, x in inputs.items()} == {"tokens": "int32", "mask": "bool", "image": "uint8"}
    assert all((x == named[name][[6, 1]]).all() for name, x in inputs.items()) and labels["label"].tolist() == [0, 1]
    assert {name: field.divisor for name, field in source.sample.inputs.items()}["image"] == 255
    assert source_of({"tokens": IDS}).sample.input_shape == (3,)

    class Own(OnlyFetch):
        num_classes, fingerprint = 2, "x"

        def __len__(self):
            return 8

        def fetch(self, indices):
            return {name: x[indices] for name, x in named.items()}, LABELS[indices]

    sys.modules["own_pair"] = SimpleNamespace(pair=lambda: (Own(), Own()))
    again = opened("own_pair:pair").train
    assert again.sample == source.sample
    assert all((x == inputs[name]).all() for name, x in again.fetch(np.array([6, 1]))[0].items())


def test_labels_are_what_the_loss_wants():
    """Numbers for a regression, several by name, places that are ignored."""
    found = source_of(IDS.astype(np.float32), LABELS / 2, loss="mse")
    assert taken(found, np.arange(2))[1].tolist() == [0, 0.5] and found.sample.num_classes is None
    assert source_of(IDS, -LABELS, loss="mse").sample.labels["label"] == Field((), "int64")
    bytes_ = np.full((8, 4, 4), 9, np.uint8)
    images = source_of(bytes_, bytes_, loss="mse")
    assert images.sample.labels["label"] == images.sample.inputs["input"] == Field((4, 4, 1), "uint8", 255.0)
    words = np.where(IDS > 3, IDS, -100)
    source = source_of(
        {"tokens": IDS}, {"words": words, "next": LABELS}, loss=dict.fromkeys(("words", "next"), "cross_entropy")
    )
    fields = source.sample.labels
    assert (fields["words"].masked, fields["words"].classes, fields["next"]) == (
        True,
        256,
        Field((), "int64", classes=2),
    )
    assert source.sample.num_classes == {"words": 256, "next": 2}
    assert (source.fetch(np.arange(8))[1]["words"] == words).all()
    with pytest.raises(DataError, match="label -100 of sample 0"):
        source_of(IDS, words, ignore_index=-1)
    assert source_of(IDS, np.where(IDS > 3, IDS, -1), ignore_index=-1).sample.labels["label"].masked


def test_the_fingerprint_sees_each_named_array():
    named = {"a": IDS.astype(np.int32), "b": IDS.astype(np.float32)}
    prints = {source_of(named).fingerprint, source_of(named | {"b": named["b"] + 1}).fingerprint}
    prints |= {source_of({"a": named["a"], "c": named["b"]}).fingerprint, source_of({"a": named["a"]}).fingerprint}
    assert len(prints) == 4


class OnlyFetch:
    def fetch(self, indices):
        return IDS[indices], LABELS[indices]


class Fetching(OnlyFetch):
    num_classes, fingerprint = 2, "x"

    def __init__(self, fetched):
        self.fetched = fetched

    def __len__(self):
        return 8

    def fetch(self, indices):
        return self.fetched


class Times:
    """Seconds since 1970 with a fraction, which float32 does not tell apart."""

    fingerprint = "t"
    values = 1_790_000_000.25 + np.arange(16.0).reshape(8, 2) / 2048

    def __len__(self):
        return 8


class FetchedTimes(Times):
    def fetch(self, indices):
        return {"when": self.values[indices], "what": IDS[indices]}, self.values[indices, 0]


class StreamedTimes(Times):
    def __iter__(self):
        return iter(zip(self.values, self.values[:, 0], strict=True))


@pytest.mark.parametrize(("source", "name"), [(FetchedTimes(), " 'when'"), (StreamedTimes(), "")])
def test_numbers_that_32_bits_round_are_told_of_sources_too(source, name):
    """Each was one number for the model, without a word where arrays had one."""
    data = open_data(DataConfig(name="npz"), TaskConfig(loss="mse"), user_data=(source, source))
    first, second = data.remarks
    assert first.startswith(f"inputs{name} hold numbers whose differences float32 rounds")
    assert second.startswith("labels hold numbers whose")


OWN_FAULTS = {
    "tuple": (((IDS, IDS[:, :2]), LABELS), ["inputs are a tuple of 2", "a dict of named inputs"]),
    "list": (([IDS, IDS], LABELS), ["inputs are a list of 2", "a dict of named inputs"]),
    "no name": (({"a": IDS, "b c": IDS}, LABELS), ["a dict with a, b c", "names no argument"]),
    "lengths": (({"a": IDS, "b": IDS[1:]}, LABELS), ["inputs 'b' (7, 3)", "(8,)", "length"]),
    "named text": (({"a": IDS, "b": IDS.astype(str)}, LABELS), ["inputs 'b' are of type <U"]),
    "targets": ((IDS, (LABELS, LABELS)), ["differ in length"]),
    "named targets": ((IDS, {"a": LABELS, "b": LABELS[1:]}), ["labels 'b' (7,)", "differ in length"]),
    "regression": ((IDS, LABELS / 2), ["labels are of type float64", "wants classes", "regression"]),
    "ragged": (([[1], [2, 3, 4]] * 4, LABELS), ["inputs have samples of different lengths, 1 to 3", "pad them"]),
    "ragged objects": ((np.array([[1], [2, 3]] * 4, object), LABELS), ["different lengths, 1 to 2"]),
    "ragged arrays": (([np.zeros((k % 3 + 1, 2)) for k in range(8)], LABELS), ["different lengths, 1 to 3"]),
    "mixed": (([[1], "a"] * 4, LABELS), ["inputs are not an array of numbers"]),
    "weights": ((IDS, LABELS, LABELS), ["the part is a tuple of 3", "(inputs, labels)"]),
    "sparse": ((SimpleNamespace(toarray=None), LABELS), ["inputs are a sparse matrix", "give x.toarray()"]),
    "a word": ((Frame(np.array([[0, "red"]] * 8, object), ["a", "hue"]), LABELS), ["'red' at sample 0, column 'hue'"]),
    "objects": ((IDS.astype(object), LABELS), ["inputs are Python objects", "np.asarray(x, np.float32)"]),
    "nothing": ((IDS, None), ["labels are NoneType, not an array"]),
    "a dict": ({"x": IDS, "y": LABELS}, ["the part is a dict with x, y", "(inputs, labels)"]),
    "fetch alone": (OnlyFetch(), ["OnlyFetch has no __len__", "fingerprint", "num_classes"]),
    "fetch of a dict": (Fetching({"x": 1}), ["fetch gives a dict with x"]),
}  # fmt: skip


def test_an_input_and_a_label_of_one_name_are_two_fields():
    """The label hid the input, whose parts had other shapes."""
    parts = [({"a": np.zeros((8, wide), np.float32)}, {"a": LABELS}) for wide in (4, 3)]
    with pytest.raises(
        DataError, match=r"the inputs differ: of the training samples a \(4,\) float32, of the validation"
    ):
        open_data(DataConfig(), TaskConfig(loss={"a": "cross_entropy"}), user_data=tuple(parts))


@pytest.mark.parametrize("name", OWN_FAULTS)
def test_faults_of_own_data(name):
    part, words = OWN_FAULTS[name]
    sys.modules["own_pair"] = SimpleNamespace(pair=lambda: (part, part))
    text = fault("own_pair:pair")
    assert all(word in text for word in words) and "own_pair:pair" in text, text


def test_a_sample_itself_may_be_what_the_model_is_to_give():
    config = DataConfig(name="digits", target="inputs")
    data, usual = open_data(config), open_data(DataConfig(name="digits"))
    (inputs, labels), rows = data.val.fetch(np.array([5, 2])), usual.val.fetch(np.array([5, 2]))[0]
    assert (labels["label"] == rows["input"]).all() and (inputs["input"] == rows["input"]).all()
    assert data.sample.labels["label"] == data.sample.inputs["input"] and data.sample.num_classes is None
    assert len(data.val) == len(usual.val) and data.fingerprint != usual.fingerprint


@pytest.mark.parametrize("shape", [(8,), (8, 1), (8, 5), (8, 5, 4)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8", "bool"])
def test_a_function_of_the_users_gets_labels_as_stored(shape, dtype):
    """(n, 1) stays (n, 1), bytes are not divided and no axis is added; a built-in loss gets (n,) as before."""
    labels = (RNG.uniform(0, 200, shape)).astype(dtype)
    for task in ({"loss": "own:loss"}, {"loss": "mse", "metrics": ["own:metric"]}):
        source = source_of(np.ones((8, 3), np.float32), labels, **task)
        _, found = source.fetch(np.arange(8))
        assert found["label"].shape == shape and (found["label"] == labels).all()
        assert source.sample.labels["label"].shape == shape[1:]
    if shape == (8, 1):
        assert source_of(np.ones((8, 3), np.float32), labels, loss="mse").sample.labels["label"].shape == ()


def test_a_loss_of_the_users_leaves_the_number_of_classes_told(tmp_path):
    """By the configuration, or by an object with ``num_classes``; where labels are classes, they tell it."""
    x, y = np.ones((8, 3), np.float32), np.arange(8)[:, None] % 2
    np.savez(tmp_path / "data.npz", x=x, y=y)
    task = TaskConfig(loss="own:loss")
    found = open_data(DataConfig(name="npz", path=str(tmp_path / "data.npz"), num_classes=2), task)
    assert found.sample.num_classes == 2 and found.sample.labels["label"].shape == (1,)
    assert open_data(DataConfig(name="npz", path=str(tmp_path / "data.npz")), task).sample.num_classes is None
    own = SimpleNamespace(fetch=lambda k: (x[k], y[k]), fingerprint="own", num_classes=3)
    part = type("Part", (), {"__len__": lambda self: 8, **vars(own), "fetch": lambda self, k: (x[k], y[k])})()
    assert open_data(DataConfig(), task, (part, part)).sample.num_classes == 3


@pytest.mark.parametrize(
    ("later", "line"),
    [
        (({"a": LABELS}, LABELS), "fetch gives no inputs 'b' for sample 0"),
        ((LABELS, LABELS), "fetch gives no inputs 'b' for sample 0"),
        (({"a": LABELS, "b": LABELS}, {"other": LABELS}), "fetch gives no labels for sample 0"),
    ],
    ids=["one name", "no name", "a name for labels"],
)
def test_a_later_fetch_that_lacks_a_name_is_told(later, line):
    """It ended with a bare KeyError, and an array without a name was taken for each of two inputs."""

    class Changing:
        fingerprint, num_classes = "a", 4
        __len__ = lambda self: 8  # noqa: E731

        def fetch(self, indices):
            if len(indices) == 1:
                return {"a": LABELS[indices], "b": LABELS[indices]}, LABELS[indices]
            return later

    data = open_data(DataConfig(), TaskConfig(), (Changing(), Changing()))
    with pytest.raises(DataError) as caught:
        data.train.fetch(np.arange(8))
    assert caught.value.what == line and caught.value.fix


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("rows", "labels", "line"),
    [
        ([[1, 2], [0.5, 2], [3, 4]], [0, 1, 0], "inputs of sample 0 are int64, and sample 1 holds 0.5"),
        ([[True, False], [0, 1], [3, 1]], [0, 1, 0], "inputs of sample 0 are bool, and sample 2 holds 3"),
        ([[1, 2], [1, 2], [3, 4]], [0, 1, 1.7], "labels of sample 0 are int64, and sample 2 holds 1.7"),
        # A missing value became False.
        (
            [[1, 2]] * 3,
            [True, False, None],
            "sample 2 holds (a missing value or a word|None, and sample 0 a number)",
        ),
        ([[True], [None], [False]], [0, 1, 0], r"sample 1 holds (a missing value or a word|\[None\], and sample 0 a)"),
        ([[0.5, 2], [1, 2], [3, 4]], [0.5, 1, 2], ""),
        ([[1, 0], [True, False], [2.0, 1]], [1, True, 3], ""),
    ],
)
def test_a_first_sample_of_whole_numbers_cuts_no_others(rows, labels, line, streamed):
    """Where the first sample happened to be whole, 0.5 became 0, and with loss mse the label 1.7 became 1."""

    class Whole:
        fingerprint = "a"
        __len__ = lambda self: 3  # noqa: E731

        def __iter__(self):
            return iter([(np.array(row), label) for row, label in zip(rows, labels, strict=True)])

        if not streamed:
            __iter__ = None

            def fetch(self, indices):
                return np.array([rows[k] for k in indices]), np.array([labels[k] for k in indices])

    task = TaskConfig(loss="mse")
    source = open_data(DataConfig(name="own"), task, user_data=(Whole(), Whole())).train
    if line:
        with pytest.raises(DataError, match=line):
            source.fetch(np.arange(3))
    else:
        inputs, found = source.fetch(np.arange(3))
        assert (inputs["input"] == np.array(rows)).all() and (found["label"] == np.array(labels)).all()


class Fetched:
    """An object with ``fetch``; ``change``: what it does to the inputs."""

    num_classes, fingerprint = 2, "x"

    def __init__(self, change):
        self.change = change

    def __len__(self):
        return 40

    def fetch(self, indices):
        x = np.sin(np.add.outer(7.0 * indices, np.arange(5)))
        return self.change(x), indices % 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda x: x - x.mean(0), "fetch makes a sample's values of the others that are fetched with it"),
        (lambda x: x + np.random.rand(*x.shape), "fetch gives other values for the same indices, .*data.transforms"),
        (lambda x: x / np.abs(x).max(), "fetch makes a sample's values of the others"),
    ],
)
def test_a_fetch_that_depends_on_more_than_the_index_is_refused(change, told):
    same = Fetched(lambda x: x)
    with pytest.raises(DataError, match=told):
        open_data(DataConfig(name="a:b"), TaskConfig(), (Fetched(change), same))
    assert len(open_data(DataConfig(name="a:b"), TaskConfig(), (same, same)).train) == 40


class Listed(Fetched):
    def fetch(self, indices):
        inputs, labels = super().fetch(indices)
        return [inputs, tuple(labels.tolist())]


class Bare(Fetched):
    def fetch(self, indices):
        return super().fetch(indices)[0], None


def test_a_fetch_may_give_lists_and_no_labels():
    same = Listed(lambda x: x)
    data = open_data(DataConfig(name="a:b"), TaskConfig(), (same, same))
    assert data.train.fetch(np.arange(3))[1]["label"].tolist() == [0, 1, 0]
    bare, request = Bare(lambda x: x), DataRequest(data.sample, "val", labels=False)
    assert len(open_data(DataConfig(name="a:b"), TaskConfig(), (None, bare), request).parts["val"]) == 40


@pytest.mark.parametrize("kind", ["arrays", "frames", "named"])
def test_one_pair_of_arrays_is_divided(kind):
    """Only torch data sets were: "ndarray has no fetch", with the advice to give (inputs, labels)."""
    pandas = pytest.importorskip("pandas")
    x, y = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32), np.arange(60) % 3
    given = {
        "arrays": (x, y),
        "frames": (pandas.DataFrame(x, columns=["a", "b", "c"]), pandas.Series(y)),
        "named": ({"a": x, "b": x[:, 0]}, y),
    }[kind]
    data = open_data(DataConfig(name="own", val_fraction=0.2), TaskConfig(), user_data=given)
    assert (len(data.train), len(data.val)) == (48, 12)
    for part in (data.train, data.val):
        inputs, labels = part.fetch(np.arange(len(part)))
        assert np.bincount(labels["label"]).tolist() == [len(part) // 3] * 3
        rows = [next(k for k in range(60) if (x[k] == row).all()) for row in inputs.get("input", inputs.get("a"))]
        assert (y[rows] == labels["label"]).all()
    fold = open_data(DataConfig(name="own", fold=[0, 4]), TaskConfig(), user_data=given)
    assert (len(fold.train), len(fold.val)) == (45, 15)


def test_two_parts_of_one_kind_are_no_inputs_and_labels():
    pandas = pytest.importorskip("pandas")
    x = np.zeros((8, 3), np.float32)
    frame = pandas.DataFrame(x, columns=["a", "b", "label"])
    for parts in ((x, x), (frame, frame), ({"a": x, "label": LABELS}, {"a": x, "label": LABELS})):
        with pytest.raises(DataError, match="give \\(inputs, labels\\)"):
            open_data(DataConfig(name="own"), TaskConfig(loss="mse"), user_data=parts)


def test_columns_of_one_name_are_known_by_their_order():
    """Names were dropped, so that other columns in the validation part were not noticed: an accuracy of 0.53 for 1."""
    pandas = pytest.importorskip("pandas")
    assert user_data._columns(pandas.DataFrame(np.zeros((2, 3)), columns=["a", "b", "b"])) == ("a", "b", "b.1")
    assert user_data._columns(pandas.DataFrame(np.zeros((2, 3)))) == ()
    assert user_data._columns(pandas.DataFrame(np.zeros((2, 2)), columns=[2020, 2021])) == ("2020", "2021")
