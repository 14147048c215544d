"""Image effects for ``map``, mostly Pillow's, each a line of a table. The first argument is the image, keyword-only
arguments are settings (``named.settings_of``)."""

from __future__ import annotations

import colorsys
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


FILTERS = {0: Image.Resampling.NEAREST, 1: Image.Resampling.LANCZOS, 2: Image.Resampling.BILINEAR,
           3: Image.Resampling.BICUBIC, 4: Image.Resampling.BOX}  # of vision.Inter # fmt: skip


class ConvertMode(enum.Enum):
    """Colour conversions, as (from, to) in Pillow's names."""

    COLOR_RGB2GRAY = ("RGB", "L")
    COLOR_GRAY2RGB = ("L", "RGB")
    COLOR_RGB2BGR = COLOR_BGR2RGB = ("RGB", "BGR")
    COLOR_RGB2RGBA = ("RGB", "RGBA")
    COLOR_RGBA2RGB = ("RGBA", "RGB")


def _by_image(image: Any, change: Any) -> Any:
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
    """Replace every byte value by a lookup table."""
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
    array = np.array(image)  # channels first, as in the reference
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
    turn, zoom = _drawn(*_span(degrees)), _drawn(*scale) if scale is not None else 1.0
    skew = _drawn(*_span(shear)) if shear is not None else 0.0
    moves = [_drawn(-move, move) for move in translate] if translate is not None else (0.0, 0.0)
    return _moved(image, turn, moves, zoom, skew, resample, fill_value)


