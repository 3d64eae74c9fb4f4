"""Test distributed code on ranks of this process: a fixture and a marker.

::

    def test_mean(ringcoll_spawn):
        def work(comm):
            x = np.full(3, comm.rank, "float32")
            comm.all_reduce(x, op="avg")
            return x[0]

        assert ringcoll_spawn(work, 4) == [1.5] * 4

    @pytest.mark.ringcoll(nranks=[2, 3, 4])
    def test_sum(comm): ...  # runs once a number of ranks, on every rank

A test with the marker is run by one thread a rank; it takes the fixture ``comm``. The marker takes
``device`` (here "cpu") and all other options of :func:`ringcoll.spawn`, such as ``timeout=5``.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import pytest

_COMM = "comm"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        "ringcoll(nranks, device='cpu', **options): run the test on every rank of a communicator, "
        "once for each number of ranks; options are those of ringcoll.spawn, such as timeout=5",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each number of ranks of the marker."""
    marker = metafunc.definition.get_closest_marker("ringcoll")
    if marker is None:
        return
    if _COMM not in metafunc.fixturenames:
        raise pytest.UsageError(f"{metafunc.function.__name__}: @ringcoll needs the argument comm")
    options = dict(marker.kwargs)
    if len(marker.args) > (0 if "nranks" in options else 1):
        raise pytest.UsageError(
            f"{metafunc.function.__name__}: @ringcoll takes nranks and options by name, as "
            f"@pytest.mark.ringcoll(nranks=[2, 4], timeout=5)"
        )
    nranks = options.pop("nranks", marker.args[0] if marker.args else 2)
    counts = list(nranks) if isinstance(nranks, Sequence) else [nranks]
    device = options.pop("device", "cpu")
    worlds = [(count, device, options) for count in counts]
    metafunc.parametrize(_COMM, worlds, ids=[f"{n}ranks" for n in counts], indirect=True)


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Any:
    """This rank's communicator, in a test marked ``ringcoll``."""
    if not hasattr(request, "param"):
        raise pytest.UsageError("the fixture comm belongs to tests marked @pytest.mark.ringcoll")
    return request.param


@pytest.fixture
def ringcoll_spawn() -> Callable[..., list[Any]]:
    """:func:`ringcoll.spawn` on CPU ranks, unless ``device`` says otherwise: one thread a rank."""
    import ringcoll

    return functools.partial(ringcoll.spawn, device="cpu")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test on every rank; the first failure is the test's."""
    if pyfuncitem.get_closest_marker("ringcoll") is None:
        return None
    from ringcoll.communicator.start import run_ranks

    names = pyfuncitem._fixtureinfo.argnames
    values = {name: pyfuncitem.funcargs[name] for name in names if name != _COMM}
    nranks, device, options = cast("tuple[int, str, dict[str, Any]]", pyfuncitem.funcargs[_COMM])
    test = pyfuncitem.obj

    __tracebackhide__ = True

    def work(rank_comm: Any) -> None:
        __tracebackhide__ = True
        test(**values, **{_COMM: rank_comm})

    run_ranks(work, nranks, device, options, "left the test")
    return True


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, None]:
    """Show a failure on ranks at the test's own line; ``--full-trace`` shows all frames."""
    modules = _modules_of(call.excinfo) if _uses_ranks(item) else []
    for module in modules:
        module["__tracebackhide__"] = True
    try:
        yield
    finally:
        for module in modules:
            del module["__tracebackhide__"]


def _uses_ranks(item: pytest.Item) -> bool:
    names = getattr(item, "fixturenames", ())
    return item.get_closest_marker("ringcoll") is not None or "ringcoll_spawn" in names


def _modules_of(excinfo: pytest.ExceptionInfo[BaseException] | None) -> list[dict[str, Any]]:
    """The names of the modules of ringcoll in a traceback and those of its causes."""
    found: dict[str, dict[str, Any]] = {}
    error = None if excinfo is None else excinfo.value
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            name = frame.f_globals.get("__name__", "")
            if name.partition(".")[0] == "ringcoll" and "__tracebackhide__" not in frame.f_globals:
                found[name] = frame.f_globals
        error = error.__cause__ or error.__context__
    return list(found.values())
