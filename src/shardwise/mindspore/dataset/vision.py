"""Functions of ``map`` on images: arrays (height, width, channels), or Pillow's.

Resizing, rotating and decoding are Pillow's. Random functions draw from numpy, which ``set_seed`` starts anew.
"""

from __future__ import annotations

import enum
import io
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from shardwise.errors import problem
from shardwise.mindspore.dataset.effects import CLASSES, FILTERS, ConvertMode, Image, ImageEnhance, ImageOps, turned
from shardwise.mindspore.dataset.transforms import Array, TypeCast
from shardwise.mindspore.named import absent

Sizes = int | Sequence[int]


class ImageBatchFormat(enum.StrEnum):
    """Where the channels of a batch of images are."""

    NHWC = "NHWC"
    NCHW = "NCHW"


class Inter(enum.IntEnum):
    """How pixels between pixels are found."""

    NEAREST = 0
    LINEAR = BILINEAR = 2
    CUBIC = BICUBIC = 3
    AREA = 4
    ANTIALIAS = 1


class Border(enum.Enum):
    """What lies outside of an image: numpy's words."""

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
    """An image of the kind that came in."""
    return Image.fromarray(result) if isinstance(image, Image.Image) else result


def _by_pillow(image: Any, change: Any) -> Any:
    """What Pillow makes of an image; where it does not know the dtype, channel by channel in float32."""
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


class Decode:
    """The pixels of a file's bytes, in RGB. ``to_pil``: as an image of Pillow's."""

    def __init__(self, to_pil: bool = False) -> None:
        self.to_pil = to_pil

    def __call__(self, data: Any) -> Any:
        with Image.open(io.BytesIO(_array(data).tobytes() if not isinstance(data, bytes) else data)) as file:
            image = file.convert("RGB")
        return image if self.to_pil else np.asarray(image)


class Resize:
    """Another size: (height, width), or that of the shorter side."""

    def __init__(self, size: Sizes, interpolation: Inter = Inter.LINEAR) -> None:
        self.size, self.filter = size, FILTERS[interpolation]

    def __call__(self, image: Any) -> Any:
        height, width = _array(image).shape[:2]
        if isinstance(self.size, int):
            short = min(height, width)
            height, width = (int(self.size * side / short) for side in (height, width))
        else:
            height, width = _pair(self.size)
        return _by_pillow(image, lambda picture: picture.resize((width, height), self.filter))


