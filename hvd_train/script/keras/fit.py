"""``fit``, ``evaluate`` and ``predict`` of a user's Keras 3 model on one of several ranks."""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np

from hvd_train.core.agreement import agree, collectively
from hvd_train.errors import ConfigError, EndedRankError, LostRankError
from hvd_train.frontends.base import checksum
from hvd_train.protocol import Communicator
from hvd_train.script.keras import losses, metrics
from hvd_train.script.keras.callbacks import WRITERS, SyncCallback, callbacks_of, within_slot
from hvd_train.script.keras.data.arrays import ArrayParts, split
from hvd_train.script.keras.data.dataset import BatchOrderDigest
from hvd_train.script.keras.data.leaves import BATCH, BATCH_SIZE, kind_of
from hvd_train.script.keras.data.scoring import EvalShard, divide_scoring
from hvd_train.script.keras.data.training import check_local, divide_training, first_of, pass_seed
from hvd_train.script.keras.gradients import Reduction
from hvd_train.script.keras.local_training import LocalModel, statistics_of
from hvd_train.script.keras.logs import GlobalLogs
from hvd_train.script.keras.model_state import ModelState, to_numpy
from hvd_train.script.keras.patches import SAVING, Patches, optimizers_of, with_rates
from hvd_train.script.keras.predictions import gather_rows
from hvd_train.script.keras.rng import PIPELINE, Draws
from hvd_train.script.shared.record import recording
from hvd_train.script.shared.slow_rank import SlowRankReport
from hvd_train.script.shared.weight_check import WeightCheck

DIFFER_FIX = (
    "change weights and settings on all ranks alike: no callback may decide by the data of its rank, and no train_step "
    "may move weights by gradients of its rank (hk.reduce joins them)"
)
HAND_FIX = "a GradientTape gives gradients of this rank alone: pass them to optimizer.apply, or to hk.reduce first"
ORDER_FIX = (
    "look at the data set (next(iter(data))) and draw numbers on all ranks or on none; a new data set may be "
    "looked at anywhere"
)


