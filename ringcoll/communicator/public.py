"""The public Communicator: its ranks, explanations of calls, children, errors and its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, overload

import numpy as np

from ringcoll.collectives import COLLECTIVES
from ringcoll.communicator.collectives import Collectives
from ringcoll.communicator.counts import CountedCollectives
from ringcoll.communicator.failures import error_text
from ringcoll.communicator.group import Group
from ringcoll.communicator.memory import Memory
from ringcoll.communicator.messages import Messages
from ringcoll.communicator.rank import RankState
from ringcoll.communicator.scans import Scans
from ringcoll.communicator.topology import Topology
from ringcoll.communicator.work import Work
from ringcoll.config import Config, resolve
from ringcoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    Error,
    UsageError,
    did_you_mean,
    nearest,
)
from ringcoll.tracing import break_graphs_at, leave_alone

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from ringcoll.communicator.call_options import CallOptions


class Communicator(Collectives, Scans, CountedCollectives, Messages, Memory):
    """One rank's end of a communicator, made by :func:`ringcoll.init` and its kin.

    Collectives take ``(sendbuf, recvbuf=None, [op], [root], *, stream=None, async_op=False,
    config=None, **options)``. Without ``recvbuf`` they work in place. With ``async_op=True`` they
    return a :class:`ringcoll.Work`, else None. Options are the fields of :class:`ringcoll.Config`.
    Buffers are numpy, CuPy, torch, JAX or numba arrays, contiguous in C order; sizes are counted in
    elements. CPU ranks return when the result is there, GPU ranks when the call is enqueued.

    A ``with`` block closes the communicator; left by an exception, it aborts it.

    Example:
        >>> with ringcoll.init() as comm:
        ...     comm.all_reduce(np.ones(3))
        ...     comm.rank, comm.nranks, comm.device
        (0, 1, 'cpu')

    """

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        leave_alone(_calls())
        break_graphs_at(_calls())
        nodes = state.fabric.nodes or (0,) * self.nranks
        self.node: int = nodes[self.rank]
        """The node that this rank is on; nodes count in the order of their first ranks."""
        self.nnodes: int = max(nodes) + 1
        """How many nodes there are."""
        self.local_rank: int = nodes[: self.rank].count(self.node)
        """This rank among those of its node."""
        self.device = self._engine.device
        """Where this rank computes, such as ``"cpu"`` or ``"cuda:0"``."""
        self.xp: Any = self._engine.xp
        """The module of the arrays that this communicator makes, numpy or CuPy."""

    # -- why ---------------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """The machine as far as it is known, with the links and rings that join the ranks.

        Example:
            >>> with ringcoll.init() as comm:
            ...     print(comm.topology)
            the machine is not known: CPU ranks, and no topo_file

        """
        return self._state.topology

    def explain(self, collective: str, nbytes: int, **how: Unpack[CallOptions]) -> str:
        """Which algorithm a call of ``nbytes`` gets, and why.

        CPU ranks list the tuner's candidates. GPU ranks list algorithm, protocol, slices and CUDA
        blocks, the sizes for which these are chosen, and what smaller and larger calls run.

        Args:
            collective: its name, such as "all_reduce".
            nbytes: bytes of the larger of its two buffers.
            how: :class:`ringcoll.CallOptions` of the call.

        Raises:
            ArgumentTypeError: ``nbytes`` is no integer, or there is no such option.
            ArgumentError: it is negative, there is no such collective, or an option is wrong.

        Example:
            >>> [comm] = ringcoll.init_all(1)
            >>> print(comm.explain("all_reduce", 1 << 20).splitlines()[0])
            all_reduce, 1048576 bytes, 1 CPU ranks: by a handshake, staged where need be

        """
        where = f"explain on rank {self.rank}"
        if isinstance(nbytes, bool) or not isinstance(nbytes, (int, np.integer)):
            raise ArgumentTypeError(f"{where}: nbytes={nbytes!r}, wanted an integer, as 1 << 20")
        if nbytes < 0:
            raise ArgumentError(f"{where}: nbytes={nbytes}: at least 0")
        legal = [name for name in COLLECTIVES if name != "send"]
        if collective not in legal:
            raise ArgumentError(
                f"{where}: collective={collective!r}: one of {', '.join(legal)}"
                f"{did_you_mean(str(collective), legal)}"
            )
        options: dict[str, Any] = {**how}
        options.pop("stream", None)  # which decides nothing
        config = resolve(self._state.config, options.pop("config", None), options, where)
        return self._state.explain(collective, int(nbytes), config)

    # -- life --------------------------------------------------------------------------------

    @overload
    def split(self, color: int, key: int = 0, *, config: Config | None = None) -> Communicator: ...

    @overload
    def split(self, color: None, key: int = 0, *, config: Config | None = None) -> None: ...

    def split(
        self, color: int | None, key: int = 0, *, config: Config | None = None
    ) -> Communicator | None:
        """Make a communicator of the ranks of each colour; collective.

        Args:
            color: at least 0; ranks of one colour belong together. None: of no communicator.
            key: the new ranks follow the keys, then the old ranks.
            config: options of the new communicator's calls, equal on its ranks; what it leaves out
                is this communicator's.

        Returns:
            This rank's new communicator; None for ``color=None``.

        Raises:
            UsageError: ``color`` or ``key`` is no integer, or ``color`` is negative.
            MismatchError: ranks of one colour pass different options.
            DeadlineError: a rank did not make the call within ``timeout``.
            RankLostError: a rank died or left.

        Example:
            >>> def work(comm):
            ...     part = comm.split(comm.rank % 2)
            ...     return part.rank, part.nranks
            >>> ringcoll.spawn(work, 3)
            [(0, 2), (0, 1), (1, 2)]

        """
        group, state = self._group(), self._state
        if group is not None:
            state.color(color, key, config)  # refused here
            made = self._later(group, lambda: state.split(color, key, config))
            return None if color is None else made
        with self._control("split"):
            child = state.split(color, key, config)
        return None if child is None else Communicator(child)

    def _later(self, group: Group, make: Callable[[], RankState | None]) -> Communicator:
        """A communicator that is made when the group ends."""
        made: Communicator = _Unmade.__new__(_Unmade)

        def run() -> None:
            state = make()
            if state is not None:
                made.__class__ = Communicator
                Communicator.__init__(made, state)

        group.add_control(self._state, run)
        return made

    def shrink(self, exclude: Sequence[int] = ()) -> Communicator:
        """Make a communicator of the ranks that are left; collective among them, after a loss too.

        Args:
            exclude: ranks to leave out beside those that are known to be lost.

        Raises:
            UsageError: ``exclude`` is no list of ranks, or names this one.
            DeadlineError: a rank did not make the call within ``timeout``.
            RankLostError: another rank was lost meanwhile.

        Example:
            >>> def work(comm):
            ...     if comm.rank == 1:
            ...         return None
            ...     rest = comm.shrink(exclude=[1])
            ...     return rest.rank, rest.nranks
            >>> ringcoll.spawn(work, 3)
            [(0, 2), None, (1, 2)]

        """
        group, state = self._group(), self._state
        left = len(state.remaining(exclude)) if state.fabric.threads else 1
        if group is not None:
            return self._later(group, lambda: state.shrink(exclude))
        self._refuse_only_thread("shrink", left)
        with self._lock:
            return Communicator(state.shrink(exclude))

    def check(self) -> None:
        """Raise the error of an earlier call, or of a rank that is lost.

        Raises:
            Error: the error of that call, or of the lost rank.

        Example:
            >>> with ringcoll.init() as comm:
            ...     comm.check()

        """
        with self._lock:
            self._state.check()

    def synchronize(self) -> None:
        """Wait for all calls of this rank that were enqueued, and :meth:`check`.

        Raises:
            Error: as for :meth:`check`.

        Example:
            >>> with ringcoll.init() as comm:
            ...     work = comm.all_reduce(np.ones(3), async_op=True)
            ...     comm.synchronize()
            ...     work.done()
            True

        """
        self._state.synchronize()
        self.check()

    def abort(self, reason: str = "abort() was called") -> None:
        """Give up: the calls of all ranks fail, naming this rank and the reason. Idempotent.

        Args:
            reason: shown by the :class:`ringcoll.AbortedError` of the other ranks.

        Example:
            >>> def work(comm):
            ...     if comm.rank == 1:
            ...         comm.abort("no data left")
            ...     else:
            ...         comm.barrier()
            >>> try:
            ...     ringcoll.spawn(work, 2)
            ... except ringcoll.AbortedError as error:
            ...     print(error)
            rank 1 aborted: no data left

        """
        self._state.abort(reason)

    def close(self) -> None:
        """End the communicator in order; not collective, never hangs. Idempotent.

        Raises:
            MismatchError: the ranks did not make the same last call.
            LaunchRefused: on GPUs, the last call's stream is being captured; all stays open.
            Error: on GPUs, a call has failed and no wait has raised its error.

        Example:
            >>> comm = ringcoll.init()
            >>> comm.close()

        """
        self._state.stop()
        with self._lock:
            self._engine.close()

    def _settle(self) -> None:
        """Make the rank's GPU this thread's current one, so that ``xp`` makes arrays there."""
        if self._state.on_gpu:
            self.xp.cuda.Device(int(self.device.removeprefix("cuda:"))).use()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        done = isinstance(error, SystemExit) and not error.code  # sys.exit(0) is no error
        if error is not None and not done:
            self.abort(error_text(error))
            self.close()
            return
        try:
            self._conclude()
        finally:
            self.close()

    def _conclude(self) -> None:
        """Raise at the end the error that has broken the communicator, so that none is lost."""
        if self._state.settled or self._state.closed:
            return
        try:
            self.synchronize()
        except Error as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(
                    "raised where the communicator was left: an error that the program expects "
                    "is followed by comm.close(), comm.shrink() or comm.abort()"
                )
            raise

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Refuse pickle, copy and deepcopy: two handles of one rank would share its calls."""
        raise ArgumentTypeError(
            f"rank {self.rank}: a communicator cannot be copied or pickled, since it is one rank's "
            f"end, with this process's memory; pass the object itself to functions and threads, "
            f"make another by split(0), and call ringcoll.init in the other process"
        )

    def __repr__(self) -> str:
        state = self._state
        parts = [f"rank {self.rank} of {self.nranks} on {self.device}"]
        if self.nnodes > 1:
            parts.append(f"node {self.node} of {self.nnodes}")
        if state.config.tag:
            parts.append(f"tag {state.config.tag!r}")
        if state.closed:
            parts.append("closed")
        elif state.broken is not None:
            parts.append(f"broken by {type(state.broken).__name__}")
        return f"<ringcoll.Communicator {', '.join(parts)}>"

    if not TYPE_CHECKING:  # for a type checker it would make every name legal

        def __getattr__(self, name: str) -> Any:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_"):
                public = {n for n in (*dir(type(self)), *_OWN) if not n.startswith("_")}
                message += _hint(name, public)
            # With a name, and no object: Python would add a suggestion of its own.
            raise AttributeError(message, name=name, obj=None)


