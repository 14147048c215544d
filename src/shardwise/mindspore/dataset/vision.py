"""Functions of ``map`` on images: arrays (height, width, channels), or Pillow's.

Each is a function whose first argument is the image and whose keyword-only arguments are settings
(``named.settings_of``). Resizing, rotation, colours and decoding are Pillow's. Random functions draw from numpy, which
``set_seed`` seeds.
"""

from __future__ import annotations

import enum
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwise.errors import problem
from shardwise.mindspore.dataset.transforms import DTYPES, Array, Transform
from shardwise.mindspore.named import Function, absent, classes_of

try:
    from PIL import Image, ImageEnhance, ImageFilter, ImageOps
except ImportError as error:
    what = "the MindSpore dialect reads images with Pillow: it is missing"
    raise ImportError(problem(what, fix='pip install "shardwise[mindspore]"')) from error

Sizes = int | Sequence[int]


# Interpolation methods, and padding modes by numpy's names.
Inter = enum.IntEnum("Inter", {
    "NEAREST": 0, "LINEAR": 2, "BILINEAR": 2, "CUBIC": 3, "BICUBIC": 3, "AREA": 4, "ANTIALIAS": 1})  # fmt: skip
Border = enum.Enum("Border", {
    "CONSTANT": "constant", "EDGE": "edge", "REFLECT": "reflect", "SYMMETRIC": "symmetric"})  # fmt: skip


class ConvertMode(enum.Enum):
    """Colour conversions, as (from, to) in Pillow's names."""

    COLOR_RGB2GRAY, COLOR_GRAY2RGB = ("RGB", "L"), ("L", "RGB")
    COLOR_RGB2BGR = COLOR_BGR2RGB = ("RGB", "BGR")
    COLOR_RGB2RGBA, COLOR_RGBA2RGB = ("RGB", "RGBA"), ("RGBA", "RGB")


FILTERS = [Image.Resampling[name] for name in ("NEAREST", "LANCZOS", "BILINEAR", "BICUBIC", "BOX")]  # by Inter


def _pair(size: Sizes) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _span(value: Any) -> tuple[float, float]:
    return (-value, value) if isinstance(value, (int, float)) else (value[0], value[1])


def _drawn(low: float, high: float) -> float:
    return float(np.random.uniform(low, high))


def _drawn_place(height: int, width: int) -> tuple[int, int]:
    return np.random.randint(height), np.random.randint(width)


def _like(result: Array, image: Any) -> Any:
    return Image.fromarray(result) if isinstance(image, Image.Image) else result


def _by_pillow(image: Any, change: Function, by_channel: bool = False) -> Any:
    """Apply a Pillow function to an image. ``by_channel``: where Pillow lacks the dtype, to each channel in float32."""
    if isinstance(image, Image.Image):
        return change(image)
    array = np.asarray(image)
    grey = array.ndim == 3 and array.shape[2] == 1
    if not by_channel or (array.dtype == np.uint8 and (array.ndim == 2 or array.shape[2] in (3, 4))):
        changed = np.asarray(change(Image.fromarray(array[..., 0] if grey else array)))
        return changed[..., None] if grey and changed.ndim == 2 else changed
    channels = np.moveaxis(np.atleast_3d(array).astype(np.float32), -1, 0)
    changed = np.stack([np.asarray(change(Image.fromarray(channel))) for channel in channels], -1)
    rounded = np.rint(changed) if array.dtype.kind in "ui" else changed
    return (rounded[..., 0] if array.ndim == 2 else rounded).astype(array.dtype)


def _at_times(probability: float, image: Any, change: Function) -> Any:
    return change(image) if np.random.random() < probability else image


def _by_chance(change: Function, chance: float = 0.5) -> Function:
    """Return a function of an image that is changed with probability ``prob``."""
    return lambda image, *, prob=chance: _at_times(prob, image, change)


def decoded(data: Any, *, to_pil: bool = False) -> Any:
    """Decode a file's bytes to RGB pixels, or to a Pillow image."""
    with Image.open(io.BytesIO(data if isinstance(data, bytes) else np.asarray(data).tobytes())) as file:
        image = file.convert("RGB")
    return image if to_pil else np.asarray(image)


def _cropped(image: Any, top: int, left: int, height: int, width: int) -> Any:
    return _like(np.asarray(image)[top : top + height, left : left + width], image)


def _sides(padding: Any) -> tuple[int, int, int, int]:
    """Return the padding of the left, the top, the right and the bottom."""
    sides = (padding,) * 4 if isinstance(padding, int) else tuple(padding)
    left, top, right, bottom = sides * 2 if len(sides) == 2 else sides
    return left, top, right, bottom


