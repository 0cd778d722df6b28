"""The manifest of a checkpoint: every field typed and bounded, and a SHA-256 over all of them.

The digest detects flipped bits. Other format numbers are refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hvd_train import files, protocol
from hvd_train.errors import CheckpointError
from hvd_train.protocol import Sample

FORMAT = 3
MANIFEST = "manifest.json"
NAME = re.compile(r"step-([0-9]{1,18})(\.was-[0-9a-f]+)?$")
MAX_BYTES, MAX_RANKS = 32 << 20, 1 << 16
Count = Annotated[int, Field(ge=0, le=1 << 53)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=1000)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^(weights|optimizer|rank-[0-9]{1,6})\.safetensors$")]


@dataclass
class Progress:
    """The progress of a training, saved with every checkpoint and equal on all ranks."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    step: Count = 0
    epoch: Count = 0
    consumed: Count = 0  # samples of this epoch already used
    seen: Count = 0  # samples used in all epochs
    epoch_sums: Annotated[list[float], Field(max_length=1 << 20)] = field(default_factory=list)  # of this epoch so far
    train: dict[Text, float] = field(default_factory=dict)  # values of the newest epoch
    val: dict[Text, float] = field(default_factory=dict)  # values of the newest evaluation
    best: float | None = None  # early stopping
    waited: Count = 0
    stopped: bool = False
    loss_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    good_steps: Count = 0  # steps since the loss scale changed
    skipped: Count = 0  # steps whose 16-bit gradients overflowed
    pending: Annotated[list[Annotated[list[float], Field(max_length=1 << 20)]], Field(max_length=MAX_RANKS)] = field(
        default_factory=list
    )  # each rank's sums since the last line of the log
    ending: bool = False  # the steps of this epoch are done, but not its evaluation
    rate_factor: Annotated[float, Field(ge=0, le=1)] = 1.0  # factor on the learning rate after plateaus
    plateau_best: float | None = None
    plateau_waited: Annotated[int, Field(ge=-(1 << 53), le=1 << 53)] = 0  # below 0: within the cooldown
    # Length of the warm-up when the run began, if it is given in epochs and the rest in steps, or vice versa.
    warmup: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    phase: Count = 0  # the epoch since which the same weights are trained (optim.groups)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class File(_Part):
    bytes: Count
    sha256: Digest


class Samples(_Part):
    samples: Count
    fingerprint: Text


class ArrayField(_Part):
    shape: Annotated[list[Count], Field(max_length=64)]
    dtype: Annotated[str, Field(pattern="^(bool|u?int(8|16|32|64)|float(16|32|64))$")]
    divisor: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    classes: Count | None
    masked: bool
    mean: Annotated[list[Finite], Field(max_length=1 << 20)]
    std: Annotated[list[Finite], Field(max_length=1 << 20)]
    image: bool
    names: Annotated[list[Text], Field(max_length=1 << 20)]
    columns: Annotated[list[Text], Field(max_length=1 << 20)]
    ragged: bool


class SampleFields(_Part):
    """The fields of protocol.Sample."""

    inputs: dict[Text, ArrayField]
    labels: dict[Text, ArrayField]
    declared_classes: Count | None


class DataFacts(_Part):
    """The training and validation data, as ``resume_rules.data_facts`` describes them."""

    train: Samples
    val: Samples


class Meta(_Part):
    """Facts about the run."""

    framework: Text
    world_size: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    config: dict[str, Any]
    compression: Text
    axes: Text
    sample: SampleFields
    progress: Progress
    monitor: dict[Text, float | None]
    data: DataFacts


class Manifest(_Part):
    format: Literal[3]
    step: Count
    epoch: Count
    consumed: Count
    ranks: Annotated[int, Field(ge=0, le=MAX_RANKS)]
    meta: Meta
    files: dict[FileName, File]
    sha256: Digest  # over all other fields


