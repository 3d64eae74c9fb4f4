"""``ringcoll topo``: a machine's links, the rings they allow, and what limits these."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ringcoll.algorithms import build as build_plan
from ringcoll.algorithms import name_of
from ringcoll.algorithms.load import find_all
from ringcoll.cli.links import typed
from ringcoll.cli.output import (
    check_target,
    progress,
    say_unproven,
    say_written,
    write_json,
    write_text,
)
from ringcoll.errors import ArgumentError, MachineError
from ringcoll.model.fastest import best_slices
from ringcoll.model.machine import format_gain, machine_links, times_as_long
from ringcoll.model.predict import Clock
from ringcoll.topology.build import build
from ringcoll.topology.document import Element, write
from ringcoll.topology.draw.files import check_picture, write_picture
from ringcoll.topology.draw.matrix import format_matrix
from ringcoll.topology.draw.words import (
    format_machine,
    format_notes,
    format_rings,
    format_search,
)
from ringcoll.topology.files import load_document, title_of
from ringcoll.topology.graphs import (
    RING,
    graph_of_rings,
    graphs_document,
    read_graphs,
    rings_of_graph,
)
from ringcoll.topology.paths import check_distinct
from ringcoll.topology.presets import format_presets, preset_document
from ringcoll.topology.rings import RingSet
from ringcoll.topology.search import find_rings
from ringcoll.topology.system import Gpu, System
from ringcoll.units import format_bytes, format_seconds, parse_ints

EXAMPLES = """\
ringcoll topo                                     this machine
ringcoll topo --preset dgx-h100                   a known machine; --preset list names them
ringcoll topo --file topo.xml --picture topo.svg  a file of NCCL_TOPO_DUMP_FILE, drawn
ringcoll topo --preset dgx2 --gpus 0-3 --json -   rings of four GPUs, for programs
ringcoll topo --preset dgx-h100 --algorithm ring,star.py:star
"""

_LIST = "list"
"""In place of a preset's name."""

