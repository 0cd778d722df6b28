"""The configuration: what is taken, and that every mistake is one line with its place, its value and a way out."""

from __future__ import annotations

import itertools
import time

import pytest
import yaml

from hvd_train.config import Config, changed, digest, explain, load_config, resolved_yaml
from hvd_train.config.reading import MAX_BYTES
from hvd_train.config.writing import free_keys
from hvd_train.errors import ConfigError


def lines(*sets, path=None, **flags):
    with pytest.raises(ConfigError) as caught:
        load_config(path, sets, **flags)
    return str(caught.value).split("\n")


def write(folder, text):
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def test_defaults_train():
    config = load_config()
    assert (config.framework, config.batch_size, config.max_epochs) == ("pytorch", 32, 1)
    assert load_config(None, ["max_steps=3"]).max_epochs is None
    assert load_config(None, ["global_batch_size=3"]).batch_size is None


def test_file_then_set_then_flag(tmp_path):
    path = write(tmp_path, "seed: 1\noptim: {lr: 1e-3, momentum: 0.9}\nmodel: {name: cnn, hidden: 7}\n")
    config = load_config(path, ["seed=2", "optim.lr=0.5"], seed=3, run_dir=None)
    assert (config.seed, config.optim.lr, config.optim.momentum) == (3, 0.5, 0.9)
    assert config.model.options == {"hidden": 7} and load_config(path, seed=0).seed == 0


@pytest.mark.parametrize("text", ["1e-5", "1.0e-5", "1E-5", "0.00001", ".1e-4"])
def test_numbers_as_people_write_them(text):
    assert load_config(None, [f"optim.weight_decay={text}"]).optim.weight_decay == pytest.approx(1e-5)


@pytest.mark.parametrize(("given", "bits"), [("32", "32"), ("64", "64"), ("64-true", "64")])
def test_precision_as_number_or_word(given, bits):
    assert load_config(None, [f"precision={given}"]).precision == bits


def test_resolved_yaml_loads_back_equal(tmp_path):
    config = load_config(None, ["optim.name=adam", "model.hidden=[3,4]", "early_stopping.patience=2", "precision=64"])
    assert load_config(write(tmp_path, resolved_yaml(config))) == config


def test_words_that_read_as_numbers_load_back_as_words(tmp_path):
    """A class called 1e3 came back as 1000.0, and config.yaml of the run was refused."""
    names = ["1e3", ".5E-2", "01", "0x1F", "1_0", "12:30", "no", "null", "~", "1.5", "7"]
    config = load_config(base={"data": {"classes": names}})
    assert load_config(write(tmp_path, resolved_yaml(config))).data.classes == names


def test_frozen():
    with pytest.raises(Exception, match="frozen"):
        load_config().seed = 3


