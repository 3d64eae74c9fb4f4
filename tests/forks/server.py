"""Forks programs whose imports it has made: the words are a descriptor, room, and the modules.

It listens at the descriptor for proxies, see ``proxy.py``, has one thread, holds nothing of
ringcoll but its modules, and ends with its standard input. A child has the descriptors, the
environment, the folder, the words and the ignored signals of its proxy, and it ends as an
interpreter does: what has been loaded is all that it has of this process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import select
import shutil
import signal
import socket
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OWN_PATH = os.environ["PYTHONPATH"].split(os.pathsep)
MOST = 200  # descriptors of a proxy


@dataclass(frozen=True)
class Request:
    """What a proxy has: ``descriptors`` by its own numbers."""

    folder: bytes
    descriptors: dict[int, int]
    ignored: list[int]
    words: list[str]
    environment: dict[bytes, bytes]


def received(link: socket.socket) -> Request:
    """All that a proxy sends before it waits."""
    header, descriptors, *_ = socket.recv_fds(link, 8, MOST)
    size, text = int.from_bytes(header, sys.byteorder), b""
    while len(text) < size and (part := link.recv(size - len(text))):
        text += part
    if not header or len(text) < size:
        raise EOFError
    folder, numbers, ignored, count, *rest = text.split(b"\0")
    variables = (variable.partition(b"=")[::2] for variable in rest[int(count) :])
    return Request(
        folder,
        dict(zip(map(int, numbers.split()), descriptors, strict=True)),
        [*map(int, ignored.split())],
        [*map(os.fsdecode, rest[: int(count)])],
        dict(variables),
    )


class Server:
    """The children that run, each with the link of its proxy."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._children: dict[int, socket.socket] = {}
        self._ended, ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(ends)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> Request | None:
        """Fork, and return in a child what it is to run; None: the end of standard input."""
        while True:
            links = {link: pid for pid, link in self._children.items() if link.fileno() >= 0}
            watched: list[Any] = [0, self._ended, self._listener, *links]
            ready = select.select(watched, [], [])[0]
            if 0 in ready:
                for pid in self._children:
                    os.kill(pid, signal.SIGKILL)
                return None
            for link in links.keys() & {*ready}:
                self._hear(link, links[link])
            if self._ended in ready:
                os.read(self._ended, 1 << 12)
                self._collect()
            if self._listener in ready and (request := self._fork()) is not None:
                return request

    def _hear(self, link: socket.socket, pid: int) -> None:
        """Signals of a proxy, or its end."""
        try:
            numbers = link.recv(64)
        except ConnectionResetError:
            numbers = b""
        for number in numbers or [signal.SIGKILL]:
            os.kill(pid, number)
        if not numbers:
            link.close()

    def _collect(self) -> None:
        for pid, link in [*self._children.items()]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._children[pid]
                code = os.waitstatus_to_exitcode(status).to_bytes(4, sys.byteorder, signed=True)
                if link.fileno() >= 0:
                    with contextlib.suppress(OSError):  # the proxy was killed too
                        link.send(code)
                    link.close()

    def _fork(self) -> Request | None:
        link, _ = self._listener.accept()
        link.settimeout(10)  # one that is stopped holds up nobody for long
        try:
            request = received(link)
        except (EOFError, OSError, ValueError):
            link.close()  # killed in the middle
            return None
        link.settimeout(None)
        pid = os.fork()
        if not pid:
            for held in (self._listener, link, *self._children.values()):
                held.detach()
            return request
        for descriptor in request.descriptors.values():
            os.close(descriptor)
        self._children[pid] = link
        return None


def become(request: Request) -> None:
    """Leave nothing of the process that has forked this one, but modules."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in request.ignored:
        signal.signal(number, signal.SIG_IGN)
    os.setsid()
    own = (int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    above = 1 + max(*own, *request.descriptors)
    moved: dict[int, int] = {}
    for number, descriptor in request.descriptors.items():
        moved[number] = os.dup2(descriptor, above + len(moved))
    os.closerange(3, above)
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request.folder)
    os.environ.clear()
    os.environb.update(request.environment)
    # The process that starts ranks over sockets is not this one's parent, but its proxy's.
    if started := os.environ.get("_RINGCOLL_SOCKET"):
        os.environ["_RINGCOLL_SOCKET"] = f"{started.rpartition(' ')[0]} {os.getppid()}"
    path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[1 : 1 + len(OWN_PATH)] = path
    gc.enable()
    atexit.register(gc.unfreeze)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def show(words: list[str]) -> None:
    """Let the process and those that it forks be found by these words, as if it had been started.

    The words of this process give the room; a program's last ones are cut where that is too little.
    """
    fields = Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    shown = b"\0".join(map(os.fsencode, [sys.executable, *words]))[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def run(words: list[str]) -> None:
    """``-W error`` and a file or ``-c`` with a program, or ``-m ringcoll``; and their words."""
    if words[:2] == ["-m", "ringcoll"]:
        warnings.resetwarnings()
        from ringcoll.cli import main

        sys.argv = ["ringcoll", *words[2:]]
        sys.exit(main())
    name, words = words[2], words[3:]
    # Its own, which the interpreter clears at its end.
    namespace = sys.modules["__main__"].__dict__
    del namespace["main"]
    if name == "-c":
        sys.argv, sys.path[0] = ["-c", *words[1:]], ""
        program = compile(words[0], "<string>", "exec", dont_inherit=True)
    else:
        sys.argv, sys.path[0] = [name, *words], str(Path(name).resolve().parent)
        program = compile(Path(name).read_bytes(), name, "exec", dont_inherit=True)
        namespace["__file__"] = name
    exec(program, namespace)  # noqa: S102


def load(modules: list[str]) -> None:
    """What programs would import; of MPI the libraries alone, which are not initialized by that."""
    for name in modules:
        importlib.import_module(name)
    if importlib.util.find_spec("mpi4py") and (found := importlib.util.find_spec("mpi4py.MPI")):
        ctypes.CDLL(found.origin)
    gc.collect()
    gc.freeze()
    gc.disable()


def main() -> None:
    load(sys.argv[3:])
    tasks = len([*Path("/proc/self/task").iterdir()])
    if tasks > 1:
        raise RuntimeError(f"{tasks} threads: a child would have one of them")
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        path = Path(listener.getsockname())
        request = Server(listener).serve()
        if request is None:
            shutil.rmtree(path.parent, ignore_errors=True)
            os._exit(0)
    become(request)
    show(request.words)
    run(request.words)
