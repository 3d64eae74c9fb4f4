"""The options of calls and the settings of ``init``: what they may be and which of them wins.

A call's options win over the communicator's, these over the environment's ``RINGCOLL_*``, these
over the defaults. A name or a value that does not exist is an error, never ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ringcoll.collectives import COLLECTIVES
from ringcoll.dtypes import Accumulate
from ringcoll.errors import ArgumentError, ArgumentTypeError, UsageError, nearest
from ringcoll.options import OPTION_TYPES, AlgorithmName, Engine, ProtocolName, check_fields

if TYPE_CHECKING:
    from typing_extensions import Self

_T = TypeVar("_T")

_KEYWORDS = "stream", "async_op", "config"
"""What every call takes beside its options."""

_OF_MESSAGES = {
    "send": ("buf", "dest"),
    "recv": ("buf", "source", "exact"),
    "sendrecv": ("sendbuf", "dest", "recvbuf", "source", "exact"),
}
"""The arguments of the calls that are no collectives."""

_COUNTS = {
    "all_to_all_v": ("sendcounts", "recvcounts", "sdispls", "rdispls"),
    "reduce_scatter_v": ("counts",),
}
"""The counts of the v-variants that have other ones than ``counts`` and ``displs``."""

_ELSEWHERE = {
    "src": ("root", "source"),
    "dst": ("root", "dest"),
    "peer": ("dest", "source"),
    "input": ("sendbuf", "buf"),
    "tensor": ("sendbuf", "buf"),
    "out": ("recvbuf",),
    "output": ("recvbuf",),
    "nonblocking": ("async_op",),
}
"""Names that arguments have in torch, NCCL or numpy, and here."""

_PREFIX = "RINGCOLL_"
_OF_ID = ("RINGCOLL_ID", "RINGCOLL_RANK", "RINGCOLL_NRANKS")  # which world: ringcoll.bootstrap.tcp


@dataclass(frozen=True, slots=True, repr=False)
class Config:
    """Options of a call, or of all calls of a communicator; None inherits.

    Args:
        algorithm: a name of :data:`ringcoll.algorithms.ALGORITHMS`, or a function that returns a
            :class:`ringcoll.plan.Plan`. A name given for all calls of a communicator holds where a
            collective has it.
        protocol: "LL", "LL128" or "Simple".
        engine: what moves data: "sm" or "copy" on GPUs, "host" on CPUs. "copy" lets copy engines
            make a plan's copies, between all ranks' symmetric arrays at the same place or staged;
            passed at both ends, it also lets one send a message of 32 MiB and more in a
            communicator of two ranks.
        channels: how many rings or trees work in parallel.
        slices: into how many slices a chunk is cut for pipelining.
        max_sms: how many thread blocks of a GPU a rank's call may occupy, the same on all ranks;
            each lane of an algorithm, each send and each receive has one even beyond that. As many
            as the GPU has multiprocessors are no limit.
        timeout: seconds that a wait may take; ``math.inf`` waits for ever.
        deterministic: a result depends on the contributions alone, as a left fold in rank order.
        accumulate: "wide" keeps partial results in the accumulator's type and rounds once,
            "dtype" rounds at every hop.
        verify: True proves a built-in plan before its first use too; a user's always is.
        tag: a name for the call or the communicator, which log lines and errors of its calls show.
            No message is matched by it; two ends of a message on CPU ranks may not differ in it.

    Raises:
        ArgumentError: a value that the option does not have; the message lists them.
        ArgumentTypeError: a value of the wrong type.

    Example:
        >>> rings = ringcoll.Config(algorithm="ring", slices=4)
        >>> rings
        Config(algorithm='ring', slices=4)
        >>> def work(comm):
        ...     x = np.ones(2)
        ...     comm.all_reduce(x, config=rings)
        ...     return x.tolist()
        >>> ringcoll.spawn(work, 2, deterministic=False)
        [[2.0, 2.0], [2.0, 2.0]]

    """

    algorithm: AlgorithmName | Callable[..., Any] | None = None
    protocol: ProtocolName | None = None
    engine: Engine | None = None
    channels: int | None = None
    slices: int | None = None
    max_sms: int | None = None
    timeout: float | None = None
    deterministic: bool | None = None
    accumulate: Accumulate | None = None
    verify: bool | None = None
    tag: str | None = None

    def __new__(cls, *_values: object, **named: object) -> Self:
        """Refuse an option that there is not, before Python does, in the words of a call."""
        _refuse_unknown("Config", named, OPTIONS)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self)
        if callable(self.algorithm) and self.verify is False:
            raise ArgumentError(
                "verify=False with a function as algorithm: a plan that nobody has proven does "
                "not run; leave verify out"
            )

    def __repr__(self) -> str:
        said = ((name, getattr(self, name)) for name in OPTIONS)
        return f"Config({', '.join(f'{n}={_shown(v)}' for n, v in said if v is not None)})"

    def agreed(self) -> bytes:
        """The version and the options that ranks must share, as JSON."""
        from ringcoll.version import __version__

        shared = {name: getattr(self, name) for name in _AGREED if getattr(self, name) is not None}
        if callable(self.algorithm):
            shared["algorithm"] = getattr(self.algorithm, "__qualname__", "a user's function")
        return json.dumps({"version": __version__, **shared}, sort_keys=True).encode()


# What the ranks run depends on these; the others are each rank's own business.
_AGREED = (
    "algorithm",
    "protocol",
    "engine",
    "channels",
    "slices",
    "max_sms",
    "deterministic",
    "accumulate",
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What only ``init`` takes; None leaves it to the library.

    Args:
        node: name of this rank's node, where it is not the host's.
        topo_file: path of a topology file in NCCL's XML format. What is detected of GPU ranks
            completes it; CPU ranks play its GPUs, rank i the i-th.
        device: "cpu", "cuda" or "auto".
        transport: how GPU ranks reach each other: "p2p", or "host" for pinned host memory; left
            out, "p2p" where every pair of devices can.
        cache_dir: where detected machines, measurements and compiled kernels are kept.
        debug: True logs on logger ``ringcoll``, at level DEBUG, what the ranks agreed on and what
            was chosen for each new call, and shows it on stderr where the program has configured no
            logging; "trace" keeps a record of every executed row, for tests of the library, and
            makes calls slow.
        pace: what links carry: bytes/s, or (bytes/s, seconds a message). Each rank has one egress
            and one ingress port of it on a switch; a third word "pairs" gives each ordered pair of
            ranks a link of its own.
        register: whether GPU ranks register memory automatically: the other ranks map allocations
            that calls of 1 MiB and more use for the second time by protocol Simple, where they can;
            left out, they do.
        kernel_wait: seconds that a first call of GPU ranks waits while its kernel is compiled. Then
            a generic, slower kernel runs the call, if there is one, until its own is loaded. Left
            out, 0.25; benchmarks wait for ever (``math.inf``).
        tuning: path of a table that ``ringcoll tune`` has written, or "off"; left out, the one in
            the user's cache folder for this device and number of ranks. All ranks take rank 0's.
        compiled: whether calls that come again are made by the package's compiled parts: small ones
            of CPU ranks, and those of GPU ranks that are one kernel; left out, they are where these
            have been built.

    """

    node: str | None = None
    topo_file: str | None = None
    device: str | None = None
    transport: Literal["p2p", "host"] | None = None
    cache_dir: str | None = None
    debug: bool | str | None = None
    pace: tuple[float, float] | tuple[float, float, str] | None = None
    register: bool | None = None
    kernel_wait: float | None = None
    tuning: str | None = None
    compiled: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def agreed(self) -> bytes:
        """The settings that ranks must share, as JSON."""
        shared = ((name, getattr(self, name)) for name in SETTINGS if name not in _OWN)
        given = {name: value for name, value in shared if value is not None}
        return json.dumps(given, sort_keys=True).encode()


