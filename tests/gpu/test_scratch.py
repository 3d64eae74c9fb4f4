"""The memory in which kernels meet: every pair is tried once before it is trusted."""

import pytest

from ringcoll.cuda import quarantine
from ringcoll.errors import MachineError
from ringcoll.transports.probe import SLOT
from ringcoll.transports.scratch import allocate_scratch
from tests.gpu.stand_in import read

pytest.importorskip("cupy")


@pytest.fixture(params=["together", "apart"])
def ranks(request):
    return request.getfixturevalue(request.param)


def arena(fabric, *, wanted=None, probed=False):
    return allocate_scratch(fabric, fabric.rank, 4096, what="init", wanted=wanted, probed=probed)


def test_an_arena_is_zero_when_any_rank_has_it(ranks, stand_in):
    stand_in(3)

    def work(fabric):
        memory, transport = arena(fabric)
        return transport, [read(pointer, SLOT * 3 + 64) for pointer in memory.pointers]

    assert ranks(3, work) == [("p2p", [bytes(SLOT * 3 + 64)] * 3)] * 3


def test_a_pair_that_lies_is_an_error_on_every_rank_and_nothing_is_kept(ranks, stand_in):
    runtime = stand_in(3)
    runtime.lying.add((0, 2))

    def work(fabric):
        with pytest.raises(MachineError) as caught:
            arena(fabric, wanted="p2p")
        return str(caught.value)

    for error in ranks(3, work):
        assert error.startswith("init: devices report peer access")
        assert "do not arrive: from rank 0 to rank 2;" in error
    quarantine.sweep()
    assert not runtime.memory


def test_pairs_that_were_tried_are_trusted(ranks, stand_in):
    runtime = stand_in(2)
    runtime.lying.add((0, 1))
    found = ranks(2, lambda fabric: arena(fabric, wanted="p2p", probed=True))
    assert [transport for _, transport in found] == ["p2p"] * 2
    with pytest.raises(MachineError):
        ranks(2, lambda fabric: arena(fabric, wanted="p2p"))
