"""All shards of a store: in this process, or as Ray tasks, one a CPU.

    records = make_shards(jobs, source, tokenizer, "ray", report)

A shard that is whole already is not made again, so a killed run goes on with those that are missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

from training.data.encode import ShardJob, encode_shard, read_record
from training.data.sources import Source
from training.data.tokenizer import TextTokenizer
from training.errors import UserError


class Report(Protocol):
    """What `prepare` tells about its progress; `training.progress.Progress` is one."""

    def update(self, done: float, total: float | None = None, **fields: Any) -> None:
        """`done` of `total` MB of source."""

    def note(self, text: str) -> None:
        """One line to keep."""


Records = list[dict[str, Any]]


def make_shards(
    jobs: list[ShardJob], source: Source, tokenizer: TextTokenizer, launcher: str, report: Report
) -> Records:
    """The record of each shard, in order; makes those that are missing.

    Where one part is left without a document, a second pass remakes the shards that hold the document to be moved
    (see prepare.py).
    """
    found = [read_record(job) for job in jobs]
    records = {
        job.number: record
        for job, record in zip(jobs, found, strict=True)
        if record is not None and record["threshold"] == job.threshold
    }
    if records:
        report.note(f"going on: {len(records)} of {len(jobs)} shards are there already")
    run = _run_on_ray if launcher == "ray" else _run_here
    missing = [job for job in jobs if job.number not in records]
    records.update(run(missing, source, tokenizer, report))
    threshold = _other_threshold(jobs[0].threshold, list(records.values()))
    if threshold is not None:
        wrong = [
            replace(job, threshold=threshold)
            for job in jobs
            if any(_is_valid(h, threshold) != _is_valid(h, job.threshold) for h in records[job.number]["hashes"])
        ]
        records.update(run(wrong, source, tokenizer, report))
    return [records[job.number] for job in jobs]


def _is_valid(value: int, threshold: int) -> bool:
    return value < threshold


def _other_threshold(threshold: int, records: Records) -> int | None:
    """The threshold that gives both parts a document, where `threshold` does not and there is one that does."""
    seen = [record["hashes"] for record in records if record["train"] or record["valid"]]
    if not seen:
        return None
    least, greatest = min(low for low, _ in seen), max(high for _, high in seen)
    if greatest < threshold:  # nothing to train on
        return int(greatest)
    if 0 < threshold <= least < greatest:  # nothing to validate on, and two different documents
        return int(least) + 1
    return None


def _run_here(
    jobs: list[ShardJob], source: Source, tokenizer: TextTokenizer, report: Report
) -> Iterator[tuple[int, dict[str, Any]]]:
    sizes = [source.piece_bytes(job.pieces) / 1e6 for job in jobs]
    for number, job in enumerate(jobs):
        before, total = sum(sizes[:number]), sum(sizes)

        def advance(done: int, before: float = before, most: float = sizes[number], total: float = total) -> None:
            report.update(before + min(done / 1e6, most), total)

        yield job.number, encode_shard(job, source, tokenizer, len(os.sched_getaffinity(0)), advance)
        report.update(before + sizes[number], total)


def _run_on_ray(
    jobs: list[ShardJob], source: Source, tokenizer: TextTokenizer, report: Report
) -> Iterator[tuple[int, dict[str, Any]]]:
    from training.launchers.ray import connect

    connect()
    import ray

    cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
    # A shard is one CPU's work, and its libraries' thread pools are bound to that; a shard alone may use a whole node.
    bound = {} if len(jobs) == 1 else {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    task = ray.remote(num_cpus=1, runtime_env={"env_vars": bound})(_task)
    shared = ray.put(source), ray.put(tokenizer)
    waiting = list(reversed(jobs))
    running: dict[Any, ShardJob] = {}
    done, total = 0.0, sum(source.piece_bytes(job.pieces) for job in jobs) / 1e6
    try:
        while waiting or running:
            while waiting and len(running) < cpus:
                job = waiting.pop()
                running[task.remote(job, *shared, 1 if bound else 0)] = job
            for reference in ray.wait(list(running), num_returns=1)[0]:
                record = ray.get(reference)
                job = running.pop(reference)
                yield job.number, record
                done += source.piece_bytes(job.pieces) / 1e6
                report.update(done, total)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, (UserError, OSError)):
            raise error.cause from None
        raise
    finally:
        for reference in running:
            ray.cancel(reference)


def _task(job: ShardJob, source: Source, tokenizer: TextTokenizer, threads: int) -> dict[str, Any]:
    return encode_shard(job, source, tokenizer, threads or len(os.sched_getaffinity(0)))