def test_every_key_is_explained():
    for key, kind, default, meaning in explain():
        assert meaning, key
        assert kind and default is not None, key
        assert len(meaning) < 110 and not meaning.endswith("."), key


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("bacth_size=3", ["bacth_size: unknown key; did you mean 'batch_size'?"]),
        ("optim.momentm=3", ["did you mean 'optim.momentum'?"]),
        ("lr=3", ["did you mean 'optim.lr'?"]),
        ("xyz.abc=3", ["xyz: unknown key", "--explain"]),
        ("framework=torch", ["'pytorch', 'tensorflow' or 'jax'", 'not "torch"', "did you mean 'pytorch'?"]),
        ("threads=foo", ["a whole number or 'auto'"]),
        ("threads=0", ["> 0"]),
        ("seed=1.5", ["a whole number", "1.5"]),
        ("seed=true", ["a whole number"]),
        ("seed=-1", [">= 0"]),
        ("batch_size=0", ["> 0"]),
        ("batch_size='3'", ["a whole number"]),
        ("optim.lr=0", ["> 0"]),
        ("optim.lr=.nan", ["optim.lr"]),
        ("optim.lr=.inf", ["finite"]),
        ("optim.momentum=1", ["< 1"]),
        ("optim.betas=[0.9]", ["at least 2"]),
        ("optim.betas=[0.9,1]", ["optim.betas.1", "< 1"]),
        ("optim=3", ["section"]),
        ("model=cnn", ["section", '"cnn"', "did you mean 'model.name'?"]),
        ("exchange=fp16", ["did you mean 'exchange.compression'?"]),
        ("optim.name=adamW", ["did you mean 'adamw'?"]),
        ("optim.name=SGD", ["did you mean 'sgd'?"]),
        ("framework=keras", ["did you mean 'tensorflow'?"]),
        ("device=gpu", ["did you mean 'cuda'?"]),
        ("precision=fp16", ["did you mean '16-mixed'?"]),
        ("task.metrics=[acc]", ["did you mean 'accuracy'?"]),
        ("task.metrics=accuracy", ["did you mean '[accuracy]'?"]),
        ("data.batch_size=3", ["did you mean 'batch_size'?"]),
        ("BATCH_SIZE=3", ["did you mean 'batch_size'?"]),
        ("learning_rate=3", ["did you mean 'optim.lr'?"]),
        ("num_workers=3", ["did you mean 'data.workers'?"]),
        ("data.classes=3", ["a list of words"]),
        ("model.name=3", ["text"]),
        ("data.val_fraction=1", ["< 1"]),
        ("optim.nesterov=true", ["optim.nesterov", "momentum"]),
        ("optim.lr_scaling=linear", ["lr_reference_batch"]),
        ("precision=16", ["'32', '64', '16-mixed' or 'bf16-mixed'"]),
        ("exchange.compression=zip", ["'none'"]),
        ("exchange.ratio=0", ["> 0"]),
        ("exchange.partial_fraction=1.5", ["<= 1"]),
        ("exchange.local_steps=4", ["belongs to mode: local_sgd, not allreduce"]),
        ("exchange.fragments=4", ["belongs to mode: streaming, not allreduce"]),
        ("optim.gamma=0.5", ["belongs to schedule: step or multistep or exponential, not constant"]),
        ("exchange.delay=2", ["belongs to mode: delayed, not allreduce"]),
        ("exchange.compensation=0.1", ["belongs to mode: delayed, not allreduce"]),
        ("exchange.async_steps=4", ["belongs to mode: async, not allreduce"]),
        ("exchange.async_pull=1.5", ["<= 1"]),
        ("exchange.outer_steps=0", ["> 0"]),
        ("exchange.outer_momentum=1", ["< 1"]),
        ("ema.decay=1", ["< 1"]),
        ("ema.every_n_steps=0", ["> 0"]),
        ("exchange.overlap=maybe", ["exchange.overlap", "'auto'"]),
        ("run_dir=' '", ["run_dir", "empty"]),
        ("foo", ["key=value"]),
        ("=3", ["key=value"]),
        ("seed={", ["not valid YAML"]),
        ("data.options=[1", ["not valid YAML"]),
    ],
)
def test_a_mistake_on_the_command_line(setting, words):
    (line,) = lines(setting)
    assert line.startswith(f"--set {setting}: ")
    assert all(word in line for word in words), line


def test_combinations():
    (line,) = lines("optim.name=adam", "optim.momentum=0.9")
    assert "sgd" in line
    (line,) = lines("optim.name=lamb", "optim.momentum=0.9")
    assert "lars" in line
    (line,) = lines("optim.name=lars", "optim.momentum=0.9", "optim.nesterov=true")
    assert "optim.nesterov" in line
    (line,) = lines("optim.name=lamb", "optim.trust_coefficient=0.1")
    assert "optim.trust_coefficient: belongs to name: lars, not lamb" in line
    (line,) = lines("optim.betas=[0.5,0.6]")  # sgd went on without them
    assert "optim.betas: belongs to name: adam or " in line and line.endswith("not sgd")
    (line,) = lines("optim.name=lion", "optim.eps=1e-6")
    assert "optim.eps: belongs to name: adam or " in line and line.endswith("not lion")
    (line,) = lines("exchange.compression=fp16", "exchange.ratio=0.1")
    assert "exchange.ratio: belongs to compression: topk, not fp16" in line
    assert load_config(None, ["exchange.compression=auto", "exchange.ratio=0.1", "exchange.rank=2"]).exchange.rank == 2
    (line,) = lines("exchange.mode=delayed", "exchange.delay=-1")
    assert "exchange.delay" in line and ">= 0" in line
    assert len(lines("exchange.mode=async", "on_nonfinite=skip", "precision=16-mixed")) == 2
    assert len(lines("optim.sharded=true", "exchange.op=adasum", "parallel.pipeline=2")) == 3