class DistributedFit:
    """A model's ``fit``, ``evaluate`` and ``predict`` on this rank. Only the model's instance is patched."""

    def __init__(
        self,
        model: Any,
        world: Communicator,
        reduction: Reduction,
        patches: Patches,
        *,
        shard: bool,
        seed: int,
        every: int,
        slow: SlowRankReport,
    ) -> None:
        self.model, self.world, self.reduction, self.shard, self.seed = model, world, reduction, shard, seed
        self.optimizer, self.patches = optimizers_of(model)[0], patches
        self.draws, self.state = Draws(world), ModelState(model, world, reduction.ops)
        # Rank 0's names: Keras numbers layers across all models of a process, so ranks may have other names.
        paths = json.loads(world.broadcast_bytes(json.dumps([v.path for v in model.variables]).encode()))
        self._paths = {id(v): path for path, v in zip(paths, model.variables, strict=True)}
        self._probed = False  # whether the user's losses and metrics have been classified
        self._steps, self._slow = 0, slow
        self.local: LocalModel | None = None  # with local training only
        self.turns: Callable[[Any], Any] = lambda callbacks: callbacks  # wraps savers, if sharded
        self._alone: list[Any] = []  # callbacks of this call that run only on rank 0
        known = {id(x) for x in optimizers_of(model)}
        inner = [x for x in model._flatten_layers() if isinstance(x, keras.Model) and x is not model]
        names = [x.name for x in inner if id(getattr(x, "optimizer", None) or self) not in {*known, id(self)}]
        fix = f"make the optimizer of {', '.join(names)} an attribute of this model, if it is used; {DIFFER_FIX}"
        self._check_weights = WeightCheck(world, every, self._checksums, self._settings, fix if names else DIFFER_FIX)
        # Called only for optimizer.apply in a loop of the script: ``fit`` counts its steps by a callback.
        reduction.stepped = lambda steps: self._looped(steps, "optimizer.apply")
        reduction.gathers = lambda: not self.local and bool(statistics_of(model))
        Reduction.moved.clear()  # it would keep earlier models alive
        self._scoring: EvalShard | None = None  # set while evaluate runs
        self.gathering = False  # whether the metrics gather the sums of an epoch
        self._validation = EvalShard((None, None, None))
        self._order_digest: BatchOrderDigest | None = None  # of the tf.data.Dataset that fit reads
        self.dataset_steps = 0  # batches of it
        self._fit, self._evaluate, self._predict = model.fit, model.evaluate, model.predict
        self._logs = GlobalLogs(model, world)
        self._on_batch = model.train_on_batch
        for name in ("fit", "evaluate", "predict", "train_on_batch"):
            patches.put(model, name, getattr(self, name))
        slot = getattr(world, "slot", None)
        if slot and keras.backend.backend() == "tensorflow":  # its exchanges are in a graph
            patches.put(model, "make_train_function", within_slot(slot, model, model.make_train_function))
        patches.put(model, "_get_metrics_result_or_logs", self.logs)
        for name in SAVING:
            patches.put(model, name, _left_to_rank_0 if world.rank else self._saving(getattr(model, name)))

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        call = _bound(self._fit, args, kwargs)
        self._check("model.fit")
        self._begin("model.fit")
        batch, self._order_digest, self.dataset_steps = call["batch_size"], None, 0
        # Each rank divides its data alone; compare what must be equal before training.
        training, validation, facts = collectively(self.world, lambda: self._training(call))
        facts |= {"epochs": f"{call['initial_epoch']} to {call['epochs']}", "validation": str(validation is not None)}
        agree(self.world, facts)
        self.reduction.batch.assign(float(facts.get(BATCH_SIZE, BATCH)))
        # After the checks: a rejected call must not shift the order of the next one.
        self.patches.fits += 1
        passed = call["x"]
        call |= training
        self._probe(call)
        if validation is not None:
            parts = keras.utils.unpack_x_y_sample_weight(validation)
            batch = call["validation_batch_size"] or batch
            order_digest = BatchOrderDigest() if kind_of(parts[0]) == "dataset" else None
            self._validation = eval_shard = self._divided(
                parts, batch, call["validation_steps"], self._uncut(), order_digest
            )
            call["validation_data"] = keras.utils.pack_x_y_sample_weight(*eval_shard.data)
            call |= {"validation_batch_size": eval_shard.batch, "validation_steps": eval_shard.limit}
        callbacks = self.turns(call["callbacks"])
        call["callbacks"] = callbacks_of(callbacks, self.world.rank == 0, SyncCallback(self, call["x"]))
        self._alone = [x for x in call["callbacks"] if isinstance(x, WRITERS)] if self.world.size > 1 else []
        if isinstance(call["x"], ArrayParts):
            call["x"] = call["x"].as_keras(keras.backend.backend() == "tensorflow", call["class_weight"] is not None)
        call["verbose"] = call["verbose"] if self.world.rank == 0 else 0
        kept = PIPELINE if kind_of(passed) == "dataset" else ()
        if kept and self.model.run_eagerly and self.world.rank == 0:
            what = "with a tf.data.Dataset a step that runs eagerly draws the same numbers on all ranks"
            warnings.warn(f"{what} from random, numpy.random and tf.random; use keras.random there", stacklevel=3)
        # A tf.data pipeline draws the same on all ranks: its shuffle is cut into the ranks' parts.
        with warnings.catch_warnings(), self.draws.per_rank(self.patches.fits, kept):
            if self.shard and call["steps_per_epoch"] is None:
                # A tf.data.Dataset whose last batch may have fewer samples than ranks: no one can say how many steps.
                warnings.filterwarnings("ignore", message="Your input ran out of data")
            self.gathering = True
            try:
                history = self._fit(**call)
            finally:
                self._order_digest, self._alone, self.gathering = None, [], False
        self.compare("model.fit, its end")
        return history

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        # Keras sets it where ``fit`` validates: the data are divided already, and were checked there.
        if kwargs.get("_use_cached_eval_dataset", False):
            call, eval_shard = dict(kwargs), self._validation
        else:
            call = _bound(self._evaluate, args, kwargs)
            self._check("model.evaluate")
            self._begin("model.evaluate")
            self._probe(call)
            eval_shard = self._put_eval_shard("model.evaluate", call, self._uncut())
            call["callbacks"] = callbacks_of(call["callbacks"], self.world.rank == 0)
            call["verbose"] = call["verbose"] if self.world.rank == 0 else 0
        self._scoring = eval_shard
        # Undivided data (shard=False): all ranks score parts of one global batch at once.
        self.reduction.window.begin(eval_shard.window, 1 if self.shard else self.world.size)
        try:
            results = self._evaluate(**call)
            if self.gathering:
                self._logs.leave_to_rank_0()
            if eval_shard.order_digest is not None:
                self._same_order(eval_shard.order_digest.last(), "model.fit, validation_data")
            return results
        finally:
            self._scoring = None
            self.reduction.window.begin()

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        self._check("model.train_on_batch")
        if not self._probed:
            self._probe(_bound(self._on_batch, args, kwargs))
        if self.local:
            self.local.begin_step()
        results = self._on_batch(*args, **kwargs)
        self._looped(1, "model.train_on_batch")
        return results

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        call = _bound(self._predict, args, kwargs)
        self._begin("model.predict")
        part = self._put_eval_shard("model.predict", call, uncut=False).part
        # ``_put_eval_shard`` adds y and sample_weight, which predict does not take.
        call = {name: call[name] for name in inspect.signature(self._predict).parameters}
        call["callbacks"] = callbacks_of(call["callbacks"], self.world.rank == 0)
        call["verbose"] = call["verbose"] if self.world.rank == 0 else 0
        predictions = self._predict(**call)
        if not (part and self.shard):
            return predictions
        return keras.tree.map_structure(lambda rows: gather_rows(rows, self.world), predictions)

    def logs(self, logs: Any) -> Any:
        """Return metrics of all samples on all ranks, at the end of an epoch or an evaluation."""
        scoring = self._scoring
        if not scoring:
            self.end_pass()
            self.gathering = False
        whole = bool(scoring and not scoring.part)  # each rank scored everything, perhaps with other random numbers
        # If all ranks scored the same samples, only one counts, or sums would be N times too large.
        counts = self.world.rank == 0 if whole else not scoring or scoring.counts
        return self._logs.of_all_ranks(logs, counts, whole)

    def trained(self, steps: int, where: str) -> None:
        """Count ``steps`` more steps, and compare the ranks' weights when due."""
        before, self._steps = self._steps, self._steps + steps
        if self.local:
            self.local.stepped(steps)
        else:
            self._slow.stepped(steps)
        if self._check_weights.due(before, self._steps):
            self.compare(where)
        if record := recording():
            for _ in range(steps):
                record.step(float(to_numpy(with_rates([self.optimizer])[0].learning_rate)), self.world)

    def follow(self) -> None:
        """Compare weights also in a loop of the script that updates them without an optimizer."""
        if not self.local:
            # Steps in graphs are counted later.
            stepped = lambda: self._steps + int(to_numpy(self.reduction.steps)) > 0  # noqa: E731
            self._check_weights.follow(self.reduction.number, stepped, HAND_FIX)

    def _looped(self, steps: int, where: str) -> None:
        """Count steps of a loop of the script."""
        self.trained(steps, where)
        Reduction.moved[self.reduction.number] = self.end_pass, bool(self.local)

    def end_pass(self) -> None:
        """Synchronize weights or running statistics at the end of an epoch; on all ranks together."""
        if self.local:
            self.local.synchronize()
        else:
            self.average_statistics()

    def average_statistics(self) -> None:
        """Average running statistics; on all ranks together."""
        self.state.average_statistics()
        Reduction.left = False

    def begin_epoch(self) -> None:
        """Begin an epoch of local training with the weights that callbacks have left, the same on all ranks."""
        if self.local and not self.local.update.diverged:
            self.local.begin_round()

    def compare(self, where: str) -> None:
        """Raise the same error on all ranks if their weights, learning rates or orders of samples differ."""
        if self._order_digest is not None:
            self._same_order(self._order_digest.order(self.dataset_steps), where)
        self._check_weights.compare(where)

    def _checksums(self) -> dict[str, int]:
        sums: dict[str, int] = {}
        with self.local.global_weights() if self.local else nullcontext():
            # Two layers may have the same name, and so two weights the same path.
            for k, v in enumerate(self.model.trainable_variables):
                path = self._paths.get(id(v), v.path)
                sums[f"{path} (weight {k})" if path in sums else path] = checksum(keras.ops.convert_to_numpy(v))
        return sums

    def _settings(self) -> dict[str, str]:
        return {
            f"learning rate of {type(x).__name__}{f' {k}' * (k > 0)}": f"{float(to_numpy(x.learning_rate)):.9g}"
            for k, x in enumerate(with_rates(optimizers_of(self.model)))
        }

    def _same_order(self, digest: bytes, where: str) -> None:
        if len(set(self.world.allgather_bytes(digest, "order"))) > 1:
            what = "the tf.data.Dataset gives its samples in another order on each rank, some twice and some never"
            raise ConfigError(what, where=where, fix=ORDER_FIX, common=True)

    def begin(self) -> None:
        """Give all ranks the same state at the start of ``fit``."""
        if self._order_digest is not None:
            self._order_digest.begin()
        if self.local:
            self.local.begin_fit()
        self.state.take_from_rank_0()
        if self.local:
            self.local.restore()

    def stops(self, requested: bool) -> bool:
        """Return whether any rank requests a stop."""
        return any(part == b"1" for part in self.world.allgather_bytes(b"1" if requested else b"0"))

    def pause(self, evaluates: bool = False) -> None:
        """Exclude what follows, which is not a step, from the report of slow ranks."""
        if self._order_digest is not None:  # the last execution of several steps may have had fewer
            self.dataset_steps = min(self.dataset_steps, len(self._order_digest))
        self._slow.pause(evaluates)

    def evaluates(self) -> None:
        """Count what follows as evaluation."""
        self._slow.evaluates()

    def resume(self) -> None:
        """End what ``pause`` began."""
        self._slow.resume()

    def _begin(self, where: str) -> None:
        """Check that all ranks make the same call, before they exchange anything in it."""
        self._check_callback(where)
        self.pause(where != "model.fit")
        fix = "fit, evaluate and predict: call them on all ranks"
        try:
            agree(self.world, {"call": where}, "fit_evaluate_predict")
        except EndedRankError as error:
            raise EndedRankError(error.what, where=where, fix=fix) from error
        except LostRankError as error:
            raise LostRankError("another rank was lost or has ended", where=where, fix=fix) from error
        self.state.share_layer_states(where)

    def _check_callback(self, where: str) -> None:
        """Raise ConfigError if a callback that runs only on rank 0 calls a method that all ranks must call."""
        frame = sys._getframe(1) if self._alone else None
        while frame is not None:
            owner = frame.f_locals.get("self")
            if any(owner is callback for callback in self._alone):
                what = (
                    f"the callback {type(owner).__name__} writes files, so it acts on rank 0 alone, and calls {where}"
                )
                fix = "make the call in a keras.callbacks.Callback of its own, which acts on all ranks"
                raise ConfigError(what, where="model.fit", fix=fix)
            frame = frame.f_back

    def _saving(self, save: Callable) -> Callable:
        def saves(*args: Any, **kwargs: Any) -> Any:
            self.reduction.uses_statistics()
            return save(*args, **kwargs)

        return saves

    def _check(self, where: str) -> None:
        if self.model._loss_tracker is not self.patches.compiled:
            raise ConfigError(
                "the model was compiled again after hk.distribute, so this rank would train alone",
                where=where,
                fix="call hk.distribute(model) after each compile",
                common=True,
            )
        if self.model.compiled and self.model.jit_compile:
            self.model.jit_compile = False

    def _training(self, call: dict[str, Any]) -> tuple[dict[str, Any], Any, dict[str, str]]:
        """Return (replaced arguments of ``fit``, validation data, what must be equal on all ranks)."""
        x, y, weight = call["x"], call["y"], call["sample_weight"]
        validation, batch = call["validation_data"], call["batch_size"]
        # Keras' own limit for debugging, KERAS_MAX_STEPS_PER_EPOCH, applies too.
        limits = [n for n in (call["steps_per_epoch"], keras.config.max_steps_per_epoch()) if n]
        steps = min(limits, default=None)
        new: dict[str, Any] = {"shuffle": False, "validation_split": 0.0, "batch_size": None}
        if call["validation_split"] and validation is None:
            (x, y, weight), validation = split(x, y, weight, call["validation_split"])
        if self.shard:
            seed = pass_seed(self.seed, self.patches.fits) if call["shuffle"] else None
            self._order_digest = BatchOrderDigest() if kind_of(x) == "dataset" else None
            options: Any = dict(
                batch=batch, steps=steps, execution=self.model.steps_per_execution, order_digest=self._order_digest
            )
            local, facts = divide_training(x, y, weight, **options, seed=seed, draws=self.draws)
        else:
            local, facts = check_local(x, batch=batch, steps=steps, columns_=(x, y, weight), draws=self.draws)
            new |= {"shuffle": call["shuffle"], "batch_size": batch}
        return new | local, validation, facts

    def _probe(self, call: dict[str, Any]) -> None:
        """Classify the user's losses and metrics over samples, before the first training or evaluation."""
        if self._probed or kind_of(call["x"]) == "other":
            return
        if losses.needs_probe(self.model) or metrics.needs_probe(self.model):
            batch = first_of(call["x"], call["y"], call["sample_weight"])
            before = losses.opaque_kinds(self.model)
            if call.get("class_weight"):
                batch = _weighted(batch, call["class_weight"])
            found = losses.probe(self.model, batch, self.world, self._unprobed)
            if found is not None:
                metrics.probe(self.model, self.world, *found)
            kinds = losses.opaque_kinds(self.model)
            if kinds != before or "unknown" not in kinds:
                self.state.trace_again()  # test_on_batch may have traced the losses as means
            if "unknown" in kinds:  # the next call may show it
                return
        self._probed = True

    def _unprobed(self) -> None:
        self.reduction.unprobed = True

    def _uncut(self) -> bool:
        """Return whether evaluation must not divide a global batch."""
        self.reduction.window.whole = self.shard and (losses.uncut(self.model) or metrics.counts_batches(self.model))
        return self.reduction.window.whole

    def _divided(
        self,
        data: tuple[Any, Any, Any],
        batch: int | None,
        steps: int | None,
        uncut: bool,
        order_digest: BatchOrderDigest | None = None,
    ) -> EvalShard:
        if not self.shard:
            return EvalShard(data, batch=batch, limit=steps)
        states = [x.name for x in self.model._flatten_layers() if getattr(x, "stateful", False)]
        if states:
            what = f"{', '.join(states)}: stateful=True goes on from batch to batch, and each rank scores other batches"
            fix = "score on one rank, a copy of the model: keras.models.clone_model and set_weights"
            raise ConfigError(what, where="hvd_train.keras", fix=fix, common=True)
        execution = self.model.steps_per_execution
        options: Any = dict(batch=batch, steps=steps, uncut=uncut, execution=execution, order_digest=order_digest)
        shard = collectively(self.world, lambda: divide_scoring(*data, self.draws, **options))
        agree(self.world, shard.facts)
        return shard

    def _put_eval_shard(self, where: str, call: dict[str, Any], uncut: bool) -> EvalShard:
        """Put this rank's part of the data into the call."""
        data = (call["x"], call.get("y"), call.get("sample_weight"))
        shard = self._divided(data, call["batch_size"], call["steps"], uncut)
        self.average_statistics()  # those gathered in train_on_batch
        self.compare(where)
        call["x"], call["y"], call["sample_weight"] = shard.data
        call["batch_size"], call["steps"] = shard.batch, shard.limit
        return shard


