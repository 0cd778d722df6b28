"""``model.init_from``: load initial weights from a checkpoint or a file, and print a table of what was loaded."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train import files
from hvd_train.checkpoint import store
from hvd_train.checkpoint.manifest import MANIFEST, sample_of
from hvd_train.checkpoint.serialize import read
from hvd_train.config import Config
from hvd_train.config.names import nearest
from hvd_train.data.dataset import DataSet
from hvd_train.data.preparation import Facts, table_of
from hvd_train.errors import CheckpointError, ConfigError, amount, listing, named_reason
from hvd_train.frameworks import FRAMEWORKS
from hvd_train.jobs.resume import saved_vocabulary
from hvd_train.protocol import Field, Sample, Tree, WeightNames
from hvd_train.run_folder import safe_reading
from hvd_train.run_folder.terminal import warn
from hvd_train.update.parameter_groups import matches

OF_HUGGING_FACE = ("model.safetensors", "pytorch_model.bin")  # files of a published model's folder
MOST_BYTES = 64 << 20  # of the list of files of a published model
SHOWN = 20  # maximum rows of the table for each kind
NO_PLACE = "Keras numbered its layer after others, and the model has none in its place"
UNUSED = "num_batches_tracked"  # PyTorch's batch counter, which is not used in computations


@dataclass
class WeightFile:
    """The weights of a file. ``arrays``: by the file's names, with dots. ``place``: position in a file with several
    sets.

    ``canonical``: with the names and axes of our checkpoints. ``origin``: framework and model, if known. ``sample``,
    ``vocabulary``, ``fitted`` (``data.fitted``): of the run, if the file is a checkpoint. ``here``: {name in the file:
    the front-end's name, "" for none}, if they may differ.
    """

    arrays: Tree
    canonical: bool
    origin: tuple[str, str] = ("", "")
    sample: Sample | None = None
    vocabulary: str = ""
    fitted: Facts | None = None
    place: str = ""
    here: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Initialization:
    """The result of matching names. ``loaded``: by keys of the front-end's state. Others: {name: why}."""

    loaded: Tree = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)


def initialize(config: Config, model: WeightNames, data: DataSet) -> list[str]:
    """Load the weights of ``model.init_from`` into this rank's model. Returns lines about what was loaded, what not,
    and why.

    Warns of class numbers, columns or token ids that have another meaning in ``data`` than in the file's run.
    Called on rank 0, whose weights all ranks get when training begins.
    """
    options = config.model.init_from
    assert options
    where = f"model.init_from: {options.path}"
    path = Path(options.path).expanduser()
    files = _read(path, config, where)
    canonical = files[0].canonical
    state, aliases = model.state(), model.aliases(canonical)
    ranked = []
    for file in files:
        _check_origin(config, file, where)
        file.here = model.names_here(
            None if canonical else path, file.arrays, lambda name: _given(name, options.rename) is not None, where
        )
        fits = len(_fitting(file, aliases, state, options.rename))
        ranked.append(((fits, *_better_rename(file, aliases, state, options.rename)), file))
    (fits, more, renamed), file = max(ranked, key=lambda one: one[0][:2])
    done = assign(file, aliases, state, options.exclude, options.rename, where)
    section = json.dumps({**options.model_dump(exclude_defaults=True), "rename": renamed})
    advice = f"{amount(more, 'more tensor')} would fit with init_from: {section}" if more else ""
    if not done.loaded:
        there, here = (", ".join(list(names)[:8]) for names in (file.arrays, aliases))
        what = f"nothing of the file fits the model: it has {there}; the model has {here}"
        fix = advice.replace(" more", "") or "give model.init_from.rename, or another file"
        raise ConfigError(" ".join(what.split()), where=where, fix=fix)
    model.load(done.loaded)
    table = _table(done, " of ".join(part for part in (file.place, options.path) if part))
    table += [f"  note: {advice}"] * bool(advice)
    if others := [one.place or "the file itself" for key, one in ranked if key[0] == fits and one is not file]:
        table.append(f"  note: {listing(others)} of the file would fit as well; the first one was taken")
    for line in _other_meanings(file, data, all_loaded=not done.kept):
        warn(f"{where}: {line}")
    return table + _other_names(file, options.rename)


