"""The governor in a simulated server: it gives way under load, recovers, and respects closed gears."""

from __future__ import annotations

from offramp.serving.governor import Governor, GovernorSettings

SPEEDS = [8.0, 4.0, 2.0, 1.0]  # rows a millisecond of each gear, cheapest first


def simulate(governor: Governor[float], load: float, seconds: float, start: float = 0.0, backlog: float = 0.0) -> float:
    """Run a fluid queue at `load` rows a millisecond and return the backlog in rows."""
    for tick in range(int(seconds * 1000)):
        backlog = max(0.0, backlog + load - governor.gear)
        governor.update(start + tick / 1000, backlog / governor.gear / 1000)
    return backlog


def governor() -> Governor[float]:
    return Governor(SPEEDS, normal=3, settings=GovernorSettings(target=0.05))


def test_a_quiet_server_stays_in_its_normal_gear() -> None:
    one = governor()
    simulate(one, 0.5, 5.0)
    assert one.gear == 1.0 and one.moves == 0


def test_load_moves_to_cheaper_gears_and_the_wait_stays_within_the_target() -> None:
    one = governor()
    backlog = simulate(one, 3.0, 5.0)
    assert one.gear >= 2.0 and backlog / one.gear / 1000 < 0.05


def test_a_sudden_overload_moves_to_the_cheapest_gear_at_once() -> None:
    one = governor()
    one.update(0.0, 1.0)
    assert one.gear == 8.0


def test_it_returns_to_the_normal_gear_within_five_seconds_of_quiet() -> None:
    one = governor()
    backlog = simulate(one, 20.0, 1.0)
    assert one.gear == 8.0
    simulate(one, 0.0, 5.0, 1.0, min(backlog, 400.0))
    assert one.gear == 1.0


def test_it_moves_at_most_three_times_a_second_under_a_constant_load() -> None:
    one = governor()
    simulate(one, 1.5, 2.0)
    before = one.moves
    simulate(one, 1.5, 10.0, 2.0)
    assert one.moves - before <= 30


def test_a_closed_gear_is_never_used_again_and_raises_the_normal_gear() -> None:
    one: Governor[float] = Governor(SPEEDS, normal=1)
    assert one.tighten(2)
    assert one.gear == 2.0 and one.normal == 2
    one.update(0.0, 10.0)
    assert one.gear == 2.0
    assert one.tighten(3) and one.gear == 1.0
    assert not one.tighten(4) and one.gear == 1.0, "the full model cannot be closed"
    assert not one.tighten(2), "closed before"