def _padded(image: Any, *, padding: Any, fill_value: Any = 0, padding_mode: Border = Border.CONSTANT) -> Any:
    left, top, right, bottom = _sides(padding)
    array = np.asarray(image)
    if padding_mode is not Border.CONSTANT:
        pairs = ((top, bottom), (left, right), *((0, 0),) * (array.ndim - 2))
        return _like(np.pad(array, pairs, mode=padding_mode.value), image)
    size = array.shape[0] + top + bottom, array.shape[1] + left + right
    canvas = np.full((*size, *array.shape[2:]), fill_value, array.dtype)
    canvas[top : top + array.shape[0], left : left + array.shape[1]] = array
    return _like(canvas, image)


def _resized(image: Any, *, size: Sizes, interpolation: Inter = Inter.LINEAR) -> Any:
    sides = np.asarray(image).shape[:2]
    height, width = (int(size * side / min(sides)) for side in sides) if isinstance(size, int) else _pair(size)
    return _by_pillow(image, lambda picture: picture.resize((width, height), FILTERS[interpolation]), True)


def _centre(image: Any, *, size: Sizes) -> Any:
    (height, width), (h, w) = _pair(size), np.asarray(image).shape[:2]
    if h < height or w < width:
        image = _padded(image, padding=(max(0, -(-(width - w) // 2)), max(0, -(-(height - h) // 2))))
        h, w = np.asarray(image).shape[:2]
    return _cropped(image, (h - height) // 2, (w - width) // 2, height, width)


def _random_crop(image: Any, *, size: Sizes, padding: Any = None, pad_if_needed: bool = False, fill_value: Any = 0,
    padding_mode: Border = Border.CONSTANT,
) -> Any:  # fmt: skip
    if padding is not None:
        image = _padded(image, padding=padding, fill_value=fill_value, padding_mode=padding_mode)
    (height, width), (h, w) = _pair(size), np.asarray(image).shape[:2]
    if pad_if_needed and (h < height or w < width):
        image = _padded(image, padding=(max(0, width - w), max(0, height - h)))
        h, w = np.asarray(image).shape[:2]
    if h < height or w < width:
        what = f"RandomCrop({_pair(size)}) of an image of {h} x {w}"
        raise RuntimeError(problem(what, fix="pad_if_needed=True, or padding="))
    return _cropped(image, *_drawn_place(h - height + 1, w - width + 1), height, width)


def _random_resized_crop(image: Any, *, size: Sizes, scale: Any = (0.08, 1.0), ratio: Any = (3 / 4, 4 / 3),
    interpolation: Inter = Inter.LINEAR, max_attempts: int = 10,
) -> Any:  # fmt: skip
    image = decoded(image) if np.asarray(image).ndim < 2 else image
    h, w = np.asarray(image).shape[:2]
    for _ in range(max_attempts):
        area, shape = h * w * _drawn(*scale), np.exp(_drawn(*np.log(ratio)))
        height, width = round((area / shape) ** 0.5), round((area * shape) ** 0.5)
        if 0 < height <= h and 0 < width <= w:
            part = _cropped(image, *_drawn_place(h - height + 1, w - width + 1), height, width)
            break
    else:
        part = _centre(image, size=min(h, w))
    return _resized(part, size=_pair(size), interpolation=interpolation)


def _erased(image: Any, *, prob: float = 0.5, scale: Any = (0.02, 0.33), ratio: Any = (0.3, 3.3), value: Any = 0,
    inplace: bool = False, max_attempts: int = 10,
) -> Array:  # fmt: skip
    array = np.array(image)
    if np.random.random() >= prob:
        return array
    _, height, width = array.shape
    area, shape = height * width * _drawn(*scale), np.exp(_drawn(*np.log(ratio)))
    sides = ((height, np.sqrt(area * shape)), (width, np.sqrt(area / shape)))
    h, w = (min(size, max(1, round(float(side)))) for size, side in sides)
    y, x = _drawn_place(height - h + 1, width - w + 1)
    patch = np.random.standard_normal((len(array), h, w)) if value == "random" else np.reshape(value, (-1, 1, 1))
    array[:, y : y + h, x : x + w] = patch
    return array


def _mirrored(image: Any, dim: int) -> Any:
    return _like(np.ascontiguousarray(np.flip(np.asarray(image), dim)), image)


def _rotated(image: Any, *, degrees: Any, resample: Inter = Inter.NEAREST, expand: bool = False) -> Any:
    return _by_pillow(image, lambda picture: picture.rotate(degrees, FILTERS[resample], expand), True)


def _moved(image: Any, degrees: float, moves: Any, zoom: float, skew: float, resample: Any = 0, fill: Any = 0) -> Any:
    """Rotate an image around its centre, translate it by fractions of its size, scale it and shear it by degrees."""

    def change(picture: Image.Image) -> Image.Image:
        angle, middle = np.deg2rad(degrees), np.array(picture.size) / 2
        turn = zoom * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        back = np.linalg.inv(turn @ np.array([[1, np.tan(np.deg2rad(skew))], [0, 1]]))
        offset = middle - back @ (middle + np.multiply(picture.size, moves))
        filters = Image.Resampling.BILINEAR if int(resample) else Image.Resampling.NEAREST
        rows = (*back[0], offset[0], *back[1], offset[1])
        return picture.transform(picture.size, Image.Transform.AFFINE, rows, filters, fillcolor=fill)

    return _by_pillow(image, change)


def _random_moved(
    image: Any, *, degrees: Any, translate: Any = None, scale: Any = None, shear: Any = None, resample: Any = 0,
    fill_value: Any = 0,
) -> Any:  # fmt: skip
    turn, zoom = _drawn(*_span(degrees)), _drawn(*scale) if scale is not None else 1.0
    skew = _drawn(*_span(shear)) if shear is not None else 0.0
    moves = [_drawn(-move, move) for move in translate] if translate is not None else (0.0, 0.0)
    return _moved(image, turn, moves, zoom, skew, resample, fill_value)


def _enhanced(image: Any, kind: str, factor: float, by_channel: bool = False) -> Any:
    return _by_pillow(image, lambda picture: getattr(ImageEnhance, kind)(picture).enhance(factor), by_channel)


def _hue_turned(image: Any, part: float, by_channel: bool = False) -> Any:
    """Shift the hues of an image along the colour circle."""

    def change(picture: Image.Image) -> Image.Image:
        hue, *others = picture.convert("HSV").split()
        shifted = Image.fromarray(np.asarray(hue) + np.uint8(round(part * 255) % 256))
        return Image.merge("HSV", (shifted, *others)).convert(picture.mode)

    return _by_pillow(image, change, by_channel)


def _random_colors(image: Any, *, brightness: Any = (1, 1), contrast: Any = (1, 1), saturation: Any = (1, 1),
                   hue: Any = 0) -> Any:  # fmt: skip
    strengths = {"Brightness": brightness, "Contrast": contrast, "Color": saturation}
    for kind, strength in strengths.items():
        factor = _drawn(*strength)
        image = image if factor == 1 else _enhanced(image, kind, factor, True)
    return _hue_turned(image, _drawn(*_span(hue)), True) if any(_span(hue)) else image


def _range(name: str, strength: Any) -> Any:
    """Check the factors of a change of colours: a range, or x for 1 - x to 1 + x."""
    low, high = (max(0, 1 - strength), 1 + strength) if isinstance(strength, (int, float)) else strength
    return low, high


def _check_hue(name: str, hue: Any) -> Any:
    if not -0.5 <= _span(hue)[0] <= _span(hue)[1] <= 0.5:
        raise ValueError(problem(f"RandomColorAdjust({name}={hue!r})", fix="a range within -0.5 to 0.5"))
    return hue


def _inverted(image: Any, low: int = 0, high: int = 255) -> Any:
    """Inversion of the byte values from ``low`` to ``high``. Raises TypeError for floats."""
    array = np.asarray(image)
    if array.dtype.kind == "f":
        raise TypeError(problem(f"an image of {array.dtype} has no byte values", fix="ToType(np.uint8) before"))
    return _like(np.where((low <= array) & (array <= high), 255 - array, array), image)


def _random_solarized(image: Any, *, threshold: Any = (0, 255)) -> Any:
    low, high = sorted(np.random.randint(threshold[0], threshold[1] + 1, 2))
    return _inverted(image, low, 255 if low == high else high)


def _blurred(image: Any, *, kernel_size: Any, sigma: Any = None) -> Any:
    size, deviation = (value[0] if isinstance(value, (tuple, list)) else value for value in (kernel_size, sigma))
    radius = float(deviation if deviation else 0.3 * ((size - 1) * 0.5 - 1) + 0.8)
    return _by_pillow(image, lambda picture: picture.filter(ImageFilter.GaussianBlur(radius)))


def _normalized(image: Any, *, mean: Any, std: Any, is_hwc: bool = True) -> Array:
    array = np.asarray(image).astype(np.float32)
    shape: tuple[int, ...] = () if array.ndim == 2 else (-1,) if is_hwc else (-1, 1, 1)
    mean, std = (np.asarray(values, np.float32).reshape(shape) for values in (mean, std))
    return np.asarray((array - mean) / std)


def _chosen(image: Any, *, policy: Any) -> Any:
    for function, probability in policy[np.random.randint(len(policy))]:
        image = _at_times(probability, image, function)
    return image


CHECKS: dict[str, Any] = {
    **DTYPES, "size": lambda _, size: _pair(size),
    "padding": lambda _, padding: None if padding is None else _sides(padding),
    **dict.fromkeys(("interpolation", "resample"), lambda _, number: Inter(number)),
    **dict.fromkeys(("mean", "std"), lambda _, numbers: np.asarray(numbers, np.float32)),
    **dict.fromkeys(("brightness", "contrast", "saturation"), _range), "hue": _check_hue,
}  # fmt: skip
FUNCTIONS: dict[str, Any] = {
    "AutoContrast": lambda image, *, cutoff=0.0, ignore=None: _by_pillow(
        image, lambda picture: ImageOps.autocontrast(picture, cutoff, ignore)),
    "CenterCrop": _centre, "ConvertColor": lambda image, *, convert_mode: (
        np.asarray(image)[..., ::-1] if "BGR" in convert_mode.value
        else _by_pillow(image, lambda picture: picture.convert(convert_mode.value[1]))),
    "Decode": decoded, "Equalize": lambda image: _by_pillow(image, ImageOps.equalize), "GaussianBlur": _blurred,
    "HorizontalFlip": lambda image: _mirrored(image, 1), "HWC2CHW": lambda image: np.ascontiguousarray(
        np.moveaxis(np.asarray(image), -1, 0)),
    "Invert": lambda image: _like(255 - np.asarray(image), image), "Normalize": _normalized,
    "Pad": (None, _padded, {"checks": {**CHECKS, "padding": lambda _, padding: _sides(padding)}}),
    "RandomAffine": _random_moved,
    "RandomColorAdjust": _random_colors, "RandomColor": lambda image, *, degrees=(0.1, 1.9): _enhanced(
        image, "Color", _drawn(*degrees)),
    "RandomCrop": _random_crop, "RandomCropDecodeResize": _random_resized_crop,
    "RandomErasing": _erased,
    "RandomGrayscale": _by_chance(lambda image: _by_pillow(image, lambda x: x.convert("L").convert(x.mode)), 0.1),
    "RandomHorizontalFlip": _by_chance(lambda image: _mirrored(image, 1)),
    "RandomPosterize": lambda image, *, bits=(8, 8): _by_pillow(image, lambda picture: ImageOps.posterize(
                            picture, int(np.random.randint(bits[0], bits[1] + 1)))),
    "RandomResizedCrop": _random_resized_crop,
    "RandomRotation": lambda image, *, degrees, resample=Inter.NEAREST, expand=False: _rotated(
            image, degrees=_drawn(*_span(degrees)), resample=resample, expand=expand),
    "RandomSelectSubpolicy": _chosen, "RandomSharpness": lambda image, *, degrees=(0.1, 1.9): _enhanced(
        image, "Sharpness", _drawn(*degrees)),
    "RandomSolarize": _random_solarized, "RandomVerticalFlip": _by_chance(lambda image: _mirrored(image, 0)),
    "Rescale": lambda image, *, rescale, shift: (
        np.asarray(image).astype(np.float32) * rescale + shift).astype(np.float32),
    "Resize": (None, _resized, {"checks": {name: check for name, check in CHECKS.items() if name != "size"}}),
    "Rotate": _rotated, "ToNumpy": lambda image: np.array(image), "ToPIL": lambda image: Image.fromarray(
        array[..., 0] if (array := np.asarray(image)).ndim == 3 and array.shape[2] == 1 else array),
    "ToTensor": lambda image, *, output_type=np.float32: (
        np.moveaxis(np.atleast_3d(np.asarray(image)), -1, 0).astype(np.float32) / 255).astype(output_type),
    "ToType": lambda image, *, output_type: np.asarray(image).astype(output_type),
    "VerticalFlip": lambda image: _mirrored(image, 0),
}  # fmt: skip
CLASSES = classes_of(FUNCTIONS, Transform, __name__, checks=CHECKS)
globals().update(CLASSES)

__all__ = ["Border", "ConvertMode", "Inter", *CLASSES]
__getattr__ = absent(__name__, lambda: __all__)
