"""The inverse short-time Fourier transform as a composite: PyTorch's operator inspects the data of its window."""

from __future__ import annotations

import torch

from shardwise.graph.emitter import Emitter
from shardwise.graph.ir import Arg, Op, Ref
from shardwise.graph.schema import arguments

aten = torch.ops.aten


def istft(op: Op, emitter: Emitter) -> tuple[Arg, ...]:
    """Overlap and add the inverse transforms of the frames, over the sum of the squared windows (Griffin and Lim 1984,
    equation 6). PyTorch's operator raises if that sum is 0; here the result is not finite there."""
    args, emit = arguments(op), emitter.emit
    spectrum, n_fft = args["self"], args["n_fft"]
    *batch, bins, frames = emitter.value(spectrum).shape
    hop = n_fft // 4 if args["hop_length"] is None else args["hop_length"]
    width = n_fft if args["win_length"] is None else args["win_length"]
    window = args["window"]
    if window is None:
        double = emitter.value(spectrum).dtype == torch.complex128
        window = emit(aten.full.default, (width,), 1.0, dtype=torch.float64 if double else torch.float32)
    if width != n_fft:
        left = (n_fft - width) // 2
        window = emit(aten.constant_pad_nd.default, window, (left, n_fft - width - left))
    norm = "ortho" if args["normalized"] else "backward"
    if args["return_complex"]:
        pieces = emit(aten.fft_ifft.default, spectrum, None, -2, norm)
    else:
        if bins == n_fft and not args["onesided"]:
            spectrum = emit(aten.slice.Tensor, spectrum, -2, 0, n_fft // 2 + 1)
        pieces = emit(aten.fft_irfft.default, spectrum, n_fft, -2, norm)
    length = n_fft + hop * (frames - 1)
    start = n_fft // 2 if args["center"] else 0
    stop = length - start if args["length"] is None else start + args["length"]

    def added(parts: Ref, *leading: int) -> Ref:
        """Return the sum, from ``start`` to ``stop``, of frames ``[..., n_fft, t]`` that lie ``hop`` apart."""
        parts = emit(aten.reshape.default, parts, (-1, n_fft, frames))
        signal = emit(aten.col2im.default, parts, (1, length), (1, n_fft), (1, 1), (0, 0), (1, hop))
        signal = emit(aten.reshape.default, signal, (*leading, length))
        return emit(aten.slice.Tensor, signal, -1, start, stop)

    column = emit(aten.unsqueeze.default, window, 1)
    pieces = emit(aten.mul.Tensor, pieces, column)
    envelope = added(emit(aten.expand.default, emit(aten.mul.Tensor, column, column), (n_fft, frames)))
    if emitter.value(pieces).dtype.is_complex:
        pairs = emit(aten.view_as_real.default, pieces)
        parts = [added(emit(aten.select.int, pairs, -1, i), *batch) for i in range(2)]
        signal = emit(aten.complex.default, *parts)
    else:
        signal = added(pieces, *batch)
    result = emit(aten.div.Tensor, signal, envelope)
    if stop > length:
        result = emit(aten.constant_pad_nd.default, result, (0, stop - length))
    return (result,)


COMPOSITES = {aten.istft.default: istft}
