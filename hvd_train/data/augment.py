"""The built-in random transforms of images. Each takes (k, height, width, channels), which it may write into."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hvd_train.config import TransformConfig
from hvd_train.data.order import U64, stream

GREY = np.array([0.299, 0.587, 0.114])  # of red, green and blue (ITU-R BT.601)
TRIES = 10  # windows that are drawn until one lies within the image


@dataclass(frozen=True)
class Draws:
    """Random numbers of some samples: (k,) places in the source; ``key`` is of one transform in one epoch."""

    key: int
    indices: np.ndarray

    def bits(self, each: int) -> np.ndarray:
        """Draw random bits, (k, each) uint64."""
        counters = self.indices.astype(U64)[:, None] * U64(each) + np.arange(each, dtype=U64)
        return stream(self.key, counters)

    def uniform(self, each: int) -> np.ndarray:
        """Draw numbers in [0, 1), (k, each) float64."""
        return (self.bits(each) >> U64(11)) * 2.0**-53

    def generators(self) -> list[np.random.Generator]:
        return [np.random.Generator(np.random.Philox(key=np.array([self.key, i], U64))) for i in self.indices]


def below(bits: np.ndarray, count: int) -> np.ndarray:
    """Make whole numbers in [0, count) of random bits, count < 2^32."""
    return (((bits >> U64(32)) * U64(count)) >> U64(32)).astype(np.int64)


def _chosen(bits: np.ndarray, p: float) -> np.ndarray:
    return (bits >> U64(11)) * 2.0**-53 < p


Transform = Callable[[np.ndarray, Draws, TransformConfig], np.ndarray]


def _horizontal_flip(images: np.ndarray, draws: Draws, config: TransformConfig) -> np.ndarray:
    """left and right change places; p: 0.5"""
    chosen = _chosen(draws.bits(1)[:, 0], 0.5 if config.p is None else config.p)
    images[chosen] = images[chosen][:, :, ::-1]
    return images


def _vertical_flip(images: np.ndarray, draws: Draws, config: TransformConfig) -> np.ndarray:
    """top and bottom change places; p: 0.5"""
    chosen = _chosen(draws.bits(1)[:, 0], 0.5 if config.p is None else config.p)
    images[chosen] = images[chosen][:, ::-1]
    return images


def _crop(images: np.ndarray, draws: Draws, config: TransformConfig) -> np.ndarray:
    """padding pixels on each side, then a part of the images' size; fill: 0, padding_mode: constant"""
    height, width = images.shape[1:3]
    around = config.padding or 0
    places = below(draws.bits(2), 2 * around + 1).tolist()
    if config.padding_mode == "constant":  # one image at a time, which stays in the cache
        padded = np.full((height + 2 * around, width + 2 * around, *images.shape[3:]), config.fill, images.dtype)
        for image, (top, left) in zip(images, places, strict=True):
            padded[around : around + height, around : around + width] = image
            image[...] = padded[top : top + height, left : left + width]
        return images
    padded = np.pad(images, ((0, 0), (around, around), (around, around), (0, 0)), config.padding_mode)
    for image, window, (top, left) in zip(images, padded, places, strict=True):
        image[...] = window[top : top + height, left : left + width]
    return images


