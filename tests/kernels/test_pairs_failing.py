"""Sends and receives that cannot end: every rank does, and says who was waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from threading import Thread

import pytest

from ringcoll.errors import AbortedError, ClosedError, DeadlineError, Error, MismatchError
from ringcoll.executors.cuda.point_to_point import window_bytes
from ringcoll.executors.cuda.reports import LEFT, error_of
from tests.kernels.stand_in import library, needs_compiler
from tests.kernels.test_broken import changed, copied
from tests.kernels.traffic import Traffic, side_by_side
from tests.kernels.world import ABORT, LEFT_RANKS, World

pytestmark = needs_compiler

LONG = 20_000
MANY = 600_000
"""Bytes that several blocks share, and that do not fit a zone of 512 KiB."""
AT_ONCE = 30.0
"""Seconds within which everything ends, on a machine that is busy."""


def error(world: World, rank: int) -> Error:
    """What the host of a rank would raise; a record's text is its number."""
    report = world.report(rank)
    assert report is not None

    def text(rank: int, record: int) -> str:
        return f"<{record} of {rank}>"

    return error_of(report, rank, "no call", 0.3, text)


def test_a_receiver_whose_sender_never_comes():
    world = World(2)
    traffic = Traffic([(1, 0, 100)])
    side_by_side([[traffic.ready(world, (0,), timeout=0.3)]])
    told = error(world, 0)
    assert isinstance(told, DeadlineError)
    assert "recv from rank 1 on rank 0 (call 1 of this pair, <100 of 0>)" in str(told)
    assert "waited 0.3 s; rank 1 made no send" in str(told)
    assert world.broken(1)


def test_a_sender_whose_receiver_never_comes():
    world = World(2)
    traffic = Traffic([(0, 1, LONG)])
    side_by_side([[traffic.ready(world, (0,), timeout=0.3)]])
    told = error(world, 0)
    assert isinstance(told, DeadlineError)
    assert "send to rank 1 on rank 0 (call 1 of this pair, <101 of 0>)" in str(told)


@pytest.mark.parametrize(
    ("pair", "rank"), [((1, 0, 100), 0), ((0, 1, LONG), 0)], ids=["receiver", "sender"]
)
def test_a_peer_that_has_left(pair, rank):
    world = World(3)
    traffic = Traffic([pair])
    world.words(rank)[LEFT_RANKS + 2] = 1  # another
    side_by_side([[traffic.ready(world, (rank,), timeout=0.3)]])
    assert isinstance(error(world, rank), DeadlineError)
    world = World(3)
    world.words(rank)[LEFT_RANKS + 1] = 1
    start = time.monotonic()
    side_by_side([[traffic.ready(world, (rank,))]])
    assert time.monotonic() - start < AT_ONCE
    report = world.report(rank)
    assert report is not None
    assert (report.kind, report.peer) == (LEFT, 1)


def test_what_a_peer_has_sent_before_it_left_is_received():
    world = World(2)
    traffic = Traffic([(1, 0, 100)])
    side_by_side([[traffic.ready(world, (1,))]])
    world.words(0)[LEFT_RANKS + 1] = 1
    side_by_side([[traffic.ready(world, (0,))]])
    assert world.reports() == [None] * 2


def test_a_small_send_too_many():
    world = World(2)
    small = window_bytes(world.workspace)
    traffic = Traffic([(0, 1, small)] * 2)
    side_by_side([[traffic.ready(world, (0,), timeout=0.3)]])
    told = error(world, 0)
    assert isinstance(told, DeadlineError)
    assert "call 2 of this pair" in str(told)
    assert "no recv that matches the one before" in str(told)
    assert str(told).endswith("wait for each other: use sendrecv or a group")


def test_of_many_halves_the_one_that_waits_is_named():
    """One report, whole: all halves of the rank end, and one of them says which and why."""
    world = World(4)
    present = [(0, 1, 50), (1, 0, 50), (0, 2, 50), (2, 0, 60)]
    traffic = Traffic([*present, (3, 0, LONG)])
    side_by_side([[traffic.ready(world, (rank,), timeout=0.5)] for rank in range(3)])
    told = error(world, 0)
    assert isinstance(told, DeadlineError)
    assert "recv from rank 3 on rank 0 (call 1 of this pair, <108 of 0>)" in str(told)
    for rank in (1, 2):
        report = world.report(rank)
        assert report is None or isinstance(error(world, rank), AbortedError)


@pytest.mark.parametrize("lengths", [(50, 50), (LONG, LONG), (LONG, 50), (0, 60)])
def test_ends_that_do_not_agree(lengths):
    """The terms differ; what the arrays hold is left out, so that the launches may be equal."""
    world = World(2)
    terms = {(0, True): f"count={lengths[0]}", (0, False): f"count={lengths[1]} of others"}
    traffic = Traffic([(0, 1, lengths[0])], terms=terms)
    other = Traffic([(0, 1, lengths[1])], terms=terms)
    start = time.monotonic()
    side_by_side([[traffic.ready(world, (0,))], [other.ready(world, (1,))]])
    assert time.monotonic() - start < AT_ONCE
    told = error(world, 1)
    assert isinstance(told, MismatchError)
    assert "recv on rank 1, call 1 of its pair with rank 0: <100 of 1>" in str(told)
    assert "send on rank 0: <101 of 0>; count and dtype must be equal" in str(told)
    if lengths[0] == LONG:  # it waited for credits: it knows why they do not come
        assert isinstance(error(world, 0), MismatchError)
    assert world.broken(0)
    assert world.broken(1)


