"""One rank of one engine of a comparison: trains for ever and counts its steps where others can see them.

    python engines.py FRAMEWORK ENGINE MODEL --count FILE [--exchange JSON]

Every engine does the same work: the same first weights, the same batches in the same order, SGD with momentum, float32.
Ours runs its own loop with its own loader; the peers get their batches ready-made in memory. Started by compare.py and
link.py under the launcher that belongs to the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

SGD = {"lr": 0.005, "momentum": 0.9}
RANKS = 2
BATCHES = 40  # steps whose batches a peer keeps in memory; it goes through them again and again
EPOCH = 300  # steps of an epoch of model.fit
LOSSES = 3  # first losses that are kept, to see that all engines compute the same (ResNet drifts apart within ten)
FASHION = Path("/usr/share/datasets/fashion-mnist")
IMAGES = {"name": "idx", "path": str(FASHION)} if FASHION.exists() else {"name": "digits", "image_size": 28}
TEXT = {"name": "text", "path": str(Path(os.__file__).parent / "asyncio"), "sequence_length": 64}
PAIRS = {"name": "masked_text", "sequence_length": 163}

# model: (config.model, config.data, samples per rank)
MODELS: dict[str, tuple[dict, dict, int]] = {
    "cnn": ({"name": "cnn"}, IMAGES, 64),
    "mlp": ({"name": "mlp", "hidden": [4096, 4096, 1024]}, IMAGES, 64),
    "resnet": ({"name": "resnet"}, IMAGES | {"image_size": 32}, 16),
    "thin": ({"name": "thin"}, IMAGES, 32),
    "gpt": ({"name": "gpt"}, TEXT, 8),
    "bert": ({"name": "bert", "dropout": 0.0}, PAIRS, 8),
    "pyramidnet": ({"name": "pyramidnet"}, IMAGES | {"image_size": 32}, 16),
}
TASKS: dict[str, dict] = {"bert": {"loss": {"words": "cross_entropy", "next": "cross_entropy"}}}
HIDDEN = -100  # the label of a place that has none


held: list = []  # what peers keep in memory beside their batches


class Count:
    """A file of 24 bytes that others map: steps done, when the last one ended (ns, monotonic), this process' number."""

    def __init__(self, path: Path) -> None:
        self.file = np.memmap(path, np.int64, "w+", shape=(3,))
        self.file[2] = os.getpid()
        self.path, self.losses = path, []

    def __call__(self, loss: Callable[[], float] | None = None) -> None:
        if len(self.losses) < LOSSES and loss is not None:
            self.losses.append(loss())
            if len(self.losses) == LOSSES:
                Path(f"{self.path}.losses").write_text(json.dumps(self.losses))
        self.file[1] = time.monotonic_ns()
        self.file[0] += 1


def settings(framework: str, model: str, exchange: dict) -> dict:
    net, data, batch = MODELS[model]
    return {
        "framework": framework,
        "model": net,
        "data": data,
        "task": TASKS.get(model, {}),
        "batch_size": batch,
        "optim": {"name": "sgd", **SGD},
        "exchange": exchange,
        "max_epochs": 10**6,
        "check_val_every_n_epoch": 10**6,
        "checkpoint": {"every_n_epochs": 0, "save_last": False, "save_top_k": 0},
    }


def ours(framework: str, model: str, count: Count, exchange: dict, steps: int | str = "auto") -> None:
    """The product's own loop."""
    from hvd_train.config import Config
    from hvd_train.core.hooks import Hook
    from hvd_train.core.loop import Trainer
    from hvd_train.jobs.connect import connect
    from hvd_train.jobs.job import opened_job
    from hvd_train.launch.environment import keep_memory
    from hvd_train.run_folder.log import NullLog

    class Counting(Hook):
        def __init__(self) -> None:
            self.open: list = []  # of steps that have not run

        def on_step(self, trainer, taken) -> None:
            self.open += taken.sums
            if not trainer.frontend.queued:
                for own in self.open:
                    count(partial(mean, trainer.frontend, own))
                self.open.clear()

    def mean(frontend, own) -> float:
        """Of this rank's samples: each has its own queue, so that nothing may be sent from here."""
        return frontend.task.results(frontend.ops.to_numpy(own))["loss"]

    config = Config.model_validate(settings(framework, model, exchange) | {"steps_per_execution": steps})
    with opened_job(config, False) as job:
        update, _ = connect(job, config.exchange.compression)
        trainer = Trainer(
            config, job.frontend, update, job.data.train, job.data.val, Path(), NullLog(), hooks=[Counting()]
        )
        keep_memory()
        trainer.fit()


