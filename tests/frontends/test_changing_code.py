"""Which code may change weights by itself (frontends/changing_code.py)."""

from __future__ import annotations

import abc
import importlib
import re
from functools import partial

import pytest

from hvd_train.frontends.changing_code import changing_code, of_layers
from tests.frontends import changing_models

WORDS = re.compile(r"no_grad")
HERE = "tests.frontends.changing_models"


class Derived(changing_models.Changing):
    pass


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ([dict, abc.ABC, Exception], ""),
        ([changing_models.Changing], f"{HERE} (no_grad)"),
        ([int, partial(partial(changing_models.helper))], f"{HERE} (no_grad)"),
        ([type("Made", (), {"__module__": "nowhere"})], "nowhere"),
        ([re.Pattern], ""),
    ],
)
def test_modules_are_read(code, found):
    assert changing_code(code, ("re",), WORDS) == found


def test_functions_of_a_layer_are_looked_at():
    layer = Derived()
    layer.forward, layer.width, layer.act = changing_models.helper, 3, len
    assert [*of_layers([layer])] == [Derived, changing_models.helper, len]


def test_modules_that_a_users_module_imports_are_read(tmp_path, monkeypatch):
    (tmp_path / "far_helper.py").write_text("def shrink(x):\n    return x.assign(0)\n")
    (tmp_path / "near_model.py").write_text("import json\nfrom far_helper import shrink\n\ndef build():\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("near_model")
    assert changing_code([model], (), re.compile("assign")) == "far_helper (assign)"
    assert changing_code([model.build], (), re.compile("nothing of it")) == ""


def test_bases_count():
    assert changing_code([Derived], ("tests",), WORDS) == ""
    assert changing_code([Derived], (), re.compile("^class Changing", re.MULTILINE)) == f"{HERE} (class Changing)"
