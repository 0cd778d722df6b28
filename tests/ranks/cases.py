"""The cases that every launched world runs."""

from __future__ import annotations

from pathlib import Path

MLP = {
    "model.name": "mlp",
    "model.hidden": [24],
    "data.name": "digits",
    "global_batch_size": 50,
    "precision": 64,
    "optim.lr": 0.05,
    "tensorboard": False,
}
CNN = MLP | {"model": {"name": "cnn", "hidden": 50}, "data.image_size": 28, "optim.momentum": 0.9, "optim.lr": 0.02}
CNN |= {"global_batch_size": 31}  # uneven shares for 2 to 4 ranks, and the second epoch begins at step 48
CNN.pop("model.name")
CNN.pop("model.hidden")
SGD = {"optim.momentum": 0.9, "optim.weight_decay": 1e-3, "optim.warmup_epochs": 0.5, "max_steps": 60, "max_epochs": 3}
ADAM = SGD | {"optim.momentum": 0, "optim.lr": 0.002}
# name: configuration of a training whose final weights must not depend on the world, the launcher or the framework
TRAININGS = {
    "cnn": CNN | {"max_steps": 50, "max_epochs": 3, "optim.weight_decay": 1e-4, "optim.warmup_epochs": 1},
    "sgd": MLP | SGD | {"optim.schedule": "cosine"},
    "accumulate": MLP | SGD | {"accumulate_grad_batches": 3, "global_batch_size": 47},
}
LAMB = MLP | ADAM | {"optim.name": "lamb", "optim.weight_decay": 0.05, "optim.schedule": "cosine"}
# Gradients travel while the next steps compute; N ranks are one all the same.
LATE = {"mode": "delayed", "delay": 2, "compensation": 0.1}
TRAININGS["delayed-cnn"] = TRAININGS["cnn"] | {"exchange": LATE, "accumulate_grad_batches": 2}
TRAININGS["delayed-lamb"] = LAMB | {"exchange": LATE, "on_nonfinite": "skip"}
# Rates and decays of their own, frozen weights, weights that are trained from the second epoch on.
GROUPS = [{"match": "fc2.*", "lr": 0.004}, {"match": "*.bias", "weight_decay": 0}]
FROZEN = [*GROUPS, {"match": "fc2.*", "freeze": True}]
LATER = [*GROUPS, {"match": "fc1.*", "freeze": True, "until_epoch": 1}]
BY_VALUE = {"optim.name": "adamw", "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
TRAININGS["groups-later"] = MLP | ADAM | BY_VALUE | {"accumulate_grad_batches": 2, "optim.groups": LATER}
# The optimizer divided over the ranks moves the weights as the whole one does, which one rank runs: how an optimizer
# moves them does not depend on who made the gradient.
WHOLE = {
    "nesterov": MLP | SGD | {"optim.nesterov": True, "gradient_clip_val": 0.5},
    "adam": MLP | ADAM | {"optim.name": "adam", "optim.schedule": "exponential", "optim.gamma": 0.5},
    "lamb": LAMB,
    "groups": LAMB | {"model.hidden": [24, 12], "optim.groups": FROZEN},
}
# Batches of 479 leave one sample for the last step of an epoch, so all ranks but the first have an empty part in it.
NORM = MLP | {"global_batch_size": 479, "optim.momentum": 0.9, "optim.weight_decay": 1e-3, "max_epochs": 3}
NORM.pop("model.hidden")
OWN = {"pytorch": "tests.own_models:pytorch_norm", "tensorflow": "tests.own_models:keras_norm"}
TRAININGS["norm"] = NORM | {"sync_batchnorm": True}
# The mean of epochs 3 and 4, and statistics of all samples under it.
SWA = NORM | {"sync_batchnorm": True, "swa": {"epochs": 2}, "max_epochs": 4}
WHOLE["norm-swa"] = SWA
SHARDED = {name: f"{name}-sharded" for name in WHOLE}
TRAININGS |= {SHARDED[name]: keys | {"optim.sharded": True} for name, keys in WHOLE.items()}
# Micro-batches over all ranks hold the same samples for every world size, so their statistics are the same.
TRAININGS["norm-parts"] = NORM | {"sync_batchnorm": True, "global_batch_size": 101, "accumulate_grad_batches": 3}
# Of running statistics that stay: no rank's batches matter.
FIXED = [{"match": "norm.*", "freeze": True, "fix_statistics": True}]
TRAININGS["norm-fixed"] = NORM | {"optim.groups": FIXED, "max_steps": 8}
RESNET = {"model": {"name": "resnet", "width": 4, "blocks": [1, 1]}, "data.name": "digits", "sync_batchnorm": True}
TRAININGS["resnet"] = NORM | RESNET | {"global_batch_size": 50, "optim.lr": 0.02, "max_steps": 32}
TRAININGS["resnet"].pop("model.name")
# Blocks that backward runs again, in which ranks join statistics.
TRAININGS["resnet-again"] = TRAININGS["resnet"] | {
    "model": {"name": "resnet", "width": 4, "blocks": [2, 1], "recompute": True}
}
GPT = {
    "model": {"name": "gpt", "width": 16, "depth": 2, "heads": 2},
    "data": {"name": "text", "path": "LICENSE", "sequence_length": 16},
    "global_batch_size": 50,
    "precision": 64,
    "max_steps": 20,
    "optim": {"name": "adamw", "lr": 0.003, "weight_decay": 0.01, "warmup_steps": 10},
    "tensorboard": False,
}
TRAININGS["gpt"] = GPT
# Labels tell how much counts: words of which few are to be guessed, with another loss beside them; own loss and metric.
OWN_TASK = {"precision": 64, "global_batch_size": 47, "max_steps": 20, "optim.lr": 0.5, "tensorboard": False}
OWN_TASK |= {"optim.momentum": 0.9, "optim.schedule": "cosine", "max_epochs": 9}
TRAININGS["masked"] = OWN_TASK | {
    "model": {"name": "gpt", "width": 8, "depth": 1, "heads": 2},
    "data.name": "tests.own_models:masked_only",
    "accumulate_grad_batches": 3,
    "optim.lr": 0.05,
}
TRAININGS["words"] = OWN_TASK | {
    "data.name": "tests.own_models:masked_words",
    "task": {"loss": {"words": "cross_entropy", "next": "cross_entropy"}, "metrics": {"words": ["accuracy", "f1"]}},
    "checkpoint.monitor": "val_words_accuracy",
    "checkpoint.mode": "max",
}
TRAININGS["curves"] = OWN_TASK | {
    "data.name": "tests.own_models:curves",
    "model.units": 3,
    "optim.lr": 0.05,
    "task": {"loss": "tests.own_models:weighted", "metrics": ["tests.own_models:weighted", "mse", "r2"]},
}
# Images as bytes, varied anew in each epoch; the third begins in the middle of the run. Rare classes are drawn as often
# as others, and samples are mixed with others of any rank.
TRAININGS["varied"] = OWN_TASK | {
    "model": {"name": "mlp", "hidden": [24]},
    "data.name": "tests.own_models:uneven_digits",
    "data.sampling": "balanced",
    "data.workers": 2,
    "data.transforms": [
        "random_horizontal_flip",
        {"name": "random_crop", "padding": 2},
        {"name": "tests.own_models:noisy", "options": {"most": 40}},
        {"name": "mixup", "alpha": 0.4},
        {"name": "cutmix", "p": 0.7},
        {"name": "normalize", "mean": 0.3, "std": 0.35},
    ],
    "global_batch_size": 101,
    "accumulate_grad_batches": 2,
    "optim.lr": 0.05,
}
# Samples of different lengths: batches are as long as the longest of all ranks, and padding counts nowhere.
TRAININGS["strokes"] = OWN_TASK | {
    "data": {"name": "tests.own_models:fetched_strokes", "lengths": {"max_length": 24, "block": 32}},
    "task.metrics": ["accuracy", "f1_macro"],
    "accumulate_grad_batches": 2,
}
TRAININGS["strokes"]["data"] |= {"sampling": "balanced"}
TRAININGS["strokes-places"] = OWN_TASK | {
    "data": {
        "name": "tests.own_models:strokes_at_places",
        "lengths": {"max_length": 24, "block": 47, "buckets": [8, 12]},
    },
    "task.metrics": ["accuracy", "f1"],
}
# Batches of as many places, whose samples are of one bucket; the third epoch begins in the middle of the run.
TRAININGS["strokes-tokens"] = OWN_TASK | {
    "data": {
        "name": "tests.own_models:strokes_at_places",
        "lengths": {"max_length": 24, "max_tokens": 1900, "buckets": [8, 12]},
    },
    "accumulate_grad_batches": 2,
    "task.metrics": ["accuracy", "f1"],
}
TRAININGS["strokes-tokens"].pop("global_batch_size")
KINDS = {"pytorch": "torch", "tensorflow": "keras"}
OWN_MODELS = {
    "strokes": {"pytorch": "tests.own_models:pytorch_strokes", "tensorflow": "tests.own_models:keras_strokes"},
    "words": {"pytorch": "tests.own_models:pytorch_words", "tensorflow": "tests.own_models:keras_words"},
    "curves": {"pytorch": "tests.own_models:pytorch_units", "tensorflow": "tests.own_models:keras_units"},
}
OWN_OPTIMIZERS = {name: f"tests.own_optimizers:{kind}_adadelta" for name, kind in KINDS.items()}
DROPOUT = GPT | {"model": GPT["model"] | {"dropout": 0.2, "depth": 1}, "max_steps": 8}
# Each rank's own statistics: the result must depend on the world.
APART = {"norm-apart": NORM}
COMPRESSED = {
    "fp16": {"compression": "fp16"},
    "bf16": {"compression": "bf16"},
    "int8": {"compression": "int8"},
    "int4": {"compression": "int4"},
    "topk": {"compression": "topk", "ratio": 0.05},
    "threshold": {"compression": "threshold", "threshold": 0.002},
    "powersgd": {"compression": "powersgd", "rank": 2},
}
# A compressor of two phases among the other things between gradients and weights. Parts of 64 x 73 entries are uneven.
TWO_PHASE = {
    "int8-parts": {
        "model.hidden": [73],
        "global_batch_size": 47,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "exchange": {"compression": "int8"},
    },
    "int4-sharded": {"optim.sharded": True, "gradient_clip_val": 0.5, "exchange": {"compression": "int4"}},
}
# Weights that go apart and come together.
LOOSE = {
    "partial": {"mode": "partial", "partial_fraction": 0.3},
    "local": {"mode": "local_sgd", "local_steps": 3},
    "outer": {"mode": "outer", "outer_steps": 3},
    "streaming": {"mode": "streaming", "outer_steps": 8, "fragments": 2, "stream_delay": 2},
    "outer-topk": {"mode": "outer", "outer_steps": 2, "outer_start": 2, "compression": "topk", "ratio": 0.05},
}
# Gradients that are under way when a run is interrupted, with what compressors leave out of them.
DELAYED = {"late": LATE, "late-topk": LATE | COMPRESSED["topk"]}
# Settings under which nothing is left out: the result must be that of plain gradients.
FULL = {
    "full-topk": {"compression": "topk", "ratio": 1},
    "full-powersgd": {"compression": "powersgd", "rank": 1000},
    "full-local": {"mode": "local_sgd", "local_steps": 1},
    "full-outer": {"mode": "outer", "outer_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0},
}
MIXED = {
    "16-mixed": {"precision": "16-mixed"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "16-mixed-topk": {"precision": "16-mixed", "exchange": {"compression": "topk", "ratio": 0.2}},
}
# One layer is large enough to be compressed; 48 samples are equal shares for 1 to 4 ranks.
SHORT = MLP | {"model.hidden": [96], "global_batch_size": 48, "max_steps": 8}
NOISE = {"noise_scale_every_n_steps": 1, "log_every_n_steps": 2}
# Slots differ between ranks whose weights go apart, and each must get its slots and its weights again.
MOMENTUM = {name: {"optim.momentum": 0.9} for name in LOOSE}
CHANGED = {
    "to-16-mixed": ({"precision": 64}, {"precision": "16-mixed"}),
    "to-32": ({"precision": 64}, {"precision": 32, "exchange": COMPRESSED["topk"]}),
    "from-delayed": ({"exchange": LATE}, {"exchange": {"compression": "none"}}),
}
# A mean of the weights is what is evaluated and saved; a cut after step 5 is between two additions.
AVERAGED = {
    "ema-sharded": {"optim.name": "adam", "optim.sharded": True, "ema": {"decay": 0.8, "every_n_steps": 2}},
    "free-sharded": {"optim.name": "schedule_free_sgd", "optim.sharded": True},
}
# Forward and backward compiled, with uneven shares of micro-batches; the last batch of an epoch is smaller.
COMPILED = {
    "compiled": {
        "model.compile": True,
        "global_batch_size": 479,
        "accumulate_grad_batches": 2,
        "max_epochs": 3,
        "ema": {"decay": 0.8},
    }
}
AVERAGED |= COMPILED
TRAININGS |= {name: SHORT | keys for name, keys in AVERAGED.items()}
# Weights that are trained from the fourth step on: residuals of the others go on. Left then and later.
LATER_CUT = {
    "optim.momentum": 0.9,
    "optim.groups": [{"match": "fc2.*", "freeze": True, "until_epoch": 1}],
    "limit_train_batches": 3,
    "exchange": COMPRESSED["topk"],
}
LATER_STEPS = (3, 5)
RESHARDED = {"to-sharded": (False, True), "from-sharded": (True, False)}
ADAM_SHORT = SHORT | {"optim.name": "adam", "optim.lr": 0.01}
CNN_CUT = CNN | {"max_steps": 12}
# Layers used or not as the samples have it, on each rank in another way; tied, frozen and sparse ones among them.
CHANGING = MLP | {"model.name": "tests.own_models:changing", "max_steps": 20}
CHANGING.pop("model.hidden")


# Interrupted within an epoch, and gone on with: each rank's residual, weights and slots must come back to it.
RESUMED = {name: SHORT | {"exchange": COMPRESSED[name]} for name in ("topk", "powersgd")}
RESUMED |= {name: SHORT | {"exchange": x} | MOMENTUM.get(name, {}) for name, x in (LOOSE | DELAYED).items()}
RESUMED |= {name: SHORT | keys for name, keys in (TWO_PHASE | AVERAGED).items()}
RESUMED |= {"dropout": DROPOUT}
RESUMED["strokes-tokens-cut"] = TRAININGS["strokes-tokens"] | {"optim.schedule": "constant", "max_steps": 8}

# What worlds of three ranks and more run, up to the largest of a framework: where shares of other sizes could show.
# TensorFlow traces each case on each rank.
LARGEST = {"pytorch": 4, "tensorflow": 3}
EVERY_SIZE = ["cnn", "sgd", "accumulate", "norm", "norm-parts", "masked", *APART]
EVERY_SIZE += ["evaluation-areas", "verbs", "shards", "shards-traced", "adasum-verb", "two-phase", "two-phase-traced"]
EVERY_SIZE += [f"disagree-{name}" for name in ("model", "seed", "data", "unbuildable")]


def shards(framework: str, size: int) -> list[dict]:
    """Tensors to divide over the ranks, up to 64 MiB, eagerly and in a graph."""
    small = [(kind, n) for kind in ("float16", "float32", "float64") for n in (0, 1, 7, 1000, (1 << 18) + 3)]
    large = [("float32", 16 << 20)] if size < 3 else []
    made = [{"name": "shards", "kind": "shards", "tensors": [*small, *large], "traced": False}]
    return made + [{"name": "shards-traced", "kind": "shards", "tensors": small, "traced": True}]


def cases(framework: str, size: int, folder: Path) -> list[dict]:
    """The cases of a world; those of several kinds are in an order in which each finds the checkpoint that it needs."""
    made: list[dict] = []

    def add(name: str, config: dict | None = None, kind: str = "train", **more) -> None:
        if config:
            if name.startswith("norm"):
                config = config | {"model.name": OWN[framework]}
            for begin, models in OWN_MODELS.items():
                if name.startswith(begin):
                    config = config | {"model.name": models[framework]}
            config = {"framework": framework, "run_dir": str(folder / name)} | config
        made.append({"name": name, "kind": kind, "config": config, **more})

    def add_cut(name: str, first: dict, rest: dict, **more) -> None:
        """A run that is left, and gone on with."""
        there = {"run_dir": str(folder / f"{name}-cut")}
        add(f"{name}-first", first | there)
        add(f"{name}-rest", rest | there, resume="last", **more)

    of_one_rank = WHOLE if size == 1 else {}
    for name, keys in (TRAININGS | APART | of_one_rank).items():
        add(name, keys)
    for name, exchange in (COMPRESSED | FULL).items() if size > 1 else ():
        add(name, SHORT | {"exchange": exchange})
    for name, keys in RESUMED.items():
        if name not in (one["name"] for one in made):
            add(name, keys)
        add_cut(name, keys | {"max_steps": 5}, keys)
    # Gone on with another precision or exchange: nothing of the one before may stay.
    for name, (before, after) in CHANGED.items():
        allow = [key.partition(".")[0] for key in before]
        add_cut(name, SHORT | after | before | {"max_steps": 5}, SHORT | after, allow=allow)
    for name, (before, after) in RESHARDED.items():
        first = ADAM_SHORT | {"optim.sharded": before, "max_steps": 5}
        add_cut(name, first, ADAM_SHORT | {"optim.sharded": after})
    # A run that has ended, with a mean, goes on as if it had not.
    add_cut("norm-swa-sharded", SWA | {"optim.sharded": True, "max_epochs": 2}, SWA | {"optim.sharded": True})
    own = SHORT | {"optim.name": OWN_OPTIMIZERS[framework], "optim.lr": 0.5}
    add("own-optimizer", own)
    add_cut("own-optimizer", own | {"max_steps": 5}, own)
    later = SHORT | LATER_CUT
    add("later", later)
    for steps in LATER_STEPS:
        there = {"run_dir": str(folder / "later-cut"), "max_steps": steps}
        add(f"later-{steps}", later | there, resume=None if steps == LATER_STEPS[0] else "last")
    add("later-rest", later | {"run_dir": str(folder / "later-cut")}, resume="last")
    for name, keys in MIXED.items():
        add(name, SHORT | keys)
    add("late-mixed", SHORT | {"precision": "16-mixed", "exchange": DELAYED["late-topk"]})
    add("adam-short", ADAM_SHORT)
    add("plain", SHORT)
    add("overflow", SHORT | {"precision": "16-mixed"}, "overflow")
    parts = {"accumulate_grad_batches": 2} if size == 1 else {}
    add("noise", SHORT | NOISE | parts)
    if framework == "tensorflow":
        add("norm-calls", NORM | {"sync_batchnorm": True, "steps_per_execution": 4}, "calls")
    if size == 1:
        return made

    add("auto", SHORT | {"exchange.compression": "auto"})
    add("noise-sharded", SHORT | NOISE | {"optim.sharded": True})
    add("noise-masked", TRAININGS["masked"] | NOISE)
    add("watched", SHORT | {"exchange": COMPRESSED["topk"] | {"compression_error_every_n_steps": 3}})
    if framework == "tensorflow":
        for steps in (1, 4):
            add(f"steps-{steps}", TRAININGS["sgd"] | {"exchange": COMPRESSED["topk"], "steps_per_execution": steps})
        add("words-calls", TRAININGS["words"] | {"steps_per_execution": 4}, apart=True)
    else:
        for prefix, keys in (("", CNN_CUT), ("changing-", CHANGING)):
            add(f"{prefix}overlap", keys | {"exchange.overlap": True})
            add(f"{prefix}no-overlap", keys)
    model = f"tests.own_models:{'pytorch' if framework == 'pytorch' else 'keras'}_one_output"
    keys = {"model.name": model, "data.name": "tests.own_models:odd_digits", "global_batch_size": 30, "precision": 64}
    keys |= {"task": {"loss": "bce", "metrics": ["auc", "average_precision", "accuracy", "f1"]}, "tensorboard": False}
    add("evaluation-areas", keys, "evaluation")
    add("adasum-verb", SHORT | {"exchange.op": "adasum"}, "adasum")
    made += shards(framework, size)[: 1 + (framework == "tensorflow")]
    for traced in (False, True)[: 1 + (framework == "tensorflow")]:
        add("two-phase-traced" if traced else "two-phase", kind="two_phase", traced=traced)
    add("verbs", kind="verbs")
    differences = {
        "model": {"model.hidden": [25]},
        "seed": {"seed": 7},
        "data": {"data.image_size": 9},
        "unbuildable": {"model.name": "nothing"},
    }
    for name, differs in differences.items():
        add(f"disagree-{name}", MLP, "disagree", differs=differs)
    return [one for one in made if size < 3 or one["name"] in EVERY_SIZE]
