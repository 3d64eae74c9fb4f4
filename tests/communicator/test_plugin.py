"""The pytest plugin, as a project of a user's sees it."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import sys

# Numpy can be loaded once a process, and pytester forgets the modules that its test has loaded.
import numpy  # noqa: F401
import pytest

import ringcoll.communicator
import ringcoll.executors
import ringcoll.fabric

pytest_plugins = ["pytester"]

# Where the package is installed its entry point loads the plugin; from a checkout we name it.
INSTALLED = list(importlib.metadata.entry_points(group="pytest11", name="ringcoll"))
PLUGIN = [] if INSTALLED else ["-p", "ringcoll.pytest_plugin"]
# Benchmarks of workers warn, by some versions at once, and warnings are errors here.
RUN = [*PLUGIN, "-p", "no:benchmark"]


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Load what calls import late: a second copy of a module would have a state of its own."""
    for package in (ringcoll.communicator, ringcoll.executors, ringcoll.fabric):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    ringcoll.spawn(lambda comm: comm.barrier(), 2)


@pytest.fixture
def outcomes(pytester):
    """Run a test file by a pytest of its own; give what came of it and its lines."""

    def run(source, *options):
        pytester.makepyfile(source)
        result = pytester.runpytest_inprocess(*RUN, "-p", "no:cacheprovider", "-v", *options)
        counts = result.parseoutcomes()
        counts.pop("warnings", None)  # that the plugin was imported before its asserts were seen
        return counts, result.stdout

    return run


def test_marker_runs_a_test_on_every_rank_for_each_number_of_ranks(outcomes):
    counts, lines = outcomes(
        """
        import numpy as np
        import pytest

        seen = []

        @pytest.mark.ringcoll(nranks=[2, 3])
        def test_sum(comm):
            x = np.full(4, float(comm.rank))
            comm.all_reduce(x)
            assert set(x) == {1.0 if comm.nranks == 2 else 3.0}
            seen.append((comm.nranks, comm.rank))

        @pytest.mark.ringcoll(nranks=4, device="cpu")
        def test_one_number(comm):
            seen.append((comm.nranks, comm.rank))

        @pytest.mark.ringcoll
        def test_default(comm):
            assert comm.nranks == 2

        def test_all_came():
            wanted = [(n, r) for n in (2, 3, 4) for r in range(n)]
            assert sorted(seen) == wanted
        """
    )
    assert counts == {"passed": 5}
    lines.fnmatch_lines(["*test_sum?2ranks? PASSED*", "*test_sum?3ranks? PASSED*"])


def test_marked_tests_take_other_fixtures_and_parameters_and_classes(outcomes):
    counts, _ = outcomes(
        """
        import pytest

        @pytest.fixture
        def base():
            return 10

        @pytest.mark.parametrize("more", [1, 2])
        @pytest.mark.ringcoll(nranks=[1, 2])
        def test_add(comm, base, more, tmp_path):
            assert base + more in (11, 12)
            assert tmp_path.is_dir()

        @pytest.mark.ringcoll(nranks=2)
        class TestMany:
            def test_method(self, comm):
                comm.barrier()
        """
    )
    assert counts == {"passed": 5}


def test_a_failure_of_one_rank_is_the_tests_and_the_others_do_not_wait(outcomes):
    counts, lines = outcomes(
        """
        import pytest

        @pytest.mark.ringcoll(nranks=3)
        def test_fails(comm):
            if comm.rank == 1:
                assert comm.rank == 7, "this one"
            comm.barrier()

        @pytest.mark.ringcoll(nranks=2)
        def test_skips(comm):
            pytest.skip("not today")

        @pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
        @pytest.mark.ringcoll(nranks=2)
        def test_expected(comm):
            1 / comm.rank
        """,
        "--timeout=30",
    )
    assert counts == {"failed": 1, "skipped": 1, "xfailed": 1}
    lines.fnmatch_lines(["*AssertionError: this one*"])


