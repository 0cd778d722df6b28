"""A packed data set is the one it was made of, sample for sample; what is damaged is told by its file."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from hvd_train.cli.main import cli
from hvd_train.config import DataConfig, TaskConfig
from hvd_train.data import catalog, packing
from hvd_train.data.dataset import DataRequest
from hvd_train.data.formats import read_digits
from hvd_train.data.packed_manifest import summary as manifest_summary
from hvd_train.errors import ConfigError, DataError
from hvd_train.launch.start import environment
from tests.launching import needs_horovod
from tests.limits import SECONDS
from tests.rank_threads import run_ranks

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
RNG = np.random.default_rng(0)
PYTHON = environment() | {"PYTHONPATH": str(ROOT)}
MPIRUN = [str(BIN / "mpirun"), "-np", "2", "--bind-to", "none", "--map-by", "slot:oversubscribe"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Handwritten digits as PNG files, a folder a class."""
    folder = tmp_path_factory.mktemp("photos")
    for k, (image, label) in enumerate(zip(*(x[:200] for x in read_digits()), strict=True)):
        (folder / str(label)).mkdir(exist_ok=True)
        Image.fromarray((image * 15).astype(np.uint8)).save(folder / str(label) / f"{k}.png")
    return folder


def npz(folder):
    pairs = {"x": RNG.normal(size=(30, 3)), "y": np.arange(30) % 4}
    np.savez(folder / "own.npz", **pairs)
    return {"name": "npz", "path": str(folder / "own.npz")}, {}


def table(folder):
    rows = [f"{k},{k * k / 7},{k / 3}" for k in range(40)]
    (folder / "own.csv").write_text("\n".join(["a,b,c", *rows]))
    return {"name": "table", "path": str(folder / "own.csv"), "labels": "c"}, {"loss": "mse"}


def several(folder):
    made = {"name": "tests.data.test_packing:named", "options": {"n": 20}}
    return made, {"loss": {"kind": "cross_entropy", "size": "mse"}}


def named(n):
    inputs = {"left": np.random.default_rng(1).normal(size=(n, 2, 3)), "right": np.arange(n)}
    part = inputs, {"kind": np.arange(n) % 3, "size": np.ones(n)}
    return part, part


def same(one, other):
    assert len(one) == len(other) and one.sample == other.sample and one.fingerprint == other.fingerprint
    order = RNG.permutation(len(one))
    for a, b in zip(one.fetch(order), other.fetch(order), strict=True):
        assert list(a) == list(b)
        for name in a:
            assert a[name].dtype == b[name].dtype and np.array_equal(a[name], b[name])


@pytest.mark.parametrize("shard_bytes", [1 << 28, 200], ids=["one shard", "many shards"])
@pytest.mark.parametrize("kind", [npz, table, several, "photos", "text"])
def test_same_samples(kind, shard_bytes, tmp_path, monkeypatch, photos):
    monkeypatch.setattr(packing, "SHARD_BYTES", shard_bytes)
    monkeypatch.setattr(packing, "PIECE_BYTES", 300)
    if kind == "photos":
        keys, task = {"name": "imagefolder", "path": str(photos)}, {}
    elif kind == "text":
        keys, task = {"name": "text", "path": str(Path(__file__)), "sequence_length": 16}, {}
    else:
        keys, task = kind(tmp_path)
    config, goal = DataConfig(**keys), TaskConfig(**task)
    catalog.pack(config, goal, tmp_path / "packed", packing.Alone())
    packed = catalog.open_data(DataConfig(name="packed", path=str(tmp_path / "packed")), goal)
    own = catalog.open_data(config, goal)
    same(own.train, packed.train)
    same(own.val, packed.val)
    packing.check(tmp_path / "packed", packing.Alone())
    assert bool(list((tmp_path / "packed").glob("*-00001.npy"))) == (shard_bytes == 200)


def test_shards_of_several_ranks_keep_the_order_of_samples(tmp_path, monkeypatch):
    """Each rank writes every second one."""
    monkeypatch.setattr(packing, "SHARD_BYTES", 50)
    config = DataConfig(**npz(tmp_path)[0])

    def work(ranks):
        world = SimpleNamespace(rank=ranks.rank, size=ranks.size, allgather=ranks.everyone)
        catalog.pack(config, TaskConfig(), tmp_path / "packed", world)

    run_ranks(2, work)
    packed = catalog.open_data(DataConfig(name="packed", path=str(tmp_path / "packed")))
    same(catalog.open_data(config).train, packed.train)
    assert list((tmp_path / "packed").glob("train-*-00005.npy"))