class _Unmade(Communicator):
    """What split and shrink return inside a group, at whose end it becomes a communicator."""

    if not TYPE_CHECKING:

        def __getattribute__(self, name: str) -> Any:
            if name.startswith("__"):
                return super().__getattribute__(name)
            # What has a private name comes from a call that was given the communicator.
            raise _not_made("use" if name.startswith("_") else name)

    def __enter__(self) -> NoReturn:
        raise _not_made("with")

    def __repr__(self) -> str:
        return "<ringcoll.Communicator, not made before its group ends>"


def _not_made(what: str) -> UsageError:
    return UsageError(
        f"{what} of a communicator that is not made yet: the group() around its split or shrink "
        f"has not ended; use it after that"
    )


_OWN = ("rank", "nranks", "local_rank", "node", "nnodes", "device", "xp")
"""The public attributes that the constructor sets."""

_NAMES_ELSEWHERE = {
    "bcast": "broadcast",
    "size": "nranks",
    "getsize": "nranks",
    "worldsize": "nranks",
    "getrank": "rank",
    "free": "close",
    "finalize": "close",
    "destroy": "close",
    "stop": "close",
    "reducescatterblock": "reduce_scatter",
    "reducescattertensor": "reduce_scatter",
    "allgatherintotensor": "all_gather",
    "alltoallsingle": "all_to_all",
}
"""Names of MPI, NCCL and torch, lower case and without underscores, and the names here."""


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _hint(name: str, names: Iterable[str]) -> str:
    """The end of a message: the name that is nearest to ``name``; "" if none is near."""
    known = {_plain(own): own for own in names}
    plain = _plain(name)
    found = known.get(plain) or _NAMES_ELSEWHERE.get(plain)
    later = None if found else known.get(plain.removeprefix("i")) or _NAMES_ELSEWHERE.get(plain[1:])
    if plain in ("iprobe", "improbe"):
        return "; did you mean 'probe' with wait=False?"
    if found:
        return f"; did you mean {found!r}?"
    if later and plain.startswith("i"):  # MPI's Iallreduce, torch's isend
        return f"; did you mean {later!r} with async_op=True?"
    near = nearest(plain, known, 0.75)
    return f"; did you mean {known[near]!r}?" if near else ""


def _calls() -> Iterator[FunctionType]:
    """What users call: a program that torch compiles may do so."""
    for kind in (*Communicator.__mro__, Work, *Work.__subclasses__()):
        for name, found in vars(kind).items():
            if isinstance(found, FunctionType) and not name.startswith("_"):
                yield found
