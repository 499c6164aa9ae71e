"""What the user sees of long work, on a terminal and off it, through failures and resumes."""

from __future__ import annotations

import io
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from training.progress import FollowMetrics, Progress, amount, duration, summary_table


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain(**options: Any) -> Console:
    return Console(file=io.StringIO(), width=200, force_terminal=False, **options)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (12, "12"),
        (3.14, "3.140"),
        (0.0, "0.000"),
        (999.96, "1000"),
        (45_100, "45,100"),
        (45_100.4, "45,100"),
        (123_456.0, "123.5k"),
        (1_234_567, "1.235M"),
    ],
)
def test_amounts(value: float, shown: str) -> None:
    assert amount(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(4.23, "4.2 s"), (59, "59 s"), (185, "3 min 05 s"), (7800, "2 h 10 min"), (273_600, "3 d 4 h")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_off_a_terminal_a_line_every_ten_seconds_and_one_at_the_end() -> None:
    clock, console = Clock(), plain()
    with Progress("train", "steps", console, clock) as progress:
        for step in range(1, 31):
            clock.now += 1
            progress.update(step, 40, loss=7 - step / 10, note_me=None)
    lines = text(console).splitlines()
    assert lines == [
        "train: 10/40 steps, 1.000 steps/s, loss 6.000, 30 s left",
        "train: 20/40 steps, 1.000 steps/s, loss 5.000, 20 s left",
        "train: 30/40 steps, 1.000 steps/s, loss 4.000, 10 s left",
        "train: done in 30 s, 30/40 steps, loss 4.000",
    ]


def test_without_a_total_there_is_no_time_left() -> None:
    clock, console = Clock(), plain()
    with Progress("prepare", "documents", console, clock) as progress:
        progress.update(0)
        clock.now = 10
        progress.update(50_000)
    assert text(console).splitlines() == [
        "prepare: 50,000 documents, 5,000 documents/s",
        "prepare: done in 10 s, 50,000 documents",
    ]


def test_a_resumed_run_is_not_credited_with_the_steps_before() -> None:
    clock = Clock()
    progress = Progress("train", "steps", plain(), clock)
    progress.update(1000, 1100)
    assert progress.rate() is None
    assert progress.seconds_left() is None
    clock.now = 10
    progress.update(1020)
    assert progress.rate() == 2.0
    assert progress.seconds_left() == 40.0
    progress.update(1000)  # back to a checkpoint
    assert progress.rate() is None


def test_the_rate_is_a_recent_one() -> None:
    clock = Clock()
    progress = Progress("train", "steps", plain(), clock)
    done = 0
    for second in range(100):
        clock.now = second
        done += 1 if second < 60 else 5
        progress.update(done, 10_000)
    assert progress.rate() == 5.0


def test_a_failure_ends_with_a_line_and_the_error() -> None:
    clock, console = Clock(), plain()
    progress = Progress("train", "steps", console, clock)

    def work() -> None:
        with progress:
            progress.update(3, 10)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert text(console).splitlines() == ["train: stopped after 0.0 s, 3/10 steps"]


def test_text_of_users_is_not_markup() -> None:
    console = plain()
    with Progress("prepare [red]", console=console) as progress:
        progress.note("[bold]x[/bold] " + "long " * 100)
        progress.update(1, 2, source="[/nothing]")
    assert "[bold]x[/bold] " + "long " * 100 in text(console)
    assert "prepare [red]: done in" in text(console)
    assert "source [/nothing]" in text(console)


def test_on_a_terminal_the_bar_leaves_one_line() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, legacy_windows=False)
    with Progress("train", "steps", console) as progress:
        progress.update(20, 40, loss=5.25)
        progress.note("a note [red]")
        assert progress._live is not None
        progress._live.refresh()
        drawn = text(console)
    assert " 50%" in drawn
    assert "loss 5.250" in drawn
    assert "a note [red]" in drawn
    assert "━" in drawn
    assert "done in" in text(console)[len(drawn) :]


