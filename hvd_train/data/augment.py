"""The built-in random transforms of images. Each gets (k, height, width, channels), and may write in place."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hvd_train.config import TransformConfig
from hvd_train.data.order import U64, stream

GREY = np.array([0.299, 0.587, 0.114])  # of red, green and blue (ITU-R BT.601)
TRIES = 10  # windows drawn at most until one fits into the image


@dataclass(frozen=True)
class RandomNumbers:
    """Random numbers for the samples ``indices`` (k,); ``key`` belongs to one transform in one epoch."""

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
    """Map random 64-bit numbers to integers in [0, count), count < 2^32."""
    return (((bits >> U64(32)) * U64(count)) >> U64(32)).astype(np.int64)


def _chosen(bits: np.ndarray, p: float) -> np.ndarray:
    return (bits >> U64(11)) * 2.0**-53 < p


Transform = Callable[[np.ndarray, RandomNumbers, TransformConfig], np.ndarray]


def _horizontal_flip(images: np.ndarray, draws: RandomNumbers, config: TransformConfig) -> np.ndarray:
    """mirrored left to right; p: 0.5"""
    chosen = _chosen(draws.bits(1)[:, 0], 0.5 if config.p is None else config.p)
    images[chosen] = images[chosen][:, :, ::-1]
    return images


def _vertical_flip(images: np.ndarray, draws: RandomNumbers, config: TransformConfig) -> np.ndarray:
    """mirrored top to bottom; p: 0.5"""
    chosen = _chosen(draws.bits(1)[:, 0], 0.5 if config.p is None else config.p)
    images[chosen] = images[chosen][:, ::-1]
    return images


def _crop(images: np.ndarray, draws: RandomNumbers, config: TransformConfig) -> np.ndarray:
    """padded by padding pixels on each side, then cropped to the original size; fill: 0, padding_mode: constant"""
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


def _cutout(images: np.ndarray, draws: RandomNumbers, config: TransformConfig) -> np.ndarray:
    """a square of size pixels, centered anywhere, is set to fill; p: 1, fill: 0"""
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


def _resized_crop(images: np.ndarray, draws: RandomNumbers, config: TransformConfig) -> np.ndarray:
    """a window of random area and aspect ratio, resized to the original size; scale: [0.08, 1], ratio: [3/4, 4/3]"""
    height, width = images.shape[1:3]
    area, shape = _bounds(config)
    for image, numbers in zip(images, draws.uniform(2 * TRIES + 2), strict=True):
        rows, columns = _window(height, width, area, shape, numbers) or (height, width)
        top, left = numbers[-2] * (height - rows), numbers[-1] * (width - columns)
        # The center of each new pixel in coordinates of the old image, whose pixel k is centered at k.
        y = top + (np.arange(height) + 0.5) * rows / height - 0.5
        x = left + (np.arange(width) + 0.5) * columns / width - 0.5
        rows_of, columns_of = np.meshgrid(y, x, indexing="ij")
        image[...] = sampled(image, rows_of, columns_of, None)
    return images


def _window(
    height: int, width: int, scale: list[float], ratio: list[float], numbers: np.ndarray
) -> tuple[float, float] | None:
    """Draw (rows, columns) of a window of random area and aspect ratio; None if no try fits into the image."""
    for k in range(TRIES):
        area = (scale[0] + numbers[2 * k] * (scale[1] - scale[0])) * height * width
        # Aspect ratios and their inverses are equally likely.
        shape = math.exp(math.log(ratio[0]) + numbers[2 * k + 1] * (math.log(ratio[1]) - math.log(ratio[0])))
        rows, columns = math.sqrt(area / shape), math.sqrt(area * shape)
        if rows <= height and columns <= width:
            return rows, columns
    return None


def no_window_fits(config: TransformConfig, height: int, width: int) -> bool:
    """Return whether no allowed aspect ratio fits a window of the smallest area into the image."""
    if config.name not in WINDOWS:
        return False
    scale, ratio = _bounds(config)
    return max(ratio[0], scale[0] * width / height) > min(ratio[1], width / height / scale[0])


def _rotation(images: np.ndarray, draws: RandomNumbers, config: TransformConfig) -> np.ndarray:
    """rotated about the center by -degrees to +degrees; fill: 0"""
    for image, (number,) in zip(images, draws.uniform(1), strict=True):
        image[...] = rotated(image, (2 * number - 1) * (config.degrees or 0.0), config.fill)
    return images


def rotated(image: np.ndarray, degrees: float, fill: float) -> np.ndarray:
    """Rotate an image (height, width, channels) counterclockwise about its center; new corners get ``fill``."""
    height, width = image.shape[:2]
    y, x = np.mgrid[:height, :width] - np.array([(height - 1) / 2, (width - 1) / 2])[:, None, None]
    angle = math.radians(degrees)
    # The old coordinates of each new pixel. Rows are counted downwards.
    old_y = math.cos(angle) * y + math.sin(angle) * x
    old_x = math.cos(angle) * x - math.sin(angle) * y
    return sampled(image, old_y + (height - 1) / 2, old_x + (width - 1) / 2, fill)


def sampled(image: np.ndarray, y: np.ndarray, x: np.ndarray, fill: float | None) -> np.ndarray:
    """Sample an image (height, width, channels) at coordinates ``y``, ``x`` (h, w) by bilinear interpolation.

    Coordinates outside of the image get ``fill``, or the nearest pixel if ``fill`` is None.
    """
    height, width = image.shape[:2]
    # Rounding can move a point on the border 1e-15 outside.
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
    """Convert to the dtype of the image; for integers round, and clip to the range of the dtype."""
    if dtype.kind == "f":
        return values.astype(dtype)
    bounds = np.iinfo(dtype)
    return np.rint(values).clip(bounds.min, bounds.max).astype(dtype)


def _color_jitter(images: np.ndarray, draws: RandomNumbers, config: TransformConfig) -> np.ndarray:
    """brightness, contrast and saturation, in this order, times random factors of 1 - x to 1 + x; of bytes or [0, 1]"""
    strengths = np.array([config.brightness, config.contrast, config.saturation])
    factors = 1 + (2 * draws.uniform(3) - 1) * strengths
    for image, (bright, contrast, colour) in zip(images, factors, strict=True):
        top = 1.0 if image.dtype.kind == "f" else 255.0  # each step ends in the range of images, as torchvision's
        x = np.clip(image * bright, 0, top)
        grey = x @ GREY[:, None] if x.shape[-1] == 3 else x.mean(-1, keepdims=True)
        x = np.clip(grey.mean() + contrast * (x - grey.mean()), 0, top)
        grey = x @ GREY[:, None] if x.shape[-1] == 3 else x
        image[...] = as_stored(np.clip(grey + colour * (x - grey), 0, top), image.dtype)
    return images


def _erasing(images: np.ndarray, draws: RandomNumbers, config: TransformConfig) -> np.ndarray:
    """a rectangle of random area and aspect ratio is set to fill; p: 0.5, scale: [0.02, 0.33], ratio: [0.3, 3.3]"""
    height, width = images.shape[1:3]
    area, shape = _bounds(config)
    for image, numbers in zip(images, draws.uniform(2 * TRIES + 3), strict=True):
        if numbers[-1] < (0.5 if config.p is None else config.p):
            # As in torchvision, an image into which no window fits is left unchanged.
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
# They move pixels, so labels per pixel would no longer fit.
MOVING = ("random_horizontal_flip", "random_vertical_flip", "random_crop", "random_resized_crop", "random_rotation")
