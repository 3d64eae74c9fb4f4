"""CPU tensors: blocking calls run on the caller's thread, asynchronous ones on a worker thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ringcoll.communicator.public import Communicator
from ringcoll.dtypes import ReduceOp
from ringcoll.executors.contract import Given
from ringcoll.torch.calls import TensorCalls
from ringcoll.torch.failures import raise_from
from ringcoll.torch.tensors import memory
from ringcoll.torch.work import Finished, HostWork, serve_on_this_thread

__all__ = ["Host"]


class Host:
    """Runs the calls of one group on CPU tensors.

    ``failed`` records an error and returns the one to raise.
    """

    def __init__(
        self, comm: Communicator, failed: Callable[[BaseException], BaseException]
    ) -> None:
        self.comm, self._failed = comm, failed
        self._state, self._calls = comm._state, TensorCalls(comm)

    # -- for the bodies that :meth:`run` takes --------------------------------------------------

    def call(
        self,
        name: str,
        send: Any,
        recv: Any = None,
        op: str | ReduceOp | None = None,
        root: int = 0,
    ) -> None:
        """One collective on dense tensors."""
        self._run(self._calls.find(name, send, recv, op, root))

    def _run(self, found: tuple[Any, Given]) -> None:
        """Run a prepared call on the arrays at these addresses."""
        self._state.run(found[0], None, found[1])

    def barrier(self, timeout: float | None) -> None:
        """A barrier, with its own timeout if one is given."""
        self._run(self._calls.find_barrier(timeout))

    def exchange(self, text: str, what: str) -> list[str]:
        """The texts of all ranks; collective."""
        state = self._state
        texts = state.together(lambda: state.fabric.allgather(text.encode(), what=what))
        return [part.decode() for part in texts]

    def buffer(self, tensor: Any, name: str, *, reduces: bool = False) -> Any:
        """A dense tensor as an argument of the communicator's methods."""
        return memory(tensor, name, reduces=reduces)

    @staticmethod
    def takes(*_tensors: Any) -> bool:
        """Whether tensors may be such arguments themselves: a communicator takes numpy's arrays."""
        return False

    def stream_options(self) -> dict[str, Any]:
        """No stream argument on the CPU."""
        return {}

    def flush(self) -> None:
        """Nothing is launched later on the CPU."""

    # -- a call ---------------------------------------------------------------------------------

    def find_kept(self, *_call: object) -> None:
        """None: on the CPU a call in place checks its tensor each time."""

    def in_place(
        self, name: str, tensor: Any, op: str | ReduceOp | None, root: int, _kept: None = None
    ) -> Finished:
        """One collective in place on a dense tensor, on this thread."""
        state = self._state
        try:
            state.yield_to_worker()
            with state.lock:
                self._run(self._calls.find(name, tensor, None, op, root))
        except BaseException as error:
            raise_from(self._failed(error), error)
        return Finished((tensor,))

    def in_place_async(
        self, name: str, tensor: Any, op: str | ReduceOp | None, root: int, _kept: None = None
    ) -> Any:
        """The same on the worker thread."""

        def body() -> None:
            self.call(name, tensor, None, op, root)

        return self.run(body, reads=(tensor,), writes=(tensor,), async_op=True)

    def run(
        self,
        body: Callable[[], None],
        *,
        reads: Sequence[Any] = (),
        writes: Sequence[Any] = (),
        async_op: bool,
    ) -> Finished | HostWork:
        """Run several calls: on this thread, or with ``async_op`` on the worker."""
        state = self._state
        try:
            if async_op:
                work = HostWork(writes, self._failed, self)
                state.submit(lambda: self._together(body, work), (reads, writes))
                return work
            state.yield_to_worker()
            with state.lock:
                body()
        except BaseException as error:
            raise_from(self._failed(error), error)
        return Finished(writes)

    def _together(self, body: Callable[[], None], work: HostWork) -> None:
        serve_on_this_thread(self)

        def locked() -> None:
            with self._state.lock:
                body()

        work.run(locked)

    # -- the end --------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Abort: running calls fail, here and on the other ranks."""
        self.comm.abort(reason)

    def close(self) -> None:
        """Wait for the asynchronous calls, and close the communicator; not collective."""
        self._calls.forget()
        self._state.synchronize()
        self.comm.close()

    def leave(self, patience: float) -> None:
        """End the worker: its running call has ``patience`` seconds, the queued ones fail."""
        worker = self._state._worker
        if worker is not None and not worker.close(patience):
            self.comm.abort("its process ended during a call")
            worker.close()
