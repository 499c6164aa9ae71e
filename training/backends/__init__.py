"""What differs between devices, behind one set of questions (`training.backends.base.Backend`)."""

from __future__ import annotations

from training.backends.base import Backend, World
from training.config import Settings
from training.errors import UserError

__all__ = ["Backend", "World", "backend_name", "make_backend", "process_group"]


def backend_name(settings: Settings) -> str:
    """The backend that `run.backend` means here: `cpu`, `cuda` or `neuron`. Raises `UserError` when it is not there.

    For neuron it asks for the packages and not for a device, which the process that starts the workers may lack. Tensor
    parallelism is Neuron's alone: a CPU or a GPU of today holds the models that this project trains there.
    """
    import torch

    from training.backends import neuron

    asked = settings.run.backend
    if asked == "neuron" and not neuron.installed():
        raise UserError(
            f"run.backend: neuron, but {neuron.PACKAGE} is not installed here, expected the image of "
            "training/Dockerfile"
        )
    if asked == "cuda" and not torch.cuda.is_available():
        raise UserError("run.backend: cuda, but torch sees no GPU on this machine, expected auto or cpu")
    name: str = asked
    if asked == "auto":
        name = "cuda" if torch.cuda.is_available() else "neuron" if neuron.installed() else "cpu"
    size = settings.parallel.tensor_parallel_size
    if size > 1 and name != "neuron":
        raise UserError(
            f"parallel.tensor_parallel_size: {size}, expected 1: the {name} backend has no tensor parallelism"
        )
    return name


def process_group(settings: Settings) -> str:
    """What `torch.distributed.init_process_group` is given: checkpoints and flags travel over gloo on every device."""
    name = backend_name(settings)
    if name == "neuron":
        from training.backends import neuron

        return neuron.group_backend()
    return "cpu:gloo,cuda:nccl" if name == "cuda" else "gloo"


def make_backend(settings: Settings, world: World) -> Backend:
    """The backend of this process. Raises `UserError` as `backend_name` does."""
    name = backend_name(settings)
    if name == "neuron":
        from training.backends.neuron import NeuronBackend

        return NeuronBackend(settings, world)
    if name == "cuda":
        from training.backends.cuda import CudaBackend

        return CudaBackend(settings, world)
    from training.backends.cpu import CpuBackend

    return CpuBackend(settings, world)
