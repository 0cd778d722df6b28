"""Errors in the user's code: the lines of that code come first, then the model and what it gets."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest

import hvd_train
from hvd_train.config import user_code
from hvd_train.core.agreement import collectively
from hvd_train.errors import ConfigError, DataError, named_reason
from hvd_train.frontends.serial import Serial
from hvd_train.launch.failed_rank import _lines, _trace

X, Y = np.zeros((8, 6), np.float32), np.arange(8) % 3
MODELS = {
    "pytorch": """
        import torch

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(6, 3)

            def forward(self, x):
                return self.layer(x).nope if self.training else self.layer(x)
        """,
    "tensorflow": """
        import keras

        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.layer = keras.layers.Dense(3)

            def call(self, x, training=False):
                return self.layer(x).nope if training else self.layer(x)
        """,
}


def written(folder: Path, name: str, text: str) -> Path:
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return folder / f"{name}.py"


@pytest.fixture
def keys(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield {"tensorboard": False, "run_dir": str(tmp_path / "run"), "batch_size": 8, "max_epochs": 1}
    user_code.look_in(None)


@pytest.mark.parametrize("framework", MODELS)
def test_a_model_that_raises(keys, tmp_path, framework):
    """Eight frames of the package came first, and in Keras the reason did not stand in the first line."""
    path = written(tmp_path, f"own_{framework}", MODELS[framework])
    with pytest.raises(AttributeError) as caught:
        name = f"own_{framework}:Model"
        hvd_train.fit(keys | {"framework": framework, "model": {"name": name}}, data=((X, Y), (X, Y)))
    assert "Exception encountered" not in named_reason(caught.value) and "nope" in named_reason(caught.value)
    lines = _trace(caught.value, "FILE")
    # pytest's own frames, and those of this file, come first here.
    shown = "\n".join(lines)
    last = user_code.user_frames(caught.value)[-1]
    assert last.filename == str(path) and ".nope" in last.line
    assert "hvd_train/frontends" not in shown and "site-packages/torch" not in shown and "keras/src" not in shown
    assert shown.index(str(path)) < shown.index("AttributeError: ") and "\x1b" not in shown
    assert lines[-2:] == [f"the model {name} gets (6,) float32", "the whole traceback: FILE"]
    assert "hvd_train/frontends" in "\n".join(_trace(caught.value, "")), "without a file all of it is printed"


def without_frames_here(error: BaseException) -> BaseException:
    """Take away the frames of pytest and of this file, which are a user's."""
    while error.__traceback__.tb_frame.f_code.co_filename == __file__:
        error.__traceback__ = error.__traceback__.tb_next
    return error


def test_a_layer_of_a_model_without_a_line_of_the_users(keys, tmp_path):
    """Sixty lines of frames of click, hvd_train and torch were printed, none of which the user has written."""
    text = """
        from torch.nn import Linear, ReLU, Sequential

        def model():
            return Sequential(Linear(6, 8), ReLU(), Sequential(Linear(100, 3)))
        """
    written(tmp_path, "sizes", text)
    with pytest.raises(RuntimeError) as caught:
        model = {"name": "sizes:model"}
        hvd_train.fit(keys | {"framework": "pytorch", "model": model}, data=((X, Y), (X, Y)))
    error = without_frames_here(caught.value)
    assert _trace(error, "FILE") == [
        "in layer 2.0 of Sequential: Linear(in_features=100, out_features=3, bias=True)",
        f"RuntimeError: {error}",
        "the model sizes:model gets (6,) float32",
        "the whole traceback: FILE",
    ]
    assert "torch/nn" in "\n".join(_trace(error, "")), "without a file all of it is printed"


def test_keras_reason_without_what_it_writes_around_it(keys, tmp_path):
    """Codes of bold letters were printed, and <class 'inspect._empty'> among the arguments of Keras' function."""
    text = """
        from keras import Input, Model, layers

        def model():
            x = Input((6,))
            return Model(x, layers.Dense(3)(layers.Reshape((100,))(x)))
        """
    path = written(tmp_path, "reshaped", text)
    with pytest.raises(ConfigError) as caught:
        model = {"name": "reshaped:model"}
        hvd_train.fit(keys | {"framework": "tensorflow", "model": model}, data=((X, Y), (X, Y)))
    reason = "The total size of the tensor must be unchanged. Received: input_shape=(6,), target_shape=(100,)"
    line = f"error: the model cannot be built: {reason}; model.name: reshaped:model; {path}:6"
    assert _lines(caught.value) == [line]


def test_an_error_of_ours_keeps_its_traceback():
    try:
        hvd_train.errors.amount(None, 3)
    except TypeError as error:
        error.__traceback__ = error.__traceback__.tb_next  # without this test's frame
        assert _trace(error, "FILE")[0].startswith("Traceback (most recent call last):")


def test_lines_name_the_place_in_the_users_code(keys, tmp_path):
    """Of a module that cannot be imported, and of functions: a line of the error names the file and its line."""
    for name, text, message in (
        ("broken", "def model(:\n    pass\n", "cannot be imported: invalid syntax, {path}:1; model.name: broken:f"),
        (
            "lacks",
            "import not_there\n",
            "cannot be imported: No module named 'not_there'; model.name: lacks:f; {path}:1",
        ),
    ):
        path = written(tmp_path, name, text)
        with pytest.raises(ConfigError) as caught:
            user_code.user_function(f"{name}:f", f"model.name: {name}:f")
        assert _lines(caught.value) == [f"error: {message.format(path=path)}"]
    path = written(tmp_path, "data_of_mine", 'def data():\n    return {}["b"]\n')
    with pytest.raises(DataError) as caught:
        hvd_train.fit(keys | {"data": {"name": "data_of_mine:data"}})
    assert _lines(caught.value)[0].endswith(f"look at data.options too; {path}:2")


def test_the_place_survives_the_agreement_of_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, "fails_late", "def f():\n    raise KeyError('mine')\n")
    function = user_code.user_function("fails_late:f", "x")

    def work():
        try:
            function()
        except KeyError as error:
            raise ConfigError(named_reason(error)) from error

    with pytest.raises(ConfigError) as caught:
        collectively(Serial(), work)
    assert _lines(caught.value) == [f"error: KeyError: 'mine'; {path}:2"]
