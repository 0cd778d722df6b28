"""A run's columns and classes, and all samples of other data, through the command line, on one rank and on two."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.running import commands, run
from tests.cli.test_run_folder import fit
from tests.data.test_run_data import WORDS, X, table

KIND = X.argmax(1)
ANEW = ["--resume", "auto", "--allow-change", "data"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run on a table of three words, and what each command said of other tables."""
    folder = tmp_path_factory.mktemp("made")
    run = folder / "run"
    table(folder / "a.csv", y=WORDS[KIND])
    table(folder / "b.csv", ("c", "y", "b", "a"), y=WORDS[KIND])
    table(folder / "few.csv", rows=KIND > 0, y=WORDS[KIND[KIND > 0]])
    table(folder / "cat.csv", y=np.where(KIND == 1, "cat", WORDS[KIND]))
    table(folder / "less.csv", ("c", "y"), y=WORDS[KIND])
    (folder / "new.csv").write_text("c,b,a\n" + "".join(f"{c},{b},{a}\n" for a, b, c in X.tolist()))
    use = {name: ["--run-dir", run, "--set", f"data.path={folder / name}.csv"] for name in ("a", "b", "few", "cat")}
    use |= {name: ["--run-dir", run, "--set", f"data.path={folder / name}.csv"] for name in ("less", "new")}
    sets = [f"data={{name: table, path: {folder / 'a.csv'}, labels: y}}", "optim.lr=0.5", "max_steps=30"]
    lines = {
        "fit": fit(run, sets=sets),
        "own": ["eval", "--run-dir", run],
        "own all": ["eval", "--run-dir", run, "--split", "all"],
        **{name: ["eval", *use[name]] for name in ("b", "few", "cat", "less", "new")},
        "test": ["eval", "--run-dir", run, "--split", "test"],
        "numbers": ["predict", *use["new"], "-o", folder / "new.npy"],
        "names": ["predict", *use["new"], "--names", "-o", folder / "new.csv.csv"],
        "every class": ["predict", *use["new"], "-o", folder / "every.csv"],
        "held": ["predict", "--run-dir", run, "--names", "-o", folder / "held.csv"],
        "npy": ["predict", *use["new"], "--names", "-o", folder / "names.npy"],
        "export": ["export", "--run-dir", run, "--to", "safetensors", "-o", folder / "model.safetensors"],
        "again": [*fit(run, "--resume", "auto", sets=sets), "--set", "max_steps=32"],
        "other": [*fit(run, "--resume", "auto", sets=sets), "--set", "data.classes=[cow, bee, ant]"],
        "order": [*fit(run, *ANEW, sets=sets), "--set", f"data.path={folder / 'b.csv'}"],
        "fewer": [*fit(run, *ANEW, sets=sets), "--set", "data.features=[a, b]"],
        **of_own_loss(folder),
        **of_text(folder),
        "half": ["eval", "--run-dir", run, "--set", "data.val_fraction=0.5"],
    }
    return folder, dict(zip(lines, commands(*lines.values()), strict=True))


def of_own_loss(folder):
    """A run of classes with a loss of the user's, and one of two numbers."""
    table(folder / "numbers.csv", y=KIND)
    rows = "".join(f"{a},{b},{c}\n" for a, b, c in X.tolist())
    (folder / "two.csv").write_text("a,high,low\n" + rows)
    own = [f"data={{name: table, path: {folder / 'numbers.csv'}, labels: y, num_classes: 3}}"]
    own += ["task.loss=tests.own_models:cross_entropy", "max_steps=2"]
    two = [f"data={{name: table, path: {folder / 'two.csv'}, labels: [high, low]}}", "task.loss=mse", "max_steps=2"]
    two.append("model={name: mlp, hidden: [8], outputs: 2}")
    (folder / "yes.csv").write_text("a,sick,old\n" + "".join(f"{a},{b > 0:d},{c > 0:d}\n" for a, b, c in X.tolist()))
    yes = [f"data={{name: table, path: {folder / 'yes.csv'}, labels: [sick, old]}}", "task.loss=bce", "max_steps=2"]
    yes.append("model={name: mlp, hidden: [8], outputs: 2}")
    return {
        "own loss": fit(folder / "loss", sets=own),
        "own names": ["predict", "--run-dir", folder / "loss", "--names", "-o", folder / "loss.csv"],
        "two": fit(folder / "two", sets=two),
        "two names": ["predict", "--run-dir", folder / "two", "--names", "-o", folder / "two-names.csv"],
        "two rows": ["predict", "--run-dir", folder / "two", "-o", folder / "two-rows.npy"],
        "two table": ["predict", "--run-dir", folder / "two", "-o", folder / "two-table.csv"],
        "yes": fit(folder / "yes", sets=yes),
        "yes rows": ["predict", "--run-dir", folder / "yes", "-o", folder / "yes.npy"],
        "yes table": ["predict", "--run-dir", folder / "yes", "-o", folder / "yes-table.csv"],
        "two export": ["export", "--run-dir", folder / "two", "--to", "safetensors", "-o", folder / "two.safetensors"],
    }


