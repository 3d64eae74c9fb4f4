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
import inspect
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
    if marker is None or _COMM not in metafunc.fixturenames:
        return  # a marked test without comm is refused by its own setup
    options = dict(marker.kwargs)
    nranks = options.pop("nranks", marker.args[0] if marker.args else 2)
    counts = (list(nranks) if isinstance(nranks, Sequence) else [nranks]) or [0]
    device = options.pop("device", "cpu")
    worlds = [(count, device, options) for count in counts]
    metafunc.parametrize(_COMM, worlds, ids=[f"{n}ranks" for n in counts], indirect=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a test whose marker cannot be obeyed: an error of this test alone."""
    marker = item.get_closest_marker("ringcoll")
    refusal = None if marker is None else _refusal(item, marker)
    if refusal is not None:
        _refuse(item, refusal)


def _refusal(item: pytest.Item, marker: pytest.Mark) -> str | None:
    """Why a marked test cannot run; None where it can."""
    if _COMM not in getattr(item, "fixturenames", ()):
        return (
            "the marker ringcoll needs a test function with the argument comm; a test that cannot "
            "take it calls ringcoll.spawn, and has no marker"
        )
    if len(marker.args) > (0 if "nranks" in marker.kwargs else 1):
        return (
            "the marker ringcoll takes nranks and options by name, as "
            "@pytest.mark.ringcoll(nranks=[2, 4], timeout=5)"
        )
    if inspect.iscoroutinefunction(getattr(item, "obj", None)):
        return (
            "a coroutine cannot run on ranks, which are threads; let a plain test call asyncio.run"
        )
    nranks = cast("Any", item).callspec.params[_COMM][0]
    if not hasattr(nranks, "__index__") or nranks < 1:
        return f"the marker ringcoll: nranks={nranks!r}: wanted a number from 1, or a list of such"
    from ringcoll.config import starting
    from ringcoll.errors import UsageError, nearest

    options = {name: value for name, value in marker.kwargs.items() if name != "nranks"}
    wrong = next((name for name in options if nearest(name, ["nranks"], 0.8)), None)
    if wrong is not None:
        return f"the marker ringcoll: there is no option {wrong!r}; did you mean 'nranks'?"
    try:
        starting(None, None, options.pop("device", "cpu"), options)
    except UsageError as error:
        return f"the marker ringcoll: {str(error).removeprefix('init: ')}"
    return None


def _refuse(item: pytest.Item, why: str) -> None:
    """Fail with the file and the line of a test, and without a traceback."""
    path, line, _ = item.location
    pytest.fail(f"{path}:{(line or 0) + 1}: {item.name}: {why}", pytrace=False)


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Any:
    """This rank's communicator, in a test marked ``ringcoll``."""
    if not hasattr(request, "param"):
        _refuse(request.node, "the fixture comm belongs to tests marked @pytest.mark.ringcoll")
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
    from ringcoll.communicator.setup.start import run_ranks

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
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    """Name the test that Ctrl-C has ended, while its ranks waited."""
    outcome = yield
    error = outcome.excinfo[1] if outcome.excinfo is not None else None
    if isinstance(error, KeyboardInterrupt) and _uses_ranks(item):
        error.args = (": ".join(filter(None, (f"in {item.nodeid}", str(error)))),)


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
    if not getattr(error, "pytrace", True):
        return []  # pytest shows no frames at all
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            name = frame.f_globals.get("__name__", "")
            if name.partition(".")[0] == "ringcoll" and "__tracebackhide__" not in frame.f_globals:
                found[name] = frame.f_globals
        error = error.__cause__ or error.__context__
    return list(found.values())
