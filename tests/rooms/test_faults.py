"""Each fault that a run must survive, or tell in one line, has tests that name its number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FAULTS = {
    1: "SIGKILL on a rank within a step",
    2: "SIGKILL on rank 0",
    3: "SIGKILL on the launcher, or on hvd-train",
    4: "SIGKILL at each point of a save",
    5: "SIGKILL at random times, again and again",
    6: "SIGKILL on a rank while rank 0 saves",
    7: "a full disk",
    8: "a disk that fails once",
    9: "a run folder that cannot be written",
    10: "SIGTERM or SIGUSR1 to the job or to a rank",
    11: "a signal in each phase",
    12: "a signal while workers load data",
    13: "Ctrl-C, once and twice",
    14: "a rank that stops",
    15: "a rank that is slow",
    16: "an exception on one rank",
    17: "a rank that leaves early with code 0",
    18: "too little memory",
    19: "a truncated checkpoint",
    20: "a flipped bit in a checkpoint",
    21: "a checkpoint of another number of ranks",
    22: "a checkpoint of another model or framework",
    23: "a resume with another configuration",
    24: "NaN on one rank",
    25: "infinite losses and overflows",
    26: "ranks whose models or configurations differ",
    27: "weights that change on one rank",
    28: "any number of samples, fewer than ranks among them",
    29: "ranks that see other data",
    30: "damaged data",
    31: "data that are missing, or go while training",
    32: "configurations that are none",
    33: "environments that cannot be",
    34: "files that would run code, or read others",
    35: "values that would run code in a shell or a YAML reader",
    36: "strangers at the ports of a job",
    37: "secrets in command lines and files",
    38: "jobs that start at the same moment",
    39: "two jobs in one run folder",
    40: "shared memory and ports after a kill",
    41: "strange paths, locales, time zones; a closed output",
    42: "Slurm that starts a job again",
    43: "libraries that are missing or broken",
    44: "configurations and checkpoints of random bytes",
}
# "F04, F08: ..." in a docstring, or "test_f04_..." as a name.
NUMBER = re.compile(r"(?:\bF|_f)(\d\d)(?:\b|_)")
NAMED = {int(k) for f in TESTS.rglob("test_*.py") if f != Path(__file__) for k in NUMBER.findall(f.read_text())}


@pytest.mark.parametrize("number", FAULTS)
def test_a_test_names_it(number):
    assert number in NAMED, FAULTS[number]
