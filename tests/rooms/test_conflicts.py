"""The table of what does not go together: each row refuses, its cure works, and the guide shows it."""

from __future__ import annotations

import itertools

import pytest
from click.testing import CliRunner

from hvd_train.cli import guide
from hvd_train.cli.main import cli
from hvd_train.config import load_config
from hvd_train.config.conflicts import CONFLICTS, GLOO, ODD_RANKS, Conflict, check_ranks, check_together, sentences
from hvd_train.config.modes import ALLREDUCE, MODES
from hvd_train.errors import ConfigError

# Of features that list no values: some that turn them on, by their words or their key.
VALUES = {
    "your own optimizer": ["a.b:c"],
    "until_epoch of a group": ["[{match: a, freeze: true, until_epoch: 2}]"],
    "lr or weight_decay of a group": ["[{match: a, lr: 1.0}]", "[{match: a, weight_decay: 1.0}]"],
    "mixup or cutmix": ["[mixup]", "[random_horizontal_flip, cutmix]"],
    "a transform other than normalize": ["[mixup]", "[random_vertical_flip]"],
    "batch_size": [6], "global_batch_size": [6], "max_steps": [9], "devices": ["[0]"],
    "exchange.mode": [mode for mode in MODES if mode != ALLREDUCE],
    "exchange.compression": ["fp16", "int8", "topk", "powersgd", "auto"],
    "noise_scale_every_n_steps": [5], "exchange.compression_error_every_n_steps": [5],
    "exchange.outer_feedback": [0.5],
    "optim.sharded": ["true"], "parallel.pipeline": [2], "parallel.devices_per_rank": [2],
    "ema": ["{}"], "swa": ["{epochs: 1}"], "optim.groups": ["[{match: a, freeze: true}]", "[{match: a, lr: 1.0}]"],
    "optim.lr_scaling": ["linear", "sqrt"], "optim.warmup_epochs": [0.5], "optim.warmup_steps": [3],
    "sync_batchnorm": ["true"], "data.lengths": ["{}"], "data.lengths.max_tokens": [512],
    "data.sampling": ["balanced"], "model.init_from": ["a.pt"],
    "model.compile": ["true", "{dynamic: true}"], "model.recompute": ["true", "[a]"],
    "task.class_weights": ["balanced", "[1.0, 2.0]"], "task.step": ["a.b:c"],
}  # fmt: skip
# What a key needs beside it.
BESIDE = {
    "exchange.compression_error_every_n_steps": ["exchange.compression=fp16"],
    "exchange.outer_feedback": ["exchange.mode=outer", "exchange.compression=topk"],
    "optim.lr_scaling": ["optim.lr_reference_batch=9"],
    "optim.name": ["optim.momentum=0.9"],  # muon; other names are given none
}
# Each cure but the usual one: the ways that it names, as settings.
CURES = {
    "leave one of them out": [],
    "leave the warm-up out, or set optim.schedule: cosine": [
        ["optim.warmup_epochs=0.0", "optim.warmup_steps=0"],
        ["optim.schedule=cosine"],
    ],
    "set exchange.compression": [["exchange.compression=int8"]],
    "set precision: bf16-mixed, or exchange.mode: allreduce": [["precision=bf16-mixed"], ["exchange.mode=allreduce"]],
    "start with mpirun, or set exchange.op: average": [["exchange.op=average"]],
    "start with mpirun, or set exchange.mode: local_sgd": [["exchange.mode=local_sgd"]],
    "start 2, 4, 8, ... ranks, or set exchange.op: average": [["exchange.op=average"]],
    "give max_epochs": [["max_steps=null", "max_epochs=3"]],
    "name a compression": [["exchange.compression=int8"]],
    "take data.sampling: balanced instead": [["task.class_weights=null", "data.sampling=balanced"]],
}
WORLDS = {GLOO: ((2, False), (2, True)), ODD_RANKS: ((6, True), (4, True))}  # (ranks, MPI): refused, accepted
IN_CONFIG = [row for row in CONFLICTS if row.one.key and row.other.key]
OF_RANKS = [row for row in CONFLICTS if row.other in WORLDS]
IN_SCRIPTS = [row for row in CONFLICTS if row not in (*IN_CONFIG, *OF_RANKS)]


