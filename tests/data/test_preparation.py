"""Tables with words and gaps: numbers of scikit-learn, of training samples alone, the same on any number of ranks."""

from __future__ import annotations

import csv
import datetime
import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, StandardScaler

from hvd_train import data as package
from hvd_train.config import load_config
from hvd_train.data.catalog import open_data
from hvd_train.data.dataset import DataRequest
from hvd_train.errors import ConfigError, DataError
from tests.cli.running import commands, run

PENGUINS = Path(package.__file__).with_name("penguins.csv")
NUMBERS = ["bill_length_mm", "bill_depth_mm", "flipper_length_mm", "body_mass_g", "year"]
WORDS = ["island", "sex"]
ROWS = list(csv.DictReader(PENGUINS.open()))


def opened(path=PENGUINS, request=None, loss="cross_entropy", **keys):
    data = {"name": "table", "path": str(path), "labels": "species"} | keys
    config = load_config(base={"data": data, "task": {"loss": loss}})
    return open_data(config.data, config.task, request=request or DataRequest())


def columns(names, rows):
    cells = [[None if row[name] == "NA" else row[name] for name in names] for row in rows]
    return np.array(cells, object)


def inputs(part, name="input"):
    return part.fetch(np.arange(len(part)))[0][name]


@pytest.mark.parametrize("missing", ["mean", "median", "mode"])
@pytest.mark.parametrize("scale", ["standard", "minmax", "none"])
def test_numbers_are_those_of_scikit_learn(missing, scale):
    data = opened(categories="auto", missing=missing, scale=scale)
    strategy = {"mode": "most_frequent"}.get(missing, missing)
    scaler = {"standard": StandardScaler(), "minmax": MinMaxScaler(), "none": "passthrough"}[scale]
    most = SimpleImputer(strategy="most_frequent", missing_values=None)
    steps = [
        ("numbers", make_pipeline(SimpleImputer(strategy=strategy), scaler), [0, 1, 2, 3, 4]),
        ("words", make_pipeline(most, OneHotEncoder(sparse_output=False)), [5, 6]),
    ]
    table = columns([*NUMBERS, *WORDS], ROWS)
    table[:, :5] = np.where(table[:, :5] == None, np.nan, table[:, :5]).astype(float)  # noqa: E711
    fitted = ColumnTransformer(steps).fit(table[data.train.rows])
    names = data.sample.inputs["input"].columns
    assert names[0] == "island=Biscoe" and names[-1] == "year" and len(names) == 10
    order = [*range(5, 8), 0, 1, 2, 3, 8, 9, 4]  # as the columns of the file
    for part in (data.train, data.val):
        want = fitted.transform(table[part.rows])[:, order].astype(float)
        np.testing.assert_allclose(inputs(part), want, rtol=1e-6, atol=1e-6)


def test_folds_are_fitted_on_their_own_training_samples():
    folds = [opened(categories="auto", missing="mean", scale="standard", fold=[k, 3]) for k in range(3)]
    assert len({json.dumps(one.fitted) for one in folds}) == 3
    for one in folds:
        numbers = inputs(one.train)[:, [3, 4, 5, 6, 9]]
        np.testing.assert_allclose(numbers.mean(0), 0, atol=1e-6)
        np.testing.assert_allclose(numbers.std(0), 1, atol=1e-6)


def test_what_was_fitted_may_be_given():
    keys = {"categories": "auto", "missing": "mean", "scale": "standard"}
    first = opened(**keys)
    again = opened(**keys, fitted=first.fitted, fold=[1, 3])
    assert again.fitted == first.fitted and "data.fitted is given" in again.remarks[0] and not first.remarks


def test_gaps_that_are_flagged():
    missing = dict.fromkeys(NUMBERS, "median") | {"sex": "flag", "bill_length_mm": "flag"}
    data = opened(categories="auto", missing=missing, scale="standard")
    names = list(data.sample.inputs["input"].columns)
    x, rows = inputs(data.train), [ROWS[k] for k in data.train.rows]
    for name, of in (("sex missing", "sex"), ("bill_length_mm missing", "bill_length_mm")):
        assert np.array_equal(x[:, names.index(name)], [row[of] == "NA" for row in rows])
    gaps = [row["bill_length_mm"] == "NA" for row in rows]
    assert not x[gaps, names.index("bill_length_mm")].any()
    no_sex = [row["sex"] == "NA" for row in rows]
    assert not x[no_sex][:, [names.index("sex=female"), names.index("sex=male")]].any()


