"""Compile the emulated GPU once per version of its sources, of torch and of Python, into ``build/emulated_gpu``."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = ("gpu.cpp", "nccl.cpp")
NAME = "emulated_gpu_library"


def missing_tool() -> str:
    """Return why the library cannot be built here, or an empty string."""
    if torch.version.cuda is not None:
        return "this torch has kernels for GPUs of its own, whose place the emulated ones take"
    return "" if shutil.which("g++") else "no g++ is installed, which compiles the emulated GPU"


def library() -> Path:
    """Return the compiled library; compile it (half a minute) if nobody has. Others wait for the one who does."""
    python = sysconfig.get_config_vars("EXT_SUFFIX")[0]
    content = b"".join((HERE / name).read_bytes() for name in (*SOURCES, "gpu.h", "build.py"))
    digest = hashlib.sha256(content + f"{torch.__version__} {torch.__file__} {python}".encode()).hexdigest()[:16]
    folder = HERE.parent.parent / "build" / "emulated_gpu" / digest
    target = folder / f"{NAME}{python}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(folder, target)
    return target


def _compile(folder: Path, target: Path) -> None:
    of_torch = Path(torch.__file__).parent
    includes = [of_torch / "include", of_torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    flags = ["-O0", "-fPIC", "-std=c++20", f"-DTORCH_EXTENSION_NAME={NAME}", *(f"-I{path}" for path in includes)]
    objects = [folder / f"{name}.o" for name in SOURCES]
    processes = [
        subprocess.Popen(["g++", *flags, "-c", str(HERE / name), "-o", str(made)], stderr=subprocess.PIPE, text=True)
        for name, made in zip(SOURCES, objects, strict=True)
    ]
    for process in processes:
        _, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(f"g++ does not compile the emulated GPU:\n{errors[-4000:]}")
    libraries = ["-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python", f"-L{of_torch / 'lib'}"]
    linked = target.with_suffix(".linked")
    command = ["g++", "-shared", *map(str, objects), "-o", str(linked), *libraries, f"-Wl,-rpath,{of_torch / 'lib'}"]
    subprocess.run(command, check=True, capture_output=True)
    linked.rename(target)