def named(row: Conflict) -> str:
    return f"{row.one} with {row.other}"


def settings(feature) -> list[list[str]]:
    values = feature.values or VALUES[feature.words or feature.key]
    beside = BESIDE.get(feature.key, []) if feature.key != "optim.name" or "muon" in values else []
    return [[f"{feature.key}={value}", *beside] for value in values]


@pytest.mark.parametrize("row", IN_CONFIG, ids=named)
def test_the_configuration_refuses_a_row_and_takes_its_cure(row):
    for one, other in itertools.product(settings(row.one), settings(row.other)):
        with pytest.raises(ConfigError) as caught:
            load_config(None, [*one, *other])
        lines = [line for line in str(caught.value).splitlines() if f"because {row.why}; {row.cure}" in line]
        assert len(lines) == 1 and f": {row.one.key}: " in lines[0] and caught.value.exit_code == 2, caught.value
        assert not row.other.values or f"go with {other[0].replace('=', ': ')}, because" in lines[0]
        cures = [[*one, *other, *cure] for cure in CURES[row.cure]]
        for cured in cures or [one, other]:
            load_config(None, cured)


@pytest.mark.parametrize("row", OF_RANKS, ids=named)
def test_ranks_that_do_not_go_with_it_are_refused(row):
    refused, accepted = WORLDS[row.other]
    for one in settings(row.one):
        with pytest.raises(ConfigError, match=rf"^{row.one.key}: \w+ does not go with .*; {row.cure}$") as caught:
            check_ranks(load_config(None, one), *refused)
        assert caught.value.common and row.why in caught.value.what
        check_ranks(load_config(None, one), *accepted)
        check_ranks(load_config(None, one), 1, False)
        for cure in CURES[row.cure]:
            check_ranks(load_config(None, [*one, *cure]), *refused)


@pytest.mark.parametrize("row", IN_SCRIPTS, ids=named)
def test_options_of_a_script_are_refused(row):
    with pytest.raises(ConfigError, match=rf"^one=1 does not go with mode='x', because {row.why}; ht.f; {row.cure}$"):
        check_together({row.one: "one=1", row.other: "mode='x'"}, "ht.f")
    for used in ({row.one: "one=1", row.other: ""}, {row.other: "mode='x'"}):
        check_together(used, "ht.f")


