"""A Config as text: in full, as an explanation of its keys, as a hash, and as a difference."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel

from hvd_train.config.keys.config import Config
from hvd_train.config.keys.section import FREE, OneOf
from hvd_train.config.schedules import spec_of

# YAML 1.1 reads 1e-5 as text (it wants 1.0e-5), but people mean a number. So texts like this are quoted.
FLOAT = "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_implicit_resolver(*FLOAT)


def resolved_yaml(config: Config) -> str:
    """Return YAML with every key and its value, which loads as an equal configuration."""
    return yaml.dump(
        _dump(config), None, _Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=100
    )


def _dump(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")


def explain(section: type[BaseModel] = Config, prefix: str = "") -> list[tuple[str, str, str, str]]:
    """Return (key, type, default, meaning) of every key."""
    rows = []
    for name, field in section.model_fields.items():
        kind = inner(field.annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if type(None) in get_args(field.annotation):
                rows.append((prefix + name, "section or null", "null", field.description or ""))
            if get_origin(field.annotation) is list:
                rows.append((prefix + name, "list of sections", "[]", field.description or ""))
            rows += explain(kind, f"{prefix}{name}.")
            continue
        default = "null" if field.default is None else json.dumps(field.default)
        words = _names(field.metadata) or _words(field.annotation)
        rows.append((prefix + name, words, default, field.description or ""))
    return rows


def _names(metadata: Iterable[Any]) -> str:
    return next((one.words() for one in metadata if isinstance(one, OneOf)), "")


def _words(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(str(a) for a in args)
    if origin is Annotated:
        return _names(args[1:]) or _words(args[0])
    if args and origin in (list, dict):
        return f"{origin.__name__} of {_words(args[-1])}"
    if args:
        return "|".join(_words(a) for a in args)
    return {type(None): "null", str: "text", int: "number", float: "real", bool: "true|false", Any: "anything"}.get(
        annotation, str(annotation)
    )


def digest(config: Config) -> str:
    """Return a short hash of the configuration, which ranks compare before they train."""
    values = _dump(config)
    del values["code_dir"]  # the folder may have another path on another host
    # Sorted, so that the order of keys does not count.
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def changed(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """Return (key, old, new) for differences that would change the results of a resumed run."""
    free = set(free_keys(spec_of(new.optim.schedule).to_end))
    before, after = dict(leaves(_dump(old))), dict(leaves(_dump(new)))
    return [
        (key, before.get(key), after.get(key))
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key) and not any(key == f or key.startswith(f + ".") for f in free)
    ]


def free_keys(to_end: bool, section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Yield the keys and sections that a resumed run may change. ``to_end``: the schedule runs to the end."""
    for name, field in section.model_fields.items():
        extra, kind = field.json_schema_extra, inner(field.annotation)
        when = extra.get(FREE) if isinstance(extra, dict) else None
        if when == "always" or (when and not to_end):
            yield prefix + name
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from free_keys(to_end, kind, f"{prefix}{name}.")


def leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested sections."""
    for key, value in data.items():
        if isinstance(value, dict):  # an empty section has no leaves: {} equals a missing key
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def inner(annotation: Any) -> Any:
    """Return the section class within an annotation such as ``Section | None``, else the annotation itself."""
    sections = [a for a in get_args(annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
    return sections[0] if sections else annotation
