"""Which sends and receives of ranks that share a GPU are launched, and together with which."""

from __future__ import annotations

import pytest

from ringcoll.executors.cuda.rendezvous import Bundle, End, Rendezvous
from ringcoll.executors.cuda.shared_launch import SharedLaunch


def send(sender: int, receiver: int) -> End:
    """A large one, which needs its receiver."""
    return End(sender, receiver, True, True)


def small(sender: int, receiver: int) -> End:
    return End(sender, receiver, True)


def recv(receiver: int, sender: int) -> End:
    return End(sender, receiver, False)


class Room:
    """A meeting that notes what is launched."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.woken: list[int] = []
        self.meeting: Rendezvous[str] = Rendezvous(self.woken.append)

    def bring(self, name: str, *ends: End) -> Bundle[str]:
        bundle = Bundle((name,), ends)
        self.meeting.submit(bundle, lambda members: self.launched.append("".join(members)))
        return bundle


def test_both_ends_go_together():
    room = Room()
    first = room.bring("a", send(0, 1))
    assert room.launched == []
    assert not first.launched.is_set()
    assert room.meeting.missing(first) == [send(0, 1)]
    room.bring("b", recv(1, 0))
    assert room.launched == ["ab"]
    assert first.launched.is_set()
    assert room.meeting.missing(first) == [send(0, 1)]  # of a further call


def test_who_waits_is_woken_once_it_is_launched():
    room = Room()
    room.bring("a", send(0, 1))
    assert room.woken == []
    room.bring("b", recv(1, 0))
    assert room.woken == [0]
    room.bring("c", recv(2, 3), send(2, 3))
    room.bring("d", send(3, 2))
    assert room.woken == [0]
    room.bring("e", recv(3, 2))
    assert sorted(room.woken) == [0, 2, 3]


def test_the_last_at_a_gate_wakes_the_others():
    woken: list[int] = []
    launched: list[list[str]] = []
    gate: SharedLaunch[str] = SharedLaunch(
        (1, 2, 4), 0, lambda calls, _: launched.append(list(calls)), woken.append
    )
    gate.submit(2, "b", 7)
    gate.submit(2, "b again", 7)
    gate.submit(4, "c", 7)
    assert woken == []
    gate.submit(1, "a", 7)
    assert launched == [["a", "b", "c"]]
    assert sorted(woken) == [2, 4]


def test_a_small_send_goes_alone_once():
    room = Room()
    room.bring("a", small(0, 1))
    room.bring("b", small(0, 1))
    assert room.launched == ["a"]
    room.bring("c", recv(1, 0))
    assert room.launched == ["a", "cb"] or room.launched == ["a", "bc"]
    room.bring("d", recv(1, 0))
    assert room.launched[2:] == ["d"]


def test_a_ring_is_one_launch_when_it_is_whole():
    room = Room()
    for name, rank in (("a", 0), ("b", 1), ("c", 2)):
        assert room.launched == []
        room.bring(name, send(rank, (rank + 1) % 3), recv(rank, (rank - 1) % 3))
    assert [sorted(name) for name in room.launched] == [["a", "b", "c"]]


def test_what_has_nothing_in_common_is_launched_apart():
    room = Room()
    room.bring("a", send(0, 1))
    room.bring("b", send(2, 3))
    room.bring("c", recv(3, 2))
    assert room.launched == ["bc"]
    room.bring("d", recv(1, 0))
    assert room.launched == ["bc", "ad"]


def test_ends_elsewhere_need_nobody_here():
    room = Room()
    room.bring("a")
    assert room.launched == ["a"]


def test_a_rank_that_sends_to_itself():
    room = Room()
    room.bring("a", send(0, 0), recv(0, 0))
    assert room.launched == ["a"]


def test_a_bundle_waits_for_all_its_ends():
    """Of two sends one has its receive; nothing of the bundle is launched, nor the receive."""
    room = Room()
    room.bring("a", send(0, 1), send(0, 2))
    room.bring("b", recv(1, 0))
    assert room.launched == []
    room.bring("c", recv(2, 0))
    assert [sorted(name) for name in room.launched] == [["a", "b", "c"]]


def test_an_error_of_the_launch_is_everybodys():
    meeting: Rendezvous[str] = Rendezvous()

    def refuse(_members: object) -> None:
        raise ValueError("no")

    first, second = Bundle(("a",), (send(0, 1),)), Bundle(("b",), (recv(1, 0),))
    meeting.submit(first, refuse)
    meeting.submit(second, refuse)
    assert isinstance(first.error, ValueError)
    assert first.error is second.error
    # Nothing was launched: the next pair is the first.
    room = Room()
    room.meeting = meeting
    room.bring("a", send(0, 1))
    room.bring("b", recv(1, 0))
    assert room.launched == ["ab"]


def test_nobody_waits_after_a_withdrawal():
    room = Room()
    bundle = room.bring("a", recv(0, 1))
    room.meeting.withdraw(KeyError("gone"))
    assert bundle.launched.is_set()
    with pytest.raises(KeyError):
        raise bundle.error or ValueError
    room.bring("b", send(1, 0))
    assert room.launched == []