def test_all_mistakes_at_once_in_the_order_of_the_file(tmp_path):
    path = write(
        tmp_path, "framework: torch\nbatch_size: abc\n\noptim:\n  lr: -1\n  momentm: 0.9\nmodl: {name: cnn}\nseed: 1\n"
    )
    found = lines("threads=x", path=path, run_dir="")
    places = [
        f"{path}:1: framework: ",
        f"{path}:2: batch_size: ",
        f"{path}:5: optim.lr: ",
        f"{path}:6: optim.momentm: ",
    ]
    places += [f"{path}:7: modl: ", "--set threads=x: threads: "]
    assert [line.startswith(place) for line, place in itertools.zip_longest(found, places, fillvalue="")] == [True] * 6


def test_a_key_that_does_not_go_with_others_has_its_place(tmp_path):
    path = write(tmp_path, "seed: 1\noptim:\n  lr: 1\n  sharded: true\n")
    found = lines("checkpoint.monitor=val_acc", "exchange.mode=partial", path=path)
    assert found[0].startswith(f"{path}:4: optim.sharded: does not go with exchange.mode: partial")
    assert found[1].startswith("--set checkpoint.monitor=val_acc: checkpoint.monitor: unknown 'val_acc'; did you mean")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["empty"]),
        ("# only a comment\n", ["empty"]),
        ("- a\n- b\n", ["key: value"]),
        ("just words", ["key: value"]),
        ("a: [1\n", [":2:", "not valid YAML"]),
        ("seed: 1\n\tx: 2\n", [":2:", "blanks, not tabs"]),
        ("seed: 1\nseed: 2\n", [":2: seed: stands twice"]),
        ("optim: {lr: 1, lr: 2}\n", ["optim.lr: stands twice"]),
        ("a: &x 1\nb: *x\n", ["anchors"]),
        ("a: !!python/name:os.system\n", ["not valid YAML"]),
        ("model: {name: cnn, options: &x {a: *x}}", ["anchors"]),
        ("x" * (MAX_BYTES + 1), ["bytes"]),
        ("a: " + "[" * 2000 + "]" * 2000, [":1", "more than 50 deep"]),
    ],
    ids=range(13),
)
def test_a_file_that_is_no_configuration(tmp_path, text, words):
    """Nor does a tag of YAML run code."""
    path = write(tmp_path, text)
    found = lines(path=path)
    assert str(path) in found[0]
    assert all(word in found[0] for word in words), found


def test_a_file_that_cannot_be_read(tmp_path):
    (line,) = lines(path=tmp_path / "gone.yaml")
    assert "No such file" in line
    (line,) = lines(path=tmp_path)
    assert "directory" in line
    (tmp_path / "job.yaml").write_bytes(b"seed: 1 # \xff")
    (line,) = lines(path=tmp_path / "job.yaml")
    assert "UTF-8" in line and "byte 10" in line


def test_the_keys_that_a_resumed_run_may_change():
    """They are declared so in config/keys; a new key is not, unless its author says it."""
    always = [
        "run_dir",
        "code_dir",
        "log_every_n_steps",
        "tensorboard",
        "loggers",
        "checkpoint",
        "check_val_every_n_epoch",
        "limit_val_batches",
        "early_stopping",
        "device",
        "devices",
        "threads",
        "data.path",
        "data.workers",
        "agreement_every_n_steps",
        "steps_per_execution",
        "noise_scale_every_n_steps",
        "on_nonfinite",
        "watchdog_s",
        "slurm",
        "optim.sharded",
        "hooks",
        "model.init_from",
        "model.compile",
        "model.recompute",
        "parallel.pipeline",
        "parallel.devices_per_rank",
        "parallel.schedule",
        "parallel.split",
    ]
    assert set(free_keys(to_end=True)) == set(always)
    assert set(free_keys(to_end=False)) == {*always, "max_epochs", "max_steps"}


