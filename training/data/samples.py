"""Which tokens each step of a run trains on, and a thread that has them ready in time.

The order of the samples is a function, not a file: step N of a run with a given seed and global batch always holds
the same samples, in whatever process it is asked and however many workers share it. Resuming needs N and nothing
else, there is no index to build or to keep in memory (a shuffled index of a 1 T token corpus at 4,096 tokens a
sample would take 2 GB), and step 1,000,000 costs what step 0 costs.

    order = SampleOrder(len(samples), seed=1234)
    with Loader(samples, order, global_batch_size=16, rank=0, world_size=1, start_step=20) as loader:
        x_BS1 = loader.next()
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from training.errors import UserError

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

# The increment (2**64 / golden ratio, made odd) and the finaliser of SplitMix64: Steele, Lea and Flood, "Fast
# splittable pseudorandom number generators", OOPSLA 2014.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)

# Rounds of the Feistel network. Four make a pseudorandom permutation of a large domain (Luby and Rackoff 1988); a
# corpus of a few samples needs more to look shuffled. Ten cost 0.2 ms for a batch of 1,024.
_ROUNDS = 10

PREFETCH_STEPS = 3


def _mix(x: UInt64s) -> UInt64s:
    """SplitMix64's finaliser: a bijection of 64-bit words whose every output bit depends on every input bit."""
    x = (x ^ (x >> _SHIFT_30)) * _MIX_1
    x = (x ^ (x >> _SHIFT_27)) * _MIX_2
    return x ^ (x >> _SHIFT_31)


