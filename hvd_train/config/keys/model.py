"""The keys of ``model``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from hvd_train.config.keys.section import Section, free, raise_problems


def _as_section(value: Any) -> Any:
    """Expand a path to a section with this path."""
    return {"path": value} if isinstance(value, str) else value


def _as_options(value: Any) -> Any:
    """Turn ``true`` into a section with the defaults, and ``false`` into null."""
    return {} if value is True else None if value is False else value


class InitConfig(Section):
    """The file with the initial weights. Names are those of the file, with dots for slashes."""

    path: str = Field("", description="run folder, checkpoint, .safetensors, .pt, .keras, .weights.h5")
    exclude: list[str] = Field([], description="patterns of names of the model's weights that keep their first values")
    rename: dict[str, str] = Field(
        {}, description="pattern of names in the file: name here; each * stands for what it matched"
    )

    @model_validator(mode="after")
    def _combinations(self) -> InitConfig:
        problems = [] if self.path else [("path", "give a run folder, a checkpoint or a file of weights")]
        problems += [
            ("rename", f"{new!r} has other * than {old!r}")
            for old, new in self.rename.items()
            if old.count("*") != new.count("*")
        ]
        raise_problems(problems)
        return self


class CompileConfig(Section):
    """How the model is compiled. ``true``: as the defaults say."""

    mode: str = Field("default", description="PyTorch: default, reduce-overhead, max-autotune; see torch.compile")
    dynamic: bool = Field(False, description="PyTorch: compile once for all shapes; false: once for each")
    backend: str = Field("inductor", description="PyTorch: what compiles; see torch.compile")
    fullgraph: bool = Field(False, description="PyTorch: end with an error if a part of the model cannot be compiled")


class ModelConfig(Section):
    """The model. Any further key is an option of its build function."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    name: str = Field(
        "mlp", description="a built-in model ('hvd-train models'), or your function 'package.module:function'"
    )
    init_from: Annotated[InitConfig | None, BeforeValidator(_as_section)] = free(
        None, description="what the first weights are taken from, a path or a section; null: they are drawn"
    )
    compile: Annotated[CompileConfig | None, BeforeValidator(_as_options)] = free(
        None, description="true, or a section: forward and backward are compiled (torch.compile, XLA); null: not"
    )
    recompute: bool | list[str] = free(
        False, description="true, or patterns of layers: backward computes their activations again, to save memory"
    )

    @property
    def options(self) -> dict[str, Any]:
        """Return the keys that are options of the build function."""
        return dict(self.model_extra or {})
