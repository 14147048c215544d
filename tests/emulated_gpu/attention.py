"""The attention kernels of a GPU, computed by their definition on the host's memory, with the kernels' refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("aten", "IMPL")


def install(gpu: Any) -> None:
    """Register the kernels under CUDA's dispatch key."""
    for kernel in (_flash, _flash_backward, _efficient, _efficient_backward):
        name = f"_scaled_dot_product{kernel.__name__}".replace("_flash", "_flash_attention")
        name = name.replace("_efficient", "_efficient_attention")
        _library.impl(name, _as_one_kernel(kernel, name, gpu), "CUDA")


def _as_one_kernel(kernel: Callable[..., Any], name: str, gpu: Any) -> Callable[..., Any]:
    """One kernel on the current stream, which reads all tensors that it is given and writes all that it returns."""

    def run(*args: Any, **options: Any) -> Any:
        if gpu.is_capturing():
            results = run_now(*args, **options)
            there, targets = ([gpu.at_address(x) if isinstance(x, Tensor) else x for x in xs] for xs in (args, results))
            gpu.add_node(lambda: again(there, targets, options))
            return results
        return run_now(*args, **options)

    def again(args: Sequence[Any], targets: Sequence[Any], options: dict[str, Any]) -> None:
        for target, result in zip(targets, run_now(*args, **options), strict=True):
            if isinstance(target, Tensor):
                gpu.access(gpu.current_stream(), target, True, name)
                gpu.on_host(target).copy_(gpu.on_host(result))

    def run_now(*args: Any, **options: Any) -> Any:
        stream = gpu.current_stream()
        gpu.tick(stream)
        device = args[0].device
        for tensor in args:
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                gpu.access(stream, tensor, False, name)
        before = gpu.exchange_inside(True)
        try:
            on_host = [gpu.on_host(value) if isinstance(value, Tensor) else value for value in args]
            results = kernel(*on_host, **options)
            results = tuple(_on(device, value) if isinstance(value, Tensor) else value for value in results)
        finally:
            gpu.exchange_inside(before)
        for tensor in results:
            if isinstance(tensor, Tensor):
                gpu.access(stream, tensor, True, name)
        return results

    return run


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    """Move a tensor, with its strides."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return moved.copy_(tensor)


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not()
        scores = scores.masked_fill(future, float("-inf"))
    return scores if bias is None else scores + bias.double()


def _shared(query: Tensor, *others: Tensor) -> list[Tensor]:
    """Repeat the heads that several heads of the query share; in float64."""
    return [query.double(), *(t.double().repeat_interleave(query.shape[1] // t.shape[1], 1) for t in others)]


def _forward(
    tensors: Sequence[Tensor], bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output, laid out as [batch, time, heads, width], and the log-sum-exp of the scores."""
    query, key, value = _shared(*tensors)
    scores = _scores(query, key, bias, causal, scale)
    output = torch.softmax(scores, -1).nan_to_num(0.0) @ value
    laid_out = output.to(tensors[0].dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return laid_out, torch.logsumexp(scores, -1).float()


def _backward(
    cotangent: Tensor,
    tensors: Sequence[Tensor],
    bias: Tensor | None,
    result: tuple[Tensor, Tensor],
    causal: bool,
    scale: float | None,
) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of query, key and value, and of the scores. ``result``: output and log-sum-exp of forward,
    which may be those over more keys, as in a ring."""
    query, key, value = _shared(*tensors)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    output, log_sums = (tensor.double() for tensor in result)
    scores = _scores(query, key, bias, causal, scale)
    weights = torch.exp(scores - log_sums[..., : query.shape[2], None]).nan_to_num(0.0)
    of_weights = cotangent.double() @ value.transpose(-1, -2)
    of_scores = weights * (of_weights - (cotangent.double() * output).sum(-1, keepdim=True))
    heads = tensors[1].shape[1]

    def summed(gradient: Tensor) -> Tensor:
        return gradient.unflatten(1, (heads, -1)).sum(2)

    gradients = [
        of_scores @ key * factor,
        summed(of_scores.transpose(-1, -2) @ query * factor),
        summed(weights.transpose(-1, -2) @ cotangent.double()),
    ]
    return [gradient.to(tensors[0].dtype) for gradient in gradients], of_scores


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    scale: float | None = None,
) -> tuple[Any, ...]:
    tensors = (query, key, value)
    assert dropout == 0.0, "the emulated kernels have no dropout"
    assert query.dtype in (torch.float16, torch.bfloat16), "FlashAttention only supports fp16 and bf16"
    assert all(t.stride(-1) == 1 for t in tensors), "FlashAttention: input must have a contiguous last dimension"
    output, log_sums = _forward(tensors, None, causal, scale)
    seed, unused = torch.zeros(2, dtype=torch.uint64), torch.zeros(0, dtype=torch.uint64)
    return output, log_sums, None, None, query.shape[2], key.shape[2], seed, unused, query.new_zeros(0)


def _flash_backward(*args: Any, scale: float | None = None) -> tuple[Tensor, ...]:
    cotangent, query, key, value, output, log_sums = args[:6]
    assert log_sums.dtype == torch.float32, "FlashAttention: the log-sum-exp is in float32"
    return tuple(_backward(cotangent, (query, key, value), None, (output, log_sums), args[11], scale)[0])


_ROWS = 32  # the log-sum-exp of the efficient kernel is padded to a multiple of these


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    with_log_sums: bool,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Any, ...]:
    assert dropout == 0.0, "the emulated kernels have no dropout"
    if bias is not None:
        alignment = 4 if query.dtype == torch.float32 else 8
        aligned = bias.shape[-1] == 1 or (bias.stride(-1) in (0, 1) and bias.stride(-2) % alignment == 0)
        assert bias.dtype == query.dtype, "attn_bias must have the dtype of the query"
        assert aligned, "attn_bias is not correctly aligned (strideM)"
    output, log_sums = _forward((query, key, value), bias, causal, scale)
    padded = torch.zeros(*query.shape[:2], -(-query.shape[2] // _ROWS) * _ROWS if with_log_sums else 0)
    if with_log_sums:
        padded[..., : query.shape[2]] = log_sums
    number = torch.zeros((), dtype=torch.int64)
    return output, padded, number, number.clone()


def _efficient_backward(*args: Any, scale: float | None = None) -> tuple[Tensor | None, ...]:
    cotangent, query, key, value, bias, output, log_sums = args[:7]
    needed, causal = args[10], args[11] if len(args) > 11 else False
    gradients, of_scores = _backward(cotangent, (query, key, value), bias, (output, log_sums), causal, scale)
    if bias is None or not needed[3]:
        return (*gradients, None)
    repeated = [i for i in range(of_scores.dim()) if bias.shape[i] == 1 or bias.stride(i) == 0]
    of_bias = of_scores.sum(repeated, keepdim=True) if repeated else of_scores
    return (*gradients, of_bias.expand(bias.shape).to(query.dtype))