def line(**record: Any) -> str:
    return json.dumps(record) + "\n"


def train(step: int, loss: float = 5.0) -> str:
    return line(type="train", time=step, step=step, loss=loss, tokens_per_second=1000.0)


class Shown(Progress):
    """A Progress that remembers."""

    def __init__(self) -> None:
        super().__init__("train", "steps", plain())
        self.steps: list[float] = []
        self.notes: list[str] = []
        self.last: dict[str, Any] = {}
        self.news = threading.Event()

    def update(self, done: float, total: float | None = None, **fields: Any) -> None:
        super().update(done, total, **fields)
        self.steps.append(done)
        self.last = {"total": total, **fields}
        self.news.set()

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_follow_shows_a_run_through_a_failure_and_its_resume(tmp_path: Path) -> None:
    path, shown = tmp_path / "metrics.jsonl", Shown()
    follow = FollowMetrics(path, 40, shown)
    follow.poll()
    assert shown.steps == []
    path.write_text(line(type="start", time=0, step=0) + train(1) + train(2) + '{"type":"train","step":3')
    follow.poll()
    assert shown.steps == [2]
    assert shown.last == {"total": 40, "loss": 5.0, "tokens/s": 1000.0}
    with path.open("a") as file:
        file.write(',"loss":4.5}\n' + line(type="valid", step=3, loss=6.0))
    follow.poll()
    assert shown.steps == [2, 3]
    assert shown.last["validation_loss"] == 6.0

    failure = line(type="failure", time=9, rank=1, step=3, message="killed")
    with path.open("a") as file:
        file.write(failure)
    follow.poll()
    assert shown.notes == ["attempt ended: rank 1, step 3: killed"]
    new = tmp_path / "new"
    note = line(type="note", time=10, step=1, message="step-00000002 is damaged")
    new.write_text(line(type="start", time=0, step=0) + train(1) + failure + line(type="start", time=10, step=1) + note)
    os.replace(new, path)
    follow.poll()
    assert shown.steps[-1] == 1
    going_on = ["going on from step 1, the last checkpoint", "step-00000002 is damaged"]
    assert shown.notes == ["attempt ended: rank 1, step 3: killed", *going_on]


def test_follow_goes_back_when_the_file_shrinks_in_place(tmp_path: Path) -> None:
    path, shown = tmp_path / "metrics.jsonl", Shown()
    path.write_text(train(1) + train(2) + train(3))
    follow = FollowMetrics(path, 40, shown)
    follow.poll()
    with path.open("r+") as file:
        file.truncate(len(train(1)))
    follow.poll()
    assert shown.steps == [3, 1]


def test_follow_does_not_tell_of_earlier_days(tmp_path: Path) -> None:
    path, shown = tmp_path / "metrics.jsonl", Shown()
    path.write_text(train(1) + line(type="failure", time=1, rank=0, step=1, message="old"))
    follow = FollowMetrics(path, 40, shown)
    follow.poll()
    assert shown.notes == []
    assert shown.steps == [1]


def test_follow_in_its_thread_ends_with_the_final_state(tmp_path: Path) -> None:
    path, shown = tmp_path / "metrics.jsonl", Shown()
    threads = threading.active_count()
    with FollowMetrics(path, 40, shown):
        path.write_text(train(1))
        assert shown.news.wait(10)  # the thread saw it by itself
        with path.open("a") as file:
            file.write(train(40))
    assert shown.steps[-1] == 40
    assert threading.active_count() == threads


def test_summary_table_shows_names_and_values_as_they_are() -> None:
    console = plain()
    console.print(summary_table([("validation loss", "3.21"), ("run", "runs/[x]")], title="tiny"))
    assert [part.split() for part in text(console).splitlines()] == [
        ["tiny"],
        ["validation", "loss", "3.21"],
        ["run", "runs/[x]"],
    ]
