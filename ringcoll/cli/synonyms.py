"""Options of one meaning: what a user means who types another command's or program's option.

A command has at most some words of a line, and spelling does not tell them: ``--size`` looks more
like ``--slices`` than like ``--bytes``.
"""

from __future__ import annotations

from collections.abc import Collection

from ringcoll.errors import nearest

__all__ = ["meant"]

_LINES = """
    --bytes --minbytes --min --size --sizes --nbytes --message-size --msg-size --begin -b
    --bytes --maxbytes --max --end -e
    --stepfactor --factor --step-factor -f
    --ranks --gpus --ngpus --nranks --nproc --nprocs --np --procs --world-size -np
    --nodes --nnodes --hosts
    --root --src --source
    --slices --chunks --pieces --segments --nslices
    --algorithm --algorithms --algo --algos --alg
    --collective --collectives --coll
    --datatype --dtype --dtypes --type
    --op --operator --reduction --redop
    --iters --iterations --repeat --repeats --repetitions --calls
    --seconds --time --duration --budget
    --check --verify --validate
    --bandwidth --pace --bw --rate --speed
    --latency --delay
    --links --topology
    --jobs --workers --processes -j
    --json --output_file
    --out --json --output -o
    --plot --picture --draw --image --png --svg
    --preset --machine
"""
"""A line for each meaning; of the words that a command has, its hint names the first.

A word of several lines means the first of them of which the command has a word.
"""


def meant(word: str, options: Collection[str]) -> str | None:
    """The option of a command that a word means which is none; None where none is near."""
    lines = [line.split() for line in _LINES.strip().splitlines()]
    of = [line for line in lines if word in line]
    for name in (name for line in of for name in line):
        if name in options:
            return name
    if of or not word.startswith("--"):
        return None  # a right word for what the command lacks, and no misspelt one
    # Without the dashes, which make words alike.
    names = {option.lstrip("-"): option for option in options}
    return names.get(nearest(word[2:], names) or "")
