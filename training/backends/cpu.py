"""Training on CPU cores: DDP over gloo. How people meet the project, and how it is tested."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from training.backends.base import Backend, World
from training.backends.layers_cpu import cpu_layers
from training.config import Settings
from training.metrics import measured_peak

# mallopt(3), from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next step instead of handing it back to the kernel.

    A step takes and frees the same tensors as the one before; the page faults of getting large ones anew cost about a
    tenth of it. The process stays at its peak size. Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


class CpuBackend(Backend):
    """The cores that this process may use, shared out evenly between the workers of the machine."""

    name = "cpu"
    asynchronous = False

    def __init__(self, settings: Settings, world: World) -> None:
        super().__init__(settings, world)
        if "OMP_NUM_THREADS" not in os.environ:  # Ray sets it to the CPUs that it gave the worker
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))
        self.layers = cpu_layers(self.compiles)
        keep_freed_memory()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def device_name(self) -> str:
        with contextlib.suppress(OSError):
            if found := re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()):
                return found[1]
        return platform.processor() or platform.machine()

    def peak_flops(self) -> tuple[float, str] | None:
        return measured_peak(self.dtype)

    def auto_dtype(self) -> torch.dtype:
        # With instructions for it, bfloat16 products run at several times the speed of float32 ones; emulated, slower.
        capable = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if capable else torch.float32

    def can_compile(self) -> bool:
        # Inductor's CPU code is C++ that includes Python.h; a machine without either trains uncompiled.
        compiler = any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++"))))
        return compiler and (Path(sysconfig.get_path("include")) / "Python.h").exists()

    def ingredients(self) -> dict[str, Any]:
        parts = super().ingredients()
        parts["device"]["threads"] = str(torch.get_num_threads())  # it is written into the code
        return parts

    def build_model(self) -> nn.Module:
        model = self.bare_model()
        self.fill(model)
        if self.compiles:
            model.compile_layers()
        if self.world.size == 1:
            return model
        return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)

    def gradient_sync(self, model: nn.Module, last: bool) -> contextlib.AbstractContextManager[Any]:
        if last or not isinstance(model, DistributedDataParallel):
            return contextlib.nullcontext()
        return model.no_sync()
