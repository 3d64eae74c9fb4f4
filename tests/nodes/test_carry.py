"""Who is still waited for while several exchanges between nodes are under way."""

from collections import deque

from ringcoll.executors.staging.carry import Flow, _awaited, _end


class Message:
    def __init__(self, *, over: bool = False) -> None:
        self.over = over

    def done(self) -> bool:
        return self.over


class Lane:
    def __init__(self) -> None:
        self.ended: list[int] = []

    def done(self, number: int) -> None:
        self.ended.append(number)


def test_who_has_sent_everything_is_not_waited_for():
    """The last message of an exchange is looked at first, and others may have come before it."""
    lane, late = Lane(), Message()
    flow = Flow(lane, 2, 7, [None], begun=1)  # type: ignore[arg-type, list-item]
    flow.under_way = deque([[(1, Message(over=True)), (2, late)]])  # type: ignore[list-item]
    assert not _end(flow)
    assert _awaited([flow]) == [2]
    late.over = True
    assert _awaited([flow]) == []
    assert _end(flow)
    assert lane.ended == [7]
    assert flow.over()