def test_what_is_given_must_be_there(tmp_path):
    first = opened(categories="auto", missing="mean")
    short = written(tmp_path, ".csv", island=["Dream", "Biscoe"] * 4, species=["Adelie", "Gentoo"] * 4)
    with pytest.raises(DataError, match="no column: .*bill_length_mm"):
        opened(short, categories="auto", missing="mean", fitted=first.fitted)


def test_a_flag_beside_ids():
    data = opened(categories="auto", missing=dict.fromkeys(NUMBERS, "mean") | {"sex": "flag"}, encoding="ids")
    assert data.sample.inputs["numbers"].columns == (*NUMBERS[:4], "sex missing", "year")
    flags = inputs(data.train, "numbers")[:, 4]
    assert np.array_equal(flags, [ROWS[k]["sex"] == "NA" for k in data.train.rows])
    assert not inputs(data.train, "sex")[flags == 1].any()


def test_keys_that_come_too_late(tmp_path):
    """An evaluation fits nothing to its own samples."""
    path = written(tmp_path, ".csv", size=[1, 2, 3, 4], y=[0, 1, 0, 1])
    run = opened(path, labels="y").sample
    with pytest.raises(DataError, match="the run was trained without data.categories, missing, scale and dates"):
        opened(path, DataRequest(run, "all"), labels="y", missing="mean")
    prepared = opened(path, labels="y", scale="standard")
    (tmp_path / "gap.csv").write_text("size,y\n,0\n2,1\n")
    with pytest.raises(DataError, match="the cell is empty; .*'size', row 1; fill the cell, or leave the row out"):
        opened(tmp_path / "gap.csv", DataRequest(prepared.sample, "all"), labels="y", fitted=prepared.fitted)


def test_lists_and_infinity(tmp_path):
    path = written(tmp_path, ".jsonl", words=[[1, 2], [3]] * 4, age=[1, 2] * 4, y=[0, 1] * 4)
    with pytest.raises(DataError, match="column 'words' holds lists, and data.categories, .*take none"):
        opened(path, labels="y", scale="standard", lengths={"max_length": 4})
    path = written(tmp_path, ".parquet", size=[1.0, 2.0, float("inf"), 4.0], y=[0, 1, 0, 1])
    with pytest.raises(DataError, match="'size'; correct it"):
        opened(path, labels="y", scale="standard", val_fraction=0.25)


def test_words_as_ids():
    data = opened(categories="auto", missing="mode", encoding="ids")
    assert set(data.sample.inputs) == {"numbers", "island", "sex"}
    assert data.sample.inputs["numbers"].columns == tuple(NUMBERS)
    want = [["Biscoe", "Dream", "Torgersen"].index(ROWS[k]["island"]) + 1 for k in data.val.rows]
    assert inputs(data.val, "island").tolist() == want and inputs(data.val, "island").dtype == np.int64


def test_dates_are_days(tmp_path):
    path = tmp_path / "days.csv"
    path.write_text("day,y\n1970-01-02,0\n2026-11-30 12:00:00,1\n1969-12-31,0\n,1\n1970-01-03,0\n1970-01-04,1\n")
    data = opened(path, labels="y", dates=["day"], missing="mean", val_fraction=0.4)
    x = np.zeros(6)
    for part in (data.train, data.val):
        x[part.rows] = inputs(part)[:, 0]
    assert x[[0, 1, 2, 4, 5]].tolist() == [1, 20787.5, -1, 2, 3]


@pytest.mark.parametrize("zones", [("+08:00", ""), ("", "+08:00")])
def test_times_with_a_zone_beside_times_without_are_refused(tmp_path, zones):
    """Half of them were eight hours off, without a word."""
    for part, zone in zip(("train", "val"), zones, strict=True):
        rows = [f"2026-01-0{k} 12:00:00{zone},{k % 2}" for k in range(1, 7)]
        (tmp_path / f"{part}.csv").write_text("\n".join(["day,y", *rows]))
    with pytest.raises(DataError, match="column 'day'; write all of them with their zone, or none") as told:
        opened(tmp_path, labels="y", dates=["day"])
    assert "its times have no time zone, and" in str(told.value) or "its times have a time zone, and" in str(told.value)
    (tmp_path / "val.csv").write_text("day,y\n2026-01-03 12:00:00" + zones[0] + ",0\n")
    data = opened(tmp_path, labels="y", dates=["day"])
    assert inputs(data.val)[0, 0] == inputs(data.train)[2, 0]


