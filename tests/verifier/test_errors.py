"""Each rule of the verifier, broken once by hand: the error names rank, block, step and why."""

from __future__ import annotations

import pytest

from ringcoll.errors import (
    ArgumentError,
    Deadlock,
    EntryViolation,
    ExitViolation,
    IllegalStep,
    Race,
    UnawaitedSignal,
    WrongResult,
)
from ringcoll.verifier.prover import verify
from tests.verifier.plans import broadcast, plan, staged_sum


def rejects(error, broken, *words, **options):
    with pytest.raises(error) as raised:
        verify(broken, **options)
    text = str(raised.value)
    assert str(broken.collective) in text
    for word in words:
        assert word in text, text
    return text


def test_the_plans_to_break_are_right():
    proof = verify(broadcast())
    assert (proof.steps, proof.blocks, proof.rounds, proof.total) == (4, 2, 2, True)
    proof = verify(staged_sum())
    assert (proof.steps, proof.roundings, proof.total, proof.rank_order) == (4, 1, True, True)


def test_wait_without_signal_is_a_deadlock():
    broken = broadcast(send=(0, "0.I[0] -> 1.O[0]"))
    rejects(Deadlock, broken, "rank 1 channel 0 lane 0, step 0", "seen 0 of 1")


def test_wait_for_a_block_that_is_not_there_is_a_deadlock():
    broken = broadcast(exit=(1, "", ["0.3.0"]))
    rejects(Deadlock, broken, "rank 1 channel 0 lane 0, step 0", "rank 0 channel 3 lane 0")


def test_signal_without_wait():
    broken = broadcast(exit=(1, "", []))
    rejects(UnawaitedSignal, broken, "rank 0 channel 0 lane 0, step 2", "seen 1 more", "wanted")


def test_signal_to_a_block_that_is_not_there():
    broken = broadcast(send=(0, "0.I[0] -> 1.O[0]", [], [1, "1.2.0"]))
    rejects(UnawaitedSignal, broken, "step 2: signals rank 1 channel 2 lane 0")


def test_read_in_no_order_with_a_write():
    broken = staged_sum(
        send0=(0, "0.I[0] -> 1.S[0]"),
        sum1=(1, "1.S[0] + 1.I[0] -> 1.O[0]"),
    )
    text = rejects(Race, broken, "rank 1 channel 0 lane 0, step 1: reads 1.S[0]")
    assert "the write by rank 0 channel 0 lane 0, step 0" in text


def test_write_in_no_order_with_a_read():
    steps = [
        (0, "0.I[0] -> 1.S[0]", ["hello 1"], [1]),
        (1, "1.S[0] -> 1.O[0]", [0]),
        # The second chunk takes the place of the first without a credit.
        (0, "0.I[1] -> 1.S[0]", [], [1]),
        (1, "1.S[0] -> 1.O[1]", [0]),
    ]
    text = rejects(
        Race, plan("send", 2, *steps, chunks=2), "rank 0 channel 0 lane 0, step 1: writes"
    )
    assert "the read by rank 1 channel 0 lane 0, step 0" in text
    steps[1] = (1, "1.S[0] -> 1.O[0]", [0], [0])
    steps[2] = (0, "0.I[1] -> 1.S[0]", [1], [1])
    assert verify(plan("send", 2, *steps, chunks=2)).steps == 4


def test_two_writes_in_no_order():
    broken = plan(
        "broadcast",
        1,
        ("0.0.0", "0.I[0] -> 0.O[0]"),
        ("0.0.1", "0.I[0] -> 0.O[0]"),
    )
    text = rejects(Race, broken, "rank 0 channel 0 lane 1, step 0: writes 0.O[0]")
    assert "the write by rank 0 channel 0 lane 0, step 0" in text


def test_order_through_a_third_block_counts_whatever_comes_first():
    # Two signals of one sender reach rank 2 by two ways, the later one first.
    steps = [
        (0, "0.I[0] -> 2.S[0]", [], [2]),
        (0, "0.I[0] -> 2.S[1]", [], [1]),
        (1, "", [0], [2]),
        (2, "", [1]),
        (2, "", [0]),
        (2, "2.S[1] -> 2.O[0]"),
        (1, "1.I[0] -> 1.O[0]", []),
    ]
    right = plan("broadcast", 3, *steps[:-1], (0, "0.I[0] -> 0.O[0], 1.S[0]", [], [1]))
    right = right.with_order(
        (*right.order, *plan("broadcast", 3, (1, "1.S[0] -> 1.O[0]", [0])).order)
    )
    assert verify(right).blocks == 3


