"""CPU tensors: a blocking call runs on the caller's thread, an asynchronous one on the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ringcoll.communicator.public import Communicator
from ringcoll.dtypes import ReduceOp
from ringcoll.torch.calls import Calls
from ringcoll.torch.failures import instead
from ringcoll.torch.tensors import memory
from ringcoll.torch.work import Finished, HostWork, serves

__all__ = ["Host"]


class Host:
    """Carries out the calls of one group on CPU tensors.

    Args:
        comm: a communicator of CPU ranks.
        failed: is told of an error, and says which one to raise.

    """

    def __init__(
        self, comm: Communicator, failed: Callable[[BaseException], BaseException]
    ) -> None:
        self.comm, self._failed = comm, failed
        self._state, self._calls = comm._state, Calls(comm)

    # -- parts of a call: for the body that :meth:`run` is given --------------------------------

    def call(
        self,
        name: str,
        send: Any,
        recv: Any = None,
        op: str | ReduceOp | None = None,
        root: int = 0,
    ) -> None:
        """One collective on dense tensors."""
        self._state.run(self._calls.ready(name, send, recv, op, root))

    def barrier(self, timeout: float | None) -> None:
        """A barrier, with a timeout of its own."""
        self._state.run(self._calls.barrier(timeout))

    def exchange(self, text: str, what: str) -> list[str]:
        """What every rank says."""
        state = self._state
        said = state.together(lambda: state.fabric.allgather(text.encode(), what=what))
        return [part.decode() for part in said]

    def buffer(self, tensor: Any, name: str, *, reduces: bool = False) -> Any:
        """A dense tensor as the communicator's own methods take it."""
        return memory(tensor, name, reduces=reduces)

    def how(self) -> dict[str, Any]:
        """Options that the communicator's own methods need here."""
        return {}

    def flush(self) -> None:
        """Nothing waits to be launched."""

    # -- a call ---------------------------------------------------------------------------------

    def now(self, name: str, tensor: Any, op: str | ReduceOp | None, root: int) -> Finished:
        """One collective in place on a dense tensor, at once."""
        state = self._state
        try:
            state.yield_to_worker()
            with state.lock:
                state.run(self._calls.ready(name, tensor, None, op, root))
        except BaseException as error:
            instead(self._failed(error), error)
        return Finished((tensor,))

    def soon(self, name: str, tensor: Any, op: str | ReduceOp | None, root: int) -> Any:
        """The same on the worker thread."""

        def body() -> None:
            self.call(name, tensor, None, op, root)

        return self.run(body, reads=(tensor,), writes=(tensor,), later=True)

    def run(
        self,
        body: Callable[[], None],
        *,
        reads: Sequence[Any] = (),
        writes: Sequence[Any] = (),
        later: bool,
    ) -> Finished | HostWork:
        """A call of several parts.

        Args:
            body: the parts.
            reads: tensors that it reads.
            writes: tensors that it writes.
            later: whether the caller waits for it later.

        """
        state = self._state
        try:
            if later:
                work = HostWork(writes, self._failed, self)
                state.submit(lambda: self._together(body, work), (reads, writes))
                return work
            state.yield_to_worker()
            with state.lock:
                body()
        except BaseException as error:
            instead(self._failed(error), error)
        return Finished(writes)

    def _together(self, body: Callable[[], None], work: HostWork) -> None:
        serves(self)

        def locked() -> None:
            with self._state.lock:
                body()

        work.carry_out(locked)

    # -- the end --------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Give up: calls under way fail, here and on the other ranks."""
        self.comm.abort(reason)

    def close(self) -> None:
        """Let the asynchronous calls end, and the communicator; not collective."""
        self._calls.forget()
        self._state.synchronize()
        self.comm.close()

    def leave(self, patience: float) -> None:
        """End the worker thread: the call under way has so many seconds, the others fail."""
        worker = self._state._worker
        if worker is not None and not worker.close(patience):
            self.comm.abort("its process ended during a call")
            worker.close()
