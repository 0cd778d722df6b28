"""The keys of an entry of ``data.transforms``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from hvd_train.config.keys.section import Numbers, Positive, Section, raise_problems
from hvd_train.config.names import did_you_mean

# Transform -> the options that it takes. Names and meanings are those of torchvision where it has the transform.
TRANSFORMS: dict[str, tuple[str, ...]] = {
    "random_horizontal_flip": ("p",),
    "random_vertical_flip": ("p",),
    "random_crop": ("size", "padding", "fill", "padding_mode"),
    "cutout": ("size", "fill", "p"),
    "normalize": ("mean", "std"),
}


class TransformConfig(Section):
    """One transform with its options, in one flat section: a mistake in an option is then named by its key and line."""

    name: str = Field(
        "", description="a built-in one ('hvd-train data'), or your function 'package.module:function' of (sample, rng)"
    )
    p: float | None = Field(None, ge=0, le=1, description="its probability; default: flips 0.5, cutout 1")
    size: Positive | None = Field(
        None, description="cutout: side in pixels; random_crop: default the side of the images"
    )
    padding: Positive | None = Field(None, description="random_crop: pixels put on each side first")
    fill: float = Field(0, allow_inf_nan=False, description="random_crop, cutout: value of new pixels, as stored")
    padding_mode: Literal["constant", "edge", "reflect", "symmetric"] = Field(
        "constant", description="random_crop: what the padding holds"
    )
    mean: Numbers | None = Field(
        None, description="normalize: subtracted; one number, or one a channel, for values in [0, 1]"
    )
    std: Numbers | None = Field(None, description="normalize: divisor; one number, or one a channel")
    input: str | None = Field(None, description="the input that it changes, of several")
    options: dict[str, Any] = Field({}, description="arguments of your function")

    @model_validator(mode="before")
    @classmethod
    def _expand_name(cls, entry: Any) -> Any:
        """Take a name alone as a section with default options."""
        return {"name": entry} if isinstance(entry, str) else entry

    @model_validator(mode="after")
    def _combinations(self) -> TransformConfig:
        if ":" not in self.name and self.name not in TRANSFORMS:
            raise_problems([("name", did_you_mean(self.name, (*TRANSFORMS, "'package.module:function'")))])
        allowed = TRANSFORMS.get(self.name, ("options",))
        fields = type(self).model_fields
        # Compared with the default, not by model_fields_set: a resolved configuration writes every key that it keeps.
        set_keys = [key for key in fields if getattr(self, key) != fields[key].default and key not in ("name", "input")]
        problems = [(key, f"{self.name} takes {', '.join(allowed)}") for key in set_keys if key not in allowed]
        needed = {"random_crop": ("padding",), "cutout": ("size",), "normalize": ("mean", "std")}
        problems += [(key, f"{self.name} needs it") for key in needed.get(self.name, ()) if key not in set_keys]
        if any(x <= 0 for x in self.listed("std")):
            problems.append(("std", "must be > 0"))
        raise_problems(problems)
        return self

    @model_serializer(mode="wrap")
    def _short(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the keys that were set, without defaults, because a list of sections is long."""
        return {key: value for key, value in dump(self).items() if value != type(self).model_fields[key].default}

    def listed(self, key: Literal["mean", "std"]) -> tuple[float, ...]:
        """Return the numbers of ``mean`` or ``std``: one, or one for each channel; none if the key is not set."""
        value = getattr(self, key)
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else (value,)
