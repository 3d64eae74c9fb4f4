"""Point-to-point as source text and words: the halves of some ranks in one launch.

A message is bytes here; the signature holds its dtype. Slices and replicas follow from its length
alone, which both ends know. See ``kernels/point_to_point.cuh``.

A message that fits a half of its zone is *small*: it is sent before its receive begins. The sender
of a large one waits for the receiver's hello, which says where the receive buffer is mapped, and
then writes there directly. A buffer that the sender has not mapped is staged: of two ranks through
the memory that calls of copy engines use, which begin only when both have entered them, so that
none runs while a receive does; of more ranks through the zone. That memory holds
:data:`LARGE_WINDOW` slices: a slice and its credit take about 14 us there and back on H200, so the
two slices of a zone, 1.8 MB of 2 ranks, carried 135 GB/s. A direct message moves its bytes once
instead of three times and waits for no credits: one of 256 MiB carried 359 GB/s between 2 H100
(``benchmarks/results/gpu_sendrecv_2.json``). A staged one has three times as much under way as with
two slices, and has not been timed.
"""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import NamedTuple

from ringcoll.algorithms import build
from ringcoll.collectives import Collective
from ringcoll.dtypes import dtype_of
from ringcoll.encode import Program, encode
from ringcoll.errors import LaunchRefused
from ringcoll.executors.cuda.params import LARGEST, Addresses, Body
from ringcoll.executors.cuda.simple import RESIDENT, THREADS, KernelPart, Move, Writer, move_of
from ringcoll.executors.cuda.source import kernel_text
from ringcoll.executors.cuda.workspace import LARGE_SCRATCH_BYTES, Workspace
from ringcoll.launch import Launch, Layout
from ringcoll.plan import Buffer, Chunk
from ringcoll.tuner.measured import BESIDE_BLOCKS

WINDOW = 2
"""Slices of a small message, which fill a half of the zone."""

LARGE_WINDOW = 6
"""Slices of a large staged message under way at once. Not timed on several GPUs."""

SCRATCH_WINDOW = 32
"""Slices of a message in the large SCRATCH of copy engines; up to half of them are one copy."""

BLOCK_BYTES = 16 << 10
"""Bytes of a slice that a replica moves at least."""

SLICE_BYTES = 256 << 10
"""Small messages shorter than a window of these are cut into fewer slices."""

WORDS = 256
"""The least of a rank, so that most launches have one text."""

_PIECE = 512
"""Bytes: slices and the shares of replicas are multiples of it."""

_SENDER, _RECEIVER = 0, 1
IN_SCRATCH = 0xFFFF
"""In place of the direct block's replicas: see ``kernels/point_to_point.cuh``."""
_WIDTHS = (1, 2, 4, 8)
_BYTE = dtype_of("uint8")
_MESSAGE, _LOCAL_COPY = Collective("send", 2), Collective("all_to_all", 1)


@dataclass(frozen=True, slots=True)
class Message:
    """One call of a half."""

    address: int
    nbytes: int
    signature_text: str = ""  # what both ends must agree on
    record: int = 0  # the number under which the host keeps it
    target: int = 0  # of a local copy, the destination
    mapped: int = 0  # the receive buffer as the sender maps it: mapping << 48 | offset; 0: staged
    scratch: bool = False  # staged in the large SCRATCH of copy engines


@dataclass(frozen=True)
class Half:
    """What a rank sends to a peer, or receives from it, in one launch."""

    peer: int
    sends: bool
    messages: tuple[Message, ...]
    copies: bool = field(default=False)
    stages: bool = field(default=False)  # never directly, which takes words of their own


def signature_of(text: str) -> int:
    """A digest of what both ends must agree on, 32 bits: a checksum that goes on where it ended."""
    return zlib.crc32(text.encode())