OPTIONS = tuple(field.name for field in fields(Config))
SETTINGS = tuple(field.name for field in fields(Settings))
_OWN = ("node", "cache_dir", "debug", "kernel_wait", "compiled")  # each rank's own business


def from_options(where: str, /, **options: Any) -> Config:
    """A configuration from the keywords of a call."""
    _refuse_unknown(where, options, OPTIONS)
    return _named(where, lambda: Config(**options))


def merge(base: Config, override: Config) -> Config:
    """``override`` where it says something, else ``base``."""
    said = {name: getattr(override, name) for name in OPTIONS}
    return Config(
        **{name: getattr(base, name) if value is None else value for name, value in said.items()}
    )


def resolve(base: Config, config: Config | None, options: Mapping[str, Any], where: str) -> Config:
    """The options of one call: its keywords, then its ``config``, then the communicator's."""
    if config is None and not options:
        return base
    if config is not None:
        if not isinstance(config, Config):
            raise ArgumentTypeError(
                f"{where}: config is a {type(config).__name__}; pass a ringcoll.Config, or its "
                f"fields as keywords"
            )
        base = _named(where, lambda: merge(base, config))
    if not options:
        return base
    override = from_options(where, **options)
    return _named(where, lambda: merge(base, override))


def from_environment(environ: Mapping[str, str]) -> tuple[Config, Settings]:
    """Options and settings from ``RINGCOLL_SLICES`` and so on; an empty value is none."""
    legal = [*(_PREFIX + name.upper() for name in (*OPTIONS, *SETTINGS)), *_OF_ID]
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(_PREFIX) or not text or variable in _OF_ID:
            continue
        if variable not in legal:
            raise ArgumentError(
                f"environment variable {variable}: there is no such option; "
                f"{_nearest(variable, legal)}"
            )
        name = variable.removeprefix(_PREFIX).lower()
        kind = OPTION_TYPES[name]
        try:
            values[name] = kind.check(kind.read(text))
        except (TypeError, ValueError):
            raise ArgumentError(
                f"environment variable {variable}={text!r}: wanted {kind.legal}{kind.hint(text)}"
            ) from None
    return (
        Config(**{name: value for name, value in values.items() if name in OPTIONS}),
        Settings(**{name: value for name, value in values.items() if name in SETTINGS}),
    )