def _weighted(batch: Any, class_weight: Mapping[int, float]) -> Any:
    """Return a batch with the weights that Keras makes of ``class_weight``: an own loss may not combine with them."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    labels = np.asarray(y)
    if weight is not None or labels.ndim not in (1, 2):
        return batch
    classes = labels.argmax(-1) if labels.ndim == 2 and labels.shape[1] > 1 else labels.reshape(-1)
    return x, y, np.array([class_weight.get(int(k), 1.0) for k in classes])


def _left_to_rank_0(*args: Any, **kwargs: Any) -> None:
    """Do nothing, as rank 0 writes. No rank waits for it: a script may save on rank 0 only."""


def _bound(method: Callable, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the call's arguments by name, with Keras' defaults. The user's class may override the method."""
    bound = inspect.signature(method).bind(*args, **kwargs)
    bound.apply_defaults()
    kinds = {name: parameter.kind for name, parameter in bound.signature.parameters.items()}
    call: dict[str, Any] = {}
    _, *known = inspect.signature(getattr(keras.Model, method.__name__)).parameters.values()
    for name, value in bound.arguments.items():
        if kinds[name] is inspect.Parameter.VAR_POSITIONAL:
            left = [each.name for each in known if each.name not in call]
            call |= dict(zip(left, value, strict=False))
        else:
            call |= value if kinds[name] is inspect.Parameter.VAR_KEYWORD else {name: value}
    defaults = {each.name: each.default for each in known if each.default is not inspect.Parameter.empty}
    return defaults | call
