"""What differs between devices, behind one set of questions (`training.backends.base.Backend`)."""

from __future__ import annotations

from training.backends.base import Backend, World
from training.config import Settings
from training.errors import UserError

__all__ = ["Backend", "World", "backend_name", "make_backend", "process_group"]


def backend_name(settings: Settings) -> str:
    """The backend that `run.backend` means here: `cpu` or `cuda`. Raises `UserError` when this machine has it not.

    Tensor parallelism is Neuron's alone: a CPU or a GPU of today holds the models that this project trains there.
    """
    import torch

    asked = settings.run.backend
    if asked == "neuron":
        raise UserError("run.backend: neuron is not built yet, expected auto, cpu or cuda")
    if asked == "cuda" and not torch.cuda.is_available():
        raise UserError("run.backend: cuda, but torch sees no GPU on this machine, expected auto or cpu")
    name = ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked
    if (size := settings.parallel.tensor_parallel_size) > 1:
        raise UserError(
            f"parallel.tensor_parallel_size: {size}, expected 1: the {name} backend has no tensor parallelism"
        )
    return name


def process_group(settings: Settings) -> str:
    """What `torch.distributed.init_process_group` is given: checkpoints and flags travel over gloo on every device."""
    return "cpu:gloo,cuda:nccl" if backend_name(settings) == "cuda" else "gloo"


def make_backend(settings: Settings, world: World) -> Backend:
    """The backend of this process. Raises `UserError` as `backend_name` does."""
    if backend_name(settings) == "cuda":
        from training.backends.cuda import CudaBackend

        return CudaBackend(settings, world)
    from training.backends.cpu import CpuBackend

    return CpuBackend(settings, world)
