"""The training loop: one for all backends and launchers.

`train(settings, world)` runs on every worker. It goes on from the newest whole checkpoint of the run by itself and
ends with an outcome in the run's folder: done, or stopped on request after a checkpoint. A fault ends the attempt with
`RunFailed`, so that the launcher can start the group again.

Numbers are read one step late: while the host looks at the loss of step N, the device already works on step N + 1.
"""

from __future__ import annotations

import contextlib
import functools
import math
import platform
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from training import checkpoint
from training.backends import Backend, World, make_backend, neuron
from training.checks import check_resume, checkpoint_meta
from training.compile_cache import use_cache
from training.config import Settings
from training.data.samples import Loader, SampleOrder, Samples, validation_batches
from training.data.store import TokenStore
from training.errors import RunFailed, UserError
from training.launchers.group import silent_ranks
from training.metrics import MetricsWriter, flops_per_token
from training.precompile import extract_graphs
from training.rundir import RunDir
from training.start_checks import check_sum
from training.step import evaluate, train_step
from training.watch import Watch

_Batch = tuple[torch.Tensor, torch.Tensor]

WRITER_WAIT_SECONDS = 60.0  # what a killed launcher's rank 0 is given to be gone


def learning_rate(settings: Settings, step: int) -> float:
    """Learning rate of step `step` (from 1): linear warm-up, then a cosine down to `train.min_learning_rate`.

    The schedule of Loshchilov and Hutter 2017 (SGDR) without restarts; a function of the step, so it needs no state.
    """
    train = settings.train
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    low, high = train.min_learning_rate, train.learning_rate
    return low + (high - low) * 0.5 * (1 + math.cos(math.pi * done))


def train(settings: Settings, world: World, parent: int | None = None) -> None:
    """Train until `train.steps` or a request to stop, on this worker.

    `parent`: process that must stay this one's parent (see `Watch`). Raises `RunFailed` on a fault that a restart
    may mend and `UserError` on what it cannot. Where Neuron is to extract graphs, it does that and nothing else.
    """
    if neuron.extracts_graphs():
        return extract_graphs(settings, world)
    run = RunDir(settings.run.dir)
    with contextlib.ExitStack() as stack:
        if world.rank == 0:
            stack.enter_context(run.writer_lock(WRITER_WAIT_SECONDS))
        silent = functools.partial(silent_ranks, world)
        watch = stack.enter_context(Watch(run, world.rank, settings.train.hang_timeout, parent, silent))
        _Attempt(settings, world, run, watch, stack).run_to_end()


