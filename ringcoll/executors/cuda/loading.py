"""By which kernel a call runs, and when kernels are loaded.

The driver loads a kernel only once all work in flight on the device has ended, and holds back the
launches of other threads meanwhile. Another communicator's call in flight may wait for a peer that
waits for this very call. So a kernel is loaded only while no call of another communicator can be
running; a call that cannot wait for that runs by a generic kernel, which was loaded when the
communicator was made, and by its own at a later launch that finds the others idle. So does a first
call whose own kernel NVRTC compiles for too long. Calls of the same communicator have one order on
all ranks: waiting for them is safe.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import cache
from threading import Lock
from typing import Any, Protocol

from ringcoll import log
from ringcoll.cuda.device import Device
from ringcoll.cuda.streams import outside_capture, waiting_ends_capture
from ringcoll.errors import DeadlineError, LaunchRefused, MachineError
from ringcoll.executors.cuda.background import cores
from ringcoll.executors.cuda.compile import advice
from ringcoll.executors.cuda.copy_gates import gate_text
from ringcoll.executors.cuda.generic import generic_body, generic_texts
from ringcoll.executors.cuda.loader import Launchable, Loader
from ringcoll.executors.cuda.params import Body
from ringcoll.executors.cuda.point_to_point import standard_pairs_text
from ringcoll.executors.cuda.stream_order import StreamOrder, others_idle
from ringcoll.fabric import Fabric

_log = log.logger()

_open: weakref.WeakSet[KernelLoading] = weakref.WeakSet()
_pending: weakref.WeakSet[GenericLaunch] = weakref.WeakSet()
_lock = Lock()  # held to change and to list either

_CORES = 4
"""For each process of the host: with fewer, kernels of other sizes than a call's would slow down
the one that it waits for."""

KERNEL_WAIT = 0.25
"""Seconds that a first call waits for its own kernel, unless ``init`` says otherwise. NVRTC takes
0.2 s for a kernel of LL or LL128, while others are compiled too, and 0.5 to 0.9 s for one of
Simple."""

_FIRST_SLEEP, _LONGEST_SLEEP = 20e-6, 1e-3  # seconds
_PATIENCE, _AGAIN = 0.25, 5.0  # seconds: see GenericLaunch._earlier_ended


class Launching(Protocol):
    """A launch without a stream."""

    @property
    def kernel(self) -> Launchable | None:
        """The kernel that is the whole launch from now on; None: there is more to do."""

    def launch(self, stream: int, *addresses: Any) -> None:
        """Enqueue on a stream of the current device."""


class KernelLoading:
    """Loads the kernels of one rank's communicator; ``order`` is that of its calls."""

    def __init__(
        self,
        loader: Loader,
        device: Device,
        fabric: Fabric,
        order: StreamOrder,
        *,
        alone: bool,
    ) -> None:
        """``alone``: no other rank of the communicator shares the device and the launches."""
        self.loader, self.device, self._fabric, self.order = loader, device, fabric, order
        self.capability = device.major, device.minor
        self.kernel_wait = math.inf
        """Seconds that a first call waits for its own kernel while a generic one is there."""
        self._spare = cores() >= _CORES * _processes(fabric)
        self._texts: tuple[str, ...] = ()
        if loader.generic and alone:
            nranks = fabric.nranks
            self._texts = (
                *generic_texts(nranks),
                standard_pairs_text(nranks),
                gate_text(nranks),
            )
            for text in self._texts:
                self._compile_ahead(text)

    def open(self) -> None:
        """Load the kernels that carry every call, behind all that is collective.

        A communicator that is alone on its device needs none. Those that are not compiled yet are
        left until there is a second one, which loads them for both before it makes a call.

        Raises:
            MachineError: NVRTC fails.
            DeadlineError: the calls of other communicators have not ended in time.

        """
        with _lock:
            here = [each for each in _open if each.device.ordinal == self.device.ordinal]
            _open.add(self)
        texts = dict.fromkeys(text for each in (*here, self) for text in each._texts)
        missing = [text for text in texts if not self._has(text)]
        if not here:
            missing = [text for text in missing if self._stored(text)]
        missing = [text for text in missing if self._obtained(text, needed=bool(here))]
        if missing:
            self._await_others(
                self._fabric.timeout,
                f"init of a communicator on rank {self._fabric.rank}",
                "make it before calls that the ranks enqueue in different orders",
            )
        for text in missing:
            self._load(text)

    def close(self) -> None:
        """Forget the communicator: it makes no more calls."""
        with _lock:
            _open.discard(self)
            last = not _open
        if last and self._texts:
            self.loader.rest()

    def function(self, text: str, timeout: float, where: str, why: str = "", call: str = "") -> int:
        """The loaded function of a text; waits while calls of other communicators may run.

        ``call`` says in the record of a compilation what needs the kernel, by default ``where``.

        Raises:
            DeadlineError: they have not ended in time.

        """
        if not self._has(text):
            self.loader.compile(text, self.capability, call or where)
            remedy = "make a first call of this kind, and synchronize, before such calls"
            self._await_others(timeout, where, why + remedy)
            self._await_own()
        return self._load(text)

    def launch(
        self,
        body: Body,
        made: Callable[[Body, int], Any],
        timeout: float,
        where: str,
        call: str = "",
        others: Callable[[], Iterable[str]] | None = None,
    ) -> Launching:
        """The launch of a call, ``made`` from text and words and their function.

        ``call`` says in the record of a compilation what needs the kernel. Where it is compiled, so
        are those of the ``others``, calls of its kind that are likely to follow, meanwhile.
        """
        why, call = "", call or where
        if others is not None and self._spare and self._compiles(body.text):
            self.loader.compile_ahead(body.text, self.capability, call)  # before the others
            for other in others():
                self.loader.compile_ahead(other, self.capability, f"another size than {call}")
        if self._texts and not self._has(body.text):
            made_for_it = self._available(body.text)
            if made_for_it and others_idle(self.order):
                generic = self._sooner(body, call)
                if generic is not None and others_idle(self.order):
                    self._await_own()
                    slower = made(generic, self._load(generic.text))
                    return GenericLaunch(self, slower, body, made, captured=False)
                try:
                    self.loader.compile(body.text, self.capability, call)
                except MachineError:
                    made_for_it = self._available(body.text)  # a damaged archive no longer has it
                    if made_for_it:
                        raise
            # Other threads may have made calls meanwhile.
            if not made_for_it or not others_idle(self.order):
                generic = generic_body(body, self._fabric.nranks)
                if generic is None:
                    why = "no generic kernel carries it: "
                elif not self._has(generic.text):
                    why = "its generic kernel is not loaded: "
                else:
                    if not made_for_it:
                        _warn_without_compiler()
                    self.loader.compile_ahead(body.text, self.capability, call)
                    return GenericLaunch(self, made(generic, self._load(generic.text)), body, made)
        found: Launching = made(body, self.function(body.text, timeout, where, why, call))
        return found

    def _sooner(self, body: Body, call: str) -> Body | None:
        """The call by a generic kernel that is compiled, if its own takes too long, else None.

        One thread may launch for several ranks of a process: they wait for their own.
        """
        if self.kernel_wait == math.inf or self._fabric.threads or not self._compiles(body.text):
            return None
        generic = generic_body(body, self._fabric.nranks)
        if generic is None:
            return None
        own = self.loader.compile_next(body.text, self.capability, call)
        other = self._compile_ahead(generic.text)
        wait((own,), self.kernel_wait)
        if not own.done():
            wait((own, other), return_when=FIRST_COMPLETED)
        made = own.done() or other.cancelled() or other.exception() is not None
        return None if made else generic

    def _await_others(self, timeout: float, where: str, remedy: str) -> None:
        """Wait on the host until no call of another communicator can be running."""
        deadline, pause = time.monotonic() + timeout, _FIRST_SLEEP
        while not others_idle(self.order):
            self._fabric.check()
            if time.monotonic() >= deadline:
                raise DeadlineError(
                    f"{where}: waited {timeout:g} s to load a kernel, which {self.device} does "
                    f"only when the calls of other communicators have ended, and one of these may "
                    f"wait for this call; {remedy}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SLEEP)

    def _has(self, text: str) -> bool:
        return self.loader.has(text, self.device.ordinal)

    def _stored(self, text: str) -> bool:
        return self.loader.stored(text, self.capability)

    def _obtained(self, text: str, *, needed: bool) -> bool:
        """Compile a kernel; False without NVRTC where a damaged archive had it, unless needed."""
        try:
            self._compile_ahead(text).result()
        except MachineError:
            if needed or self._available(text):
                raise
            return False
        return True

    def _available(self, text: str) -> bool:
        return self.loader.available(text, self.capability)

    def _compile_ahead(self, text: str) -> Future[bytes]:
        """Compile a kernel that is loaded before the first call."""
        call = f"init of a communicator of {self._fabric.nranks} ranks"
        return self.loader.compile_ahead(text, self.capability, call)

    def _compiles(self, text: str) -> bool:
        """Whether a kernel must be compiled, and can be."""
        return not (self._has(text) or self._stored(text)) and self._available(text)

    def compile(self, text: str) -> None:
        """Wait until a kernel is compiled."""
        self.loader.compile_next(text, self.capability).result()

    def _compiled(self, text: str) -> bool:
        found = self.loader.compile_ahead(text, self.capability)
        return found.done() and not found.cancelled() and found.exception() is None

    def _load(self, text: str) -> int:
        return self.loader.function(text, self.device.ordinal, self.capability)

    def _await_own(self) -> None:
        """Wait here for what loading would wait for in the driver, perhaps holding the GIL."""
        try:
            self.order.synchronize()
        except LaunchRefused:  # its stream is being captured: it runs nothing
            return


class GenericLaunch:
    """A launch by a generic kernel until the call's own is loaded.

    Unless it may be ``captured``, the communicator is alone: a capture, which keeps what it
    records, waits for the own kernel.
    """

    def __init__(
        self,
        loading: KernelLoading,
        generic: Launching,
        body: Body,
        made: Callable[[Body, int], Launching],
        *,
        captured: bool = True,
    ) -> None:
        self._loading, self._launch, self._body, self._made = loading, generic, body, made
        self._captured = captured
        self._waits, self._next = True, 0.0
        with _lock:
            _pending.add(self)

    @property
    def kernel(self) -> Launchable | None:
        """The call's own, once that is loaded."""
        return None if self._waits else self._launch.kernel

    @property
    def waits(self) -> bool:
        """Whether the generic kernel still runs."""
        return self._waits

    def launch(self, stream: int, *addresses: Any) -> None:
        """Enqueue on a stream of the current device."""
        if self._waits:
            self._load_if_idle(stream)
        self._launch.launch(stream, *addresses)

    def _load_if_idle(self, stream: int) -> None:
        """Load the call's own kernel, if that is compiled and no call is running."""
        order = self._loading.order
        if waiting_ends_capture(stream):
            if not self._captured and others_idle(order):
                self._loading.compile(self._body.text)
                with outside_capture():
                    self.load()
        elif self._compiled():
            # Own calls count, too: one thread may launch for all ranks.
            if self._earlier_ended() and others_idle(order):
                for each in _waiting_on(order.ordinal):
                    each.load()
            else:
                order.mark_calls()  # from the next on: this one is not launched yet

    def _earlier_ended(self) -> bool:
        """Whether the calls before have ended; an alone communicator waits a moment, now and then.

        Else a program that never lets the device idle would keep the generic kernel. Not for long:
        what the calls wait for may be another rank that waits for this thread.
        """
        order, now = self._loading.order, time.monotonic()
        if self._captured or now < self._next or not others_idle(order):
            return order.earlier_ended()
        self._next, pause = now + _AGAIN, _FIRST_SLEEP
        while not order.earlier_ended():
            if time.monotonic() > now + _PATIENCE:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SLEEP)
        return True

    def _compiled(self) -> bool:
        return self._loading._compiled(self._body.text)

    def load(self) -> None:
        """Load the call's own kernel, if it is compiled; no call may be running."""
        if self._waits and self._compiled():
            self._launch = self._made(self._body, self._loading._load(self._body.text))
            self._waits = False
            self._loading.order.watch(marking=False)
            with _lock:
                _pending.discard(self)


def _processes(fabric: Fabric) -> int:
    """How many processes of this host have ranks of a communicator."""
    if fabric.threads:
        return 1
    nodes = fabric.nodes
    return nodes.count(nodes[fabric.rank]) if nodes else fabric.nranks


@cache
def _warn_without_compiler() -> None:
    """Say once why calls are slow."""
    _log.warning(
        "a generic kernel, slower than their own, carries calls whose kernel is not in the "
        "package: NVRTC is missing here; %s",
        advice(),
    )


def _waiting_on(ordinal: int) -> list[GenericLaunch]:
    """The launches on a device that wait for their own kernels."""
    with _lock:
        return [each for each in _pending if each._loading.device.ordinal == ordinal]