def encode(fields: dict[str, Any]) -> bytes:
    """Encode these fields as a manifest, adding ``format`` and ``sha256``."""
    whole = {**fields, "format": FORMAT}
    # Digest the fields as they are read back, because JSON turns tuples into lists.
    return json.dumps({**whole, "sha256": _digest(json.loads(json.dumps(whole)))}, sort_keys=True, indent=1).encode()


def _digest(raw: dict[str, Any]) -> str:
    """Return the digest of the JSON's content, independent of whitespace and key order."""
    fields = {name: value for name, value in raw.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object. Duplicate keys, of which Python would keep the last, are an error."""
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise _TwiceError(Counter(name for name, _ in pairs).most_common(1)[0][0][:60])
    return unique


class _TwiceError(ValueError):
    pass


def sample_of(meta: Mapping[str, Any]) -> Sample:
    """Return the fields of the run's samples."""
    saved = meta["sample"]
    inputs, labels = ({name: _field(x) for name, x in saved[part].items()} for part in ("inputs", "labels"))
    return Sample(inputs, labels, saved["declared_classes"])


def _field(saved: Mapping[str, Any]) -> protocol.Field:
    # JSON has lists for the fields' tuples.
    values: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in saved.items()}
    return protocol.Field(**values)


def read(path: Path) -> tuple[Manifest, dict[str, Any]]:
    """Return (manifest of the checkpoint ``path``, its ``meta`` as saved). Raises CheckpointError."""
    file = path / MANIFEST
    try:
        if path.is_symlink() or file.is_symlink():
            raise CheckpointError(
                "the checkpoint is a symbolic link", where=str(path), fix="copy the files that it points to"
            )
        if file.stat().st_size > MAX_BYTES:
            raise _damaged(file, f"it has {file.stat().st_size:,} bytes")
        content = files.content(file, MAX_BYTES)
        raw = json.loads(content, object_pairs_hook=_unique)
        if isinstance(raw, dict) and raw.get("format", FORMAT) != FORMAT:
            number = json.dumps(raw["format"])[:20]
            raise CheckpointError(
                f"the checkpoint has format {number}, and this version reads format {FORMAT}", where=str(path)
            )
        manifest = Manifest.model_validate_json(content)
    except FileNotFoundError as error:
        raise CheckpointError("there is no checkpoint", where=str(file)) from error
    except OSError as error:
        raise CheckpointError(f"the manifest cannot be read: {error.strerror}", where=str(file)) from error
    except ValidationError as error:
        raise _damaged(file, *_first(error)) from error
    except _TwiceError as error:
        raise _damaged(file, str(error), "stands twice") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(file, "no JSON") from error
    _check(path, manifest, raw)
    return manifest, raw["meta"]


def _check(path: Path, manifest: Manifest, raw: dict[str, Any]) -> None:
    """Check that the fields are consistent with each other."""
    name, file = NAME.match(path.name), path / MANIFEST
    if name and int(name.group(1)) != manifest.step:
        raise _damaged(file, f"it is of step {manifest.step}")
    for needed in ("weights.safetensors", "optimizer.safetensors"):
        if needed not in manifest.files:
            raise _damaged(file, "files", f"no {needed}")
    kept = sorted(int(n[5:].split(".")[0]) for n in manifest.files if n.startswith("rank-"))  # all ranks, or none
    if kept and kept != list(range(manifest.ranks)):
        raise _damaged(file, "files", f"of {manifest.ranks} ranks: {', '.join(map(str, kept))}")
    if manifest.sha256 != _digest(raw):
        raise _damaged(file, "its SHA-256 differs")


def _first(error: ValidationError) -> tuple[str, str]:
    first = error.errors(include_url=False, include_input=False)[0]
    return ".".join(str(part)[:60] for part in first["loc"]), first["msg"]


def _damaged(file: Path, *reason: str) -> CheckpointError:
    text = ": ".join(part for part in reason if part)
    return CheckpointError(f"the manifest is damaged ({' '.join(text.split())[:200]})", where=str(file))
