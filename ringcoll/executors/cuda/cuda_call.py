"""A prepared call of a GPU rank, with all but its launch: choice, kernel and packed parameter."""

from __future__ import annotations

from dataclasses import dataclass, field

from ringcoll.arguments.calls import Call
from ringcoll.executors.contract import Given
from ringcoll.executors.cuda.loader import Launchable
from ringcoll.executors.cuda.loading import Launching
from ringcoll.executors.cuda.params import Addresses, AddressWords, Body
from ringcoll.executors.cuda.recounted import RecountedCall, Recounter, Recounts
from ringcoll.tuner.choice import Choice, Limits
from ringcoll.tuner.kept_gpu import Alike


@dataclass(slots=True, eq=False)
class CudaCall:
    """A checked call of one rank and its launch, without a stream and without its arrays.

    It serves all arrays of its shape in memory of one class; with ``engine="copy"`` those of one
    address.
    """

    call: Call  # without arrays
    choice: Choice
    signature_text: str  # what the ranks must agree on
    signature: int  # its digest in 32 bits
    number: int
    slot: int
    timeout: float  # seconds that a wait of its kernels may take
    at: Addresses  # with the number of the call that it was prepared like, if there is one
    addresses: Given  # of the arrays that it was prepared for
    limits: Limits
    launchable: Launching | None = None  # None where ranks share a launch
    kernel: Launchable | None = None  # once it was launched, if nothing else is ever to be done
    body: Body | None = None  # of the kernel made for it, where that is what is launched
    function: int = 0  # this kernel
    address_words: AddressWords = ()  # of its parameter
    large: bool = False  # whether its launches are counted: see :mod:`.large_scratch`
    alike: Alike | None = None  # calls that the same kernel runs; None: not found yet
    recounts: Recounts | None = None  # once a call of another count was prepared
    recounter: Recounter | None = None  # the same, once such a call was to be launched
    timed: dict[float, CudaCall] = field(default_factory=dict)  # this call with other timeouts
    timeouts: tuple[float, ...] = ()  # that have come, of late
    taken: int = 0  # see Launches.add

    @property
    def any_class(self) -> bool:
        """Whether the same is prepared for memory of any class: lines go through SCRATCH."""
        return self.choice.launch.in_band or self.call.collective == "barrier"

    @property
    def total(self) -> bool:
        """Whether a rank ends only after all have entered."""
        return self.choice.total


AnyCudaCall = CudaCall | RecountedCall
"""What a GPU rank launches."""
