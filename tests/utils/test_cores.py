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
