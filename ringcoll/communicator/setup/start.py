"""Make communicators: one rank a process, several ranks in this process, one thread a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringcoll import log
from ringcoll.bootstrap.contract import named, whole
from ringcoll.communicator.failures import error_text
from ringcoll.communicator.public import Communicator
from ringcoll.communicator.rank import RankState
from ringcoll.communicator.setup.devices import loader, ordinals, placed, refuse_too_many
from ringcoll.communicator.setup.machine import agree
from ringcoll.communicator.setup.tables import maybe_tuned
from ringcoll.config import Config, Settings, starting
from ringcoll.errors import (
    AbortedError,
    ArgumentError,
    ArgumentTypeError,
    Error,
    MachineError,
    MismatchError,
    RankLostError,
)
from ringcoll.fabric import (
    Fabric,
    RankThread,
    closing_if_it_fails,
    each,
    start_all,
    thread_fabrics,
)
from ringcoll.fabric.liveness import has_closed


def init(
    bootstrap: object = None,
    *,
    id: str | None = None,
    rank: int | None = None,
    nranks: int | None = None,
    device: str = "auto",
    timeout: float | None = None,
    config: Config | None = None,
    **options: Any,
) -> Communicator:
    """The communicator of this process's world: one rank a process, or with an id one a thread.

    Args:
        bootstrap: an mpi4py communicator, a torch Store (with RANK and WORLD_SIZE in the
            environment), or any object with ``rank``, ``nranks`` and
            ``allgather(bytes) -> list[bytes]``. None: the world of ``id``, the launcher's under
            mpiexec, torch's Store under torchrun, else a world of one.
        id: what :func:`ringcoll.unique_id` has returned on one rank; None: RINGCOLL_ID.
        rank: with an id: this rank; None: RINGCOLL_RANK, else the launcher's.
        nranks: with an id: how many ranks there are; None: RINGCOLL_NRANKS, else the launcher's.
            The ranks of an id are processes, or threads of one process that call ``init`` at the
            same time.
        device: "cpu"; "cuda"; or "auto": GPUs where every rank has CuPy and a device, else CPU.
        timeout: seconds that a wait may take; None: 60, ``math.inf``: for ever.
        config: options of all calls.
        options: fields of :class:`ringcoll.Config`, and settings of ``init`` alone:

            - ``node``: name of this rank's node, where it is not the host's.
            - ``topo_file``: path of a topology file in NCCL's XML format. What is detected of GPU
              ranks completes it; CPU ranks take the places of its GPUs, rank i the i-th.
            - ``transport``: between GPU ranks "p2p", or "host" for pinned host memory.
            - ``cache_dir``: where detected machines, measurements and compiled kernels are kept.
            - ``pace``: what a CPU rank's port of a switch carries each way: bytes/s, or (bytes/s,
              seconds a message); a third word "pairs" gives each pair of ranks links of its own.
            - ``register``: whether GPU ranks map memory of each other that large calls use again;
              None: they do.
            - ``kernel_wait``: seconds that a first call on GPUs waits for its own kernel before a
              generic one carries it; None: 0.25.
            - ``tuning``: path of a table of ``ringcoll tune``, or "off"; None: the one in the
              user's cache folder for this device and number of ranks.
            - ``compiled``: whether the package's compiled parts make calls that come again, small
              ones of CPU ranks and those of GPU ranks that are one kernel; None: they do where
              they have been built.
            - ``debug``: True logs what was agreed and chosen; "trace" records executed rows.

    Returns:
        This rank's communicator; use it in a ``with`` block, or close it.

    Raises:
        ArgumentError: an option or its value does not exist, or ``topo_file`` is of no use.
        UsageError: two threads of this process begin over MPI, a launcher or a store at once.
        LauncherError: the launcher and the world that it made do not match.
        MachineError: ranks of one node cannot share memory, or those of several cannot meet.
        MismatchError: the ranks run different versions or settings, two claim one rank, or the
            secret of ``id`` is another than that of the process that listens there.
        DeadlineError: a rank did not come within ``timeout``.
        RankLostError: a rank ended, or raised, before the communicator was made.

    Example:
        A program that runs as ``python program.py`` and as ``mpiexec -n 4 python program.py``:

        >>> with ringcoll.init() as comm:
        ...     x = np.full(3, comm.rank + 1.0)
        ...     comm.all_reduce(x)
        >>> x
        array([1., 1., 1.])

    """
    from ringcoll.bootstrap import post_failure

    met: dict[str, Any] = {"id": id, "rank": rank, "nranks": nranks}
    try:
        agreed, settings = starting(config, timeout, device, options)
    except Error as error:
        post_failure(error, bootstrap, timeout=timeout, **met)
        raise
    return begin(bootstrap, agreed, settings, None, **met)


def begin(
    bootstrap: object, config: Config, settings: Settings, ordinal: int | None, **met: Any
) -> Communicator:
    """What :func:`init` makes; ``ordinal``: the caller's choice of a GPU, ``met``: id and rank."""
    from ringcoll.bootstrap import joined

    seconds = config.timeout or 60.0
    with joined(bootstrap, timeout=seconds, **met) as world:
        from ringcoll.fabric import open_fabric  # here the others learn why it cannot be loaded

        fabric = open_fabric(world, timeout=seconds, node=settings.node)
    comm = communicator_on(fabric, config, settings, ordinal)
    comm._settle()
    return comm