def of_text(folder):
    """A run whose vocabulary is learned from its text, and other texts."""
    place, names = folder / "text", {"one": "the cat sat on a mat and ate fish", "two": "on a mat sat fish"}
    rng, use = np.random.default_rng(0), {}
    for name, words in names.items():
        told = (" ".join(rng.choice(words.split(), 8)).capitalize() + "." for _ in range(60 * (len(use) + 1)))
        (folder / f"{name}.txt").write_text(" ".join(told))
        use[name] = f"data={{name: masked_text, sequence_length: 16, path: {folder / name}.txt, vocabulary_size: 300}}"
    sets = ["model={name: bert, width: 8, depth: 1, heads: 2}", "max_steps=2", "precision=32"]
    sets += ["task.loss={words: cross_entropy, next: cross_entropy}"]
    begin, again = (fit(place, *more, sets=[*sets, use[k]]) for k, more in (("one", []), ("two", ANEW)))
    kept = ["--set", f"data.vocabulary={place / 'vocabulary.json'}", "--set", "max_steps=3"]
    lines = {"text": begin, "text eval": ["eval", "--run-dir", place, "--set", f"data.path={folder / 'two.txt'}"]}
    return lines | {"text again": again, "text kept": [*again, *kept, "--allow-change", "max_steps"]}


def test_a_text_is_read_by_the_runs_vocabulary(made):
    """A text with the same words is numbered by the run; its vocabulary would give the words other numbers."""
    folder, done = made
    assert done["text"].code == 0, done["text"].err
    assert result(done["text eval"])["samples"] > 20
    assert "--set data.vocabulary=" in done["text again"].err and done["text again"].code == 3
    assert done["text kept"].code == 0, done["text kept"].err
    told = json.loads((folder / "text" / "vocabulary.json").read_text())
    assert told["model"]["vocab"]["[MASK]"] == 3


def result(done):
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_the_start_and_the_run_folder_tell_the_classes(made):
    folder, done = made
    assert done["fit"].code == 0 and "classes: ant 0, bee 1, cow 2" in done["fit"].out
    assert "classes: [ant, bee, cow]" in (folder / "run" / "config.yaml").read_text()
    (first, *_) = sorted((folder / "run" / "checkpoints").iterdir())
    told = json.loads((first / "manifest.json").read_text())["meta"]["sample"]
    assert told["labels"]["label"]["names"] == list(WORDS) and told["inputs"]["input"]["columns"] == ["a", "b", "c"]
    assert done["again"].code == 0, done["again"].err
    assert (
        done["other"].code == 2 and "data.classes: ['ant', 'bee', 'cow'] -> ['cow', 'bee', 'ant']" in done["other"].err
    )


def test_other_data_are_scored_whole_and_by_name(made):
    _, done = made
    own, every = result(done["own"]), result(done["own all"])
    assert own["split"] == "val" and own["samples"] < 20 and (every["split"], every["samples"]) == ("all", 60)
    other, few = result(done["b"]), result(done["few"])
    assert other == every and "all 60 samples are taken" in done["b"].err
    assert few["samples"] == (KIND > 0).sum() and min(few["accuracy"], every["accuracy"]) > 0.6
    assert done["cat"].code == 3 and "'cat' is no class of the run: ant, bee, cow" in done["cat"].err
    assert done["less"].code == 3 and "columns a, b missing" in done["less"].err
    assert done["new"].code == 3 and "data.labels" in done["new"].err
    assert done["test"].code == 3 and "there is no part 'test'" in done["test"].err


def test_columns_in_another_order_and_changed_data_are_told(made):
    """A run that went on with --allow-change data took columns by their places: accuracy 0.94, then 0.38."""
    _, done = made
    assert done["order"].code == 3 and "the columns are in another order than at the checkpoint" in done["order"].err
    assert "the columns are fewer than at the checkpoint: a, b" in done["fewer"].err
    for name in ("order", "fewer"):
        assert """--set data.features='["a", "b", "c"]' --allow-change data""" in done[name].err
    assert (
        "the data changed since the training (training: 48 samples -> 29; validation: 12 samples -> 31)"
        in done["half"].err
    )
    assert not any("the data changed" in done[name].err for name in ("own", "own all", "b"))


