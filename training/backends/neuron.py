"""Training on NeuronCores by neuronx-distributed (NxD): tensor and sequence parallel layers, ZeRO-1, its checkpoints.

One worker has one core. Ranks of a tensor-parallel group follow one another, so a group stays inside a node. Numbers:
weights and products in bfloat16 (rounded stochastically where NEURON_RT_STOCHASTIC_ROUNDING_EN is set), and in float32
what `train.master_weights` and `train.accumulate_float32` ask for.

With NXD_CPU_MODE=1 the same code runs on CPU cores over gloo, in float32 and without ZeRO-1, which takes an XLA device:
that is how it is tested.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from training.backends.base import Backend, World
from training.checkpoint import Checkpointer
from training.compile_cache import use_cache
from training.config import Settings
from training.errors import UserError
from training.trainium import CORE_PEAK_FLOPS

PACKAGE = "neuronx_distributed"
SMALLEST_RATE = 1e-12  # on the device AdamW divides by the learning rate
SDK = ("neuronx-cc", "torch-neuronx", "torch-xla", "neuronx-distributed", "libneuronxla")


def installed() -> bool:
    """Whether this Python has NxD, as that of the Neuron image has."""
    return importlib.util.find_spec(PACKAGE) is not None


def cpu_mode() -> bool:
    """Whether NxD is to run on CPU cores."""
    return os.environ.get("NXD_CPU_MODE", "0") not in ("", "0")


def group_backend() -> str:
    """What `torch.distributed.init_process_group` is given."""
    if cpu_mode():
        return "gloo"
    import torch_xla.distributed.xla_backend  # noqa: F401 - makes it known to torch.distributed

    return "xla"


def extracts_graphs() -> bool:
    """Whether this process is to trace the graphs of a run for the compiler, and not to train."""
    return os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY", "0") not in ("", "0")


def compute_dtype(settings: Settings) -> torch.dtype:
    """Dtype of weights and products."""
    asked = settings.train.dtype
    if cpu_mode():
        if asked == "bfloat16":
            raise UserError("train.dtype: bfloat16, expected auto or float32 with NXD_CPU_MODE: ZeRO-1 is not there")
        return torch.float32
    return torch.bfloat16 if asked == "auto" else getattr(torch, asked)


def ingredients(settings: Settings) -> dict[str, Any]:
    """All that the compiled graphs of a run depend on. The whole step is one, so every layer and every rank counts.

    So do the optimizer's constants: which of them are equal tells one graph from another. Not the compiler's flags: its
    cache tells them apart, and the process that starts the workers may have others.
    """
    train = {"seq_length", "global_batch_size", "micro_batch_size", "activation_checkpointing"}
    train |= {"master_weights", "accumulate_float32", "beta1", "beta2", "adam_eps", "weight_decay", "grad_clip"}
    parts = {
        "model": settings.model.model_dump(mode="json", exclude={"init_from", "initializer_range"}),
        "train": settings.train.model_dump(mode="json", include=train),
        "parallel": settings.parallel.model_dump(mode="json"),
    }
    versions = {name: importlib.metadata.version(name) for name in SDK if _has(name)}
    versions |= {"torch": torch.__version__, "python": platform.python_version()}
    device = {"backend": NeuronBackend.name, "dtype": str(compute_dtype(settings))}
    return parts | {"device": device, "versions": versions}


def _has(distribution: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(distribution))
    return False


def compiled_graphs(cache: Path) -> set[str]:
    """Names of the graphs that Neuron's compiler has put into its cache: COMPILER/MODULE_.../model.neff."""
    return {path.parent.name for path in cache.glob("**/model.neff")}


def extracted_graphs(cache: Path) -> set[str]:
    """Names of the graphs that were traced into the cache, compiled or not."""
    return {path.parent.name for path in cache.glob("**/MODULE_*/*.hlo*.pb*")}


