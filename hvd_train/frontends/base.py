"""What front-ends share without knowing a framework: neutral names and axes, bytes over Horovod, model look-up."""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import os
import re
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from hvd_train.config import Config
from hvd_train.config.own import GIVEN, handed_over, place_of, user_module
from hvd_train.core.initialization import first_weight
from hvd_train.core.mean import differing, mean
from hvd_train.core.state_dict import PIECE_BYTES
from hvd_train.core.task import Task, refused
from hvd_train.errors import CommunicationError, ConfigError, EndedRankError, LostRankError, TrainError
from hvd_train.launch.environment import ALONE, LAUNCHERS, world
from hvd_train.launch.slurm import meet
from hvd_train.protocol import (
    Batch,
    Build,
    Communicator,
    Field,
    Handle,
    Ops,
    Sample,
    Scale,
    Tensor,
    Tree,
    made_up,
    one_or_all,
)


def checksum(x: np.ndarray) -> int:
    """The sum of an array's memory as 64-bit words, mod 2^64: any one changed bit changes it."""
    memory = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    whole = len(memory) // 8 * 8
    words = int(memory[:whole].view(np.uint64).sum(dtype=np.uint64))
    return (words + int.from_bytes(memory[whole:].tobytes(), "little")) % 2**64


@dataclass(frozen=True)
class Layout:
    """A tensor's neutral name and axis order: neutral = own.reshape(view).transpose(axes).reshape(shape)."""

    name: str
    own_shape: tuple[int, ...]
    view: tuple[int, ...]
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, own_shape: Sequence[int], entry: tuple) -> Layout:
        name, view, axes, shape = entry
        own = tuple(int(n) for n in own_shape)
        view = tuple(view or own)
        return cls(name, own, view, tuple(axes or range(len(view))), tuple(shape))

    def to_neutral(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(self.view).transpose(self.axes).reshape(self.shape)  # who writes it lays it out

    def from_neutral(self, x: np.ndarray) -> np.ndarray:
        permuted = tuple(self.view[axis] for axis in self.axes)
        own = x.reshape(permuted).transpose(np.argsort(self.axes)).reshape(self.own_shape)
        return np.ascontiguousarray(own).reshape(self.own_shape)


def layouts_of(shapes: Mapping[str, Sequence[int]], table: Mapping[str, tuple]) -> dict[str, Layout]:
    """Of tensors by their own names; one that the model's ``table`` leaves out keeps its name and its axes."""
    return {
        own: Layout.of(shape, table.get(own, (own.replace("/", "."), None, None, shape)))
        for own, shape in shapes.items()
    }


class StateTree(ABC):
    """``state`` and ``load`` over a subclass' own arrays.

    Own keys are ``weights/OWN``, ``statistics/OWN`` and ``slots/SLOT/OWN``; neutral keys have the neutral name in place
    of OWN. A key that ends in no known name (``slots/step``) is the same in both.
    """

    ops: Ops
    task: Task
    communicator: Communicator
    layouts: dict[str, Layout]
    _exchange_state: Sequence[tuple[Any, ...]]  # the compressor's, per bucket

    queued: Sequence[Any] = ()

    def run_queued(self) -> None:
        """Nothing waits, unless a front-end says so."""
        return

    def finite(self) -> bool:
        return True

    def waited(self) -> float:
        return self.communicator.waited

    def counts(self, batch: Batch) -> np.ndarray:
        return self.ops.to_numpy(self.task.counts(*self._judged(batch)))

    def _ask(self, sample: Sample) -> None:
        """Shows the task what the model gives, where functions of the user's own are asked."""
        if self.task.own:
            inputs, labels, weights = self.to_device(made_up(sample))
            self.task.probe(self._evaluated(inputs), labels, weights)

    @abstractmethod
    def to_device(self, batch: Batch) -> Any:
        """(inputs, labels, weights) on the device."""

    @abstractmethod
    def _judged(self, batch: Batch) -> tuple[Mapping[str, Any], Any]:
        """(labels, weights) of it."""

    @abstractmethod
    def _evaluated(self, inputs: Any) -> Any:
        """What the model gives in evaluation, as tensors."""

    def _scales(self, scale: Scale) -> np.ndarray:
        """(losses,)."""
        return np.broadcast_to(np.atleast_1d(scale), (len(self.task.terms),))

    @abstractmethod
    def _measure(self, placed: Any, scale: Scale, seed: int) -> Any: ...

    def compression_error(self, placed: Any, scale: Scale, seed: int) -> Any:
        """``Exchange.compression_error`` of this batch's gradient; running statistics stay as they were."""
        kept = self.statistics()
        figures = self._measure(placed, scale, seed)
        self.put_back(kept)
        return figures

    def statistics(self) -> Tree:
        return self._arrays([key for key in self._keys() if key.startswith("statistics/")])

    def put_back(self, kept: Tree) -> None:
        self._assign(kept)

    def neutral(self, own: Tree) -> Tree:
        return dict(self._neutral(key, array) for key, array in own.items())

    def _neutral(self, key: str, array: np.ndarray) -> tuple[str, np.ndarray]:
        prefix, layout = self._split(key)
        return (prefix + layout.name, layout.to_neutral(array)) if layout else (key, array)

    def checksums(self) -> dict[str, int]:
        return {self.layouts[own].name: checksum(x) for own, x in self._weights()}

    @abstractmethod
    def _weights(self) -> Iterable[tuple[str, np.ndarray]]:
        """(own name, trainable weight as it lies in memory, not copied where that can be helped)."""

    def _first_weights(self, names: Iterable[str], seed: int) -> Iterator[tuple[str, np.ndarray]]:
        """(own name, first weight in its own axis order)."""
        for own in names:
            layout = self.layouts[own]
            yield own, layout.from_neutral(first_weight(layout.name, layout.shape, seed))

    def local_state(self) -> Tree:
        return {
            f"{b}/{k}": self.ops.to_numpy(x)
            for b, state in enumerate(self._exchange_state)
            for k, x in enumerate(state)
        }

    def load_local(self, tree: Mapping[str, np.ndarray]) -> None:
        self._exchange_state = [
            tuple(self.ops.from_numpy(tree[f"{b}/{k}"]) for k in range(len(state)))
            for b, state in enumerate(self._exchange_state)
        ]

    @abstractmethod
    def _keys(self) -> list[str]:
        """Own keys of all arrays."""

    @abstractmethod
    def _views(self, keys: Collection[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """(own key, array) of these own keys, or of all; one at a time, not copied where that can be helped."""

    def _arrays(self, keys: Collection[str] | None = None) -> Tree:
        """Copies of them."""
        return {key: x.copy() for key, x in self._views(keys)}

    @abstractmethod
    def _assign(self, arrays: Mapping[str, np.ndarray]) -> None: ...

    def _split(self, key: str) -> tuple[str, Layout | None]:
        prefix = "/".join(key.split("/")[: 2 if key.startswith("slots/") else 1]) + "/"
        return prefix, self.layouts.get(key[len(prefix) :])

    def state(self, into: Tree | None = None) -> Tree:
        tree = {}
        for key, array in self._views():
            name, x = self._neutral(key, array)
            tree[name] = np.empty_like(x) if into is None else into[name]
            np.copyto(tree[name], x, casting="no")
        return tree

    def load(self, tree: Mapping[str, np.ndarray]) -> None:
        own = {}
        for key in self._keys():
            prefix, layout = self._split(key)
            neutral = prefix + layout.name if layout else key
            if neutral in tree:
                own[key] = layout.from_neutral(tree[neutral]) if layout else tree[neutral]
        self._assign(own)

    def average(self, names: Sequence[str] | None = None) -> None:
        """In place, over the ranks: the weights of these neutral names, or all weights and statistics."""
        keys = []
        for key in self._keys():
            _, layout = self._split(key)
            if not key.startswith("slots/") and (names is None or (layout and layout.name in names)):
                keys.append(key)
        self._average(keys)

    def average_statistics(self) -> None:
        """Makes running statistics equal on all ranks; they are the only part that each rank gathers for itself."""
        self._average([key for key in self._keys() if key.startswith("statistics/")])

    def _average(self, keys: Collection[str]) -> None:
        if self.communicator.size > 1:
            apart = differing(self._views(keys), self.communicator)
            if apart:
                self._assign(mean(self._arrays(apart), self.communicator, self.ops))


def guarded(transfer: Callable) -> Callable:
    """A transfer that fails raises the communicator's ``failure``, which no ``except RuntimeError`` of a script takes
    for its own. A script that catches it all the same is ended by its next transfer."""

    @functools.wraps(transfer)
    def call(self: HorovodCommunicator, *args: Any, **kwargs: Any) -> Any:
        if self._failure is not None:
            raise SystemExit(self._failure.exit_code)
        began = time.perf_counter()
        try:
            with self.page or nullcontext():
                return transfer(self, *args, **kwargs)
        except Exception as error:
            failure = self.failure(error)
            if failure is None:
                raise
            raise failure from error
        finally:
            self.waited += time.perf_counter() - began

    return call


@dataclass(frozen=True)
class RankParts:
    """A reduce-scatter under way: ``ranks`` parts of ``length`` entries travel to the rank that adds them.

    Horovod's own reduce-scatter adds in an order that depends on transport and world size. Over Gloo its halving and
    doubling may also overwrite a buffer that is still being sent (pytorch/gloo issue 303).
    """

    transfer: Handle
    ranks: int
    length: int

    def add(self, received: Tensor) -> Tensor:
        """Add the parts in rank order; ``received``: (ranks * length,), whose memory may be taken."""
        total = received[: self.length]
        for rank in range(1, self.ranks):
            total += received[rank * self.length : (rank + 1) * self.length]
        return total


class HorovodCommunicator(ABC):
    """Horovod's life cycle and bytes; a subclass adds the tensor verbs of its framework, each one ``guarded``."""

    rank = local_rank = 0
    size = local_size = 1
    mpi = False
    part: Any = None  # mpi4py's communicator of some of the ranks, where not all of them are meant
    module: str
    waited = 0.0
    page: Any = None  # within which a script's rank is while it waits for others; see launch/board.py
    left: Callable[[], Sequence[int]] = staticmethod(list)  # ranks of a script that have ended by themselves
    _failure: TrainError | None = None

    def __init__(self, expected_size: int) -> None:
        self._expected = expected_size

    def open(self) -> None:
        try:
            self.hvd: Any = importlib.import_module(self.module)
        except ImportError as error:
            raise ConfigError(f"Horovod cannot be used: {error}", where=self.module, fix="run scripts/setup") from error
        meet(here := world())
        try:
            self.hvd.init(*([self.part] if self.part else []))
        except ValueError as error:  # Horovod has said why
            fix = "see the lines above; a rank may have ended, or a network does not reach the others"
            raise CommunicationError("Horovod cannot connect the ranks", fix=fix) from error
        self.rank, self.size = self.hvd.rank(), self.hvd.size()
        self.local_rank, self.local_size = self.hvd.local_rank(), self.hvd.local_size()
        self.mpi = self.hvd.mpi_enabled()
        if self.size != self._expected:
            # Without this, each process would train alone and nobody would notice.
            other = "set HOROVOD_CONTROLLER=gloo" if here.launcher == "srun" else "use horovodrun --gloo"
            names = LAUNCHERS.get(here.launcher, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))[:2]
            raise CommunicationError(
                f"the launcher started {self._expected} ranks, but Horovod sees a world of {self.size}",
                where=f"environment variable {names[1]}",
                fix=f"Horovod and the launcher must speak the same MPI: see 'hvd-train doctor', or {other}; "
                f"{ALONE} {' '.join(names)}",
            )

    def close(self) -> None:
        self.hvd.shutdown()

    def failure(self, error: BaseException | None = None) -> TrainError | None:
        # Ours (see scripts/horovod-*.patch): an operation inside a graph fails where nobody of us sees it.
        library = self.hvd.mpi_ops._basics.MPI_LIB_CTYPES
        unseen = getattr(library, "horovod_failed", None)
        if self._failure is None and (_ended_transfers(error) or (unseen and unseen())):
            stalled = getattr(library, "horovod_stall", None)
            if stalled:
                stalled.restype = ctypes.c_char_p
            self._failure = _failure_of(error, stalled().decode() if stalled else "", self.left())
        return self._failure

    @abstractmethod
    def alltoall_async(self, x: Tensor, sizes: Sequence[int], name: str) -> Handle: ...

    def reduce_scatter_async(self, x: Tensor, sizes: Sequence[int], name: str) -> RankParts:
        return RankParts(self.alltoall_async(x, sizes, name), self.size, sizes[self.rank])

    @abstractmethod
    def _broadcast(self, data: np.ndarray, root: int, name: str) -> np.ndarray: ...

    @abstractmethod
    def _allgather(self, data: np.ndarray, name: str) -> np.ndarray: ...

    def broadcast_bytes(self, data: bytes, root: int = 0) -> bytes:
        length = self._broadcast(np.frombuffer(struct.pack("<q", len(data)), np.uint8).copy(), root, "bytes.length")
        (count,) = struct.unpack("<q", length.tobytes())
        parts = []
        for start in range(0, count, PIECE_BYTES):  # Horovod and we hold copies of what travels: of a piece, not of all
            size = min(PIECE_BYTES, count - start)
            own = np.frombuffer(data, np.uint8, size, start).copy() if self.rank == root else np.zeros(size, np.uint8)
            sent = self._broadcast(own, root, "bytes.data")
            if self.rank != root:
                parts.append(sent.tobytes())
        return data if self.rank == root else b"".join(parts)

    def allgather_bytes(self, data: bytes, name: str = "bytes") -> list[bytes]:
        framed = np.frombuffer(struct.pack("<q", len(data)) + data, np.uint8).copy()
        joined, parts = self._allgather(framed, f"{name}.gather").tobytes(), []
        while joined:
            (count,) = struct.unpack_from("<q", joined)
            parts.append(joined[8 : 8 + count])
            joined = joined[8 + count :]
        return parts

    def barrier(self) -> None:
        self.allgather_bytes(b"", "barrier")


def _ended_transfers(error: BaseException | None) -> bool:
    """horovod.torch names its errors; TensorFlow's name the operation."""
    kind = type(error).__name__
    graph = kind in ("UnknownError", "FailedPreconditionError", "InvalidArgumentError") and "Horovod" in str(error)
    return kind == "HorovodInternalError" or graph


def _failure_of(error: BaseException | None, stalled: str, left: Sequence[int]) -> TrainError:
    if stalled:
        fix = "call the same on all ranks; if one is only slow, raise HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
        return CommunicationError(f"the ranks diverged: {stalled}", fix=fix)
    differs = re.search(r"(Mismatched|Invalid) [^\n]*", str(error))
    if differs:
        fix = "call the same on all ranks, with tensors of the same shape and type"
        return CommunicationError(f"the ranks diverged: {differs[0].strip()}", fix=fix)
    if left:
        what = f"rank {', '.join(map(str, left))} came to the end of the script, and this rank waits for it"
        fix = "end the loop at the same step on all ranks: decide by ht.sum or hk.reduce, take as many batches"
        return EndedRankError(what, fix=fix)
    return LostRankError("another rank was lost")


def find_model(zoo: str, name: str, options: Mapping[str, Any]) -> tuple[Build, ModuleType]:
    """The build function for ``model.name``, a file of the zoo or ``package.module:function``, and its module."""
    module_name, _, function = name.partition(":")
    where = f"model.name: {name}"
    if name in GIVEN:
        module = importlib.import_module(GIVEN[name].__module__)
    elif function:
        module = user_module(name, where)
    else:
        try:
            module = importlib.import_module(f"{zoo}.{name}")
        except ModuleNotFoundError as error:
            if error.name is None or not f"{zoo}.{name}.".startswith(f"{error.name}."):
                raise  # a package that the zoo's model needs
            fix = "'hvd-train models' lists the zoo; your own is 'package.module:function'"
            raise ConfigError(f"there is no model '{name}'", where=where, fix=fix) from None
    build = GIVEN.get(name) or getattr(module, function or "build", None)
    if not callable(build):
        what = f"{place_of(module, name)} has no function '{function or 'build'}'"
        raise ConfigError(what, where=where, fix=handed_over(name, where))
    parameters = inspect.signature(build).parameters
    known = [p for p in parameters if p not in ("input_shape", "num_classes", "image")]
    unknown = [o for o in options if o not in parameters]
    if unknown and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        raise ConfigError(f"model '{name}' has no option {', '.join(unknown)}", where=where, fix=f"it takes {known}")
    return build, module


PRETRAINED = (
    "the checkpoint has all weights: give the function a parameter pretrained=True and load the file only where it is "
    "true; eval, predict and export call it with False"
)


def build_model(
    zoo: str,
    name: str,
    options: Mapping[str, Any],
    sample: Sample,
    shape_of: Callable[[Field], tuple[int, ...]] = lambda field: field.shape,
    restores: bool = False,
) -> tuple[Any, ModuleType, dict[str, Any]]:
    """(model, its module, what its build function got: options, and of the two others what it has parameters for).

    ``shape_of``: the shape in which the framework gets a field. ``restores``: all weights come from a checkpoint, so a
    function that loads pretrained ones is called with ``pretrained=False`` if it has this parameter. A build function
    that refuses its arguments is the configuration's fault.
    """
    build, module = find_model(zoo, name, options)
    parameters = inspect.signature(build).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    shapes = one_or_all({name: shape_of(field) for name, field in sample.inputs.items()})
    facts = {"input_shape": shapes, "num_classes": sample.num_classes}
    given = {key: value for key, value in facts.items() if anything or key in parameters} | dict(options)
    if restores and "pretrained" in parameters:
        given["pretrained"] = False
    if ":" not in name:
        given |= _order(module, parameters, name, sample)
    try:
        return build(**given), module, given
    except (ValueError, TypeError, OSError) as error:
        fix = PRETRAINED if restores and isinstance(error, OSError) and "pretrained" not in parameters else ""
        fix = fix or NO_CLASSES * _wants_classes(sample, error) or IF_IMAGES * may_be_images(sample)
        what = f"the model cannot be built: {' '.join(str(error).split())}"
        raise ConfigError(what, where=f"model.name: {name}", fix=fix) from error


def _order(module: ModuleType, parameters: Collection[str], name: str, sample: Sample) -> dict[str, bool]:
    """Return the options that tell a model the order of axes; one of images alone (``IMAGES``) gets no others.

    Without it, (height, width, 4) that is not an image would be taken for channels first in PyTorch.
    """
    field = next((field for field in sample.inputs.values() if not field.image), None)
    if field is None or len(sample.inputs) > 1:
        return {}
    if getattr(module, "IMAGES", False):
        fix = "take mlp, which takes any shape, or a model of your own"
        if len(field.shape) in (2, 3):
            axes = ("height", "width", "channels")[: len(field.shape)]
            fix = f"set data.images: true if they are ({', '.join(axes)}); else {fix}"
        what = f"the model takes images, and the data give samples of shape {field}"
        raise ConfigError(what, where=f"model.name: {name}", fix=fix)
    return {"image": False} if "image" in parameters and len(field.shape) == 3 else {}


def checked(found: Any, name: str) -> Any:
    """What a model gives: a tensor, or several by name."""
    for x in found.values() if isinstance(found, Mapping) else [found]:
        if not hasattr(x, "shape"):
            what = f"the model gives a {type(x).__name__} {'by a name' if isinstance(found, Mapping) else ''}".rstrip()
            raise refused(what, f"model.name: {name}", "return a tensor, or a dict of them with a name for each loss")
    return found


def untaken(name: str, sample: Sample, error: Exception) -> ConfigError:
    """The model does not take what the data give."""
    listed = ", ".join(f"{key} {field}" for key, field in sample.inputs.items())
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    what = f"the model does not take its inputs ({listed}): {reason}"
    fixes = ["several inputs are given by name"] * (len(sample.inputs) > 1)
    if len(sample.inputs) > 1 or any(field.whole for field in sample.inputs.values()):
        fixes.append("whole numbers stay whole: store quantities as float32")
    fixes += [IF_IMAGES] * may_be_images(sample)
    fix = NO_CLASSES if _wants_classes(sample, error) else "; ".join(fixes)
    return ConfigError(what, where=f"model.name: {name}", fix=fix)


IF_IMAGES = "if they are images, set data.images: true"
NO_CLASSES = "num_classes is None, as task.loss is not cross_entropy: set data.num_classes"


def _wants_classes(sample: Sample, error: Exception) -> bool:
    """Return whether a layer was made of ``num_classes=None``: a user's loss does not make labels classes."""
    return sample.num_classes is None and "None" in str(error)


def may_be_images(sample: Sample) -> bool:
    """Return whether an input that is not an image has the axes of one, so that the user may have meant it."""
    return any(len(field.shape) in (2, 3) and not field.image for field in sample.inputs.values())


def overlaps(wanted: bool | str, communicator: Communicator, gpu: bool, threads: int) -> bool:
    """Whether exchanges run beside backward. ``auto``: where the thread that carries them has a core of its own, or
    waits for a network most of its time. On filled cores of one host it would take the time from the computing thread.
    """
    if communicator.size == 1:
        return False
    if isinstance(wanted, bool):
        return wanted
    # A rank that is not bound shares all cores, one that is bound to a socket those of the socket.
    own = min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // communicator.local_size)
    return gpu or communicator.local_size < communicator.size or own > threads


def gpu_of(config: Config, communicator: Communicator, visible: int, framework: str) -> int | None:
    """The GPU of this rank among the ``visible`` ones; None: it computes on the CPU."""
    if config.device == "cpu" or (config.device == "auto" and not visible):
        return None
    if not visible:
        fix = "set device: cpu, or see 'hvd-train doctor'"
        raise ConfigError(f"this {framework} sees no GPU", where="device: cuda", fix=fix)
    return gpu_index(visible, communicator.local_rank, config.devices)


def gpu_index(visible: int, local_rank: int, devices: Sequence[int] | None) -> int:
    """The GPU of this rank: its local rank among the visible ones, or among those that ``devices`` names.

    Where Slurm shows each rank a GPU of its own (--gpus-per-task), every rank's index is 0.
    """
    if devices is None and visible == 1 and "SLURM_GPUS_PER_TASK" in os.environ:
        return 0
    choice = list(devices) if devices is not None else list(range(visible))
    if local_rank >= len(choice) or choice[local_rank] >= visible:
        raise ConfigError(
            f"local rank {local_rank} has no GPU: {visible} visible, devices {choice}",
            fix="start as many ranks per host as it has GPUs, or set device: cpu",
        )
    return choice[local_rank]
