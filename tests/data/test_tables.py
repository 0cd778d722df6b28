"""Tables and CIFAR-10's files read back what was written; every fault names the file, the column and the row."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pyarrow
import pytest
from pyarrow import csv, parquet
from sklearn.datasets import load_diabetes, load_digits, load_iris

from hvd_train.config import DataConfig, TaskConfig, load_config
from hvd_train.data import lines, tables
from hvd_train.data.catalog import open_data
from hvd_train.data.dataset import DataRequest
from hvd_train.data.detect import kind_of
from hvd_train.errors import ConfigError, DataError

DIABETES, IRIS = load_diabetes(), load_iris()
RANDOM = np.random.default_rng(0).normal(size=500)
NAMES = [name.split(" (")[0].replace(" ", "_") for name in IRIS.feature_names]
MSE = TaskConfig(loss="mse", metrics=["r2"])


def write(path, columns):
    table = pyarrow.table(columns)
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        csv.write_csv(table, path, csv.WriteOptions(delimiter="\t" if path.suffix == ".tsv" else ","))
    return path


def diabetes():
    return {name: DIABETES.data[:, k] for k, name in enumerate(DIABETES.feature_names)} | {"y": DIABETES.target}


def iris(words=True):
    labels = IRIS.target_names[IRIS.target] if words else IRIS.target
    return {"kind": labels} | {name: IRIS.data[:, k] for k, name in enumerate(NAMES)}


def opened(path, labels="y", task=MSE, **keys):
    return open_data(DataConfig(name="table", path=str(path), labels=labels, **keys), task)


def everything(source):
    inputs, labels = source.fetch(np.arange(len(source)))
    return inputs["input"], labels["label"]


def both(data):
    """Training and validation part together, by their first feature."""
    x, y = (np.concatenate(part) for part in zip(everything(data.train), everything(data.val), strict=True))
    order = np.lexsort((*x.T, y.T[0] if y.ndim > 1 else y))
    return x[order], y[order]


@pytest.fixture(params=[".csv", ".tsv", ".parquet"])
def suffix(request):
    return request.param


def test_a_regression_reads_back_what_was_written(tmp_path, suffix):
    data = opened(write(tmp_path / f"d{suffix}", diabetes()), val_fraction=0.25)
    assert (len(data.train), len(data.val)) == (332, 110)
    assert data.sample.input_shape == (10,) and data.sample.num_classes is None
    x, y = DIABETES.data.astype(np.float32), DIABETES.target.astype(np.float32)
    order = np.lexsort((*x.T, y))
    found = both(data)
    assert (found[0] == x[order]).all() and (found[1] == y[order]).all()
    assert found[0].dtype == found[1].dtype == np.float32


def test_columns_are_chosen_and_several_are_learned(tmp_path, suffix):
    path = write(tmp_path / f"d{suffix}", diabetes())
    data = opened(path, labels=["y", "bp"], features=["bmi", "age"])
    x, y = both(data)
    assert x.shape == (442, 2) and y.shape == (442, 2)
    columns = diabetes()
    wanted = np.stack([columns[name].astype(np.float32) for name in ("bmi", "age", "y", "bp")], axis=1)
    rows = {tuple(row) for row in np.concatenate([x, y], axis=1).tolist()}
    assert rows == {tuple(row) for row in wanted.tolist()}


@pytest.mark.parametrize("words", [True, False])
def test_classes_are_whole_numbers_or_words_in_alphabetical_order(tmp_path, suffix, words):
    data = opened(write(tmp_path / f"d{suffix}", iris(words)), labels="kind", task=TaskConfig())
    assert data.sample.num_classes == 3 and data.sample.input_shape == (4,)
    assert np.bincount(everything(data.val)[1]).tolist() == [10, 10, 10]
    x, y = IRIS.data.astype(np.float32), IRIS.target
    order = np.lexsort((*x.T, y))
    found = both(data)
    assert (found[0] == x[order]).all() and (found[1] == y[order]).all()
    names = ("setosa", "versicolor", "virginica") if words else ()
    assert data.sample.labels["label"].names == names and data.sample.inputs["input"].columns == tuple(NAMES)


def test_a_folder_holds_both_parts_and_validation_keeps_to_the_classes_of_training(tmp_path, suffix):
    columns = iris()
    first = {name: x[np.arange(150) % 3 > 0] for name, x in columns.items()}
    held = {name: x[100:] for name, x in columns.items()}  # virginica alone
    write(tmp_path / f"train{suffix}", first)
    write(tmp_path / f"val{suffix}", held)
    data = opened(tmp_path, labels="kind", task=TaskConfig())
    assert (len(data.train), len(data.val)) == (100, 50) and set(everything(data.val)[1].tolist()) == {2}
    held["kind"] = np.where(np.arange(50) == 7, "rose", held["kind"])
    write(tmp_path / f"val{suffix}", held)
    text = fault(tmp_path, labels="kind", task=TaskConfig())
    assert f"val{suffix}, column 'kind', row 8" in text and "'rose' is no class of the training part: setosa" in text


def test_losses_by_name_take_the_columns_of_their_names(tmp_path, suffix):
    path = write(tmp_path / f"d{suffix}", iris() | {"old": IRIS.data[:, 0] * 2})
    data = opened(path, labels=["kind", "old"], task=TaskConfig(loss={"kind": "cross_entropy", "old": "mse"}))
    inputs, labels = data.train.fetch(np.arange(20))
    assert data.sample.num_classes == 3 and labels["kind"].dtype == np.int64
    np.testing.assert_allclose(labels["old"], inputs["input"][:, 0] * 2, rtol=1e-6)


def test_an_own_loss_gets_whole_numbers_as_they_are(tmp_path, suffix):
    path = write(tmp_path / f"d{suffix}", iris(words=False) | {"half": IRIS.target / 2})
    own = TaskConfig(loss="mine:loss")
    for labels, dtype in (("kind", "int64"), ("half", "float32")):
        assert opened(path, labels=labels, task=own).sample.labels["label"].dtype == dtype
    assert opened(path, labels="kind").sample.labels["label"].dtype == "float32"


def test_a_dictionary_a_boolean_and_whole_numbers_are_numbers_or_classes(tmp_path):
    kinds = pyarrow.array(IRIS.target_names[IRIS.target]).dictionary_encode()
    columns = {"kind": kinds, "flag": IRIS.target > 0, "count": np.arange(150), "big": np.arange(150, dtype=np.uint8)}
    path = write(tmp_path / "d.parquet", columns)
    data = opened(path, labels="kind", task=TaskConfig())
    assert data.sample.input_shape == (3,) and data.sample.num_classes == 3
    assert opened(path, labels="flag", features=["count"], task=TaskConfig()).sample.num_classes == 2


def test_whole_numbers_that_32_bits_round_are_told(tmp_path, suffix):
    """An id or a time above 2^24 came to the model as another number, and nobody said so."""
    columns = {
        "id": 2**24 + np.arange(9),
        "long": 2**60 + np.arange(9),
        "km": 1e8 + np.arange(9) / 2,
        "y": np.arange(9),
    }
    data = opened(write(tmp_path / f"d{suffix}", columns))
    assert data.train.note.count("holds integers") == 2
    assert "column 'km' holds numbers whose differences float32 rounds: 100000004 -> 100000000 (" in data.train.note
    assert "column 'id' holds integers that float32 rounds: 16777217 -> 16777216 (leave" in data.train.note
    assert f"{2**60 + 1} -> {2**60}" in data.train.note
    small = {"a": np.arange(9) * 2**20, "far": 2**40 * np.arange(9), "m": 1e5 + np.arange(9) / 3, "y": np.arange(9)}
    assert opened(write(tmp_path / f"e{suffix}", small)).train.note == ""
    own = opened(tmp_path / f"d{suffix}", labels="id", features=["y"], task=TaskConfig(loss={"id": "mse"}))
    assert "16777217 -> 16777216" in own.train.note


def test_the_fingerprint_is_the_contents(tmp_path):
    prints = [opened(write(tmp_path / f"d{suffix}", diabetes())).fingerprint for suffix in (".csv", ".parquet")]
    other = diabetes() | {"bmi": DIABETES.data[:, 2] + 1}
    assert prints[0] == prints[1] != opened(write(tmp_path / "other.csv", other)).fingerprint


def fault(path, **keys):
    with pytest.raises(DataError) as caught:
        opened(path, **keys)
    text = str(caught.value)
    assert "\n" not in text
    return text


CSV_FAULTS = {
    "word": ("a,y\n1,2\n3,4\nx7,6\n5,5\n", {}, ["'x7' is no number", "column 'a', row 3"]),
    "late word": ("a,y\n" + "1,2\n" * 70_000 + "1,?\n", {}, ["'?' is no number", "column 'y', row 70001"]),
    "empty cell": ("a,y\n1,2\n ,4\n", {}, ["the cell is empty; ", "column 'a', row 2"]),
    "nan": ("a,y\n1,2\nnan,4\n", {}, ["'nan' is NaN", "column 'a', row 2"]),
    "large": ("a,y\n1,2\n1e39,4\n", {}, ["'1e39' is NaN, infinite or too large", "column 'a', row 2"]),
    "NUL": ("a,y\n1,x\n2,x\0\n", {}, ["holds NUL bytes", "iconv -f utf-16"]),
    "short row": ("a,y\n1,2\n3\n", {}, ["the row has 1 cells, and the header 2: '3'", "d.csv, row 2"]),
    "no rows": ("a,y\n", {}, ["the data set is empty"]),
    "no bytes": ("", {}, ["no readable table", "d.csv"]),
    "twice": ("a,a,y\n1,2,3\n", {}, ["duplicate columns: a"]),
    "column": ("age,y\n1,2\n", {"features": ["agee"]}, ["no column", "'agee'", "did you mean 'age'", "data.features"]),
    "label": ("age,y\n1,2\n", {"labels": "z"}, ["no column", "unknown 'z'", "there are age, y", "data.labels"]),
    "no label": ("age,y\n1,2\n", {"labels": None}, ["a table needs labels", "data.labels"]),
    "both": ("age,y\n1,2\n", {"features": ["age", "y"]}, ["y named twice", "data.features"]),
    "alone": ("y\n1\n2\n", {}, ["no column is left for the features"]),
    "fraction": ("a,y\n1,2.5\n", {"task": TaskConfig()}, ["'2.5' is no whole number", "cross_entropy", "row 1"]),
    "class": ("a,y\n1,2\n1,b\n", {"task": TaskConfig()}, ["'b' is no whole number", "column 'y', row 2"]),
    "negative": ("a,y\n1,2\n1,-1\n", {"task": TaskConfig()}, ["'-1' is no class: 0, 1, 2, ...", "column 'y', row 2"]),
    "words": (
        "a,y\n1,b\n1,c\n",
        {"task": TaskConfig(loss="mine:loss")},
        ["'b' is no number", "column 'y', row 1", "words are classes only with task.loss: cross_entropy"],
    ),
    "auto": (
        "a,y\n1,1\n1,7\n",
        {"classes": "auto", "task": TaskConfig(loss="mine:loss")},
        ["these labels are not"],
    ),
    "range": (
        "a,y\n1,2\n1,3\n",
        {"task": TaskConfig(), "num_classes": 3},
        ["'3' is no class: 0 to 2", "column 'y', row 2"],
    ),
    "several": ("a,b,y\n1,2,0\n", {"labels": ["b", "y"], "task": TaskConfig()}, ["2 columns for one cross_entropy"]),
}


@pytest.mark.parametrize("name", CSV_FAULTS)
def test_faults_of_csv_files(tmp_path, name):
    content, keys, words = CSV_FAULTS[name]
    path = tmp_path / "d.csv"
    path.write_text(content)
    text = fault(path, **keys)
    assert all(word in text for word in words), text


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_an_empty_line_in_a_file_of_one_column_is_told(tmp_path, suffix):
    """What is predicted belongs to the lines of the file: rows must not move up."""
    path = tmp_path / f"d{suffix}"
    for content, values in (("\nx\n1\n2\n\n\n", ["1", "2"]), ('x\n"a\n\nb"\n2\n', ["a\n\nb", "2"])):
        path.write_text(content)
        assert tables.Table.read(path, ["x"]).columns["x"].to_pylist() == values
    path.write_text("x\n1\n\n3\n")
    with pytest.raises(DataError, match=rf"the line is empty; .*d{suffix}, row 2; correct it, or leave it out"):
        tables.Table.read(path, ["x"])


def test_faults_of_parquet_files(tmp_path):
    path = tmp_path / "d.parquet"
    columns = {"a": [1.0, None, 3.0], "y": [1.0, 2.0, 3.0], "day": np.array(["2020-01-01"] * 3, "datetime64[D]")}
    write(path, columns)
    assert "column 'a', row 2" in fault(path, features=["a"])
    huge = write(tmp_path / "f.parquet", {"a": [1, 2], "y": np.array([1, 2**63], np.uint64)})
    assert "'9223372036854775808' is no whole number of 64 bits; " in fault(huge, task=TaskConfig())
    assert opened(huge, task=TaskConfig(loss="mine:loss")).sample.labels["label"].dtype == "float32"
    assert "column 'day' of type date32[day] holds no numbers" in fault(path, features=["day"])
    assert "of type double, and task.loss: cross_entropy wants classes" in fault(
        write(tmp_path / "e.parquet", {"a": [1.0, 2.0], "y": [1.0, 2.0]}), task=TaskConfig()
    )
    path.write_bytes(path.read_bytes()[:-9])
    assert "no readable table" in fault(path)


def test_faults_of_places(tmp_path):
    assert "a file '.txt' is not a table" in fault(write(tmp_path / "d.csv", {"a": [1]}).rename(tmp_path / "d.txt"))
    assert "none found" in fault(tmp_path)
    write(tmp_path / "train.csv", {"a": [1]})
    write(tmp_path / "train.parquet", {"a": [1]})
    assert "train.csv and train.parquet found" in fault(tmp_path)
    (tmp_path / "train.parquet").rename(tmp_path / "held.parquet")
    assert "none found, and held.parquet" in fault(tmp_path) and "validation.csv" in fault(tmp_path)


def test_endings_and_parts_have_several_names(tmp_path):
    write(tmp_path / "a.csv", {"a": [1, 2], "y": [1, 2]}).rename(tmp_path / "A.CSV")
    assert len(opened(tmp_path / "A.CSV").train) == 1
    folder = tmp_path / "all"
    folder.mkdir()
    for name, count in (("Train.csv", 4), ("validation.tsv", 3), ("test.CSV", 2)):
        made = write(folder / name.lower(), {"a": list(range(count)), "y": list(range(count))})
        made.rename(folder / name)
    config = DataConfig(name="table", path=str(folder), labels="y")
    parts = open_data(config, MSE, request=DataRequest(split="test")).parts
    assert {name: len(part) for name, part in parts.items()} == {"train": 4, "val": 3, "test": 2}
    assert list(open_data(config, MSE).parts) == ["train", "val"]
    assert kind_of(folder) == kind_of(tmp_path / "A.CSV") == "table"


@pytest.mark.parametrize("name", ["", "Unnamed: 0", "__index_level_0__"])
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_the_index_that_pandas_writes_is_not_a_feature(tmp_path, suffix, name):
    """The iris are sorted by their kind, so that the number of the row alone told it."""
    path = write(tmp_path / f"t{suffix}", {name: np.arange(150), **iris()})
    data = opened(path, "kind", TaskConfig())
    assert data.sample.inputs["input"].columns == tuple(NAMES)
    assert data.remarks[0].startswith(f"column {name!r} is left out, as pandas names row numbers like this")
    assert opened(path, "kind", TaskConfig(), features=[name, NAMES[0]]).sample.inputs["input"].shape == (2,)


def test_a_column_that_counts_the_rows_is_told(tmp_path):
    path = write(tmp_path / "t.csv", {"id": np.arange(1, 151), **iris()})
    (remark,) = opened(path, "kind", TaskConfig()).remarks
    assert remark.startswith(f"column 'id' of {path} counts the rows")
    assert not opened(path, "kind", TaskConfig(), features=["id"]).remarks


def test_cells_of_several_lines(tmp_path):
    """Where a block of the reader ended within one, the file was called damaged."""
    texts = [f'{k}\n, "quoted"\n' + "word\n" * 9 for k in range(30_000)]
    path = write(tmp_path / "t.csv", {"text": texts, "y": np.arange(len(texts))})
    assert path.stat().st_size > 1 << 20
    table = tables.Table.read(path, ["text", "y"])
    assert table.columns["text"].to_pylist() == texts and (table.numbers("y") == np.arange(len(texts))).all()


def test_text_that_is_not_utf_8_says_how_to_store_it(tmp_path):
    for k, text in enumerate(("größe,y\n1,2\n3,4\n", "a,y\nä,2\nö,4\n")):
        path = tmp_path / f"{k}.csv"
        path.write_bytes(text.encode("latin-1"))
        assert "are not UTF-8; " in fault(path) and "iconv -f latin1 -t utf-8" in fault(path)


def test_a_table_that_is_larger_than_free_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("hvd_train.data.memory.SMALL", 0)
    for ending, free in ((".csv", 60_000), (".parquet", 25_000)):
        monkeypatch.setattr("hvd_train.data.memory.free", lambda free=free: free)
        path = write(tmp_path / f"d{ending}", {"a": RANDOM, "b": RANDOM, "c": RANDOM, "y": RANDOM})
        assert "reading the table takes" in fault(path) and "take fewer columns" in fault(path)
        assert len(opened(path, features=["a"]).train) == 400


def test_very_wide_tables(tmp_path):
    names = [f"column_{k}" * 30 for k in range(4000)]
    path = tmp_path / "wide.csv"
    path.write_text(",".join(["y", *names]) + "\n" + ("1," * 4000 + "2\n") * 3)
    assert path.stat().st_size > 1 << 20 and opened(path).sample.input_shape == (4000,)
    with pytest.raises(ConfigError, match="data.labels: belongs to name: table"):
        load_config(None, ["data.labels=y"])


# ---- CIFAR-10


def cifar(folder, sizes=(40, 25), held=20):
    """Real digits as records: red is the digit, green the digit upside down, blue all 7."""
    digits = load_digits()
    images = np.kron(digits.images, np.ones((4, 4))).astype(np.uint8) * 15
    folder.mkdir(exist_ok=True)
    planes = np.stack([images, images[:, ::-1], np.full_like(images, 7)], axis=1)
    start = 0
    for name, count in [*((f"data_batch_{k + 1}", size) for k, size in enumerate(sizes)), ("test_batch", held)]:
        part = slice(start, start + count)
        records = np.concatenate([digits.target[part, None].astype(np.uint8), planes[part].reshape(count, -1)], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
        start += count
    return planes.transpose(0, 2, 3, 1), digits.target


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_cifar10(tmp_path, inner):
    images, labels = cifar(tmp_path / inner)
    data = open_data(DataConfig(name="cifar10", path=str(tmp_path)))
    assert (len(data.train), len(data.val), data.sample.num_classes) == (65, 20, 10)
    assert data.sample.input_shape == (32, 32, 3) and data.sample.inputs["input"].divisor == 255
    for source, start in ((data.train, 0), (data.val, 65)):
        picked = np.array([19, 3, 3, len(source) - 1, 0])
        x, y = everything(source)
        assert x.dtype == np.uint8 and (x == images[start : start + len(source)]).all()
        assert (y == labels[start : start + len(source)]).all()
        assert (source.fetch(picked)[0]["input"] == x[picked]).all()


def test_faults_of_cifar10(tmp_path):
    def told():
        with pytest.raises(DataError) as caught:
            open_data(DataConfig(name="cifar10", path=str(tmp_path)))
        return str(caught.value)

    assert "there is no data_batch*.bin" in told()
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x04")
    assert "pickled files are not read" in told()
    cifar(tmp_path)
    path = tmp_path / "data_batch_2.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert f"{len(whole) - 1:,} bytes are no whole records of 3,073" in told() and "data_batch_2.bin" in told()
    path.write_bytes(whole[: 3 * 3073] + b"\x0a" + whole[3 * 3073 + 1 :])
    assert "record 3 has the label 10" in told() and "data_batch_2.bin" in told()
    path.write_bytes(b"")
    assert "0 bytes are no whole records" in told()


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_rows_that_a_quotation_mark_joins_are_told(tmp_path, ending):
    """Of 15 rows 13 were left, without a word, where one mark in a column that is not read was not closed."""
    mark = "\t" if ending == ".tsv" else ","
    good = ["1,ok,0", "2,fine,1", '3,"well, yes",1'] * 4

    def remarks(*rows, end="\n"):
        path = tmp_path / f"a{ending}"
        path.write_text(end.join(["x,comment,y", *rows, ""]).replace(",", mark))
        data = open_data(DataConfig(name="table", path=str(path), labels="y", features=["x"]))
        return len(data.train) + len(data.val), [line for line in data.remarks if "lines" in line]

    count, (line,) = remarks('1,"Hi,0', "2,ok,1", '3,"bye,1'.replace('"bye', 'bye"'), *good)
    assert count == 13 and line.startswith(f"{tmp_path}/a{ending} has 13 rows in 15 lines: some quoted cells")
    assert remarks(*good) == (12, []) and remarks(*good, "", "", end="\r\n") == (12, [])
    assert remarks("", *good) == (12, [])


def test_two_writings_of_one_number_are_no_class(tmp_path):
    """007 and 7 became one class, without a word."""
    path = tmp_path / "a.csv"
    path.write_text("x,y\n1,1\n2,007\n3,1\n4,7\n5,1\n")
    with pytest.raises(DataError, match=r"'7' and '007' are one number; .*column 'y', row 4"):
        open_data(DataConfig(name="table", path=str(path), labels="y"))
    as_words = DataConfig(name="table", path=str(path), labels="y", classes=["1", "7", "007"])
    assert open_data(as_words).sample.num_classes == 3
    path.write_text("x,y\n1,00\n2,01\n3,00\n4,01\n5,01\n")
    assert open_data(DataConfig(name="table", path=str(path), labels="y")).sample.num_classes == 2


LABEL_COLUMNS = {
    "1 none 2": "'none' is no whole number, and of 3 labels 2 are numbers",
    "1 2 nan": "'nan' is no whole number, and of 3 labels 2 are numbers",
    "1 2 0x2": "'0x2' is no whole number, and of 3 labels 2 are numbers",
    "cat 7 dog": "'7' is a number, and the others are words",
    "1 2 2.5": "'2.5' is no whole number, and task.loss: cross_entropy wants classes",
    "1.5 2.5 3.5": "is no whole number, and task.loss: cross_entropy wants classes",
}


@pytest.mark.parametrize("cells", LABEL_COLUMNS)
def test_the_order_of_rows_does_not_decide_what_labels_are(tmp_path, cells):
    """The first cell did: 1, none, 2 was refused, and none, 1, 2 was three words."""
    words, wanted = cells.split(), LABEL_COLUMNS[cells]
    for k, order in enumerate(permutations(words)):
        path = tmp_path / f"{k}.csv"
        path.write_text("a,y\n" + "".join(f"{j},{word}\n" for j, word in enumerate(order)))
        said = fault(path, task=TaskConfig())
        assert wanted in said, said
        if "wants classes" not in wanted:
            odd = wanted.split("'")[1]
            assert f"row {order.index(odd) + 1}; correct it; or list data.classes, as words" in said
            listed = DataConfig(name="table", path=str(path), labels="y", classes=words)
            data = open_data(listed, request=DataRequest(split="all"))
            assert everything(data.parts["all"])[1].tolist() == [words.index(word) for word in order]


def test_words_that_stand_for_no_value_are_told(tmp_path):
    for order in permutations(("nan", "cat", "dog")):
        path = tmp_path / "a.csv"
        path.write_text("a,y\n" + "".join(f"1,{word}\n2,{word}\n" for word in order))
        data = opened(path, task=TaskConfig())
        assert data.sample.labels["label"].names == ("cat", "dog", "nan")
        assert "column 'y': 'nan' is treated as a class (if it means no value" in data.train.note
        assert not opened(path, task=TaskConfig(), classes=["nan", "cat", "dog"]).train.note


def test_an_own_loss_gets_no_hexadecimal_numbers(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,y\n1,0x10\n2,0x2\n")
    assert "'0x10' is no number" in fault(path, task=TaskConfig(loss="mine:loss"))


def test_labels_of_one_file_with_fractions_make_all_of_the_run_fractions(tmp_path, suffix):
    """Whole labels and fractions in two files were refused, as the type was decided file by file."""
    own = TaskConfig(loss="mine:loss")
    write(tmp_path / f"train{suffix}", {"a": np.arange(6), "y": np.arange(6) % 3})
    write(tmp_path / f"val{suffix}", {"a": np.arange(2), "y": [0.5, 1.5]})
    data = opened(tmp_path, task=own)
    assert everything(data.train)[1].tolist() == [0, 1, 2, 0, 1, 2] and everything(data.val)[1].tolist() == [0.5, 1.5]
    assert everything(data.train)[1].dtype == everything(data.val)[1].dtype == np.float32
    assert data.sample.labels["label"].dtype == data.val.sample.labels["label"].dtype == "float32"

    def evaluated(run, labels):
        path = write(tmp_path / f"other{suffix}", {"a": np.arange(2), "y": labels})
        config = DataConfig(name="table", path=str(path), labels="y")
        other = open_data(config, own, request=DataRequest(run, "all"))
        return everything(other.parts["all"])[1], other

    labels, other = evaluated(data.sample, [2, 1])
    assert labels.dtype == np.float32 and labels.tolist() == [2, 1] and not other.remarks
    write(tmp_path / f"val{suffix}", {"a": np.arange(2), "y": [1, 0]})
    whole = opened(tmp_path, task=own).sample
    assert whole.labels["label"].dtype == "int64" and evaluated(whole, [2, 1])[0].dtype == np.int64
    labels, other = evaluated(whole, [0.5, 1])
    assert labels.tolist() == [0.5, 1]
    assert other.remarks == ["labels 'label' are float32, and the run was trained with int64"]


def test_a_block_may_end_within_a_quoted_cell(tmp_path):
    """What follows in such a cell looks like rows, so parsing lines one by one finds no fault in it."""
    cell = "x" * 40 + "\n-1000,-1000,none" * 3
    path = tmp_path / "offers.csv"
    rows = [f'{k % 10},{k % 7},"{cell[k % 37 :]}"' for k in range(15_000)]
    path.write_text("\n".join(["price,area,comment", *rows]) + "\n")
    assert path.stat().st_size > tables.BLOCK
    table = tables.Table.read(path, ["price", "area"])
    assert table.numbers("price").tolist() == [k % 10 for k in range(15_000)]
    assert "15,000 rows in 60,000 lines" in table.joined
    lines.PIECE, piece = 7, lines.PIECE  # marks and line breaks in pieces of their own
    try:
        assert lines.breaks_within_quotes(path) and tables.Table.read(path, ["area"]).numbers("area").max() == 6
        path.write_text('a,b\n"x ""y"", z",1\n' * 9)
        assert not lines.breaks_within_quotes(path)
    finally:
        lines.PIECE = piece


def test_codes_with_zeros_keep_them(tmp_path):
    """As postal codes: with ``classes: auto`` their names are what the file holds."""
    path = tmp_path / "zip.csv"
    path.write_text("\n".join(["x,zip", *(f"{k},{('00501', '01234', '90210')[k % 3]}" for k in range(30))]))
    task = TaskConfig()
    data = opened(path, "zip", task, classes="auto")
    assert data.sample.labels["label"].names == ("00501", "01234", "90210")
    path.write_text("\n".join(["x,zip", *(f"{k},{('501', '1234')[k % 2]}" for k in range(30))]))
    run = opened(path, "zip", task, classes="auto").sample
    assert run.labels["label"].names == ("501", "1234")
    (tmp_path / "other.csv").write_text("x,zip\n1,501\n2,01234\n")
    config = DataConfig(name="table", path=str(tmp_path / "other.csv"), labels="zip")
    with pytest.raises(DataError, match="'01234' is no class of the run: 501, 1234; .*row 2"):
        open_data(config, task, request=DataRequest(run=run, split="all"))


def test_days_of_far_dates(tmp_path):
    """Microseconds of such a date do not fit into 64 bits."""
    far = pyarrow.array([9_404_092_800_000, -86_400], pyarrow.timestamp("s"))  # in the year 299,979
    table = tables.Table.read(write(tmp_path / "t.parquet", {"far": far}), ["far"])
    days, zone = table.days("far")
    assert days.tolist() == [108_843_666.66666667, -1.0] and not zone
    for kind, unit in (("date32", pyarrow.date32()), ("date64", pyarrow.date64())):
        day = write(tmp_path / f"{kind}.parquet", {"day": pyarrow.array([-3, 20_787], pyarrow.int32()).cast(
            pyarrow.date32()).cast(unit)})  # fmt: skip
        assert tables.Table.read(day, ["day"]).days("day")[0].tolist() == [-3.0, 20_787.0]
    (tmp_path / "t.csv").write_text("day\n2023-02-28\n2023-02-29\n")
    with pytest.raises(DataError, match="it holds no dates: .*2023-02-29") as told:
        tables.Table.read(tmp_path / "t.csv", ["day"]).days("day")
    assert "zone" not in str(told.value)


@pytest.mark.parametrize("cut", [";", "|", "\t"])
def test_cells_that_are_separated_otherwise(tmp_path, cut):
    (tmp_path / "t.csv").write_text(f"a{cut}b{cut}y\n1{cut}2{cut}0\n3{cut}4{cut}1\n")
    config = DataConfig(name="table", path=str(tmp_path / "t.csv"), labels="y")
    with pytest.raises(DataError, match="cells are separated by .*, and it is read as one column; .*by commas"):
        open_data(config, TaskConfig(), request=DataRequest())