def test_marker_takes_every_option_of_spawn(outcomes):
    counts, lines = outcomes(
        """
        import time
        import numpy as np
        import pytest

        @pytest.mark.ringcoll(nranks=2, timeout=0.5, tag="mine")
        def test_late(comm):
            if comm.rank == 0:
                comm.barrier()
            while True:
                comm.check()

        @pytest.mark.ringcoll(3, algorithm="ring", slices=2)
        def test_options(comm):
            assert comm._state.config.slices == 2

        @pytest.mark.ringcoll(nranks=2, timout=5)
        def test_misspelled(comm): ...

        @pytest.mark.ringcoll(nrank=2)
        def test_of_no_number(comm): ...

        @pytest.mark.ringcoll(nranks=3)
        def test_skips_a_call(comm):
            x = np.ones(4)
            comm.barrier()
            comm.all_reduce(x)
            if comm.rank != 2:
                comm.all_reduce(x)
        """,
    )
    assert counts == {"failed": 2, "passed": 1, "errors": 2}
    lines.fnmatch_lines_random(
        [
            "*: the marker ringcoll: there is no option 'nrank'; did you mean 'nranks'?",
            "*DeadlineError: barrier (call 1) on rank 0: waited 0.5* s for rank 1*tag=mine",
            "*.py:*: test_misspelled?2ranks?: the marker ringcoll: there is no option 'timout'; "
            "did you mean 'timeout'?",
            "*RankLostError: *rank 2 left the test, without making call 3, all_reduce count=4 *",
        ]
    )


def test_fixture_runs_a_function_on_ranks(outcomes):
    counts, _ = outcomes(
        """
        import numpy as np
        import pytest

        def test_mean(ringcoll_spawn):
            def work(comm, scale):
                x = np.full(3, comm.rank * scale, "float32")
                comm.all_reduce(x, op="avg")
                return float(x[0])

            assert ringcoll_spawn(work, 4, 2) == [3.0] * 4

        def test_options(ringcoll_spawn):
            with pytest.raises(ZeroDivisionError):
                ringcoll_spawn(lambda comm: 1 / 0, 2, timeout=5)
        """
    )
    assert counts == {"passed": 2}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            """
            import pytest

            @pytest.mark.ringcoll(nranks=2)
            def test_forgot(): ...
            """,
            "*.py:3: test_forgot: the marker ringcoll needs a test function with *",
        ),
        (
            """
            def test_unmarked(comm): ...
            """,
            "*the fixture comm belongs to tests marked @pytest.mark.ringcoll*",
        ),
        (
            """
            import pytest

            @pytest.mark.ringcoll(nranks=0)
            def test_nobody(comm): ...
            """,
            "*.py:3: test_nobody*: the marker ringcoll: nranks=0: wanted a number from 1*",
        ),
        (
            """
            import pytest

            @pytest.mark.ringcoll(nranks=[])
            def test_no_number(comm): ...
            """,
            "*test_no_number*: the marker ringcoll: nranks=0: wanted a number from 1*",
        ),
        (
            """
            import pytest

            @pytest.mark.ringcoll(nranks=2)
            async def test_later(comm):
                assert False
            """,
            "*test_later*: a coroutine cannot run on ranks*",
        ),
        (
            """
            import pytest

            @pytest.mark.ringcoll(2, "cuda")
            def test_by_position(comm): ...
            """,
            "*test_by_position*: the marker ringcoll takes nranks and options by name*",
        ),
    ],
)
def test_misuse_is_told(outcomes, source, said):
    counts, lines = outcomes(source)
    assert counts.get("passed", 0) == 0
    assert counts.get("errors", 0) + counts.get("failed", 0) == 1
    lines.fnmatch_lines([said])


