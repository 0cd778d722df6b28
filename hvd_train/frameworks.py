"""A record of each framework, in strings only, so that reading it imports no framework."""

from __future__ import annotations

import gc
import importlib
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_train.errors import ConfigError
from hvd_train.installation import install_fix, repair_fix

if TYPE_CHECKING:
    from hvd_train.protocol import Communicator, FrontEndModule


@dataclass(frozen=True)
class Framework:
    """A record of a framework, which can be read before the framework is loaded.

    ``module``: its front-end, a ``protocol.FrontEndModule``; ``communicator``: the module with its communicator, a
    ``protocol.CommunicatorModule``; ``packages``: what must be installed; ``horovod``: Horovod's module for it (empty:
    it needs none); ``zoo``: the package of its models, a file each (empty: none).
    ``exporter``: the module that writes its own model files (empty: none), of ``format`` and ``ending``;
    ``loads_by_ending``: whether it loads only files with this ending.
    ``stages``: the front-end of a rank with some of a model's blocks; ``multi_device``: that of several devices
    (empty: none). ``weight_files``: the module that reads files of weights, by their endings (empty: none).
    ``channels_first``: the axis order of its images.
    ``settings``: environment variables that it reads while it loads; ``quiet``: those that silence it; ``unneeded``:
    packages that it imports if they are installed, and that no training needs. ``threads_wait``: whether in each
    operation its threads wait for the last of them. ``optional``: scripts/setup does not install it. ``tested``: the
    version that hvd_train is tested with (empty: several).
    """

    name: str
    module: str
    communicator: str
    packages: tuple[str, ...]
    horovod: str = ""
    zoo: str = ""
    stages: str = ""
    multi_device: str = ""
    weight_files: str = ""
    exporter: str = ""
    format: str = ""
    ending: str = ""
    loads_by_ending: bool = False
    channels_first: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    quiet: Mapping[str, str] = field(default_factory=dict)
    unneeded: tuple[str, ...] = ()
    threads_wait: bool = False
    optional: bool = False
    tested: str = ""

    @property
    def install(self) -> str:
        """Return what to do if the framework is not installed."""
        pip = f"pip install {' '.join(self.packages)}"
        return pip if self.optional else install_fix(f"--frameworks {self.name}", pip)

    @property
    def repair(self) -> str:
        """Return what to do if the framework is there, and cannot be imported."""
        found = distribution(self.packages[0])
        # A version without its build ("+cpu"): pip's index knows no other name of it.
        return repair_fix(f"{found[0]}=={found[1].partition('+')[0]}" if found else self.packages[0])

    def load(self, skip_unneeded: bool = False) -> FrontEndModule:
        """Load the framework, which now reads ``settings``, and return its front-end.

        ``skip_unneeded``: hide the packages ``unneeded`` from it, which saves seconds.
        """
        with fast_import(self.unneeded if skip_unneeded else ()):
            return importlib.import_module(self.module)

    def stages_module(self) -> FrontEndModule:
        """Return the front-end for pipeline stages; the framework must be loaded."""
        if not self.stages:
            raise ConfigError(f"{self.name} has no pipeline stages", where="parallel.pipeline", fix="set it to 1")
        return importlib.import_module(self.stages)

    def multi_device_module(self) -> FrontEndModule:
        """Return the front-end for several devices; the framework must be loaded."""
        if not self.multi_device:
            what = f"{self.name} takes one device"
            raise ConfigError(what, where="parallel.devices_per_rank", fix="set it to 1")
        return importlib.import_module(self.multi_device)

    def weight_readers(self) -> Mapping[str, Callable[[Path], dict[str, dict[str, Any]]]]:
        """Return {ending of a file: function that reads it}; the framework must be loaded.

        The function returns {key in the file: {name: array}}, as a file may hold several sets of weights.
        """
        return importlib.import_module(self.weight_files).WEIGHT_FILES if self.weight_files else {}

    def make_communicator(self, expected_size: int) -> Communicator:
        """Make the communicator of ``expected_size`` ranks, not yet opened; the framework must be loaded."""
        return importlib.import_module(self.communicator).make_communicator(expected_size)

    def installed(self) -> bool:
        return all(find_spec(package) for package in self.packages)

    def has(self, model: str) -> bool:
        """Return whether this is a built-in model. For a user's model, the configuration names the framework."""
        return bool(self.zoo and model.isidentifier() and find_spec(f"{self.zoo}.{model}"))