def written(tmp_path, suffix, **columns):
    path = tmp_path / f"table{suffix}"
    table = pyarrow.table(columns)
    if suffix == ".parquet":
        parquet.write_table(table, path)
    elif suffix == ".csv":
        rows = [[("" if x is None else x) for x in row.values()] for row in table.to_pylist()]
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([table.column_names, *rows])
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return path


def test_a_table_is_the_same_in_every_kind_of_file(tmp_path):
    columns = {
        "grade": pyarrow.array([1.0, 2.0, None, 1.0, 3.5, 2.0]), "open": [True, False, True, True, None, False],
        "size": [1, None, 3, 4, 5, 6], "empty": pyarrow.array([None] * 6, pyarrow.float64()), "y": [0, 1, 0, 1, 0, 1],
    }  # fmt: skip
    keys = {"labels": "y", "categories": ["grade", "open"], "missing": "mode", "features": ["grade", "open", "size"]}
    made = [opened(written(tmp_path, suffix, **columns), **keys) for suffix in (".csv", ".parquet", ".jsonl")]
    assert made[0].fitted[0]["values"] == ["1.0", "2.0", "3.5"] and made[0].fitted[1]["values"] == ["False", "True"]
    for one in made[1:]:
        assert one.fitted == made[0].fitted
        assert np.array_equal(inputs(one.train), inputs(made[0].train))
    with pytest.raises(DataError, match="'grade', row 3"):
        opened(written(tmp_path, ".parquet", **columns), **keys | {"missing": "refuse"})


def test_dates_of_typed_files(tmp_path):
    day = datetime.datetime(2026, 11, 30, 12)
    columns = {"day": [day, None, day, day], "zone": pyarrow.array([day] * 4, pyarrow.timestamp("ns", "UTC"))}
    path = written(tmp_path, ".parquet", **columns, y=[0, 1, 0, 1])
    x = inputs(opened(path, labels="y", dates=["day", "zone"], missing="mean", val_fraction=0.5).train)
    assert np.array_equal(x, np.full((2, 2), 20787.5))
    text = tmp_path / "text.csv"
    text.write_text("day,y\n2026-11-30T12:00:00+01:00,0\nNA,1\n2026-11-30T12:00:00+01:00,0\n1970-01-02T00:00:00Z,1\n")
    rows = opened(text, labels="y", dates=["day"], missing="flag", val_fraction=0.5)
    every = np.concatenate([inputs(part) for part in (rows.train, rows.val)])
    assert sorted(every[:, 0].tolist()) == pytest.approx([0, 1, 20787 + 11 / 24, 20787 + 11 / 24])
    with pytest.raises(DataError, match="a column of type int64 holds no dates"):
        opened(written(tmp_path, ".parquet", day=[2018, 2019, 2020, 2021], y=[0, 1, 0, 1]), labels="y", dates=["day"])


def test_numbers_that_float32_rounds_are_told(tmp_path):
    path = written(tmp_path, ".csv", time=[1_700_000_000 + 9 * k for k in range(40)], y=[0, 1] * 20)
    (line,) = opened(path, labels="y", missing="mean").remarks[:1]
    assert "column 'time' holds numbers that float32 rounds" in line
    assert not opened(path, labels="y", missing="mean", scale="standard").remarks


def test_two_columns_of_one_name(tmp_path):
    path = written(tmp_path, ".csv", **{"a=b": ["q", "r"] * 4, "a": ["b=q", "c"] * 4}, y=[0, 1] * 4)
    with pytest.raises(DataError, match="'a=b=q'; rename one of them"):
        opened(path, labels="y", categories="auto")


def folder(tmp_path, train, val, test=""):
    for name, text in (("train", train), ("val", val), ("test", test)):
        if text:
            (tmp_path / f"{name}.csv").write_text(text)
    return tmp_path


TRAIN = "color,size,y\nred,1,0\nblue,2,1\nred,,0\nblue,4,1\n"


