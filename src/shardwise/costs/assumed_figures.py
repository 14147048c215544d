"""What a cluster file leaves out that prices need, what is assumed instead, and notes about that on stderr."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from shardwise.costs.cluster import rate_dtype

MEASURE = "shardwise calibrate -o my.toml measures this machine"

# Key -> what is assumed without it.
_OF_DEVICES = {
    "matmul_efficiency": "large matmuls reach the peak",
    "matmul_half_flops": "small matmuls are as fast as large ones",
    "memory_efficiency": "element-wise operators reach the whole bandwidth",
    "kernels": "every kind of kernel reaches the same part of a peak",
    "overlap": "messages slow no kernel down",
    "launch": "the host starts kernels as fast as they run",
    "reserve": "a plan has all of the memory",
    "host_bandwidth": "the memory is the host's",
    "spread": "operators take the predicted time, without an interval",
}
_OF_LEVELS = {"launch": "collectives begin at once", "spread": "messages take the predicted time, without an interval"}


def assumed_figures(content: Mapping[str, Any]) -> list[str]:
    """List the figures that a valid cluster file leaves out, each with the assumed value. Empty for a measured file."""
    if "measured" in content:
        return []
    devices = [content["device"]] if "device" in content else content.get("devices", [])
    lacking = {
        f"device.{key}": f"device.{key} (assumed: {what})"
        for device in devices
        for key, what in _OF_DEVICES.items()
        if "like" not in device and key not in device and not (key == "kernels" and "kernels_like" in device)
    }
    for device in devices:
        flops = {} if "like" in device else device.get("flops", {})
        stands = {dtype: rate_dtype(dtype, flops) for dtype in ("bf16", "f16") if flops and dtype not in flops}
        lacking |= {
            f"flops.{dtype}": f"device.flops.{dtype} (assumed: the rate of {other})"
            for dtype, other in stands.items()
            if other
        }
    for level in content.get("levels", []):
        lacking |= {
            f"{level['name']}.{key}": f"levels.{level['name']}.{key} (assumed: {what})"
            for key, what in _OF_LEVELS.items()
            if key not in level and not (key == "launch" and ("launches" in level or "lines" in level))
        }
    return list(lacking.values())


@cache
def print_note_once(text: str) -> None:
    print(f"shardwise: {text}", file=sys.stderr)