@contextmanager
def fast_import(skipped: tuple[str, ...]) -> Iterator[None]:
    """Import without garbage collection, and hide the packages ``skipped`` from the imported modules.

    Of TensorFlow's 7 s on one core, hiding saves 2 and the collection 0.5.
    """
    new = [package for package in skipped if package not in sys.modules]
    collects = gc.isenabled()
    sys.modules.update(dict.fromkeys(new))  # type: ignore[arg-type]  # None: import raises ModuleNotFoundError
    gc.disable()
    try:
        yield
    finally:
        for package in new:
            del sys.modules[package]
        if collects:
            gc.enable()


FRAMEWORKS: dict[str, Framework] = {}


def register(framework: Framework) -> Framework:
    """Add a framework to the table that the configuration and all commands use."""
    FRAMEWORKS[framework.name] = framework
    return framework


def distribution(package: str) -> tuple[str, str] | None:
    """Return the name and version under which a package is installed: its CPU-only build may have another name."""
    from importlib import metadata

    for name in (package, f"{package}-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return name, metadata.version(name)
    return None


def version(package: str) -> str | None:
    """Return the version of an installed package; see ``distribution``."""
    return found[1] if (found := distribution(package)) else None


PYTORCH = register(
    Framework(
        "pytorch",
        module="hvd_train.frontends.pytorch.model",
        communicator="hvd_train.frontends.pytorch.communicator",
        horovod="horovod.torch",
        packages=("torch",),
        zoo="pt_models",
        stages="hvd_train.frontends.pytorch.stages",
        multi_device="hvd_train.frontends.pytorch.multi_device",
        weight_files="hvd_train.frontends.pytorch.weight_files",
        exporter="hvd_train.frontends.pytorch.export",
        format="pytorch",
        ending=".pt",
        channels_first=True,
        threads_wait=True,
        tested="2.13",
    )
)
# TensorFlow enables oneDNN by itself only if it finds AVX-512 VNNI. With AVX2 alone its other kernels take 2.3 times as
# long for a step of the wide MLP, 1.5 for SINGA's CNN, 1.9 for ResNet-18.
KERNELS = {"TF_ENABLE_ONEDNN_OPTS": "1"} if platform.machine() == "x86_64" else {}
TENSORFLOW = register(
    Framework(
        "tensorflow",
        module="hvd_train.frontends.tensorflow.model",
        communicator="hvd_train.frontends.tensorflow.communicator",
        horovod="horovod.tensorflow",
        packages=("tensorflow", "keras"),
        zoo="tf_models",
        stages="hvd_train.frontends.tensorflow.stages",
        multi_device="hvd_train.frontends.tensorflow.multi_device",
        weight_files="hvd_train.frontends.tensorflow.weight_files",
        exporter="hvd_train.frontends.tensorflow.export",
        format="keras",
        ending=".keras",
        loads_by_ending=True,
        settings={"KERAS_BACKEND": "tensorflow", **KERNELS},
        quiet={"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"},
        unneeded=("sklearn", "matplotlib"),  # Keras' wrappers for scikit-learn, and image galleries
        tested="2.21",
    )
)
JAX = register(
    Framework(
        "jax",
        module="hvd_train.frontends.jax.model",
        communicator="hvd_train.frontends.jax.communicator",
        packages=("jax",),
        zoo="hvd_train.frontends.jax.models",
        settings={"JAX_PLATFORMS": "cpu"},
        optional=True,
    )
)
