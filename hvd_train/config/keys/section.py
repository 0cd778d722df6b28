"""The base of all sections, shared types of keys, and helpers to check combinations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError, core_schema

FREE = "may change on resume"  # where a field stores what ``free`` declares
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Mode = Literal["auto", "min", "max"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Numbers = Finite | Annotated[list[Finite], Field(min_length=1)]


class Section(BaseModel):
    """A section of keys. Unknown keys are errors, and values are not converted: "3" is not a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=False)


def free(default: Any, *, unless_to_end: bool = False, **rules: Any) -> Any:
    """Declare a key that a resumed run may change: it affects when to stop, save and report, but not the results.

    All other keys need --allow-change. ``unless_to_end``: not free with a schedule that runs to the end of the training
    (``cosine``), because the learning rate then depends on this key.
    """
    return Field(default, json_schema_extra={FREE: "unless to end" if unless_to_end else "always"}, **rules)


def is_set(section: Section, key: str) -> bool:
    """Return whether a key differs from its default."""
    return getattr(section, key) != type(section).model_fields[key].default


def misplaced(section: Section, choice: str, keys_of: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
    """Return (key, what is wrong) for each key that is set but belongs to other values of the key ``choice``.

    They are errors and not ignored, because the user expects an effect. ``keys_of``: {value: its keys}.
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
    """Raise one error with all (key, what is wrong) of a combination check, if there are any."""
    if problems:
        # The text is for sections built in Python; reading.py uses the pairs, to name each key's line.
        text = "; ".join(f"{key}: {what}" for key, what in problems)
        raise PydanticCustomError("combination", "{text}", {"text": text, "problems": problems})


class OneOf:
    """A Literal whose values are the names in a table.

    ``functions``: ``package.module:function`` is allowed, too.
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
