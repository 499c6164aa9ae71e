"""What workers check together before step 0, each worker a thread with a connection of its own to one store."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from makers import SettingsMaker, TokenStoreMaker

from training import start_checks
from training.backends import World
from training.config import Settings
from training.errors import RunFailed, UserError
from training.launchers import group
from training.launchers.group import Meeting, connect, silent_ranks
from training.metrics import read_metrics
from training.rundir import RunDir
from training.start_checks import Unlike, check_sum, check_together, difference

Outcome = Exception | None


@pytest.fixture
def settings(tmp_path: Path, small_settings: SettingsMaker, token_store: TokenStoreMaker) -> Settings:
    made = small_settings(tmp_path, train__hang_timeout=60)
    token_store(made.data_dir)
    made.run.dir.mkdir()
    return made


def together(settings: dict[int, Settings], size: int, backend: str = "cpu") -> dict[int, Outcome]:
    """What `check_together` raised on each rank that takes part."""
    meeting = Meeting("127.0.0.1")
    attempt = meeting.of_attempt()

    def check(rank: int) -> Outcome:
        try:
            check_together(connect(attempt), settings[rank], World(rank, size, rank, size, attempt), backend)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            return error
        return None

    with ThreadPoolExecutor(size) as pool:
        return dict(zip(settings, pool.map(check, settings), strict=True))


def test_workers_that_are_alike_go_on(settings: Settings) -> None:
    assert together(dict.fromkeys(range(3), settings), 3) == {0: None, 1: None, 2: None}
    assert not list(settings.run.dir.glob(".start-*"))  # the mark is gone


def test_another_setting_on_one_worker_is_named_on_all(settings: Settings, small_settings: SettingsMaker) -> None:
    other = small_settings(settings.run.dir.parent, train__hang_timeout=60, train__learning_rate=0.5)
    outcomes = together({0: settings, 1: settings, 2: other}, 3)
    assert all(isinstance(error, Unlike) for error in outcomes.values())
    [line] = {str(error) for error in outcomes.values()}
    assert line.startswith("train.learning_rate: 0.5 for rank 2 on ")
    assert line.endswith("has 0.001; expected the same")


def test_a_worker_that_has_another_volume_is_named(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third worker to look finds its own empty folder where the others find the shared one."""
    mark, lock, calls = start_checks._mark, threading.Lock(), [0]

    def elsewhere(of: Settings, token: str) -> Path:
        with lock:
            calls[0] += 1
            return mark(of, token) if calls[0] != 4 else of.run.dir / "elsewhere" / token

    monkeypatch.setattr(start_checks, "_mark", elsewhere)  # asked by rank 0 to write, then by each of three to read
    outcomes = together(dict.fromkeys(range(3), settings), 3)
    [line] = {str(error) for error in outcomes.values()}
    assert line.startswith("run.dir: rank ")
    assert line.endswith("does not find there what rank 0 does; expected one volume for all nodes")


@pytest.mark.parametrize(
    ("present", "words"),
    [
        ((0, 1, 3), "rank 2 did not start within train.hang_timeout (1 s)"),
        ((1, 2, 3), "rank 0 did not start within train.hang_timeout (1 s)"),
        ((1, 3), "rank 0 did not start within train.hang_timeout (1 s), nor did rank 2"),
    ],
)
def test_who_is_missing_is_named(
    settings: Settings, small_settings: SettingsMaker, present: tuple[int, ...], words: str
) -> None:
    short = small_settings(settings.run.dir.parent, train__hang_timeout=1)
    outcomes = together(dict.fromkeys(present, short), 4)
    assert {type(error) for error in outcomes.values()} == {RunFailed}
    assert {str(error) for error in outcomes.values()} == {words}
    [record] = read_metrics(short.run.dir / "metrics.jsonl")  # told once, not by each that waited
    assert record["type"] == "failure"
    assert f"rank {record['rank']} {record['message']}" == words


def reports() -> list[dict[str, Any]]:
    one = {
        "host": "a",
        "settings": {"train": {"steps": 6}, "run": {"dir": "/data/run"}},
        "code": "12",
        "libraries": {"torch": "2.9.0", "torch-xla": "none"},
        "volume": {"run.dir": "34", "data.output": "56"},
        "core": None,
        "devices": None,
    }
    return [copy.deepcopy(one) | {"host": host} for host in "aabb"]


