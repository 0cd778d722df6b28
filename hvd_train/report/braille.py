"""Draw curves as text with Braille characters, which have 2 x 4 dots each."""

from __future__ import annotations

from collections.abc import Sequence

# The bits of the 8 points of a character, by row and column (Unicode, chapter 21.1).
BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
EMPTY = 0x2800

Points = Sequence[tuple[float, float]]


class Canvas:
    """A canvas of ``width`` x ``height`` characters, scaled to the range of ``points``; the y axis points upwards."""

    def __init__(self, width: int, height: int, points: Points) -> None:
        self.width, self.height = width, height
        self.low_x, self.high_x = _span([x for x, _ in points])
        self.low_y, self.high_y = _span([y for _, y in points])
        self._cells = [[0] * width for _ in range(height)]

    def _dot_at(self, x: float, y: float) -> tuple[int, int]:
        across = (x - self.low_x) / (self.high_x - self.low_x)
        up = (y - self.low_y) / (self.high_y - self.low_y)
        return round(across * (2 * self.width - 1)), round((1 - up) * (4 * self.height - 1))

    def _dot(self, column: int, row: int) -> None:
        self._cells[row // 4][column // 2] |= BITS[row % 4][column % 2]

    def dots(self, points: Points) -> None:
        for x, y in points:
            self._dot(*self._dot_at(x, y))

    def line(self, points: Points) -> None:
        """Connect the points by straight lines."""
        dots = [self._dot_at(x, y) for x, y in points]
        for (x, y), (to_x, to_y) in zip(dots, dots[1:], strict=False):
            count = max(abs(to_x - x), abs(to_y - y), 1)
            for k in range(count):
                self._dot(round(x + (to_x - x) * k / count), round(y + (to_y - y) * k / count))
        if dots:
            self._dot(*dots[-1])

    def rows(self) -> list[str]:
        """Return the lines of text, with the largest and the smallest y on the left."""
        labels = [f"{self.high_y:.4g}", *[""] * (self.height - 2), f"{self.low_y:.4g}"]
        wide = max(map(len, labels))
        drawn = ("".join(chr(EMPTY + bits) for bits in row) for row in self._cells)
        return [f"{label:>{wide}} |{row}" for label, row in zip(labels, drawn, strict=True)]


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low == high:  # a single value is drawn in the middle
        half = abs(low) / 2 or 0.5
        return low - half, high + half
    return low, high
