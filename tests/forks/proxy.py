"""Stands for a program that is forked elsewhere: ``python -IS proxy.py SOCKET WORD ...``.

The process at the socket gets this one's descriptors, environment and words, and forks a process
that takes them over. This one passes on signals, and ends as that process has ended. It loads next
to nothing: that is why it starts in a tenth of the time.
"""

import _signal  # type: ignore[import-not-found]  # half of signal's work is its names
import _socket
import os
import sys

IGNORED = [n for n in range(1, 65) if _signal.getsignal(n) == _signal.SIG_IGN]
PASSED_ON = {
    getattr(_signal, name)
    for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGTERM")
}


def inherited() -> list[int]:
    """The descriptors that a program would have here; Python's own are not passed to it."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - pathlib takes as long as all the rest
        number = int(name)
        there = os.path.exists(f"/proc/self/fd/{name}")  # noqa: PTH110 - the listing's own is gone
        if there and (number < 3 or os.get_inheritable(number)):
            found.append(number)
    return found


def main() -> None:
    numbers = inherited()
    link = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    link.connect(sys.argv[1])
    lists = numbers, IGNORED
    fields = [
        os.getcwdb(),  # noqa: PTH109 - bytes
        *(" ".join(map(str, each)).encode() for each in lists),
        str(len(sys.argv) - 2).encode(),
        *map(os.fsencode, sys.argv[2:]),
        *(name + b"=" + value for name, value in os.environb.items()),
    ]
    request = b"\0".join(fields)
    rights = b"".join(number.to_bytes(4, sys.byteorder) for number in numbers)
    # The program may run, and its starter send a signal, before the next lines do.
    _signal.pthread_sigmask(_signal.SIG_BLOCK, PASSED_ON)
    link.sendmsg(
        [len(request).to_bytes(8, sys.byteorder)],
        [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)],
    )
    link.sendall(request)
    for number in PASSED_ON.difference(IGNORED):
        _signal.signal(number, lambda number, _: link.send(bytes([number])))
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, PASSED_ON)
    # Whoever has the other end of one of these waits for the program, not for this process.
    for number in numbers:
        if number != 2:
            os.close(number)
    answer = link.recv(4)
    if len(answer) < 4:
        os.write(2, b"the process that forks has ended\n")
        os._exit(1)
    status = int.from_bytes(answer, sys.byteorder, signed=True)
    if status < 0:
        if -status not in (_signal.SIGKILL, _signal.SIGSTOP):
            _signal.signal(-status, _signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