def _crops(image: Any, size: Any) -> tuple[Array, ...]:
    """Return crops of the four corners and the centre."""
    array = np.asarray(image)
    h, w = (size, size) if isinstance(size, int) else size
    y, x = array.shape[0] - h, array.shape[1] - w
    places = ((0, 0), (0, x), (y, 0), (y, x), (y // 2, x // 2))
    return tuple(array[top : top + h, left : left + w] for top, left in places)


def _mixed(images: Any, labels: Any, alpha: float) -> tuple[Array, Array]:
    """Mix each image of a batch with another one (Zhang et al. 2018)."""
    order, share = np.random.permutation(len(images)), np.random.beta(alpha, alpha)
    both = (np.asarray(batch) for batch in (images, labels))
    mixed = [(share * batch + (1 - share) * batch[order]).astype(np.float32) for batch in both]
    return mixed[0], mixed[1]


def _cut_and_pasted(
    images: Any, labels: Any, image_batch_format: str, alpha: float, prob: float
) -> tuple[Array, Array]:
    """Paste a box of another image into each image of a batch, and mix the labels by area (Yun et al. 2019)."""
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


def turned(image: Image.Image, part: float) -> Image.Image:
    """Shift the hues of an image along the colour circle."""
    hue, *others = image.convert("HSV").split()
    shifted = Image.fromarray(np.asarray(hue) + np.uint8(round(part * 255) % 256))
    return Image.merge("HSV", (shifted, *others)).convert(image.mode)


def _moved(image: Any, degrees: float, moves: Any, zoom: float, skew: Any, resample: Any, fill_value: Any) -> Any:
    """Rotate an image around its centre, translate it by fractions of its size, scale it and shear it by degrees."""
    angle, skewed = np.deg2rad(degrees), np.tan(np.deg2rad(skew[0] if isinstance(skew, (list, tuple)) else skew))

    def change(picture: Image.Image) -> Image.Image:
        x, y = (size * move for size, move in zip(picture.size, moves, strict=False))
        forward = zoom * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        back = np.linalg.inv(forward @ np.array([[1, skewed], [0, 1]]))
        middle = np.array(picture.size) / 2
        offset = middle - back @ (middle + np.array([x, y]))
        rows = (*back[0], offset[0], *back[1], offset[1])
        filters = Image.Resampling.BILINEAR if int(resample) else Image.Resampling.NEAREST
        return picture.transform(picture.size, Image.Transform.AFFINE, rows, filters, fillcolor=fill_value)

    return _by_image(image, change)


def _perspective(image: Any, start: Any, end: Any, interpolation: Any) -> Any:
    rows = []
    for (x, y), (u, v) in zip(start, end, strict=True):
        rows += [[u, v, 1, 0, 0, 0, -x * u, -x * v], [0, 0, 0, u, v, 1, -y * u, -y * v]]
    numbers = np.linalg.solve(np.array(rows, float), np.array(start, float).reshape(-1))
    kind, how = Image.Transform.PERSPECTIVE, FILTERS[int(interpolation)]
    return _by_image(image, lambda picture: picture.transform(picture.size, kind, tuple(numbers), how))


def _distorted(image: Any, scale: float, interpolation: Any) -> Any:
    height, width = np.asarray(image).shape[:2]
    far = np.random.random((4, 2)) * scale * (width / 2, height / 2)
    start = [(0, 0), (width - 1, 0), (width - 1, height - 1), (0, height - 1)]
    inward = np.array([(1, 1), (-1, 1), (-1, -1), (1, -1)])
    return _perspective(image, start, np.array(start) + inward * far, interpolation)


def _of_size(image: Any, box: Any, size: Any, interpolation: Any) -> Any:
    top, left, high, wide = box
    height, width = (size, size) if isinstance(size, int) else size
    corners = (left, top, left + wide, top + high)
    return _by_image(image, lambda picture: picture.resize((width, height), FILTERS[int(interpolation)], corners))


def _blanked(image: Any, box: Any, value: Any) -> Array:
    top, left, height, width = box
    array = np.array(image)
    array[top : top + height, left : left + width] = value
    return array


def _by_channels(image: Any, function: Any, is_hwc: bool) -> Array:
    """Convert the colours of single pixels, from 0 to 1, to another colour space."""
    channels = np.moveaxis(np.asarray(image, np.float32), -1 if is_hwc else -3, 0)
    return np.stack(np.vectorize(function)(*channels), -1 if is_hwc else -3).astype(np.float32)


def _filled(image: Any, size: Any, offset: Any, fill_value: Any) -> Array:
    array = np.asarray(image)
    height, width = (size, size) if isinstance(size, int) else size
    free = (height - array.shape[0], width - array.shape[1])
    if min(free) < 0:
        what = f"PadToSize(size={size}) of an image of {array.shape[0]} x {array.shape[1]}"
        raise RuntimeError(problem(what, fix="a size that is at least the image's"))
    top, left = (n // 2 for n in free) if offset is None else (offset, offset) if isinstance(offset, int) else offset
    padded = np.full((height, width, *array.shape[2:]), fill_value, array.dtype)
    padded[top : top + array.shape[0], left : left + array.shape[1]] = array
    return padded


def _lit(image: Any, alpha: float) -> Array:
    """Shift the colours along ImageNet's principal components (Krizhevsky et al. 2012)."""
    along = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
    moved = np.asarray(image) + along @ (np.array([55.46, 4.794, 1.148]) * np.random.normal(0, alpha, 3))
    return np.clip(moved, 0, 255).astype(np.asarray(image).dtype)


def _chosen(image: Any, policy: Any) -> Any:
    """Apply one of several lists of (function, probability), chosen at random."""
    for function, probability in policy[np.random.randint(len(policy))]:
        image = _at_times(probability, image, function)
    return image


def _some(image: Any, transforms: Any, count: int) -> Any:
    for place in np.random.permutation(len(transforms))[:count]:
        image = transforms[place](image) if np.random.random() < 0.5 else image
    return image


# The functions of RandAugment (Cubuk et al. 2020), with a magnitude ``by`` from 0 to 1.
_SIGNED: dict[str, Function] = {
    "ShearX": lambda image, by: _moved(image, 0, (0, 0), 1, np.rad2deg(np.arctan(0.3 * by)), 0, 0),
    "TranslateX": lambda image, by: _moved(image, 0, (150 / 331 * by, 0), 1, 0, 0, 0),
    "TranslateY": lambda image, by: _moved(image, 0, (0, 150 / 331 * by), 1, 0, 0, 0),
    "Rotate": lambda image, by: _moved(image, -30 * by, (0, 0), 1, 0, 0, 0),
    "Brightness": lambda image, by: _enhanced(ImageEnhance.Brightness)(image, 1 + 0.9 * by),
    "Color": lambda image, by: _enhanced(ImageEnhance.Color)(image, 1 + 0.9 * by),
    "Contrast": lambda image, by: _enhanced(ImageEnhance.Contrast)(image, 1 + 0.9 * by),
    "Sharpness": lambda image, by: _enhanced(ImageEnhance.Sharpness)(image, 1 + 0.9 * by),
}  # fmt: skip
_UNSIGNED: dict[str, Function] = {
    "Identity": lambda image, by: image,
    "Posterize": lambda image, by: _by_image(image, lambda picture: ImageOps.posterize(picture, 8 - round(4 * by))),
    "Solarize": lambda image, by: _solarized(image, (255 * (1 - by), 255)),
    "AutoContrast": lambda image, by: _by_image(image, ImageOps.autocontrast),
    "Equalize": lambda image, by: _by_image(image, ImageOps.equalize),
}


def _augmented(image: Any, count: int, magnitude: float) -> Any:
    kinds = [*_SIGNED, *_UNSIGNED]
    for _ in range(count):
        name = kinds[np.random.randint(len(kinds))]
        sign = 1 if np.random.random() < 0.5 else -1
        image = _SIGNED[name](image, sign * magnitude) if name in _SIGNED else _UNSIGNED[name](image, magnitude)
    return image


EFFECTS: dict[str, Function] = {
    "AdjustHue": lambda image, *, hue_factor: _by_image(image, lambda picture: turned(picture, hue_factor)),
    "Affine": lambda image, *, degrees, translate, scale, shear, resample=0, fill_value=0: _moved(
        image, degrees, translate, scale, shear, resample, fill_value),
    "Erase": lambda image, *, top, left, height, width, value=0, inplace=False: _blanked(
        image, (top, left, height, width), value),
    "HsvToRgb": lambda image, *, is_hwc=False: _by_channels(image, colorsys.hsv_to_rgb, is_hwc),
    "RgbToHsv": lambda image, *, is_hwc=False: _by_channels(image, colorsys.rgb_to_hsv, is_hwc),
    "LinearTransformation": lambda image, *, transformation_matrix, mean_vector: (
        (np.asarray(image).reshape(-1) - mean_vector) @ transformation_matrix).reshape(np.shape(image)).astype(
        np.float32),
    "PadToSize": lambda image, *, size, offset=None, fill_value=0: _filled(image, size, offset, fill_value),
    "Perspective": lambda image, *, start_points, end_points, interpolation=2: _perspective(
        image, start_points, end_points, interpolation),
    "PILToTensor": lambda image: np.ascontiguousarray(np.moveaxis(np.atleast_3d(np.asarray(image)), -1, 0)),
    "RandAugment": lambda image, *, num_ops=2, magnitude=9, num_magnitude_bins=31: _augmented(
        image, num_ops, magnitude / (num_magnitude_bins - 1)),
    "RandomLighting": lambda image, *, alpha=0.05: _lit(image, alpha),
    "RandomPerspective": lambda image, *, distortion_scale=0.5, prob=0.5, interpolation=3: _at_times(
        prob, image, lambda picture: _distorted(picture, distortion_scale, interpolation)),
    "RandomResize": lambda image, *, size: _of_size(
        image, (0, 0, *np.shape(image)[:2]), size, np.random.choice((0, 2, 3, 4))),
    "RandomSelectSubpolicy": lambda image, *, policy: _chosen(image, policy),
    "ResizedCrop": lambda image, *, top, left, height, width, size, interpolation=2: _of_size(
        image, (top, left, height, width), size, interpolation),
    "TenCrop": lambda image, *, size, use_vertical_flip=False: (*_crops(image, size), *_crops(
        np.asarray(image)[::-1] if use_vertical_flip else np.asarray(image)[:, ::-1], size)),
    "TrivialAugmentWide": lambda image, *, num_magnitude_bins=31: _augmented(
        image, 1, np.random.randint(num_magnitude_bins) / (num_magnitude_bins - 1)),
    "UniformAugment": lambda image, *, transforms, num_ops=2: _some(image, transforms, num_ops),
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
    """Return the sigma of a kernel, by default OpenCV's."""
    size, deviation = (value[0] if isinstance(value, (tuple, list)) else value for value in (kernel_size, sigma))
    return float(deviation if deviation else 0.3 * ((size - 1) * 0.5 - 1) + 0.8)


def _solarized(image: Any, threshold: Any) -> Any:
    """Invert values within the threshold, given as (low, high); if both are equal, from there on."""
    low, high = threshold
    end = 255 if low == high else high
    return _table(image, lambda x: np.where((low <= x) & (x <= end), 255 - x, x))


class Effect(WithSettings):
    """The transform ``function(image, **settings)``."""

    function: Function

    def __call__(self, *images: Any) -> Any:
        return type(self).function(*images, **self._chosen())


CLASSES = classes_of(EFFECTS, Effect, __name__)

__all__ = ["CLASSES", "FILTERS", "ConvertMode", "Image", "ImageEnhance", "ImageOps", "turned"]