def nap(seconds: float) -> str:
    """Text of a kernel that does nothing for so long."""
    wait = f"globaltimer_ns() - begun < {seconds * 1e9:.0f}u"
    return f"for (u64 begun = globaltimer_ns(); {wait};) {{ pause(); }}"


BEGINS = "Half half(args, local, words, block_index() - first);"
ENTERS = "if (flag() == 0) {"
ENTERED = "const u64 when = sends && !large ? epoch - 1 : epoch;"
BREAKS = "RC_DEVICE bool broken() const {"

SLOW_RANK = {
    "hello comes last": [(ENTERS, f"if (peer == 1 && mine == 0) {nap(0.5)}\n{ENTERS}")],
    "a block comes after the break": [
        (BEGINS, f"{BEGINS} if (half.peer == 1 && half.mine != 0) {nap(0.5)}"),
        (ENTERED, f"if (peer == 1 && mine == 0) {nap(1)}\n{ENTERED}"),
    ],
    "hello and break come at once": [(BREAKS, f"{BREAKS} if (peer == 1 && began != 0) {nap(1)}")],
}
"""Changes of the kernel by which rank 0 for a while misses what rank 1 does, or does it late."""


@pytest.fixture(scope="module", params=SLOW_RANK.values(), ids=[*SLOW_RANK])
def slow(request, tmp_path_factory):
    """A folder of such a kernel."""
    folder = copied(tmp_path_factory.mktemp("slow") / "kernels")
    for old, new in request.param:
        changed(folder, "point_to_point.cuh", old, new)
    return folder


@pytest.mark.parametrize("sends", [True, False])
def test_both_ends_know_why_though_blocks_are_late(slow, sends):
    """Whichever block finds the difference, neither end is merely told that something failed."""
    world = World(2, zone=512 << 10)
    ways = (0, 1) if sends else (1, 0)
    ready = [Traffic([(*ways, MANY + rank)]).ready(world, (rank,)) for rank in range(2)]
    assert all(launch.blocks > 1 for launch in ready)
    side_by_side([[launch] for launch in ready], slow, late=0.3)
    for rank in range(2):
        assert isinstance(error(world, rank), MismatchError)


def test_an_arena_that_is_broken_is_left_alone():
    world = World(2)
    side_by_side([[Traffic([(1, 0, 100)]).ready(world, (0,), timeout=0.1)]])
    before = world.memory.copy()
    traffic = Traffic([(0, 1, LONG), (1, 0, LONG)])
    side_by_side([[traffic.ready(world, (rank,))] for rank in range(2)])
    late = world.report(1)
    assert late is not None
    assert isinstance(error(world, 1), AbortedError)
    world.words(1)[:] = 0
    world.workspace_of(1)[4:8] = 0  # who wrote the report
    assert (world.memory == before).all()


def test_the_host_gives_up():
    world = World(2)
    ready = Traffic([(1, 0, 100)]).ready(world, (0,), timeout=1e10)

    def give_up() -> None:
        time.sleep(0.2)
        world.words(0)[ABORT] = 1

    host = Thread(target=give_up)
    host.start()
    side_by_side([[ready]])
    host.join()
    told = error(world, 0)
    assert isinstance(told, AbortedError)
    assert "aborted; rank 1 made no send" in str(told)


@pytest.mark.parametrize("sends", [False, True])
def test_flags_that_would_begin_anew_are_refused(sends):
    world = World(2)
    at = world.workspace.pair(1, sends=sends) + world.workspace.pair_sequence
    world.workspace_of(0)[at:][: 8 * world.workspace.pair_replicas].view("u8")[:] = (1 << 32) - 1
    messages = [(0, 1, 100)] if sends else [(1, 0, 100)]
    side_by_side([[Traffic(messages).ready(world, (0,))]])
    told = error(world, 0)
    assert isinstance(told, ClosedError)
    assert "2**32 calls" in str(told)


def test_each_wait_has_its_own_time(tmp_path):
    """A sender that comes late, and later yet with its data: both together would be too late."""
    entered = "const u64 when = sends && !large ? epoch - 1 : epoch;"
    # On a busy machine it may come later than it is told to: then all is done more slowly.
    for timeout in (0.5, 4.0, 24.0):
        late = 0.6 * timeout
        slow = copied(tmp_path / str(timeout))
        changed(slow, "point_to_point.cuh", entered, f"{nap(late)}\n{entered}")
        world = World(2)
        traffic = Traffic([(1, 0, 100)])
        receiver = traffic.ready(world, (0,), timeout=timeout)
        sender = traffic.ready(world, (1,), timeout=timeout)
        library(receiver.text)
        library(sender.text, slow)
        in_two_launches(receiver, partial(come_late, late, partial(sender, slow)))
        if not any(world.reports()):
            break
    assert not any(world.reports())
    traffic.check()


def come_late(seconds: float, launch: Callable[[], None]) -> None:
    time.sleep(seconds)
    launch()


def in_two_launches(first: Callable[[], None], second: Callable[[], None]) -> None:
    threads = [Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_late_peer_is_waited_for():
    world = World(2)
    traffic = Traffic([(0, 1, LONG), (1, 0, LONG)])
    early, late = (traffic.ready(world, (rank,)) for rank in range(2))
    in_two_launches(early, partial(come_late, 0.4, late))
    assert not any(world.reports())
    traffic.check()