def starting(
    config: Config | None, timeout: float | None, device: str, options: Mapping[str, Any]
) -> tuple[Config, Settings]:
    """What ``init`` starts with: its keywords, its ``config``, the environment, the defaults."""
    _refuse_unknown("init", options, (*OPTIONS, *SETTINGS))
    given = {name: value for name, value in options.items() if name in OPTIONS}
    if timeout is not None:
        given["timeout"] = timeout
    own = {name: value for name, value in options.items() if name in SETTINGS}
    if device != "auto":
        own["device"] = device
    # Each process has its own environment, and nobody knows its rank yet.
    process = f"init in process {os.getpid()} on host {os.uname().nodename}"
    inherited, environment = _named(process, lambda: from_environment(os.environ))
    settings = _named("init", lambda: Settings(**own))
    taken = {name: getattr(settings, name) for name in SETTINGS}
    for name, value in taken.items():
        taken[name] = getattr(environment, name) if value is None else value
    return (
        resolve(merge(DEFAULTS, inherited), config, given, "init"),
        Settings(**{**taken, "device": taken["device"] or "auto"}),
    )


def _shown(value: object) -> str:
    return getattr(value, "__qualname__", "a function") if callable(value) else repr(value)


def _named(where: str, make: Callable[[], _T]) -> _T:
    """What ``make`` returns; a refusal gets the call's name."""
    try:
        return make()
    except UsageError as error:
        raise type(error)(f"{where}: {error}") from None


def _refuse_unknown(where: str, options: Iterable[str], legal: tuple[str, ...]) -> None:
    for name in options:
        if name not in legal:
            names = *_arguments(where.partition(" ")[0]), *legal
            raise ArgumentTypeError(
                f"{where}: there is no option {name!r}; {_nearest(name, names)}"
            )


def _arguments(call: str) -> tuple[str, ...]:
    """What a call takes beside its options; nothing where it is none."""
    own = _OF_MESSAGES.get(call)
    if own is None:
        kind = COLLECTIVES.get(call.removesuffix("_v"))
        if kind is None:
            return ()
        buffers = () if call == "barrier" else ("sendbuf", "recvbuf")
        counts = _COUNTS.get(call, ("counts", "displs")) if call.endswith("_v") else ()
        own = *buffers, *counts, *("op",) * kind.reduces, *("root",) * kind.has_root
    return *own, *_KEYWORDS


def _nearest(name: str, legal: Iterable[str]) -> str:
    names = list(legal)
    meant = (word for word in _ELSEWHERE.get(name.lower(), ()) if word in names)
    near = next(meant, None) or nearest(name, names)
    return f"did you mean {near!r}?" if near else f"it is one of {', '.join(names)}"


DEFAULTS = Config(timeout=60.0, deterministic=False, accumulate="wide")
"""What nobody sets; None is chosen for each call."""
