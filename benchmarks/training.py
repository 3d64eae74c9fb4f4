"""Training by DDP or FSDP2 through ringcoll, beside NCCL (gloo on CPUs) in the same run.

::

    python -m benchmarks.training [--ranks 1,2,4,8] [--cases resnet50:256,gpt:16] [--ways LIST]
    python -m benchmarks.training --graphs
    python -m benchmarks.training --deterministic
    python -m benchmarks.training --device cpu --out FOLDER

One process a GPU, which this command starts, for each number of ranks anew. Models compute in
bfloat16 on synthetic data. Every way begins with the same weights and sees the same batches: first
some steps whose losses are compared, then rounds that are timed, the ways in turns, each round in
an order of its own. The slowest rank counts, and the median of the rounds; beside the peer the
median of each round's own comparison, with its standard error. What communication costs beyond what
hides behind the backward pass is the difference to steps of DDP that do not communicate, timed in
the same turns.

``--graphs`` times replays of whole steps that were captured in CUDA graphs: nothing waits for the
host, so that small batches show what communication costs on the GPUs.

``--nodes 2`` lets this machine play so many nodes, between which ringcoll goes by MPI; the peer
knows nothing of that.

``--deterministic`` trains several times from the start, also with other sizes of buckets, and
compares the weights to the bit; nothing is timed.

Figures and a picture of the losses are written to the folder that ``--out`` names.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.processes import run_ranks
from benchmarks.models.figures import compare, repeated, rows_of, table, write_curves
from benchmarks.models.on_nodes import run_on_nodes
from benchmarks.needs import require
from benchmarks.record import add_out, save
from ringcoll.bench.environment import machine, versions

if TYPE_CHECKING:
    from benchmarks.models.ranks import Plan

__all__ = ["main"]

CASES = "resnet50:256,resnet50:16,gpt:16,gpt:1"
WAYS = "peer,ringcoll,ringcoll-hook"
BUCKETS, OTHER_BUCKETS = "25", "25,25,5,1"


def numbers_of(text: str) -> tuple[int, ...]:
    """Whole numbers above 0, separated by commas."""
    found = tuple(int(word) for word in text.split(","))
    if min(found) < 1:
        raise ValueError
    return found


def cases_of(text: str) -> tuple[tuple[str, int], ...]:
    """``resnet50:256,gpt:16``."""
    cases = tuple((case.partition(":")[0], int(case.partition(":")[2])) for case in text.split(","))
    if any(batch < 1 for _, batch in cases):
        raise ValueError
    return cases


def ways_of(text: str) -> tuple[str, ...]:
    """Names of ways, separated by commas."""
    return tuple(text.split(","))


def sizes_of(text: str) -> tuple[float, ...]:
    """MiB, separated by commas."""
    return tuple(map(float, text.split(",")))


def run(
    work: Callable[..., None], plan: Plan, ranks: int, nodes: int, seconds: float
) -> tuple[list[dict[str, Any]], str | None]:
    """What all ranks have said, joined, and what went wrong."""
    said: list[dict[str, Any]] = []

    def keep(messages: list[dict[str, Any]]) -> None:
        joined = dict(messages[0])
        for key in {"seconds", "digest", "after"} & joined.keys():
            joined[key] = [message[key] for message in messages]
        said.append(joined)
        print(".", end="", file=sys.stderr, flush=True)

    if nodes > 1:
        error = run_on_nodes(work.__name__, plan, ranks, nodes, seconds, keep)
    else:
        forked = plan.device == "cpu"
        error = run_ranks(work, ranks, (plan,), seconds, keep, forked=forked)
    print(f" {ranks} ranks{'' if error is None else f': {error}'}", file=sys.stderr, flush=True)
    return said, error


def about(ranks: int, device: str) -> dict[str, Any]:
    """Machine and versions."""
    import torch

    from ringcoll import __version__

    where = machine(ranks, threads=False, device=device)
    with_what = {**versions(__version__), "torch": torch.__version__}
    if device == "cuda":
        where["gpus"] = f"{ranks} {torch.cuda.get_device_name(0)}"
        with_what["cuda"] = str(torch.version.cuda)
        with_what["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {"machine": where, "versions": with_what}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description="Training through ringcoll and its peer.")
    option = made.add_argument
    option("--ranks", type=numbers_of, help="how many, in turn; default: 1, 2, 4, 8 as there are")
    option("--nodes", type=int, default=1, help="that this machine plays, under mpiexec (1)")
    option("--cases", type=cases_of, default=CASES, help="MODEL:BATCH of a rank (%(default)s)")
    option(
        "--ways",
        type=ways_of,
        default=WAYS,
        help="also peer-none, peer-bf16, ringcoll-bf16, ringcoll-all-sms, ringcoll-copy; by FSDP2 "
        "peer-fsdp, ringcoll-fsdp, ringcoll-fsdp-all-sms, ringcoll-fsdp-copy (%(default)s)",
    )
    option("--graphs", action="store_true", help="time replays of captured steps; on GPUs")
    option("--deterministic", action="store_true", help="compare runs to the bit, time nothing")
    option("--buckets", type=sizes_of, help="MiB (25; with --deterministic, each once: 25,25,5,1)")
    option("--curve", type=int, default=30, help="steps whose losses are compared (%(default)s)")
    option("--steps", type=int, default=10, help="steps of a round (%(default)s)")
    option("--rounds", type=int, default=5, help="rounds of every way, in turns (%(default)s)")
    option("--device", choices=("cuda", "cpu"), default="cuda", help="what trains (%(default)s)")
    option("--tiny", action="store_true", help="small stand-ins for the models, for tests")
    option("--seconds", type=float, default=540.0, help="for each number of ranks (%(default)s)")
    option("--commit", default="", help="what is measured, where there is no git")
    add_out(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 if a part failed, or what must be equal is not."""
    made = parser()
    args = made.parse_args(argv)
    if args.graphs and (args.deterministic or args.device == "cpu"):
        made.error("--graphs needs GPUs, and times what --deterministic does not")
    if args.nodes < 1 or any(number % args.nodes for number in args.ranks or ()):
        made.error(f"--nodes={args.nodes}: every number of --ranks is to be divided by it")
    wanted = max(args.ranks or (1,)) if args.device == "cuda" else 0
    there = require(made, gpus=wanted, torch=True, instead="; --device cpu trains on CPU ranks")
    # Before any rank starts CUDA: without it products of matrices differ from run to run.
    if args.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    from benchmarks.models.ranks import Plan, measure, repeat
    from benchmarks.models.replica import MODELS
    from benchmarks.models.replica import WAYS as KNOWN

    if unknown := {*args.ways} - KNOWN.keys() | {model for model, _ in args.cases} - MODELS.keys():
        made.error(f"no such models or ways: {', '.join(sorted(unknown))}")
    peer = "nccl" if args.device == "cuda" else "gloo"
    usual = (n for n in (1, 2, 4, 8) if n <= (there or 2) and n % args.nodes == 0)
    numbers = args.ranks or tuple(usual)
    buckets = args.buckets or sizes_of(OTHER_BUCKETS if args.deterministic else BUCKETS)
    tasks = {model: MODELS[model](tiny=args.tiny) for model, _ in args.cases}
    sharded = any(KNOWN[way].sharded for way in args.ways)
    if sharded and any(task.channels_last for task in tasks.values()):
        made.error("FSDP2 refuses weights in channels_last, as resnet50 has; pass --cases gpt:16")
    units = {model: (task.unit, task.units) for model, task in tasks.items()}

    rows: list[dict[str, Any]] = []
    errors: dict[str, str] = {}
    for ranks in numbers:
        with tempfile.TemporaryDirectory(prefix="ringcoll-training-") as folder:
            plan = Plan(
                cases=args.cases,
                ways=args.ways,
                device=args.device,
                tiny=args.tiny,
                curve=args.curve,
                steps=args.steps,
                rounds=args.rounds,
                buckets=buckets,
                store=f"{folder}/store",
                graphs=args.graphs,
            )
            work = repeat if args.deterministic else measure
            said, error = run(work, plan, ranks, args.nodes, args.seconds)
        if error is not None:
            errors[f"{ranks} ranks"] = error
        rows += (
            repeated(args.cases, args.ways, buckets, ranks, said)
            if args.deterministic
            else rows_of(args.cases, args.ways, ranks, units, said)
        )
    for row in rows:
        row["way"] = row["way"].replace("peer", peer)
    if not args.deterministic:
        compare(rows, peer)
    print(table(rows))

    content = {
        **about(max(numbers), args.device),
        **({"commit": args.commit} if args.commit else {}),
        "peer": peer,
        "nodes": args.nodes,
        "models": {model: task.source for model, task in tasks.items()},
        "curve_steps": args.curve,
        "environment": {k: v for k, v in os.environ.items() if k.startswith("RINGCOLL_")},
        "errors": errors,
        "rows": rows,
    }
    if not args.deterministic:
        content |= {"round_steps": args.steps, "rounds": args.rounds, "buckets_mib": buckets[0]}
    kinds = {"nodes": args.nodes > 1, "deterministic": args.deterministic, "graphs": args.graphs}
    words = ["training", *(kind for kind, given in kinds.items() if given), str(max(numbers))]
    name = "_".join(words)
    save(args.out, name, content, ranks=max(numbers))
    drawn = rows and not args.deterministic and find_spec("matplotlib") is not None
    if args.out is not None and drawn:
        write_curves(rows, args.out / f"{name}.png")
    ours = [row for row in rows if row["way"].startswith("ringcoll")]
    wrong = [row for row in ours if not row.get("equal", row.get("replicas_equal"))]
    return 1 if errors or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