class SampleOrder:
    """An endless sequence of epochs, each its own permutation of `range(num_samples)` chosen by (seed, epoch).

    The permutation is a generalised Feistel network on `a x b` points, a*b just above `num_samples`, applied again
    while it lands outside the range (cycle walking): Black and Rogaway, "Ciphers with arbitrary finite domains",
    CT-RSA 2002, methods 2 and 3. With a and b near the square root, fewer than one sample in
    sqrt(num_samples) is walked a second time.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        assert num_samples >= 1, num_samples
        self.num_samples = num_samples
        self.seed = seed
        root = int(np.ceil(np.sqrt(num_samples)))
        self._a = np.uint64(root)
        self._b = np.uint64(-(-num_samples // root))
        self._seed_key = _mix(np.array([seed], dtype=np.uint64) + _GOLDEN)

    def step(self, step: int, global_batch_size: int, rank: int = 0, world_size: int = 1) -> Int64s:
        """Sample numbers of step `step` (from 0): int64 [global_batch_size / world_size].

        These are positions `step * global_batch_size ...` of the sequence of epochs. Worker `rank` of `world_size`
        gets its contiguous rows, so the workers' rows in the order of their ranks are one worker's batch.
        """
        assert step >= 0
        assert global_batch_size % world_size == 0
        assert 0 <= rank < world_size
        rows = global_batch_size // world_size
        start = step * global_batch_size + rank * rows
        position = np.arange(start, start + rows, dtype=np.int64)
        epoch, index = np.divmod(position, self.num_samples)
        return self._permute(index.astype(np.uint64), epoch.astype(np.uint64)).astype(np.int64)

    def _permute(self, index_B: UInt64s, epoch_B: UInt64s) -> UInt64s:
        epoch_key_B = _mix(self._seed_key + _GOLDEN * (epoch_B + np.uint64(1)))
        rounds_R1 = np.arange(1, _ROUNDS + 1, dtype=np.uint64)[:, None]
        keys_RB = _mix(epoch_key_B + _GOLDEN * rounds_R1)
        out_B = self._encipher(index_B, keys_RB)
        outside = np.flatnonzero(out_B >= self.num_samples)
        while outside.size:  # ends: the walk along a permutation's cycle comes back to where it started, inside
            out_B[outside] = self._encipher(out_B[outside], keys_RB[:, outside])
            outside = outside[out_B[outside] >= self.num_samples]
        return out_B

    def _encipher(self, x_B: UInt64s, keys_RB: UInt64s) -> UInt64s:
        """One pass of the network: a bijection of `range(a * b)` for each column of keys."""
        right, left = np.divmod(x_B, self._a)
        for number, key in enumerate(keys_RB):
            side = self._b if number % 2 else self._a
            left, right = right, (left + _mix(key + _GOLDEN * right) % side) % side
        return self._a * right + left  # an even number of rounds leaves the halves in their places


class Store(Protocol):
    """What `Samples` asks of a token store; `training.data.store.TokenStore` is the real one."""

    @property
    def num_tokens(self) -> int: ...

    def read(self, start: int, length: int) -> npt.NDArray[np.integer]: ...


class Samples:
    """The stream of a store's tokens, cut into samples.

    Sample i is tokens `[i*S, i*S + S + 1)`: S inputs and, one further, their S targets. Every token but the first is
    a target once; up to S tokens at the end of the stream are left over.
    """

    def __init__(self, store: Store, seq_length: int, split: str = "train", folder: Path | None = None) -> None:
        """`split` and `folder` are for the message: `UserError` when the store is too short for one sample."""
        if store.num_tokens < seq_length + 1:
            where = f"the {split} part" + (f" of {folder}" if folder else "")
            raise UserError(
                f"train.seq_length: {seq_length}, but {where} has {store.num_tokens} tokens in all, "
                f"expected at least {seq_length + 1}"
            )
        self._store = store
        self.seq_length = seq_length

    def __len__(self) -> int:
        return (self._store.num_tokens - 1) // self.seq_length

    def batch(self, indices: Int64s) -> Int64s:
        """Tokens of these samples: int64 [len(indices), seq_length + 1]."""
        tokens_BS1 = np.empty((len(indices), self.seq_length + 1), dtype=np.int64)
        for row, index in zip(tokens_BS1, indices.tolist(), strict=True):
            row[:] = self._store.read(index * self.seq_length, self.seq_length + 1)
        return tokens_BS1


class Loader:
    """One worker's batches, read ahead by a thread.

    The thread keeps at most `prefetch` steps ready (each `8 * rows * (seq_length + 1)` bytes) and sleeps when it has
    them. `pin_memory` puts them where a GPU can copy from without waiting.
    """

    def __init__(
        self,
        samples: Samples,
        order: SampleOrder,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        start_step: int = 0,
        pin_memory: bool = False,
        prefetch: int = PREFETCH_STEPS,
    ) -> None:
        assert len(samples) == order.num_samples
        assert prefetch >= 1
        self.wait_seconds = 0.0
        self._samples = samples
        self._order = order
        self._batch = (global_batch_size, rank, world_size)
        self._pin_memory = pin_memory
        self._prefetch = prefetch
        self._ready: deque[torch.Tensor] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read_ahead, args=(start_step,), name="loader", daemon=True)
        self._thread.start()

    def next(self) -> torch.Tensor:
        """Tokens of the next step: int64 [global_batch_size / world_size, seq_length + 1], on the CPU.

        Sets `wait_seconds`, the seconds that this call stood still. An error of the thread is raised here, after the
        steps that were read before it.
        """
        started = time.perf_counter()
        with self._changed:
            assert not self._closed, "the loader is closed"
            self._changed.wait_for(lambda: self._ready or self._error)
            if not self._ready:
                assert self._error is not None
                raise self._error
            tokens_BS1 = self._ready.popleft()
            self._changed.notify_all()
        self.wait_seconds = time.perf_counter() - started
        return tokens_BS1

    def close(self) -> None:
        """End the thread. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._ready.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_ahead(self, step: int) -> None:
        try:
            while True:
                tokens_BS1 = torch.from_numpy(self._samples.batch(self._order.step(step, *self._batch)))
                if self._pin_memory:
                    tokens_BS1 = tokens_BS1.pin_memory()
                step += 1
                with self._changed:
                    self._ready.append(tokens_BS1)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._prefetch)
                    if self._closed:
                        return
        except BaseException as error:  # noqa: BLE001 - any error belongs to whoever waits for the batch
            with self._changed:
                self._error = error
                self._changed.notify_all()


def validation_batches(
    samples: Samples, eval_samples: int, micro_batch_size: int, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The first `min(eval_samples, len(samples))` samples, shared out over the workers.

    Yields tokens, int64 [micro_batch_size, seq_length + 1], and weights, float32 [micro_batch_size]. Every worker gets
    the same number of batches of the same shape (collectives stay in step, nothing is compiled twice); rows that fill
    up the last ones repeat sample 0 at weight 0. The sum over workers of weight x loss of the row, divided by the
    sum of the weights, is therefore the mean over the very same samples for any number of workers.
    """
    count = min(eval_samples, len(samples))
    for start in range(0, count, micro_batch_size * world_size):
        first = start + rank * micro_batch_size
        indices = np.arange(first, first + micro_batch_size, dtype=np.int64)
        real = indices < count
        tokens_BS1 = samples.batch(np.where(real, indices, 0))
        yield torch.from_numpy(tokens_BS1), torch.from_numpy(real.astype(np.float32))
