"""Functions of ``map`` that change the look of images, mostly Pillow's, each a line of a table: the first argument is
the image, keyword-only ones are settings (``named.settings_of``)."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from shardwise.errors import problem
from shardwise.mindspore.checks import one_of
from shardwise.mindspore.dataset.transforms import Array
from shardwise.mindspore.named import Function, WithSettings, classes_of

try:
    from PIL import Image, ImageEnhance, ImageFilter, ImageOps
except ImportError as error:
    what = "the MindSpore dialect reads images with Pillow: it is missing"
    raise ImportError(problem(what, fix='pip install "shardwise[mindspore]"')) from error


class ConvertMode(enum.Enum):
    """From which colours to which: Pillow's words."""

    COLOR_RGB2GRAY = ("RGB", "L")
    COLOR_GRAY2RGB = ("L", "RGB")
    COLOR_RGB2BGR = COLOR_BGR2RGB = ("RGB", "BGR")
    COLOR_RGB2RGBA = ("RGB", "RGBA")
    COLOR_RGBA2RGB = ("RGBA", "RGB")


def _by_image(image: Any, change: Any) -> Any:
    """What Pillow makes of an image, of the kind that came in."""
    if isinstance(image, Image.Image):
        return change(image)
    array = np.asarray(image)
    grey = array.ndim == 3 and array.shape[2] == 1
    changed = np.asarray(change(Image.fromarray(array[..., 0] if grey else array)))
    return changed[..., None] if grey and changed.ndim == 2 else changed


def _enhanced(kind: Any) -> Function:
    return lambda image, factor: _by_image(image, lambda picture: kind(picture).enhance(factor))


def _drawn(low: float, high: float) -> float:
    return float(np.random.uniform(low, high))


def _span(degrees: Any) -> tuple[float, float]:
    return (-degrees, degrees) if isinstance(degrees, (int, float)) else (degrees[0], degrees[1])


def _table(image: Any, change: Any) -> Any:
    """Every value of a byte replaced."""
    values = np.clip(change(np.arange(256.0)), 0, 255).astype(np.uint8)
    return _by_image(image, lambda picture: Image.fromarray(values[np.asarray(picture)]))