def test_what_a_resumed_run_may_change():
    old = load_config(None, ["max_epochs=2", "optim.lr=0.1"])
    assert changed(old, load_config(None, ["max_epochs=5", "optim.lr=0.1", "run_dir=x", "threads=3"])) == []
    assert changed(old, load_config(None, ["max_epochs=2", "optim.lr=0.2"])) == [("optim.lr", 0.1, 0.2)]
    assert changed(old, load_config(None, ["max_epochs=2", "optim.lr=0.1", "seed=1"])) == [("seed", 0, 1)]
    # A cosine schedule's rates depend on where it ends.
    cosine = ["optim.schedule=cosine", "optim.lr=0.1"]
    rows = changed(load_config(None, [*cosine, "max_epochs=2"]), load_config(None, [*cosine, "max_epochs=3"]))
    assert [key for key, _, _ in rows] == ["max_epochs"]


def test_an_empty_section_of_options_is_no_change():
    """Of the run that goes on, or of the one that began."""
    rows = changed(load_config(None, ["data.options={n: 3}"]), load_config())
    assert rows == [("data.options.n", 3, None)]
    assert changed(load_config(), load_config(None, ["data.options={n: 3}"])) == [("data.options.n", None, 3)]


def test_the_folder_of_the_users_code_belongs_to_the_configuration(tmp_path, monkeypatch):
    """It is kept where code is named, so that the run finds it from everywhere; another folder is no other run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    file = tmp_path / "jobs" / "job.yaml"
    file.write_text("model: {name: 'mine:build'}\n")
    here, away = load_config(None, ["model.name=mine:build"]), load_config(file.relative_to(tmp_path))
    assert (here.code_dir, away.code_dir) == (str(tmp_path), str(tmp_path / "jobs"))
    assert load_config(write(tmp_path, resolved_yaml(away))) == away
    assert load_config(file, ["code_dir=x"]).code_dir == str(tmp_path / "x")
    assert load_config(file, ["model.name=mlp"]).code_dir is load_config().code_dir is None
    assert digest(here) == digest(away) and changed(here, away) == []


def test_digest_tells_configurations_apart():
    assert digest(load_config()) == digest(load_config())
    assert digest(load_config()) != digest(load_config(None, ["seed=1"]))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_global_batch(size, accumulate):
    assert Config(batch_size=5, accumulate_grad_batches=accumulate).global_batch(size) == 5 * size * accumulate
    assert Config(global_batch_size=50, accumulate_grad_batches=accumulate).global_batch(size) == 50


def test_example_files_are_valid():
    from pathlib import Path

    names = ["autoencoder", "bert", "demo", "fashion_mnist", "mnist", "pyramidnet", "regression", "resnet50", "tiny"]
    files = sorted(Path("scripts/configs").glob("*.yaml"))
    assert [file.stem for file in files] == names
    for file in files:
        load_config(file)
        assert yaml.safe_load(file.read_text())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_epochs: " + "1" * 900_000, ":1: a value of 900,000 letters"),
        ("max_epochs: 0x" + "f" * 9000, "a number of more than 64 bits"),
        ("data: " + "[" * 100_000, "more than 50 deep"),
        ("data: " + "{" * 100_000, "more than 50 deep"),
        ("data:\n  " + "- " * 50_000, "more than 50 deep"),
        ("run_dir: " + "x" * 100_000, "a value of 100,000 letters"),
        ("data: [" + "c," * 100_000 + "c]", ":1: more than 50,000 values"),
    ],
    ids=["digits", "hex", "[", "{", "-", "letters", "values"],
)
def test_what_no_configuration_holds_is_refused_at_once(tmp_path, text, words):
    """In the file and in --set; the time is that of the reading alone."""
    path = tmp_path / "job.yaml"
    path.write_text(text)
    key, _, value = text.partition(":")
    for given in ((path, []), (None, [f"{key}={value.strip()}"])):
        began = time.process_time()
        with pytest.raises(ConfigError) as caught:
            load_config(*given)
        said = str(caught.value)
        assert words.removeprefix(":1: ") in said and len(said) < 500 and "\n" not in said
        assert time.process_time() - began < 10
