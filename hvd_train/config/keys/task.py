"""The keys of ``task``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hvd_train.config.keys.section import Section, raise_problems
from hvd_train.config.names import did_you_mean
from hvd_train.metrics.table import LOSSES, METRICS

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# The other keys in a line of metrics.jsonl, which a metric of the same name would overwrite.
LOG_KEYS = ("event", "epoch", "step", "samples", "lr", "samples_per_second")


GATHERED = "gathered:"  # before the name of a metric of all outputs at once


def title_of(output: str, metric: str) -> str:
    """Return the name of a metric in the log. A user's metric has the name of its function."""
    return f"{output}_" * bool(output) + metric.rpartition(":")[2].rpartition(".")[2]


class TaskConfig(Section):
    """The losses and metrics of one or several outputs."""

    loss: str | dict[str, str] = Field(
        "cross_entropy",
        description="a built-in loss, or your function 'package.module:function'; several outputs: {output: loss}",
    )
    metrics: list[str] | dict[str, list[str]] | None = Field(
        None,
        description="metrics, built in or yours; several outputs: {output: [...]}; null: accuracy of classes",
    )
    class_weights: Literal["balanced"] | dict[str, Weight] | list[Weight] | None = Field(
        None,
        description="cross_entropy: what a sample counts, by class name or in order; balanced: all classes alike",
    )
    step: str | None = Field(
        None,
        description="in place of loss: your training step, 'package.module:function' of (model, inputs, labels)",
    )
    loss_weights: dict[str, Weight] | None = Field(
        None, description="what each of several losses counts in their sum; with step: the names of its losses"
    )
    ignore_index: int = Field(-100, description="cross_entropy: the label of places that do not count")

    @property
    def terms(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Return {output: (loss, its metrics)}; the output is "" if there is only one.

        Sorted by name, so that the order of keys does not matter. With ``step`` names are those of its losses, and all
        metrics come with the first one.
        """
        if self.step:
            of_step, *others = sorted(self.loss_weights or [""])
            given = tuple(self.metrics) if isinstance(self.metrics, list) else ()
            return {of_step: (self.step, given), **dict.fromkeys(others, (self.step, ()))}
        losses = dict(sorted(self.loss.items())) if isinstance(self.loss, dict) else {"": self.loss}
        metrics = {"": self.metrics} if isinstance(self.metrics, list) else self.metrics
        defaults = {name: ["accuracy"] if loss in ("cross_entropy", "bce") else [] for name, loss in losses.items()}
        return {name: (loss, tuple((metrics or defaults).get(name, []))) for name, loss in losses.items()}

    @property
    def has_user_functions(self) -> bool:
        """Return whether a loss or a metric is a function of the user."""
        return any(":" in name for loss, metrics in self.terms.values() for name in (loss, *metrics))

    def classes(self, label: str, alone: bool) -> bool:
        """Return whether this label is a class number. ``alone``: the data has no other label."""
        loss, _ = self.terms.get(label) or (self.terms.get("") if alone else None) or ("", ())
        return loss == "cross_entropy"

    def term(self, label: str) -> tuple[str, tuple[str, ...]]:
        """Return the loss and the metrics for this label; a single output and a step match any label."""
        if self.step:
            return next(iter(self.terms.values()))
        return self.terms.get(label) or self.terms.get("") or ("", ())

    def asks_user_code(self, label: str) -> bool:
        """Return whether a user's loss or metric uses this label."""
        loss, metrics = self.term(label)
        return any(":" in name for name in (loss, *metrics))

    @property
    def names(self) -> list[str]:
        """Return the names of all losses and metrics, in the order of the log."""
        return [name for name, _ in self._values]

    @property
    def better(self) -> dict[str, Literal["min", "max"] | None]:
        """Return {loss or metric: "min" or "max", whichever is better}; None for a user's metric."""
        return dict(self._values)

    @property
    def _values(self) -> list[tuple[str, Literal["min", "max"] | None]]:
        losses: list[tuple[str, Literal["min", "max"] | None]] = [("loss", "min")]
        losses += [(f"{name}_loss", "min") for name in self.terms] if len(self.terms) > 1 else []
        each = [(name, metric) for name, (_, metrics) in self.terms.items() for metric in metrics]
        rows = [(title_of("" if self.step else name, metric), METRICS.get(metric)) for name, metric in each]
        return losses + [(title, row.better if row else None) for title, row in rows]

    @model_validator(mode="before")
    @classmethod
    def _step_is_the_loss(cls, keys: Any) -> Any:
        named = isinstance(keys, dict) and isinstance(keys.get("step"), str) and "loss" not in keys
        return keys | {"loss": keys["step"]} if named else keys

    @model_validator(mode="after")
    def _combinations(self) -> TaskConfig:
        problems = []
        for loss, metrics in self.terms.values():
            problems += [("loss", did_you_mean(loss, LOSSES))] if ":" not in loss and loss not in LOSSES else []
            problems += [("metrics", did_you_mean(m, METRICS)) for m in metrics if ":" not in m and m not in METRICS]
            strange = [m for m in metrics if m.startswith(GATHERED) and m.count(":") != 2]
            problems += [("metrics", f"'{m}': it is gathered:module:function") for m in strange]
        if self.class_weights is not None and self.loss != "cross_entropy":
            fix = "in a loss of yours give (values, weights)" if ":" in str(self.loss) else "leave them out"
            problems.append(("class_weights", f"belong to loss: cross_entropy, the only one; {fix}"))
        if isinstance(self.loss, dict) and not all(name.isidentifier() for name in self.loss):
            problems.append(("loss", "give each loss the name of an output and of its labels"))
        outputs = {"": None} if isinstance(self.metrics, list) else dict(self.metrics or {})
        unknown = [name for name in outputs if name not in self.terms and not self.step]
        if unknown:
            problems.append(("metrics", f"{', '.join(unknown) or 'a list'}: give them by the outputs of loss"))
        problems += self._of_step()
        names = self.names
        problems += [("metrics", f"'{x}' is no name for the log: use def") for x in names if not x.isidentifier()]
        for name in dict.fromkeys(names):
            if names.count(name) > 1 or name in LOG_KEYS:
                problems.append(
                    ("metrics", f"'{name}' names two things in the log: leave one out or rename the function")
                )
        raise_problems(problems)
        return self

    def _of_step(self) -> list[tuple[str, str]]:
        """Return what is wrong with ``step`` and ``loss_weights``."""
        weights = self.loss_weights or {}
        if not self.step:
            known = [name for name in self.terms if name]
            unknown = [name for name in weights if name not in known]
            fix = f"task.loss has {', '.join(known)}" if known else "give several losses, by their outputs"
            return [("loss_weights", f"there is no loss {', '.join(unknown)}; {fix}")] if unknown else []
        problems = []
        if ":" not in self.step:
            problems.append(("step", f"'{self.step}' is no function: write package.module:function"))
        if self.loss != self.step:
            problems.append(("step", "it takes the place of loss; leave one of the two out"))
        if isinstance(self.metrics, dict):
            problems.append(("metrics", "a step has one list of metrics, of what it returns as outputs"))
        strange = [name for name in weights if not name.isidentifier() or name in ("loss", "outputs", "penalty")]
        if strange:
            problems.append(("loss_weights", f"'{strange[0]}' is no name for a loss: take another word"))
        return problems
