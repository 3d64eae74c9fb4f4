"""Sends and receives of a GPU rank: whoever prepares or launches them keeps its state whole."""

from __future__ import annotations

from ringcoll.arguments.calls import Call
from ringcoll.communicator.rank import RankState
from ringcoll.executors.cuda.executor import CudaExecutor
from ringcoll.executors.cuda.message_calls import PairCalls, shapes_of
from ringcoll.executors.cuda.message_copies import RANKS as COPIED_RANKS
from ringcoll.executors.cuda.message_launch import PreparedPairs
from ringcoll.executors.cuda.recounted_messages import NewCounts, Places
from ringcoll.executors.cuda.sending import CudaPairs
from ringcoll.tuner.measured import ANY_BYTES, ASKED_MESSAGE_BYTES, MESSAGE_COPY_BYTES


class MessageState(RankState):
    """What a GPU rank does for its messages."""

    cuda: CudaExecutor
    sending: CudaPairs

    def paired(
        self,
        calls: tuple[Call, ...],
        stream: int,
        timeout: float,
        *,
        owned: bool,
        most: int | None,
        engine: str | None = None,
    ) -> PairCalls:
        """Sends and receives that are launched together.

        ``most``: CUDA blocks; ``engine``: the option.
        """
        most = None if most is None else min(most, self.cuda.machine.blocks)
        least = self.least_copied(engine)
        copied = least if any(call.nbytes >= least for call in calls) else 0
        key = shapes_of(calls)
        return PairCalls(self.sending, calls, stream, timeout, owned, most, copied, key=key)

    def least_copied(self, engine: str | None) -> int:
        """Bytes from which copy engines may send a message, by the option ``engine``."""
        if self.cuda.large_scratch is None or self.fabric.nranks != COPIED_RANKS:
            return ANY_BYTES
        thresholds = {"copy": ASKED_MESSAGE_BYTES.value, None: MESSAGE_COPY_BYTES.value}
        return thresholds.get(engine, ANY_BYTES)

    def prepared_pairs(self, calls: PairCalls, places: Places) -> PreparedPairs:
        """The launch of the messages of one call, for all arrays of their shape.

        ``places``: of each message the bytes into INPUT and OUTPUT; None where it has none.
        """
        try:
            return self.sending.prepared(calls, places)
        except BaseException as error:
            self.fail(error)  # the other end waits for this one's launch
            raise

    def recounted_pairs(self, new: NewCounts) -> PreparedPairs:
        """The launch of messages of new counts, which holds until the next such launch."""
        self.usable()
        try:
            return self.sending.recounted(new)
        except BaseException as error:
            self.fail(error)  # the other end waits for this one's launch
            raise

    def run_pairs(self, prepared: PreparedPairs, stream: int, send: int, recv: int) -> None:
        """Enqueue the messages of one call, on arrays at these addresses."""
        if self.closed or self.inherited or self.broken is not None:  # saves a call
            self.usable()
        try:
            self.fabric.check()
            self.sending.run(prepared, stream, send, recv)
        except BaseException as error:
            self.fail(error)
            raise