class NeuronBackend(Backend):
    """One NeuronCore: the one that NEURON_RT_VISIBLE_CORES names."""

    name = "neuron"

    def __init__(self, settings: Settings, world: World) -> None:
        super().__init__(settings, world)
        self.on_device = not cpu_mode()
        self.asynchronous = self.on_device
        self._cache = use_cache(settings, self.ingredients()) / "neuron"  # the first graph is that of the groups
        self._known = compiled_graphs(self._cache)
        self._misses, self._graphs = 0, 0
        os.environ.setdefault("NXD_LOG_LEVEL", "error")  # it prints every group of ranks otherwise
        if not dist.is_initialized():  # a worker alone; NxD wants a group all the same
            alone = dist.HashStore()  # type: ignore[attr-defined]  # torch does not say that it exports it
            dist.init_process_group(group_backend(), store=alone, rank=0, world_size=1)
        import neuronx_distributed

        train, parallel = settings.train, settings.parallel
        zero_1 = parallel.zero_1 and self.on_device
        if train.master_weights and self.on_device and not zero_1:
            raise UserError("train.master_weights: true, expected false with parallel.zero_1: false, which has none")
        self._master = train.master_weights and zero_1
        from training.backends.neuron_layers import neuron_layers, splits_sequence

        self._nxd_config = neuronx_distributed.neuronx_distributed_config(
            tensor_parallel_size=parallel.tensor_parallel_size,
            sequence_parallel=splits_sequence(settings),
            optimizer_config={
                "zero_one_enabled": zero_1,
                "grad_clipping": True,
                "max_grad_norm": train.grad_clip,
            },
            mixed_precision_config={
                "use_master_weights": self._master,
                "use_fp32_grad_acc": train.accumulate_float32 and zero_1,
                "use_master_weights_in_ckpt": self._master,  # without them a resumed run would not be the same
            },
        )
        self.layers = neuron_layers(settings, self.dtype, self.on_device)
        # Objects travel over gloo: XLA moves tensors alone.
        self._control = dist.new_group(backend="gloo")

    @property
    def device(self) -> torch.device:
        if not self.on_device:
            return torch.device("cpu")
        import torch_xla

        return torch_xla.device()

    @property
    def device_name(self) -> str:
        return "NeuronCore-v2" if self.on_device else "CPU cores as NeuronCores (NXD_CPU_MODE)"

    def peak_flops(self) -> tuple[float, str] | None:
        if not self.on_device:
            return None
        return CORE_PEAK_FLOPS, f"NeuronCore-v2 dense bf16, {CORE_PEAK_FLOPS / 1e12:.0f} TFLOP/s"

    @property
    def data_parallel(self) -> tuple[int, int]:
        from neuronx_distributed.parallel_layers import parallel_state

        return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()

    def auto_dtype(self) -> torch.dtype:
        return compute_dtype(self.settings)

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.settings)

    @property
    def compiles(self) -> bool:
        """Always by Neuron's own compiler; `train.compile` is torch.compile's."""
        return self.on_device

    def ingredients(self) -> dict[str, Any]:
        return ingredients(self.settings)

    def cache_counts(self) -> dict[str, int]:
        from torch_xla.debug import metrics

        data = metrics.metric_data("CompileTime")  # (count, seconds in all, samples), None before the first graph
        graphs = data[0] if data else 0
        if graphs != self._graphs:  # only then is the shared folder worth a look
            self._graphs, self._misses = graphs, len(compiled_graphs(self._cache) - self._known)
        return {"hits": max(0, graphs - self._misses), "misses": self._misses}

    def build_model(self) -> nn.Module:
        from neuronx_distributed.utils.model_utils import move_model_to_device, preserve_parallel_attributes

        from training.backends.neuron_layers import assign_part, splits_sequence

        with torch.device("meta"):
            model = self.bare_model()
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):  # each rank sees its positions only: NxD sums their gradients
                parameter.sequence_parallel_enabled = splits_sequence(self.settings)  # type: ignore[attr-defined]
        # Shared weights are ours to keep shared: NxD 0.17's search for them finds none in a module without its own.
        with preserve_parallel_attributes(model):
            model.to_empty(device="cpu").to(self.dtype)
        model.tie_weights()
        self.fill(model, assign_part)
        if self.on_device:
            move_model_to_device(model, self.device)
            model.tie_weights()
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        import neuronx_distributed

        train = self.settings.train
        # Its numbers that change from step to step are then data on the device too (see `update`).
        more: dict[str, Any] = {"capturable": self.on_device}
        if self._nxd_config["optimizer_config"]["zero_one_enabled"]:
            more["max_norm"] = train.grad_clip  # NxD 0.17 does not hand it on to ZeRO-1
            more["optimizer_dtype"] = torch.float32 if self._master else self.dtype
        optimizer: torch.optim.Optimizer = neuronx_distributed.initialize_parallel_optimizer(
            self._nxd_config,
            torch.optim.AdamW,
            self.parameter_groups(model),
            lr=train.learning_rate,
            betas=(train.beta1, train.beta2),
            eps=train.adam_eps,
            **more,
        )
        return optimizer

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()  # the weights have the dtype already

    @contextlib.contextmanager
    def gradient_sync(self, model: nn.Module, last: bool) -> Iterator[None]:
        yield
        if not last:  # a graph for each pass, which all but the first share, and not one that grows with their number
            self.step_boundary()

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        rates = [group["lr"] for group in optimizer.param_groups]
        if self.on_device:  # XLA makes one input of two numbers that are equal, and so another graph; [rate] is data
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = torch.tensor([max(rate, SMALLEST_RATE)]).to(self.device)
        optimizer.step()  # sums gradients over the workers, clips and steps
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        grad_norm: torch.Tensor = optimizer.grad_norm  # type: ignore[attr-defined]
        optimizer.zero_grad(set_to_none=True)
        return grad_norm.float().reshape(())

    def step_boundary(self) -> None:
        from neuronx_distributed.utils import mark_step

        mark_step()

    def gather(self, value: float) -> list[float]:
        values = [value] * self.world.size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def checkpointer(self, directory: Path, keep: int) -> Checkpointer:
        from training.backends.neuron_checkpoint import NeuronCheckpointer

        return NeuronCheckpointer(directory, keep)

    def training_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def restore(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from training.backends.neuron_checkpoint import restore

        restore(path, model, optimizer, self.settings.parallel.tensor_parallel_size)
