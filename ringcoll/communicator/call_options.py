"""The keywords that calls take, for type checkers and editors; at run time nobody reads this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Required

    from ringcoll.config import Config
    from ringcoll.dtypes import Accumulate
    from ringcoll.options import AlgorithmName, Engine, ProtocolName
    from ringcoll.plan import Plan


class CallOptions(TypedDict, total=False):
    """What every call takes by keyword, beside ``async_op``.

    ``async_op=True`` returns a :class:`ringcoll.Work` at once, whose ``wait()`` ends the call. The
    others, left out or None, are those of the communicator:

    - ``stream``: the CUDA stream of the call; else the current one of the array's library.
    - ``config``: a :class:`ringcoll.Config`, which holds the options below it.
    - ``timeout``: seconds that a wait may take.
    - ``algorithm``, ``protocol``, ``engine``, ``channels``, ``slices``, ``max_sms``: what the tuner
      chooses otherwise.
    - ``deterministic``, ``accumulate``: how sums are rounded.
    - ``verify``: whether the plan is proven before its first use.
    - ``tag``: a name that log lines and errors show.

    :class:`ringcoll.Config` says which values each of these has. For functions of yours that pass
    options on: ``def mean(comm, x, **how: Unpack[ringcoll.CallOptions])``.
    """

    stream: object
    config: Config | None
    algorithm: AlgorithmName | Callable[..., Plan] | None
    protocol: ProtocolName | None
    engine: Engine | None
    channels: int | None
    slices: int | None
    max_sms: int | None
    timeout: float | None
    deterministic: bool | None
    accumulate: Accumulate | None
    verify: bool | None
    tag: str | None


class Blocking(CallOptions, total=False):
    """Of a call that returns None."""

    async_op: Literal[False]


class Asynchronous(CallOptions, total=False):
    """Of a call that returns a :class:`ringcoll.Work`."""

    async_op: Required[Literal[True]]


class Either(CallOptions, total=False):
    """Of a call of which only the program knows, when it runs, whether it returns one."""

    async_op: Required[bool]