def _shape(alias: tuple[str, Any], state: Tree) -> tuple[int, ...]:
    """Return the shape that an array in the file must have."""
    key, layout = alias
    return layout.native_shape if layout else state[key].shape


def _fitting(
    file: WeightFile, aliases: Mapping[str, tuple[str, Any]], state: Tree, rename: Mapping[str, str]
) -> list[str]:
    """Return the names of arrays that match a weight of the model by name and shape."""
    renamed, _ = _renamed(file, rename)
    here = {name: aliases[renamed[name]] for name in file.arrays if renamed[name] in aliases}
    return [name for name, alias in here.items() if file.arrays[name].shape == _shape(alias, state)]


def _better_rename(
    file: WeightFile, aliases: Mapping[str, tuple[str, Any]], state: Tree, rename: Mapping[str, str]
) -> tuple[int, dict[str, str]]:
    """Return how many more arrays match with one more line of ``rename``, and ``rename`` with this line.

    The line removes a prefix of all names in the file (``module.``), or adds the prefix of the model's names.
    """
    fitting = set(_fitting(file, aliases, state, rename))
    lines: Counter[tuple[str, str]] = Counter()
    for name in file.arrays.keys() - fitting:
        for own, alias in aliases.items():
            if file.arrays[name].shape == _shape(alias, state):
                if name.endswith(f".{own}"):
                    lines[f"{name.removesuffix(own)}*", "*"] += 1
                elif own.endswith(f".{name}"):
                    lines["*", f"{own.removesuffix(name)}*"] += 1
    ways = [{**rename, old: new} for (old, new), _ in lines.most_common(1)]
    gains = [(len(_fitting(file, aliases, state, way)) - len(fitting), way) for way in ways]
    return max([(0, {}), *gains], key=lambda gain: gain[0])


def assign(
    file: WeightFile,
    aliases: Mapping[str, tuple[str, Any]],
    state: Tree,
    exclude: list[str],
    rename: Mapping[str, str],
    where: str,
) -> Initialization:
    """Match the arrays of the file with those of the model.

    ``aliases``: {name in the file: (key of ``state``, layout of the file's axes or None)}.
    """
    done = Initialization()
    renamed, used = _renamed(file, rename)
    if unused := [pattern for pattern in rename if pattern not in used]:
        raise _unmatched(unused[0], "rename", list(file.arrays), where)
    keys = {key: key.partition("/")[2] for key in state}
    for pattern in exclude:
        if not any(matches(pattern, name) for name in keys.values()):
            raise _unmatched(pattern, "exclude", list(keys.values()), where)
    took: dict[str, str] = {}  # {key in ``loaded``: name under which it matched}
    excluded = {key for key, name in keys.items() if any(matches(pattern, name) for pattern in exclude)}
    for name, array in file.arrays.items():
        key, layout = aliases.get(renamed[name], ("", None))
        if name.endswith(UNUSED) and not key:
            continue
        shape = _shape((key, layout), state) if key else ()
        if not key:
            counted = not renamed[name] and name in aliases
            done.left[name] = NO_PLACE if counted else "the model has no such weight"
        elif key in excluded:
            done.left[name] = "excluded"
        elif array.shape != shape:
            done.left[name] = f"{array.shape} in the file, {shape} in the model"
        elif took.setdefault(key, renamed[name]) == renamed[name] and key in done.loaded:
            raise ConfigError(
                f"two arrays of the file are {keys[key]}, one of them {name}", where=where, fix="rename one"
            )
        else:
            _check_kind(name, array, state[key].dtype, where)
            x = np.asarray(layout.to_canonical(array) if layout else array).astype(state[key].dtype)
            if not np.array_equal(done.loaded.setdefault(key, x), x, equal_nan=True):
                what = f"{name} and {took[key]} of the file differ, and are one weight in the model"
                fix = f'leave one in the file by model.init_from.rename: {{"{name}": "unused.{name}"}}'
                raise ConfigError(what, where=where, fix=fix)
    reasons = {aliases.get(renamed[name], ("",))[0]: why for name, why in done.left.items()}
    done.kept = {
        keys[key]: "excluded" if key in excluded else reasons.get(key, "not in the file")
        for key in state
        if key not in done.loaded
    }
    return done


