"""When the ranks of one host are told that fewer of them are likely faster: by figures that benchmark models gave."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hvd_train.core.callbacks.advice import FewerRanksAdvice
from hvd_train.protocol import TensorSpec

MLP, RESNET, BERT = 24_202_250, 11_172_810, 110_000_000  # weights
CNN, THIN, GPT = 431_080, 234_538, 834_304


def advice(monkeypatch, share, weights, ranks=2, threads=1, load=1.9, batch=64) -> list[str]:
    """The messages of 20 steps."""
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr("os.cpu_count", lambda: ranks * threads)
    messages: list[str] = []
    trainer = SimpleNamespace(
        exchange_share=share,
        frontend=SimpleNamespace(specs=lambda: [TensorSpec("w", (weights,), "float32")]),
        communicator=SimpleNamespace(size=ranks),
        config=SimpleNamespace(batch_size=batch),
        log=SimpleNamespace(message=messages.append),
    )
    hook = FewerRanksAdvice(threads)
    for _ in range(20):
        hook.on_step(trainer, SimpleNamespace())
    return messages


@pytest.mark.parametrize(
    ("share", "weights", "advised"),
    [
        (0.16, MLP, True),  # PyTorch
        (0.31, MLP, True),  # Keras
        (0.05, RESNET, False),
        (0.03, BERT, False),
        (0.16, CNN, False),  # its ranks wait for one another, and not for the exchange
        (0.17, THIN, False),
        (0.08, GPT, False),
        (None, MLP, False),  # not yet measured
    ],
)
def test_only_models_whose_exchange_is_long_get_the_advice(monkeypatch, share, weights, advised):
    assert len(advice(monkeypatch, share, weights)) == advised


def test_the_advice_keeps_the_global_batch_and_takes_all_cores(monkeypatch):
    assert advice(monkeypatch, 0.31, MLP) == [
        "note: 2 ranks spend 31% of the time in the exchange of 24.2 million weights; 1 rank with 2 threads is likely "
        "to be faster on this host (-np 1 --set threads=2 --set batch_size=128)"
    ]
    (note,) = advice(monkeypatch, 0.31, MLP, ranks=4, threads=2, batch=None)  # global_batch_size
    assert note.endswith("; 2 ranks with 4 threads each are likely to be faster on this host (-np 2 --set threads=4)")
    (note,) = advice(monkeypatch, 0.31, MLP, ranks=3)
    assert note.endswith("(-np 1 --set threads=3 --set batch_size=192)")


def test_beside_other_work_nothing_is_advised(monkeypatch):
    assert advice(monkeypatch, 0.31, MLP, load=2.4)
    assert not advice(monkeypatch, 0.31, MLP, load=2.6)
