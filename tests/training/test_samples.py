"""Sample order, samples, loader: the properties that exact resume and elastic workers rest on."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.samples import Loader, SampleOrder, Samples, validation_batches
from training.errors import UserError

SEEDS = st.integers(0, 2**63 - 1)


class FakeStore:
    """A token stream 0, 1, 2, ... so that a token says where it was read."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.reads = 0

    def read(self, start: int, length: int) -> np.ndarray:
        assert start >= 0
        assert start + length <= self.num_tokens
        self.reads += 1
        return np.arange(start, start + length, dtype=np.uint32)


def epoch_of(order: SampleOrder, epoch: int) -> np.ndarray:
    """All positions of one epoch: with a batch of the epoch's length, step e is epoch e."""
    return order.step(epoch, order.num_samples)


@given(n=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**9))
def test_every_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(epoch_of(SampleOrder(n, seed), epoch)), np.arange(n))


@pytest.mark.parametrize("n", range(1, 70))
def test_small_epochs_are_permutations(n: int) -> None:
    order = SampleOrder(n, seed=1)
    for epoch in range(20):
        assert sorted(epoch_of(order, epoch).tolist()) == list(range(n))


@given(n=st.integers(32, 3000), seed=SEEDS, epoch=st.integers(0, 10**9))
def test_epochs_and_seeds_differ(n: int, seed: int, epoch: int) -> None:
    here = epoch_of(SampleOrder(n, seed), epoch)
    assert not np.array_equal(here, np.arange(n))
    assert not np.array_equal(here, epoch_of(SampleOrder(n, seed), epoch + 1))
    assert not np.array_equal(here, epoch_of(SampleOrder(n, seed ^ 1), epoch))


@given(n=st.integers(1, 5000), seed=SEEDS, step=st.integers(0, 10**7), rows=st.integers(1, 24))
def test_workers_together_see_what_one_worker_sees(n: int, seed: int, step: int, rows: int) -> None:
    batch = rows * 4
    alone = SampleOrder(n, seed).step(step, batch)
    assert alone.shape == (batch,)
    assert alone.dtype == np.int64
    for workers in (2, 4):
        shared = [SampleOrder(n, seed).step(step, batch, rank, workers) for rank in range(workers)]
        assert np.array_equal(np.concatenate(shared), alone)