def window_bytes(workspace: Workspace) -> int:
    """Bytes of the longest small message: its send ends before the receive begins."""
    return WINDOW * (workspace.zone_half // WINDOW // _PIECE * _PIECE)


def scratch_share(nranks: int) -> int:
    """Bytes of a rank's large SCRATCH for messages of one peer."""
    return LARGE_SCRATCH_BYTES // nranks // _PIECE * _PIECE


class Kind(NamedTuple):
    """What of a form decides which program runs: all of its lengths have the same signals."""

    slices: int  # at most as many as tell a program from others
    window: int
    large: bool
    direct: bool
    scratch: bool


class Form(NamedTuple):
    """How both ends carry out a message of a length. A tuple, since each message needs some."""

    slices: int
    window: int
    replicas: int  # shares of a slice, each with flags of its own; in SCRATCH the most of them
    large: bool = False
    direct: bool = False  # into the receive buffer
    scratch: bool = False  # staged in the large SCRATCH of copy engines

    def layout(self, nbytes: int) -> Layout:
        """The slices of a message."""
        return Layout(_MESSAGE, (nbytes,), self.slices, align=_PIECE)

    @property
    def kind(self) -> Kind:
        """What of it decides the program."""
        slices = min(self.slices, 2 * self.window + 2)  # as ``encode`` has it
        return Kind(slices, self.window, self.large, self.direct, self.scratch)


_COPY = Form(1, 1, 1)
"""A copy within a rank: whole, whatever its length, by the blocks that its half has."""


def form_of(nbytes: int, workspace: Workspace, *, scratch: bool = False) -> Form:
    """How both ends carry out a staged message of a length; ``scratch``: in the large SCRATCH."""
    most, half = workspace.pair_replicas, window_bytes(workspace) // WINDOW
    large = nbytes > WINDOW * half
    if scratch:
        window, most = SCRATCH_WINDOW, min(most, BESIDE_BLOCKS.value)
        slot = scratch_share(workspace.nranks) // window // _PIECE * _PIECE
        slices = -(-nbytes // slot)
    elif large and workspace.staged_bytes:
        window = LARGE_WINDOW
        slices = -(-nbytes // (workspace.staged_bytes // window // _PIECE * _PIECE))
    else:
        window = WINDOW
        slices = max(1, -(-nbytes // half), min(window, nbytes // SLICE_BYTES))
    piece = -(-nbytes // slices)
    replicas = min(most, max(1, -(-piece // BLOCK_BYTES)))
    return Form(slices, window, replicas, large, scratch=scratch)


def longest_of_one_slice(workspace: Workspace) -> int:
    """Bytes up to which a message is one slice, a multiple of :data:`BLOCK_BYTES`."""
    longest = min(window_bytes(workspace) // WINDOW, 2 * SLICE_BYTES - 1)
    return longest // BLOCK_BYTES * BLOCK_BYTES


def direct_replicas(nbytes: int, workspace: Workspace) -> int:
    """Shares of a message that its sender writes directly, as one slice."""
    return min(workspace.pair_replicas, max(1, -(-nbytes // BLOCK_BYTES)))


def shared_out(halves: Sequence[Half], workspace: Workspace, most: int, where: str) -> list[int]:
    """CUDA blocks of each half, ``most`` together: one for each replica if there are enough."""
    wanted = [
        max(
            form_of(each.nbytes, workspace, scratch=each.scratch).replicas
            if each.scratch or half.stages
            else direct_replicas(each.nbytes, workspace)
            for each in half.messages
        )
        for half in halves
    ]
    return share_out(wanted, most, where)


def share_out(wanted: Sequence[int], most: int, where: str) -> list[int]:
    """CUDA blocks of halves, ``most`` together, of which each would have so many."""
    left = most - len(wanted)
    if left < 0:
        raise LaunchRefused(
            f"{where}: {len(wanted)} sends and receives at once, {most} thread blocks are there "
            f"and each needs one: let fewer ranks share a GPU, or make fewer calls in one group"
        )
    if sum(wanted) <= most:
        return [*wanted]
    given = [1] * len(wanted)
    while left:
        for number, most_here in enumerate(wanted):
            if left and given[number] < most_here:
                given[number] += 1
                left -= 1
    return given


def pairs_body(
    workspace: Workspace,
    local: Sequence[Addresses],
    halves: Sequence[Sequence[Half]],
    blocks: Sequence[Sequence[int]],
) -> Body:
    """Text and words for the ranks of one launch; ``blocks`` are those of :func:`shared_out`."""
    rows = [
        rank_words(workspace, at, own, given)
        for at, own, given in zip(local, halves, blocks, strict=True)
    ]
    width = width_of(rows, workspace.nranks)
    words = tuple((*row, *(0,) * (width - len(row))) for row in rows)
    return _body(workspace, words)


def empty_body(workspace: Workspace, width: int) -> Body:
    """The body of one rank in whose place for so many words there is no message."""
    return _body(workspace, ((0,) * width,))


def _body(workspace: Workspace, words: tuple[tuple[int, ...], ...]) -> Body:
    text = pairs_text(workspace.nranks, len(words), len(words[0]))
    return Body(text, words, (0,) * len(words), 0, workspace.zone_half)


def width_of(rows: Sequence[Sequence[int]], nranks: int) -> int:
    """How many words ranks have together with padding, so that texts agree: a power of two.

    Where a launch cannot carry that, a multiple of 16.
    """
    longest = max(WORDS, *map(len, rows))
    wide = 1 << (longest - 1).bit_length()
    fits = 64 + len(rows) * 8 * (wide + nranks + 16) <= LARGEST
    return wide if fits else -(-longest // 16) * 16


def rank_words(
    workspace: Workspace, at: Addresses, halves: Sequence[Half], blocks: Sequence[int]
) -> list[int]:
    """The words of a rank."""
    words = [len(halves), *(0 for _ in halves)]
    first = 0
    for number, (half, given) in enumerate(zip(halves, blocks, strict=True), 1):
        words[number] = len(words)
        words += _half(workspace, at, half, first, given)
        first += given
    return words


def _half(workspace: Workspace, at: Addresses, half: Half, first: int, blocks: int) -> list[int]:
    if len(half.messages) >= 1 << 15:
        raise LaunchRefused(f"{len(half.messages)} messages to one rank in a group; make fewer")
    words = half_words(workspace, at, half, first, blocks)
    for message in half.messages:
        forms = forms_of(half, message.nbytes, workspace, scratch=message.scratch)
        programs = [_block(workspace, at, half, message, form) for form in forms]
        how = how_word(half, forms, blocks, [*map(len, programs)])
        words += message_words(message, how, 0 if half.sends else message.mapped)
        words += itertools.chain(*programs)
    return words


def half_head(half: Half, first: int, blocks: int) -> int:
    """The word of a half that says whose it is, and which CUDA blocks run it."""
    return half.peer | half.sends << 16 | len(half.messages) << 17 | first << 32 | blocks << 48


def forms_of(half: Half, nbytes: int, workspace: Workspace, *, scratch: bool = False) -> list[Form]:
    """How a message is carried out, staged; behind it if the sender has mapped the buffer."""
    if half.copies:
        return [_COPY]
    staged = form_of(nbytes, workspace, scratch=scratch)
    if staged.large and not (scratch or half.stages):
        return [staged, Form(1, 1, direct_replicas(nbytes, workspace), large=True, direct=True)]
    return [staged]


def how_word(half: Half, forms: Sequence[Form], blocks: int, lengths: Sequence[int]) -> int:
    """The word with a call's replicas, and the words of its blocks: the first, and all."""
    staged = forms[0]
    direct = forms[1].replicas if forms[1:] else 0
    if staged.scratch:
        direct = IN_SCRATCH
    elif half.stages and staged.large:
        direct = 1  # says that it is large; its receiver names no buffer
    replicas = blocks if half.copies else staged.replicas
    return replicas | direct << 16 | lengths[0] << 32 | sum(lengths) << 48


def half_words(
    workspace: Workspace, at: Addresses, half: Half, first: int, blocks: int
) -> list[int]:
    """The words of a half before those of its calls."""
    head = half_head(half, first, blocks)
    if half.copies:
        return [head, 0, 0, 0]
    return [head, *_ends(workspace, at.rank, half.peer, half.sends, at.workspaces)]


@lru_cache(maxsize=1024)
def _ends(
    workspace: Workspace, rank: int, peer: int, sends: bool, workspaces: tuple[int, ...]
) -> tuple[int, int, int]:
    """Where the sequence numbers of a half lie, its own flags, and those of its other end."""
    here = workspaces[rank] + workspace.pair(peer, sends=sends)
    there = workspaces[peer] + workspace.pair(rank, sends=not sends)
    return here + workspace.pair_sequence, here, there


def message_words(message: Message, how: int, mapped: int = 0) -> tuple[int, int, int]:
    """The words of a call before those of its blocks; ``how``: their replicas and lengths."""
    return signature_of(message.signature_text) << 32 | message.record & 0xFFFFFFFF, how, mapped


def _block(
    workspace: Workspace, at: Addresses, half: Half, message: Message, form: Form
) -> list[int]:
    """The words of the half's block of the pair's plan."""
    nbytes, user = message.nbytes, (message.address, message.target)
    writer = writer_of(workspace, at, half, form)
    if half.copies:
        layout = Layout(_LOCAL_COPY, (nbytes,))
        return writer.of(layout).block(0, Addresses(0, (0,), 0, user=user))
    user = (message.address, 0) if half.sends else (0, message.address)
    role = _SENDER if half.sends else _RECEIVER
    return writer.of(form.layout(nbytes)).block(role, Addresses(role, (), 0, user=user))


def writer_of(workspace: Workspace, at: Addresses, half: Half, form: Form) -> HalfWriter:
    """What writes the half's block of messages of any length of a form's kind."""
    if half.copies:
        return _copy_writer(workspace)
    ranks = (at.rank, half.peer) if half.sends else (half.peer, at.rank)
    ends = tuple(at.workspaces[rank] for rank in ranks)
    scratch = (0, scratch_of(at, *ranks)) if form.scratch else ()
    role = _SENDER if half.sends else _RECEIVER
    return _writer(workspace, form.kind, role, ranks, ends, scratch)


@lru_cache(maxsize=1024)
def _writer(
    workspace: Workspace,
    kind: Kind,
    role: int,
    ranks: tuple[int, ...],
    ends: tuple[int, ...],
    scratch: tuple[int, ...],
) -> HalfWriter:
    own, form = Addresses(role, ends, 0, scratch=scratch), Form(kind.slices, kind.window, 1)
    return HalfWriter(_program(kind), form.layout(0), workspace, own, ranks, kind)


@cache
def _copy_writer(workspace: Workspace) -> HalfWriter:
    """What writes a copy of any length within a rank."""
    return HalfWriter(_copy(), Layout(_LOCAL_COPY, (0,)), workspace, Addresses(0, (0,), 0))


def scratch_of(at: Addresses, sender: int, receiver: int) -> int:
    """Where messages of ``sender`` lie in the large SCRATCH of ``receiver``."""
    return at.scratch[receiver] + sender * scratch_share(len(at.workspaces))


class HalfWriter(Writer):
    """Writes the words of one end of a pair, whose ranks are 0 and 1 in the plan."""

    def __init__(
        self,
        program: Program,
        layout: Layout,
        workspace: Workspace,
        own: Addresses,
        ranks: tuple[int, ...] = (),
        kind: Kind | None = None,
    ) -> None:
        self.ranks, self.unit = ranks, layout.align
        sender = ranks[_SENDER] if ranks else 0
        scratch: tuple[int | None, int, bool] = workspace.zone(sender), workspace.zone_half, False
        if kind is not None and kind.scratch:
            scratch = None, scratch_share(workspace.nranks), True
        elif kind is not None and kind.large and workspace.staged_bytes:
            scratch = workspace.staged(sender), workspace.staged_bytes, True
        carried = KernelPart(frozenset(range(len(program.blocks))), *scratch)
        super().__init__(program, layout, _BYTE, workspace, (own,), carried)
        # Of its one block: threads that share it find all that is written once.
        self._own = self.block_words(own.rank, own)

    @property
    def length(self) -> int:
        """How many words its block has."""
        return len(self._own.words)

    def rewrite(self, words: array[int], first: int, nbytes: int, slices: int) -> None:
        """Write what a message's length decides of its block, whose words begin at ``first``."""
        piece, kept = -(-nbytes // (slices * self.unit)) * self.unit, self._own
        words[first + 1], words[first + 3] = slices, piece
        for word, _ in kept.extents:
            words[first + word], words[first + word + 1] = nbytes, piece
        for word, start, slot, where in kept.scratch:
            words[first + word], words[first + word + 1] = start + slot * piece, where | piece << 16
        for word, _, base, where in kept.user:  # the launch is given their addresses
            words[first + word + 1] = (0 if base is None else where) | piece << 16

    def place(self, chunk: Chunk, at: Addresses) -> tuple[int | None, int]:
        """As any kernel's, but the kernel finds the peer's buffer in the receiver's hello."""
        base, where = super().place(chunk, at)
        if chunk.rank != at.rank and chunk.buffer is not Buffer.SCRATCH:
            return base, where & ~(0x1FFF << 3)  # one peer: number 0
        return base, where

    def flag(self, src: int, dst: int, at: Addresses) -> int:
        """The flag of the waiting end: each end has one block, to which the other posts."""
        side = self.program.blocks[dst].rank
        if self.slots[src, dst] or self.program.blocks[src].rank == side:
            raise LaunchRefused("send: a pair's plan has one block at each end")
        words = self.workspace.pair(self.ranks[1 - side], sends=side == _SENDER)
        return at.workspaces[side] + words + self.workspace.pair_flags


def _program(kind: Kind) -> Program:
    mapped = frozenset({Buffer.OUTPUT} if kind.direct else ())
    return encode(build("send", "pair", 2), Launch("Simple", kind.slices, kind.window, mapped))


def _copy() -> Program:
    """A local copy: an all_to_all of one rank."""
    return encode(build("all_to_all", "all_pairs", 1), Launch())


@cache
def _move() -> Move:
    """The one move that all rows of these programs make."""
    forms = Form(1, 1, 1), Form(2 * WINDOW, WINDOW, 1), Form(1, 1, 1, direct=True)
    programs = (*(_program(form.kind) for form in forms), _copy())
    rows = (row for program in programs for block in program.programs for row in block.rows)
    (move,) = {move_of(row, _BYTE) for row in rows}
    if move is None:
        raise LaunchRefused("send: a pair's plan moves nothing")
    return move


def standard_pairs_text(nranks: int) -> str:
    """The kernel that most launches of one rank run."""
    return pairs_text(nranks, 1, WORDS)


def pairs_text(nranks: int, local: int, words: int) -> str:
    """The kernel for so many words a rank."""
    return kernel_text(
        "point_to_point",
        {"RANKS": nranks, "LOCAL": local, "WORDS": words},
        f"RC_KERNEL({THREADS}, {RESIDENT})",
        f"pairs::run<Program>(args, args.local[{'local_index()' if local > 1 else '0'}]);",
        [
            "using namespace rc::simple;",
            "template <class Type>",
            "RC_DEVICE void moved(const Share& share, const u64* words) {",
            "    using Op = Sum<Type>;",
            f"    {_move()}::run(pairs::elements<Type>(share), words);",
            "}",
            "struct Program {",
            "    using Op = Sum<UInt8>;",
            "    RC_DEVICE static void move(u32, const Share& given, const u64* words) {",
            "        const pairs::Copy copy(given, words);",
            "        switch (copy.width) {",
            *(
                f"            case {width}: return moved<UInt{8 * width}>(copy.share, copy.words);"
                for width in _WIDTHS
            ),
            "        }",
            "    }",
            "};",
        ],
    )