def init_all(
    nranks: int | Sequence[int], *, device: str = "auto", **options: Any
) -> list[Communicator]:
    """Several ranks in this process: one communicator for each.

    Call them together inside ``with ringcoll.group():``, or from one thread a rank.

    Args:
        nranks: how many, or the GPU of each: ``[0, 1, 2, 3]``, or ``[0] * 8`` for a ring of 8 that
            is simulated on one GPU.
        device: "cpu"; "cuda"; or "auto": GPUs where there are any.
        options: as for :func:`init`.

    Returns:
        A communicator for each rank, in rank order.

    Raises:
        ArgumentError: an option does not exist, or there is no such device.
        MachineError: ``device="cuda"`` where there is none.

    Example:
        >>> comms = ringcoll.init_all(2)
        >>> with ringcoll.group():
        ...     for comm in comms:
        ...         comm.barrier()
        >>> [comm.rank for comm in comms]
        [0, 1]

    """
    agreed, settings = starting(None, None, device, options)
    count, chosen = ordinals(nranks, settings.device or "auto")
    fabrics = thread_fabrics(count, agreed.timeout or 60.0)

    def make(fabric: Fabric) -> Communicator:
        ordinal = None if chosen is None else chosen[fabric.rank]
        return communicator_on(fabric, agreed, settings, ordinal)

    return each(fabrics, make)


def spawn(
    function: Callable[..., Any], nranks: int, *args: Any, device: str = "auto", **options: Any
) -> list[Any]:
    """Run ``function(comm, *args)`` on one thread a rank; return what each returned.

    The first failure is raised again with its rank; the other ranks are aborted, none waits. When
    a rank's function returns, its communicator counts as closed: ranks that wait for it fail at
    once.

    Args:
        function: gets its rank's communicator, then ``args``.
        nranks: how many.
        args: for every rank the same.
        device: as for :func:`init_all`.
        options: as for :func:`init`.

    Returns:
        What each rank's function has returned, in rank order.

    Raises:
        BaseException: the first failure, with a note that names its rank.

    Example:
        >>> def total(comm, factor):
        ...     x = np.array([comm.rank * factor])
        ...     comm.all_reduce(x)
        ...     return int(x[0])
        >>> ringcoll.spawn(total, 4, 10)
        [60, 60, 60, 60]

    """
    __tracebackhide__ = True
    count = whole(nranks)
    if not callable(function) or count is None or count < 1:
        wrong, wanted = f"nranks={nranks!r}", "an integer >= 1"
        if not callable(function):
            wrong, wanted = f"function={function!r}", "a function"
        kind = ArgumentError if callable(function) and count is not None else ArgumentTypeError
        raise kind(f"spawn: {wrong}, wanted {wanted}: write spawn(function, nranks)")
    refuse_too_many("spawn", count)
    left = "returned from its function"
    return run_ranks(lambda comm: function(comm, *args), nranks, device, options, left)