def test_unseen_words(tmp_path):
    path = folder(tmp_path, TRAIN, "size,color,y\n9,green,0\n1,red,1\n")
    data = opened(path, labels="y", categories="auto", missing="median")
    assert inputs(data.val).tolist() == [[0, 0, 9], [0, 1, 1]]
    (line,) = [one for one in data.remarks if "green" in one]
    assert line.endswith("green not among the training samples: counted as none of their words")
    assert inputs(
        opened(path, labels="y", categories="auto", missing="mode", encoding="ids").val, "color"
    ).tolist() == [0, 2]
    kept = {"size": "median"}
    with pytest.raises(DataError, match="'green' is not among the training samples; .*row 1; it has blue, red"):
        opened(path, labels="y", categories="auto", missing=kept)


@pytest.mark.parametrize(
    ("train", "val", "keys", "told"),
    [
        (TRAIN, "color,size,y\nred,big,0\n", {"missing": "mean"}, "'big' is no number; .*val.csv"),
        (TRAIN, "color,size,y\nred,3,0\n", {}, "the cell is empty; .*'size', row 3; set data.missing: median"),
        ("color,size,y\nred,1,0\nblue,2x,1\n", TRAIN, {}, "'2x' is no number, and 1 of 2 cells are; .*data.categories"),
        (TRAIN, TRAIN, {"categories": ["colour"]}, "colour is no feature; data.categories; .*color, size"),
        (TRAIN, TRAIN, {"dates": ["color"]}, "it holds no dates: .*2026-11-30"),
        ("color,size,y\nred,,0\nblue,,1\n", TRAIN, {"missing": "mean"}, "no training sample has a value; .*'size'"),
        (TRAIN, TRAIN, {"categories": None, "missing": "mean"}, "'red' is no number, and 0 of 4 cells are"),
        (TRAIN, TRAIN, {"missing": {"colour": "mean"}}, "colour is no feature; data.missing; .*color, size"),
        (TRAIN, TRAIN, {"categories": ["size"], "missing": "mean"}, "'red' is no number, and 0 of 4 cells are"),
        (TRAIN.replace("color", "numbers"), TRAIN, {"missing": "mean", "encoding": "ids"}, "an argument of the model"),
        (
            "color,y\n" + "".join(f"word{k},{k % 2}\n" for k in range(60)),
            "color,y\nword1,0\n",
            {},
            "60 different words in 60 training samples are no categories; .*leave the column out by data.features",
        ),
        (
            "day,y\n2024-01-31,0\n2024-02-29,1\n,1\n", TRAIN, {},
            r"its words are dates, .*column 'day'; set data.dates: \[day\] and data.scale: standard",
        ),
    ],
)  # fmt: skip
def test_bad_tables(train, val, keys, told, tmp_path):
    with pytest.raises(DataError, match=told):
        opened(folder(tmp_path, train, val), labels="y", **{"categories": "auto"} | keys)


