"""What data mean belongs to the run: columns by their names, classes by theirs, all samples of other data."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from PIL import Image

from hvd_train.config import DataConfig, TaskConfig, load_config
from hvd_train.data.catalog import open_data, pack
from hvd_train.data.dataset import DataRequest
from hvd_train.data.fitted import as_run
from hvd_train.data.packing import Alone
from hvd_train.data.wrapper import drawn
from hvd_train.errors import ConfigError, DataError
from hvd_train.protocol import Field, Sample
from tests.data.test_tables import write

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3)).astype(np.float32)
NAMES, WORDS = ("a", "b", "c"), np.array(["ant", "bee", "cow"])
Y = np.arange(60) % 3
MSE, CLASSES = TaskConfig(loss="mse"), TaskConfig()


def table(path, order=(*NAMES, "y"), rows=slice(None), **columns):
    found = {**{name: X[rows, k] for k, name in enumerate(NAMES)}, "y": X[rows, 0] * 2, **columns}
    return write(path, {name: found[name] for name in (*order, *columns)})


def config(name, path, **keys):
    return DataConfig(name=name, path=str(path), **keys)


def for_run(settings, run, task=CLASSES, split="all", labels=True):
    """(inputs, labels) of all samples of the split, and what is remarked, where data are read for a finished run."""
    data = open_data(settings, task, request=DataRequest(run, split, labels))
    source = data.parts[split]
    inputs, found = source.fetch(np.arange(len(source)))
    (x,), (y,) = inputs.values(), found.values()
    return x, y, data


def fault(*args, **keys):
    with pytest.raises(DataError) as caught:
        for_run(*args, **keys)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture(params=[".csv", ".parquet"])
def suffix(request):
    return request.param


def test_columns_are_read_by_their_names(tmp_path, suffix):
    """x3, y, x2, x1 gave r2 0.016 where x1, x2, x3, y gave 0.998, with exit code 0."""
    run = open_data(config("table", table(tmp_path / f"a{suffix}"), labels="y"), MSE).sample
    assert run.inputs["input"].columns == NAMES
    other = config("table", table(tmp_path / f"b{suffix}", ("c", "y", "b", "a")), labels="y")
    x, y, data = for_run(other, run, MSE)
    assert (x == X).all() and (y == X[:, 0] * 2).all() and not data.remarks and data.sample.inputs == run.inputs
    more = config("table", table(tmp_path / f"c{suffix}", z=X[:, 0]), labels="y")
    assert (for_run(more, run, MSE)[0] == X).all()
    assert for_run(more, run, MSE)[2].remarks == ["column z is left out: the run was trained without"]
    less = config("table", table(tmp_path / f"d{suffix}", ("c", "y")), labels="y")
    assert "columns a, b missing, with which the run was trained" in fault(less, run, MSE)
    chosen = other.model_copy(update={"features": ["a", "b"]})
    assert "data.features are a, b, and the run was trained with a, b, c" in fault(chosen, run, MSE)


def test_packed_columns_and_classes_are_those_of_the_run(tmp_path):
    run = open_data(config("table", table(tmp_path / "a.csv", y=WORDS[Y]), labels="y"), CLASSES).sample
    few = table(tmp_path / "b.csv", ("c", "a", "b"), Y > 0, y=WORDS[Y[Y > 0]])
    pack(config("table", few, labels="y"), CLASSES, tmp_path / "packed", Alone())
    x, y, data = for_run(config("packed", tmp_path / "packed"), run)
    order = np.lexsort(x.T)
    assert (x[order] == X[Y > 0][np.lexsort(X[Y > 0].T)]).all() and data.sample.labels == run.labels
    pairs = {tuple(row): label for row, label in zip(X.tolist(), Y.tolist(), strict=True)}
    assert [pairs[tuple(row)] for row in x.tolist()] == y.tolist()
    with pytest.raises(
        DataError, match="the classes are cow, bee, and the data have bee, cow; data.classes; set it when packing"
    ):
        open_data(config("packed", tmp_path / "packed", classes=["cow", "bee"]))


def test_words_keep_the_numbers_of_the_run(tmp_path, suffix):
    """A table of other words gave 0.008 instead of 0.975."""
    whole = config("table", table(tmp_path / f"a{suffix}", y=WORDS[Y]), labels="y")
    run = open_data(whole).sample
    assert run.labels["label"].names == tuple(WORDS)
    two = config("table", table(tmp_path / f"b{suffix}", rows=Y > 0, y=WORDS[Y[Y > 0]]), labels="y")
    assert for_run(two, run)[1].tolist() == Y[Y > 0].tolist()
    renamed = np.where(Y == 1, "cat", WORDS[Y])
    other = config("table", table(tmp_path / f"c{suffix}", y=renamed), labels="y")
    text = fault(other, run)
    assert "'cat' is no class of the run: ant, bee, cow" in text and "row 2" in text
    assert for_run(other, run, labels=False)[1].tolist() == [0] * 60
    told = for_run(whole.model_copy(update={"classes": list(WORDS)}), run)
    assert told[1].tolist() == Y.tolist()
    assert "those of the run are ant, bee, cow" in fault(whole.model_copy(update={"classes": ["x", "y", "z"]}), run)


def pictures(folder, kinds):
    for kind in kinds:
        (folder / kind).mkdir(parents=True)
        for k in range(4):
            Image.fromarray(np.full((4, 4), 40 * len(kind) + k, np.uint8)).save(folder / kind / f"{k}.png")
    return folder


def test_folders_keep_the_numbers_of_the_run(tmp_path):
    """Two folders of three, with the num_classes=3 that a message suggested, gave 0.0."""
    run = open_data(config("imagefolder", pictures(tmp_path / "a", WORDS))).sample
    some = config("imagefolder", pictures(tmp_path / "b", WORDS[1:]))
    for settings in (some, some.model_copy(update={"num_classes": 3})):
        found = for_run(settings, run)
        assert found[1].tolist() == [1] * 4 + [2] * 4 and found[2].sample.labels == run.labels
    other = pictures(tmp_path / "c", ("bee", "cat"))
    assert "unknown class cat: the run has ant, bee, cow" in fault(config("imagefolder", other), run)
    loose = tmp_path / "d"
    loose.mkdir()
    for k in range(3):
        Image.fromarray(np.full((4, 4), k, np.uint8)).save(loose / f"{k}.png")
    x, _, data = for_run(config("imagefolder", loose), run, labels=False)
    assert x[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert data.parts["all"].files == [str(loose / f"{k}.png") for k in range(3)]


def test_classes_are_listed_in_their_order(tmp_path, suffix):
    path = table(tmp_path / f"a{suffix}", y=WORDS[Y])
    data = open_data(config("table", path, labels="y", classes=["cow", "ant", "bee"]))
    numbers = np.concatenate([part.fetch(np.arange(len(part)))[1]["label"] for part in (data.train, data.val)])
    assert np.bincount(numbers).tolist() == [20] * 3 and data.sample.labels["label"].names == ("cow", "ant", "bee")
    usual = open_data(config("table", path, labels="y"))
    assert (usual.val.fetch(np.arange(12))[0]["input"] == data.val.fetch(np.arange(12))[0]["input"]).all()
    with pytest.raises(DataError, match="'cow' is no class of data.classes: ant, bee"):
        open_data(config("table", path, labels="y", classes=["ant", "bee"]))
    np.savez(tmp_path / "n.npz", x=X, y=Y)
    named = open_data(config("npz", tmp_path / "n.npz", classes=["x", "y", "z"]))
    assert named.sample.labels["label"].names == ("x", "y", "z")
    np.savez(tmp_path / "w.npz", x=X, y=WORDS[Y])
    assert for_run(config("npz", tmp_path / "w.npz"), usual.sample)[1].tolist() == Y.tolist()


@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_labels_with_gaps_are_told_and_renumbered(tmp_path, kind):
    """Postal codes gave 90 211 classes; labels 1 to 3 four; 3e9 was 'out of memory'."""

    def data(values, **keys):
        labels = np.array(values)[Y]
        if kind == "csv":
            return config("table", table(tmp_path / "g.csv", y=labels), labels="y", **keys)
        np.savez(tmp_path / "g.npz", x=X, y=labels)
        return config("npz", tmp_path / "g.npz", **keys)

    gaps = open_data(data([1, 2, 3]))
    assert gaps.sample.num_classes == 4
    assert gaps.remarks == ["labels: class 0 does not occur (data.classes: auto numbers those that do)"]
    codes = [10115, 90210, 80331]
    for values in (codes, [0, 3_000_000_000, 5]):
        with pytest.raises(
            DataError, match=f"labels up to {max(values):,} are {max(values) + 1:,} classes.*60 samples"
        ):
            open_data(data(values))
    for classes in ("auto", sorted(codes), [90210, 10115, 80331]):
        found = open_data(data(codes, classes=classes))
        listed = sorted(codes) if classes == "auto" else classes
        assert found.sample.labels["label"].names == tuple(map(str, listed)) and not found.remarks
        x, y, _ = for_run(data(codes), found.sample)
        assert (x == X).all() and y.tolist() == [listed.index(codes[k]) for k in Y]
        text = fault(data([10115, 7, 80331]), found.sample)
        assert "7" in text and "the run" in text
    with pytest.raises(DataError, match="7"):
        open_data(data([10115, 7, 80331], classes=codes))


def test_classes_that_only_the_validation_part_has_are_told():
    (line,) = open_data(DataConfig(name="own"), user_data=((X, Y % 2), (X, Y + 1))).remarks
    assert line == "labels of data, val: classes 2, 3 occur only here, and no sample of the training part is one"


def test_all_samples_without_labels(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    run = open_data(config("npz", tmp_path / "a.npz")).sample
    np.savez(tmp_path / "b.npz", x=X[:1])
    assert (for_run(config("npz", tmp_path / "b.npz"), run, labels=False)[0] == X[:1]).all()
    folder = tmp_path / "npy"
    folder.mkdir()
    np.save(folder / "x.npy", X)
    assert (for_run(config("npy", folder), run, labels=False)[0] == X).all()
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["train_x"], file["val_x"] = X[:40], X[40:]
    assert (for_run(config("hdf5", tmp_path / "a.h5"), run, labels=False)[0] == X).all()
    (tmp_path / "t.csv").write_text("c,a,b\n" + "".join(f"{c},{a},{b}\n" for a, b, c in X.tolist()))
    of_table = open_data(config("table", table(tmp_path / "y.csv"), labels="y"), MSE).sample
    assert (for_run(config("table", tmp_path / "t.csv", labels="y"), of_table, MSE, labels=False)[0] == X).all()
    given = open_data(
        DataConfig(name="own"), user_data=lambda: (None, (X, None)), request=DataRequest(run, "all", labels=False)
    ).parts["all"]
    assert (given.fetch(np.arange(60))[0]["input"] == X).all()


def test_named_inputs_and_types_are_those_of_the_run():
    pair = ({"a": X, "b": X[:, :1]}, Y)
    run = open_data(DataConfig(name="own"), user_data=(pair, pair)).sample

    def given(inputs):
        return open_data(DataConfig(name="own"), user_data=((inputs, Y), None), request=DataRequest(run, "all"))

    one = open_data(DataConfig(name="own"), user_data=(({"a": X}, Y), ({"a": X}, Y))).sample
    renamed = open_data(DataConfig(name="own"), user_data=(({"c": X}, Y), None), request=DataRequest(one, "all"))
    assert renamed.remarks == ["input c is used as a, its name in the run"]
    more = given({"c": X, "b": X[:, :1], "a": X})
    assert more.remarks == ["inputs c left out: the run was trained without"]
    assert list(more.parts["all"].fetch(np.arange(3))[0]) == ["a", "b"]
    with pytest.raises(DataError, match="inputs b missing, which the run was trained with; there are a, c"):
        given({"a": X, "c": X})
    with pytest.raises(DataError, match="inputs 'a' are int64, whole numbers, and the run was trained with float32"):
        given({"a": X.astype(np.int64), "b": X[:, :1]})


MIXED = np.array(["1", "2", "none"])


@pytest.mark.parametrize("words", [MIXED, np.array(["01", "02", "03"])])
def test_words_that_read_as_numbers_are_words(tmp_path, words):
    """A file of '1' and '2' alone gave the classes '2' and 'none', in an evaluation and as a validation part."""
    order = words[::-1][Y] if words is MIXED else words[Y]
    table(tmp_path / "a.parquet", y=order)
    folder = tmp_path / "parts"
    folder.mkdir()
    table(folder / "train.parquet", y=order)
    run = open_data(config("table", tmp_path / "a.parquet", labels="y")).sample
    assert run.labels["label"].names == tuple(words)
    table(tmp_path / "b.csv", rows=Y < 2, y=words[Y[Y < 2]])
    table(folder / "val.csv", rows=Y < 2, y=words[Y[Y < 2]])
    assert for_run(config("table", tmp_path / "b.csv", labels="y"), run)[1].tolist() == Y[Y < 2].tolist()
    val = open_data(config("table", folder, labels="y")).val
    assert val.fetch(np.arange(len(val)))[1]["label"].tolist() == Y[Y < 2].tolist()
    np.savez(tmp_path / "n.npz", x=X, y=Y)
    assert f"is called '{words[0]}'" in fault(config("npz", tmp_path / "n.npz"), run)


def packed(folder, values, **keys):
    np.savez(folder.with_suffix(".npz"), x=X[: len(values)], y=values)
    pack(config("npz", folder.with_suffix(".npz"), **keys), CLASSES, folder, Alone())
    return config("packed", folder)


def labels_of(settings, run):
    """{the first column: label}, as packing divides the samples."""
    x, y, data = for_run(settings, run)
    places = [X[:, 0].tolist().index(value) for value in x[:, 0].tolist()]
    return y[np.argsort(places)].tolist(), data.remarks


def test_packed_numbers_and_names_meet_those_of_the_run(tmp_path):
    """Packed as classes 1 and 2 (data.classes: auto), and a run of the numbers 0 to 2: each label was one too small."""
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    plain = open_data(config("npz", tmp_path / "a.npz")).sample
    ones = np.arange(60) % 2 + 1
    named = packed(tmp_path / "named", ones, classes="auto")
    assert labels_of(named, plain) == (ones.tolist(), [])
    np.savez(tmp_path / "b.npz", x=X, y=Y + 1)
    run = open_data(config("npz", tmp_path / "b.npz", classes="auto")).sample
    bare = packed(tmp_path / "bare", ones)
    assert labels_of(bare, run) == ((ones - 1).tolist(), [])
    zero = packed(tmp_path / "zero", np.arange(60) % 2)
    assert "unknown class 0: the run has 1, 2, 3" in fault(zero, run)
    words = open_data(config("npz", tmp_path / "a.npz", classes=list(WORDS))).sample
    assert labels_of(zero, words)[1] == [
        "labels 'label' are whole numbers without names: they are taken as ant 0, bee 1, cow 2"
    ]
    other = packed(tmp_path / "words", WORDS[Y], classes=["bee", "ant", "cow"])
    assert "have the classes bee, ant, cow, and those of the run are numbers" in fault(other, plain)
    assert labels_of(other.model_copy(update={"classes": list(WORDS)}), plain)[0] == Y.tolist()
    masked = packed(tmp_path / "masked", np.where(Y == 2, -100, Y + 1), classes=[2, 3, 1])
    assert labels_of(masked, run)[0] == np.where(Y == 2, -100, Y).tolist()


def test_what_arrays_do_not_tell_is_told(tmp_path):
    """Bytes are divided by 255: a run over the same values with a fraction gave other numbers, without a word."""
    whole = np.arange(180).reshape(60, 3)
    for kind in ("float32", "uint8"):
        np.savez(tmp_path / f"{kind}.npz", x=whole.astype(kind), y=Y)
    runs = {kind: open_data(config("npz", tmp_path / f"{kind}.npz")).sample for kind in ("float32", "uint8")}
    told = for_run(config("npz", tmp_path / "uint8.npz"), runs["float32"])[2].remarks
    assert told == ["inputs 'input' are uint8 divided by 255, and the run was trained with float32 as stored"]
    told = for_run(config("npz", tmp_path / "float32.npz"), runs["uint8"])[2].remarks
    assert told == ["inputs 'input' are float32 as stored, and the run was trained with uint8 divided by 255"]
    words = open_data(config("table", table(tmp_path / "w.csv", y=WORDS[Y]), labels="y")).sample
    ones = config("table", table(tmp_path / "o.csv", rows=Y < 2, y=Y[Y < 2] + 1), labels="y")
    assert for_run(ones, words)[2].remarks == [
        "labels are whole numbers without names: they are taken as ant 0, bee 1, cow 2"
    ]
    run = open_data(config("table", table(tmp_path / "a.csv", y=Y), labels="y")).sample
    told = for_run(config("npz", tmp_path / "float32.npz"), run)[2].remarks
    assert told == ["the data do not name their columns: they are taken as a, b, c"]


def test_another_normalization_and_another_size_are_told(tmp_path):
    """``eval -c`` with a file without data.transforms gave the scores of inputs that the model had never seen."""
    pixels = RNG.random((60, 6, 6, 1)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=pixels, y=Y)
    np.savez(tmp_path / "b.npz", x=pixels[:, :4, :4], y=Y)
    plain, other = config("npz", tmp_path / "a.npz"), config("npz", tmp_path / "b.npz")
    normalized = plain.model_validate(
        plain.model_dump() | {"transforms": [{"name": "normalize", "mean": 0.5, "std": 2}]}
    )
    run = open_data(normalized).sample
    assert for_run(plain, run)[2].remarks == [
        "inputs 'input' are not normalized, and in the training they were normalized by mean 0.5 and std 2 "
        "(data.transforms)"
    ]
    assert not for_run(normalized, run)[2].remarks and not for_run(plain, open_data(plain).sample)[2].remarks
    assert for_run(other, open_data(plain).sample)[2].remarks == [
        "inputs 'input' have the shape (4, 4, 1), and the run was trained with (6, 6, 1)"
    ]


def test_names_that_are_none_are_refused():
    for classes in ("[yes, no]", "[1.5, 2]", "[a, a]", "[]", "words"):
        with pytest.raises(ConfigError, match="data.classes: must be"):
            load_config(None, [f"data.classes={classes}"])
    with pytest.raises(ConfigError, match="data.num_classes: 1, and data.classes names 2"):
        load_config(None, ["data.classes=[a, b]", "data.num_classes=1"])
    assert load_config(None, ["data.classes=[10, 2]"]).data.classes == ["10", "2"]


def test_words_of_another_part_keep_the_numbers_of_the_training_part(tmp_path):
    """Training labels 0, 1, 2 and a validation part of '1' and '2': they were numbered anew, 0 and 1."""
    texts = np.array(["0", "1", "2"])

    def parts(of_training, of_val):
        return open_data(DataConfig(name="own"), user_data=((X, of_training), (X[Y > 0], of_val[Y > 0])))

    data = parts(Y, texts[Y])
    assert data.val.fetch(np.arange(len(data.val)))[1]["label"].tolist() == Y[Y > 0].tolist()
    assert data.sample.labels["label"].names == () and data.sample.num_classes == 3
    with pytest.raises(DataError, match="labels are words, bee, cow, and the classes of the training part are numbers"):
        parts(Y, np.array(WORDS)[Y])
    data = parts(np.array(WORDS)[Y], Y)
    assert data.remarks == ["labels are whole numbers without names: they are taken as ant 0, bee 1, cow 2"]
    folder = tmp_path / "parts"
    folder.mkdir()
    table(folder / "train.csv", y=Y)
    table(folder / "val.parquet", y=texts[Y])
    val = open_data(config("table", folder, labels="y")).val
    assert val.fetch(np.arange(len(val)))[1]["label"].tolist() == Y.tolist()


def test_names_that_look_alike_are_told():
    """The same letters, composed in two ways by two systems, were two classes of one name in every table."""
    words = np.array(["caf\u00e9", "cafe\u0301", "tea"])[Y]
    parts = (X, words), (X, words)
    (line,) = open_data(DataConfig(name="own"), user_data=parts).remarks
    assert line == r"labels: classes 'cafe\u0301' and 'caf\xe9' look alike, and are two classes"
    assert not open_data(DataConfig(name="own"), user_data=((X, WORDS[Y]), (X, WORDS[Y]))).remarks


def test_numbers_of_arrays_have_one_type_in_a_run(tmp_path):
    """Labels that are whole in one part, or in other data, are of the type of the fractions."""
    parts = {"train_x": X[:40], "train_y": np.arange(40), "val_x": X[40:], "val_y": np.arange(20) / 4}
    np.savez(tmp_path / "a.npz", **parts)
    data = open_data(config("npz", tmp_path / "a.npz"), MSE)
    assert {part.sample.labels["label"].dtype for part in data.parts.values()} == {"float32"}
    assert data.train.fetch(np.arange(3))[1]["label"].dtype == np.float32
    assert data.train.label("label", np.arange(3)).tolist() == [0, 1, 2]
    np.savez(tmp_path / "b.npz", x=X, y=np.arange(60) > 30)
    _, y, other = for_run(config("npz", tmp_path / "b.npz"), data.sample, MSE)
    assert y.dtype == np.float32 and y.sum() == 29 and not other.remarks
    pack(config("npz", tmp_path / "a.npz"), MSE, tmp_path / "packed", Alone())
    packed = open_data(config("packed", tmp_path / "packed"), MSE)
    assert packed.train.label("label", np.array([5, 2])).tolist() == [5, 2] and packed.sample == data.sample


def test_a_stream_whose_labels_get_the_type_of_the_other_part_keeps_its_epochs():
    class Numbers:
        fingerprint = "numbers"

        def __init__(self, kind):
            self.kind = kind

        def __len__(self):
            return 4

        def iterate(self, epoch, start):
            for k in range(start, 4):
                yield np.zeros(2, np.float32), self.kind(10 * epoch + k)

    data = open_data(DataConfig(name="mine:x"), MSE, user_data=(Numbers(int), Numbers(float)))
    _, labels = drawn(data.train, np.arange(4), 0, 2)
    assert labels["label"].dtype == np.float32 and labels["label"].tolist() == [20, 21, 22, 23]


def test_labels_of_another_kind_than_in_the_run_are_told(tmp_path):
    own = TaskConfig(loss="mine:loss")
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    numbers = open_data(config("npz", tmp_path / "a.npz"), own).sample
    for k, word in enumerate(WORDS):
        for i in range(3):
            (tmp_path / "p" / word).mkdir(parents=True, exist_ok=True)
            Image.new("L", (3, 1), k).save(tmp_path / "p" / word / f"{i}.png")
    folder = config("imagefolder", tmp_path / "p")
    classes = open_data(folder, own).sample
    image = np.zeros((6, 1, 3), np.uint8)
    np.savez(tmp_path / "b.npz", x=image, y=np.arange(6) % 3)
    other = for_run(config("npz", tmp_path / "b.npz"), classes, own)[2]
    assert "labels 'label' are numbers, and the run was trained with classes: ant 0, bee 1, cow 2" in other.remarks
    run = replace(classes, labels=numbers.labels)
    with pytest.raises(DataError, match="class ant is not a number, and the run was trained on numbers"):
        for_run(folder, run, own)


def test_labels_in_another_order_get_the_run_s_titles():
    """Values were put in the run's order, and the table of predictions had the titles of the data."""
    x, y = np.zeros((6, 2), np.float32), np.arange(12.0).reshape(6, 2)
    field = Field((2,), "float32", columns=("u", "v"))
    run = Sample({"input": Field((2,), "float32")}, {"label": field})
    source = SimpleNamespace(
        sample=Sample(run.inputs, {"label": replace(field, columns=("v", "u"))}),
        fetch=lambda rows: ({"input": x[rows]}, {"label": y[rows]}),
        note="", fingerprint="", remarks=(),
    )  # fmt: skip
    made = as_run(source, run, True, "mine", -100)
    assert made.sample.labels["label"].columns == ("u", "v")
    assert made.fetch(np.arange(2))[1]["label"].tolist() == [[1.0, 0.0], [3.0, 2.0]]
