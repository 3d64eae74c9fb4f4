"""Generic kernels: one for each protocol and number of ranks carries every call.

Element type, operator and shapes of rows are values of the launch (``kernels/generic.cuh``). They
are slower than a kernel made for the call, but loaded when the communicator is made: loading waits
for all work in flight on the device, which may wait for this very call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from ringcoll.executors.cuda.ll import WORKERS
from ringcoll.executors.cuda.params import LARGEST, Body, launch_bytes
from ringcoll.executors.cuda.simple import RESIDENT, THREADS
from ringcoll.executors.cuda.source import elements_lines, kernel_text
from ringcoll.launch import PROTOCOLS


def generic_body(body: Body, nranks: int) -> Body | None:
    """The same call of one rank by a generic kernel; None: none carries it."""
    form = body.generic
    if form is None or len(body.words) > 1 or "RC_TRACE" in body.text:
        return None
    length, words = _words(nranks), body.words[0]
    if len(words) + len(form.shapes) > length:
        return None
    fill = (0,) * (length - len(words) - len(form.shapes))
    text = generic_text(form.lanes, nranks)
    return replace(
        body, text=text, words=((*words, *fill, *form.shapes),), programs=(form.elements,)
    )


def generic_texts(nranks: int) -> Iterator[str]:
    """The source texts of all protocols."""
    for protocol in PROTOCOLS.values():
        yield generic_text(protocol.lanes, nranks)


@cache
def generic_text(lanes: int, nranks: int) -> str:
    """The source text for so many ranks; ``lanes`` threads share a line, 0: protocol Simple."""
    constants = {"RANKS": nranks, "LOCAL": 1, "WORDS": _words(nranks)}
    if lanes:
        constants |= {"WHOLE": 0, "LANES": lanes}
    bounds = f"{WORKERS} + SYNC_THREADS" if lanes else f"{THREADS}, {RESIDENT}"
    return kernel_text(
        "generic_ll" if lanes else "generic_simple",
        constants,
        f"RC_KERNEL({bounds})",
        f"{'ll' if lanes else 'simple'}::run_generic<Text>(args, args.local[0]);",
        elements_lines(),
    )


def _words(nranks: int) -> int:
    """As many words as a launch can carry, a multiple of 16."""
    return (LARGEST - launch_bytes(nranks, 0, 1)) // 8 // 16 * 16
