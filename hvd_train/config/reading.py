"""Read a Config from a file, ``--set`` settings and flags. All errors are reported at once, with their lines."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from hvd_train.config.keys.config import Config
from hvd_train.config.names import nearest
from hvd_train.config.writing import FLOAT, explain, inner
from hvd_train.errors import ConfigError

MAX_BYTES, MAX_DEPTH, MAX_LETTERS, MAX_VALUES = 1 << 20, 50, 10_000, 50_000
LISTED = "'hvd-train config --explain' lists the keys"


class YamlLoader(yaml.SafeLoader):
    """The YAML loader for configurations and command-line values."""


def _as_written(tag: str, pattern: re.Pattern) -> re.Pattern:
    """Keep 2:00:00 as text, which YAML 1.1 reads as a number to the base of 60."""
    if not tag.endswith((":int", ":float")):
        return pattern
    return re.compile(rf"(?!.*:)(?:{pattern.pattern})", re.VERBOSE)


YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, _as_written(tag, pattern)) for tag, pattern in rows]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
YamlLoader.add_implicit_resolver(*FLOAT)

Path_ = tuple[str | int, ...]


def _plain(node: yaml.Node, path: Path_, lines: dict[Path_, str], file: str, problems: list[str]) -> Any:
    """Convert a YAML node to Python data. Records the line of each key in ``lines``, and in ``problems`` duplicate
    keys, of which YAML would silently keep the last."""
    lines[path] = f"{file}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        out: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            place = f"{file}:{key_node.start_mark.line + 1}"
            if key in out:
                problems.append(f"{place}: {_dotted((*path, key))}: stands twice; keep one")
            out[key] = _plain(value_node, (*path, key), lines, file, problems)
            lines[*path, key] = place
        return out
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*path, i), lines, file, problems) for i, item in enumerate(node.value)]
    value = YamlLoader("").construct_object(node)
    if isinstance(value, int) and abs(value) >= 1 << 64:
        raise ValueError(f"line {node.start_mark.line + 1}: a number of more than 64 bits")
    return value


def _read(path: Path, lines: dict[Path_, str], problems: list[str]) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration: {error.strerror}", where=str(path)) from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(
            f"the file has {len(raw):,} bytes, and a configuration at most {MAX_BYTES:,}", where=str(path)
        )
    try:
        text = raw.decode("utf-8")
        _check_size(text, str(path))
        # Composed, not loaded, because nodes know their lines.
        node = yaml.compose(text, YamlLoader)
        if node is None:
            raise ConfigError("the configuration is empty", where=str(path), fix="'hvd-train config' prints a full one")
        data = _plain(node, (), lines, str(path), problems)
    except UnicodeDecodeError as error:
        raise ConfigError("the configuration is not UTF-8 text", where=f"{path}, byte {error.start}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        tab = "; indent with blanks, not tabs" if "'\\t'" in str(error) else ""
        raise ConfigError(f"{place}: not valid YAML: {error.problem}{tab}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"not valid YAML: {error}".splitlines()[0], where=str(path)) from error
    if not isinstance(data, dict):
        raise ConfigError("the configuration must be 'key: value' lines", where=f"{path}:1")
    return data


def plain(text: str, file: str) -> Any:
    """Load an untrusted YAML text, without aliases and within the limits of a configuration.

    Raises ConfigError, ValueError, RecursionError and YAMLError.
    """
    _check_size(text, file)
    node = yaml.compose(text, YamlLoader)
    return None if node is None else _plain(node, (), {}, file, [])


def _check_size(text: str, file: str) -> None:
    """Refuse too large or deep texts before they are built, which could take minutes or overflow the stack."""
    try:
        # libyaml is 20 times as fast: with Python's parser 100 000 values took 8 s. But its messages are others than
        # those explained below, so a text that it cannot parse is parsed again.
        _check_events(yaml.parse(text, getattr(yaml, "CSafeLoader", YamlLoader)), file)
    except yaml.YAMLError:
        _check_events(yaml.parse(text, YamlLoader), file)


def _check_events(events: Iterator[yaml.Event], file: str) -> None:
    depth = values = 0
    for event in events:
        where = file if file.startswith("--set") else f"{file}:{getattr(event.start_mark, 'line', 0) + 1}"
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError("anchors and aliases (&, *) are not taken", where=file, fix="write the value out")
        if depth > MAX_DEPTH:
            raise ConfigError(f"lists and sections within one another more than {MAX_DEPTH} deep", where=where)
        values += isinstance(event, yaml.ScalarEvent)
        if values > MAX_VALUES:
            raise ConfigError(f"more than {MAX_VALUES:,} values in a configuration", where=where)
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_LETTERS:
            raise ConfigError(f"a value of {len(event.value):,} letters; {MAX_LETTERS:,} are the most", where=where)


def _apply(data: dict[str, Any], setting: str, lines: dict[Path_, str], problems: list[str]) -> None:
    key, equals, text = setting.partition("=")
    where = f"--set {setting if len(setting) <= 200 else setting[:200] + '...'}"
    if not equals or not key.strip():
        problems.append(f"{where}: not of the form key=value; for example --set optim.lr=0.1")
        return
    try:
        _check_size(text, where)
        node = yaml.compose(text, YamlLoader)
        value = None if node is None else _plain(node, (), {}, where, problems)
    except (yaml.YAMLError, ValueError) as error:
        problems.append(f"{where}: the value is not valid YAML: {str(error).splitlines()[0]}")
        return
    path = tuple(part.strip().replace("-", "_") for part in key.split("."))
    at = data
    for part in path[:-1]:
        if not isinstance(at.get(part), dict):
            at[part] = {}
        at = at[part]
    at[path[-1]] = value
    # A setting replaces all keys below its own, so their lines in the file no longer apply.
    for stale in [p for p in lines if p[: len(path)] == path]:
        del lines[stale]
    lines[path] = where


def load_config(
    path: Path | None = None, sets: Sequence[str] = (), *, base: Mapping[str, Any] | None = None, **overrides: Any
) -> Config:
    """Build a configuration from defaults, ``base`` or the file, ``--set`` settings and ``overrides``; later ones win.

    ``overrides`` are command-line flags; None is ignored. ``code_dir`` is set if the configuration names user code,
    unless it comes from a ``base``.

    Raises one ConfigError with a line for each error: ``FILE:LINE: key: what; what to do``.
    """
    lines: dict[Path_, str] = {}
    problems: list[str] = []
    data = _read(path, lines, problems) if path else copy.deepcopy(dict(base or {}))
    for setting in sets:
        _apply(data, setting, lines, problems)
    for key, value in overrides.items():
        if value is not None:
            data[key] = value
            lines[key,] = f"--{key.replace('_', '-')}"
    config = None
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        problems += _explained(error, lines, path)
    if problems or config is None:
        raise ConfigError("\n".join(" ".join(problem.splitlines()) for problem in problems))
    if config.user_code and (config.code_dir or base is None):
        folder = config.code_dir or (path.parent if path else ".")
        return config.model_copy(update={"code_dir": os.path.abspath(folder)})
    return config


def _expanded(error: ValidationError) -> Iterator[dict[str, Any]]:
    for item in error.errors(include_url=False):
        if item["type"] == "combination":
            for key, what in item["ctx"]["problems"]:
                yield {"type": "rule", "loc": (*item["loc"], *key.split(".")), "msg": what, "input": None}
        else:
            yield dict(item)


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in path)


def _section(path: Sequence[str | int]) -> type[BaseModel] | None:
    """Find the section class at a path of keys, or None."""
    at: Any = Config
    for part in path:
        if isinstance(part, int):  # an index into a list of sections
            continue
        field = at.model_fields.get(str(part)) if isinstance(at, type) and issubclass(at, BaseModel) else None
        if field is None:
            return None
        at = inner(field.annotation)
    return at if isinstance(at, type) and issubclass(at, BaseModel) else None


# pydantic's kind of error -> what was expected, for users
EXPECTED = {
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number", "string_type": "text",
    "bool_type": "true or false", "list_type": "a list", "dict_type": "a section of keys",
    "model_type": "a section of keys", "finite_number": "finite", "literal_error": "{expected}",
    "greater_than": "> {gt}", "greater_than_equal": ">= {ge}", "less_than": "< {lt}", "less_than_equal": "<= {le}",
    "too_long": "of at most {max_length} items", "too_short": "of at least {min_length} items",
}  # fmt: skip


def _explained(error: ValidationError, lines: Mapping[Path_, str], file: Path | None) -> list[str]:
    """Explain errors, one line per key and per rule that it breaks, in the order of the file.

    pydantic reports an error for each alternative of a key ("auto" or a number); here they are merged.
    """
    errors: dict[Path_, list[dict[str, Any]]] = {}
    for item in _expanded(error):
        # pydantic's location includes members of a union ("constrained-int", "literal[...]"), which are not keys.
        location = list(item["loc"])
        while len(location) > 1 and _section(location[:-1]) is None and not isinstance(location[-1], int):
            location.pop()
        errors.setdefault(tuple(location), []).append(item)
    order = list(lines)
    rows = []
    for key, items in errors.items():
        near = [key[:n] for n in range(len(key), 0, -1) if key[:n] in lines]
        near += [path for path in lines if path[: len(key)] == key]  # "optm" of "--set optm.lr=3"
        place = lines[near[0]] if near else str(file or "")
        for text in [item["msg"] for item in items if item["type"] == "rule"] or [_text(key, items)]:
            text = f"{_dotted(key)}: {text}"
            rows.append((order.index(near[0]) if near else -1, f"{place}: {text}" if place else text))
    return [row for _, row in sorted(rows, key=lambda row: row[0])]


def explained(key: str) -> list[tuple[str, str, str, str]]:
    """Return the rows of ``explain`` for a key or section; for an empty text, all rows."""
    key = key.strip().replace("-", "_")
    rows = [row for row in explain() if not key or row[0] == key or row[0].startswith(f"{key}.")]
    if not rows:
        raise ConfigError(f"{key}: {_unknown(tuple(key.split('.')))}", where="config --explain")
    return rows


def _unknown(path: Path_) -> str:
    """Return the message for an unknown key, with the same name elsewhere or a similar one as a suggestion."""
    section, last = _section(path[:-1]), str(path[-1])
    leaves = {key.split(".")[-1]: key for key, *_ in reversed(explain())}
    near = nearest(last, section.model_fields) if section else None
    # The same name in another section is a better guess than a similar one in this section.
    guess = leaves.get(last.lower()) or (near and _dotted((*path[:-1], near)))
    guess = guess or leaves.get(nearest(last, leaves, 0.75) or "")
    return f"unknown key; did you mean '{guess}'?" if guess else f"unknown key; {LISTED}"


def _text(path: Path_, items: Sequence[Mapping[str, Any]]) -> str:
    kinds = [item["type"] for item in items]
    if "extra_forbidden" in kinds:
        return _unknown(path)
    expected = [EXPECTED.get(i["type"], i["msg"]).format_map(i.get("ctx") or {}) for i in items]
    value = items[0]["input"]
    text = f"must be {' or '.join(dict.fromkeys(expected))}, not {json.dumps(value, default=str)[:60]}"
    options = [option for words in expected for option in re.findall(r"'([^']+)'", words)]
    near = nearest(str(value), options)
    section = _section(path) if "model_type" in kinds else None
    if near is None and isinstance(value, str):
        if section:  # the example is the section's first key
            near = f"{_dotted(path)}.{next(iter(section.model_fields))}"
        elif "list_type" in kinds:
            near = f"[{value}]"
    return text + (f"; did you mean '{near}'?" if near else "")
