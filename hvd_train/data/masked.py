"""Sentence pairs with masked tokens for the training of BERT (Devlin et al. 2018, section 3.1 and appendix A.1)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train.data.order import U64, mix, stream
from hvd_train.errors import DataError
from hvd_train.protocol import Field, Fields, Sample

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
PAD, CLS, SEP, MASK = range(len(SPECIAL))
SHARE = 0.15  # of the tokens are to be predicted
SEED = 0xBE27  # masks are a property of the data, not of a run
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n\s*\n")


def sentences(document: str) -> list[str]:
    """Split text into sentences, with single spaces between words."""
    return [" ".join(part.split()) for part in SENTENCE.split(document) if part.strip()]


def vocabulary(documents: Sequence[Sequence[str]], size: int, path: str | None, saved: str = "") -> Any:
    """Return a byte-pair tokenizer (Sennrich et al. 2016): from a file, from a run (``saved``), or newly trained.

    It is trained on ``documents``, lists of sentences, and can encode any text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if path is not None:
        tokenizer = tokenizer_of(path)
        numbers = [tokenizer.token_to_id(token) for token in SPECIAL]
        if numbers != list(range(len(SPECIAL))):
            what = f"{', '.join(SPECIAL)} have the numbers {numbers}"
            fix = f"they must be 0 to {len(SPECIAL) - 1}: train it with these special_tokens first"
            raise DataError(what, where=f"data.vocabulary: {path}", fix=fix)
        return tokenizer
    if saved:
        try:
            return Tokenizer.from_str(saved)
        except Exception as error:
            raise DataError("the vocabulary of the run is damaged", where="vocabulary.json") from error
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(chain.from_iterable(documents), trainer)
    return made


def tokenizer_of(path: str) -> Any:
    """Read a tokenizer.json; its truncation and padding are replaced by data.lengths or sequence_length."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(Path(path).expanduser()))
    except Exception as error:  # the library raises Exception itself
        reason = str(error).splitlines()[0]
        raise DataError(f"no readable vocabulary: {reason}", where=f"data.vocabulary: {path}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def size_of(tokenizer: Any) -> int:
    """Return the largest token id + 1, because ids may have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


@dataclass(frozen=True)
class Tokens:
    """The token ids of all documents, concatenated, and the samples within them.

    ids: (m,) tokens; firsts, ends: (k,) the start of each sample, and the end of its document, in ids; cuts: (c,)
    starts of sentences within samples, where sample i has cuts[bounds[i] : bounds[i + 1]]; size: the largest token id
    + 1; words: (w,) all token ids except special ones.
    """

    ids: np.ndarray
    firsts: np.ndarray
    ends: np.ndarray
    cuts: np.ndarray
    bounds: np.ndarray
    size: int
    words: np.ndarray

    def __len__(self) -> int:
        return len(self.firsts)