@given(n=st.integers(1, 500), seed=SEEDS, batch=st.integers(1, 700), step=st.integers(0, 50))
def test_steps_are_one_sequence_of_epochs_whatever_was_asked_before(n: int, seed: int, batch: int, step: int) -> None:
    order = SampleOrder(n, seed)
    order.step(step + 3, batch)
    epochs = range(step * batch // n, ((step + 1) * batch - 1) // n + 1)
    stream = np.concatenate([epoch_of(SampleOrder(n, seed), epoch) for epoch in epochs])
    offset = step * batch - epochs[0] * n
    assert np.array_equal(order.step(step, batch), stream[offset : offset + batch])


@given(n=st.integers(10**9, 2**40), step=st.integers(0, 10**9))
@settings(max_examples=30)
def test_a_huge_corpus_costs_no_more(n: int, step: int) -> None:
    drawn = SampleOrder(n, seed=7).step(step, 1024)
    assert drawn.min() >= 0
    assert drawn.max() < n
    if step * 1024 // n == ((step + 1) * 1024 - 1) // n:
        assert len(set(drawn.tolist())) == 1024


@pytest.mark.parametrize("n", [2, 3, 4, 5, 10, 37])
def test_each_sample_is_as_likely_at_each_place(n: int) -> None:
    epochs = 4000
    order = SampleOrder(n, seed=99)
    draws = np.stack([epoch_of(order, epoch) for epoch in range(epochs)])
    for place in range(n):
        counts = np.bincount(draws[:, place], minlength=n)
        chi2 = float(((counts - epochs / n) ** 2 / (epochs / n)).sum())
        assert chi2 < (n - 1) + 6 * np.sqrt(2 * (n - 1)), (place, counts)  # six standard deviations


def test_all_permutations_of_four_appear_alike() -> None:
    order = SampleOrder(4, seed=3)
    seen: dict[tuple[int, ...], int] = {}
    for epoch in range(4800):
        key = tuple(epoch_of(order, epoch).tolist())
        seen[key] = seen.get(key, 0) + 1
    assert len(seen) == 24
    assert min(seen.values()) > 120
    assert max(seen.values()) < 290


def test_neighbours_do_not_stay_together() -> None:
    n = 20_000
    drawn = epoch_of(SampleOrder(n, seed=5), 0)
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.04
    assert abs(np.corrcoef(np.arange(n), drawn)[0, 1]) < 0.04
    assert np.count_nonzero(np.abs(np.diff(drawn)) == 1) < 20


def test_the_order_is_the_one_that_runs_on_disk_were_made_with() -> None:
    """A change of the order would break the exact resume of every run begun before it."""
    assert SampleOrder(10, seed=1234).step(0, 10).tolist() == [9, 2, 0, 1, 8, 3, 5, 6, 7, 4]
    assert SampleOrder(10**6, seed=1234).step(10**6, 4).tolist() == [420834, 657511, 336353, 796094]


def test_samples_cut_the_stream() -> None:
    samples = Samples(FakeStore(23), seq_length=5)
    assert len(samples) == 4
    batch = samples.batch(np.array([3, 0]))
    assert batch.dtype == np.int64
    assert batch.tolist() == [list(range(15, 21)), list(range(6))]


@given(tokens=st.integers(2, 400), seq=st.integers(1, 50))
def test_every_whole_sample_counts_and_fits(tokens: int, seq: int) -> None:
    if tokens < seq + 1:
        with pytest.raises(UserError):
            Samples(FakeStore(tokens), seq)
        return
    samples = Samples(FakeStore(tokens), seq)
    last = samples.batch(np.array([len(samples) - 1]))[0, -1]
    assert last < tokens <= last + seq


def test_too_short_a_store_is_one_line() -> None:
    with pytest.raises(UserError) as caught:
        Samples(FakeStore(812), 4096, "train", Path("runs/tiny/data"))
    message = str(caught.value)
    assert message.startswith("train.seq_length: 4096, but the train part of runs/tiny/data has 812 tokens in all")
    assert "\n" not in message


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_loaders_give_the_ordered_samples_from_any_step(workers: int) -> None:
    samples, order = Samples(FakeStore(1000), 9), SampleOrder(111, seed=4)
    loaders = [Loader(samples, order, 8, rank, workers, start_step=20) for rank in range(workers)]
    for step in range(20, 32):
        got = torch.cat([loader.next() for loader in loaders])
        assert got.dtype == torch.int64
        assert torch.equal(got, torch.from_numpy(samples.batch(order.step(step, 8))))
        assert all(loader.wait_seconds >= 0 for loader in loaders)
    for loader in loaders:
        loader.close()


class GatedStore(FakeStore):
    """Lets a test say when a read may happen, and see when one has."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.permits = threading.Semaphore(0)
        self.asked = threading.Semaphore(0)

    def read(self, start: int, length: int) -> np.ndarray:
        self.asked.release()
        assert self.permits.acquire(timeout=10)
        return super().read(start, length)


def test_the_thread_reads_ahead_but_not_without_bound() -> None:
    store = GatedStore(1000)
    loader = Loader(Samples(store, 9), SampleOrder(111, seed=4), 1, prefetch=2)
    for _ in range(2):
        assert store.asked.acquire(timeout=10)  # two steps are read though nobody asked for one
        store.permits.release()
    with loader._changed:
        assert loader._changed.wait_for(lambda: len(loader._ready) == 2, timeout=10)
    assert not store.asked.acquire(blocking=False)  # full: the thread sleeps
    loader.next()  # makes room: the third read may begin only now
    assert store.asked.acquire(timeout=10)
    assert store.reads == 2
    store.permits.release()
    store.permits.release()
    loader.close()
    assert store.reads <= 4


def test_waiting_is_measured_by_the_step() -> None:
    store = GatedStore(1000)
    loader = Loader(Samples(store, 9), SampleOrder(111, seed=4), 1, prefetch=1)
    store.asked.acquire()
    timer = threading.Timer(0.05, store.permits.release)
    timer.start()
    loader.next()
    assert loader.wait_seconds > 0.01
    store.permits.release(10)
    loader.close()


class BrokenStore(FakeStore):
    def read(self, start: int, length: int) -> np.ndarray:
        if self.reads >= 3:
            raise OSError(5, "Input/output error")
        return super().read(start, length)


def test_an_error_of_the_thread_reaches_the_trainer_after_the_good_steps() -> None:
    with Loader(Samples(BrokenStore(1000), 9), SampleOrder(111, seed=4), 1) as loader:
        for _ in range(3):
            loader.next()
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output"):
                loader.next()


def test_close_ends_the_thread_and_may_be_repeated() -> None:
    before = threading.active_count()
    loader = Loader(Samples(FakeStore(1000), 9), SampleOrder(111, seed=4), 4)
    loader.close()
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(AssertionError, match="closed"):
        loader.next()


@given(
    tokens=st.integers(20, 500),
    eval_samples=st.integers(1, 60),
    micro=st.integers(1, 7),
    workers=st.sampled_from([1, 2, 3, 4]),
)
def test_validation_is_the_same_mean_for_any_number_of_workers(
    tokens: int, eval_samples: int, micro: int, workers: int
) -> None:
    samples = Samples(FakeStore(tokens), 6)
    shares = [list(validation_batches(samples, eval_samples, micro, rank, workers)) for rank in range(workers)]
    assert len({len(share) for share in shares}) == 1
    assert all(x.shape == (micro, 7) and w.shape == (micro,) for share in shares for x, w in share)
    firsts = sorted(int(row[0]) for share in shares for x, w in share for row in x[w > 0])
    count = min(eval_samples, len(samples))
    assert firsts == [6 * i for i in range(count)]
    assert sum(float(w.sum()) for share in shares for _, w in share) == count
