"""Write a trained checkpoint as a file that needs no hvd_train: ``hvd-train export``."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from hvd_train import __version__, files
from hvd_train.checkpoint import store
from hvd_train.checkpoint.manifest import sample_of
from hvd_train.config import Config, FrontEndConfig
from hvd_train.config.user_code import look_in
from hvd_train.errors import ConfigError
from hvd_train.frameworks import FRAMEWORKS, PYTORCH, Framework
from hvd_train.frontends.exporting import Exported, Trained
from hvd_train.jobs.trained_run import choose_checkpoint, refuse_foreign
from hvd_train.launch.environment import world
from hvd_train.protocol import Sample, one_or_all
from hvd_train.run_folder.terminal import say
from hvd_train.session import Session

NATIVE = {framework.format: framework for framework in FRAMEWORKS.values() if framework.format}
ENDINGS = {to: framework.ending for to, framework in NATIVE.items()}
ENDINGS |= {"torch-export": ".pt2", "onnx": ".onnx", "safetensors": ".safetensors"}
# The framework that builds a built-in model. ONNX uses PyTorch, with weights converted by their canonical names.
BUILDERS = NATIVE | {"torch-export": PYTORCH, "onnx": PYTORCH}
# The scaling of a built-in data set; others give stored values, with bytes divided by 255.
SCALES = {
    "digits": "from 0 to 1",
    "idx": "from 0 to 1",
    "imagefolder": "from 0 to 1",
    "webdataset": "from 0 to 1",
    "cifar10": "from 0 to 1",
    "text": "the bytes' numbers",
}
NUMBERS = "as stored in the data", "from 0 to 1 (uint8 divided by 255)"


def export(
    config: Config,
    which: str,
    to: str,
    output: Path | None,
    overwrite: bool,
    verbose: bool,
    foreign: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Write the checkpoint ``which`` in the format ``to``. Prints the file's inputs and outputs, and how to load it.

    ``foreign``: configuration keys with code that the caller has not named, which is not imported.
    """
    here = world()
    if here.size > 1:
        what = f"export runs in one process, but there are {here.size} ranks"
        raise ConfigError(what, where=f"started by {here.launcher}", fix="start it without a launcher", common=True)
    output = output or Path(config.run_dir) / f"model{ENDINGS[to]}"
    _check_place(output, to, overwrite)
    framework = _builder(config, to)
    snapshot = choose_checkpoint(config, which)
    # Neither the data nor their transforms are loaded.
    refuse_foreign({key: name for key, name in foreign.items() if key == "model.name" and framework}, config.run_dir)
    look_in(config.code_dir)
    trained = _trained(config, snapshot)
    if framework:
        Session.prepare(framework.name, config.threads, verbose)
        done = getattr(importlib.import_module(framework.exporter), f"to_{to.replace('-', '_')}")(trained)
    else:
        done = to_safetensors(trained, FRAMEWORKS[config.framework].channels_first)
    _write(output, done.content)
    names_file = _names_file(output)
    if _names(trained.sample):
        read = {
            key: json.loads(text) for key, text in trained.about.items() if key in (*_names(trained.sample), PREPARED)
        }
        about = {**trained.about, **read}
        _write(names_file, (json.dumps(about, indent=1, ensure_ascii=False) + "\n").encode())
    say(f"{to}: {output} ({config.model.name}, step {snapshot.step:,}, {len(done.content):,} bytes)")
    say(f"inputs and outputs: {_signature(trained, done, framework or FRAMEWORKS[config.framework])}")
    if _names(trained.sample):
        say(f"names of {' and '.join(_names(trained.sample))}: {names_file}")
    say(f"to load it: {done.load.replace('{path}', repr(str(output)))}")
    return 0


PREPARED = "prepared"  # how the columns of the table were made inputs: data.fitted


def _names_file(output: Path) -> Path:
    """Return the path of the file with the names of classes and columns."""
    return output.with_name(f"{output.name}.json")


def _builder(config: Config, to: str) -> Framework | None:
    """Return the framework that builds the model for this format; None if none is needed."""
    # A built-in model exists in both frameworks. A user's model exists only in the one that it is written in.
    if to not in BUILDERS or ":" not in config.model.name:
        return BUILDERS.get(to)
    framework = FRAMEWORKS[config.framework]
    if to != "onnx" and BUILDERS[to] is not framework:
        what = f"a {framework.name} model of your own cannot become a {to} one"
        fix = f"take --to {', '.join(x for x in BUILDERS if x == 'onnx' or BUILDERS[x] is framework)} or safetensors"
        raise ConfigError(what, where=f"model.name: {config.model.name}", fix=fix)
    return framework