def changed(section: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda report: report[section].update({key: value})


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (changed("libraries", "torch", "2.8.0"), "torch: 2.8.0 for rank 3 on b, rank 0 on a has 2.9.0; expected the"),
        (changed("libraries", "torch-xla", "2.9.0"), "torch-xla: 2.9.0 for rank 3 on b, rank 0 on a has none"),
        (lambda report: report.update(code="0"), "training: rank 3 on b has other code than rank 0; expected the same"),
        (changed("volume", "run.dir", "No such file"), "run.dir: rank 3 on b does not find there what rank 0 does"),
        (changed("volume", "data.output", "0"), "data.output: rank 3 on b does not find there"),
        (changed("settings", "run", {"dir": "/x"}), "run.dir: /x for rank 3 on b, rank 0 on a has /data/run"),
        (lambda report: report.update(devices=0), "run.backend: rank 3 on b sees no device of it; expected one"),
    ],
)
def test_every_difference_is_one_line(change: Callable[[dict[str, Any]], None], line: str) -> None:
    found = reports()
    assert difference(found) is None
    change(found[3])
    told = difference(found)
    assert told is not None
    assert told.startswith(line)
    assert "\n" not in told


def test_two_workers_of_a_host_never_share_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reports()
    for report, core in zip(found, (0, 1, 0, 1), strict=True):  # the same numbers on another host are other cores
        report["core"] = core
    assert difference(found) is None
    found[3]["devices"] = 1
    assert difference(found) == (
        "NEURON_RT_VISIBLE_CORES: core 1 for rank 3 on b, which has 1; "
        "expected no more workers on a node than it has cores"
    )
    found[3].update(devices=32, core=0)
    assert difference(found) == "NEURON_RT_VISIBLE_CORES: core 0 of b for ranks 2, 3; expected a core for each"
    for listed, rank, core in (("0-31", 5, 5), ("4,6", 1, 6), ("8-9,12", 2, 12)):
        monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", listed)
        assert start_checks._core(World(rank, 32, rank, 32)) == core


def test_a_wrong_sum_names_the_network(settings: Settings) -> None:
    class Summing:
        def __init__(self, found: list[float]) -> None:
            self.world, self.settings, self.device = World(2, 4, 2, 4), settings, torch.device("cpu")
            self.found = found

        def sum_(self, values: torch.Tensor) -> torch.Tensor:
            assert values.tolist() == [1.0, 3.0]
            return torch.tensor(self.found)

    check_sum(Summing([4.0, 10.0]))  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match=r"^rank 2: a sum over all workers is \[4.0, 9.0\], expected \[4, 10.0\]"):
        check_sum(Summing([4.0, 9.0]))  # type: ignore[arg-type]
    [record] = read_metrics(settings.run.dir / "metrics.jsonl")
    assert record["rank"] == 2


def test_who_says_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.launchers.group.SILENCE_SECONDS", 1.0)
    meeting = Meeting("127.0.0.1")
    attempt = meeting.of_attempt()
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda rank: silent_ranks(World(rank, 4, rank, 4, attempt)), (0, 1, 3)))
    assert found == [[2], [2], [2]]
    assert silent_ranks(World()) == []


def test_a_launcher_that_is_gone_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.launchers.group.CONNECT_SECONDS", 0.5)
    with pytest.raises(RunFailed, match=r"^the launcher does not answer at 127.0.0.1:1 \("):
        connect("127.0.0.1:1/attempt")


def test_what_all_ranks_refuse_is_no_failure_of_one(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 tells the launcher, and then no rank ends as one that a restart may mend."""
    monkeypatch.setattr(group, "joined", lambda settings, world: contextlib.nullcontext())
    monkeypatch.setattr(group, "TELLING_SECONDS", 0.5)
    run = RunDir(settings.run.dir)

    def refused() -> None:
        raise UserError("train.steps: 3, expected more")

    with pytest.raises(RunFailed, match=r"^train.steps: 3, expected more$"):
        group.run_attempt(settings, World(1, 2, 1, 2), refused)  # rank 0 has found nothing
    assert [record["rank"] for record in read_metrics(run.metrics)] == [1]
    group.run_attempt(settings, World(0, 2, 0, 2), refused)
    assert run.outcome() == {"status": "user_error", "message": "train.steps: 3, expected more"}
    group.run_attempt(settings, World(1, 2, 1, 2), refused)
    assert len(read_metrics(run.metrics)) == 1