def test_predictions_need_no_labels_and_have_names(made):
    folder, done = made
    assert done["numbers"].code == done["names"].code == 0, done["names"].err
    logits = np.load(folder / "new.npy")
    powers = np.exp(logits - logits.max(1, keepdims=True))
    with open(folder / "new.csv.csv", newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["sample", "class", "probability"] and [row[0] for row in rows] == [str(k) for k in range(60)]
    assert [row[1] for row in rows] == WORDS[logits.argmax(1)].tolist()
    np.testing.assert_allclose([float(row[2]) for row in rows], (powers / powers.sum(1)[:, None]).max(1), atol=1e-6)
    assert done["npy"].code == 2 and "end its name in .csv" in done["npy"].err
    told = json.loads((folder / "model.safetensors.json").read_text())
    assert told["classes"] == list(WORDS) and told["columns"] == ["a", "b", "c"]
    assert "model.safetensors.json" in done["export"].out


def test_a_table_of_classes_for_a_loss_of_the_users(made):
    folder, done = made
    assert done["own loss"].code == done["own names"].code == 0, done["own loss"].err + done["own names"].err
    head, *rows = list(csv.reader((folder / "loss.csv").read_text().splitlines()))
    assert head == ["sample", "class", "probability"] and {row[1] for row in rows} <= {"0", "1", "2"}
    assert done["two names"].code == 2 and "task.loss: mse has no classes" in done["two names"].err


def test_a_table_has_what_each_task_predicts(made):
    """Probabilities of all classes; numbers in the labels' units, under the columns' names; probabilities of yes."""
    folder, done = made
    for name in ("every class", "two rows", "two table", "yes", "yes rows", "yes table"):
        assert done[name].code == 0, done[name].err
    tables = {
        name: list(csv.reader((folder / f"{name}.csv").read_text().splitlines()))
        for name in ("new.csv", "every", "two-table", "yes-table")
    }
    head, *rows = tables["every"]
    assert head == ["sample", "class", "probability", *(f"probability of {word}" for word in WORDS)]
    assert [row[:3] for row in rows] == tables["new.csv"][1:]
    logits = np.load(folder / "new.npy").astype(float)
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose([[float(x) for x in row[3:]] for row in rows], chances, atol=1e-6)
    for name, file, convert in (
        ("two-table", "two-rows", lambda x: x),
        ("yes-table", "yes", lambda x: 1 / (1 + np.exp(-x))),
    ):
        head, *rows = tables[name]
        assert head == ["sample", *(("high", "low") if name == "two-table" else ("sick", "old"))]
        found = np.array([[float(x) for x in row[1:]] for row in rows])
        np.testing.assert_allclose(found, convert(np.load(folder / f"{file}.npy").astype(float)), rtol=1e-8)


def test_an_export_names_the_numbers_that_a_model_gives(made):
    folder, done = made
    assert done["two export"].code == 0, done["two export"].err
    told = json.loads((folder / "two.safetensors.json").read_text())
    assert told["columns"] == ["a"] and told["outputs"] == ["high", "low"] and "classes" not in told


def test_predictions_of_a_held_out_part_have_the_numbers_of_the_rows_of_the_file(made):
    folder, done = made
    assert done["held"].code == 0, done["held"].err
    every, held = (
        list(csv.reader((folder / name).read_text().splitlines()))[1:] for name in ("new.csv.csv", "held.csv")
    )
    rows = [int(row[0]) for row in held]
    assert rows == sorted(rows) and rows != list(range(len(rows))) and [every[row] for row in rows] == held


def test_two_ranks_of_the_other_framework_write_the_same_table(made):
    folder, _ = made
    output = folder / "tensorflow.csv"
    words = ["predict", "--run-dir", folder / "run", "--checkpoint", "last", "--set", f"data.path={folder / 'new.csv'}"]
    words += ["--set", "framework=tensorflow", "--names", "-o", output, "-np", "2", "--set", "batch_size=7"]
    run(*map(str, words), "--set", "global_batch_size=null")
    tables = [list(csv.reader(Path(path).read_text().splitlines())) for path in (folder / "new.csv.csv", output)]
    assert [row[:1] for row in tables[0]] == [row[:1] for row in tables[1]]
    # The run went on for two steps since.
    assert np.mean([a[1] == b[1] for a, b in zip(*tables, strict=True)]) > 0.9