def _trained(config: Config, snapshot: store.Snapshot) -> Trained:
    """Return the checkpoint's weights and statistics with its sample."""
    sample = sample_of(snapshot.meta)
    arrays = {key.partition("/")[2]: array for key, array in snapshot.model.items()}
    divided = [name for name, field in sample.inputs.items() if field.divisor != 1]
    numbers = NUMBERS[bool(divided)]
    if 0 < len(divided) < len(sample.inputs):
        numbers = f"of {', '.join(divided)} {NUMBERS[1]}, of others {NUMBERS[0]}"
    scale = SCALES.get(config.data.name) or numbers
    if fitted := snapshot.config().data.fitted:
        scale = f'of columns made from the table as "{PREPARED}" in the .json file says'
    several = len(sample.inputs) > 1
    for name, field in sample.inputs.items():
        if field.mean:
            scale += f", then{f' {name}' * several} less {_listed(field.mean)}, over {_listed(field.std)}"
    order = "channels last; " * any(field.image for field in sample.inputs.values())
    about = {
        "model": config.model.name,
        "options": json.dumps(config.model.options),
        "trained_with": f"hvd_train {__version__}, {snapshot.framework}",
        "step": str(snapshot.step),
        "sample": f"{sample.input_shape} as the data give it, {order}numbers {scale}",
        "num_classes": str(sample.num_classes),
        **_names(sample),
    }
    if fitted:
        about[PREPARED] = json.dumps(fitted, ensure_ascii=False)
    return Trained(FrontEndConfig.of(config), arrays, sample, about, scale)


def _names(sample: Sample) -> dict[str, str]:
    """Return the names of classes (in order of their numbers), columns and outputs, as JSON."""
    classes = {name: field.names for name, field in sample.labels.items() if field.names}
    columns = {name: field.columns for name, field in sample.inputs.items() if field.columns}
    outputs = {name: field.columns for name, field in sample.labels.items() if field.columns and not field.classes}
    names = {"classes": classes, "columns": columns, "outputs": outputs}
    return {key: json.dumps(one_or_all(each), ensure_ascii=False) for key, each in names.items() if each}


def _listed(numbers: tuple[float, ...]) -> str:
    text = ", ".join(f"{x:g}" for x in numbers)
    return text if len(numbers) == 1 else f"({text})"


def _signature(trained: Trained, done: Exported, framework: Framework) -> str:
    """Describe the inputs and outputs of the file: shapes, dtypes, axis order, scaling."""
    channels = "channels first, " if framework.channels_first else "channels last, "
    inputs = []
    for name, (shape, dtype) in done.inputs.items():
        title = "input" if len(done.inputs) == 1 else name
        order = channels if trained.sample.inputs[name].image else ""
        inputs.append(f"{title} ({', '.join(map(str, ('n', *shape)))}) {dtype}, {order}")
    gives = [f"{name} ({', '.join(map(str, ('n', *shape)))})" for name, shape in done.outputs.items()]
    result = f" -> {', '.join(gives)}" if gives else ""
    return f"{''.join(inputs)}numbers {trained.scale}{result}"


def to_safetensors(trained: Trained, channels_first: bool) -> Exported:
    """Write weights and running statistics under their canonical names, without a framework."""
    from safetensors.numpy import save

    load = "import safetensors.numpy; weights = safetensors.numpy.load_file({path})"
    kinds = trained.inputs(trained.dtype)
    # Samples are channels last: (height, width, channels). The file gives the axis order of the framework that trained.
    inputs = {
        name: ((field.shape[-1], *field.shape[:-1]) if channels_first and field.image else field.shape, kinds[name])
        for name, field in trained.sample.inputs.items()
    }
    return Exported(save(trained.arrays, metadata=trained.about), load, inputs)


def _check_place(output: Path, to: str, overwrite: bool) -> None:
    """Raise ConfigError for a suffix that the framework cannot load, or an existing file, before any work."""
    if to in NATIVE and NATIVE[to].loads_by_ending and output.suffix != NATIVE[to].ending:
        what = f"{to.capitalize()} loads only files that end in {NATIVE[to].ending}"
        raise ConfigError(what, where=f"-o {output}", fix="change the ending")
    existing = next((path for path in (output, _names_file(output)) if path.exists()), None)
    if existing and not overwrite:
        fix = "give --overwrite, or another place with -o"
        raise ConfigError("the file exists already", where=str(existing), fix=fix)


def _write(output: Path, content: bytes) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        files.put(output, content)
    except OSError as error:
        raise ConfigError(f"the export cannot be written: {error.strerror}", where=str(output)) from error
