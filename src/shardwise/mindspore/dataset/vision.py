"""Functions of ``map`` on images: arrays (height, width, channels), or Pillow's.

Resizing, rotation and decoding are Pillow's. Random functions draw from numpy, which ``set_seed`` seeds.
"""

from __future__ import annotations

import enum
import io
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from shardwise.errors import problem
from shardwise.mindspore.dataset.effects import (
    CLASSES,
    FILTERS,
    ConvertMode,
    Effect,
    Image,
    ImageEnhance,
    ImageOps,
    turned,
)
from shardwise.mindspore.dataset.transforms import Array, TypeCast
from shardwise.mindspore.named import WithSettings, absent, classes_of

Sizes = int | Sequence[int]


class ImageBatchFormat(enum.StrEnum):
    """The order of dims in a batch of images."""

    NHWC = "NHWC"
    NCHW = "NCHW"


class Inter(enum.IntEnum):
    """Interpolation methods."""

    NEAREST = 0
    LINEAR = BILINEAR = 2
    CUBIC = BICUBIC = 3
    AREA = 4
    ANTIALIAS = 1


class Border(enum.Enum):
    """Padding modes, by numpy's names."""

    CONSTANT = "constant"
    EDGE = "edge"
    REFLECT = "reflect"
    SYMMETRIC = "symmetric"


def _array(image: Any) -> Array:
    return np.asarray(image)


def _pair(size: Sizes) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _chance(probability: float) -> bool:
    return bool(np.random.random() < probability)


def _like(result: Array, image: Any) -> Any:
    return Image.fromarray(result) if isinstance(image, Image.Image) else result


def _by_pillow(image: Any, change: Any) -> Any:
    """Apply a Pillow function to an image; for dtypes that Pillow lacks, channel by channel in float32."""
    if isinstance(image, Image.Image):
        return change(image)
    array = _array(image)
    if array.dtype == np.uint8 and (array.ndim == 2 or array.shape[2] in (3, 4)):
        return np.asarray(change(Image.fromarray(array)))
    channels = array[..., None] if array.ndim == 2 else array
    parts = [np.asarray(change(Image.fromarray(channels[..., c].astype(np.float32)))) for c in range(channels.shape[2])]
    changed = np.stack(parts, -1)
    rounded = np.rint(changed) if array.dtype.kind in "ui" else changed
    return (rounded[..., 0] if array.ndim == 2 else rounded).astype(array.dtype)


def _cropped(image: Any, top: int, left: int, height: int, width: int) -> Any:
    return _like(_array(image)[top : top + height, left : left + width], image)


class Decode(WithSettings, to_pil=False):
    """Decoding of a file's bytes to RGB pixels. ``to_pil``: return a Pillow image."""

    def __call__(self, data: Any) -> Any:
        with Image.open(io.BytesIO(_array(data).tobytes() if not isinstance(data, bytes) else data)) as file:
            image = file.convert("RGB")
        return image if self.to_pil else np.asarray(image)


class Resize(WithSettings, size=..., interpolation=Inter.LINEAR):
    """Resizing to (height, width), or to a size of the shorter side."""

    def _settle(self) -> None:
        self.filter = FILTERS[self.interpolation]

    def __call__(self, image: Any) -> Any:
        height, width = _array(image).shape[:2]
        if isinstance(self.size, int):
            short = min(height, width)
            height, width = (int(self.size * side / short) for side in (height, width))
        else:
            height, width = _pair(self.size)
        return _by_pillow(image, lambda picture: picture.resize((width, height), self.filter))