def _cutout(images: np.ndarray, draws: Draws, config: TransformConfig) -> np.ndarray:
    """a square of size pixels, whose middle is anywhere, gets the value fill; p: 1, fill: 0"""
    height, width = images.shape[1:3]
    side, bits = config.size or 0, draws.bits(3)
    chosen = _chosen(bits[:, 0], 1.0 if config.p is None else config.p)
    tops, lefts = below(bits[:, 1], height) - side // 2, below(bits[:, 2], width) - side // 2
    for k in np.flatnonzero(chosen):
        top, left = int(tops[k]), int(lefts[k])
        images[k, max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = config.fill
    return images


# The default bounds on the area, as a share of the image, and on width over height.
WINDOWS = {"random_resized_crop": ([0.08, 1.0], [3 / 4, 4 / 3]), "random_erasing": ([0.02, 0.33], [0.3, 3.3])}


def _bounds(config: TransformConfig) -> tuple[list[float], list[float]]:
    scale, ratio = WINDOWS[config.name]
    return config.scale or scale, config.ratio or ratio


def _resized_crop(images: np.ndarray, draws: Draws, config: TransformConfig) -> np.ndarray:
    """a window of a random area and shape is stretched to the images' size; scale: [0.08, 1], ratio: [3/4, 4/3]"""
    height, width = images.shape[1:3]
    area, shape = _bounds(config)
    for image, numbers in zip(images, draws.uniform(2 * TRIES + 2), strict=True):
        rows, columns = _window(height, width, area, shape, numbers) or (height, width)
        top, left = numbers[-2] * (height - rows), numbers[-1] * (width - columns)
        # The middle of each new pixel, in the old image; pixel k lies at k.
        y = top + (np.arange(height) + 0.5) * rows / height - 0.5
        x = left + (np.arange(width) + 0.5) * columns / width - 0.5
        rows_of, columns_of = np.meshgrid(y, x, indexing="ij")
        image[...] = sampled(image, rows_of, columns_of, None)
    return images


def _window(
    height: int, width: int, scale: list[float], ratio: list[float], numbers: np.ndarray
) -> tuple[float, float] | None:
    """Return (rows, columns) of a window of a random area and shape; None: none of the tries fits into the image."""
    for k in range(TRIES):
        area = (scale[0] + numbers[2 * k] * (scale[1] - scale[0])) * height * width
        # Shapes and their inverses are equally likely.
        shape = math.exp(math.log(ratio[0]) + numbers[2 * k + 1] * (math.log(ratio[1]) - math.log(ratio[0])))
        rows, columns = math.sqrt(area / shape), math.sqrt(area * shape)
        if rows <= height and columns <= width:
            return rows, columns
    return None


def no_window_fits(config: TransformConfig, height: int, width: int) -> bool:
    """Return whether even the smallest area has no shape with which it lies within the image."""
    if config.name not in WINDOWS:
        return False
    scale, ratio = _bounds(config)
    return max(ratio[0], scale[0] * width / height) > min(ratio[1], width / height / scale[0])


def _rotation(images: np.ndarray, draws: Draws, config: TransformConfig) -> np.ndarray:
    """turned about the middle by up to degrees to either side; fill: 0"""
    for image, (number,) in zip(images, draws.uniform(1), strict=True):
        image[...] = rotated(image, (2 * number - 1) * (config.degrees or 0.0), config.fill)
    return images


def rotated(image: np.ndarray, degrees: float, fill: float) -> np.ndarray:
    """Turn an image (height, width, channels) counterclockwise about its middle; what lay outside gets ``fill``."""
    height, width = image.shape[:2]
    y, x = np.mgrid[:height, :width] - np.array([(height - 1) / 2, (width - 1) / 2])[:, None, None]
    angle = math.radians(degrees)
    # Where each new pixel lay. Rows are counted downwards.
    old_y = math.cos(angle) * y + math.sin(angle) * x
    old_x = math.cos(angle) * x - math.sin(angle) * y
    return sampled(image, old_y + (height - 1) / 2, old_x + (width - 1) / 2, fill)


def sampled(image: np.ndarray, y: np.ndarray, x: np.ndarray, fill: float | None) -> np.ndarray:
    """Take an image (height, width, channels) at places (h, w) between its pixels, by linear interpolation.

    A place outside gets ``fill``, or the nearest pixel where that is None.
    """
    height, width = image.shape[:2]
    # Rounding puts a place on the border 1e-15 outside of it.
    inside = (y > -1e-9) & (y < height - 1 + 1e-9) & (x > -1e-9) & (x < width - 1 + 1e-9)
    y, x = y.clip(0, height - 1), x.clip(0, width - 1)
    top, left = np.floor(y).astype(int), np.floor(x).astype(int)
    below, right = np.minimum(top + 1, height - 1), np.minimum(left + 1, width - 1)
    down, along = (y - top)[..., None], (x - left)[..., None]
    upper = image[top, left] * (1 - along) + image[top, right] * along
    lower = image[below, left] * (1 - along) + image[below, right] * along
    out = as_stored(upper * (1 - down) + lower * down, image.dtype)
    if fill is not None:
        out[~inside] = fill
    return out


def as_stored(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Bring numbers back to the type of the image: whole numbers are rounded, and stay within their range."""
    if dtype.kind == "f":
        return values.astype(dtype)
    bounds = np.iinfo(dtype)
    return np.rint(values).clip(bounds.min, bounds.max).astype(dtype)


def _color_jitter(images: np.ndarray, draws: Draws, config: TransformConfig) -> np.ndarray:
    """brightness, then contrast, then saturation times a random factor of 1 - x to 1 + x; of bytes and of [0, 1]"""
    strengths = np.array([config.brightness, config.contrast, config.saturation])
    factors = 1 + (2 * draws.uniform(3) - 1) * strengths
    for image, (bright, contrast, colour) in zip(images, factors, strict=True):
        x = image * bright
        grey = x @ GREY[:, None] if x.shape[-1] == 3 else x.mean(-1, keepdims=True)
        x = grey.mean() + contrast * (x - grey.mean())
        grey = x @ GREY[:, None] if x.shape[-1] == 3 else x
        image[...] = as_stored(grey + colour * (x - grey), image.dtype)
    return images


def _erasing(images: np.ndarray, draws: Draws, config: TransformConfig) -> np.ndarray:
    """a rectangle of a random area and shape gets the value fill; p: 0.5, scale: [0.02, 0.33], ratio: [0.3, 3.3]"""
    height, width = images.shape[1:3]
    area, shape = _bounds(config)
    for image, numbers in zip(images, draws.uniform(2 * TRIES + 3), strict=True):
        if numbers[-1] < (0.5 if config.p is None else config.p):
            # As in torchvision, an image into which no window fits stays as it is.
            window = _window(height, width, area, shape, numbers)
            if window is None:
                continue
            rows, columns = (max(1, round(side)) for side in window)
            top = int(numbers[-3] * (height - rows + 1))
            left = int(numbers[-2] * (width - columns + 1))
            image[top : top + rows, left : left + columns] = config.fill
    return images


BUILT_IN: dict[str, Transform] = {
    "random_horizontal_flip": _horizontal_flip,
    "random_vertical_flip": _vertical_flip,
    "random_crop": _crop,
    "random_resized_crop": _resized_crop,
    "random_rotation": _rotation,
    "color_jitter": _color_jitter,
    "random_erasing": _erasing,
    "cutout": _cutout,
}
# After which labels at each place of an image would not fit it.
MOVING = ("random_horizontal_flip", "random_vertical_flip", "random_crop", "random_resized_crop", "random_rotation")