def test_a_test_part_and_what_is_skipped_are_packed(tmp_path):
    for part, count in (("train", 5), ("valid", 2), ("test", 3)):
        for name in ("a", "b"):
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for k in range(count):
                Image.fromarray(np.full((4, 6), 9 * k, np.uint8)).save(folder / f"{k}.tif")
    (tmp_path / "photos" / "train" / "a" / "notes.txt").write_text("no image")
    config = DataConfig(name="imagefolder", path=str(tmp_path / "photos"))
    made = catalog.pack(config, TaskConfig(), tmp_path / "packed", packing.Alone())
    assert manifest_summary(made).startswith("10 training and 4 validation samples, 6 test samples, 6 files")
    again, request = DataConfig(name="packed", path=str(tmp_path / "packed")), DataRequest(split="test")
    packed, own = (catalog.open_data(one, request=request) for one in (again, config))
    for name in ("train", "val", "test"):
        same(own.parts[name], packed.parts[name])
    assert "a: 1 .txt" in packed.train.note and packed.train.note == own.remarks[0]
    packing.check(tmp_path / "packed", packing.Alone())


def test_packed_data_and_declared_images(tmp_path):
    np.savez(tmp_path / "own.npz", x=np.ones((20, 4, 5), np.float32), y=np.arange(20) % 2)
    config = DataConfig(name="npz", path=str(tmp_path / "own.npz"), images=True)
    catalog.pack(config, TaskConfig(), tmp_path / "packed", packing.Alone())
    again = DataConfig(name="packed", path=str(tmp_path / "packed"))
    same(catalog.open_data(config).train, catalog.open_data(again).train)
    catalog.pack(config.model_copy(update={"images": None}), TaskConfig(), tmp_path / "plain", packing.Alone())
    plain = DataConfig(name="packed", path=str(tmp_path / "plain"))
    assert catalog.open_data(plain).sample.input_shape == (4, 5)
    declared = catalog.open_data(plain.model_copy(update={"images": True}))
    assert declared.sample.inputs["input"].image and declared.train.fetch(np.arange(2))[0]["input"].shape == (
        2,
        4,
        5,
        1,
    )


def told(*words):
    return CliRunner().invoke(cli, ["data", *map(str, words)], standalone_mode=False)


def test_commands(tmp_path, photos):
    """The guide's, and what they refuse."""
    done = told("pack", photos, tmp_path / "packed", "--set", "data.image_size=16")
    assert done.output.startswith("packed 160 training and 40 validation samples, 4 files, 0.1 MB"), done
    assert told("check", tmp_path / "packed").output.startswith("as it was written: 160 training")
    config = DataConfig(name="packed", path=str(tmp_path / "packed"), transforms=[{"name": "random_horizontal_flip"}])
    assert catalog.open_data(config).sample.input_shape == (16, 16, 1)
    with pytest.raises(ConfigError, match="packed data set already; .*packed; remove it"):
        raise told("pack", photos, tmp_path / "packed").exception
    with pytest.raises(DataError, match="the name of the file does not say what kind of data it holds"):
        raise told("pack", __file__, tmp_path / "other").exception
    with pytest.raises(DataError, match="labels 'label' were packed as classes, and task.loss wants numbers"):
        catalog.open_data(config, TaskConfig(loss="mse"))
    (tmp_path / "job.yaml").write_text("data: {name: digits}")
    assert told("pack", "-c", tmp_path / "job.yaml", tmp_path / "digits").output.startswith("packed 1,438 training")
    assert "packed  " in told().output


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "what", "opens"),
    [
        (cut, r"cut off: 15,\d+ bytes, 15,\d+ were written; .*val-labels-label-00000.npy", False),
        (lambda path: path.unlink(), "No such file or directory; .*val-labels-label-00000.npy; pack it again", False),
        (flip, "damaged: its SHA-256 is not the one that was written; .*val-labels-label-00000.npy", True),
        (lambda path: (path.parent / "manifest.json").unlink(), "or an incomplete one; .*manifest.json", False),
        (lambda path: cut(path.parent / "manifest.json") or cut(path.parent / "manifest.json"), "manifest.json", False),
    ],
    ids=["cut off", "missing", "one bit", "not finished", "half a manifest"],
)
def test_damaged(harm, what, opens, tmp_path):
    what = what.replace(r"15,\d+", r"[\d,]+")
    catalog.pack(DataConfig(), TaskConfig(), tmp_path / "packed", packing.Alone())
    harm(tmp_path / "packed" / "val-labels-label-00000.npy")
    with pytest.raises(DataError, match=what) as caught:
        packing.check(tmp_path / "packed", packing.Alone())
    assert "\n" not in str(caught.value)
    if opens:
        catalog.open_data(DataConfig(name="packed", path=str(tmp_path / "packed")))
    else:
        with pytest.raises(DataError, match=what):
            catalog.open_data(DataConfig(name="packed", path=str(tmp_path / "packed")))