class _Attempt:
    """One attempt of one worker, from the last checkpoint on."""

    def __init__(
        self, settings: Settings, world: World, run: RunDir, watch: Watch, stack: contextlib.ExitStack
    ) -> None:
        self.settings, self.world, self.run, self.watch = settings, world, run, watch
        self.backend: Backend = make_backend(settings, world)
        watch.beat(0, "adding up over all workers")
        check_sum(self.backend)
        watch.beat(0, "starting")
        if self.backend.compiles:
            use_cache(settings, self.backend.ingredients())
        self.model = self.backend.build_model()
        self.optimizer = self.backend.optimizer(self.model)
        self.checkpointer = self.backend.checkpointer(settings.checkpoint_dir, settings.checkpoint.keep)
        stack.callback(self.checkpointer.close)

        notes: list[str] = []
        path = checkpoint.latest(settings.checkpoint_dir, on_skip=notes.append)
        self.start = 0
        if path is not None:
            meta = checkpoint.read_meta(path)
            check_resume(settings, meta, path)
            self.backend.restore(path, self.model, self.optimizer)
            self.start = meta["step"]
        self.saved = self.start

        store = TokenStore.open(settings.data_dir, "train")
        samples = Samples(store, settings.train.seq_length, folder=settings.data_dir)
        self.store_sha256 = store.manifest["tokenizer_sha256"]
        self.loader = stack.enter_context(
            Loader(
                samples,
                SampleOrder(len(samples), settings.train.seed),
                settings.train.global_batch_size,
                *self.backend.data_parallel,
                self.start,
                pin_memory=self.backend.device.type == "cuda",
            )
        )
        valid = TokenStore.open(settings.data_dir, "valid")
        self.valid = None
        if valid.num_tokens > settings.train.seq_length:
            self.valid = Samples(valid, settings.train.seq_length, "valid", settings.data_dir)
        else:
            notes.append(f"the valid part of {settings.data_dir} has {valid.num_tokens} tokens: no evaluation")

        self.writer: MetricsWriter | None = None
        if world.rank == 0:
            shutil.copyfile(settings.data_dir / "manifest.json", run.manifest)
            self.writer = MetricsWriter(run.path, self.start)
            stack.callback(self.writer.close)
        peak = self.backend.peak_flops()
        self.flops = flops_per_token(settings.model, settings.train.seq_length)
        self.peak = peak[0] * world.size if peak else None
        self._write_start(peak, notes)

    def run_to_end(self) -> None:
        """Train, evaluate, save; leave an outcome."""
        settings = self.settings
        unread: deque[Callable[[], bool]] = deque()
        self.clock = time.perf_counter()
        for step in range(self.start + 1, settings.train.steps + 1):
            self.watch.beat(step, "training")
            unread.append(self._issue_step(step))
            stop = self._read(unread, but=1 if self.backend.asynchronous else 0)
            last = step == settings.train.steps
            evaluate = self.valid is not None and (last or step % settings.train.eval_every == 0)
            save = last or stop or step % settings.checkpoint.every == 0
            if evaluate or save:
                # A loss that is not finite must end the attempt before the state that it came from is saved.
                stop = self._read(unread, but=0) or stop
                if evaluate:
                    self._evaluate(step)
                if save or stop:
                    self._save(step)
                self.clock = time.perf_counter()
            if stop and not last:
                return self._end("stopped", f"stopped after step {step} of {settings.train.steps}, checkpoint saved")
        self._end("done", f"{settings.train.steps} steps")

    @staticmethod
    def _read(unread: deque[Callable[[], bool]], but: int) -> bool:
        """Read the results of all steps `but` the last ones; whether one of them asks to stop."""
        asked = [unread.popleft()() for _ in range(len(unread) - but)]  # all of them, and not only up to the first
        return any(asked)

    def _issue_step(self, step: int) -> Callable[[], bool]:
        """One optimizer step; what it returns reads the results, records them, and says whether to stop."""
        tokens_BS1 = self.loader.next()
        waited = self.loader.wait_seconds
        rate = learning_rate(self.settings, step)
        flags = (self.watch.stop_requested, self.checkpointer.unwritten)
        read = train_step(self.backend, self.settings, self.model, self.optimizer, tokens_BS1, rate, flags)
        return lambda: self._read_step(step, rate, waited, *read())

    def _read_step(
        self,
        step: int,
        rate: float,
        waited: float,
        loss: float,
        stop: float,
        unwritten: float,
        grad_norm: float,
        own_loss: float,
    ) -> bool:
        loss /= self.world.size
        if not unwritten:  # on any worker: all of them see this after the same step
            self.checkpointer.publish()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise self._not_finite(step, own_loss, grad_norm)
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        train = self.settings.train
        per_second = train.global_batch_size * train.seq_length / seconds
        if self.backend.compiles:
            self._count_compiled(step)
        self._write(
            {
                "type": "train",
                "step": step,
                "tokens": self._tokens(step),
                "loss": loss,
                "lr": rate,
                "grad_norm": grad_norm,
                "tokens_per_second": per_second,
                "step_seconds": seconds,
                "mfu": self.flops * per_second / self.peak if self.peak else None,
                "data_wait_seconds": waited,
            }
        )
        return stop > 0

    def _not_finite(self, step: int, own_loss: float, grad_norm: float) -> RunFailed:
        """The same error on every rank, naming the first rank whose own loss is at fault."""
        losses = self.backend.gather(own_loss)
        rank = next((rank for rank, loss in enumerate(losses) if not math.isfinite(loss)), 0)
        what = f"the gradient norm is {grad_norm}" if math.isfinite(losses[rank]) else f"the loss is {losses[rank]}"
        message = f"{what}, expected a finite number"
        self._write({"type": "failure", "rank": rank, "step": step, "message": message})
        return RunFailed(f"rank {rank}, step {step}: {message}")

    def _count_compiled(self, step: int) -> None:
        """Record what was compiled for the first step; `train.fail_on_compile` looks at the later ones too."""
        first, strict = step == self.start + 1, self.settings.train.fail_on_compile
        if not (first or strict):
            return
        counts = self.backend.cache_counts()
        if first:
            self._write({"type": "compile", "step": step, **counts})
        if strict and (misses := counts["misses"]):
            raise UserError(
                f"train.fail_on_compile: {misses} graphs were compiled by step {step}, expected all of them in the "
                f"cache of {self.settings.cache_dir}: run `precompile` with the same settings"
            )

    def _evaluate(self, step: int) -> None:
        assert self.valid is not None
        train = self.settings.train
        batches = validation_batches(
            self.valid, train.eval_samples, train.micro_batch_size, *self.backend.data_parallel
        )
        loss = evaluate(self.backend, self.model, self._beating(batches, step))
        self._write({"type": "valid", "step": step, "tokens": self._tokens(step), "loss": loss})

    def _beating(self, batches: Iterator[_Batch], step: int) -> Iterator[_Batch]:
        for batch in batches:
            self.watch.beat(step, "evaluating")
            yield batch

    def _save(self, step: int) -> None:
        if step == self.saved:
            return
        self.watch.beat(step, "saving a checkpoint")
        state = self.backend.training_state(self.model, self.optimizer)
        self.checkpointer.save(step, state, checkpoint_meta(self.settings, step, self.store_sha256))
        self.saved = step
        self._write({"type": "checkpoint", "step": step, "stall_seconds": self.checkpointer.stall_seconds})

    def _end(self, status: str, message: str) -> None:
        self.watch.beat(self.settings.train.steps, "waiting for the checkpoint to be written")
        self.checkpointer.wait()
        if self.world.rank == 0:
            self.run.write_outcome(status, message)

    def _tokens(self, step: int) -> int:
        return step * self.settings.train.global_batch_size * self.settings.train.seq_length

    def _write(self, record: dict[str, Any]) -> None:
        if self.writer is not None:
            self.writer.write({"type": record["type"], "time": time.time()} | record)

    def _write_start(self, peak: tuple[float, str] | None, notes: list[str]) -> None:
        backend = self.backend
        self._write(
            {
                "type": "start",
                "step": self.start,
                "backend": backend.name,
                "device": backend.device_name,
                "dtype": str(backend.dtype).removeprefix("torch."),
                "compiled": backend.compiles,
                "workers": self.world.size,
                "parameters": self.settings.model.num_parameters(),
                "peak_flops": peak[0] if peak else None,
                "peak_name": peak[1] if peak else None,
                "versions": {"torch": torch.__version__, "python": platform.python_version()},
            }
        )
        for note in notes:
            self._write({"type": "note", "step": self.start, "message": note})