def run_ranks(
    function: Callable[[Communicator], Any],
    nranks: int,
    device: str,
    options: Mapping[str, Any],
    left: str,
) -> list[Any]:
    """Run a function as :func:`spawn` does; ``left``: in errors, how a rank has ended."""
    __tracebackhide__ = True
    comms = init_all(nranks, device=device, **options)
    returned: list[int] = []
    results: list[Any] = [None] * nranks
    failures: list[tuple[int, BaseException]] = []

    def work(comm: Communicator) -> None:
        __tracebackhide__ = True
        comm._state.failure_level = log.DEBUG  # the caller gets the first error
        try:
            comm._settle()
            results[comm.rank] = function(comm)
            comm._conclude()
            returned.append(comm.rank)
            comm._state.leave()
        except BaseException as error:
            failures.append((comm.rank, error))
            comm.abort(error_text(error))

    threads = [RankThread(work, comm, f"ringcoll rank {comm.rank}") for comm in comms]
    try:
        start_all(threads, lambda rank, reason: comms[rank].abort(reason))
    finally:
        for comm in comms:
            _close(comm, failures)
    if failures:
        # The error of a rank that was aborted, or lost a peer, is a consequence of another's.
        failures.sort(key=lambda failure: _consequence(failure[1]))
        error = failures[0][1]
        for other in returned if isinstance(error, RankLostError) else ():
            error.args = (str(error).replace(has_closed(other), f"rank {other} {left}"),)
        if hasattr(error, "add_note"):
            error.add_note(_who_raised(failures, nranks))
        raise error
    return results


def _consequence(error: BaseException) -> int:
    """A sort key: 0 for a cause, more for an error that another rank's failure has caused."""
    if isinstance(error, AbortedError):
        return 2
    return int(isinstance(error, RankLostError))


def _who_raised(failures: Sequence[tuple[int, BaseException]], nranks: int) -> str:
    """Which rank raised the first of the failures, and which ranks raised what else."""
    first, error = failures[0]
    kinds: dict[int, str] = {}
    for rank, other in failures:
        kinds.setdefault(rank, type(other).__name__)
    others: dict[str, list[int]] = {}
    for rank in sorted(kinds.keys() - {first}):
        others.setdefault(kinds[rank], []).append(rank)
    alike = others.pop(type(error).__name__, [])
    text = f"raised on rank {first} of {nranks}" + (f", and on {named(alike)}" if alike else "")
    return "; ".join([text, *(f"{kind} on {named(ranks)}" for kind, ranks in others.items())])


def _close(comm: Communicator, failures: list[tuple[int, BaseException]]) -> None:
    try:
        comm.close()
    except Error as error:
        failures.append((comm.rank, error))


def communicator_on(
    fabric: Fabric, config: Config, settings: Settings, ordinal: int | None
) -> Communicator:
    """This rank's communicator over a fabric; collective, on one GPU or by ``settings.device``."""
    with closing_if_it_fails(fabric):
        return Communicator(_state_on(fabric, config, settings, ordinal))


def _state_on(fabric: Fabric, config: Config, settings: Settings, ordinal: int | None) -> RankState:
    # Rank 0 says beside it whether there may be a table, which takes another exchange.
    options = b", ".join((config.agreed(), settings.agreed()))
    table = b"+" * maybe_tuned(fabric, settings)
    received = fabric.allgather(options + b"\0" + table, what="init")
    given = [part.rpartition(b"\0")[0] for part in received]
    for rank, other in enumerate(given):
        if other != given[0]:
            raise MismatchError(
                f"init: rank 0 was given {given[0].decode()} and rank {rank} {other.decode()}; "
                f"pass the same options on every rank"
            )
    device = placed(fabric, settings.device or "auto", ordinal)
    if device is not None and fabric.mixed:
        raise MachineError(
            "init: a process has several of these GPU ranks, and another process has others: start "
            "one process a rank, or make all of them threads of one process"
        )
    busid = None if device is None else device.pci
    topology = agree(fabric, busid, settings.topo_file, settings.cache_dir)
    if settings.pace is not None and fabric.nodes:
        raise ArgumentError(
            "init: pace= is for links inside one host, but these ranks are on several; leave it out"
        )
    if fabric.rank == 0:
        log.write(log.INFO, "init: %d %s ranks", fabric.nranks, "CPU" if device is None else "CUDA")
    state: RankState
    if device is None:
        state = RankState(fabric, config, settings, topology=topology)
    elif fabric.nodes:
        from ringcoll.communicator.cuda.nodes import NodesState

        kernels = loader(settings.cache_dir)
        state = NodesState(fabric, config, settings, device, kernels, topology=topology)
    else:
        from ringcoll.communicator.cuda.state import CudaState

        kernels = loader(settings.cache_dir)
        state = CudaState(fabric, config, settings, device, kernels, topology=topology)
    if received[0].endswith(b"+"):
        from ringcoll.communicator.setup.tuning import agree_on_table

        state.use_table(agree_on_table(fabric, device, settings))
    if settings.debug == "trace":
        state.start_trace()
    elif settings.debug:
        state.debug = True
        log.show()
        if fabric.rank == 0:
            log.write(log.DEBUG, "init: %s agreed on %s", state, given[0].decode())
    return state