def prepared(
    framework: str, work: str, rank: int, size: int, count: int = BATCHES, channels_last: bool = False
) -> tuple[Any, list]:
    """(model with the first weights, list of batches (inputs, labels) of this rank, in the framework's own shape);
    several inputs or labels are dicts."""
    import importlib

    from hvd_train.config import Config
    from hvd_train.data.catalog import open_data
    from hvd_train.data.loader import Loader
    from hvd_train.frameworks import FRAMEWORKS
    from hvd_train.frontends.serial import Serial
    from hvd_train.protocol import Groups, one_or_all

    config = Config.model_validate(settings(framework, work, {}))
    data = open_data(config.data, config.task)
    held.append(data)  # as a loader of theirs would
    module = FRAMEWORKS[framework].load()
    module.configure(int(os.environ.get("OMP_NUM_THREADS", "1")))
    frontend = module.open_frontend(config, Groups.of(Serial()), data.sample)
    loader = Loader(data.train, global_batch=config.global_batch(RANKS), rank=rank, size=size, seed=config.seed)
    batches = []
    for step in loader.epoch(0):
        inputs, labels, _ = frontend.to_device(step.micro_batches[0])
        if framework == "tensorflow":  # ours does it in its graph
            inputs = {name: frontend._ready(x, data.sample.inputs[name]) for name, x in inputs.items()}
        batches.append((one_or_all(inputs), one_or_all(labels)))
        if len(batches) == count:
            break
    if framework == "tensorflow":  # with Keras' own layers
        build = importlib.import_module(f"tf_models.{config.model.name}").build
        model = build(data.sample.input_shape, data.sample.num_classes, **dict(config.model.options))
        model.set_weights(frontend.model.get_weights())
        return model, batches
    if framework == "pytorch" and not channels_last:  # as one writes it by hand
        frontend.model.to(memory_format=sys.modules["torch"].contiguous_format)
        batches = [(x if isinstance(x, dict) else x.contiguous(), y) for x, y in batches]
    return frontend.model, batches


def cycle(batches) -> Iterator:
    while True:
        yield from batches


def torch_loss(logits, labels) -> Any:
    """The mean over this rank's places, as one writes it; of several outputs their sum."""
    import torch.nn.functional as F

    if isinstance(labels, dict):
        return sum(torch_loss(logits[name], labels[name]) for name in labels)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten().long(), ignore_index=HIDDEN)


def called(net, inputs) -> Any:
    return net(**inputs) if isinstance(inputs, dict) else net(inputs)


def keras_loss(keras, labels) -> Any:
    """Keras' losses for such labels, the tests' and legacy Keras alike: one, or a dict."""
    entropy = partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True)
    if isinstance(labels, dict):
        return {name: entropy(ignore_class=HIDDEN) if len(y.shape) > 1 else entropy() for name, y in labels.items()}
    return entropy()


def keras_value(losses, labels, outputs) -> Any:
    if isinstance(losses, dict):
        return sum(loss(labels[name], outputs[name]) for name, loss in losses.items())
    return losses(labels, outputs)


def bare_pytorch(
    model: str,
    count: Count,
    wrap: Callable,
    optimize: Callable | None = None,
    size: int = 2,
    channels_last: bool = False,
) -> None:
    """The loop one writes by hand; ``wrap(model)`` makes it parallel, ``optimize(optimizer, model)`` likewise."""
    import torch

    rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    net, batches = prepared("pytorch", model, rank, size, channels_last=channels_last)
    net.train()
    wrapped = wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), fused=True, **SGD)
    if optimize is not None:
        optimizer = optimize(optimizer, net)
    for inputs, labels in cycle(batches):
        optimizer.zero_grad()
        loss = torch_loss(called(wrapped, inputs), labels)
        loss.backward()
        optimizer.step()
        count(lambda loss=loss: mean_over_ranks(float(loss.detach())))