def test_entry():
    broken = broadcast(hello=None)
    rejects(EntryViolation, broken, "rank 0 channel 0 lane 0, step 1: writes 1.O[0]", "rank 1")


def test_a_signal_from_a_block_of_the_rank_is_its_entry():
    right = broadcast(hello=(1, "", [], [0]), send=(0, "0.I[0] -> 1.O[0]", [1], [1]))
    assert verify(right).total


def test_hello_travels_with_signals():
    steps = [
        (0, "", ["hello 2"], [1]),
        (1, "2.I[0] -> 1.O[0]", [0], [2]),
        (2, "2.I[0] -> 2.O[0], 0.S[0]", [1], [0]),
        (0, "0.S[0] -> 0.O[0]", [2]),
    ]
    assert verify(plan("broadcast", 3, *steps, root=2)).steps == 4
    steps[0] = (0, "", ["hello 1"], [1])
    rejects(EntryViolation, plan("broadcast", 3, *steps, root=2), "rank 1 channel 0 lane 0, step 0")


def test_exit():
    broken = broadcast(send=(0, "0.I[0] -> 1.O[0]"), exit=(1, ""))
    rejects(ExitViolation, broken, "rank 0 channel 0 lane 0, step 2: touches 1.O[0]", "1 blocks")


def test_exit_is_the_end_of_any_one_block():
    right = broadcast(send=(0, "0.I[0] -> 1.O[0]", [], ["1.0.5"]), exit=("1.0.5", "", [0]))
    right = right.with_order((*right.order, *plan("broadcast", 2, (1, "")).order))
    assert verify(right).blocks == 3


def test_exit_of_a_rank_without_blocks():
    broken = broadcast(send=(0, "0.I[0] -> 1.O[0]"), exit=None)
    rejects(ExitViolation, broken, "a rank without blocks")


def test_scratch_knows_no_entry_and_no_exit():
    steps = [(0, "0.I[0] -> 0.O[0], 1.S[0]", [], [1]), (1, "1.S[0] -> 1.O[0]", [0])]
    assert verify(plan("broadcast", 2, *steps)).total is False


def test_reading_nothing():
    broken = staged_sum(send0=(0, "0.I[0] -> 1.S[1]", [], [1]))
    text = rejects(WrongResult, broken, "rank 1 channel 0 lane 0, step 1: seen nothing in 1.S[0]")
    assert "wanted a contribution" in text


def test_contribution_counted_twice():
    broken = staged_sum(sum0=(0, "0.I[0] + 0.S[0] + 0.I[0] -> 0.O[0]", [1]))
    rejects(WrongResult, broken, "rank 0 channel 0 lane 0, step 1", "rank 0 once, seen twice")


def test_contributions_to_two_chunks():
    broken = plan("all_reduce", 1, (0, "0.I[0] + 0.I[1] -> 0.O[0]"), chunks=2)
    rejects(WrongResult, broken, "step 0: seen 0[0] + 0[1]", "one chunk")


def test_reducing_where_nothing_is_reduced():
    broken = plan("all_gather", 1, (0, "0.I[0] + 0.I[0] -> 0.O[0]"))
    rejects(WrongResult, broken, "step 0: seen 2 sources, wanted one")


def test_wrong_chunk():
    broken = plan("broadcast", 1, (0, "0.I[0] -> 0.O[0]"), (0, "0.I[0] -> 0.O[1]"), chunks=2)
    rejects(WrongResult, broken, "rank 0 channel 0 lane 0, step 1", "seen 0[0], wanted 0[1]")


def test_missing_contribution():
    broken = staged_sum(sum0=(0, "0.I[0] -> 0.O[0]", [1]))
    rejects(
        WrongResult, broken, "rank 0 channel 0 lane 0, step 1", "seen 0[0], wanted every rank's"
    )


def test_missing_chunk():
    broken = broadcast(own=None)
    rejects(WrongResult, broken, "rank 0, no step writes this chunk", "seen nothing, wanted 0[0]")


def test_partial_in_output():
    steps = [
        *((r, f"{r}.I[0] -> 0.S[{r}]", [], [0]) for r in (1, 2)),
        (0, "0.I[0] + 0.S[1] -> 0.O[0]", [1]),
        (0, "0.O[0] + 0.S[2] -> 0.O[0]", [2]),
    ]
    broken = plan("reduce", 3, *steps)
    rejects(WrongResult, broken, "rank 0 channel 0 lane 0, step 0: seen a partial, (0[0] + 1[0])")