def tokenized(documents: Sequence[Sequence[str]], tokenizer: Any, length: int) -> Tokens:
    """Tokenize all documents; ``length``: tokens of a sample, including one [CLS] and two [SEP]."""
    space, base = length - 3, 0
    ids: list[np.ndarray] = []
    samples: list[tuple[int, int, np.ndarray]] = []
    for document in documents:
        pieces = [
            np.array(part.ids[k : k + space // 2], np.int32)
            for part in tokenizer.encode_batch(list(document), add_special_tokens=False)
            for k in range(0, len(part.ids), space // 2)
        ]
        starts = base + np.cumsum([0, *map(len, pieces)])
        samples += [(first, int(starts[-1]), cuts) for first, cuts in _samples(starts, space)]
        ids += pieces
        base = int(starts[-1])
    return Tokens(
        np.concatenate([np.zeros(0, np.int32), *ids]),
        np.array([first for first, _, _ in samples], np.int64),
        np.array([end for _, end, _ in samples], np.int64),
        np.concatenate([np.zeros(0, np.int64), *(cuts for _, _, cuts in samples)]),
        np.cumsum([0, *(len(cuts) for _, _, cuts in samples)]),
        size_of(tokenizer),
        np.array(
            sorted(set(tokenizer.get_vocab(with_added_tokens=True).values()) - set(range(len(SPECIAL)))), np.int32
        ),
    )


def _samples(starts: np.ndarray, space: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the samples of a document: (start, starts of the further sentences), all within ``space`` tokens.

    Sentences begin at starts[:-1].
    """
    begin = 0
    while begin < len(starts) - 1:
        stop = int(np.searchsorted(starts[:-1], starts[begin] + space))
        if stop == begin + 1:  # only the last sentence is left
            return
        yield int(starts[begin]), starts[begin + 1 : stop]
        begin = stop


class Pairs:
    """Samples ``start`` to ``stop`` of a text: [CLS] A [SEP] B [SEP], then padding; a pure function of the index.

    A are the sample's sentences up to a random one. B is what follows in the document (label ``next`` 0), or, for half
    of the samples, text from another sample (1). 15 % of the tokens have a label, the others ``ignore``. Of those 15 %,
    80 % are masked, 10 % are replaced by random tokens, and 10 % are unchanged.
    """

    def __init__(self, text: Tokens, length: int, start: int, stop: int, ignore: int = -100) -> None:
        self._text, self._length, self._start, self._n, self._ignore = text, length, start, stop - start, ignore
        self.vocabulary = ""  # the tokenizer as JSON, if known
        self.sample = Sample(
            {"tokens": Field((length,), "int32"), "segments": Field((length,), "uint8")},
            {"words": Field((length,), "int32", classes=text.size, masked=True), "next": Field((), "int32", classes=2)},
        )
        text_bytes = f"pairs {length} {start} {stop} {text.size}".encode() + text.ids.tobytes() + text.cuts.tobytes()
        self.fingerprint = hashlib.sha256(text_bytes).hexdigest()[:16]

    def __len__(self) -> int:
        return self._n

    def fetch(self, indices: np.ndarray) -> tuple[Fields, Fields]:
        shape = len(indices), self._length
        tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.uint8)
        words, follows = np.full(shape, self._ignore, np.int32), np.zeros(len(indices), np.int32)
        for k, i in enumerate(indices):
            follows[k] = self._one(int(i), tokens[k], segments[k], words[k])
        return {"tokens": tokens, "segments": segments}, {"words": words, "next": follows}

    def _one(self, i: int, tokens: np.ndarray, segments: np.ndarray, words: np.ndarray) -> int:
        """Write sample i into these rows, (length,) each; return its label ``next``."""
        text, draws = self._text, stream(mix(SEED, self._start + i), np.arange(4 + 3 * self._length, dtype=U64))
        which, other, boundary, boundary_b = (int(x) for x in draws[:4])
        unrelated = which % 2  # 1: B comes from another sample j
        j = (i + 1 + other % (self._n - 1)) % self._n if unrelated else i
        first, middle = int(text.firsts[self._start + i]), self._boundary(i, boundary)
        begin = self._boundary(j, boundary_b) if unrelated else middle
        a = text.ids[first:middle]
        b = text.ids[begin : min(begin + self._length - 3 - len(a), int(text.ends[self._start + j]))]
        end = len(a) + len(b) + 3
        tokens[:end] = np.concatenate([[CLS], a, [SEP], b, [SEP]])
        segments[len(a) + 2 : end] = 1
        self._mask(draws[4:].reshape(3, -1), np.delete(np.arange(1, end - 1), len(a)), tokens, words)
        return unrelated

    def _boundary(self, i: int, draw: int) -> int:
        low, high = self._text.bounds[self._start + i : self._start + i + 2]
        return int(self._text.cuts[low + draw % int(high - low)])

    def _mask(self, draws: np.ndarray, positions: np.ndarray, tokens: np.ndarray, words: np.ndarray) -> None:
        """Mask a sample in place; ``draws`` (3, length) decide which positions, what to do there, and random tokens."""
        # The positions with the smallest draws.
        at = positions[np.argsort(draws[0, positions], kind="stable")[: max(1, round(SHARE * len(positions)))]]
        # (k,) each: 0 to 7 mask, 8 replace by a random token, 9 keep.
        action, random = draws[1, at] % U64(10), self._text.words[draws[2, at] % U64(len(self._text.words))]
        words[at] = tokens[at]
        tokens[at] = np.where(action < 8, MASK, np.where(action < 9, random, tokens[at]))
