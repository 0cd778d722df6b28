"""A class and a function whose module has the word that ``test_changing_code`` looks for: no_grad."""

from __future__ import annotations


class Changing:
    pass


def helper() -> None:
    pass