class CenterCrop:
    """The middle."""

    def __init__(self, size: Sizes) -> None:
        self.size = _pair(size)

    def __call__(self, image: Any) -> Any:
        (height, width), (h, w) = self.size, _array(image).shape[:2]
        if h < height or w < width:
            image = Pad((max(0, -(-(width - w) // 2)), max(0, -(-(height - h) // 2))))(image)
            h, w = _array(image).shape[:2]
        return _cropped(image, (h - height) // 2, (w - width) // 2, height, width)


class Crop:
    """The part of ``size`` at ``coordinates`` (top, left)."""

    def __init__(self, coordinates: Sequence[int], size: Sizes) -> None:
        (self.top, self.left), self.size = _pair(coordinates), _pair(size)

    def __call__(self, image: Any) -> Any:
        return _cropped(image, self.top, self.left, *self.size)


class Pad:
    """More on the sides: one number, (left and right, top and bottom), or (left, top, right, bottom)."""

    def __init__(self, padding: Sizes, fill_value: Any = 0, padding_mode: Border = Border.CONSTANT) -> None:
        sides = (padding,) * 4 if isinstance(padding, int) else tuple(padding)
        self.left, self.top, self.right, self.bottom = sides * 2 if len(sides) == 2 else sides
        self.fill, self.mode = fill_value, padding_mode

    def __call__(self, image: Any) -> Any:
        array = _array(image)
        sides = ((self.top, self.bottom), (self.left, self.right), *((0, 0),) * (array.ndim - 2))
        if self.mode is not Border.CONSTANT:
            return _like(np.pad(array, sides, mode=self.mode.value), image)
        padded = np.empty([n + a + b for n, (a, b) in zip(array.shape, sides, strict=True)], array.dtype)
        padded[...] = self.fill
        height, width = array.shape[:2]
        padded[self.top : self.top + height, self.left : self.left + width] = array
        return _like(padded, image)


class RandomCrop:
    """A part of ``size`` anywhere, after ``padding``."""

    def __init__(
        self,
        size: Sizes,
        padding: Sizes | None = None,
        pad_if_needed: bool = False,
        fill_value: Any = 0,
        padding_mode: Border = Border.CONSTANT,
    ) -> None:
        self.size, self.pad_if_needed = _pair(size), pad_if_needed
        self.pad = None if padding is None else Pad(padding, fill_value, padding_mode)

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


class RandomResizedCrop:
    """A part of random size and ratio, resized."""

    def __init__(
        self,
        size: Sizes,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: Inter = Inter.LINEAR,
        max_attempts: int = 10,
    ) -> None:
        self.resize = Resize(_pair(size), interpolation)
        self.scale, self.ratio, self.attempts = scale, ratio, max_attempts

    def __call__(self, image: Any) -> Any:
        h, w = _array(image).shape[:2]
        for _ in range(self.attempts):
            area = h * w * np.random.uniform(self.scale[0], self.scale[1])
            ratio = np.exp(np.random.uniform(np.log(self.ratio[0]), np.log(self.ratio[1])))
            height, width = round((area / ratio) ** 0.5), round((area * ratio) ** 0.5)
            if 0 < height <= h and 0 < width <= w:
                top, left = np.random.randint(h - height + 1), np.random.randint(w - width + 1)
                return self.resize(_cropped(image, top, left, height, width))
        return self.resize(CenterCrop(min(h, w))(image))


class RandomCropDecodeResize(RandomResizedCrop):
    """The same of a file's bytes."""

    def __call__(self, image: Any) -> Any:
        return super().__call__(Decode()(image))


class HorizontalFlip:
    """Left and right swapped."""

    def __call__(self, image: Any) -> Any:
        return _like(np.ascontiguousarray(_array(image)[:, ::-1]), image)


class VerticalFlip:
    """Top and bottom swapped."""

    def __call__(self, image: Any) -> Any:
        return _like(np.ascontiguousarray(_array(image)[::-1]), image)


class RandomHorizontalFlip(HorizontalFlip):
    """Left and right swapped, with probability ``prob``."""

    def __init__(self, prob: float = 0.5) -> None:
        self.prob = prob

    def __call__(self, image: Any) -> Any:
        return super().__call__(image) if _chance(self.prob) else image


class RandomVerticalFlip(VerticalFlip):
    """Top and bottom swapped, with probability ``prob``."""

    def __init__(self, prob: float = 0.5) -> None:
        self.prob = prob

    def __call__(self, image: Any) -> Any:
        return super().__call__(image) if _chance(self.prob) else image


class Rotate:
    """Turned by degrees, counter-clockwise."""

    def __init__(self, degrees: float, resample: Inter = Inter.NEAREST, expand: bool = False) -> None:
        self.degrees: Any = degrees
        self.filter, self.expand = FILTERS[resample], expand

    def __call__(self, image: Any) -> Any:
        return self.turned(image, self.degrees)

    def turned(self, image: Any, degrees: float) -> Any:
        return _by_pillow(image, lambda picture: picture.rotate(degrees, self.filter, self.expand))


class RandomRotation(Rotate):
    """Turned by up to so many degrees, or by those of a range."""

    def __call__(self, image: Any) -> Any:
        low, high = (-self.degrees, self.degrees) if isinstance(self.degrees, (int, float)) else self.degrees
        return self.turned(image, float(np.random.uniform(low, high)))


class RandomColorAdjust:
    """Factors of brightness, contrast and saturation, drawn from ranges or from 1 - x to 1 + x; and a part of the
    colour circle by which ``hue`` turns, drawn from a range or from -x to x."""

    def __init__(
        self, brightness: Any = (1, 1), contrast: Any = (1, 1), saturation: Any = (1, 1), hue: Any = 0
    ) -> None:
        self.ranges = [
            (max(0, 1 - strength), 1 + strength) if isinstance(strength, (int, float)) else tuple(strength)
            for strength in (brightness, contrast, saturation)
        ]
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


class Grayscale:
    """One channel, or the same in three."""

    def __init__(self, num_output_channels: int = 1) -> None:
        self.channels = num_output_channels

    def __call__(self, image: Any) -> Any:
        gray = ImageOps.grayscale(image if isinstance(image, Image.Image) else Image.fromarray(_array(image)))
        return _like(np.repeat(np.asarray(gray)[..., None], self.channels, 2).squeeze(), image)


class Invert:
    """255 - x"""

    def __call__(self, image: Any) -> Any:
        return _like(255 - _array(image), image)


class Rescale:
    """x * rescale + shift, in float32."""

    def __init__(self, rescale: float, shift: float) -> None:
        self.rescale, self.shift = rescale, shift

    def __call__(self, image: Any) -> Array:
        return (_array(image).astype(np.float32) * self.rescale + self.shift).astype(np.float32)


class Normalize:
    """(x - mean) / std per channel, in float32. ``is_hwc``: channels are the last dim, else the first."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], is_hwc: bool = True) -> None:
        self.mean, self.std = (np.asarray(values, np.float32) for values in (mean, std))
        self.is_hwc = is_hwc

    def __call__(self, image: Any) -> Array:
        array = _array(image).astype(np.float32)
        shape: tuple[int, ...] = () if array.ndim == 2 else (-1,) if self.is_hwc else (-1, 1, 1)
        return (array - self.mean.reshape(shape)) / self.std.reshape(shape)


class HWC2CHW:
    """Channels first."""

    def __call__(self, image: Any) -> Array:
        return np.ascontiguousarray(np.moveaxis(_array(image), -1, 0))


class ToTensor:
    """Channels first, from 0 to 1 in float32 (or ``output_type``)."""

    def __init__(self, output_type: Any = np.float32) -> None:
        self.cast = TypeCast(output_type)

    def __call__(self, image: Any) -> Array:
        array = _array(image)
        array = array[..., None] if array.ndim == 2 else array
        return self.cast(np.moveaxis(array, -1, 0).astype(np.float32) / 255)


class ToPIL:
    """An image of Pillow's."""

    def __call__(self, image: Any) -> Any:
        array = _array(image)
        return Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array)


class ToNumpy:
    """An array."""

    def __call__(self, image: Any) -> Array:
        return np.array(image)


class ToType(TypeCast):
    """Another dtype."""


__all__ = [
    "HWC2CHW", "Border", "CenterCrop", "ConvertMode", "Crop", "Decode", "Grayscale", "HorizontalFlip",
    "ImageBatchFormat", "Inter", "Invert", "Normalize", "Pad", "RandomColorAdjust", "RandomCrop",
    "RandomCropDecodeResize", "RandomHorizontalFlip", "RandomResizedCrop", "RandomRotation", "RandomVerticalFlip",
    "Rescale", "Resize", "Rotate", "ToNumpy", "ToPIL", "ToTensor", "ToType", "VerticalFlip",
]  # fmt: skip
globals().update(CLASSES)
__all__ += CLASSES
__getattr__ = absent(__name__, lambda: __all__, {"c_transforms": "vision itself"})
