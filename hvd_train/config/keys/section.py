"""The base of all sections, types of keys that several sections use, and how a check reports its problems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError, core_schema

FREE = "may change on resume"  # the name under which a field keeps what ``free`` declares
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Mode = Literal["auto", "min", "max"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Numbers = Finite | Annotated[list[Finite], Field(min_length=1)]


class Section(BaseModel):
    """Keys that belong together. An unknown key is an error, and no value is converted: "3" is not a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=False)


def free(default: Any, *, unless_to_end: bool = False, **rules: Any) -> Any:
    """Declare a key that a resumed run may change: it decides when to stop, save and report, not what the numbers are.

    All other keys want --allow-change. ``unless_to_end``: not free with a schedule that runs to the end of the training
    (``cosine``), so that the learning rate depends on this key.
    """
    return Field(default, json_schema_extra={FREE: "unless to end" if unless_to_end else "always"}, **rules)


def is_set(section: Section, key: str) -> bool:
    """Return whether a key has another value than its default."""
    return getattr(section, key) != type(section).model_fields[key].default


def misplaced(section: Section, choice: str, keys_of: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
    """Return (key, what is wrong) of each key that is set and belongs to other values of the key ``choice``.

    They are refused and not ignored: the user believes that they do something. ``keys_of``: {value: its keys}.
    """
    chosen = getattr(section, choice)
    takers: dict[str, list[str]] = {}
    for value, keys in keys_of.items():
        for key in keys:
            takers.setdefault(key, []).append(value)
    return [
        (key, f"belongs to {choice}: {' or '.join(values)}, not {chosen}")
        for key, values in takers.items()
        if chosen not in values and is_set(section, key)
    ]


def raise_problems(problems: list[tuple[str, str]]) -> None:
    """Raise one error that carries every (key, what is wrong) of a combination check, if there are any."""
    if problems:
        # The text is for whoever builds a section in Python; reading.py takes the pairs, to name each key's line.
        text = "; ".join(f"{key}: {what}" for key, what in problems)
        raise PydanticCustomError("combination", "{text}", {"text": text, "problems": problems})


class OneOf:
    """A Literal whose names are the rows of a table, so that a new row is a new value of the key.

    ``functions``: a function of the user may stand there, too, as ``package.module:function``.
    """

    def __init__(self, names: Iterable[str], functions: bool = False) -> None:
        self._names, self._functions = names, functions

    def words(self) -> str:
        return "|".join([*self._names, *["package.module:function"] * self._functions])

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def _check(self, value: Any) -> str:
        if self._functions and isinstance(value, str) and ":" in value:
            return value
        if value not in [*self._names]:  # a list: a value may be unhashable
            *first, last = (repr(name) for name in self._names)
            expected = " or ".join([", ".join(first), last])
            raise PydanticCustomError("literal_error", "must be {expected}", {"expected": expected})
        return value
