"""Texts with a class each, JSON lines, and columns of lists."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow
import pytest
from pyarrow import csv, parquet

from hvd_train.config import DataConfig, TaskConfig, load_config
from hvd_train.data.catalog import open_data
from hvd_train.data.dataset import DataRequest
from hvd_train.data.formats import python_documents
from hvd_train.data.loader import Loader
from hvd_train.errors import ConfigError, DataError
from tests.own_models import strokes

TEXTS = [" ".join(part.split()) for part in "\n\n".join(python_documents()[:8]).split("\n\n")]
TEXTS = [text for text in TEXTS if text][:120]
CLASSES = ["short" if len(text) < 100 else "long" for text in TEXTS]
LENGTHS = {"max_length": 64, "truncate": True, "block": 16}


def written(folder, name="texts.jsonl", texts=TEXTS, labels=CLASSES):
    path = folder / name
    rows = [{"text": text, "kind": label} for text, label in zip(texts, labels, strict=True)]
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        csv.write_csv(pyarrow.Table.from_pylist(rows), path)
    return path


def opened(path, name="labeled_text", request=None, task=None, **keys):
    keys = {"labels": "kind", "lengths": LENGTHS} | keys
    config = DataConfig.model_validate({"name": name, "path": str(path), **keys})
    return open_data(config, task or TaskConfig(), request=request or DataRequest())


def rows(source):
    inputs, labels = source.fetch(np.arange(len(source)))
    return [x[m] for x, m in zip(inputs["tokens"], inputs["mask"], strict=True)], labels["label"]


@pytest.mark.parametrize("name", ["texts.jsonl", "texts.csv", "texts.parquet"])
def test_texts_are_numbered_by_a_tokenizer_that_is_learned(tmp_path, name):
    from tokenizers import Tokenizer

    data = opened(written(tmp_path, name), vocabulary_size=400)
    tokenizer = Tokenizer.from_str(data.vocabulary)
    found = {}
    for part in (data.train, data.val):
        for ids, label in zip(*rows(part), strict=True):
            assert ids[0] == tokenizer.token_to_id("[CLS]") and len(ids) <= 64
            found[tokenizer.decode(ids[1:].tolist())] = data.sample.labels["label"].names[label]
    wanted = dict(zip(TEXTS, CLASSES, strict=True))
    for text, label in found.items():
        assert any(whole.startswith(text.strip()[:20]) and label == wanted[whole] for whole in wanted)
    assert data.sample.inputs["tokens"].classes == tokenizer.get_vocab_size() <= 400
    assert data.sample.inputs["tokens"].dtype == "int32" and data.sample.num_classes == 2


def test_a_tokenizer_that_is_given_and_that_of_a_run(tmp_path):
    path = written(tmp_path)
    learned = opened(path, vocabulary_size=400)
    (tmp_path / "tokenizer.json").write_text(learned.vocabulary)
    given = opened(path, vocabulary=str(tmp_path / "tokenizer.json"))
    of_run = opened(path, request=DataRequest(learned.sample, "val", vocabulary=learned.vocabulary))
    for one in (given.val, of_run.parts["val"]):
        assert all(np.array_equal(a, b) for a, b in zip(rows(one)[0], rows(learned.val)[0], strict=True))
    with pytest.raises(DataError, match="no readable vocabulary"):
        opened(path, vocabulary=str(path))
    other = opened(path, vocabulary_size=300).vocabulary
    with pytest.raises(DataError, match="another vocabulary than the run's"):
        opened(
            path,
            vocabulary=str(tmp_path / "tokenizer.json"),
            request=DataRequest(learned.sample, "val", vocabulary=other),
        )


def test_parts_of_a_folder_and_predictions_without_labels(tmp_path):
    for part, cut in (("train", slice(0, 80)), ("val", slice(80, 100)), ("test", slice(100, 120))):
        written(tmp_path, f"{part}.jsonl", TEXTS[cut], CLASSES[cut])
    data = opened(tmp_path)
    assert (len(data.train), len(data.val)) == (80, 20)
    request = DataRequest(data.sample, "test", labels=False, vocabulary=data.vocabulary)
    assert len(opened(tmp_path, request=request).parts["test"]) == 20
    (tmp_path / "others.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    request = DataRequest(data.sample, "all", labels=False, vocabulary=data.vocabulary)
    assert len(opened(tmp_path / "others.jsonl", request=request).parts["all"]) == 120


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"labels": None}, "texts need one column of labels"),
        ({"labels": "kinds", "features": ["text"]}, "no column 'kinds'"),
        ({"labels": "kind", "features": ["words"]}, "no column 'words'"),
        ({"lengths": {"max_length": 8}}, "column 'text' of sample"),
    ],
)
def test_mistakes(tmp_path, keys, words):
    with pytest.raises(DataError) as caught:
        opened(written(tmp_path), **keys)
    assert words in str(caught.value) and caught.value.fix


def test_lengths_are_needed():
    with pytest.raises(ConfigError, match="labeled_text needs it"):
        load_config(base={"data": {"name": "labeled_text", "path": "x.jsonl", "labels": "kind"}})


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('{"text": "a", "kind": 0}\n{"text"', "the line is not JSON: Expecting ':' delimiter (character 8); "),
        ('{"text": "a", "kind": 0}\n{"text"', "line 2; correct it"),
        ('{"text": "a", "kind": 0}\n{"text": \n{"text": "b", "kind": 1}', "Expecting value (character 10); "),
        ('{"text": "a", "kind": 0}\n[1]', "the line is not an object of names and values"),
        ('{"text": "a", "kind": 0}\n{"text": "a"}', "'kind' has no value"),
        ('{"text": "a", "kind": 0}\n{"text": 3, "kind": 0}', "'text' holds values of several kinds"),
        ("\n", "the file has no line"),
    ],
)
def test_lines_that_cannot_be_read(tmp_path, lines, words):
    path = tmp_path / "texts.jsonl"
    path.write_text(lines)
    with pytest.raises(DataError) as caught:
        opened(path)
    assert words in str(caught.value) and str(path) in str(caught.value)


# ---- lists

(SAMPLES, LABELS), _ = strokes(200)


def lists(folder, name="strokes.jsonl", **more):
    path = folder / name
    columns = {"pixels": [one.tolist() for one in SAMPLES], "kind": LABELS.tolist()} | more
    if path.suffix == ".jsonl":
        keys = list(columns)
        path.write_text(
            "\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in zip(*columns.values(), strict=True))
        )
    else:
        parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize("name", ["strokes.jsonl", "strokes.parquet"])
def test_columns_of_lists_are_inputs_by_their_names(tmp_path, name):
    ages = (LABELS / 10).tolist()
    data = opened(lists(tmp_path, name, age=ages), "table")
    assert data.sample.input_shape == {"pixels": (None,), "age": (), "mask": (None,)}
    found = []
    for step in Loader(data.train, global_batch=20, seed=1).epoch(0):
        (batch,) = step.micro_batches
        columns = [x[: batch.count] for x in (*batch.inputs.values(), *batch.labels.values())]
        for ids, age, mask, label in zip(*columns, strict=True):
            found.append((tuple(ids[mask]), label))
            assert age == np.float32(label / 10)
    wanted = [(tuple(one), label) for one, label in zip(SAMPLES, LABELS, strict=True)]
    assert len(found) == len(data.train) and all(one in wanted for one in found)


def test_labels_in_lists(tmp_path):
    at_places = [(np.asarray(one) % 3).tolist() for one in SAMPLES]
    data = opened(lists(tmp_path, kind=at_places), "table")
    inputs, labels = data.train.fetch(np.arange(9))
    assert ((labels["label"] == -100) == ~inputs["mask"]).all()
    assert (labels["label"] == np.where(inputs["mask"], inputs["pixels"] % 3, -100)).all()


def test_jsonl_of_numbers_is_a_table(tmp_path):
    path = tmp_path / "table.jsonl"
    path.write_text("\n".join(json.dumps({"a": k, "b": k / 2, "kind": ["even", "odd"][k % 2]}) for k in range(40)))
    data = opened(path, "table", lengths=None)
    assert data.sample.input_shape == (2,) and data.sample.labels["label"].names == ("even", "odd")


def test_keys_that_the_first_line_lacks_are_told_and_no_key_stands_twice(tmp_path):
    """Of {"a": 1} and {"a": 2, "b": 5} the input was a alone, and of {"a": 1, "a": 7} it was 7: both without a word."""
    path = tmp_path / "table.jsonl"
    path.write_text(
        "\n".join(json.dumps({"a": k, "kind": k % 2} | ({"b": k, "c": k} if k > 2 else {})) for k in range(9))
    )
    told = f"keys b, c of {path} left out, as its first line lacks them"
    data = opened(path, "table", lengths=None)
    assert data.sample.input_shape == (1,) and told in data.remarks
    assert told not in opened(path, "table", lengths=None, features=["a"]).remarks
    assert told not in opened(path, "table", DataRequest(data.sample, "all"), lengths=None).remarks
    path.write_text('{"a": 1, "kind": 0}\n{"a": 1, "a": 7, "kind": 0}\n')
    with pytest.raises(DataError, match=r"'a' stands twice.*line 2"):
        opened(path, "table", lengths=None)


@pytest.mark.parametrize(
    ("more", "keys", "words"),
    [
        ({}, {"lengths": None}, "of lists"),
        ({"pixels": [["a"]] * 160}, {}, "holds lists of string"),
        ({"pixels": [[[1]]] * 160}, {}, "holds lists of list"),
        ({"kind": [[0.5] * len(one) for one in SAMPLES]}, {}, "holds lists of double"),
        ({"kind": [[1]] * 160}, {}, "positions in"),
        ({"other": [1] * 160}, {"labels": ["kind", "other"]}, "several labels of a table with lists"),
    ],
)
def test_lists_that_cannot_be_read(tmp_path, more, keys, words):
    with pytest.raises(DataError) as caught:
        opened(lists(tmp_path, **more), "table", **keys)
    assert words in str(caught.value) and caught.value.fix


def test_a_loss_of_numbers_gets_numbers(tmp_path):
    """With loss bce the words were numbered in each file: good was 1 beside bad, and 0 in a file of its own."""
    for loss in ("bce", "mse", "own:loss"):
        with pytest.raises(DataError, match="'(short|long)' is no (number|whole number)"):
            opened(written(tmp_path), task=TaskConfig(loss=loss))
    for values in ([10, 9, 8], ["10", "9", "8"], [1.5, -2.5, 3.0]):
        path = written(tmp_path, texts=TEXTS[:6], labels=values * 2)
        data = opened(path, task=TaskConfig(loss="mse"), request=DataRequest(split="all"))
        assert rows(data.parts["all"])[1].tolist() == list(map(float, values * 2))
    path = written(tmp_path, texts=TEXTS[:6], labels=[0, 2, 1] * 2)
    data = opened(path, task=TaskConfig(loss="own:loss"), request=DataRequest(split="all"))
    assert rows(data.parts["all"])[1].dtype == np.int64


def test_lists_of_numbers_of_64_bits_do_not_change_their_sign(tmp_path):
    """2^63 + 5 became -(2^63) + 5."""
    path = tmp_path / "lists.parquet"
    for last, fits in ((2**63 - 1, True), (2**63 + 5, False)):
        ids = pyarrow.array([[1, 2], [3, last]] * 4, pyarrow.list_(pyarrow.uint64()))
        parquet.write_table(pyarrow.table({"ids": ids, "kind": [0, 1] * 4}), path)
        source = opened(path, "table", DataRequest(split="all")).parts["all"]
        if fits:
            assert source.fetch(np.arange(2))[0]["ids"][:, :2].tolist() == [[1, 2], [3, last]]
        else:
            with pytest.raises(DataError, match="a number of more than 63 bits"):
                source.fetch(np.arange(2))


# ---- tokenizers that put marks around a text, and whose numbers have gaps


def given(folder, template="[CLS] $A [SEP]", **numbers):
    """A tokenizer of words, whose numbers are 3 apart."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = {word: 3 * k for k, word in enumerate(("[PAD]", "[CLS]", "[SEP]", "[UNK]", *words))} | numbers
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = [(word, vocabulary[word]) for word in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(single=template, special_tokens=marks)
    made.save(str(folder / "tokenizer.json"))
    return made


@pytest.mark.parametrize("template", ["[CLS] $A [SEP]", "$A [SEP]", "[CLS] [CLS] $A [SEP] [SEP]", "$A"])
def test_long_texts_are_cut_as_the_library_does(tmp_path, template):
    """The closing [SEP] was cut off."""
    tokenizer = given(tmp_path, template)
    tokenizer.enable_truncation(12)
    wanted = {tuple(one.ids) for one in tokenizer.encode_batch(TEXTS)}
    keys = {"vocabulary": str(tmp_path / "tokenizer.json"), "lengths": {"max_length": 12, "truncate": True}}
    data = opened(written(tmp_path), **keys)
    found = [tuple(ids.tolist()) for part in (data.train, data.val) for ids in rows(part)[0]]
    assert len(found) == len(TEXTS) and set(found) == wanted
    assert sum(len(ids) == 12 for ids in found) > 50
    of_run = opened(
        tmp_path / "texts.jsonl", request=DataRequest(data.sample, "all", vocabulary=data.vocabulary), **keys
    )
    assert {tuple(ids.tolist()) for ids in rows(of_run.parts["all"])[0]} == wanted
    if marks := len(template.split()) - 1:
        keys["lengths"]["max_length"] = marks  # the library would leave the texts as long as they are
        with pytest.raises(DataError, match=f"{marks} tokens, but the tokenizer adds {marks} to each text"):
            opened(tmp_path / "texts.jsonl", **keys)


def test_numbers_of_tokens_may_have_gaps(tmp_path):
    """The vocabulary was as large as there are tokens, and the largest number had no embedding: an IndexError."""
    tokenizer = given(tmp_path)
    largest = max(tokenizer.get_vocab().values())
    data = opened(written(tmp_path), vocabulary=str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() < largest // 2
    assert data.sample.inputs["tokens"].classes == largest + 1
    assert max(ids.max() for part in (data.train, data.val) for ids in rows(part)[0]) <= largest


# ---- the column of the texts


def test_other_data_have_the_text_in_the_column_of_the_run(tmp_path):
    """Whatever other column of text there was, was taken for it."""
    data = opened(written(tmp_path))
    assert data.sample.inputs["tokens"].columns == ("text",)

    def evaluated(lines, name="other.jsonl", run=data.sample, **keys):
        path = tmp_path / name
        path.write_text("\n".join(map(json.dumps, lines)))
        request = DataRequest(run, "all", vocabulary=data.vocabulary)
        found = opened(path, request=request, **keys)
        return rows(found.parts["all"])[0], found.remarks

    texts = [{"text": text, "kind": kind} for text, kind in zip(TEXTS[:9], CLASSES[:9], strict=True)]
    wanted, remarks = evaluated(texts)
    assert not remarks
    found, remarks = evaluated([{"title": "a", **one, "by": "b"} for one in texts])
    assert all(map(np.array_equal, found, wanted))
    assert remarks == ["columns title, by are left out: the run was trained without"]
    titles = [{"title": one["text"], "kind": one["kind"]} for one in texts]
    with pytest.raises(DataError, match="column text missing, with which the run was trained; .*there are title, kind"):
        evaluated(titles)
    found, remarks = evaluated(titles, features=["title"])  # the advice
    assert all(map(np.array_equal, found, wanted))
    assert remarks == ["column title is used as text, its name in the run"]
    old = replace(data.sample, inputs={name: replace(x, columns=()) for name, x in data.sample.inputs.items()})
    found, remarks = evaluated(titles, run=old)
    assert all(map(np.array_equal, found, wanted))
    assert remarks == ["column title is used as the text: the run has no name for its column"]


def test_lists_that_are_whole_in_one_file_are_the_numbers_of_the_others(tmp_path):
    """Many programs write 2.0 as 2. Such data were refused, and so was a column that the run does not know."""

    def file(name, rows):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(map(json.dumps, rows)))
        return path

    fractions = [{"steps": [1.5, 2], "y": 0}, {"steps": [2, 1, 3], "y": 1}] * 5
    whole = [{"steps": [1, 2], "y": 0}, {"steps": [2, 1, 3], "y": 1}] * 2
    file("parts/train.jsonl", fractions), file("parts/val.jsonl", whole)
    data = opened(tmp_path / "parts", "table", labels="y")
    assert {part.sample.inputs["steps"].dtype for part in data.parts.values()} == {"float32"}
    other = file("other.jsonl", [{"by": "hand", **row} for row in whole])
    read = opened(other, "table", DataRequest(data.sample, "all"), labels="y")
    assert read.remarks == ["column by is left out: the run was trained without"]
    x = read.parts["all"].fetch(np.arange(2))[0]["steps"]
    assert x.dtype == np.float32 and x[:, :3].tolist() == [[1, 2, 0], [2, 1, 3]]


def test_true_is_no_number_of_a_line(tmp_path):
    """After a number with a fraction it became 1, and before it an error."""
    for values in ([1.5, True, 2.0], [True, 1.5, 2.0], [1, 2, False]):
        path = tmp_path / "a.jsonl"
        path.write_text("\n".join(json.dumps({"x": value, "y": 1.0}) for value in values))
        with pytest.raises(DataError, match="'x' holds values of several kinds: true or false in 1 of 3 lines"):
            opened(path, "table", task=TaskConfig(loss="mse"), labels="y", lengths=None)
