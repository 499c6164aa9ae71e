"""The training loop: one for all backends and launchers.

`train(settings, world)` runs on every worker. It goes on from the newest whole checkpoint of the run by itself and
ends with an outcome in the run's folder: done, or stopped on request after a checkpoint. A fault ends the attempt with
`RunFailed`, so that the launcher can start the group again.

Numbers are read one step late: while the host looks at the loss of step N, the device already works on step N + 1.
"""

from __future__ import annotations

import contextlib
import math
import platform
import shutil
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from training import checkpoint
from training.backends import Backend, World, make_backend
from training.checks import check_resume, checkpoint_meta
from training.config import Settings
from training.data.samples import Loader, SampleOrder, Samples, validation_batches
from training.data.store import TokenStore
from training.errors import RunFailed
from training.metrics import MetricsWriter, flops_per_token
from training.precompile import cache_counts, use_cache
from training.rundir import RunDir
from training.watch import Watch

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
    may mend and `UserError` on what it cannot.
    """
    run = RunDir(settings.run.dir)
    with contextlib.ExitStack() as stack:
        if world.rank == 0:
            stack.enter_context(run.writer_lock(WRITER_WAIT_SECONDS))
        watch = stack.enter_context(Watch(run, world.rank, settings.train.hang_timeout, parent))
        _Attempt(settings, world, run, watch, stack).run_to_end()


class _Attempt:
    """One attempt of one worker, from the last checkpoint on."""

    def __init__(
        self, settings: Settings, world: World, run: RunDir, watch: Watch, stack: contextlib.ExitStack
    ) -> None:
        self.settings, self.world, self.run, self.watch = settings, world, run, watch
        self.backend: Backend = make_backend(settings, world)
        if self.backend.compiles:
            use_cache(settings, self.backend)
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
            checkpoint.restore(path, self.model, self.optimizer)
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
                world.rank,
                world.size,
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
        settings, backend, model = self.settings, self.backend, self.model
        tokens_BS1 = self.loader.next()
        waited = self.loader.wait_seconds
        rate = learning_rate(settings, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        passes = settings.accumulation_steps
        loss = torch.zeros((), device=backend.device)
        for index, micro_BS1 in enumerate(tokens_BS1.split(settings.train.micro_batch_size)):
            micro_BS1 = micro_BS1.to(backend.device, non_blocking=True)
            with backend.gradient_sync(model, last=index == passes - 1):
                with backend.autocast():
                    micro_loss = model(micro_BS1[:, :-1], micro_BS1[:, 1:]) / passes
                micro_loss.backward()
            loss += micro_loss.detach()
        grad_norm = backend.clip_grad_norm(model)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        shared = backend.sum_(torch.stack((loss, torch.full_like(loss, self.watch.stop_requested))))
        read = backend.read_later(torch.stack((*shared, grad_norm.detach(), loss)))
        backend.step_boundary()
        return lambda: self._read_step(step, rate, waited, *read())

    def _read_step(
        self, step: int, rate: float, waited: float, loss: float, stop: float, grad_norm: float, own_loss: float
    ) -> bool:
        loss /= self.world.size
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise self._not_finite(step, own_loss, grad_norm)
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        train = self.settings.train
        per_second = train.global_batch_size * train.seq_length / seconds
        if step == self.start + 1 and self.backend.compiles:
            self._write({"type": "compile", "step": step, **cache_counts()})
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
        losses = [own_loss]
        if self.world.size > 1:
            gathered: list[Any] = [None] * self.world.size
            dist.all_gather_object(gathered, own_loss)
            losses = gathered
        rank = next((rank for rank, loss in enumerate(losses) if not math.isfinite(loss)), 0)
        what = f"the gradient norm is {grad_norm}" if math.isfinite(losses[rank]) else f"the loss is {losses[rank]}"
        message = f"{what}, expected a finite number"
        self._write({"type": "failure", "rank": rank, "step": step, "message": message})
        return RunFailed(f"rank {rank}, step {step}: {message}")

    @torch.no_grad()
    def _evaluate(self, step: int) -> None:
        assert self.valid is not None
        self.model.eval()
        total = torch.zeros(2, device=self.backend.device)
        train, world = self.settings.train, self.world
        batches = validation_batches(self.valid, train.eval_samples, train.micro_batch_size, world.rank, world.size)
        for tokens_BS1, weights_B in batches:
            self.watch.beat(step, "evaluating")
            tokens_BS1, weights_B = tokens_BS1.to(self.backend.device), weights_B.to(self.backend.device)
            targets_BS = tokens_BS1[:, 1:].masked_fill(weights_B[:, None] == 0, -100)
            with self.backend.autocast():
                mean = self.model(tokens_BS1[:, :-1], targets_BS)
            total += torch.stack((mean * weights_B.sum(), weights_B.sum()))
        loss_sum, count = self.backend.sum_(total).tolist()
        self.model.train()
        self._write({"type": "valid", "step": step, "tokens": self._tokens(step), "loss": loss_sum / count})

    def _save(self, step: int) -> None:
        if step == self.saved:
            return
        self.watch.beat(step, "saving a checkpoint")
        state = checkpoint.training_state(self.model, self.optimizer)
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