def test_a_fault_while_packing(tmp_path, photos):
    """No manifest and nothing half-written is left."""
    bad = tmp_path / "photos"
    for name in ("0", "1"):
        (bad / name).mkdir(parents=True)
        for k in range(3):
            Image.new("L", (8, 8)).save(bad / name / f"{k}.png")
    cut(bad / "1" / "2.png")
    (bad / "1" / "2.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="no readable image: .*1/2.png"):
        raise told("pack", bad, tmp_path / "packed").exception
    assert not list((tmp_path / "packed").glob("*.tmp")) and not (tmp_path / "packed" / "manifest.json").exists()


def test_ranks_share_the_work(tmp_path, photos):
    """Two ranks of mpirun pack and check."""
    needs_horovod()
    line = [*MPIRUN, str(BIN / "hvd-train"), "data", "pack", str(photos), str(tmp_path / "packed")]
    done = subprocess.run(line, env=PYTHON, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0 and "8 files" in done.stdout and "2 ranks" in done.stdout, done.stderr
    flip(tmp_path / "packed" / "train-inputs-input-00001.npy")
    line[line.index("pack") :] = ["check", str(tmp_path / "packed")]
    found = subprocess.run(line, env=PYTHON, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert found.returncode == 3 and found.stderr.count("train-inputs-input-00001.npy") == 1, found.stderr


def test_packed_samples_stay_on_disk(tmp_path):
    """So ranks of a host share one copy, in the kernel's cache."""
    np.savez(tmp_path / "own.npz", x=np.zeros((64, 1 << 14), np.float32), y=np.arange(64) % 2)
    catalog.pack(
        DataConfig(name="npz", path=str(tmp_path / "own.npz")), TaskConfig(), tmp_path / "packed", packing.Alone()
    )
    tracemalloc.start()
    train = catalog.open_data(DataConfig(name="packed", path=str(tmp_path / "packed"))).train
    train.fetch(np.arange(3))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20 < sum(file.stat().st_size for file in (tmp_path / "packed").iterdir())


def test_a_packed_table_keeps_how_it_was_prepared(tmp_path):
    """Else the run's weights would get the columns of another table as they are."""
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["a,y", *(f"{1000 + 3 * k},{['no', 'yes'][k % 2]}" for k in range(40))]))
    raw = DataConfig(name="table", path=str(path), labels="y")
    folders = {}
    for name, keys in (("scaled", {"scale": "standard"}), ("plain", {})):
        folders[name] = tmp_path / name
        catalog.pack(raw.model_copy(update=keys), TaskConfig(), folders[name], packing.Alone())
    packed = DataConfig(name="packed", path=str(folders["scaled"]))
    own = catalog.open_data(raw.model_copy(update={"scale": "standard"}))
    data = catalog.open_data(packed)
    assert data.fitted == own.fitted and data.fitted
    again = catalog.open_data(packed.model_copy(update={"fitted": data.fitted}), request=DataRequest(run=data.sample))
    assert len(again.train) == 32
    plain = packed.model_copy(update={"path": str(folders["plain"])})
    others = [(packed, None), (plain, data.fitted)]  # the run's data.fitted
    for config, fitted in others:
        with pytest.raises(DataError, match="prepared in another way than the run's; .*data.fitted of the run"):
            config = config.model_copy(update={"fitted": fitted})
            catalog.open_data(config, request=DataRequest(run=data.sample))


def test_what_training_draws_is_not_packed(tmp_path):
    torch = pytest.importorskip("torch")
    samples = [(torch.tensor([k / 9.0]), k % 2) for k in range(20)]
    weighted = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.rand(20, 2), torch.arange(20) % 2),
        sampler=torch.utils.data.WeightedRandomSampler(torch.arange(1.0, 21), 20),
    )

    class Noisy(torch.utils.data.Dataset):
        targets = [k % 2 for k in range(20)]

        def __len__(self):
            return 20

        def __getitem__(self, k):
            return samples[k][0] + torch.rand(1), samples[k][1]

    for data, told in ((weighted, "the DataLoader's sampler has weights"), (Noisy(), "training samples are random")):
        module = SimpleNamespace(data=lambda data=data: data)
        sys.modules["noisy_data"] = module
        try:
            config = DataConfig(name="noisy_data:data")
            with pytest.raises(DataError, match=f"{told}, which packed data do not keep"):
                catalog.pack(config, TaskConfig(), tmp_path / "packed", packing.Alone())
        finally:
            del sys.modules["noisy_data"]