def test_input_is_the_callers():
    broken = plan("all_reduce", 1, (0, "0.I[0] -> 0.O[0]"), (0, "0.O[0] -> 0.I[0]"))
    rejects(WrongResult, broken, "rank 0 channel 0 lane 0, step 1: seen a write to 0.I[0]")


def test_input_in_place_may_be_overwritten_where_it_is_output():
    def reduce_scatter(dst):
        steps = [
            *((r, f"{r}.I[{1 - r}] -> {1 - r}.S[0]", [], [1 - r]) for r in (0, 1)),
            (0, f"0.I[0] + 0.S[0] -> {dst}", [1]),
            (1, "1.S[0] + 1.I[1] -> 1.O[0]", [0]),
        ]
        return plan("reduce_scatter", 2, *steps, in_place=True)

    assert verify(reduce_scatter("0.O[0]")).rank_order
    rejects(WrongResult, reduce_scatter("0.I[1]"), "rank 0 channel 0 lane 0, step 1", "0.O[1]")


def test_only_the_root_of_reduce_has_an_output_in_place():
    steps = [(1, "1.I[0] -> 0.S[0]", [], [0]), (0, "0.I[0] + 0.S[0] -> 0.O[0]", [1])]
    assert verify(plan("reduce", 2, *steps, in_place=True)).rank_order
    broken = plan("reduce", 2, *steps, (1, "1.I[0] -> 1.I[0]"), in_place=True)
    rejects(WrongResult, broken, "rank 1 channel 0 lane 0, step 1: seen a write to 1.I[0]")


def test_one_contribution_still_has_to_be_finished():
    # avg and premul_sum change even a single contribution: a raw one is no result.
    broken = plan("all_reduce", 1, in_place=True)
    rejects(WrongResult, broken, "no step writes this chunk", "finished")
    right = plan("all_reduce", 1, (0, "0.I[0] -> 0.O[0]"), in_place=True)
    assert verify(right).roundings == 1


def test_ranks_must_agree_in_bits():
    broken = staged_sum(sum1=(1, "1.I[0] + 1.S[0] -> 1.O[0]", [0]))
    rejects(WrongResult, broken, "rank 1 channel 0 lane 0, step 1", "(1[0] + 0[0])", "bits")


def test_deterministic_is_the_left_fold_in_rank_order():
    swapped = staged_sum(
        sum0=(0, "0.S[0] + 0.I[0] -> 0.O[0]", [1]), sum1=(1, "1.I[0] + 1.S[0] -> 1.O[0]", [0])
    )
    assert not verify(swapped).rank_order
    rejects(WrongResult, swapped, "rank order", "not deterministic", deterministic=True)
    assert verify(staged_sum(), deterministic=True).rank_order


def chain(last):
    """Partials go down a chain of three ranks."""
    return plan(
        "reduce",
        3,
        (0, "0.I[0] -> 1.S[0]", [], [1]),
        (1, "1.S[0] + 1.I[0] -> 2.S[0]", [0], [2]),
        (2, f"{last} -> 2.O[0]", [1]),
        root=2,
    )


def test_rounding_per_hop_is_part_of_the_tree():
    plan3 = chain("2.S[0] + 2.I[0]")
    assert verify(plan3, deterministic=True).roundings == 1
    assert verify(plan3, accumulate="dtype").roundings == 2
    text = rejects(WrongResult, plan3, accumulate="dtype", deterministic=True)
    assert "~(~(0[0] + 1[0]) + 2[0])" in text


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ((0, "", ["hello 1", "hello 1"]), "one hello awaited twice"),
        ((0, "", ["hello 0"]), "hello of rank 0"),
        ((0, "", ["hello 2"]), "hello of rank 2"),
        ((0, "", [], ["hello 1"]), "entering a call posts the hello"),
        ((0, "", [0], [0]), "between a block and itself"),
        ((0, "0.I[0] -> 0.O[0], 0.O[0]"), "same destination twice"),
        ((0, "0.I[0] ->"), "sources without destinations"),
        ((0, "0.I[1] -> 0.O[0]"), "lies outside"),
        (("0.0.-1", "0.I[0] -> 0.O[0]"), "no such block"),
    ],
)
def test_steps_that_mean_nothing(bad, words):
    broken = plan("broadcast", 2, (0, "0.I[0] -> 0.O[0]"), bad)
    at = "step 0" if "-1" in str(bad[0]) else "step 1"
    rejects(
        IllegalStep, broken, f"rank 0 channel 0 lane {-1 if at == 'step 0' else 0}, {at}", words
    )


