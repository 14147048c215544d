"""The face of the emulated GPU: ``install()`` makes ``torch.cuda`` and ``nccl`` those of the library beside this file.

What it emulates: memory on ``cuda:N`` under CUDA's dispatch key (fresh memory is NaN, mixed devices are refused), the
order of streams, events, the caching allocator and pinned memory (a race is reported), the kernels that attention takes
on a Hopper GPU, NCCL's streams and refusals, every block of the host. What it does not: Triton, time, and the rounding
of a GPU's kernels.
"""

from __future__ import annotations

import copy
import importlib.util
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from emulated_gpu.build import NAME, library

MEMORY = 80 * 10**9
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    total_memory=MEMORY,
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    L2_cache_size=50 << 20,
    gcnArchName="",
    uuid="GPU-0",
)


class Record:
    """What the emulated GPU of this process saw. ``races``: texts; ``waits``: blocks of the host, by kind and place."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.waits: Counter[str] = Counter()
        self.warns_of_waits = False  # torch.cuda.set_sync_debug_mode

    def clear(self) -> None:
        """Forget everything seen so far."""
        torch.cuda.synchronize()
        gpu.forget()
        self.races.clear()
        self.waits.clear()

    def hear(self, is_race: bool, text: str) -> None:
        if is_race:
            self.races.append(f"{text} [{_place()}]")
        else:
            self.waits[f"{text} [{_place()}]"] += 1
            if self.warns_of_waits:
                warnings.warn("called a synchronizing CUDA operation", stacklevel=3)


def _place() -> str:
    """Return the innermost lines of shardwise's stack, or of the test's."""
    frames = [frame for frame in traceback.extract_stack() if "emulated_gpu/device" not in frame.filename]
    ours = [frame for frame in frames if "/shardwise/" in frame.filename] or frames[-6:]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(ours[-3:]))


record = Record()
gpu: Any = None  # the compiled library, once installed


def install(num_gpus: int, rank: int) -> None:
    """Give this process emulated GPUs, of which number ``rank`` is its current one. It has none of its own."""
    global gpu
    assert gpu is None, "the emulated GPU is installed already"
    spec = importlib.util.spec_from_file_location(NAME, library())
    assert spec is not None
    assert spec.loader is not None
    gpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu)
    gpu.set_device_count(num_gpus)
    gpu.set_device(rank)
    gpu.listen(record.hear)
    _replace_torch_cuda(num_gpus)
    torch.empty(1, pin_memory=True)  # torch asks what is pinned once CUDA is initialised
    _replace_nccl()
    from emulated_gpu import attention

    attention.install(gpu)


# ------------------------------------------------------------------------------------------------ streams and events


class Event:
    def __init__(self, *args: Any, **options: Any) -> None:
        self.clock: dict[int, int] = {}
        self._seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.clock, self._seconds = gpu.record(_number(stream)), time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        gpu.wait(_number(stream), self.clock)

    def synchronize(self) -> None:
        gpu.block_host(self.clock, "event", _is_main())

    def query(self) -> bool:
        # What a thread beside the main one learns orders nothing that the main one starts.
        return bool(gpu.is_done(self.clock, _is_main()))

    def elapsed_time(self, other: Event) -> float:
        return (other._seconds - self._seconds) * 1e3


class Stream:
    device_type = 1

    def __init__(self, device: Any = None, priority: int = 0, *, number: int | None = None) -> None:
        self.device_index = _index(device)
        self.device, self.priority = torch.device("cuda", self.device_index), priority
        self.stream_id = self.cuda_stream = gpu.new_stream() if number is None else number

    def wait_stream(self, other: Stream) -> None:
        gpu.wait(self.stream_id, gpu.record(other.stream_id))

    def wait_event(self, event: Event) -> None:
        gpu.wait(self.stream_id, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        gpu.block_host(gpu.record(self.stream_id), "stream")

    def query(self) -> bool:
        return bool(gpu.is_done(gpu.record(self.stream_id), True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)


class CUDAGraph:
    """A capture runs nothing, as far as anyone can see (``gpu.cpp``); a replay is one launch."""

    def capture_begin(
        self, pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        self._pool = pool or (0, gpu.new_pool())
        gpu.begin_capture(self._pool[1], capture_error_mode)

    def capture_end(self) -> None:
        self._graph = gpu.end_capture()

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph = None

    def pool(self) -> Any:
        return self._pool


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _number(stream: Stream | None) -> int:
    return int(gpu.current_stream()) if stream is None else int(stream.stream_id)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(gpu.current_device()) if index is None else index


@contextmanager
def _on_stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = gpu.exchange_stream(stream.stream_id)
    try:
        yield
    finally:
        gpu.exchange_stream(before)


class _OnDevice:
    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = gpu.current_device()
        gpu.set_device(self.index)

    def __exit__(self, *error: object) -> None:
        gpu.set_device(self.before)


def _replace_torch_cuda(num_gpus: int) -> None:
    # These look at the real torch.cuda when they are first called, and keep what they find.
    import torch._dynamo.trace_rules
    import torch.utils._device

    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    torch.utils._device._device_constructors()

    def nothing(*args: Any, **options: Any) -> None:
        return None

    def properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(**{**vars(PROPERTIES), "uuid": f"GPU-{_index(device)}"})

    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: num_gpus,
        "_device_count_nvml": lambda: num_gpus,
        "current_device": lambda: gpu.current_device(),
        "set_device": lambda device: gpu.set_device(_index(device)),
        "device": _OnDevice,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "synchronize": lambda device=None: gpu.block_host(gpu.all_clocks(), "device"),
        "Stream": Stream,
        "Event": Event,
        "stream": _on_stream,
        "current_stream": lambda device=None: Stream(number=gpu.current_stream()),
        "default_stream": lambda device=None: Stream(number=0),
        "is_current_stream_capturing": lambda: gpu.is_capturing(),
        "CUDAGraph": CUDAGraph,
        "graph_pool_handle": lambda: (0, gpu.new_pool()),
        "can_device_access_peer": lambda device, other: False,  # symmetric memory is not emulated
        "mem_get_info": lambda device=None: (MEMORY - gpu.live_bytes(), MEMORY),
        "memory_allocated": lambda device=None: gpu.live_bytes(),
        "memory_reserved": lambda device=None: gpu.live_bytes(),
        "max_memory_allocated": lambda device=None: gpu.peak_bytes(),
        "max_memory_reserved": lambda device=None: gpu.peak_bytes(),
        "reset_peak_memory_stats": lambda device=None: gpu.reset_peak(),
        "get_per_process_memory_fraction": lambda device=None: 1.0,
        "get_device_properties": properties,
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "is_bf16_supported": lambda *args: True,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "_is_in_bad_fork": lambda: False,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=_register,
            cudaHostUnregister=gpu.unregister_host,
        ),
        "nccl": SimpleNamespace(version=lambda: (2, 28, 9)),
        "set_sync_debug_mode": lambda mode: setattr(record, "warns_of_waits", mode == "warn"),
    }
    silent = ("_lazy_init", "init", "empty_cache", "set_rng_state", "manual_seed", "manual_seed_all", "_sleep")
    for name, value in {**replaced, **dict.fromkeys(silent, nothing)}.items():
        setattr(torch.cuda, name, value)
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    torch._C._host_emptyCache = nothing
    torch.cuda.graphs.graph.default_capture_stream = None
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.Tensor.record_stream = lambda tensor, stream: gpu.record_stream(tensor, stream.stream_id)
    torch.Tensor.__deepcopy__ = _deepcopy_of(torch.Tensor.__deepcopy__)


max_registered_bytes = [1 << 60]  # at once; more is refused


def _register(address: int, num_bytes: int, flags: int) -> int:
    if num_bytes > max_registered_bytes[0]:
        gpu.set_last_error("out of memory")
        return 2
    gpu.register_host(address, num_bytes)
    return 0


def _deepcopy_of(of_torch: Callable[..., Any]) -> Callable[..., Any]:
    """torch copies the storage of a tensor on a GPU by code of its CUDA builds."""

    def deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
        if not tensor.is_cuda or type(tensor) is not torch.Tensor or id(tensor) in memo:
            return of_torch(tensor, memo)
        memo[id(tensor)] = copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return copied

    return deepcopy


# ------------------------------------------------------------------------------------------------------------- NCCL


class Options:
    """``ProcessGroupNCCL.Options``."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = dist.default_pg_timeout
        self.split_from: Any = None
        self.split_color: int | None = None
        self.config = None
        self.group_name = ""
        self.global_ranks_in_group: list[int] = []


