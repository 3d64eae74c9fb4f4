"""The values that each option and setting may have: one table."""

from __future__ import annotations

import math
import operator
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import numpy as np

from ringcoll.algorithms import ALGORITHMS
from ringcoll.dtypes import Accumulate
from ringcoll.errors import ArgumentError, ArgumentTypeError, nearest

AlgorithmName = Literal[
    "ring",
    "tree",
    "chain",
    "one_shot",
    "one_shot_push",
    "two_shot",
    "two_shot_fused",
    "all_pairs",
    "all_pairs_fused",
    "all_pairs_output",
    "all_pairs_pull",
    "recursive_doubling",
    "recursive_halving",
    "halving_doubling",
    "scatter_gather",
    "scatter_gather_fused",
    "scatter_gather_push",
    "scatter_gather_pull",
    "hierarchical",
    "bruck",
    "pair",
    "dissemination",
]
"""For editors and type checkers; :data:`ringcoll.algorithms.ALGORITHMS` says what there is."""

ProtocolName = Literal["LL", "LL128", "Simple"]
Engine = Literal["sm", "copy", "host"]


@dataclass(frozen=True, slots=True, eq=False)
class OptionType:
    """The legal values of an option.

    ``check`` returns a value in its canonical form and raises TypeError or ValueError for an
    illegal one. ``read`` parses the text of an environment variable.
    """

    legal: str
    check: Callable[[Any], Any]
    read: Callable[[str], Any] = str
    names: tuple[str, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    """Words that are not legal, and the name that is meant."""

    def hint(self, value: object) -> str:
        """The end of a message about a value that is none of the names; "" if no name is near."""
        word = str(value)
        meant = self.others.get(word.lower().partition(":")[0])
        if meant is None:
            # Stricter than the usual 0.6, by which "gpu" would be told to be "cpu".
            folded = {name.lower(): name for name in self.names}
            meant = folded.get(nearest(word.lower(), folded, 0.7) or "")
        return f"; did you mean {meant!r}?" if meant else ""


def _one_of(*names: str, **others: str) -> OptionType:
    def check(value: Any) -> Any:
        if not isinstance(value, str):
            raise TypeError
        if value not in names:
            raise ValueError
        return value

    return OptionType(f"one of {', '.join(names)}", check, names=names, others=others)


def _algorithm() -> OptionType:
    names = tuple(dict.fromkeys(name for builders in ALGORITHMS.values() for name in builders))
    named = _one_of(*names)

    def check(value: Any) -> Any:
        if not callable(value):
            return named.check(value)
        hash(value)  # by which its plans and proofs are found; what it refuses is a TypeError
        return value

    legal = f"a function that returns a Plan and has a hash, or {named.legal}"
    return OptionType(legal, check, names=names)


def _count(most: float = math.inf) -> OptionType:
    def check(value: Any) -> Any:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
        if not 1 <= number <= most:
            raise ValueError
        return number

    return OptionType(
        "an integer >= 1" + (f" and <= {most}" if most < math.inf else ""), check, int
    )


def _flag(value: Any) -> Any:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError
    return bool(value)


_FLAGS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def _read_flag(text: str) -> Any:
    if text.lower() not in _FLAGS:
        raise ValueError
    return _FLAGS[text.lower()]


def _debug(value: Any) -> Any:
    if not isinstance(value, str):
        return _flag(value)
    if value != "trace":
        raise ValueError
    return value


def _read_debug(text: str) -> Any:
    return "trace" if text.lower() == "trace" else _read_flag(text)


def _number(value: Any) -> float:
    if isinstance(value, (bool, np.bool_, str)):
        raise TypeError
    try:
        return float(value)
    except OverflowError:  # an integer that no float holds
        raise ValueError from None


def _seconds(value: Any) -> Any:
    seconds = _number(value)
    if not seconds > 0:
        raise ValueError
    return seconds


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise TypeError
    if not value:
        raise ValueError
    return value


def _word(value: Any) -> Any:
    _text(value).encode()  # as the ranks exchange it; what it refuses is a ValueError
    return value


def _path(value: Any) -> Any:
    return _text(os.fspath(value))


def _pace(value: Any) -> Any:
    given: list[Any] = [*value] if isinstance(value, (tuple, list)) else [value]
    given += [0.0, 0.0, "switch"][len(given) :]
    bandwidth, alpha, links = given
    pace = _number(bandwidth), _number(alpha)
    if not pace[0] > 0 or not 0 <= pace[1] < math.inf or links not in ("switch", "pairs"):
        raise ValueError
    return pace if links == "switch" else (*pace, links)


def _read_pace(text: str) -> Any:
    bandwidth, *more = (word.strip() for word in text.split(","))
    return float(bandwidth), *(float(alpha or 0) for alpha in more[:1]), *more[1:]


_COUNT = OptionType("an integer >= 1", _count, int)
_SECONDS = OptionType("seconds > 0, or math.inf (inf in the environment)", _seconds, float)
_FLAG = OptionType("True or False (1 or 0 in the environment)", _flag, _read_flag)
_WORD = OptionType("a word that UTF-8 can encode", _word)
_PATH = OptionType("a path", _path)

OPTION_TYPES: Mapping[str, OptionType] = {
    "algorithm": _algorithm(),
    "protocol": _one_of(*get_args(ProtocolName)),
    "engine": _one_of(*get_args(Engine)),
    # Two ranks have signals for 64 channels; 4096 slices of a small call take 4 s.
    "channels": _count(64),
    "slices": _count(4096),
    "max_sms": _count(),
    "timeout": _SECONDS,
    "deterministic": _FLAG,
    "accumulate": _one_of(*get_args(Accumulate)),
    "verify": _FLAG,
    "tag": _WORD,
    "node": _WORD,
    "topo_file": _PATH,
    "device": _one_of("auto", "cpu", "cuda", gpu="cuda", gpus="cuda", nvidia="cuda", cuda="cuda"),
    "transport": _one_of("p2p", "host"),
    "cache_dir": _PATH,
    "debug": OptionType(
        "True, False or 'trace' (1, 0 or trace in the environment)", _debug, _read_debug
    ),
    "pace": OptionType(
        "bytes/s > 0, (bytes/s, seconds a message), or (bytes/s, seconds a message, 'pairs'); in "
        "the environment 1e9, 1e9,1e-3 or 1e9,1e-3,pairs",
        _pace,
        _read_pace,
    ),
    "register": _FLAG,
    "kernel_wait": _SECONDS,
    "tuning": OptionType("a path, or off", _path),
    "compiled": _FLAG,
}
"""Every option of :class:`ringcoll.config.Config` and setting of ``Settings`` by name."""


def checked_async_op(value: Any, where: str) -> bool:
    """Whether a call is asynchronous, by its ``async_op``."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(f"{where}: async_op={value!r}: wanted True or False")
    return bool(value)


def take_seconds(how: dict[str, Any]) -> float | None:
    """Take the timeout out of a call's keywords; None, and all is left: it is to be checked."""
    given = how.get("timeout")
    if (given.__class__ is not float and given.__class__ is not int) or not given > 0:
        return None
    try:
        seconds = float(given)
    except OverflowError:
        return None
    del how["timeout"]
    return seconds


def checked_limit(timeout: Any, where: str) -> float | None:
    """Seconds to wait, at least 0; None for ever."""
    if timeout is None:
        return None
    try:
        seconds = _number(timeout)
        if math.isnan(seconds):
            raise ValueError
    except (TypeError, ValueError) as error:
        kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentError
        raise kind(f"{where}: timeout={timeout!r}: wanted seconds, or None") from None
    return None if seconds > threading.TIMEOUT_MAX else max(0.0, seconds)


def check_fields(record: Any) -> None:
    """Refuse illegal fields of a frozen record; keep legal ones in one form, to compare equal.

    None is legal everywhere.
    """
    for name in (known.name for known in fields(record)):
        value = getattr(record, name)
        if value is None:
            continue
        option = OPTION_TYPES[name]
        try:
            object.__setattr__(record, name, option.check(value))
        except TypeError:
            raise ArgumentTypeError(f"option {name}={value!r}: wanted {option.legal}") from None
        except ValueError:
            raise ArgumentError(
                f"option {name}={value!r}: wanted {option.legal}{option.hint(value)}"
            ) from None