_TIMED_BYTES = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ringcoll topo``."""
    source = parser.add_argument_group("machine").add_mutually_exclusive_group()
    source.add_argument(
        "--file",
        metavar="XML",
        help="a topology in NCCL's or RCCL's form, as NCCL_TOPO_DUMP_FILE writes it (default: "
        "this machine)",
    )
    source.add_argument(
        "--preset",
        metavar="NAME",
        help=f"a known machine; `{_LIST}` prints a line for each",
    )
    option = parser.add_argument
    option(
        "--gpus",
        type=typed(partial(parse_ints, least=0)),
        metavar="LIST",
        help="rings of these GPUs only, such as 0,2,3 or 0-3, numbered as the matrix has them",
    )
    option(
        "--mixed",
        action="store_true",
        help="also search rings over slower links, such as PCIe beside NVLink",
    )
    option(
        "--measure",
        action="store_true",
        help="use bandwidths that are timed on this machine's GPUs, which must be idle",
    )
    option(
        "--algorithm",
        metavar="LIST",
        help="predict 64 MiB on the machine's links: algorithms of all_reduce, or your own as "
        "FILE.py:FUNCTION or MODULE:FUNCTION, separated by commas",
    )
    output = parser.add_argument_group("output").add_argument
    output("--matrix", action="store_true", help="print only the matrix of links between GPUs")
    output(
        "--notes",
        action="store_true",
        help="print only doubts about the machine's description, and what the search did",
    )
    output(
        "--json",
        metavar="FILE",
        help="write GPUs, rings and limits as JSON, GPUs as the matrix numbers them; - is stdout",
    )
    output("--xml", metavar="FILE", help="write the machine in NCCL's form; - is stdout")
    output("--graph", metavar="FILE", help="write the rings as NCCL_GRAPH_FILE wants; - is stdout")
    output("--compare", metavar="FILE", help="compare with the rings of an NCCL_GRAPH_FILE")
    output(
        "--picture",
        metavar="FILE",
        help="draw machine and rings as .svg or .png, or a tree as .txt",
    )


def main(args: argparse.Namespace) -> int:
    """Run ``ringcoll topo``."""
    if args.preset == _LIST:
        print(format_presets(), end="")
        return 0
    on_stdout = [name for name in ("json", "xml", "graph") if getattr(args, name) == "-"]
    texts = [f"--{name}" for name in ("matrix", "notes") if getattr(args, name)]
    wanted = [*(f"--{name} -" for name in on_stdout), *texts]
    if on_stdout and len(wanted) > 1:
        raise ArgumentError(f"{wanted[0]} {wanted[1]}: only one option may write to stdout")
    if args.measure and args.xml is not None:
        raise ArgumentError(
            f"--measure --xml {args.xml}: NCCL's form holds no measured bandwidths; leave one out"
        )
    for name in ("json", "xml", "graph"):
        check_target(f"--{name}", getattr(args, name))
    if args.picture is not None:
        check_picture(args.picture)
    document = _document(args)
    system = build(document, title=_title(args, document))
    if args.measure:
        system = _measured(args, system)
    gpus = _members(system, args.gpus)
    with progress("searching rings"):
        rings = find_rings(system, gpus, mixed=args.mixed)
    if args.graph is not None and not rings.rings:
        raise ArgumentError(f"--graph {args.graph}: no ring joins these {len(gpus)} GPUs")
    compared = None if args.compare is None else _compare(system, rings, args.compare)
    timed = tuple(_timed(args.algorithm, system, gpus)) if args.algorithm else ()
    if not on_stdout:
        texts = [*_texts(args, system, rings, compared), *map(_format_timed, timed)]
        print("\n".join(texts), end="")
    found = _as_json(system, rings, compared)
    write_json(args.json, {**found, "algorithms": timed} if timed else found)
    write_text("--xml", args.xml, write(document))
    if args.graph is not None:
        write_text("--graph", args.graph, write(graphs_document([graph_of_rings(rings)])))
    if args.picture is not None:
        write_picture(system, rings, args.picture)
        say_written(args.picture)
    return 0


def _document(args: argparse.Namespace) -> Element:
    """The machine that the options name."""
    if args.file is not None:
        return load_document(args.file)
    if args.preset is not None:
        return preset_document(args.preset)
    from ringcoll.config import from_environment  # it loads numpy
    from ringcoll.topology.detect import detect

    _, settings = from_environment(os.environ)
    # Fresh: a link may have failed since the last detection.
    with progress("detecting the GPUs and their links"):
        document = detect(fresh=True, cache_dir=settings.cache_dir)
    if not any(element.tag == "gpu" for element in document.walk()):
        raise MachineError(
            "no GPU was found on this machine; --file FILE.xml takes a machine from a file, "
            "--preset NAME a known one"
        )
    return document


def _measured(args: argparse.Namespace, system: System) -> System:
    """The system with bandwidths that were timed on this machine."""
    if args.preset is not None:
        raise ArgumentError("--measure times copies on this machine; leave --preset out")
    from ringcoll.topology.detect import measure

    with progress("timing copies between the GPUs"):
        return measure(system)


def _title(args: argparse.Namespace, document: Element) -> str:
    if args.file is not None:
        return title_of(document, args.file)
    return args.preset or document.get("name") or "this machine"


def _members(system: System, chosen: Sequence[int] | None) -> tuple[Gpu, ...]:
    """The GPUs that ``--gpus`` names."""
    if chosen is None:
        return system.gpus
    count = len(system.gpus)
    for number in chosen:
        if number >= count:
            numbers = f"they are 0 to {count - 1}" if count else "the machine has none"
            raise ArgumentError(f"--gpus: there is no GPU {number}; {numbers}")
    gpus = tuple(system.gpus[number] for number in sorted(chosen))
    check_distinct("--gpus", gpus)
    return gpus


@dataclass(frozen=True, slots=True)
class _Compared:
    """Rings of a file; an all_reduce takes ``longer`` times as long along them as along ours."""

    path: str
    rings: RingSet
    longer: float

    def format(self, system: System) -> str:
        """The rings and the verdict, for people."""
        return (
            f"{self.path.encode('utf-8', 'replace').decode()}: {format_rings(system, self.rings)}"
            f"an all_reduce takes {self.longer:.3g} times as long on paper along them as along the "
            f"rings that were found\n"
        )


def _compare(system: System, found: RingSet, path: str) -> _Compared:
    """Judge the rings of a graph file by the clock that judges ours."""
    graphs = [graph for graph in read_graphs(load_document(path)) if graph.id == RING]
    if not graphs or not graphs[0].channels or graphs[0].speedintra <= 0:
        raise ArgumentError(f"--compare {path}: the file has no rings (graph {RING})")
    try:
        rings = rings_of_graph(graphs[0], system)
    except ArgumentError as error:
        raise ArgumentError(f"--compare {path}: {error}") from None
    if not found.rings or found.gpus != rings.gpus:
        why = "leave --gpus out" if found.rings else "no ring joins the GPUs of this machine"
        raise ArgumentError(f"--compare {path}: its rings join all GPUs; {why}")
    return _Compared(path, rings, times_as_long(system, found, rings))


def _timed(names: str, system: System, gpus: Sequence[Gpu]) -> Iterator[dict[str, Any]]:
    """What the clock says of each algorithm, a rank on each GPU, in the best number of slices."""
    links, count = machine_links(system, gpus), len(gpus)
    for algorithm in find_all("all_reduce", names):
        collective = "all_reduce"
        if callable(algorithm):
            collective = algorithm(count).collective.name
        plan = build_plan(collective, algorithm, count)
        if callable(algorithm):
            say_unproven("topo", plan)
        clock = Clock(plan, links)
        slices, seconds = best_slices(clock, _TIMED_BYTES, only_powers=True)
        yield {
            "collective": collective,
            "algorithm": name_of(algorithm),
            "bytes": _TIMED_BYTES,
            "slices": slices,
            "seconds": seconds,
            "busiest": clock.predict(_TIMED_BYTES, slices).busiest,
        }


def _format_timed(timed: dict[str, Any]) -> str:
    return (
        f"{timed['collective']} of {format_bytes(timed['bytes'])} by {timed['algorithm']}: "
        f"{format_seconds(timed['seconds'])} on paper (S = {timed['slices']}), busiest "
        f"{timed['busiest']}\n"
    )


def _texts(
    args: argparse.Namespace, system: System, rings: RingSet, compared: _Compared | None
) -> Iterator[str]:
    """What is printed for people, in parts."""
    everything = not (args.matrix or args.notes)
    if args.matrix or everything:
        yield format_matrix(system)
    if everything:
        yield format_rings(system, rings)
        yield from format_gain(system, rings)
    if compared is not None:
        yield compared.format(system)
    if everything:
        yield format_machine(system)
    notes = format_notes(system)
    if args.notes:
        yield (notes + format_search(rings)) or "nothing is strange\n"
    elif everything and notes:
        yield notes


def _as_json(
    system: System, rings: RingSet, compared: _Compared | None = None
) -> dict[str, object]:
    """What is found for programs; GPUs have the numbers that ``--gpus`` and the texts name."""
    numbers = {gpu.name: number for number, gpu in enumerate(system.gpus)}
    members = [numbers[gpu.name] for gpu in rings.gpus]
    beside: dict[str, object] = {}
    if compared is not None:
        theirs = _as_json(system, compared.rings)
        beside["compared"] = {
            "rings": theirs["rings"],
            "total_bandwidth": theirs["total_bandwidth"],
            "times_as_long": compared.longer,
        }
    return {
        "gpus": [
            {
                "number": number,
                "name": gpu.name,
                "rank": gpu.rank,
                "dev": gpu.dev,
                "busid": gpu.busid,
                "sm": gpu.sm,
            }
            for number, gpu in zip(members, rings.gpus, strict=True)
        ],
        "rings": [
            {
                "order": [members[at] for at in ring.order],
                "bandwidth": ring.bandwidth,
                "hops": [hop.name for hop in ring.hops],
            }
            for ring in rings.rings
        ],
        "total_bandwidth": rings.bandwidth,
        "limits": [
            {"link": limit.link, "used": limit.used, "capacity": limit.capacity}
            for limit in rings.limits
        ],
        **beside,
    }
