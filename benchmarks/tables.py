"""Tables and plots of the records in ``benchmarks/results``, as the documentation shows them.

::

    python -m benchmarks.tables [NAME]... [--out FOLDER]

Without ``--out`` the tables are printed as Markdown; with it each is written to ``FOLDER/NAME.md``
and its plot, where it has one, to ``FOLDER/NAME.svg``. Under each stand device, date, commit and
command of the run, as its record has them: nothing here is typed by hand.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import add_out
from ringcoll.bench.fields import Fields
from ringcoll.bench.records import LIBRARIES, call_rows, peer_times, source_of
from ringcoll.units import format_bytes

__all__ = ["FIGURES", "LIBRARIES", "all_reduce", "main", "record", "table"]

RESULTS = Path(__file__).parent / "results"

Record = Mapping[str, Any]
Rows = list[list[str]]


def record(name: str) -> Record:
    """One file of ``benchmarks/results``, without the rows that have wrong elements."""
    found: Record = _right(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))
    return found


def _right(value: Any) -> Any:
    """A value of JSON without such rows: the time of a call with a wrong result says nothing.

    Every table reads its records through this, so that none can forget it.
    """
    if isinstance(value, dict):
        return {key: _right(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_right(each) for each in value if not _counts_wrong(each)]
    return value


def _counts_wrong(value: Any) -> bool:
    # A run of PyTorch's tests lists names there, and its table counts them.
    wrong = value.get("wrong") if isinstance(value, dict) else None
    return isinstance(wrong, int) and wrong > 0


def all_reduce(found: Record) -> dict[str, dict[int, float]]:
    """Microseconds by library and bytes; of torch's kernels the faster, of calls those in place."""
    rows = call_rows(Fields(found, "record"))[""]
    times = peer_times(rows, "all_reduce")
    return {lib: {size: row["us"] for size, row in of.items()} for lib, of in times.items()}


def latency_table(name: str) -> tuple[str, Rows]:
    """All_reduce among GPUs beside its peers."""
    times = all_reduce(record(name))
    rows = [["all_reduce, µs", *(LIBRARIES[lib] for lib in times)]]
    for size in sorted(times["ringcoll"]):
        rows.append([format_bytes(size), *(_number(times[lib].get(size)) for lib in times)])
    return _source(record(name)), rows


def parts_table(*names: str) -> tuple[str, Rows]:
    """The other collectives: time as a part of NCCL's, by size, for each kind of memory."""
    times: dict[str, dict[str, dict[int, float]]] = {}
    for row in (row for name in names for row in record(name)["rows"]):
        if row["collective"] != "all_reduce" and "options" not in row:
            of = times.setdefault(row["collective"], {}).setdefault(row["lib"], {})
            of[row["bytes"]] = min(row["us"], of.get(row["bytes"], row["us"]))
    sizes = sorted({size for found in times.values() for size in found.get("ringcoll", ())})
    rows = [["time / NCCL's", *map(format_bytes, sizes)]]
    for lib, peer, what in (
        ("ringcoll", "nccl", ""),
        ("ringcoll plain", "nccl", ", plain memory"),
        ("ringcoll", "nccl symmetric", ", NCCL with symmetric windows"),
    ):
        for collective, found in times.items():
            ours, theirs = found.get(lib, {}), found.get(peer, {})
            both = ours.keys() & theirs.keys()
            parts = [f"{ours[size] / theirs[size]:.2f}" if size in both else "" for size in sizes]
            rows += [[collective + what, *parts]] if any(parts) else []
    return "<br>".join(_source(record(name)) for name in names), rows


def mpi_table(name: str) -> tuple[str, Rows]:
    """CPU ranks beside MPI, on the same arrays in the same run."""
    found = record(name)
    rows = [["call", "size", "place", "ringcoll", "MPI", "as fast as MPI"]]
    for call, measured in found["rows"].items():
        of = {(row["bytes"], row["in_place"], row["lib"]): row["time_us"] for row in measured}
        for size, in_place in dict.fromkeys(key[:2] for key in of):
            us, theirs = (of.get((size, in_place, lib)) for lib in ("ringcoll", "mpi"))
            if us is not None and theirs is not None:
                place = "in place" if in_place else "out of place"
                times = [f"{_number(us)} µs", f"{_number(theirs)} µs", f"{theirs / us:.1f} times"]
                name_of = "all_reduce" if call[0].isdigit() else call
                rows.append([name_of, format_bytes(size), place, *times])
    return _source(found), rows