def _check_kind(name: str, array: np.ndarray, kind: np.dtype, where: str) -> None:
    """Refuse dtypes of another kind than the model's: the codes of a quantized model are not its weights."""
    fractions = np.issubdtype(kind, np.inexact)
    if array.dtype.kind in ("fc" if kind.kind == "c" else "f") if fractions else _survives(array, kind):
        return
    what = f"{name} is {array.dtype} in the file, and {kind} in the model"
    codes = ", which takes no codes of a quantized model" * (fractions and array.dtype.kind != "c")
    fix = "save the weights themselves, as float32, float16 or bfloat16, or exclude it"
    raise ConfigError(what + codes, where=where, fix=fix)


def _survives(array: np.ndarray, kind: np.dtype) -> bool:
    """Return whether conversion to an integer dtype keeps all values."""
    with np.errstate(invalid="ignore"):
        return array.dtype.kind != "c" and np.array_equal(array.astype(kind), array)


def _renamed(file: WeightFile, rename: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
    """Return {name: name in the model}, by the first matching pattern, and the patterns that matched."""
    renamed, used = {}, set()
    for name in file.arrays:
        pattern, renamed[name] = _given(name, rename) or ("", file.here.get(name, name))
        used.add(pattern)
    return renamed, used


def _given(name: str, rename: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the first pattern that matches a name, and the new name."""
    for pattern, new in rename.items():
        parts = [re.escape(part) for part in pattern.replace("/", ".").split("*")]
        match = re.fullmatch("(.*)".join(parts), name)
        if match:
            pieces = new.replace("/", ".").split("*")
            stars = [*match.groups(), ""]
            return pattern, "".join(piece + star for piece, star in zip(pieces, stars, strict=True))
    return None


def _unmatched(pattern: str, key: str, names: list[str], where: str) -> ConfigError:
    near = nearest(pattern.strip("*?."), {part for name in names for part in name.split(".")})
    guess = f"is it {near!r}? " if near else ""
    what = f"{key}: {pattern!r} matches nothing"
    return ConfigError(what, where=where, fix=f"{guess}there are {', '.join(names[:20])}")


def _check_origin(config: Config, file: WeightFile, where: str) -> None:
    """Refuse weights of a user's model of the other framework: a square matrix would be loaded without transposing."""
    framework, model = file.origin
    if framework and framework != config.framework and (":" in model or ":" in config.model.name):
        what = f"the weights are of a {framework} model, whose axis order is not that of {config.framework}"
        raise ConfigError(
            what, where=where, fix="only built-in models are converted; convert the weights to a file yourself"
        )


# ---- files


def _read(path: Path, config: Config, where: str) -> list[WeightFile]:
    """Read the sets of weights in a file."""
    if not path.exists():
        raise ConfigError(
            "there is no such file or folder", where=where, fix="give a run folder, a checkpoint or a file"
        )
    if not path.is_dir() and not path.is_file():  # a pipe would be waited for
        raise ConfigError("it is no plain file", where=where, fix="give a run folder, a checkpoint or a file")
    # A run or a checkpoint of ours stays one, also if a model was exported into its folder.
    if path.is_dir() and not (path / "checkpoints").is_dir() and not (path / MANIFEST).exists():
        if index := next(iter(sorted(path.glob("*.safetensors.index.json"))), None):
            return [_shards(index, where)]
        path = next(filter(Path.is_file, (path / name for name in OF_HUGGING_FACE)), path)
    if path.is_dir():
        place = store.resolve(path, str(path))
        snapshot, vocabulary = store.load(place, model_only=True), saved_vocabulary(place.resolve().parent.parent)
        arrays = {key.partition("/")[2]: x for key, x in snapshot.model.items()}
        its = snapshot.config()
        origin = snapshot.framework, its.model.name
        return [WeightFile(arrays, True, origin, sample_of(snapshot.meta), vocabulary, its.data.fitted)]
    if path.suffix == ".safetensors":
        return [_safetensors(path, where)]
    readers = FRAMEWORKS[config.framework].weight_readers()
    ending = next((ending for ending in readers if path.name.endswith(ending)), None)
    if ending is None:
        known = ", ".join([".safetensors", *readers])
        what = f"a file {path.suffix or 'without an ending'} cannot be read here"
        raise ConfigError(what, where=where, fix=f"give a run folder, a checkpoint, or a file that ends in {known}")
    try:
        sets = readers[ending](path)
    except Exception as error:  # file readers raise many types
        reason = " ".join(str(error).split())[:200]
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        fix = "give a file of weights alone; 'hvd-train guide fine-tuning' says how to make one"
        raise ConfigError(f"the file cannot be read: {kind}{reason}", where=where, fix=fix) from error
    return [
        WeightFile({name.replace("/", "."): x for name, x in arrays.items()}, False, place=place)
        for place, arrays in sets.items()
    ]


def _safetensors(path: Path, where: str) -> WeightFile:
    from safetensors import SafetensorError

    try:
        about, arrays = read(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"the file cannot be read: {' '.join(str(error).split())}", where=where) from error
    ours = about.get("trained_with", "").startswith("hvd_train")
    framework = about.get("trained_with", "").rpartition(", ")[2] if ours else "pytorch"
    arrays = {name.replace("/", "."): x for name, x in arrays.items()}
    # Other files, such as Hugging Face's, have PyTorch's axis order.
    model = about.get("model", "") if ours else "of:others"
    return WeightFile(arrays, ours, (framework if framework in FRAMEWORKS else "", model))


def _shards(index: Path, where: str) -> WeightFile:
    """Read the weights of a folder that ``index`` (Hugging Face's JSON) divides among files."""
    try:
        names = safe_reading.parsed(files.content(index, MOST_BYTES))["weight_map"]
        listed = sorted(set(names.values()))
        # An index of others must not lead to other folders.
        if any(not isinstance(name, str) or Path(name).name != name for name in listed):
            raise ValueError("it names files of other folders")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"the list of files cannot be read: {named_reason(error)}"
        raise CheckpointError(what, where=f"{where}, {index.name}") from error
    parts = [_safetensors(index.parent / name, f"{where}, {name}") for name in listed]
    arrays = {name: x for part in parts for name, x in part.arrays.items()}
    if missing := sorted(name for name in names if name.replace("/", ".") not in arrays):
        what = f"its files lack {listing(missing)}"
        raise CheckpointError(what, where=f"{where}, {index.name}", fix="fetch all files of the folder again")
    return replace(parts[0], arrays=arrays)


# ---- the table


def _table(done: Initialization, path: str) -> list[str]:
    weights = sum(x.size for x in done.loaded.values())
    lines = [f"model.init_from: {amount(len(done.loaded), 'tensor')} of {weights:,} weights taken from {path}"]
    for title, rows in (("kept as drawn", done.kept), ("left in the file", done.left)):
        shown = sorted(rows.items())[:SHOWN]
        lines += [f"  {title}: {name} ({why})" for name, why in shown]
        if len(rows) > len(shown):
            lines.append(f"  {title}: {len(rows) - len(shown)} more")
    return lines


def _other_names(file: WeightFile, rename: Mapping[str, str]) -> list[str]:
    """Return lines about layers that have other names in the file."""
    layers = {}
    for name, here in file.here.items():
        if here not in ("", name) and not _given(name, rename):
            layers[name.rpartition(".")[0]] = here.rpartition(".")[0]
    pairs = [f"{layer} is {here} here" for layer, here in layers.items()]
    more = [f"{len(pairs) - SHOWN} more"] * (len(pairs) > SHOWN)
    return [f"  note: Keras numbered the file's layers after others: {', '.join(pairs[:SHOWN] + more)}"] * bool(pairs)


def _other_meanings(file: WeightFile, data: DataSet, all_loaded: bool) -> list[str]:
    """Return a line for each class list, column, scale of inputs or vocabulary that differs from the file's run.

    ``all_loaded``: whether the model keeps no weight as drawn: else other numbers of classes have other weights.
    """
    lines, here = [], data.sample
    if file.sample:
        pairs = [("classes", file.sample.labels, here.labels), ("columns", file.sample.inputs, here.inputs)]
        for title, before, now in pairs:
            for name, field in now.items():
                old, new = (_names(one, title) for one in (_same(name, before, now), field))
                shared = min(len(old), len(new)) if all_loaded or len(old) == len(new) else 0
                if old[:shared] != new[:shared]:
                    lines.append(f"{title} of the file's run are {listing(old)}; here they are {listing(new)}")
        for name, field in here.inputs.items():
            its = _same(name, file.sample.inputs, here.inputs)
            scale, scale_here = (_scale(one) for one in (its or field, field))
            if scale != scale_here:
                lines.append(f"inputs '{name}' of the file's run were {scale}; here they are {scale_here}")
        if others := _prepared_otherwise(file.fitted or [], data.fitted or []):
            more = f" and {len(others) - SHOWN} more" * (len(others) > SHOWN)
            what = f"columns are prepared otherwise than in the file's run: {'; '.join(others[:SHOWN])}{more}"
            lines.append(f"{what} (data.fitted takes that of its config.yaml)")
    if file.vocabulary and data.vocabulary and json.loads(file.vocabulary) != json.loads(data.vocabulary):
        what = "tokens have other numbers in the file's run, with another vocabulary"
        lines.append(f"{what}; data.vocabulary takes vocabulary.json of its run folder")
    return lines


def _prepared_otherwise(before: Facts, now: Facts) -> list[str]:
    """Describe the columns of a table that are prepared in another way than in the file's run.

    ``before``, ``now``: ``data.fitted``; () if columns are taken as they are.
    """
    old, new = ({facts["column"]: facts for facts in fitted} for fitted in (before, now))
    plain = {"kind": "number"}
    pairs = [(name, old.get(name, plain), new.get(name, plain)) for name in {**old, **new}]
    if before and now:  # columns that one of them lacks are told by their names
        pairs = [pair for pair in pairs if pair[0] in old and pair[0] in new]
    return [
        f"{name} was {_made(one)}, and is {_made(other)}"
        for name, one, other in pairs
        if {**one, "column": ""} != {**other, "column": ""}
    ]


def _made(facts: Mapping[str, Any]) -> str:
    """Describe how a column is prepared."""
    (_, kind, fill, rest), *_ = table_of([{"column": "", **facts}])
    gaps = f"gaps {fill}" * ("fill" in facts or "flag" in facts)
    return ", ".join(filter(None, [kind, rest, gaps]))


def _same(name: str, before: Mapping[str, Field], now: Mapping[str, Field]) -> Field | None:
    """Return the field of this name in the file's run. A single field matches whatever its name."""
    return before.get(name) or (next(iter(before.values())) if len(now) == len(before) == 1 else None)


def _names(field: Field | None, title: str) -> tuple[str, ...]:
    return ((field.names if title == "classes" else field.columns) or ()) if field else ()


def _scale(field: Field) -> str:
    """Describe how the stored numbers are scaled on the device."""
    steps = [f"divided by {field.divisor:g}"] * (field.divisor != 1)
    if field.mean:
        less, over = (", ".join(f"{x:g}" for x in numbers) for numbers in (field.mean, field.std))
        steps.append(f"normalized by mean {less} and std {over}")
    return ", ".join(steps) or "as stored"
