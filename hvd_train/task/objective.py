"""One loss with its metrics: select the outputs and labels, and bring them into matching shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_train.config.keys.task import GATHERED
from hvd_train.errors import ConfigError
from hvd_train.metrics.metric import LabelForm, Metric, Predictions, weighted_sum
from hvd_train.metrics.table import METRICS, loss_function
from hvd_train.protocol import PARTNER, SHARE, Field, Ops, Sample, Tensor, one_or_all
from hvd_train.task.gathered import Gathered
from hvd_train.task.step import StepResult
from hvd_train.task.user_functions import UserFunction, UserLibraryMetric, UserMean, UserSums, for_each, user_metric


class Objective:
    """A loss and the metrics of one output; ``output`` "": of all outputs of the model."""

    def __init__(
        self,
        output: str,
        loss: str,
        metrics: Sequence[str],
        sample: Sample,
        ignore_index: int,
        ops: Ops,
        class_weights: Any = None,
    ) -> None:
        self.output, self.loss, self.ignore_index, self._ops = output, loss, ignore_index, ops
        self.label = output  # the label that the loss and the metrics get; "": all, or the only one
        self.prefix = output  # of its metrics' names
        by_user = ":" in loss
        where = f"task.loss: {loss}"
        if output and output not in sample.labels:
            fix = f"the data have {', '.join(sample.labels)}"
            raise ConfigError(f"there are no labels '{output}'", where=where, fix=fix)
        if not output and not by_user and len(sample.labels) != 1:
            fix = f"give a loss for each: {{{', '.join(f'{name}: {loss}' for name in sample.labels)}}}"
            raise ConfigError(f"one loss for the labels {', '.join(sample.labels)}", where=where, fix=fix)
        label = output or (next(iter(sample.labels)) if len(sample.labels) == 1 else "")
        self.field: Field | None = sample.labels[label] if label else None
        self.user_loss = UserFunction("task.loss", loss) if by_user else None
        # Some positions have no label, so W depends on the data.
        self.masked = loss == "cross_entropy" and bool(self.field and self.field.masked)
        # (C,): the weight of each class.
        self._class_weights = np.array(class_weights, np.float64) if class_weights is not None else None
        self.weighted_by_data = self.masked or class_weights is not None
        # With a user's loss: whether labels are classes, of which metrics leave out ignore_index.
        self._of_classes = False
        self._built_in = [name for name in metrics if ":" not in name]
        self._check_metrics()
        self._check_classes(self.field.classes or 0 if self.field and loss == "cross_entropy" else 0)
        form, logits = self._form_of_labels(), loss in ("cross_entropy", "bce")
        per_position = loss == "cross_entropy" and bool(self.field and (self.field.shape or self.field.masked))
        self.metrics: dict[str, Metric] = {
            name: user_metric(name, form, ops, logits, per_position) if ":" in name else self._built(name, form)
            for name in metrics
            if not name.startswith(GATHERED)
        }
        self.metrics |= {name: Gathered(name, form) for name in metrics if name.startswith(GATHERED)}

    def _built(self, name: str, form: LabelForm) -> Metric:
        row = METRICS[name]
        if row.metric_class.one_label_only and form.kind == "labels":
            fix = "leave it out, or take accuracy or recall_macro"
            raise ConfigError("it is for one label, not for several", where=f"task.metrics: {name}", fix=fix)
        return row.metric_class(form, self.masked or self._of_classes, **row.options)

    def _check_metrics(self) -> None:
        """Check that built-in metrics and a built-in loss use the same kind of labels."""
        if self.user_loss:
            return
        of_loss, other = ("classes", "numbers") if self.loss == "cross_entropy" else ("numbers", "classes")
        for name in self._built_in:
            if METRICS[name].labels == other:
                fix = f"leave it out: it is for {other}, and the loss {self.loss} is for {of_loss}"
                raise ConfigError("the metric does not fit the loss", where=f"task.metrics: {name}", fix=fix)

    def _check_classes(self, count: int) -> None:
        """Refuse a binary metric for more than two classes."""
        for name in self._built_in:
            if count > 2 and METRICS[name].metric_class.two_classes_only:
                fix = "leave it out, or give a metric of your own"
                raise ConfigError(f"it is for two classes, not {count}", where=f"task.metrics: {name}", fix=fix)

    def _form_of_labels(self) -> LabelForm:
        """Derive the form of the labels from the data; with a user's loss ``probe`` derives it from outputs, too."""
        if self.loss == "cross_entropy" and self.field:
            return LabelForm("classes", self.field.classes or 1)
        return LabelForm.of_shapes((), self.field.shape if self.field else ())

    def select(self, tensors: Any) -> Any:
        """Select the outputs or labels of this objective; for mixed samples, the class with the larger share."""
        if isinstance(tensors, Mapping) and PARTNER in tensors:
            if self.user_loss and self.weighted_by_data:
                what = "the loss returns weights, but mixed samples have two labels"
                fix = "return values alone, or leave mixup and cutmix out of data.transforms; for rare classes there is"
                raise ConfigError(
                    what, where=f"task.loss: {self.loss}", fix=f"{fix} data.sampling: balanced", common=True
                )
            tensors = {name: x for name, x in tensors.items() if name not in (PARTNER, SHARE)}
        if not self.output:
            if isinstance(tensors, Mapping) and len(tensors) > 1 and not self.user_loss:
                fix = f"give a loss for each: {{{', '.join(f'{name}: {self.loss}' for name in tensors)}}}"
                what = f"the model gives {', '.join(tensors)}"
                raise ConfigError(what, where=f"task.loss: {self.loss}", fix=fix)
            return one_or_all(tensors) if isinstance(tensors, Mapping) else tensors
        if not isinstance(tensors, Mapping) or self.output not in tensors:
            has = f"gives {', '.join(tensors)}" if isinstance(tensors, Mapping) else "gives one output"
            what = f"the model {has}, and task.loss names '{self.output}'"
            raise ConfigError(what, where="model.name", fix="return a dict with a name for each loss")
        return tensors[self.output]

    def probe(self, outputs: Any, labels: Any, weights: Tensor) -> None:
        """Call the user's functions on made-up samples to find the shapes of their results."""
        raw = self.select(outputs), self.select(labels)
        y = raw[1]
        if self.user_loss:
            self.weighted_by_data = self._probe_loss(outputs, labels, weights)
            if not any(x is None or isinstance(x, Mapping) for x in raw):
                y = self._without_column(*raw)
                # Fractions may be numbers beside several outputs for each, such as quantiles.
                self._of_classes = fits(tuple(raw[0].shape), tuple(y.shape), 2) and "int" in str(self._ops.dtype(y))
            if self._built_in:
                z, y = self._for_built_in_metrics(*raw)
                self._of_classes = len(z.shape) > len(y.shape)
                form = LabelForm.of_shapes(tuple(z.shape)[1:], tuple(y.shape)[1:])
                self.metrics |= {name: self._built(name, form) for name in self._built_in}
        known = self.masked or self._of_classes
        present = self._ops.cast(y == y, self._ops.dtype(weights)) if known else None
        predictions = Predictions(*raw, weights, present, raw, self._ops)
        for metric in self.metrics.values():
            if isinstance(metric, UserLibraryMetric) and self._of_classes:
                metric.per_position = True
            if isinstance(metric, UserMean | UserSums | UserLibraryMetric):
                metric.probe(predictions)

    def _probe_loss(self, outputs: Any, labels: Any, weights: Tensor) -> bool:
        """Try the user's loss; return whether it gives weights."""
        assert self.user_loss
        return self.user_loss.probe(self.select(outputs), self.select(labels), weights, self._ops)

    def losses(self, outputs: Any, labels: Any, weights: Tensor) -> tuple[tuple[Tensor, ...], Predictions]:
        """Return the sums of the loss, (S,) or (S, W), and the predictions for the metrics."""
        raw = self.select(outputs), self.select(labels)
        if self.user_loss:
            values, position_weights = self.user_loss.checked_values(*raw, weights, self.weighted_by_data)
            z, y, present = self._beside_user_loss(*raw, weights)
        else:
            z, y, present = self._for_built_in_loss(*raw)
            position_weights = self._weights_of(y, present)
            # Positions without a label are skipped, to save time.
            if present is None:
                values = loss_function(self.loss)(z, y, self._ops)
            else:
                values = self._ops.cross_entropy(z, y, present)
        if PARTNER in labels:
            values = self._mixed(values, raw[0], labels, weights)
        sums = weighted_sum(values, position_weights, weights, self._ops, by_user=self.user_loss is not None)
        # Metrics need no gradients.
        z, raw_outputs = for_each(self._ops.stop_gradient, z), for_each(self._ops.stop_gradient, raw[0])
        return sums, Predictions(z, y, weights, present, (raw_outputs, raw[1]), self._ops)

    def _beside_user_loss(self, outputs: Any, labels: Any, weights: Tensor) -> tuple[Any, Any, Tensor | None]:
        """Return outputs and labels for built-in metrics, and the mask of labels that are present."""
        z, y = self._for_built_in_metrics(outputs, labels)
        if not self._of_classes:
            return z, y, None
        return z, *self._counted(self._class_numbers(self._without_column(z, y)), weights)

    def _mixed(self, values: Tensor, outputs: Any, labels: Mapping[str, Tensor], weights: Tensor) -> Tensor:
        """Return the losses of mixed samples, weighted by the shares of both classes (Zhang et al. 2018).

        ``values``: the losses for the class with the larger share.
        """
        ops, partner = self._ops, labels[PARTNER]
        if self.user_loss:
            others, _ = self.user_loss.checked_values(outputs, partner, weights, self.weighted_by_data)
        else:
            z, y, _ = self._for_built_in_loss(outputs, partner)
            others = loss_function(self.loss)(z, y, ops)
        share = ops.cast(ops.reshape(labels[SHARE], (-1, *[1] * (len(values.shape) - 1))), ops.dtype(values))
        return share * values + (1 - share) * others

    def position_weights(self, labels: Any, weights: Tensor, zeros: Any) -> Tensor | None:
        """Return the weight of each label, without running the model; None: all weights are 1.

        ``zeros``: makes outputs of zeros in the model's shapes, for a user's loss that returns weights.
        """
        y = self.select(labels)
        if self.masked or self._class_weights is not None:
            present = self._ops.cast(y != self.ignore_index, self._ops.dtype(weights)) if self.masked else None
            return self._weights_of(self._ops.where(y == self.ignore_index, 0, y) if self.masked else y, present)
        if self.user_loss and self.weighted_by_data:
            return self.user_loss.checked_values(self.select(zeros()), y, weights, True)[1]
        return None

    def _weights_of(self, y: Tensor, present: Tensor | None) -> Tensor | None:
        """Return the weight of each label (n, ...), or None if all are 1. ``present`` (n, ...): 0 for no label."""
        if self._class_weights is None:
            return present
        ops = self._ops
        table = ops.from_numpy(self._class_weights)
        # While a graph is traced, the first axis or the length of samples may be unknown.
        rows, *others = tuple(y.shape)
        shape = tuple(-1 if k is None else int(k) for k in (rows if None in others else None, *others))
        of_class = ops.reshape(ops.take(table, ops.reshape(ops.cast(y, "int64"), (-1,))), shape)
        return of_class if present is None else of_class * ops.cast(present, "float64")

    # ---- shapes

    def _for_built_in_loss(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return outputs and labels in matching shapes, and the mask of labels that are present, if some are not."""
        y, present = self._counted(y, z) if self.masked else (y, None)
        if self.loss == "cross_entropy":
            classes = (self.field.classes if self.field else None) or 1
            if not fits(tuple(z.shape), tuple(y.shape), classes):
                raise unfit(tuple(z.shape), tuple(y.shape), classes)
            return z, y, present
        return *self._numbers(f"task.loss: {self.loss}", z, y), None

    def _class_numbers(self, y: Tensor) -> Tensor:
        """Convert labels of any dtype to class numbers int64 for built-in metrics; fractions become -1."""
        numbers = self._ops.cast(y, "int64")
        return self._ops.where(self._ops.cast(numbers, self._ops.dtype(y)) == y, numbers, -1)

    def _counted(self, y: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Replace ``ignore_index`` by class 0; also return the mask of present labels, in the dtype of ``like``."""
        present = self._ops.cast(y != self.ignore_index, self._ops.dtype(like))
        # Any class would do, because its weight is 0.
        return self._ops.where(y == self.ignore_index, 0, y), present

    def _for_built_in_metrics(self, z: Any, y: Any) -> tuple[Any, Any]:
        """Return outputs and labels in shapes for built-in metrics; a user's loss may use any shapes."""
        for name in self._built_in:
            where = f"task.metrics: {name}"
            if isinstance(z, Mapping) or isinstance(y, Mapping):
                fix = "give a loss for each output, or a metric of your own"
                raise ConfigError("the loss takes several outputs or labels together", where=where, fix=fix)
            y = self._without_column(z, y)
            has_classes = z.shape[-1] > 1 and len(z.shape) == len(y.shape) + 1
            if has_classes and not fits(tuple(z.shape), tuple(y.shape), 0):
                what = f"the model gives outputs of shape {tuple(z.shape)} for labels of shape {tuple(y.shape)}"
                fix = "return the classes in the last axis, or a number for each label; or give a metric of your own"
                raise ConfigError(what, where=where, fix=fix)
            self._check_classes(z.shape[-1] if has_classes else 0)
            takes = METRICS[name].labels
            if takes == "classes" and not has_classes:
                raise unfit(tuple(z.shape), tuple(y.shape), 2)
            if takes == "numbers" or not has_classes:
                z, y = self._numbers(where, z, y)
        return z, y

    def _numbers(self, where: str, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and labels in the same shape (n, ...) and in the dtype of the outputs."""
        y = self._without_column(z, y)
        if len(z.shape) == len(y.shape) + 1 and z.shape[-1] == 1:
            # The first axis may be unknown while a graph is traced.
            z = self._ops.reshape(z, (-1, *(int(k) for k in tuple(y.shape)[1:])))
        if tuple(z.shape)[1:] != tuple(y.shape)[1:]:
            what = f"the model gives outputs of shape {tuple(z.shape)} for labels of shape {tuple(y.shape)}"
            fix = "the model must return one number for each number of the labels"
            fix += "; data.images: true if the labels are images" * (len(y.shape) == 4)
            if len(y.shape) == 2 and z.shape[-1] == 1:
                fix += f", as model.name: mlp does with model.outputs: {y.shape[1]}"
            raise ConfigError(what, where=where, fix=fix)
        return z, self._ops.cast(y, self._ops.dtype(z))

    def _without_column(self, z: Tensor, y: Tensor) -> Tensor:
        """Reshape labels (n, 1) to (n,) if the outputs are (n,) or (n, C)."""
        column = len(y.shape) == 2 and y.shape[-1] == 1 and tuple(z.shape)[1:] != (1,)
        return self._ops.reshape(y, (-1,)) if column else y


class StepObjective(Objective):
    """A loss that the user's step returns; the first one has the metrics, of what the step returns as outputs."""

    def __init__(self, name: str, loss: str, metrics: Sequence[str], sample: Sample, *more: Any) -> None:
        super().__init__("", loss, metrics, sample, *more)
        self.output = name
        self.user_loss = UserFunction("task.step", loss, self._returned)

    def _returned(self, result: StepResult, labels: Any) -> Any:
        values, position_weights = result.losses[self.output]
        return values if position_weights is None else (values, position_weights)

    def select(self, tensors: Any) -> Any:
        if not isinstance(tensors, StepResult):
            return one_or_all(tensors)
        if tensors.outputs is None and self.metrics:
            what = "the step returns no outputs to compute metrics of"
            raise ConfigError(what, where="task.metrics", fix="return {'loss': ..., 'outputs': ...}")
        return tensors.outputs

    def _probe_loss(self, outputs: Any, labels: Any, weights: Tensor) -> bool:
        assert self.user_loss
        return self.user_loss.checked_values(outputs, labels, weights)[1] is not None

    def losses(self, outputs: Any, labels: Any, weights: Tensor) -> tuple[tuple[Tensor, ...], Predictions]:
        assert self.user_loss
        values, position_weights = self.user_loss.checked_values(outputs, labels, weights, self.weighted_by_data)
        sums = weighted_sum(values, position_weights, weights, self._ops, by_user=True)
        if not self.metrics:
            return sums, Predictions(None, None, weights, None, (None, None), self._ops)
        raw = for_each(self._ops.stop_gradient, self.select(outputs)), self.select(labels)
        z, y, present = self._beside_user_loss(*raw, weights)
        return sums, Predictions(z, y, weights, present, raw, self._ops)


def fits(logits: Sequence[int | None], labels: Sequence[int | None], num_classes: int) -> bool:
    """Return whether logits are (n, ..., C) with C >= ``num_classes``, for labels (n, ...)."""
    pairs = zip(logits[:-1], labels, strict=False)
    same = len(logits) == len(labels) + 1 and all(a is None or b is None or a == b for a, b in pairs)
    return same and (logits[-1] is None or logits[-1] >= num_classes)


def unfit(logits: Sequence[int | None], labels: Sequence[int | None], num_classes: int) -> ConfigError:
    """Make the error for logits that are not (n, ..., classes) for labels (n, ...)."""
    wanted = ", ".join(str(size) for size in (*labels, "num_classes"))
    first = len(labels) > 1 and (logits[0], *logits[2:]) == (*labels,)  # as PyTorch's losses take them
    turn = ": in forward, outputs.movedim(1, -1) puts the classes last" * first
    return ConfigError(
        f"the model gives logits of shape {tuple(logits)} for labels of shape {tuple(labels)} in {num_classes} classes",
        where="model.name, data.name",
        fix=f"choose a model that gives ({wanted}), a number for each class before any softmax or sigmoid{turn}",
    )