def hosts_table(name: str) -> tuple[str, Rows]:
    """CPU ranks on hosts that a network joins, beside MPI and the model."""
    found = record(name)
    rows = [["call", "size", "ringcoll", "of the line rate", "model", "MPI", "of the line rate"]]
    mpi = {(r["collective"], r["bytes"]): r for r in found["lines"] if r["lib"] == "mpi"}
    for row in (row for row in found["lines"] if row["lib"] == "ringcoll"):
        peer = mpi[row["collective"], row["bytes"]]
        times = [f"{row['ms']:.1f} ms", f"{row['of_the_rate']:.2f}", f"{row['model_ms']:.1f} ms"]
        theirs = [f"{peer['ms']:.1f} ms", f"{peer['of_the_rate']:.2f}"]
        rows.append([row["collective"], format_bytes(row["bytes"]), *times, *theirs])
    return _source(found), rows


def training_table(*names: str) -> tuple[str, Rows]:
    """DDP: the time of a step as a part of NCCL's."""
    rows = [["model, batch a GPU", "GPUs", "NCCL", "ringcoll", "ringcoll, by the hook", "losses"]]
    for name in names:
        found = record(name)
        how = ", CUDA graph" if "--graphs" in found["command"] else ""
        how += ", by the bridge" if any(row.get("bridge") for row in found["rows"]) else ""
        ways = {(r["model"], r["batch"], r["way"]): r for r in found["rows"]}
        for model, batch in dict.fromkeys((r["model"], r["batch"]) for r in found["rows"]):
            theirs = ways[model, batch, "nccl"]
            ours = [ways.get((model, batch, way)) for way in ("ringcoll", "ringcoll-hook")]
            timed = [row for row in ours if row]
            rows.append(
                [
                    f"{model}, {batch}{how}",
                    str(theirs["ranks"]),
                    f"{theirs['step_ms']:.1f} ms",
                    *(_step(row) for row in ours),
                    _differing(max((row["loss_differs"] for row in timed), default=0.0)),
                ]
            )
    return "<br>".join(_source(record(name)) for name in names), rows


def torch_table(name: str) -> tuple[str, Rows]:
    """What a call of torch.distributed costs the host."""
    found = record(name)
    heads = {
        "nccl": "NCCL",
        "ringcoll": "ringcoll",
        "ringcoll, bridge": "by the bridge",
        "idle": "a Python group that does nothing",
        "communicator": "ringcoll's communicator",
    }
    timed = found["us a call"]
    heads = {group: head for group, head in heads.items() if f"{group} all_reduce" in timed}
    rows = [["host µs", *heads.values()]]
    for what in ("all_reduce", "all_reduce async and wait"):
        cells = [f"{timed[f'{group} {what}']:.1f}" for group in heads]
        rows.append([f"{what}, {format_bytes(found['bytes'])}", *cells])
    return _source(found), rows


def _step(row: dict[str, Any] | None) -> str:
    """A step beside NCCL's, if it was timed."""
    return "–" if row is None else f"{row['step_ms']:.1f} ms ({row['of_peer']:.2f})"


def start_table(*names: str) -> tuple[str, Rows]:
    """What a communicator costs to make, and a call to enqueue."""
    rows = [["GPUs", "init", "another communicator", "NCCL's init", "host a call", "bare launch"]]
    for found in map(record, names):
        second = found["init_seconds"], found["second_communicator_seconds"]
        times = [f"{seconds:.2g} s" for seconds in (*second, found["nccl_init_seconds"])]
        host = [f"{found['host_us'][key]:.1f} µs" for key in ("call", "bare launch")]
        rows.append([str(found["machine"]["ranks"]), *times, *host])
    return "<br>".join(_source(record(name)) for name in names), rows


