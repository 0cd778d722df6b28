"""The keys of an entry of ``data.transforms``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from hvd_train.config.keys.section import Finite, Numbers, Positive, Section, raise_problems
from hvd_train.config.names import did_you_mean

# Transform -> its options, with torchvision's names and meanings if it has the transform.
TRANSFORMS: dict[str, tuple[str, ...]] = {
    "random_horizontal_flip": ("p",),
    "random_vertical_flip": ("p",),
    "random_crop": ("size", "padding", "fill", "padding_mode"),
    "random_resized_crop": ("scale", "ratio"),
    "random_rotation": ("degrees", "fill"),
    "color_jitter": ("brightness", "contrast", "saturation"),
    "random_erasing": ("p", "scale", "ratio", "fill"),
    "cutout": ("size", "fill", "p"),
    "mixup": ("alpha", "p"),
    "cutmix": ("alpha", "p"),
    "normalize": ("mean", "std"),
}
# These mix samples, and their labels.
MIXING = ("mixup", "cutmix")

Bounds = Annotated[list[Finite], Field(min_length=2, max_length=2)]
Strength = Annotated[float, Field(ge=0, le=1)]


class TransformConfig(Section):
    """A transform with its options, in one flat section, so that errors name an option's key and line."""

    name: str = Field(
        "", description="a built-in one ('hvd-train data'), or your function 'package.module:function' of (sample, rng)"
    )
    p: float | None = Field(None, ge=0, le=1, description="its probability; default: flips and erasing 0.5, others 1")
    size: Positive | None = Field(
        None, description="cutout: side in pixels; random_crop: default the side of the images"
    )
    padding: Positive | None = Field(None, description="random_crop: pixels put on each side first")
    fill: float = Field(0, allow_inf_nan=False, description="value of new pixels, as stored")
    padding_mode: Literal["constant", "edge", "reflect", "symmetric"] = Field(
        "constant", description="random_crop: what the padding holds"
    )
    scale: Bounds | None = Field(
        None,
        description="share of the area; default: random_resized_crop [0.08, 1], random_erasing [0.02, 0.33]",
    )
    ratio: Bounds | None = Field(
        None, description="width over height; default: random_resized_crop [0.75, 1.33], random_erasing [0.3, 3.3]"
    )
    degrees: float | None = Field(None, gt=0, le=180, description="random_rotation: the largest angle, to either side")
    brightness: Strength = Field(0, description="color_jitter: a factor of 1 - it to 1 + it on all values")
    contrast: Strength = Field(0, description="color_jitter: the same on the distance from the image's mean grey")
    saturation: Strength = Field(0, description="color_jitter: the same on the distance from each pixel's grey")
    alpha: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="mixup, cutmix: shares are of Beta(alpha, alpha); default 1",
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
        """Expand a bare name to a section with default options."""
        return {"name": entry} if isinstance(entry, str) else entry

    @model_validator(mode="after")
    def _combinations(self) -> TransformConfig:
        if ":" not in self.name and self.name not in TRANSFORMS:
            raise_problems([("name", did_you_mean(self.name, (*TRANSFORMS, "'package.module:function'")))])
        allowed = TRANSFORMS.get(self.name, ("options",))
        fields = type(self).model_fields
        # Not model_fields_set: a resolved configuration may write default values as well.
        set_keys = [key for key in fields if getattr(self, key) != fields[key].default and key not in ("name", "input")]
        problems = [(key, f"{self.name} takes {', '.join(allowed)}") for key in set_keys if key not in allowed]
        needed = {
            "random_crop": ("padding",),
            "cutout": ("size",),
            "normalize": ("mean", "std"),
            "random_rotation": ("degrees",),
        }
        problems += [(key, f"{self.name} needs it") for key in needed.get(self.name, ()) if key not in set_keys]
        if self.name == "color_jitter" and not set_keys:
            problems.append(("brightness", "color_jitter needs it, or contrast or saturation"))
        for key, most in (("scale", 1.0), ("ratio", float("inf"))):
            bounds = getattr(self, key)
            if bounds and not (0 < bounds[0] <= bounds[1] <= most):
                problems.append((key, "[smallest, largest], above 0" + " and up to 1" * (key == "scale")))
        if any(x <= 0 for x in self.listed("std")):
            problems.append(("std", "must be > 0"))
        raise_problems(problems)
        return self

    @model_serializer(mode="wrap")
    def _short(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Dump only keys that differ from their defaults, because lists of transforms are long."""
        return {key: value for key, value in dump(self).items() if value != type(self).model_fields[key].default}

    def listed(self, key: Literal["mean", "std"]) -> tuple[float, ...]:
        """Return the numbers of ``mean`` or ``std``: one, or one for each channel; none if the key is not set."""
        value = getattr(self, key)
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else (value,)
