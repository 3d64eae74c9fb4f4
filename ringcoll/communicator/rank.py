"""The state of one rank of a communicator: memory, executors, errors and children."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

from ringcoll import log
from ringcoll.communicator.cpu.progress import Progress
from ringcoll.communicator.cpu.rank_calls import RankCalls
from ringcoll.communicator.failures import reason_of
from ringcoll.communicator.setup.children import pack_color, ranks_of_color, remaining
from ringcoll.communicator.setup.machine import agree_among, unknown
from ringcoll.communicator.topology import Topology
from ringcoll.communicator.tracebacks import install
from ringcoll.config import Config, Settings, resolve
from ringcoll.errors import MismatchError, RankLostError
from ringcoll.executors.cpu.executor import CpuExecutor
from ringcoll.executors.pace import Pace, pacer
from ringcoll.executors.point_to_point import Pairs
from ringcoll.executors.shared_state import MESSAGES, VECTOR
from ringcoll.fabric import Fabric
from ringcoll.symmetric.host import SymmetricMemory

SCRATCH_BYTES = 15 << 20
"""SCRATCH a rank; with the rest of the shared state it stays below the promised 16 MiB."""


install()  # before the first error that a program can get

T = TypeVar("T")


class RankState(RankCalls):
    """The state of one rank; ``ranks`` are the numbers that its ranks have in ``parent``."""

    def __init__(
        self,
        fabric: Fabric,
        config: Config,
        settings: Settings,
        *,
        parent: RankState | None = None,
        ranks: Sequence[int] = (),
        topology: Topology | None = None,
    ) -> None:
        super().__init__(fabric, config)
        self.settings = settings
        """Those of ``init``; of GPU ranks with the transport that they have agreed on."""
        self.topology = topology or unknown(self.on_gpu, "it has not been detected")
        self.lock = threading.RLock()
        self.symmetric: Any
        try:
            if parent is not None:
                above = parent.topology
                self.topology = agree_among(fabric, above, ranks, on_gpu=self.on_gpu)
            self._equip(parent, ranks)
        except BaseException as error:
            fabric.abort(reason_of(error), error=type(error))
            fabric.close()
            raise
        own = weakref.ref(self)
        fabric.busy = lambda: (state := own()) is not None and state.is_busy()
        self.debug = parent is not None and parent.debug

    on_gpu = False
    """Whether calls are enqueued on a stream instead of waited for."""

    @property
    def launches_on(self) -> tuple[int, object] | None:
        """The GPU on which calls are launched, and what the communicator's ranks on it share.

        None: no GPU, or ranks on several nodes.
        """
        return None

    def _equip(self, parent: RankState | None, ranks: Sequence[int]) -> None:
        """Memory and executors; collective."""
        above = None if parent is None else parent.symmetric
        pace = None if self.settings.pace is None else Pace(*self.settings.pace)
        self.symmetric = SymmetricMemory(self.fabric, above, ranks)
        make = None if pace is None else (lambda shared: pacer(pace, shared))
        host = CpuExecutor(
            self.fabric,
            self.symmetric,
            scratch=SCRATCH_BYTES,
            pacer=make,
            machine=self.topology.machine,
        )
        self._host, self.executor = host, host
        shared = self.fabric, host.shared_state, host.pacer, host.node_signals
        self.pairs = Pairs(*shared, context=VECTOR)
        self.progress = Progress(self, Pairs(*shared, context=MESSAGES))

    def _child(self, fabric: Fabric, ranks: Sequence[int], config: Config) -> RankState:
        """The state of this rank in a communicator of some of these ranks."""
        return RankState(fabric, config, self.settings, parent=self, ranks=ranks)

    # -- children ----------------------------------------------------------------------------

    def color(self, color: int | None, key: int, config: Config | None) -> tuple[bytes, Config]:
        """What this rank says in a split, and the options of its part."""
        where = self.fabric.rank
        options = resolve(self.config, config, {}, f"split on rank {where}")
        return pack_color(color, key, where, options), options

    def split(self, color: int | None, key: int, config: Config | None) -> RankState | None:
        """This rank's part of a split; collective."""
        self.usable()
        rank = self.fabric.rank
        own, options = self.color(color, key, config)
        colors = self.together(lambda: self.fabric.allgather(own, what="split"))
        if color is None:
            return None
        members = ranks_of_color(colors, rank)
        fabric = self.fabric.subset(members, what=f"split, color {int(color)}")
        if config is not None and config.timeout is not None:
            fabric.timeout = config.timeout
        child = self._child(fabric, members, options)
        if members == list(range(self.fabric.nranks)) and self.table is not None:
            child.use_table(self.table)
        return child

    def remaining(self, exclude: Sequence[int]) -> list[int]:
        """The ranks that are neither lost nor excluded."""
        fabric = self.fabric
        return remaining(exclude, set(fabric.lost()), fabric.rank, fabric.nranks)

    def shrink(self, exclude: Sequence[int]) -> RankState:
        """A communicator of the remaining ranks; collective among these."""
        rank, lost = self.fabric.rank, set(self.fabric.lost())
        members = remaining(exclude, lost, rank, self.fabric.nranks)
        self.fabric.drop(lost)
        try:
            fabric = self.fabric.subset(members, what="shrink")
            child = self._child(fabric, members, self.config)
            try:
                fabric.conclude("shrink")
            except BaseException:  # KeyboardInterrupt and MemoryError too
                child.close()
                raise
        except RankLostError:
            if lost.issuperset(self.fabric.lost()):
                raise
            return self.shrink(exclude)  # without the rank that was lost meanwhile
        self.settled = self.settled or self.broken is not None or bool(lost)
        return child

    # -- the end -----------------------------------------------------------------------------

    def stop(self) -> None:
        """Wait for the asynchronous calls; the caller holds no lock that they take."""
        if self.progress is not None and not self.inherited:
            self.progress.close(self)
            intact = self.broken is None and not (self.closed or self.settled)
            if intact and (left := self.progress.pairs.unreceived()):
                log.write(
                    log.WARNING, "%s: closed; no recv took the messages %s", self, ", ".join(left)
                )
        if self._worker is not None:
            self._worker.close()

    def forked(self) -> None:
        """Mark the state as inherited by a forked process, which has no threads of this one."""
        self.inherited, self._worker, self.progress = True, None, None

    def leave(self) -> None:
        """Declare that this rank makes no more calls; its memory stays until :meth:`close`."""
        self.fabric.leave()

    def close(self) -> None:
        """Free all resources; not collective."""
        if self.closed:
            return
        try:
            if self.broken is None and not self.inherited:
                self.executor.compare_last()
        except MismatchError as error:
            self.fail(error)
            raise
        finally:
            self.closed = True
            self.broken = None  # its frames refer to the call's arrays
            # The last one first; each is closed whatever the others raise.
            with contextlib.ExitStack() as rest:
                rest.callback(self.fabric.close)
                rest.callback(self.symmetric.close)
                rest.callback(self.executor.close)
                self.fabric.leave()
