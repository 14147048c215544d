"""Fourier transforms."""

from __future__ import annotations

import torch
from torch import Tensor

from rules.samples.calls import call, plain, unsplit, x

aten = torch.ops.aten


def _complex(*shape: int) -> Tensor:
    return torch.complex(x(*shape), x(*shape)).detach().requires_grad_()


TRANSFORMS = [
    call(aten.stft.default, x(3, 12), 4, 2, None, plain(x(4)), return_complex=True),
    unsplit(aten.stft.default, x(12), 4, return_complex=True, onesided=False),
    call(aten.stft.center, _complex(3, 12), 4, 3, 3, plain(x(3)), pad_mode="constant", return_complex=True),
    *(call(op, _complex(3, 6, 4)) for op in (aten.fft_fft.default, aten.fft_ifft.default, aten.fft_hfft.default)),
    *(call(op, x(3, 6, 4)) for op in (aten.fft_fft.default, aten.fft_rfft.default, aten.fft_ihfft.default)),
    call(aten.fft_fft.default, _complex(3, 6, 4), 5, 1, "ortho"),
    call(aten.fft_irfft.default, _complex(3, 6, 4), 6, 0),
    *(call(op, _complex(3, 6, 4)) for op in (aten.fft_fft2.default, aten.fft_ifft2.default, aten.fft_irfft2.default)),
    *(call(op, x(3, 6, 4), [4, 3], [0, 2]) for op in (aten.fft_rfft2.default, aten.fft_ihfft2.default)),
    call(aten.fft_hfft2.default, _complex(3, 6, 4), None, [-3, -2]),
    call(aten.fft_fftn.default, _complex(3, 6, 4), None, [1, 2]),
    unsplit(aten.fft_fftn.default, _complex(3, 6, 4)),
    call(aten.fft_ifftn.default, _complex(3, 6, 4), [4]),
    *(call(op, x(3, 6, 4), [5, 4]) for op in (aten.fft_rfftn.default, aten.fft_ihfftn.default)),
    *(call(op, _complex(3, 6, 4), None, [1]) for op in (aten.fft_irfftn.default, aten.fft_hfftn.default)),
    call(aten.fft_fftshift.default, x(3, 6, 4), [1]),
    call(aten.fft_ifftshift.default, x(3, 5, 4), [1, -1]),
]
