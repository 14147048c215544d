"""Translation of torch.export errors: the line of the model, and a fix."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from shardwise.errors import CaptureError, ShardwiseError
from shardwise.graph.origins import NOT_USER_CODE
from shardwise.graph.rejected import CONSTRUCTS, FLEX_ATTENTION, TRANSFORMS
from shardwise.graph.user_lines import DATA_DEPENDENT, run_model

# Torch's messages on a condition on a number of rows: whether there are any.
_HAS_ROWS = re.compile(r"(Eq|Ne)\(u\d+, 0\)|\bu\d+ (> 0|>= 1|< 1|<= 0)")
_BY_EXPERT = (
    "for e in range(n): tokens, choice = torch.where(chosen == e); out.index_add_(0, tokens, rows), or sort and "
    "F.grouped_mm(rows, weight, offs=counts.cumsum(0).int())"
)
_TORCH_MODULES = str(Path(torch.__file__).parent / "nn" / "modules")


def explain_export_error(error: Exception) -> CaptureError:
    """Return a CaptureError with the innermost line of the model and a fix."""
    source = _line_of(error)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    reads_values = ".numpy() is not supported" in first
    if (
        type(error).__name__ in DATA_DEPENDENT
        or isinstance(error.__cause__, DataDependentOutputException)
        or reads_values
    ):
        fix = "compute with tensors (torch.where for a choice, a mask for an index), or branch on Python numbers"
        if "_detect_is_causal_mask" in {frame.name for frame in traceback.extract_tb(error.__traceback__)}:
            what = "torch.nn.Transformer reads a mask to find out whether it is causal"
            fix = "pass tgt_is_causal=True (or False) with tgt_mask=, and is_causal= in an encoder"
            return CaptureError(what, source=source, fix=fix)
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f.line or "" for f in reversed(frames) if f"{Path(f.filename).name}:{f.lineno}" == source), "")
        if _HAS_ROWS.search(first) or ".any()" in line:
            fix += (
                "; in a loop over experts leave the condition out: without rows the branch adds nothing (parameters "
                f"that it would skip get a gradient of zeros, not None): {_BY_EXPERT}"
            )
        if "specialized integer" in first or reads_values:
            instead = (
                "compute with tensors: numpy reads the values of a tensor, and capture has fake (data-free) ones"
                if reads_values
                else "use x[mask].shape[0] for the number of selected rows, not len(x[mask]), int(...) or range(...)"
            )
            fix = f"{instead}. With rows per expert, no counts on the host (.tolist(), .numpy()): {_BY_EXPERT}"
        if any(
            Path(frame.filename).parent.name == "distributions" for frame in traceback.extract_tb(error.__traceback__)
        ):
            fix = "the distribution validates its parameters: pass it validate_args=False"
        return CaptureError(
            f"the model's control flow, or a size, depends on the data of a tensor ({first})",
            source=source,
            fix=fix,
            section="tensor-values",
        )
    fix = (
        "forward and the loss must run with these inputs on one device and on fake (data-free) CPU tensors; they must "
        "not choose a device (.cuda())"
    )
    if "Disabling autocast" in first:
        what = "the model calls torch.autocast for a device type that this machine lacks, where autocast does nothing"
        fix = "use the device of the tensors, torch.autocast(x.device.type, ...), or plan on a machine with that device"
        return CaptureError(what, source=source, fix=fix)
    if isinstance(error, AttributeError) and isinstance(error.obj, torch.Tensor):
        fix = "attributes set on tensors are lost during capture: keep these values in the module"
    used = _constructs_of(error)
    if used:
        return CaptureError(
            f"{used[0]} in forward cannot be captured ({first})", source=source, fix=CONSTRUCTS[used[0]]
        )
    what = f"the model cannot be captured: {type(error).__name__}: {first}"
    return CaptureError(what, op=_module_of(error), source=source, fix=fix)


def flex_attention_error(error: ShardwiseError) -> CaptureError | None:
    """Return the error to raise in place of one from the inside of flex attention, or None."""
    if FLEX_ATTENTION not in _constructs_of(error):
        return None
    what = f"{FLEX_ATTENTION} in forward cannot be captured"
    return CaptureError(what, source=_line_of(error), fix=CONSTRUCTS[FLEX_ATTENTION])


def _constructs_of(error: BaseException | None) -> list[str]:
    """Return the entries of ``CONSTRUCTS`` in the tracebacks of an error and of its causes."""
    names: list[str] = []
    while error is not None:
        names += [_construct(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
        error = error.__cause__ or error.__context__
    return [name for name in names if name]


def _construct(filename: str) -> str:
    """Return the entry of ``CONSTRUCTS`` to which a file of torch belongs, or ""."""
    path = Path(filename)
    if path.parent.name == "_higher_order_ops":
        return next((name for name in CONSTRUCTS if name.rpartition(".")[2] == path.stem), "")
    if path.parts[-2:] == ("attention", "flex_attention.py"):
        return FLEX_ATTENTION
    return TRANSFORMS if path.parent.name == "_functorch" and path.stem in ("vmap", "eager_transforms", "apis") else ""


def _module_of(error: BaseException) -> str:
    """Return the path of the innermost submodule that runs in a traceback, or "" outside all of them."""
    paths: dict[int, str] = {}
    path, step = "", error.__traceback__
    while step is not None:
        here = step.tb_frame.f_locals
        if step.tb_frame.f_code is run_model.__code__:
            paths = {id(module): name for name, module in here["module"].named_modules()}
        path = paths.get(id(here.get("self")), path)
        step = step.tb_next
    return path


def _line_of(error: BaseException) -> str:
    """Return the innermost user line of a traceback; for a torch module called outside the model, its own line."""
    line = module_line = ""
    inside = False
    step = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        here = f"{Path(code.co_filename).name}:{step.tb_lineno}"
        if code is run_model.__code__:
            inside = True
        elif inside and not code.co_filename.startswith(NOT_USER_CODE):
            line = here
        elif inside and code.co_filename.startswith(_TORCH_MODULES):
            module_line = here
        step = step.tb_next
    return line or module_line
