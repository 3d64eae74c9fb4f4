"""nccl4py's communicator: how one is made, what it is, and how it ends."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ringcoll.communicator.public as public
from ringcoll.communicator.cuda.current_device import on_current_device
from ringcoll.communicator.setup.start import init_all
from ringcoll.cuda.device import available, devices
from ringcoll.dtypes import premul_sum
from ringcoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    Error,
    RankLostError,
    UsageError,
)
from ringcoll.nccl4py.calls import (
    Calls,
    CustomRedOp,
    RegisteredBufferHandle,
    RegisteredWindowHandle,
    count_of,
)
from ringcoll.nccl4py.values import (
    CommShrinkFlag,
    NCCLConfig,
    NcclDataType,
    Result,
    UniqueId,
    WindowFlag,
)


@dataclass(frozen=True)
class NCCLCommProperties:
    """What is fixed of a communicator."""

    rank: int
    n_ranks: int
    cuda_dev: int
    device_api_support: bool = False
    multimem_support: bool = False


class Communicator(Calls):
    """One rank's communicator with nccl4py's methods; without arguments one to initialize later."""

    def __init__(self, ptr: int | None = None) -> None:
        if ptr:
            raise ArgumentError(
                f"Communicator(ptr={ptr:#x}): an NCCL communicator is none of ringcoll's; make one "
                f"by Communicator.init"
            )
        self._comm: public.Communicator | None = None
        self._options: dict[str, Any] = {}  # of all calls

    @classmethod
    def init(
        cls,
        nranks: int,
        rank: int,
        unique_id: UniqueId | Sequence[UniqueId],
        config: NCCLConfig | None = None,
    ) -> Communicator:
        """The communicator of the ranks that have the id; collective.

        On GPUs the rank lives on the current device. Where a rank has none all are CPU ranks.

        Args:
            nranks: how many ranks there are.
            rank: this rank, from 0.
            unique_id: what one rank has from :func:`get_unique_id`; of several the first.
            config: ``max_ctas`` is ringcoll's ``max_sms``; the rest has no effect.

        Raises:
            UsageError: no such rank, or no id.
            DeadlineError: a rank did not come.

        """
        made = cls()
        made.initialize(nranks, rank, unique_id, config)
        return made

    @classmethod
    def init_all(cls, devices: int | Sequence[int] | None = None) -> list[Communicator]:
        """A communicator for each device, all in this process.

        Args:
            devices: their numbers, or how many; None: all GPUs. Without GPUs, how many CPU ranks.

        """
        if devices is None:
            devices = _devices()
        if isinstance(devices, int) and available() is None:
            devices = range(devices)
        if not isinstance(devices, int):
            devices = list(devices)
        return [cls._of(comm) for comm in init_all(devices)] if devices else []

    def initialize(
        self,
        nranks: int,
        rank: int,
        unique_id: UniqueId | Sequence[UniqueId],
        config: NCCLConfig | None = None,
    ) -> None:
        """As :meth:`init`, for ``Communicator()``."""
        if self._comm is not None:
            raise UsageError("initialize: this communicator is initialized; make another one")
        if isinstance(unique_id, Sequence) and unique_id:
            unique_id = unique_id[0]
        if not isinstance(unique_id, UniqueId):
            raise ArgumentTypeError(
                f"init: unique_id is a {type(unique_id).__name__}: pass get_unique_id() of one rank"
            )
        text = unique_id.text
        if not text:
            raise ArgumentError("init: the unique id is empty: no rank has sent one")
        self._comm = on_current_device(None, id=text, rank=rank, nranks=nranks, always=True)
        self._options = {} if config is None else config.options()

    @classmethod
    def _of(
        cls, comm: public.Communicator | None, options: dict[str, Any] | None = None
    ) -> Communicator:
        made = cls()
        made._comm, made._options = comm, options or {}
        return made

    # -- what it is -------------------------------------------------------------------------------

    @property
    def is_valid(self) -> bool:
        """Whether it is initialized and not destroyed."""
        return self._comm is not None

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self.communicator.rank

    @property
    def nranks(self) -> int:
        """How many ranks there are."""
        return self.communicator.nranks

    @property
    def cuda_dev(self) -> int:
        """The number of the rank's GPU; -1 for a CPU rank."""
        return int(self.communicator.device.partition(":")[2] or -1)

    @property
    def device(self) -> Any:
        """The rank's ``cuda.core.Device``; ringcoll's name of it where that is not installed."""
        try:
            library: Any = importlib.import_module("cuda.core")
            return self.communicator.device if self.cuda_dev < 0 else library.Device(self.cuda_dev)
        except ImportError:
            return self.communicator.device

    @property
    def properties(self) -> NCCLCommProperties:
        """What is fixed of the communicator."""
        return NCCLCommProperties(self.rank, self.nranks, self.cuda_dev)

    def __repr__(self) -> str:
        return f"<Communicator: {self._comm if self.is_valid else 'not initialized'}>"

    if not TYPE_CHECKING:  # for a type checker it would make every name legal

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"ringcoll.nccl4py.Communicator has no {name!r}: see 'NCCL and nccl4py' in "
                f"docs/coming-from.md for what nccl4py has beyond it"
            )

    # -- operators and memory ---------------------------------------------------------------------

    def create_pre_mul_sum(self, scalar: Any, datatype: NcclDataType | None = None) -> CustomRedOp:
        """An operator that multiplies this rank's elements by ``scalar`` and adds.

        Args:
            scalar: a number, or an array of one element, which is read now.
            datatype: the buffers have the type; it is checked by the call.

        """
        if hasattr(scalar, "item"):
            if count_of(scalar) != 1:
                raise ArgumentError(f"scalar has {count_of(scalar)} elements: pass one")
            scalar = scalar.item()
        if isinstance(scalar, bool) or not isinstance(scalar, (int, float, complex)):
            raise ArgumentTypeError(f"scalar={scalar!r}: pass a number or an array of one element")
        return CustomRedOp(premul_sum(scalar))

    def register_buffer(self, buffer: Any) -> RegisteredBufferHandle:
        """A handle: GPU ranks register large buffers themselves when they are used again."""
        return RegisteredBufferHandle(buffer)

    def register_window(
        self, buffer: Any, flags: WindowFlag | None = None
    ) -> RegisteredWindowHandle:
        """Let all ranks reach a buffer; collective."""
        comm = self.communicator
        registered = comm.register(buffer)
        end = (lambda: comm.unregister(buffer)) if registered else (lambda: None)
        return RegisteredWindowHandle(registered, end)

    # -- life -------------------------------------------------------------------------------------

    def split(
        self, color: int | None = None, key: int = 0, config: NCCLConfig | None = None
    ) -> Communicator:
        """Make a communicator of the ranks of each colour; collective. None: of no communicator."""
        options = self._options if config is None else config.options()
        return self._of(self.communicator.split(color, key), options)

    def shrink(
        self,
        exclude_ranks: Sequence[int] | None = None,
        config: NCCLConfig | None = None,
        flag: CommShrinkFlag = CommShrinkFlag.DEFAULT,
    ) -> Communicator:
        """Make a communicator without some ranks and without those that are lost."""
        options = self._options if config is None else config.options()
        return self._of(self.communicator.shrink(exclude_ranks or ()), options)

    def finalize(self) -> None:
        """Wait for the calls of this rank; not collective."""
        self.communicator.synchronize()

    def destroy(self) -> None:
        """End the communicator; not collective, idempotent.

        Raises:
            Error: a call that nobody had waited for has failed.

        """
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.close()

    def abort(self) -> None:
        """Let the calls of all ranks fail, and end the communicator. Idempotent."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()

    def close_all_resources(self) -> None:
        """Nothing: what the communicator has made ends with it."""

    def get_async_error(self) -> Result:
        """Whether a call has failed or a rank is lost; 0 is no error."""
        try:
            self.communicator.check()
        except RankLostError:
            return Result.RemoteError
        except UsageError:
            return Result.InvalidUsage
        except Error:
            return Result.SystemError
        return Result.Success

    def get_last_error(self) -> str:
        """The text of the error that has broken the communicator, else ""."""
        try:
            self.communicator.check()
        except Error as error:
            return str(error)
        return ""


def _devices() -> int:
    return len(devices()) if available() is None else 0