METER = "exchange.compression_error_every_n_steps=3"
MANY = ["exchange.compression=topk", "gradient_clip_val=1.0", "accumulate_grad_batches=2", "optim.plateau={}"]
FREEZE, LATER = "optim.groups=[{match: a, freeze: true}]", "optim.groups=[{match: a, freeze: true, until_epoch: 2}]"
RATE = "optim.groups=[{match: a, lr: 1.0, weight_decay: 0.1}]"
LOCKSTEP = ["sync_batchnorm=true", "on_nonfinite=skip", "precision=16-mixed"]
SCALED = ["optim.lr_scaling=linear", "optim.lr_reference_batch=9"]
FREE, MUON = "optim.name=schedule_free_adamw", ["optim.name=muon", "optim.momentum=0.9"]
NORMALIZE = "data.transforms=[{name: normalize, mean: 0.5, std: 0.5}]"
ALLOWED = [
    ["optim.sharded=true", *MANY, *LOCKSTEP, *SCALED, "ema={}", RATE, "data.lengths={}", "model.init_from=a.pt"],
    ["optim.sharded=true", "swa={epochs: 1}", "on_nonfinite=rollback", FREEZE, "exchange.compression=auto"],
    ["optim.sharded=true", FREE, METER, *MANY],
    ["exchange.mode=delayed", *MANY, *LOCKSTEP, *SCALED, "ema={}", FREEZE, METER],
    ["exchange.mode=delayed", FREE, "exchange.compression=auto"],
    ["exchange.mode=delayed", "swa={epochs: 1}", *MUON, RATE],
    ["exchange.op=adasum", *LOCKSTEP, *SCALED, "ema={}", FREEZE],
    *([f"exchange.mode={mode}", *LOCKSTEP, *SCALED, RATE] for mode in ("partial", "local_sgd", "outer", "streaming")),
    ["exchange.mode=outer", *MANY, *MUON, "exchange.outer_feedback=0.5", FREEZE, "data.lengths={}"],
    ["exchange.mode=outer", "exchange.compression=auto", "optim.name=a.b:c"],
    ["exchange.mode=async", *SCALED, *MUON, RATE, "precision=bf16-mixed", "max_steps=9"],
    ["exchange.mode=parameter_server", "precision=64", FREEZE],
    ["parallel.pipeline=2", *MANY, *LOCKSTEP, *SCALED, *MUON, "max_steps=9"],
    ["parallel.pipeline=2", "on_nonfinite=rollback", NORMALIZE, "exchange.compression=int8"],
    ["parallel.devices_per_rank=2", *MANY, *LOCKSTEP, "ema={}", "model.init_from=a.pt", "data.lengths={}"],
    ["parallel.devices_per_rank=2", FREE, "exchange.compression=auto", METER],
    *([f"exchange.mode={mode}", "parallel.devices_per_rank=2"] for mode in MODES),
    ["parallel.devices_per_rank=2", "exchange.op=adasum", "swa={epochs: 1}"],
    [LATER, *MANY, "on_nonfinite=skip", "precision=16-mixed", "data.lengths={}", *MUON],
    ["optim.name=a.b:c", FREEZE, "ema={}", *MANY, *LOCKSTEP, *SCALED],
    ["data.lengths.max_tokens=600", NORMALIZE, *MANY, *LOCKSTEP, "ema={}"],
    ["data.lengths.max_tokens=600", "exchange.mode=local_sgd", "optim.sharded=auto", "noise_scale_every_n_steps=0"],
    ["data.lengths={}", NORMALIZE, "data.sampling=balanced", "task.class_weights=[1.0, 2.0]"],
    ["task.class_weights=balanced", "data.transforms=[random_horizontal_flip]"],
    ["data.transforms=[mixup, cutmix]", "data.sampling=balanced", "data.target=inputs"],
    ["optim.schedule=cosine", "optim.warmup_steps=3", "max_steps=9", "max_epochs=2", "devices=[0]", "device=cuda"],
]


@pytest.mark.parametrize("keys", ALLOWED, ids=" ".join)
def test_what_goes_together_is_taken(keys):
    load_config(None, keys)


def test_the_guide_shows_the_table():
    rows: dict[tuple, list[str]] = {}
    for row in CONFLICTS:
        cure = "" if row.cure == Conflict.cure else row.cure
        rows.setdefault((row.other, row.why, cure), []).append(cell(row.one))
    table = ["| this | does not go with | because | cure |", "|---|---|---|---|"]
    table += [f"| {', '.join(ones)} | {cell(other)} | {why} | {cure} |" for (other, why, cure), ones in rows.items()]
    text = "\n".join(table).replace("  |", " |") + "\n"
    assert guide.page("parallel").endswith(text), f"the page's table is to be\n{text}"


def cell(feature) -> str:
    return feature.words or f"`{feature}`"


def test_a_key_is_explained_with_what_it_does_not_go_with():
    told = sentences("optim.sharded")
    assert len(sentences("")) == len(CONFLICTS) and len(told) == 8
    assert any(text.startswith("optim.sharded does not go with parallel.pipeline, because each rank") for text in told)
    assert sentences("ema") and not sentences("em") and len(sentences("optim")) > len(told)
    assert told[0] in CliRunner().invoke(cli, ["config", "--explain", "optim.sharded"]).stdout.splitlines()
