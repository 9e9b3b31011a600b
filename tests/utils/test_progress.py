"""Progress reports reach the listener of their own context only."""

from __future__ import annotations

from contextvars import Context

from offramp.utils.progress import progress_listener, report_progress


def test_reports_reach_the_listener_within_the_block_only() -> None:
    received: list[tuple[int, int]] = []
    report_progress(0, 2)
    with progress_listener(lambda done, total: received.append((done, total))):
        report_progress(1, 2)
    report_progress(2, 2)
    assert received == [(1, 2)]


def test_the_inner_listener_replaces_the_outer_one() -> None:
    outer: list[int] = []
    inner: list[int] = []
    with progress_listener(lambda done, total: outer.append(done)):
        with progress_listener(lambda done, total: inner.append(done)):
            report_progress(1, 3)
        report_progress(2, 3)
    assert (outer, inner) == ([2], [1])


def test_other_contexts_do_not_receive_reports() -> None:
    received: list[int] = []
    with progress_listener(lambda done, total: received.append(done)):
        Context().run(report_progress, 1, 2)
    assert received == []