def array_host_table(name: str) -> tuple[str, Rows]:
    """The host's time of a call, by what array object is passed."""
    found = record(name)
    rows = [["array of a call of 256 B", "host"]]
    rows += [[what, f"{us:.1f} µs"] for what, us in found["host us"].items()]
    return _source(found), rows


def array_device_table(name: str) -> tuple[str, Rows]:
    """The GPU's time of an eager call, by where the memory comes from."""
    found = record(name)
    libraries = [key for key in found["device us"][0] if key not in ("call", "bytes", "wrong")]
    rows = [["µs", *libraries]]
    for point in found["device us"]:
        call = f"{point.get('call', 'all_reduce')}, {format_bytes(point['bytes'])}"
        rows.append([call, *(_number(point[lib]) for lib in libraries)])
    return _source(found), rows


def suite_table(*names: str) -> tuple[str, Rows]:
    """PyTorch's own distributed tests."""
    rows = [["torch", "ranks", "passed", "failed", "not for this backend"]]
    sources = []
    for run in (run for name in names for run in record(name)["runs"]):
        counts = [str(run["counts"][key]) for key in ("passed", "failed", "excluded")]
        kind = "GPU" if run["machine"]["device"] == "cuda" else "CPU"
        rows.append([run["versions"]["torch"], kind, *counts])
        sources.append(_source(run))
    return "<br>".join(sources), rows


def nodes_table(*names: str) -> tuple[str, Rows]:
    """GPU ranks on nodes that one machine plays, the newest record first."""
    rows = [["256 MiB, bfloat16", "ringcoll", "MPI, memory just written", "MPI, memory in caches"]]
    for found in map(record, names):
        of = {(row["collective"], row["name"]): row["seconds"] * 1e3 for row in found["rows"]}
        for collective in dict.fromkeys(collective for collective, _ in of):
            ways = (of.get((collective, way)) for way in ("default", "mpi4py, fresh", "mpi4py"))
            cells = ("" if ms is None else f"{ms:.0f} ms" for ms in ways)
            rows.append([f"{collective}, {found['date'][:10]}", *cells])
    return "<br>".join(_source(record(name)) for name in names), rows


def sendrecv_table(name: str) -> tuple[str, Rows]:
    """Send to the next rank and receive from the one before, in eager calls."""
    found = record(name)
    rows = [["bytes a rank sends", "time", "bandwidth"]]
    for row in found["rows"]:
        time, rate = f"{row['time_us']:.0f} µs", f"{row['algbw']:.1f} GB/s"
        rows.append([format_bytes(row["bytes"]), time, rate])
    return _source(found), rows


def host_calls_table(name: str) -> tuple[str, Rows]:
    """The host's time until a call of 256 bytes returns, by what is passed and how."""
    found = record(name)
    rows = [["call of 256 B", "host"]]
    rows += [[row["name"], f"{row['us']:.1f} µs"] for row in found["rows"]]
    return _source(found), rows


def buckets_table(name: str) -> tuple[str, Rows]:
    """What one bucket of DDP costs the host: the call, and the future of its work."""
    found = record(name)
    rows = [["group", "state of the caches", "call", "its future"]]
    for row in found["rows"]:
        times = (f"{row[key]:.0f} µs" for key in ("call_us", "future_us"))
        rows.append([row["name"], row["state"], *times])
    return _source(found), rows


def overlap_table(name: str) -> tuple[str, Rows]:
    """A GEMM beside an all_reduce: both alone, and how much longer each takes beside the other."""
    found = record(name)
    rows = [["all_reduce, in place", "alone", "slowdown", "slowdown of the GEMM"]]
    for row in (row for row in found["rows"] if row["in_place"]):
        cells = f"{row['us']:.0f} µs", f"{row['slowdown']:.2f}", f"{row['gemm_slowdown']:.2f}"
        rows.append([row["name"].removesuffix(", in place"), *cells])
    return _source(found), rows


