"""nccl4py's constants, configurations and the unique id."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ringcoll import log
from ringcoll.bootstrap.tcp import unique_id
from ringcoll.dtypes import dtype_of
from ringcoll.errors import ArgumentError, ArgumentTypeError, MachineError, UsageError
from ringcoll.version import __version__

_log = log.logger()

NcclInvalid = UsageError
"""What nccl4py raises for an argument that is refused; ringcoll's error for that."""


class NcclDataType(IntEnum):
    """NCCL's numbers of element types."""

    INT8 = 0
    CHAR = 0
    UINT8 = 1
    INT32 = 2
    INT = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    HALF = 6
    FLOAT32 = 7
    FLOAT = 7
    FLOAT64 = 8
    DOUBLE = 8
    BFLOAT16 = 9
    FLOAT8E4M3 = 10
    FLOAT8E5M2 = 11

    @classmethod
    def _missing_(cls, value: object) -> NcclDataType | None:
        """By a numpy dtype, or what names one."""
        if isinstance(value, int):
            return None
        known = dtype_of(value).numpy
        for member in cls:
            if member.numpy_dtype == known:
                return member
        raise ArgumentTypeError(f"dtype={value!r} is none of NCCL's: {', '.join(cls.__members__)}")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The same type for numpy, or ml_dtypes' for numpy."""
        name = {"FLOAT8E4M3": "float8_e4m3fn", "FLOAT8E5M2": "float8_e5m2"}.get(self.name)
        return dtype_of(name or self.name.lower()).numpy

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.numpy_dtype.itemsize


class NcclRedOp(IntEnum):
    """NCCL's numbers of operators."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


class Result(IntEnum):
    """NCCL's results, as ``get_async_error`` has them."""

    Success = 0
    SystemError = 2
    InvalidUsage = 5
    RemoteError = 6


class CTAPolicy(IntFlag):
    """Accepted, and of no effect."""

    DEFAULT = 0
    EFFICIENCY = 1
    ZERO = 2


class CommShrinkFlag(IntEnum):
    """Accepted: a communicator that is broken can be shrunk with either."""

    DEFAULT = 0
    ABORT = 1


class WindowFlag(IntFlag):
    """Accepted: a registered window is reached by all ranks with each."""

    DEFAULT = 0
    COLL_SYMMETRIC = 1
    STRICT_ORDERING = 2


_ALGORITHMS = {"ring": "ring", "tree": "tree"}  # the names that mean the same in both
_OF_BOTH = "cga_cluster_size min_ctas max_ctas cta_policy nvls_ctas"
_OF_INIT = """blocking net_name split_share traffic_class comm_name collnet_enable shrink_share
    n_channels_per_net_peer nvlink_centric_sched graph_usage_mode num_rma_ctx graph_stream_ordering
    launch_order_implicit num_rma_sig rma_eager_init host_cft_mode nvls_host_mode"""
_OF_CALLS = """alg_selection force_alg_selection user_profiler_tag launch_completion_event
    vendor_options"""


class _Fields:
    """A configuration: ``max_ctas`` and a forced algorithm have an effect, the rest has none."""

    _names: frozenset[str] = frozenset()

    def __init__(self, **values: Any) -> None:
        for name in values.keys() - self._names:
            raise ArgumentTypeError(
                f"{type(self).__name__} has no field {name!r}; it has "
                f"{', '.join(sorted(self._names))}"
            )
        for name in self._names:
            setattr(self, name, values.get(name))

    if TYPE_CHECKING:  # the fields

        def __getattr__(self, name: str) -> Any: ...

    def options(self) -> dict[str, Any]:
        """The fields that have a meaning, as options of ringcoll."""
        given = {name: v for name in sorted(self._names) if (v := getattr(self, name)) is not None}
        options: dict[str, Any] = {}
        if "max_ctas" in given:
            options["max_sms"] = given.pop("max_ctas")
        algorithm = _ALGORITHMS.get(str(given.get("alg_selection")).lower())
        if given.get("force_alg_selection") and algorithm is not None:
            options["algorithm"] = algorithm
            del given["alg_selection"], given["force_alg_selection"]
        if given:
            _log.info("%s: %s: of no effect in ringcoll", type(self).__name__, ", ".join(given))
        return options


class NCCLConfig(_Fields):
    """Options of a communicator."""

    _names = frozenset([*_OF_BOTH.split(), *_OF_INIT.split()])


class NCCLCollConfig(_Fields):
    """Options of a call."""

    _names = frozenset([*_OF_BOTH.split(), *_OF_CALLS.split()])


class UniqueId:
    """What :func:`ringcoll.unique_id` makes, as bytes of a fixed length.

    It goes by ``bytes(uid)`` and ``from_bytes``, by ``as_ndarray``, which other ranks receive into,
    or pickled, where the program trusts what brings it.
    """

    SIZE = 1024

    def __init__(self, text: str = "") -> None:
        if len(text.encode()) > self.SIZE:
            raise MachineError(
                f"a unique id of {len(text)} characters, and {self.SIZE} fit: this host has too "
                f"many addresses; use ringcoll.init(id=ringcoll.unique_id(host), ...)"
            )
        self._bytes = np.zeros(self.SIZE, np.uint8)
        self._bytes[: len(text)] = np.frombuffer(text.encode(), np.uint8)

    @property
    def text(self) -> str:
        """The id as ``ringcoll.init(id=…)`` takes it."""
        return self.as_bytes.rstrip(b"\0").decode("ascii", "replace")

    @property
    def as_ndarray(self) -> npt.NDArray[np.uint8]:
        """The bytes themselves, to send or to receive into."""
        return self._bytes

    @property
    def as_bytes(self) -> bytes:
        """A copy of the bytes."""
        return self._bytes.tobytes()

    @staticmethod
    def from_bytes(b: bytes | bytearray | memoryview) -> UniqueId:
        """The id of ``bytes(uid)`` on another rank."""
        made, given = UniqueId(), np.frombuffer(b, np.uint8)
        if given.size != UniqueId.SIZE:
            raise ArgumentError(f"a unique id has {UniqueId.SIZE} bytes, not {given.size}")
        made._bytes[:] = given
        return made

    def __bytes__(self) -> bytes:
        return self.as_bytes

    def __repr__(self) -> str:
        return f"<UniqueId: {'made' if self._bytes.any() else 'empty'}>"  # the rest is a secret


def get_unique_id(empty: bool = False) -> UniqueId:
    """An id for one rank to make and all to pass to ``Communicator.init``.

    Args:
        empty: make one to receive into.

    """
    return UniqueId("" if empty else unique_id())


@dataclass(frozen=True)
class VersionInfo:
    """The version of what carries the calls."""

    ringcoll: str


def get_version() -> VersionInfo:
    """The version of ringcoll; of NCCL there is none."""
    return VersionInfo(__version__)


def show_versions() -> None:
    """Print the version of ringcoll."""
    print(f"ringcoll : {__version__}")


def get_error_string(nccl_result: int) -> str:
    """The name of a result."""
    return Result(nccl_result).name
