"""Energy from counters: RAPL's overflow and parts, NVML, hosts that have none, and a training that logs it."""

from __future__ import annotations

import ctypes

import pytest

from hvd_train.core import energy
from hvd_train.core.energy import Energy, of_hosts
from hvd_train.jobs import messages
from hvd_train.run_folder import metrics_file
from tests.core.test_loop import config
from tests.core.test_time_log import run


class Host:
    """A host whose counters are files: {zone: (name, microjoules)}; they begin again at 0 after ``range``."""

    def __init__(self, folder, zones, range=1000_000_000):
        self.folder, self.range = folder, range
        for zone, (name, value) in zones.items():
            (folder / zone).mkdir(parents=True)
            (folder / zone / "name").write_text(f"{name}\n")
            (folder / zone / "max_energy_range_uj").write_text(f"{range}\n")
            self.set(zone, value)

    def set(self, zone, value):
        (self.folder / zone / "energy_uj").write_text(f"{value % self.range}\n")


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    monkeypatch.setattr(energy, "NVML", "libthere-is-none.so")
    zones = {"intel-rapl:0": ("package-0", 999_000_000), "intel-rapl:0:0": ("core", 5), "intel-rapl:0:1": ("dram", 0)}
    return Host(tmp_path, zones | {"intel-rapl:1": ("psys", 7), "intel-rapl-mmio:0": ("package-0", 9)})


def test_packages_and_memory_count_once_and_overflow(host):
    now = [0.0]
    one = Energy(lambda: now[0])
    assert one.read() == {}
    one.begin()
    for zone in ("intel-rapl:0:0", "intel-rapl:1", "intel-rapl-mmio:0"):
        host.set(zone, 800_000_000)
    host.set("intel-rapl:0", 999_000_000 + 50_000_000)
    host.set("intel-rapl:0:1", 4_000_000)
    assert one.read() == {"RAPL": 0.0}  # not yet again
    now[0] += 6
    assert one.read() == {"RAPL": 54.0}
    host.set("intel-rapl:0", 999_000_000 + 51_000_000)
    assert one.read(last=True) == {"RAPL": 55.0}


def test_no_counter_no_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "none")
    monkeypatch.setattr(energy, "NVML", "libthere-is-none.so")
    one = Energy()
    one.begin()
    assert one.read(last=True) == {}


def test_a_counter_that_goes_away_takes_its_figure_with_it(host):
    one = Energy()
    one.begin()
    (host.folder / "intel-rapl:0" / "energy_uj").unlink()
    assert one.read(last=True) == {}


def test_gpus(tmp_path, monkeypatch):
    """Two GPUs of a library that is replaced: millijoules since the driver was loaded."""
    used = {0: 5_000, 1: 90_000}

    class Library:
        nvmlInit_v2 = staticmethod(lambda: 0)

        @staticmethod
        def nvmlDeviceGetCount_v2(count):
            count._obj.value = 2
            return 0

        @staticmethod
        def nvmlDeviceGetHandleByIndex_v2(index, device):
            device._obj.value = index + 1
            return 0

        @staticmethod
        def nvmlDeviceGetTotalEnergyConsumption(device, millijoules):
            millijoules._obj.value = used[device.value - 1]
            return 0

    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    one = Energy()
    one.begin()
    used[0] += 1_000
    used[1] += 2_500
    assert one.read(last=True) == {"NVML": 3.5}
    used[0] = 0  # the driver was loaded again
    assert one.read(last=True) == {}


def test_a_host_counts_once_and_all_hosts_must_have_a_source():
    ranks = [{"RAPL": 10.0, "NVML": 1.0}, {"RAPL": 11.0, "NVML": 2.0}, {"RAPL": 5.0}]
    assert of_hosts(["a", "a", "b"], ranks) == {"RAPL": 15.0}
    assert of_hosts(["a", "b"], [{"RAPL": 1.0}, {}]) == {}
    assert of_hosts([], []) == {}


def test_a_training_logs_wh_of_its_host(host, tmp_path, monkeypatch):
    """Two ranks on one host, whose package uses 3.6 kJ more at each reading: the host counts once."""
    readings = []

    def counting(file):
        def read():
            readings.append(file)
            return 3_600_000_000 * len(readings) * file.parent.match("intel-rapl:0")

        return read

    monkeypatch.setattr(energy, "_reader", counting)
    monkeypatch.setattr(energy, "READ_SECONDS", 0.0)
    summary, _, _ = run(2, config(max_epochs=3), tmp_path / "run")
    rows = [row for row in metrics_file.read(tmp_path / "run")[0] if row["event"] == "energy"]
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert all(row["wh"] == row["RAPL"] > 0 for row in rows)
    told = summary["energy"]
    assert told["hosts"] == 1 and told["wh"] == told["RAPL"] >= sum(row["wh"] for row in rows) - 1e-6
    assert told["wh"] <= len(readings), "one reading is 1 Wh"
    assert metrics_file.scalars(rows[0]) == {"energy_wh": rows[0]["wh"]}
    assert (
        messages.energy_of(summary)
        == f"energy: {told['wh']:,.3g} Wh on 1 host, whoever used it (RAPL {told['wh']:,.3g})"
    )
    assert messages.energy_of({}) == ""
