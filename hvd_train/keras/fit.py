"""``fit``, ``evaluate`` and ``predict`` of a user's own Keras 3 model as one rank of a world."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvd_train.core.agreement import agree, agree_on_weights, collectively, due
from hvd_train.core.mean import differing, mean, ordered_sum
from hvd_train.data.order import mix
from hvd_train.errors import ConfigError, EndedRankError, LostRankError
from hvd_train.frontends.base import checksum
from hvd_train.keras import losses, metrics
from hvd_train.keras.data.arrays import ArrayParts, split
from hvd_train.keras.data.dataset import BatchOrderDigest
from hvd_train.keras.data.epochs import Epochs
from hvd_train.keras.data.leaves import BATCH, BATCH_SIZE, kind_of
from hvd_train.keras.data.scoring import EvalShard, divide_scoring
from hvd_train.keras.data.training import check_local, divide_training, first_of, pass_seed
from hvd_train.keras.gradients import Changes, Reduction, optimizers_of, with_rates
from hvd_train.keras.layers import States
from hvd_train.protocol import Communicator
from hvd_train.script.record import recording
from hvd_train.script.rng import PIPELINE, Draws
from hvd_train.script.slow_rank import SlowRankReport

WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
    *filter(None, [getattr(keras.callbacks, "OrbaxCheckpoint", None)]),  # since Keras 3.12
)
APART_FIX = "change weights and settings on all ranks alike: no callback may go by what this rank alone has seen"
ORDER_FIX = (
    "look at the data set (next(iter(data))) and draw numbers on all ranks or on none; a data set made anew may be "
    "looked at anywhere"
)
SAVING = ("save", "save_weights", "export")
SEED = "seed_generator_state"


class Rank:
    """A model's ``fit``, ``evaluate`` and ``predict`` on this rank. The model's instance is changed, not its class."""

    def __init__(
        self,
        model: Any,
        world: Communicator,
        reduction: Reduction,
        changes: Changes,
        *,
        shard: bool,
        seed: int,
        every: int,
        slow: SlowRankReport,
    ) -> None:
        self.model, self.world, self.reduction, self.shard, self.seed = model, world, reduction, shard, seed
        self.optimizer, self.changes = optimizers_of(model)[0], changes
        self.draws, self._states = Draws(world), States(model, world)
        self._probed = False  # losses of the user's own
        self._every, self._steps, self._slow = every, 0, slow
        reduction.stepped = lambda steps: self._looped(steps, "optimizer.apply")
        Reduction.moved.clear()  # models of before would live on in it
        self._scoring: EvalShard | None = None  # what is scored while evaluate runs
        self._validation = EvalShard((None, None, None))
        self._order_digest: BatchOrderDigest | None = None  # of the tf.data.Dataset that fit goes through
        self.taken = 0  # batches of it
        self._fit, self._evaluate, self._predict = model.fit, model.evaluate, model.predict
        self._logs = model._get_metrics_result_or_logs
        self._on_batch = model.train_on_batch
        for name in ("fit", "evaluate", "predict", "train_on_batch"):
            changes.put(model, name, getattr(self, name))
        slot = getattr(world, "slot", None)
        if slot and keras.backend.backend() == "tensorflow":  # whose exchanges are within a graph
            changes.put(model, "make_train_function", _entering(slot, model, model.make_train_function))
        changes.put(model, "_get_metrics_result_or_logs", self.logs)
        for name in SAVING if world.rank else ():
            changes.put(model, name, _left_to_rank_0)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        call = _bound(self._fit, args, kwargs)
        self._check("model.fit")
        self._begin("model.fit")
        batch, self._order_digest, self.taken = call["batch_size"], None, 0
        training, validation, facts = collectively(self.world, lambda: self._training(call))
        facts |= {"epochs": f"{call['initial_epoch']} to {call['epochs']}", "validation": str(validation is not None)}
        agree(self.world, facts)
        self.reduction.batch.assign(float(facts.get(BATCH_SIZE, BATCH)))
        self.changes.fits += 1
        passed = call["x"]
        call |= training
        self._probe(call)
        if validation is not None:
            given = keras.utils.unpack_x_y_sample_weight(validation)
            batch = call["validation_batch_size"] or batch
            order_digest = BatchOrderDigest() if kind_of(given[0]) == "dataset" else None
            self._validation = scored = self._divided(
                given, batch, call["validation_steps"], self._uncut(), order_digest
            )
            call["validation_data"] = keras.utils.pack_x_y_sample_weight(*scored.data)
            call |= {"validation_batch_size": scored.batch, "validation_steps": scored.limit}
        call["callbacks"] = self._callbacks(call["callbacks"], _Alike(self, call["x"]))
        if isinstance(call["x"], ArrayParts):
            call["x"] = call["x"].as_keras(keras.backend.backend() == "tensorflow", call["class_weight"] is not None)
        call["verbose"] = call["verbose"] if self.world.rank == 0 else 0
        kept = PIPELINE if kind_of(passed) == "dataset" else ()
        if kept and self.model.run_eagerly and self.world.rank == 0:
            what = "over a tf.data.Dataset a step that runs eagerly draws the same on all ranks"
            warnings.warn(f"{what} from random, numpy.random and tf.random; use keras.random there", stacklevel=3)
        with warnings.catch_warnings(), self.draws.own(self.changes.fits, kept):
            if self.shard and call["steps_per_epoch"] is None:
                # A tf.data.Dataset whose last batch may have fewer samples than ranks: no one can say how many steps.
                warnings.filterwarnings("ignore", message="Your input ran out of data")
            try:
                found = self._fit(**call)
            finally:
                self._order_digest = None
        self.compare("model.fit, its end")
        return found

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("_use_cached_eval_dataset", False):
            call, scored = dict(kwargs), self._validation
        else:
            call = _bound(self._evaluate, args, kwargs)
            self._check("model.evaluate")
            self._begin("model.evaluate")
            self._probe(call)
            scored = self._scored("model.evaluate", call, self._uncut())
            call["callbacks"] = self._callbacks(call["callbacks"])
            call["verbose"] = call["verbose"] if self.world.rank == 0 else 0
        self._scoring = scored
        self.reduction.begin_scoring(scored.window, 1 if self.shard else self.world.size)
        try:
            found = self._evaluate(**call)
            if scored.order_digest is not None:
                self._same_order(scored.order_digest.last(), "model.fit, validation_data")
            return found
        finally:
            self._scoring = None
            self.reduction.begin_scoring()

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        self._check("model.train_on_batch")
        if not self._probed:
            self._probe(_bound(self._on_batch, args, kwargs))
        found = self._on_batch(*args, **kwargs)
        self._looped(1, "model.train_on_batch")
        return found

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        call = _bound(self._predict, args, kwargs)
        self._begin("model.predict")
        part = self._scored("model.predict", call, uncut=False).part
        call = {name: call[name] for name in inspect.signature(self._predict).parameters}
        call["callbacks"] = self._callbacks(call["callbacks"])
        call["verbose"] = call["verbose"] if self.world.rank == 0 else 0
        found = self._predict(**call)
        return keras.tree.map_structure(self._gather, found) if part and self.shard else found

    def logs(self, logs: Any) -> Any:
        """At the end of an epoch or an evaluation: metrics of all samples on all ranks.

        Metrics' variables are sums over samples (and counts), so they are added; what a step of the user's own gives
        besides its metrics' results is averaged over ranks.
        """
        own = self._logs(logs) is logs and isinstance(logs, dict)
        results = self._results() if own else {}
        alone = {k: _numbers(x) for k, x in results.items() if k in logs}  # of this rank's samples
        if not self._scoring:
            self._average_statistics()
        whole = bool(self._scoring and not self._scoring.part)  # on each rank, which may draw samples of its own
        variables = [v for metric in self.model.metrics for v in metric.variables]
        counts = self.world.rank == 0 if whole else not self._scoring or self._scoring.counts
        mine = [_numpy(v) if counts else np.zeros_like(_numpy(v)) for v in variables]
        for v, total in zip(variables, self._sum(mine), strict=True):
            v.assign(total)
        found = self._logs(logs)
        if found is not logs:
            return found
        values = [np.asarray(_numpy(x), np.float64) * (counts or not whole) for x in keras.tree.flatten(logs)]
        several = 1 if whole else self.world.size
        means = keras.tree.pack_sequence_as(logs, [(x / several).tolist() for x in self._sum(values)])
        # Under a metric's name a step may give something else.
        same = self._sum([np.array(_alike(_numbers(logs[k]), x), np.float64) for k, x in alone.items()])
        results = self._results()
        return means | {k: results[k] for k, ranks in zip(alone, same, strict=True) if ranks == self.world.size}

    def _results(self) -> dict[str, Any]:
        """Of the metrics, by their own names, as a step of Keras' guide gives them, and as Keras' own step does."""
        return {metric.name: metric.result() for metric in self.model.metrics} | self.model.get_metrics_result()

    def align(self) -> None:
        """Gives every rank what rank 0 has: weights, statistics, the optimizer's slots, the epoch to begin with.

        Generators of random numbers start from rank 0's seed plus the rank: masks differ, and repeat from run to run.
        """
        slots = [v for optimizer in optimizers_of(self.model) for v in optimizer.variables]
        variables = {id(v): v for v in [*self.model.variables, *slots, *_buffers(self.model)]}.values()
        arrays = [_numpy(v) for v in variables]
        header = json.dumps({"epoch": self.model._initial_epoch}).encode()
        sent = self.world.broadcast_bytes(b"".join([header, b"\n", *(np.ascontiguousarray(a).data for a in arrays)]))
        at = sent.index(b"\n") + 1
        self.model._initial_epoch = json.loads(sent[:at])["epoch"]
        for v, own in zip(variables, arrays, strict=True):
            array = np.frombuffer(sent, own.dtype, own.size, at).reshape(own.shape).copy()
            at += own.nbytes
            if v.path.endswith(SEED):
                apart = (int(array[0]) + self.world.rank * 0x9E3779B9) % (1 << 32)
                array[0] = np.uint32(apart).astype(array.dtype)  # int32 on PyTorch
            v.assign(array)
        self._states.finalize()

    def share_states(self, where: str) -> None:
        """Gives all ranks rank 0's vocabularies and adapted statistics."""
        if self._states.share(where) and self.model.compiled:
            self.trace_again()

    def trace_again(self) -> None:
        """Graphs that were traced before hold what the model was then."""
        self.model.make_train_function(force=True)
        self.model.test_function = self.model.predict_function = None  # which Keras makes when it is asked

    def trained(self, steps: int, where: str) -> None:
        """After ``steps`` more steps; now and then the ranks compare their weights."""
        before, self._steps = self._steps, self._steps + steps
        self._slow.stepped(steps)
        if any(due(step, self._every) for step in range(before + 1, self._steps + 1)):
            self.compare(where)
        if record := recording():
            for _ in range(steps):
                record.step(float(_numpy(with_rates([self.optimizer])[0].learning_rate)), self.world)

    def _looped(self, steps: int, where: str) -> None:
        """After steps of a loop of the user's own."""
        self.trained(steps, where)
        Reduction.moved[self.reduction.number] = self._average_statistics

    def compare(self, where: str) -> None:
        """Raises the same error on all ranks where their weights, learning rates or orders of samples differ."""
        if self._order_digest is not None:
            self._same_order(self._order_digest.order(self.taken), where)
        if not self._every:
            return
        weights = self.model.trainable_variables
        sums: dict[str, int] = {}
        for k, v in enumerate(weights):
            sums[f"{v.path} (weight {k})" if v.path in sums else v.path] = checksum(keras.ops.convert_to_numpy(v))
        settings = {
            f"learning rate of {type(x).__name__}{f' {k}' * (k > 0)}": f"{float(_numpy(x.learning_rate)):.9g}"
            for k, x in enumerate(with_rates(optimizers_of(self.model)))
        }
        agree_on_weights(self.world, sums, where, settings=settings, fix=APART_FIX)

    def _same_order(self, own: bytes, where: str) -> None:
        if len(set(self.world.allgather_bytes(own, "order"))) > 1:
            what = "the tf.data.Dataset gives its samples in another order on each rank, some twice and some never"
            raise ConfigError(what, where=where, fix=ORDER_FIX, common=True)

    def begin(self) -> None:
        """The epochs begin."""
        if self._order_digest is not None:
            self._order_digest.begin()
        self.align()

    def stops(self, own: bool) -> bool:
        """Whether any rank wants to stop."""
        return any(part == b"1" for part in self.world.allgather_bytes(b"1" if own else b"0"))

    def pause(self) -> None:
        """What follows is no step."""
        if self._order_digest is not None:  # the last execution of several steps may have had fewer
            self.taken = min(self.taken, len(self._order_digest))
        self._slow.pause()

    def _begin(self, where: str) -> None:
        """All ranks make the same call: what one of them asks for here, another might give for something else."""
        self.pause()
        fix = "fit, evaluate and predict: call them on all ranks"
        try:
            agree(self.world, {"call": where}, "fit_evaluate_predict")
        except EndedRankError as error:
            raise EndedRankError(error.what, where=where, fix=fix) from error
        except LostRankError as error:
            raise LostRankError("another rank was lost or has ended", where=where, fix=fix) from error
        self.share_states(where)

    def _check(self, where: str) -> None:
        if self.model._loss_tracker is not self.changes.compiled:
            raise ConfigError(
                "the model was compiled again after hk.distribute, so this rank would train alone",
                where=where,
                fix="call hk.distribute(model) after each compile",
                common=True,
            )
        if self.model.compiled and self.model.jit_compile:
            self.model.jit_compile = False

    def _training(self, call: dict[str, Any]) -> tuple[dict[str, Any], Any, dict[str, str]]:
        """(what ``fit`` gets instead, data to validate on, what all ranks must have alike)."""
        x, y, weight = call["x"], call["y"], call["sample_weight"]
        validation, batch = call["validation_data"], call["batch_size"]
        limits = [n for n in (call["steps_per_epoch"], keras.config.max_steps_per_epoch()) if n]
        steps = min(limits, default=None)
        new: dict[str, Any] = {"shuffle": False, "validation_split": 0.0, "batch_size": None}
        if call["validation_split"] and validation is None:
            (x, y, weight), validation = split(x, y, weight, call["validation_split"])
        if self.shard:
            seed = pass_seed(self.seed, self.changes.fits) if call["shuffle"] else None
            self._order_digest = BatchOrderDigest() if kind_of(x) == "dataset" else None
            given: Any = dict(
                batch=batch, steps=steps, execution=self.model.steps_per_execution, order_digest=self._order_digest
            )
            mine, facts = divide_training(x, y, weight, **given, seed=seed, draws=self.draws)
        else:
            mine, facts = check_local(x, batch=batch, steps=steps, columns_=(x, y, weight), draws=self.draws)
            new |= {"shuffle": call["shuffle"], "batch_size": batch}
        return new | mine, validation, facts

    def _probe(self, call: dict[str, Any]) -> None:
        """Before the first evaluation or training: what losses of the user's own are."""
        if self._probed or kind_of(call["x"]) == "other":
            return
        if losses.needs_probe(self.model) or metrics.functions(self.model):
            batch = first_of(call["x"], call["y"], call["sample_weight"])
            metrics.probe(self.model, self.world, *losses.probe(self.model, batch, self.world))
            self.trace_again()  # test_on_batch may have traced the losses as means
        self._probed = True

    def _uncut(self) -> bool:
        """Whether evaluation is to divide the data by global batches."""
        self.reduction.uncut = self.shard and (losses.uncut(self.model) or metrics.counts_batches(self.model))
        return self.reduction.uncut

    def _divided(
        self,
        given: tuple[Any, Any, Any],
        batch: int | None,
        steps: int | None,
        uncut: bool,
        order_digest: BatchOrderDigest | None = None,
    ) -> EvalShard:
        if not self.shard:
            return EvalShard(given, batch=batch, limit=steps)
        states = [x.name for x in self.model._flatten_layers() if getattr(x, "stateful", False)]
        if states:
            what = f"{', '.join(states)}: stateful=True goes on from batch to batch, and each rank scores other batches"
            fix = "score on one rank, a copy of the model: keras.models.clone_model and set_weights"
            raise ConfigError(what, where="hvd_train.keras", fix=fix, common=True)
        execution = self.model.steps_per_execution
        options: Any = dict(batch=batch, steps=steps, uncut=uncut, execution=execution, order_digest=order_digest)
        found = collectively(self.world, lambda: divide_scoring(*given, self.world, **options))
        agree(self.world, found.facts)
        return found

    def _scored(self, where: str, call: dict[str, Any], uncut: bool) -> EvalShard:
        """Puts what this rank is to score into the call."""
        given = (call["x"], call.get("y"), call.get("sample_weight"))
        found = self._divided(given, call["batch_size"], call["steps"], uncut)
        self._average_statistics()  # of what train_on_batch has gathered
        self.compare(where)
        call["x"], call["y"], call["sample_weight"] = found.data
        call["batch_size"], call["steps"] = found.batch, found.limit
        return found

    def _callbacks(self, given: Any, last: Any = None) -> Any:
        """The user's, less the ones that write files or the screen on ranks other than 0."""
        if isinstance(given, keras.callbacks.CallbackList):
            given = given.callbacks
        chosen = [c for c in keras.tree.flatten(given or []) if self.world.rank == 0 or not isinstance(c, WRITERS)]
        return [*chosen, last] if last else chosen

    def _average_statistics(self) -> None:
        """Running means and variances are what each rank gathers from its own samples."""
        gathered = [*self.model.non_trainable_variables, *_buffers(self.model)]
        own = {str(k): v for k, v in enumerate(gathered) if not v.path.endswith(SEED)}
        arrays = ((name, keras.ops.convert_to_numpy(v)) for name, v in own.items() if "float" in v.dtype)
        apart = {name: _numpy(own[name]) for name in differing(arrays, self.world)}
        for name, value in mean(apart, self.world, self.reduction.ops).items():
            own[name].assign(value)

    def _sum(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Sums over ranks, in float64 and rank order."""
        if not arrays:
            return []
        flat = np.concatenate([np.asarray(a, np.float64).ravel() for a in arrays])
        pieces = np.split(ordered_sum(flat, self.world), np.cumsum([a.size for a in arrays])[:-1])
        return [piece.reshape(a.shape).astype(a.dtype) for piece, a in zip(pieces, arrays, strict=True)]

    def _gather(self, own: np.ndarray) -> np.ndarray:
        """The ranks' rows, one rank's after the other's. Raises on all ranks where they are not of one shape."""
        texts = own.dtype.hasobject
        own = np.ascontiguousarray(own.astype("S") if texts else own)
        head = json.dumps([list(own.shape), own.dtype.itemsize]).encode()
        found = []
        for part in self.world.allgather_bytes(head + b"\n" + own.tobytes()):
            at = part.index(b"\n") + 1
            shape, width = json.loads(part[:at])
            found.append(np.frombuffer(part, f"S{width}" if texts else own.dtype, offset=at).reshape(shape))
        if len(shapes := {x.shape[1:] for x in found}) > 1:
            what = f"the ranks' predictions have rows of the shapes {', '.join(map(str, sorted(shapes)))}"
            raise ConfigError(what, where="model.predict", fix="pad them to one length", common=True)
        whole = np.concatenate(found)
        return whole.astype(object) if texts else whole


class _Buffer:
    """One of a PyTorch module within a Keras layer, which Keras does not count among its variables."""

    def __init__(self, path: str, tensor: Any) -> None:
        self.path, self._tensor = path, tensor
        self.dtype = keras.backend.standardize_dtype(tensor.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(keras.ops.convert_to_numpy(self._tensor), dtype)

    def assign(self, value: np.ndarray) -> None:
        self._tensor.data.copy_(keras.ops.convert_to_tensor(value))


def _buffers(model: Any) -> list[_Buffer]:
    wrapped = [x for x in model._flatten_layers() if isinstance(x, keras.layers.TorchModuleWrapper)]
    return [_Buffer(f"{x.path}/{name}", b) for x in wrapped for name, b in x.module.named_buffers()]


class _Alike(keras.callbacks.Callback):
    """The last callback: what the others changed on one rank holds on all of them, or on none."""

    def __init__(self, rank: Rank, parts: Any) -> None:
        super().__init__()
        self._rank, self._parts, self._epoch, self._batch = rank, parts, 0, -1

    def on_train_begin(self, logs: Any = None) -> None:
        self._rank.reduction.stop.assign(0.0)
        self._rank.reduction.stopped.assign(0.0)
        self._rank.begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._batch = epoch, -1
        self._rank.pause()  # an evaluation lies between
        if isinstance(self._parts, Epochs):
            self._parts.begin(epoch)
        self._number(epoch)

    def _number(self, epoch: int) -> None:
        """Of the pass over a DataLoader that begins next: with ``steps_per_epoch`` Keras begins it an epoch early."""
        if kind_of(self._parts) == "loader" and self._rank.shard:
            self._parts.share.renumber(mix(self._rank.changes.fits, epoch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """A rank that stopped here alone would leave the others waiting: its wish travels with the next step."""
        if float(_numpy(self._rank.reduction.stopped)) > 0:
            self.model.stop_training = True
        elif self.model.stop_training:
            self._rank.reduction.stop.assign(1.0)
            self.model.stop_training = False
        if self._batch < 0:
            self._number(self._epoch + 1)
        steps, self._batch = batch - self._batch, batch
        self._rank.taken += steps
        self._rank.trained(steps, "model.fit")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        wish = self.model.stop_training or float(_numpy(self._rank.reduction.stop)) > 0
        self.model.stop_training = self._rank.stops(wish)
        self._rank.compare(f"model.fit, epoch {epoch + 1}")


def _entering(slot: Any, model: Any, make: Callable[..., Any]) -> Callable[..., Any]:
    """``make_train_function`` of a model whose steps are an exchange as a whole, as the watchdog sees it."""

    def made(force: bool = False) -> Any:
        before = model.train_function
        make(force=force)
        step = model.train_function
        if step is not before:

            def entered(*args: Any) -> Any:
                with slot:
                    return step(*args)

            model.train_function = entered
        return model.train_function

    return made


def _left_to_rank_0(*args: Any, **kwargs: Any) -> None:
    """Rank 0 writes. Nobody waits for it, as a script may save on rank 0 alone."""


def _numpy(x: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(x))


def _numbers(result: Any) -> np.ndarray:
    """Of a metric's result, which may be a dict."""
    return np.concatenate([np.zeros(0), *(_numpy(x).ravel() for x in keras.tree.flatten(result))])


def _alike(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.allclose(a, b, 1e-5, 0)


def _bound(method: Callable, args: Any, kwargs: Any) -> dict[str, Any]:
    """The call's arguments by name, with Keras' own defaults."""
    call = inspect.signature(method).bind(*args, **kwargs)
    call.apply_defaults()
    return {k: v for k, v in call.arguments.items() if k != "kwargs"} | call.arguments.get("kwargs", {})