def mean_over_ranks(value: float) -> float:
    """Of a loss, through whatever world this engine has."""
    import torch
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        x = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(x)
        return float(x) / dist.get_world_size()
    if "horovod.torch" in sys.modules and sys.modules["horovod.torch"].is_initialized():
        return float(sys.modules["horovod.torch"].allreduce(torch.tensor(value, dtype=torch.float64), name="loss"))
    return value


def ddp(hook: str = "") -> Callable:
    def wrap(net) -> Any:
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        # Over Gloo the PowerSGD hook's chained transfers of several buckets meet in another order on each rank, and it
        # dies of it: it gets all gradients in one.
        megabytes = 1 << 12 if hook == "powersgd" else None
        wrapped = DistributedDataParallel(net, gradient_as_bucket_view=True, bucket_cap_mb=megabytes)
        if hook == "fp16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return wrapped

    return wrap


def bare_horovod(model: str, count: Count) -> None:
    """As Horovod's documentation tells."""
    import horovod.torch as hvd

    hvd.init()

    def optimize(optimizer, net) -> Any:
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        return hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())

    bare_pytorch(model, count, lambda net: net, optimize)


def script_pytorch(model: str, count: Count) -> None:
    """A loop of the user's own in three lines."""
    import hvd_train.torch as ht

    bare_pytorch(model, count, lambda net: net, lambda optimizer, net: ht.distribute(net, optimizer)[1])


def gathered(model: str, count: Count) -> None:
    """As torch.nn.DataParallel works, among processes: rank 0 gets the outputs of all, takes the loss and sends their
    gradients back."""
    import torch
    import torch.distributed as dist
    from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    net, batches = prepared("pytorch", model, rank, size)
    weights = list(net.train().parameters())
    optimizer = torch.optim.SGD(weights, fused=True, **SGD)

    def joined(x) -> Any:
        parts = [torch.empty_like(x) for _ in range(size)] if rank == 0 else None
        dist.gather(x.contiguous(), parts)
        return torch.cat(parts) if parts else None

    def divided(whole, like) -> Any:
        own = torch.empty_like(like)
        dist.scatter(own, [part.contiguous() for part in whole.chunk(size)] if rank == 0 else None)
        return own

    for inputs, labels in cycle(batches):
        optimizer.zero_grad()
        named = called(net, inputs)
        outputs = named if isinstance(named, dict) else {"": named}
        whole = {name: joined(x.detach()) for name, x in outputs.items()}
        asked = {name: joined(y) for name, y in (labels if isinstance(labels, dict) else {"": labels}).items()}
        loss = torch.zeros(())
        if rank == 0:
            loss = torch_loss({name: x.requires_grad_() for name, x in whole.items()}, asked)
            loss.backward()
        own = [divided(whole[name].grad if rank == 0 else None, x) for name, x in outputs.items()]
        torch.autograd.backward(list(outputs.values()), own)
        gradients = [w.grad for w in weights]
        flat = _flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        for gradient, x in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(x)
        optimizer.step()
        count(lambda loss=loss: mean_over_ranks(size * float(loss.detach())))


def lightning(model: str, count: Count) -> None:
    import lightning as L
    import torch
    from lightning.pytorch.strategies import DDPStrategy

    net, batches = prepared("pytorch", model, int(os.environ["RANK"]), 2)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net.train()  # Lightning leaves it as it is

        def training_step(self, batch, index) -> Any:
            self.loss = torch_loss(self.net(batch[0]), batch[1])
            return self.loss

        def on_train_batch_end(self, *args) -> None:
            count(lambda: mean_over_ranks(float(self.loss.detach())))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), fused=True, **SGD)

    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator:
            return cycle(batches)

    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True),
        max_steps=-1,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Batches(), batch_size=None))


