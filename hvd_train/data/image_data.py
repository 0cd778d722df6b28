"""Data sets of images in folders or tar files: the parts, and labels from the class names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_train.config import DataConfig, TaskConfig
from hvd_train.data import images, webdataset
from hvd_train.data.arrays import Arrays
from hvd_train.data.classes import NUMBER, OF_CONFIG, PADDED, WHOLE, Classes, Known, Words, numbers_of, values_of
from hvd_train.data.column import LABEL
from hvd_train.data.dataset import DataRequest, Parts, Whole, class_task, existing_folder, existing_path, known
from hvd_train.data.number_labels import OF_NUMBERS, check_order
from hvd_train.errors import DataError, listing


def open_imagefolder(config: DataConfig, task: TaskConfig, request: DataRequest) -> Parts:
    """path/train/CLASS/*.png, path/val/CLASS/* and path/test/CLASS/* (or path/CLASS/*: split); set image_size"""
    folder = existing_folder(config)
    folders, others = images.find_parts(folder)
    read = {part: one for part, one in folders.items() if part != "test" or request.reads_test} or {"train": folder}
    listed = {part: images.list_images(one, request.labels) for part, one in read.items()}
    if not request.run:  # whose classes are known
        images.check_no_class_is_empty(listed["train"])
    remarks = [f"not read in {folder}: {', '.join(others)}"] * bool(others)
    return _image_parts(listed, config, task, request, remarks)


def open_webdataset(config: DataConfig, task: TaskConfig, request: DataRequest) -> Parts:
    """tar files of NAME.jpg and NAME.cls: train-*.tar, val-*.tar, test-*.tar (or any: split); set image_size"""
    path = existing_path(config)
    shards = webdataset.find_shards(path)
    if "all" in shards:
        shards = {"train": shards["all"]}
    listed = {
        part: webdataset.list_samples(files, path, request.labels)
        for part, files in shards.items()
        if part != "test" or request.reads_test
    }
    return _image_parts(listed, config, task, request)


def _colored(listed: Mapping[str, images.Listing], request: DataRequest) -> bool:
    """Return whether images are read in color: as in the run, or if any training or validation image is."""
    if request.run:
        return next(iter(request.run.inputs.values())).shape[-1:] == (3,)
    return any(held.colored for part, held in listed.items() if part != "test")


def _image_parts(
    listed: Mapping[str, images.Listing],
    config: DataConfig,
    task: TaskConfig,
    request: DataRequest,
    remarks: Sequence[str] = (),
) -> Parts:
    classes, colored = known(config, request), _colored(listed, request)
    numbers = _numbers_of(listed, config, task, request)
    if not (numbers or request.run or config.classes):
        remarks = [*remarks, *_remark_on_positions(listed["train"], task)]
    train = _images(listed["train"], numbers, classes, colored, config, task, request, remarks)
    made = {
        part: _images(held, numbers, classes.after(train), colored, config, task, request)
        for part, held in listed.items()
        if part != "train"
    }
    return {"train": train, **made} if "val" in made else Whole(train, config.val_fraction, made.get("test"))


def _images(
    held: images.Listing,
    numbers: Mapping[str, float],
    classes: Known,
    colored: bool,
    config: DataConfig,
    task: TaskConfig,
    request: DataRequest,
    remarks: Sequence[str] = (),
) -> Arrays:
    inputs = images.ImageFiles(held, config.image_size, colored)
    labels: Any = {}
    if request.labels:
        its = classes.label(LABEL, True)
        labels = np.array([numbers[name] for name in held.names]) if numbers else _labels_of(held, its)
    remarks = [*remarks, *filter(None, [held.note]), *images.remarks_on_pixels(held)]
    if held.colored and not colored:
        remarks.append(f"{held.where} holds images in color, which are read as gray like those of the training")
    where = str(held.where)
    its_task = task if numbers else class_task(task)
    source = Arrays(inputs, labels, where, classes, its_task, images=True, remarks=remarks)
    source.files = [str(path) for path in held.files]
    return source


def _numbers_of(
    listed: Mapping[str, images.Listing], config: DataConfig, task: TaskConfig, request: DataRequest
) -> dict[str, float]:
    """Return {class name: number} if the labels are numbers, as for regression, or {} if they are classes.

    The names of all parts count, and a trained run decides. With ``data.classes`` the labels are classes.
    """
    if not request.labels or config.target == "inputs":
        return {}
    loss, where = task.term(LABEL)[0], config.path or ""
    names = sorted({name for held in listed.values() for name in held.names})
    numbers = numbers_of(names)
    if request.run:
        if any(field.classes for field in request.run.labels.values()):
            return {}
        if numbers is None:
            word = next(name for name in names if numbers_of([name]) is None)
            what = f"class {word} is not a number, and the run was trained on numbers"
            raise DataError(what, where=where, fix="leave these samples out, or give their numbers")
        return numbers
    if loss == "cross_entropy" or config.classes:
        return {}
    if numbers is not None:
        fractions = any(x != int(x) for x in numbers.values())  # no name of a class
        return numbers if loss in OF_NUMBERS or fractions else {}
    check_order(names, loss, where)
    return {}


def _remark_on_positions(held: images.Listing, task: TaskConfig) -> list[str]:
    """Return a remark if folder names are numbers, but a user's loss gets their positions in alphabetical order."""
    loss, names = task.term(LABEL)[0], sorted(set(held.names))
    numbers = numbers_of(names)
    if ":" not in loss or held.numbered or numbers is None or [*numbers.values()] == [*range(len(names))]:
        return []
    pairs = listing([f"{name} as {k}" for k, name in enumerate(names)])
    return [f"{loss} gets classes in alphabetical order: {pairs} (data.classes sets another order)"]


def _labels_of(held: images.Listing, known: Classes) -> Any:
    """Return the classes of the files as words, or as integers if all .cls files hold integers.

    If some of the ``known`` names are words that occur, or codes such as 007 are to be numbered, all labels are words.
    """
    known_names = known.names or ()
    names, words = set(held.names), set(known_names) if values_of(known_names) is None else set()
    whole = {name for name in names if re.fullmatch(WHOLE, name)}
    if not held.numbered or names & words:
        return Words.read(np.array(held.names))
    if fractions := sorted(name for name in names - whole if NUMBER.fullmatch(name)):
        what = f"class '{fractions[0]}' is no whole number"
        fix = (
            "write classes as whole numbers or as words; or list data.classes, as words; for numbers set task.loss: mse"
        )
        raise DataError(what, where=str(held.files[held.names.index(fractions[0])]), fix=fix)
    if not whole:
        return Words.read(np.array(held.names))
    counts = Counter(held.names)
    of_whole = sum(counts[name] for name in whole)
    if whole != names:
        is_odd = of_whole < len(held.names) - of_whole  # numbers are the rarer kind
        odd = next(k for k, name in enumerate(held.names) if (name in whole) is is_odd)
        what = f"class '{held.names[odd]}' is {'a' if is_odd else 'no'} whole number, and others are"
        what += " words" if is_odd else f", as '{min(whole, key=lambda name: (-counts[name], name))}'"
        fix = "write all classes as whole numbers or all as words; or list data.classes, as words"
        raise DataError(what, where=str(held.files[odd]), fix=fix)
    codes = sorted(name for name in whole if re.fullmatch(PADDED, name))
    if codes and known.auto:
        return Words.read(np.array(held.names))
    if codes and known_names and known.whose != OF_CONFIG:
        raise known.strange(codes, str(held.files[held.names.index(codes[0])]))
    values = {name: int(name) for name in whole}
    writings: dict[int, str] = {}
    for name, value in values.items():
        if writings.setdefault(value, name) != name:
            what = f"classes '{writings[value]}' and '{name}' are one number"
            raise DataError(what, where=str(held.where), fix="write both alike; or list data.classes, as words")
        if abs(value) >= 1 << 63:
            raise DataError(f"class {name[:40]} is too large", where=str(held.where), fix="number them 0, 1, ...")
    return np.array([values[name] for name in held.names], np.int64)