def test_a_marked_test_without_comm_leaves_the_others_alone(outcomes):
    counts, lines = outcomes(
        """
        import unittest

        import pytest

        @pytest.mark.ringcoll(nranks=2)
        def test_forgot(): ...

        @pytest.mark.ringcoll(nranks=2)
        def test_right(comm):
            comm.barrier()

        @pytest.mark.ringcoll(nranks=2)
        class TestOld(unittest.TestCase):
            def test_method(self): ...

        @pytest.mark.skip
        @pytest.mark.ringcoll(nranks=2)
        def test_skipped(): ...
        """
    )
    assert counts == {"passed": 1, "errors": 2, "skipped": 1}
    assert "pytest_plugin.py" not in lines.str()


def test_a_failure_on_every_rank_names_them_all(outcomes):
    counts, lines = outcomes(
        """
        import threading

        import pytest

        meeting = threading.Barrier(3)

        @pytest.mark.ringcoll(nranks=3)
        def test_all(comm):
            meeting.wait(30)
            assert comm.rank == 7
        """
    )
    assert counts == {"failed": 1}
    if sys.version_info >= (3, 11):
        lines.fnmatch_lines(["*raised on rank ? of 3, and on ranks ?, ?"])


def test_ctrl_c_names_the_test_and_the_line_of_a_rank(pytester):
    pytester.makepyfile(
        """
        import os
        import signal
        import time

        import pytest

        @pytest.mark.ringcoll(nranks=3)
        def test_hang(comm):
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
            comm.barrier()
        """
    )
    lines = pytester.runpytest_subprocess(*RUN, "-p", "no:cacheprovider", timeout=60).stdout
    place = "rank 1 at test_ctrl_c*.py:11, time.sleep(60)"
    lines.fnmatch_lines([f"*KeyboardInterrupt: in *::test_hang?3ranks?: rank 1 of 3 *{place};*"])


def test_marker_is_listed(pytester):
    lines = pytester.runpytest_inprocess(*RUN, "--markers").stdout
    lines.fnmatch_lines(
        ["@pytest.mark.ringcoll(nranks, device='cpu', ?*options): run the test on every rank*"]
    )


def test_an_expected_error_says_how_it_is_expected(outcomes):
    counts, lines = outcomes(
        """
        import numpy as np
        import pytest

        import ringcoll

        @pytest.mark.ringcoll(nranks=2)
        def test_left_open(comm):
            with pytest.raises(ringcoll.MismatchError):
                comm.all_reduce(np.zeros(4 + comm.rank))

        @pytest.mark.ringcoll(nranks=2)
        def test_closed(comm):
            with pytest.raises(ringcoll.MismatchError):
                comm.all_reduce(np.zeros(4 + comm.rank))
            comm.close()
        """
    )
    assert counts == {"failed": 1, "passed": 1}
    if sys.version_info >= (3, 11):
        lines.fnmatch_lines(["*is followed by comm.close(), comm.shrink() or comm.abort()*"])


@pytest.mark.parametrize("whole", [False, True])
def test_a_failure_is_shown_once_at_the_line_of_the_test(outcomes, whole):
    counts, lines = outcomes(
        """
        import numpy as np
        import pytest

        @pytest.mark.ringcoll(nranks=3)
        def test_skips_a_call(comm):
            comm.barrier()
            if comm.rank != 2:
                comm.all_reduce(np.ones(4))

        def test_spawned(ringcoll_spawn):
            ringcoll_spawn(lambda comm: comm.broadcast(np.ones(3), root=9), 2)
        """,
        *(["--full-trace"] if whole else []),
    )
    assert counts == {"failed": 2}
    text = lines.str()
    assert ("ringcoll/communicator/" in text) == whole
    assert ("start.py" in text) == whole
    assert "Captured log call" not in text
    told = [line for line in text.splitlines() if line.startswith("E  ")]
    assert sum("rank 2 left the test, without making call 2, all_reduce" in s for s in told) == 1
    assert "closed its communicator" not in "".join(told)
