"""Pairs of sentences with masked words: a pure function of the text and the index."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_train.config import DataConfig, TaskConfig
from hvd_train.data.catalog import open_data, pack
from hvd_train.data.dataset import DataRequest
from hvd_train.data.formats import docstrings
from hvd_train.data.masked import CLS, MASK, PAD, SEP, SPECIAL, Pairs, sentences, tokenized, vocabulary
from hvd_train.data.packing import Alone
from hvd_train.errors import DataError

LENGTH = 48
TEXT = TaskConfig(loss={"words": "cross_entropy", "next": "cross_entropy"})


def story(number: int, sentences: int = 60) -> str:
    """Sentences of three to six words; each document has its own."""
    rng = np.random.default_rng(number)
    words = ["".join(rng.choice(list("abcdefghijklm"), 3)) for _ in range(10)]
    return " ".join(" ".join(rng.choice(words, rng.integers(3, 7))) + "." for _ in range(sentences))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("text")
    for number in range(6):
        (made / f"{number}.txt").write_text(story(number))
    (made / "short.md").write_text("One sentence alone has no other after it.")
    return made


@pytest.fixture(scope="module")
def text(folder):
    documents = [sentences(story(number)) for number in range(6)]
    found = vocabulary(documents, 340, None)
    return found, tokenized([*documents, ["One alone."]], found, LENGTH)


def test_sentences_end_at_full_stops_and_empty_lines():
    assert sentences("Version 9.1 is\n  here. Is it? Yes!\n\nA title\n \n") == [
        "Version 9.1 is here.",
        "Is it?",
        "Yes!",
        "A title",
    ]


def test_the_vocabulary_is_the_same_each_time_and_spells_any_text(text):
    again = vocabulary([sentences(story(number)) for number in range(6)], 340, None)
    assert again.to_str() == text[0].to_str() and again.get_vocab_size() == 340
    assert [again.token_to_id(token) for token in SPECIAL] == [PAD, CLS, SEP, MASK]
    strange = "Grüße, 世界! w3x4\tand\x00"
    assert again.decode(again.encode(strange).ids).strip() == strange


def test_samples_lie_within_documents_and_are_cut_between_sentences(text):
    tokenizer, found = text
    ends = np.unique(found.ends)
    assert len(ends) == 6, "a document of one sentence holds no pair"
    for i in range(len(found)):
        cuts = found.cuts[found.bounds[i] : found.bounds[i + 1]]
        assert len(cuts) and found.firsts[i] < cuts[0] and cuts[-1] < min(found.firsts[i] + LENGTH - 3, found.ends[i])
        start = np.searchsorted(ends, found.firsts[i], "right")
        assert found.ends[i] == ends[start]
        for place in (found.firsts[i], *cuts):
            before = tokenizer.decode(found.ids[: int(place)])
            assert not before or before.endswith(".")


def test_a_sample_is_a_pair_of_which_some_words_are_asked_for(text):
    found, held = Pairs(text[1], LENGTH, 3, 43), text[1]
    inputs, labels = found.fetch(np.arange(40))
    assert {k: (x.shape, x.dtype.name) for k, x in (inputs | labels).items()} == {
        k: ((40, *field.shape), field.dtype) for k, field in {**found.sample.inputs, **found.sample.labels}.items()
    }
    for k in range(40):
        tokens, segments, words = inputs["tokens"][k], inputs["segments"][k], labels["words"][k]
        asked = words != -100
        whole = np.where(asked, words, tokens)
        end = LENGTH - (whole == PAD).sum()
        assert whole[0] == CLS and whole[end - 1] == SEP and (whole[end:] == PAD).all() and (whole == SEP).sum() == 2
        first = int(np.flatnonzero(whole == SEP)[0])
        assert (segments == ((np.arange(LENGTH) > first) & (np.arange(LENGTH) < end))).all()
        assert asked.sum() == max(1, round(0.15 * (end - 3))) and not np.isin(words[asked], range(len(SPECIAL))).any()
        a, b = whole[1:first], whole[first + 1 : end - 1]
        start = int(held.firsts[3 + k])
        assert (a == held.ids[start : start + len(a)]).all()
        follows = (b == held.ids[start + len(a) : start + len(a) + len(b)]).all()
        assert follows or labels["next"][k] == 1
        assert not follows or labels["next"][k] == 0 or len(b) < 5, "so few may be the same by chance"


def test_shares_are_those_of_the_article(text):
    found = Pairs(text[1], LENGTH, 0, len(text[1]))
    inputs, labels = found.fetch(np.arange(len(found)))
    asked = labels["words"] != -100
    tokens, words = inputs["tokens"][asked], labels["words"][asked]
    assert (tokens == MASK).mean() == pytest.approx(0.8, abs=0.06)
    assert (tokens == words).mean() == pytest.approx(0.1, abs=0.05)
    assert labels["next"].mean() == pytest.approx(0.5, abs=0.15)


def test_a_sample_depends_on_its_index_alone(text):
    found = Pairs(text[1], LENGTH, 0, 30)
    whole, part = found.fetch(np.arange(30)), found.fetch(np.array([7, 3, 7]))
    for one, other in zip(whole, part, strict=True):
        assert all((one[k][[7, 3, 7]] == other[k]).all() for k in one)
    assert found.fingerprint == Pairs(text[1], LENGTH, 0, 30).fingerprint != Pairs(text[1], LENGTH, 1, 31).fingerprint


def test_a_folder_is_opened_by_name(folder, tmp_path):
    config = DataConfig(name="masked_text", path=str(folder), sequence_length=LENGTH, vocabulary_size=340)
    data, again = open_data(config), open_data(config)
    assert data.fingerprint == again.fingerprint
    assert data.sample.num_classes == {"words": 340, "next": 2}
    assert data.sample.input_shape == {"tokens": (LENGTH,), "segments": (LENGTH,)}
    assert len(data.val) == pytest.approx(0.2 * (len(data.train) + len(data.val)), abs=1)
    file = tmp_path / "tokenizer.json"
    vocabulary([sentences(story(0))], 280, None).save(str(file))
    other = open_data(config.model_copy(update={"vocabulary": str(file)}))
    assert other.sample.num_classes["words"] == 280 and other.fingerprint != data.fingerprint


def test_another_text_is_numbered_by_the_runs_vocabulary(folder, tmp_path):
    """Each text learned its own: the same words had other numbers, and a run found none of them."""
    config = DataConfig(name="masked_text", path=str(folder), sequence_length=LENGTH, vocabulary_size=340)
    run = open_data(config)
    (tmp_path / "more.txt").write_text(" ".join(story(k) for k in range(20, 40)))
    other = config.model_copy(update={"path": str(tmp_path / "more.txt")})
    alone, found = open_data(other), open_data(other, request=DataRequest(run.sample, "all", vocabulary=run.vocabulary))
    assert found.vocabulary == run.vocabulary != alone.vocabulary
    tokens = vocabulary([], 340, None, run.vocabulary).encode(story(20)).ids
    first = found.parts["all"].fetch(np.arange(1))[0]["tokens"][0]
    assert sum(a == b for a, b in zip(first[1:9], tokens[:8], strict=True)) > 4  # some are masked
    pack(other, TEXT, tmp_path / "packed", Alone())
    assert open_data(DataConfig(name="packed", path=str(tmp_path / "packed")), TEXT).vocabulary == alone.vocabulary
    with pytest.raises(DataError, match="another vocabulary than the run's.*pack the text with data.vocabulary"):
        packed = DataConfig(name="packed", path=str(tmp_path / "packed"))
        open_data(packed, TEXT, request=DataRequest(run.sample, "all", vocabulary=run.vocabulary))
    alone_file = tmp_path / "alone.json"
    alone_file.write_text(alone.vocabulary)
    named = other.model_copy(update={"vocabulary": str(alone_file)})
    with pytest.raises(DataError, match="another vocabulary than the run's"):
        open_data(named, request=DataRequest(run.sample, "all", vocabulary=run.vocabulary))
    with pytest.raises(DataError, match="the vocabulary of the run is damaged"):
        open_data(other, request=DataRequest(run.sample, "all", vocabulary="{}"))


def test_without_a_path_the_text_is_pythons_own():
    data = open_data(DataConfig(name="masked_text", sequence_length=LENGTH))
    assert len(data.train) > 4000 and data.sample.num_classes["words"] == 8000
    code = b'''"""A."""\ndef f():\n    """B\n    b."""\nclass C:\n    def g(self):\n        "D"\nX = "no"'''
    assert docstrings(code) == "A.\n\nB\nb.\n\nD"


def test_what_cannot_be_read_is_told(folder, tmp_path):
    from tokenizers import Tokenizer, models

    config = DataConfig(name="masked_text", path=str(folder), sequence_length=LENGTH, vocabulary_size=340)
    (tmp_path / "broken.json").write_text("{")
    Tokenizer(models.BPE()).save(str(tmp_path / "empty.json"))
    (tmp_path / "one.txt").write_text("One sentence. And another one.")
    for changed, what in (
        ({"vocabulary": str(tmp_path / "broken.json")}, "no readable vocabulary"),
        ({"vocabulary": str(tmp_path / "empty.json")}, r"have the numbers \[None, None, None, None\]"),
        ({"path": str(tmp_path / "one.txt")}, "too little text"),
        ({"sequence_length": 4}, "8 are the least"),
    ):
        with pytest.raises(DataError, match=what):
            open_data(config.model_copy(update=changed))


def test_a_vocabulary_whose_numbers_have_gaps(tmp_path):
    """It was as large as there are tokens: larger numbers had no embedding, and strange words were no tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    text = "The cat sat down. A dog ran off. " * 200
    (tmp_path / "a.txt").write_text(text)
    words = {word: 10 + 7 * k for k, word in enumerate(sorted(set(text.split())))}
    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3} | words, "[MASK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    keys = {"path": str(tmp_path / "a.txt"), "vocabulary": str(tmp_path / "tokenizer.json"), "sequence_length": 32}
    data = open_data(DataConfig(name="masked_text", **keys))
    largest = max(words.values())
    assert data.sample.labels["words"].classes == largest + 1
    inputs, labels = data.train.fetch(np.arange(len(data.train)))
    assert set(np.unique(inputs["tokens"]).tolist()) - {0} == {1, 2, 3, *words.values()}
    assert set(np.unique(labels["words"]).tolist()) == {-100, *words.values()}
    tokenizer.enable_padding(length=40)
    tokenizer.enable_truncation(3)  # as pretrained models bring them: sentences were cut, and padded within a sample
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    again, other = open_data(DataConfig(name="masked_text", **keys)).train.fetch(np.arange(len(data.train)))
    assert (again["tokens"] == inputs["tokens"]).all() and (other["words"] == labels["words"]).all()