backends: list[Any] = []  # alive as long as the process: attributes of Python are lost with the Python object
splits = [0]  # collective splits of communicators that this rank took part in


def _replace_nccl() -> None:
    class ProcessGroupNCCL(gpu.Nccl):  # type: ignore[misc, name-defined]
        def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
            super().__init__(dist.ProcessGroupGloo(store, rank, size, options._timeout), rank, size)
            self.options = options
            if options.split_from is not None:
                options.split_from.perform_nocolor_split(None)
            backends.append(self)

        def perform_nocolor_split(self, device: Any) -> None:
            splits[0] += 1

        def _set_sequence_number_for_group(self) -> None:
            pass

    def split_group(
        parent_pg: Any = None,
        split_ranks: Any = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: Any = None,
    ) -> Any:
        """``dist.split_group``: one collective of all ranks; every rank gets the group that it is in."""
        of_parent = dist.group.WORLD._get_backend(torch.device("cuda")).options
        options = copy.deepcopy(of_parent) if pg_options is None else pg_options
        if not isinstance(options, Options):
            raise RuntimeError("opts not a ProcessGroupNCCL::Options.")
        if any(options is backend.options for backend in backends):
            raise RuntimeError("the options of another group, into which its split was written")
        splits[0] += 1
        dist.barrier(device_ids=[gpu.current_device()])
        bound, dist.group.WORLD.bound_device_id = dist.group.WORLD.bound_device_id, None
        mine = next((ranks for ranks in split_ranks if dist.get_rank() in ranks), None)
        made = mine and dist.new_group(mine, timeout, pg_options=options, use_local_synchronization=True)
        dist.group.WORLD.bound_device_id = bound
        return made

    dist.split_group = split_group
    ProcessGroupNCCL.Options = Options
    for module in (distributed_c10d, dist):
        module.ProcessGroupNCCL = ProcessGroupNCCL
        module.is_nccl_available = lambda: True
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.default_pg_nccl_timeout = dist.default_pg_timeout