class CenterCrop(WithSettings, size=...):
    """Crop of the centre."""

    size: Any

    def _settle(self) -> None:
        self.size = _pair(self.size)

    def __call__(self, image: Any) -> Any:
        (height, width), (h, w) = self.size, _array(image).shape[:2]
        if h < height or w < width:
            image = Pad((max(0, -(-(width - w) // 2)), max(0, -(-(height - h) // 2))))(image)
            h, w = _array(image).shape[:2]
        return _cropped(image, (h - height) // 2, (w - width) // 2, height, width)


class Crop(WithSettings, coordinates=..., size=...):
    """Crop of ``size`` at ``coordinates`` (top, left)."""

    coordinates: Any
    size: Any

    def _settle(self) -> None:
        self.coordinates, self.size = _pair(self.coordinates), _pair(self.size)

    def __call__(self, image: Any) -> Any:
        return _cropped(image, *self.coordinates, *self.size)


class Pad(WithSettings, padding=..., fill_value=0, padding_mode=Border.CONSTANT):
    """Padding of the sides: one number, (left and right, top and bottom), or (left, top, right, bottom)."""

    def _settle(self) -> None:
        sides = (self.padding,) * 4 if isinstance(self.padding, int) else tuple(self.padding)
        self.left, self.top, self.right, self.bottom = sides * 2 if len(sides) == 2 else sides

    def __call__(self, image: Any) -> Any:
        array = _array(image)
        sides = ((self.top, self.bottom), (self.left, self.right), *((0, 0),) * (array.ndim - 2))
        if self.padding_mode is not Border.CONSTANT:
            return _like(np.pad(array, sides, mode=self.padding_mode.value), image)
        padded = np.empty([n + a + b for n, (a, b) in zip(array.shape, sides, strict=True)], array.dtype)
        padded[...] = self.fill_value
        height, width = array.shape[:2]
        padded[self.top : self.top + height, self.left : self.left + width] = array
        return _like(padded, image)


class RandomCrop(WithSettings, size=..., padding=None, pad_if_needed=False, fill_value=0, padding_mode=Border.CONSTANT):
    """Random crop of ``size``, after ``padding``."""

    size: Any

    def _settle(self) -> None:
        self.size = _pair(self.size)
        self.pad = None if self.padding is None else Pad(self.padding, self.fill_value, self.padding_mode)

    def __call__(self, image: Any) -> Any:
        image = image if self.pad is None else self.pad(image)
        (height, width), (h, w) = self.size, _array(image).shape[:2]
        if self.pad_if_needed and (h < height or w < width):
            image = Pad((max(0, width - w), max(0, height - h)))(image)
            h, w = _array(image).shape[:2]
        if h < height or w < width:
            what = f"RandomCrop({self.size}) of an image of {h} x {w}"
            raise RuntimeError(problem(what, fix="pad_if_needed=True, or padding="))
        top, left = np.random.randint(h - height + 1), np.random.randint(w - width + 1)
        return _cropped(image, top, left, height, width)


class RandomResizedCrop(
    WithSettings, size=..., scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), interpolation=Inter.LINEAR, max_attempts=10
):
    """Random crop of random size and aspect ratio, resized."""

    def _settle(self) -> None:
        self.resize = Resize(_pair(self.size), self.interpolation)

    def __call__(self, image: Any) -> Any:
        h, w = _array(image).shape[:2]
        for _ in range(self.max_attempts):
            area = h * w * np.random.uniform(self.scale[0], self.scale[1])
            ratio = np.exp(np.random.uniform(np.log(self.ratio[0]), np.log(self.ratio[1])))
            height, width = round((area / ratio) ** 0.5), round((area * ratio) ** 0.5)
            if 0 < height <= h and 0 < width <= w:
                top, left = np.random.randint(h - height + 1), np.random.randint(w - width + 1)
                return self.resize(_cropped(image, top, left, height, width))
        return self.resize(CenterCrop(min(h, w))(image))


class RandomCropDecodeResize(RandomResizedCrop):
    """Random resized crop of a file's bytes."""

    def __call__(self, image: Any) -> Any:
        return super().__call__(Decode()(image))


class Rotate(WithSettings, degrees=..., resample=Inter.NEAREST, expand=False):
    """Rotation by degrees, counter-clockwise."""

    def _settle(self) -> None:
        self.filter = FILTERS[self.resample]

    def __call__(self, image: Any) -> Any:
        return self.turned(image, self.degrees)

    def turned(self, image: Any, degrees: float) -> Any:
        return _by_pillow(image, lambda picture: picture.rotate(degrees, self.filter, self.expand))


class RandomRotation(Rotate):
    """Random rotation by up to ``degrees``, or by degrees of a range."""

    def __call__(self, image: Any) -> Any:
        low, high = (-self.degrees, self.degrees) if isinstance(self.degrees, (int, float)) else self.degrees
        return self.turned(image, float(np.random.uniform(low, high)))


class RandomColorAdjust(WithSettings, brightness=(1, 1), contrast=(1, 1), saturation=(1, 1), hue=0):
    """Random changes of colours. Factors of brightness, contrast and saturation are from a range, or 1 - x to 1 + x.
    ``hue`` shifts by a part of the colour circle from a range, or from -x to x."""

    hue: Any

    def _settle(self) -> None:
        self.ranges = [
            (max(0, 1 - strength), 1 + strength) if isinstance(strength, (int, float)) else tuple(strength)
            for strength in (self.brightness, self.contrast, self.saturation)
        ]
        hue = self.hue
        self.hue = (-hue, hue) if isinstance(hue, (int, float)) else tuple(hue)
        if not -0.5 <= self.hue[0] <= self.hue[1] <= 0.5:
            raise ValueError(problem(f"RandomColorAdjust(hue={hue!r})", fix="a range within -0.5 to 0.5"))

    def __call__(self, image: Any) -> Any:
        changes = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
        for change, bounds in zip(changes, self.ranges, strict=True):
            factor = float(np.random.uniform(*bounds))
            if factor != 1:
                image = _by_pillow(image, lambda picture, change=change, factor=factor: change(picture).enhance(factor))
        return _by_pillow(image, partial(turned, part=float(np.random.uniform(*self.hue)))) if any(self.hue) else image


class Normalize(WithSettings, mean=..., std=..., is_hwc=True):
    """Normalisation (x - mean) / std per channel, in float32. ``is_hwc``: channels are the last dim, else the first."""

    mean: Any
    std: Any

    def _settle(self) -> None:
        self.mean, self.std = (np.asarray(values, np.float32) for values in (self.mean, self.std))

    def __call__(self, image: Any) -> Array:
        array = _array(image).astype(np.float32)
        shape: tuple[int, ...] = () if array.ndim == 2 else (-1,) if self.is_hwc else (-1, 1, 1)
        return np.asarray((array - self.mean.reshape(shape)) / self.std.reshape(shape))


class ToTensor(TypeCast, output_type=np.float32):
    """Conversion to channels first, from 0 to 1 in float32 (or ``output_type``)."""

    def __call__(self, image: Any) -> Array:
        array = _array(image)
        array = array[..., None] if array.ndim == 2 else array
        return super().__call__(np.moveaxis(array, -1, 0).astype(np.float32) / 255)


class ToType(TypeCast):
    """Conversion to another dtype."""


def _mirrored(image: Any, dim: int) -> Any:
    return _like(np.ascontiguousarray(np.flip(_array(image), dim)), image)


def _gray(image: Any, channels: int) -> Any:
    gray = ImageOps.grayscale(image if isinstance(image, Image.Image) else Image.fromarray(_array(image)))
    return _like(np.repeat(np.asarray(gray)[..., None], channels, 2).squeeze(), image)


def _as_pillows(image: Any) -> Any:
    array = _array(image)
    return Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array)


CLASSES |= classes_of({
    "Grayscale": lambda image, *, num_output_channels=1: _gray(image, num_output_channels),
    "HorizontalFlip": lambda image: _mirrored(image, 1),
    "HWC2CHW": lambda image: np.ascontiguousarray(np.moveaxis(_array(image), -1, 0)),
    "Invert": lambda image: _like(255 - _array(image), image),
    "RandomHorizontalFlip": lambda image, *, prob=0.5: _mirrored(image, 1) if _chance(prob) else image,
    "RandomVerticalFlip": lambda image, *, prob=0.5: _mirrored(image, 0) if _chance(prob) else image,
    "Rescale": lambda image, *, rescale, shift: (_array(image).astype(np.float32) * rescale + shift).astype(np.float32),
    "ToNumpy": lambda image: np.array(image),
    "ToPIL": _as_pillows,
    "VerticalFlip": lambda image: _mirrored(image, 0),
}, Effect, __name__)  # fmt: skip

__all__ = [
    "Border", "CenterCrop", "ConvertMode", "Crop", "Decode", "ImageBatchFormat", "Inter", "Normalize", "Pad",
    "RandomColorAdjust", "RandomCrop", "RandomCropDecodeResize", "RandomResizedCrop", "RandomRotation", "Resize",
    "Rotate", "ToTensor", "ToType",
]  # fmt: skip
globals().update(CLASSES)
__all__ += CLASSES
__getattr__ = absent(__name__, lambda: __all__, {"c_transforms": "vision itself"})
