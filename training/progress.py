"""The one way in which long work is shown: a bar on a terminal, a plain line now and then elsewhere.

    with Progress("train", "steps") as progress:
        progress.update(20, 300, loss=5.1)
        progress.note("attempt ended: rank 1, step 37: killed")

`FollowMetrics` shows a training run from outside: a thread of the launcher's process reads `metrics.jsonl`, which
rank 0 writes, whether that is the same process, another one or a pod on the same shared storage.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from training.metrics import Record, parse_record

PLAIN_SECONDS = 10.0  # between two lines where there is no terminal
RATE_SECONDS = 30.0  # rate and time left are those of the last half minute
POLL_SECONDS = 0.2  # FollowMetrics looks at the file this often

Field = float | int | str | None


def amount(value: float) -> str:
    """A number in few characters, of one width while it changes: 12, 3.140, 45,100, 1.235M."""
    if isinstance(value, int) and abs(value) < 100_000:
        return f"{value:,}"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e5, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".rstrip(".")


def duration(seconds: float) -> str:
    """Seconds as a person says them: 4.2 s, 3 min 05 s, 2 h 10 min, 3 d 4 h."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


class Progress:
    """How far one piece of work is. Safe to call from several threads; cheap enough to call for every step.

    `unit` is plural ("steps", "documents", "B"). On a terminal the bar is redrawn four times a second and gives way
    to one plain line at the end; elsewhere a line appears every `PLAIN_SECONDS`.
    """

    def __init__(
        self, title: str, unit: str = "", console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._title, self._unit = title, unit
        self._console = console or Console()
        self._clock = clock
        self._lock = threading.RLock()
        self._done = 0.0
        self._total: float | None = None
        self._fields: dict[str, Field] = {}
        self._recent: deque[tuple[float, float]] = deque()  # (time, done) of the last RATE_SECONDS
        self._live: Live | None = None
        self._started = self._printed = clock()

    def update(self, done: float, total: float | None = None, **fields: Field) -> None:
        """`done` units of `total` (None: as before, or unknown), with what else is worth showing.

        Fields stay until they are given again; None removes one. `done` may go back, as a run does that resumes.
        """
        with self._lock:
            now = self._clock()
            if self._recent and done < self._recent[-1][1]:
                self._recent.clear()
            self._recent.append((now, done))
            while now - self._recent[0][0] > RATE_SECONDS and len(self._recent) > 2:
                self._recent.popleft()
            self._done = done
            self._total = total if total is not None else self._total
            self._fields = {k: v for k, v in (self._fields | fields).items() if v is not None}
            if self._live is None and now - self._printed >= PLAIN_SECONDS:
                self._print_line()

    def note(self, text: str) -> None:
        """A line that stays, above the bar."""
        with self._lock:
            self._plain(text)

    def __enter__(self) -> Self:
        self._started = self._printed = self._clock()
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._bar, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        with self._lock:
            self._live = None
            took = duration(self._clock() - self._started)
            outcome = f"done in {took}" if kind is None else f"stopped after {took}"
            self._plain(self._join(f"{self._title}: {outcome}", self._count(), *self._field_texts()))

    def rate(self) -> float | None:
        """Units a second over the last half minute; None before there are two updates."""
        with self._lock:
            if len(self._recent) < 2:
                return None
            (since, first), (now, last) = self._recent[0], self._recent[-1]
            return (last - first) / (now - since) if now > since else None

    def seconds_left(self) -> float | None:
        """At this rate, counted from the last update; None when it cannot be said."""
        with self._lock:
            rate = self.rate()
            if not rate or self._total is None:
                return None
            since = self._clock() - self._recent[-1][0]
            return max(0.0, (self._total - self._done) / rate - since)

    def _print_line(self) -> None:
        self._printed = self._clock()
        self._plain(self._join(f"{self._title}: {self._count() or 'running'}", *self._state_texts()))

    def _plain(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _bar(self) -> Table:
        with self._lock:
            row = Table.grid(padding=(0, 1))
            percent = f"{self._done / self._total:4.0%}" if self._total else ""
            bar = ProgressBar(total=self._total, completed=self._done, width=28, pulse=self._total is None)
            state = Text(
                self._join(self._count(), *self._state_texts()), style="dim", overflow="ellipsis", no_wrap=True
            )
            row.add_row(Text(self._title, style="bold"), bar, percent, state)
            return row

    def _count(self) -> str:
        if not self._recent:
            return ""
        of = f"/{amount(self._total)}" if self._total is not None else ""
        return f"{amount(self._done)}{of} {self._unit}".strip()

    def _field_texts(self) -> list[str]:
        return [
            f"{name.replace('_', ' ')} {value if isinstance(value, str) else amount(value)}"
            for name, value in self._fields.items()
            if value is not None
        ]

    def _state_texts(self) -> list[str]:
        rate, left = self.rate(), self.seconds_left()
        return [
            f"{amount(rate)} {self._unit}/s" if rate else "",
            *self._field_texts(),
            f"{duration(left)} left" if left is not None else "",
        ]

    @staticmethod
    def _join(*parts: str) -> str:
        return ", ".join(part for part in parts if part)


class FollowMetrics:
    """Feeds a `Progress` from a run's `metrics.jsonl` until the block ends; make it before the run is started.

    Shows step, loss, validation loss and tokens/s, and notes each failure and each resume that happens meanwhile. When
    a resumed attempt rewrites the file without the steps beyond its checkpoint, the bar goes back too. The last look
    is after the block, so the final state is always shown.
    """

    def __init__(
        self,
        metrics_path: Path,
        total_steps: int,
        progress: Progress,
        also: Callable[[list[Record]], None] | None = None,
    ) -> None:
        """`also` is told of the same records, in the same thread: training.exporter."""
        self._path, self._total, self._progress, self._also = metrics_path, total_steps, progress, also
        self._inode, self._offset = -1, 0
        self._told: set[str] = set()  # lines of failures and starts that have been noted
        self._state: dict[str, Field] = {}
        self._step = 0
        for line in self._new_lines():  # earlier attempts are no news
            self._told.add(line)
        self._inode, self._offset = -1, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follow-metrics", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.poll()

    def poll(self) -> None:
        """Take in what the file has gained since the last look."""
        lines = self._new_lines()
        records = []
        for line in lines:
            record = parse_record(line)
            if record is not None:
                self._take(record, line)
                records.append(record)
        if lines:
            self._progress.update(self._step, self._total, **self._state)
        if records and self._also is not None:
            self._also(records)

    def _follow(self) -> None:
        self.poll()
        while not self._stop.wait(POLL_SECONDS):
            self.poll()

    def _new_lines(self) -> list[str]:
        """Whole lines since the last look; all of them when the file is another one or has shrunk."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset, self._step, self._state = status.st_ino, 0, 0, {}
                file.seek(self._offset)
                data = file.read()
        except OSError:  # not there yet, or shared storage that stalls: the next look will tell
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode("utf-8", errors="replace").splitlines()

    def _take(self, record: Record, line: str) -> None:
        kind, step = record["type"], record.get("step", 0)
        if kind == "train":
            self._step = step
            self._state |= {"loss": record.get("loss"), "tokens/s": record.get("tokens_per_second")}
        elif kind == "valid":
            self._state["validation_loss"] = record.get("loss")
        elif kind in ("start", "failure", "note") and line not in self._told:
            self._told.add(line)
            if kind == "note":
                self._progress.note(str(record.get("message")))
            elif kind == "failure":
                self._progress.note(f"attempt ended: rank {record.get('rank')}, step {step}: {record.get('message')}")
            elif step:
                self._progress.note(f"going on from step {step}, the last checkpoint")


def summary_table(rows: Iterable[tuple[str, str]], title: str = "") -> Table:
    """Two columns, name and value, for the end of a run: `Console().print(summary_table(rows))`."""
    table = Table(title=title or None, show_header=False, box=None, padding=(0, 2, 0, 0), title_justify="left")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table
