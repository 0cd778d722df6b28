"""The keys of ``data``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from hvd_train.config.keys.lengths import LengthsConfig
from hvd_train.config.keys.section import Count, Positive, Section, free, is_set, raise_problems
from hvd_train.config.keys.transforms import MIXING, TransformConfig

# The kinds of data for which ``images`` may say whether samples are images; the others know.
ARRAYS = ("npz", "npy", "hdf5", "packed")


def _class_names(value: Any) -> Any:
    """Convert class names to text, because YAML reads 1 as a number."""
    if isinstance(value, dict):
        return {key: _class_names(names) for key, names in value.items()}
    if value is None or value == "auto":
        return value
    listed = value if isinstance(value, list) else []
    # YAML reads yes and no as true and false, whose text would differ from what the user wrote.
    names = [str(name) for name in listed]
    whole = all(isinstance(name, str | int) and name is not True and name is not False for name in listed)
    if not names or not whole or "" in names or len(set(names)) < len(names):
        expected = "a list of words (yes, no, true and false in quotes) or of whole numbers, each once; or auto"
        raise PydanticCustomError("class_names", "{wanted}", {"wanted": expected})
    return names


ClassNames = Annotated[
    Literal["auto"] | list[str] | dict[str, list[str]] | None,
    BeforeValidator(_class_names),
]


Missing = Literal["refuse", "mean", "median", "mode", "flag"]
OF_TABLES = ("categories", "encoding", "missing", "scale", "dates", "fitted")


class DataConfig(Section):
    """The data set: its location, its inputs and labels, and the transforms."""

    name: str = Field(
        "digits",
        description="a built-in data set ('hvd-train data'), or your 'package.module:function' giving (train, val)",
    )
    path: str | None = free(
        None, description="folder or file; digits, diabetes, synthetic and functions read none, masked_text needs none"
    )
    image_size: Positive | None = Field(None, description="side in pixels to which images are resized")
    val_fraction: float = Field(
        0.2, gt=0, lt=1, description="share held out for validation where the data has no validation part"
    )
    fold: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = Field(
        None, description="[k, n]: hold out the k-th of n parts, 0 to n - 1, instead of val_fraction (sweep --folds n)"
    )
    num_samples: Positive = Field(10_000, description="synthetic: number of training samples")
    input_shape: list[Positive] = Field(
        [28, 28, 1], description="synthetic: shape of a sample, (height, width, channels)"
    )
    sequence_length: Positive = Field(128, description="text: bytes of a sample; masked_text: its tokens")
    vocabulary_size: int = Field(
        8000, ge=300, description="masked_text, labeled_text: byte-pair tokens to learn, at most; 260 of them are fixed"
    )
    vocabulary: str | None = Field(
        None, description="masked_text, labeled_text: a tokenizer.json of the tokenizers library; null: learn one"
    )
    features: list[str] | None = Field(
        None,
        description="table, labeled_text, data sets of dicts: columns that are the input; default: all but labels",
    )
    labels: str | list[str] | None = Field(
        None, description="table, labeled_text, data sets of dicts: the column to learn, or several"
    )
    categories: Literal["auto"] | list[str] | None = Field(
        None, description="table: features that are words; auto: all that are no numbers; null: words are refused"
    )
    encoding: Literal["one_hot", "ids"] = Field(
        "one_hot",
        description="table: words as columns of 0 and 1, or as ids, in an input of their own with 0 for unknown",
    )
    missing: Missing | dict[str, Missing] = Field(
        "refuse",
        description="table: what fills empty cells of features; flag: 0, and a column that says so; or {column: ...}",
    )
    scale: Literal["standard", "minmax", "none"] = Field(
        "none", description="table: numbers get mean 0 and deviation 1, or the range 0 to 1, by the training samples"
    )
    dates: list[str] | None = Field(None, description="table: features that are dates or times, as days since 1970")
    fitted: list[dict[str, Any]] | None = Field(
        None, description="table: what fit computed from the training samples for these keys; it writes them here"
    )
    num_classes: Positive | None = Field(None, description="number of classes; default: the largest label + 1")
    images: bool | None = Field(
        None,
        description="your arrays: whether samples are images; null: bytes, and arrays with 1 or 3 channels",
    )
    classes: ClassNames = Field(
        None,
        description="words or whole numbers of the labels, or names of 0, 1, ..., in order; auto: those that occur",
    )
    target: Literal["labels", "inputs"] = Field(
        "labels", description="what the model learns; inputs: to reproduce its input, as autoencoders do"
    )
    options: dict[str, Any] = Field({}, description="arguments of your data function")
    sampling: Literal["balanced"] | None = Field(
        None, description="balanced: an epoch takes as many training samples of each class; null: each sample once"
    )
    transforms: list[TransformConfig] = Field([], description="transforms of each training sample, in this order")
    lengths: LengthsConfig | None = Field(None, description="samples of different lengths; null: all have one shape")
    workers: Positive = free(1, description="threads of a rank that fetch, decode and transform ahead of the training")

    @model_validator(mode="after")
    def _combinations(self) -> DataConfig:
        names = [one.name for one in self.transforms]
        if "normalize" in names[:-1]:
            raise_problems([("transforms", "normalize must stand last: it is done on the device, after all others")])
        first = next((k for k, name in enumerate(names) if name in MIXING), len(names))
        if after := [name for name in names[first:] if name not in (*MIXING, "normalize")]:
            what = f"{after[0]} must stand before {names[first]}, which mixes finished samples"
            raise_problems([("transforms", what)])
        if self.name == "labeled_text" and not self.lengths:
            raise_problems([("lengths", "labeled_text needs it, for example {max_length: 256, truncate: true}")])
        if self.name not in ("table", "labeled_text") and ":" not in self.name:
            given = [key for key in ("features", "labels") if getattr(self, key)]
            raise_problems([(key, "belongs to name: table, or to your own data set") for key in given])
        if self.name != "table":
            # A packed table has been prepared, and keeps how.
            strange = [key for key in OF_TABLES if is_set(self, key) and (self.name, key) != ("packed", "fitted")]
            raise_problems([(key, "belongs to name: table") for key in strange])
        if self.images is not None and self.name not in ARRAYS and ":" not in self.name:
            raise_problems([("images", f"belongs to {', '.join(ARRAYS)} and your own data")])
        if self.fold and not (self.fold[1] >= 2 and self.fold[0] < self.fold[1]):
            raise_problems([("fold", f"[k, n] with k below n and n at least 2, not {self.fold}")])
        listed = self.classes if isinstance(self.classes, list) else []
        if self.num_classes and self.num_classes < len(listed):
            raise_problems([("num_classes", f"{self.num_classes}, and data.classes names {len(listed)}: leave it out")])
        return self