def links_table(name: str) -> tuple[str, Rows]:
    """What a link carries, by copy engine and by kernels of so many blocks."""
    found = record(name)
    rows = [["copy to the next GPU, all GPUs at once", "bandwidth a GPU"]]
    for row in found["rows"]:
        rows.append([f"{format_bytes(row['bytes'])}, {row['name']}", _gb(row["bytes_per_s"])])
    return _source(found), rows


def model_table(name: str) -> tuple[str, Rows]:
    """Chains of ranks, predicted and run: how far apart at worst."""
    found = record(name)
    points = found["rows"] if isinstance(found["points"], int) else found["points"]
    rows = [["ranks of the chain", "S", "within", "fastest S, predicted", "fastest S, measured"]]
    for ranks in dict.fromkeys(point["ranks"] for point in points):
        of = [point for point in points if point["ranks"] == ranks]
        fastest = [str(min(of, key=lambda p: p[key])["slices"]) for key in ("model", "seconds")]
        slices = f"{of[0]['slices']} to {of[-1]['slices']}"
        rows.append([str(ranks), slices, f"{max(abs(p['off']) for p in of):.1%}", *fastest])
    return _source(found), rows


Figure = Callable[..., tuple[str, Rows]]

FIGURES: Mapping[str, tuple[Figure, tuple[str, ...]]] = {
    "all_reduce_4_gpus": (latency_table, ("gpu_bars_4",)),
    "all_reduce_2_gpus": (latency_table, ("gpu_bars_2",)),
    "collectives_4_gpus": (parts_table, ("gpu_bars_4",)),
    "collectives_2_gpus": (parts_table, ("gpu_bars_2",)),
    "collectives_cpu": (mpi_table, ("collectives",)),
    "hosts": (hosts_table, ("nodes",)),
    "gpu_nodes": (nodes_table, ("gpu_nodes_4_all_reduce", "gpu_nodes_4")),
    "sendrecv_2_gpus": (sendrecv_table, ("gpu_sendrecv_2",)),
    "host_calls": (host_calls_table, ("gpu_host_calls_2",)),
    "buckets": (buckets_table, ("gpu_buckets_2",)),
    "overlap": (overlap_table, ("gpu_overlap_2",)),
    "links_4_gpus": (links_table, ("gpu_links_4",)),
    "training": (
        training_table,
        ("training_2", "training_4", "training_4_small", "training_4_bridge", "training_graphs_4"),
    ),
    "arrays_host": (array_host_table, ("gpu_arrays_2",)),
    "arrays_device": (array_device_table, ("gpu_arrays_2",)),
    "start": (start_table, ("gpu_bars_2", "gpu_bars_4")),
    "torch_calls": (torch_table, ("torch_calls",)),
    "torch_suite": (suite_table, ("torch_suite_cpu", "torch_suite_cuda")),
    "model_cpu": (model_table, ("timing_model_paced",)),
    "model_gpu": (model_table, ("gpu_timing_model_4_of_12_blocks",)),
    "model_gpu_64": (model_table, ("gpu_timing_model_4",)),
}
"""Every table: what makes it, and the records that it is made from."""


def table(name: str) -> str:
    """One of :data:`FIGURES` as Markdown, its source under it."""
    make, names = FIGURES[name]
    source, rows = make(*names)
    lines = [_row(rows[0]), _row("---" for _ in rows[0]), *map(_row, rows[1:])]
    return "\n".join([*lines, "", f"<small>{source}</small>", ""])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(us: float | None) -> str:
    if us is None:
        return ""
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.0f} GB/s"


def _differing(most: float) -> str:
    return f"differ by {most:.0e}" if most else "equal"


def _source(found: Record) -> str:
    """Where a record comes from, in a sentence."""
    return str(source_of(Fields(found, "record")))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, or write them and the plots."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)}")
    add_out(parser)
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(FIGURES):
        parser.error(f"there is no figure {', '.join(sorted(unknown))}; see --help")
    for name in args.names or FIGURES:
        if args.out is None:
            print(f"{name}\n\n{table(name)}")
            continue
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{name}.md").write_text(table(name), encoding="utf-8")
    if args.out is not None:
        from benchmarks.plots import draw

        for name in args.names or FIGURES:
            draw(name, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