def test_a_key_that_the_first_of_some_lines_lacks_is_a_column_with_a_gap(tmp_path):
    lines = [{"size": k, "y": k % 2} | ({"late": 2.0 * k} if k % 5 else {}) for k in range(20)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    data = opened(path, labels="y", missing="mean", val_fraction=0.2)
    assert [one["column"] for one in data.fitted] == ["size", "late"]
    rows = {int(size): late for size, late in data.train.fetch(np.arange(len(data.train)))[0]["input"]}
    there = [late for size, late in rows.items() if size % 5]
    assert all(late == (2 * size if size % 5 else pytest.approx(np.mean(there))) for size, late in rows.items())
    with pytest.raises(DataError, match="'late' has no value"):
        opened(path, labels="y", features=["size", "late"])


def test_plain_tables_name_the_keys(tmp_path):
    path = folder(tmp_path, TRAIN, TRAIN)
    with pytest.raises(DataError, match="'red' is no number; .*data.categories"):
        opened(path, labels="y")
    with pytest.raises(DataError, match="the cell is empty; .*data.missing"):
        opened(path, labels="y", features=["size"])


def test_the_configuration():
    with pytest.raises(ConfigError, match="data.categories: belongs to name: table"):
        load_config(base={"data": {"name": "digits", "categories": "auto"}})
    with pytest.raises(ConfigError, match="data.missing"):
        load_config(base={"data": {"name": "table", "path": "x", "labels": "y", "missing": "zero"}})


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_a_run_keeps_what_it_fitted(framework, tmp_path):
    folder_of_run, other = tmp_path / "run", tmp_path / "other.csv"
    with other.open("w") as file:  # other columns, another order, an island that nobody knows
        table = csv.DictWriter(file, ["sex", "note", *NUMBERS, "island", "species"])
        table.writeheader()
        for k, row in enumerate(ROWS[:60]):
            table.writerow(row | {"note": "x", "island": "Rose" if k == 7 else row["island"]})
    keys = f"{{name: table, path: {PENGUINS}, labels: species, categories: auto, missing: median, scale: standard}}"
    each = [f"framework={framework}", "precision=64", "model={name: mlp, hidden: [8]}", f"data={keys}", "max_epochs=3"]
    sets = [word for one in (*each, "optim={name: adam, lr: 0.01}") for word in ("--set", one)]
    losses = []
    for ranks in (1, 2):
        where = folder_of_run if ranks == 1 else tmp_path / "two"
        words = ["fit", "-np", str(ranks), "--set", f"batch_size={24 // ranks}", "--run-dir", str(where), *sets]
        told = run(*words)
        losses.append(json.loads((where / "summary.json").read_text())["val_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert "7 columns prepared as in data.fitted of config.yaml" in told.stdout
    path = ["--run-dir", folder_of_run]
    scored, predicted, elsewhere, checked, exported = commands(
        ["eval", *path],
        ["predict", *path, "-o", tmp_path / "own.csv"],
        ["predict", *path, "--set", f"data.path={other}", "-o", tmp_path / "other.csv.npy"],
        ["fit", "--check", "--run-dir", tmp_path / "none", *sets],
        ["export", *path, "--to", "safetensors", "-o", tmp_path / "model.safetensors"],
    )
    assert exported.code == 0, exported
    # It said "numbers as stored in the data", which gave a model of scaled columns other numbers than predict.
    assert 'numbers of columns made from the table as "prepared" in the .json file says' in exported.out + exported.err
    said = json.loads((tmp_path / "model.safetensors.json").read_text())["prepared"]
    assert [one["column"] for one in said] == ["island", *NUMBERS[:4], "sex", "year"]
    assert scored.code == predicted.code == elsewhere.code == checked.code == 0, (scored, predicted, elsewhere, checked)
    assert json.loads(scored.out)["loss"] == pytest.approx(losses[0], rel=1e-12) and "note" not in scored.err
    assert "Rose not among the training samples" in elsewhere.err and "column note is left out" in elsewhere.err
    assert "bill_length_mm" in checked.out and "Biscoe, Dream, Torgersen" in checked.out
    rows = np.load(tmp_path / "other.csv.npy")
    (known,) = commands(["predict", *path, "--split", "all", "-o", tmp_path / "all.npy"])
    assert known.code == 0, known
    same = np.arange(60) != 7
    np.testing.assert_allclose(rows[same], np.load(tmp_path / "all.npy")[:60][same], rtol=1e-12)


def test_a_resumed_run_is_refused_another_preparation(tmp_path):
    keys = f"{{name: table, path: {PENGUINS}, labels: species, categories: auto, missing: median, scale: %s}}"
    words = ["fit", "--run-dir", tmp_path / "run", "--set", "model={name: mlp, hidden: [8]}"]
    first = [*words, "--set", f"data={keys % 'standard'}", "--set", "max_epochs=1"]
    again = [*words, "--set", f"data={keys % 'standard'}", "--set", "max_epochs=2", "--resume", "auto"]
    other = [*words, "--set", f"data={keys % 'none'}", "--set", "max_epochs=3", "--resume", "auto"]
    one, two, three = commands(first, again, other)
    assert one.code == two.code == 0, (one, two)
    assert three.code == 3 and "the columns of the table are prepared in another way" in three.err, three
    cut = tmp_path / "cut.csv"
    cut.write_text("".join(PENGUINS.open().readlines()[:200]))
    moved = [*words, "--set", f"data={keys.replace(str(PENGUINS), str(cut)) % 'standard'}", "--set", "max_epochs=3"]
    (four,) = commands([*moved, "--resume", "auto", "--allow-change", "data"])
    assert four.code == 3 and "copy data.fitted of its config.yaml into the configuration" in four.err, four