def accelerate(model: str, count: Count) -> None:
    import torch
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
    net, batches = prepared("pytorch", model, accelerator.process_index, 2)
    net.train()
    wrapped, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), fused=True, **SGD))
    for inputs, labels in cycle(batches):
        optimizer.zero_grad()
        loss = torch_loss(wrapped(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        count(lambda loss=loss: mean_over_ranks(float(loss.detach())))


def bare_tensorflow(model: str, count: Count, size: int) -> None:
    """One process by hand: one tf.function, Keras' SGD. Its loss is that of its own samples."""
    import keras
    import tensorflow as tf

    net, batches = prepared("tensorflow", model, int(os.environ.get("COPY", "0")), size)
    optimizer = keras.optimizers.SGD(SGD["lr"], SGD["momentum"])
    optimizer.build(net.trainable_variables)
    losses = keras_loss(keras, batches[0][1])

    @tf.function
    def step(inputs, labels) -> Any:
        with tf.GradientTape() as tape:
            loss = keras_value(losses, labels, net(inputs, training=True))
        optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
        return loss

    for inputs, labels in cycle(batches):
        loss = step(inputs, labels)
        loss.numpy()
        count(lambda loss=loss: float(loss))


def legacy_ops(tf) -> Any:
    """What the zoo takes of ``keras.ops``, which Keras 2 has not."""
    from types import SimpleNamespace

    plain = ("matmul", "transpose", "reshape", "unstack", "cast", "equal", "pad")
    return SimpleNamespace(
        **{name: getattr(tf, name) for name in plain},
        softmax=tf.nn.softmax,
        erf=tf.math.erf,
        take=lambda x, at, axis: tf.gather(x, at, axis=axis),
        swapaxes=lambda x, a, b: tf.linalg.matrix_transpose(x),  # of the last two
        full=lambda shape, value, kind: tf.cast(tf.fill(shape, value), kind),
        triu=lambda x, k: x - tf.linalg.band_part(x, -1, k - 1),
    )


def multi_worker(model: str, count: Count) -> None:
    """MultiWorkerMirroredStrategy with legacy Keras' ``fit`` (it raises under Keras 3)."""
    import tensorflow as tf
    import tf_keras

    sys.modules["keras"] = tf_keras  # the zoo's file builds the same network with Keras 2
    tf_keras.ops = legacy_ops(tf)
    tf_keras.backend.result_type = lambda *kinds: "float32"
    import importlib

    from hvd_train.config import Config
    from hvd_train.core.initialization import first_weight
    from hvd_train.data.catalog import open_data
    from hvd_train.data.loader import Loader
    from hvd_train.protocol import one_or_all

    threads = int(os.environ["OMP_NUM_THREADS"])
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    from tensorflow.python.eager import context

    # Else a worker that awaits its turn is taken for a dead one.
    service = context.context().configure_coordination_service
    context.context().configure_coordination_service = partial(service, heartbeat_timeout_in_ms=10**7)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank, size = strategy.cluster_resolver.task_id, 2
    config = Config.model_validate(settings("tensorflow", model, {}))
    data = open_data(config.data, config.task)
    loader = Loader(data.train, global_batch=config.global_batch(size), rank=rank, size=size, seed=config.seed)
    held.append(data)
    steps = [step.micro_batches[0] for step, _ in zip(loader.epoch(0), range(BATCHES), strict=False)]
    images = {name: np.concatenate([batch.inputs[name] for batch in steps]) for name in data.sample.inputs}
    for name, field in data.sample.inputs.items():
        if field.divisor != 1:  # bytes, of which our front-end makes floats on the device
            images[name] = images[name].astype(np.float32) / np.float32(field.divisor)
    inputs = one_or_all(images)
    labels = one_or_all({name: np.concatenate([batch.labels[name] for batch in steps]) for name in data.sample.labels})

    with strategy.scope():
        options = dict(config.model.options)
        net = importlib.import_module(f"tf_models.{config.model.name}").build(
            data.sample.input_shape, data.sample.num_classes, **options
        )
        zoo = {"gamma": "scale", "beta": "bias"}  # as the zoo's tables name them
        for variable in net.trainable_variables:
            layer, _, own = variable.name.partition(":")[0].rpartition("/")
            variable.assign(first_weight(f"{layer}.{zoo.get(own, own)}", tuple(variable.shape), 0))
        net.compile(
            tf_keras.optimizers.SGD(SGD["lr"], SGD["momentum"]),
            keras_loss(tf_keras, labels),
        )

    class Tick(tf_keras.callbacks.Callback):
        before = 0.0

        def on_train_batch_end(self, index, logs=None) -> None:
            def loss() -> float:  # logs hold the mean since the epoch began
                mean = float(logs["loss"])
                value = mean * (index + 1) - self.before * index
                self.before = mean
                return value / size  # what it reports is added over the workers

            count(loss)

    batch = config.batch_size
    assert batch
    dataset = strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(batch).repeat().prefetch(2)
    )
    net.fit(dataset, epochs=10**6, steps_per_epoch=10**6, verbose=0, callbacks=[Tick()])


def script_keras(model: str, count: Count, steps: int = 1) -> None:
    """A ``model.fit`` of the user's own in two lines, which divides the arrays itself."""
    import hvd_train.keras as hk  # isort: skip
    import keras

    net, batches = prepared("tensorflow", model, 0, 1, EPOCH)  # global batches: every rank has all of them
    inputs, labels = (np.concatenate([batch[i].numpy() for batch in batches]) for i in (0, 1))
    net.compile(
        keras.optimizers.SGD(SGD["lr"], SGD["momentum"]),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=steps,
    )
    hk.distribute(net)

    class Tick(keras.callbacks.Callback):
        means: list = [0.0]  # of the losses since the epoch began

        def on_train_batch_end(self, index, logs=None) -> None:
            if len(self.means) <= LOSSES:
                self.means.append(float(logs["loss"]) * (index + 1))
            count(lambda: self.means[-1] - self.means[-2]) if steps == 1 else [count() for _ in range(steps)]

    net.fit(inputs, labels, batch_size=MODELS[model][2], epochs=10**6, shuffle=False, verbose=0, callbacks=[Tick()])


def bare_pytorch_copy(model: str, count: Count, channels_last: bool) -> None:
    os.environ["RANK"] = os.environ.get("COPY", "0")
    bare_pytorch(model, count, lambda net: net, size=2, channels_last=channels_last)


PYTORCH: dict[str, Callable] = {
    "copies": lambda model, count: bare_pytorch_copy(model, count, False),
    "copies (channels last)": lambda model, count: bare_pytorch_copy(model, count, True),
    "one process": lambda model, count: bare_pytorch(model, count, lambda net: net, size=1),
    "ours (own loop)": script_pytorch,
    "DDP": lambda model, count: bare_pytorch(model, count, ddp()),
    "DDP (channels last)": lambda model, count: bare_pytorch(model, count, ddp(), channels_last=True),
    "DDP fp16": lambda model, count: bare_pytorch(model, count, ddp("fp16")),
    "DDP PowerSGD": lambda model, count: bare_pytorch(model, count, ddp("powersgd")),
    "gathered": gathered,
    "Lightning": lightning,
    "Accelerate": accelerate,
    "Horovod": bare_horovod,
}
TENSORFLOW: dict[str, Callable] = {
    "copies": lambda model, count: bare_tensorflow(model, count, 2),
    "one process": lambda model, count: bare_tensorflow(model, count, 1),
    "ours (step by step)": lambda model, count: ours("tensorflow", model, count, {}, steps=1),
    "ours (model.fit)": script_keras,
    "ours (model.fit by 10)": partial(script_keras, steps=10),
    "MultiWorker": multi_worker,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=("pytorch", "tensorflow"))
    parser.add_argument("engine")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--count", type=Path, required=True)
    parser.add_argument("--exchange", default="{}", help="JSON: the configuration's exchange (ours)")
    given = parser.parse_args()
    rank = next(
        (os.environ[k] for k in ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "RANK", "COPY") if k in os.environ), "0"
    )
    if given.framework == "pytorch":
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    count = Count(given.count.with_name(f"{given.count.name}.{rank}"))
    run = {"pytorch": PYTORCH, "tensorflow": TENSORFLOW}[given.framework].get(given.engine)
    if run is None:
        ours(given.framework, given.model, count, json.loads(given.exchange))
    else:
        run(given.model, count)


if __name__ == "__main__":
    main()
