"""Turns on the cores: no more threads at a time than there are, and none that waits for itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import offramp
from offramp.utils import cores
from offramp.utils.cores import CoreTurns
from tests import factories


def test_no_more_threads_at_a_time_than_turns() -> None:
    turns, inside, most, lock = CoreTurns(2), 0, 0, threading.Lock()
    pair = threading.Barrier(2)  # is passed only if two are in at the same time

    def work(_: int) -> None:
        nonlocal inside, most
        with turns.turn():
            with lock:
                inside += 1
                most = max(most, inside)
            pair.wait(timeout=60)
            with lock:
                inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))
    assert most == 2 and inside == 0


def test_a_run_within_a_run_keeps_its_turn() -> None:
    turns = CoreTurns(1)
    with turns.turn(), turns.turn():
        pass
    with ThreadPoolExecutor(1) as pool, turns.turn():
        waiting = pool.submit(turns.turn().__enter__)
        assert not waiting.done()
    waiting.result(timeout=60)


def test_an_error_gives_the_turn_back() -> None:
    turns = CoreTurns(1)
    with pytest.raises(ValueError, match="broken"), turns.turn():
        raise ValueError("broken")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(turns.turn().__enter__).result(timeout=60)


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_engines_that_go_step_by_step_take_turns_and_answer_alike(
    trained: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = offramp.load(trained, engine=engine)
    texts = [row["text"] for row in factories.labelled_rows("classification", 12)]
    expected = [model.predict([text], budget=0.5) for text in texts]
    held, turn = [], cores.TURNS.turn

    @contextmanager
    def counted() -> Iterator[None]:
        with turn():
            held.append(threading.get_ident())
            yield

    monkeypatch.setattr(cores.TURNS, "turn", counted)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: model.predict([text], budget=0.5), texts))
    assert found == expected and len(held) >= len(texts)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


V1 = "12:devices:/box\n4:cpu,cpuacct:/box\n1:name=systemd:/box"
QUOTAS: dict[str, tuple[dict[str, str], int | None]] = {
    "no files at all": ({}, None),
    "no limit": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
    "two cores": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
    "one and a half": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
    "a tenth": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "10000 100000"}, 1),
    "an ancestor's is smaller": (
        {
            "proc/self/cgroup": "0::/pods/one/box",
            "sys/fs/cgroup/pods/one/box/cpu.max": "800000 100000",
            "sys/fs/cgroup/pods/one/cpu.max": "max 100000",
            "sys/fs/cgroup/pods/cpu.max": "300000 100000",
        },
        3,
    ),
    "the own group's files lie at the top": (
        {"proc/self/cgroup": "0::/pods/one", "sys/fs/cgroup/cpu.max": "400000 100000"},
        4,
    ),
    "a group outside of what is seen": ({"proc/self/cgroup": "0::/../..", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
    "version 1": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "250000",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
        3,
    ),
    "version 1 in a container": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "25000",
        },
        2,
    ),
    "version 1 without a limit": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
        None,
    ),
    "half of version 1": ({"proc/self/cgroup": V1, "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000"}, None),
    "nonsense": ({"proc/self/cgroup": "0\n::\nx", "sys/fs/cgroup/cpu.max": "many few 7"}, None),
    "a period of nothing": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "100000 0"}, None),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_the_quota_of_a_container(case: str, tmp_path: Path) -> None:
    files, cores_of_time = QUOTAS[case]
    write(tmp_path, files)
    assert cores.quota_cores(tmp_path) == cores_of_time


def test_a_quota_is_read_once(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "200000 100000"})
    assert cores.quota_cores(tmp_path) == 2
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "900000 100000"})
    assert cores.quota_cores(tmp_path) == 2


@pytest.mark.parametrize(("quota", "expected"), [(None, 4), (3, 3), (64, 4)])
def test_usable_cores_are_those_within_the_quota(
    quota: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {0, 1, 2, 5}, raising=False)
    monkeypatch.setattr(cores, "quota_cores", lambda: quota)
    assert cores.usable_cores() == expected