def _cut(image: Any, length: int, patches: int, chw: bool) -> Array:
    array = np.array(image)
    height, width = array.shape[1:] if chw else array.shape[:2]
    for _ in range(patches):
        y, x = np.random.randint(height), np.random.randint(width)
        rows, columns = (slice(max(0, center - length // 2), center + (length + 1) // 2) for center in (y, x))
        array[(slice(None), rows, columns) if chw else (rows, columns)] = 0
    return array


def _erased(image: Any, prob: float, scale: Any, ratio: Any, value: Any) -> Array:
    array = np.array(image)  # channels first, as the reference has it
    if np.random.random() >= prob:
        return array
    _, height, width = array.shape
    area, shape = height * width * _drawn(*scale), np.exp(_drawn(*np.log(ratio)))
    h, w = (min(size, max(1, round(float(side)))) for size, side in (
        (height, np.sqrt(area * shape)), (width, np.sqrt(area / shape))))  # fmt: skip
    y, x = np.random.randint(height - h + 1), np.random.randint(width - w + 1)
    patch = np.random.standard_normal((len(array), h, w)) if value == "random" else np.reshape(value, (-1, 1, 1))
    array[:, y : y + h, x : x + w] = patch
    return array


def _affine(image: Any, degrees: Any, translate: Any, scale: Any, shear: Any, resample: Any, fill_value: Any) -> Any:
    angle = np.deg2rad(_drawn(*_span(degrees)))
    zoom = _drawn(*scale) if scale is not None else 1.0
    skew = np.tan(np.deg2rad(_drawn(*_span(shear)))) if shear is not None else 0.0
    moves = translate if translate is not None else (0.0, 0.0)

    def change(picture: Image.Image) -> Image.Image:
        x, y = ((size * _drawn(-move, move)) for size, move in zip(picture.size, moves, strict=False))
        forward = zoom * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        back = np.linalg.inv(forward @ np.array([[1, skew], [0, 1]]))
        middle = np.array(picture.size) / 2
        offset = middle - back @ (middle + np.array([x, y]))
        rows = (*back[0], offset[0], *back[1], offset[1])
        filters = Image.Resampling.BILINEAR if int(resample) else Image.Resampling.NEAREST
        return picture.transform(picture.size, Image.Transform.AFFINE, rows, filters, fillcolor=fill_value)

    return _by_image(image, change)


def _crops(image: Any, size: Any) -> tuple[Array, ...]:
    """Four corners and the middle."""
    array = np.asarray(image)
    h, w = (size, size) if isinstance(size, int) else size
    y, x = array.shape[0] - h, array.shape[1] - w
    places = ((0, 0), (0, x), (y, 0), (y, x), (y // 2, x // 2))
    return tuple(array[top : top + h, left : left + w] for top, left in places)


def _mixed(images: Any, labels: Any, alpha: float) -> tuple[Array, Array]:
    """Each image of a batch with another one (Zhang et al. 2018)."""
    order, share = np.random.permutation(len(images)), np.random.beta(alpha, alpha)
    both = (np.asarray(batch) for batch in (images, labels))
    mixed = [(share * batch + (1 - share) * batch[order]).astype(np.float32) for batch in both]
    return mixed[0], mixed[1]


def _cut_and_pasted(
    images: Any, labels: Any, image_batch_format: str, alpha: float, prob: float
) -> tuple[Array, Array]:
    """In each image of a batch a box of another one (Yun et al. 2019), and the labels by their shares."""
    is_last = one_of("NHWC", "NCHW")("image_batch_format", image_batch_format) == "NHWC"
    images, labels = np.array(images), np.asarray(labels).astype(np.float32)
    height, width = images.shape[1:3] if is_last else images.shape[2:]
    order, kept = np.random.permutation(len(images)), np.ones((len(images), *(1,) * (labels.ndim - 1)), np.float32)
    pasted = images.copy()
    for number in np.flatnonzero(np.random.random(len(images)) < prob):
        cut = np.sqrt(1 - np.random.beta(alpha, alpha))
        rows, columns = (
            slice(max(center - int(size * cut) // 2, 0), min(center + int(size * cut) // 2, size))
            for center, size in ((np.random.randint(height), height), (np.random.randint(width), width))
        )
        box = (rows, columns) if is_last else (..., rows, columns)
        pasted[number][box] = images[order[number]][box]
        kept[number] = 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (height * width)
    return pasted, kept * labels + (1 - kept) * labels[order]


EFFECTS: dict[str, Function] = {
    "AdjustBrightness": lambda image, *, brightness_factor: _enhanced(ImageEnhance.Brightness)(
        image, brightness_factor),
    "AdjustContrast": lambda image, *, contrast_factor: _enhanced(ImageEnhance.Contrast)(image, contrast_factor),
    "AdjustGamma": lambda image, *, gamma, gain=1.0: _table(image, lambda x: 255 * gain * (x / 255) ** gamma),
    "AdjustSaturation": lambda image, *, saturation_factor: _enhanced(ImageEnhance.Color)(image, saturation_factor),
    "AdjustSharpness": lambda image, *, sharpness_factor: _enhanced(ImageEnhance.Sharpness)(image, sharpness_factor),
    "AutoContrast": lambda image, *, cutoff=0.0, ignore=None: _by_image(
        image, lambda picture: ImageOps.autocontrast(picture, cutoff, ignore)),
    "ConvertColor": lambda image, *, convert_mode: np.asarray(image)[..., ::-1] if "BGR" in convert_mode.value else (
        _by_image(image, lambda picture: picture.convert(convert_mode.value[1]))),
    "CutOut": lambda image, *, length, num_patches=1, is_hwc=True: _cut(image, length, num_patches, not is_hwc),
    "Equalize": lambda image: _by_image(image, ImageOps.equalize),
    "FiveCrop": lambda image, *, size: _crops(image, size),
    "GaussianBlur": lambda image, *, kernel_size, sigma=None: _by_image(image, lambda picture: picture.filter(
        ImageFilter.GaussianBlur(_sigma(kernel_size, sigma)))),
    "CutMixBatch": lambda image, label, *, image_batch_format, alpha=1.0, prob=1.0: _cut_and_pasted(
        image, label, image_batch_format, alpha, prob),
    "MixUpBatch": lambda image, label, *, alpha=1.0: _mixed(image, label, alpha),
    "Posterize": lambda image, *, bits: _by_image(image, lambda picture: ImageOps.posterize(picture, bits)),
    "RandomAdjustSharpness": lambda image, *, degree, prob=0.5: _at_times(
        prob, image, lambda picture: _enhanced(ImageEnhance.Sharpness)(picture, degree)),
    "RandomAffine": lambda image, *, degrees, translate=None, scale=None, shear=None, resample=0, fill_value=0: _affine(
        image, degrees, translate, scale, shear, resample, fill_value),
    "RandomAutoContrast": lambda image, *, cutoff=0.0, ignore=None, prob=0.5: _at_times(
        prob, image, lambda picture: _by_image(picture, lambda x: ImageOps.autocontrast(x, cutoff, ignore))),
    "RandomColor": lambda image, *, degrees=(0.1, 1.9): _enhanced(ImageEnhance.Color)(image, _drawn(*degrees)),
    "RandomEqualize": lambda image, *, prob=0.5: _at_times(
        prob, image, lambda picture: _by_image(picture, ImageOps.equalize)),
    "RandomErasing": lambda image, *, prob=0.5, scale=(0.02, 0.33), ratio=(0.3, 3.3), value=0, inplace=False,
    max_attempts=10: _erased(image, prob, scale, ratio, value),
    "RandomGrayscale": lambda image, *, prob=0.1: _at_times(
        prob, image, lambda picture: _by_image(picture, lambda x: x.convert("L").convert(x.mode))),
    "RandomInvert": lambda image, *, prob=0.5: _at_times(
        prob, image, lambda picture: _table(picture, lambda x: 255 - x)),
    "RandomPosterize": lambda image, *, bits=(8, 8): _by_image(image, lambda picture: ImageOps.posterize(
        picture, int(np.random.randint(bits[0], bits[1] + 1)))),
    "RandomSharpness": lambda image, *, degrees=(0.1, 1.9): _enhanced(ImageEnhance.Sharpness)(
        image, _drawn(*degrees)),
    "RandomSolarize": lambda image, *, threshold=(0, 255): _solarized(image, sorted(
        np.random.randint(threshold[0], threshold[1] + 1, 2))),
    "Solarize": lambda image, *, threshold: _solarized(
        image, (threshold, threshold) if isinstance(threshold, (int, float)) else threshold),
    "SwapRedBlue": lambda image: np.asarray(image)[..., ::-1],
}  # fmt: skip


def _at_times(probability: float, image: Any, change: Any) -> Any:
    return change(image) if np.random.random() < probability else image


def _sigma(kernel_size: Any, sigma: Any) -> float:
    """Of a kernel without a sigma OpenCV's."""
    size, deviation = (value[0] if isinstance(value, (tuple, list)) else value for value in (kernel_size, sigma))
    return float(deviation if deviation else 0.3 * ((size - 1) * 0.5 - 1) + 0.8)


def _solarized(image: Any, threshold: Any) -> Any:
    """Values within the threshold (of one number: from it on) inverted."""
    low, high = threshold
    end = 255 if low == high else high
    return _table(image, lambda x: np.where((low <= x) & (x <= end), 255 - x, x))


class Effect(WithSettings):
    """``function(image, **settings)``."""

    function: Function

    def __call__(self, *images: Any) -> Any:
        return type(self).function(*images, **self._chosen())


CLASSES = classes_of(EFFECTS, Effect, __name__)

__all__ = ["CLASSES", "ConvertMode", "Image", "ImageEnhance", "ImageOps"]