def test_a_copy_must_not_overlap_itself():
    broken = plan("all_gather", 1, (0, "0.O[0:2] -> 0.O[1:3]"), chunks=3)
    rejects(IllegalStep, broken, "step 0", "overlap")
    onto_itself = plan(
        "all_gather", 1, (0, "0.I[0:3] -> 0.O[0:3]"), (0, "0.O[0:2] -> 0.O[0:2]"), chunks=3
    )
    assert verify(onto_itself).steps == 2


def test_a_barrier_must_be_total():
    right = plan("barrier", 2, (0, "", ["hello 1"]), (1, "", ["hello 0"]))
    assert verify(right).total
    broken = plan("barrier", 2, (0, "", ["hello 1"]), (1, ""))
    rejects(WrongResult, broken, "rank 1", "rank 0 has entered")


NODES = [0, 0, 1]


@pytest.mark.parametrize(
    ("move", "words"),
    [
        ("0.I[0] + 0.S[0] -> 2.S[0]", "2 sources reduced into another node"),
        ("2.S[0] -> 0.S[0]", "a source on node 1"),
        ("1.S[0] -> 2.S[0]", "a source of rank 1"),
    ],
)
def test_between_nodes_only_a_local_source_is_copied(move, words):
    broken = plan("all_reduce", 3, (0, move))
    rejects(IllegalStep, broken, "rank 0 channel 0 lane 0, step 0", words, nodes=NODES)


def test_a_copy_between_nodes():
    steps = [
        (0, "0.I[0] -> 0.O[0], 1.S[0], 2.S[0]", [], [1, 2]),
        (1, "1.S[0] -> 1.O[0]", [0]),
        (2, "2.S[0] -> 2.O[0]", [0]),
    ]
    assert verify(plan("broadcast", 3, *steps), nodes=NODES).steps == 3


def test_arguments():
    with pytest.raises(ArgumentError, match="protocol='simple'"):
        verify(staged_sum(), protocol="simple")
    with pytest.raises(ArgumentError, match="nodes: 1 given for the 2 ranks"):
        verify(staged_sum(), nodes=[0])
    with pytest.raises(ArgumentError, match="accumulate"):
        verify(staged_sum(), accumulate="half")  # type: ignore[arg-type]


def scan(**changes):
    """A scan of three ranks along a chain. A named step is replaced; None drops it."""
    steps = {
        "send": (0, "0.I[0] -> 1.S[0]", ["hello 1"], [1]),
        "first": (0, "0.I[0] -> 0.O[0]"),
        "pass": (1, "1.S[0] + 1.I[0] -> 2.S[0]", [0, "hello 2"], [2]),
        "second": (1, "1.S[0] + 1.I[0] -> 1.O[0]"),
        "third": (2, "2.S[0] + 2.I[0] -> 2.O[0]", [1]),
    }
    steps.update(changes)
    return plan("scan", 3, *(s for s in steps.values() if s is not None))


def test_a_prefix_is_of_the_ranks_up_to_its_own():
    proof = verify(scan())
    assert (proof.roundings, proof.total, proof.rank_order) == (1, False, True)
    wanted = "wanted the [0] of ranks 0 to 1 once, finished"
    rejects(WrongResult, scan(second=(1, "1.I[0] -> 1.O[0]")), "1.O[0]", "seen ~1[0]", wanted)
    rejects(WrongResult, scan(second=(1, "1.S[0] -> 1.O[0]")), "seen ~0[0]", wanted)
    rejects(WrongResult, scan(second=None), "no step writes this chunk", "seen nothing", wanted)
    twice = scan(third=(2, "2.S[0] + 2.I[0] + 2.I[0] -> 2.O[0]", [1]))
    rejects(WrongResult, twice, "rank 2 once, seen twice")


def test_a_prefix_that_is_finished_is_not_combined_again():
    broken = scan(
        second=None, **{"pass": (1, "1.S[0] + 1.I[0] -> 1.O[0], 2.S[0]", [0, "hello 2"], [2])}
    )
    rejects(WrongResult, broken, "rank 2", "~(0[0] + 1[0]) + 2[0]", "no finished result combined")


def test_a_prefix_in_another_order_is_not_deterministic():
    other = scan(third=(2, "2.I[0] + 2.S[0] -> 2.O[0]", [1]))
    assert not verify(other).rank_order
    rejects(WrongResult, other, "not deterministic", deterministic=True)
