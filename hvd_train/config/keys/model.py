"""The keys of ``model``."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from hvd_train.config.keys.section import Section


class ModelConfig(Section):
    """The model. Any further key is an option of its build function."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    name: str = Field(
        "mlp", description="a built-in model ('hvd-train models'), or your function 'package.module:function'"
    )

    @property
    def options(self) -> dict[str, Any]:
        """Return the keys besides ``name``, as the build function gets them."""
        return dict(self.model_extra or {})
