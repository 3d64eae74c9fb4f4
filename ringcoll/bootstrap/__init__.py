"""Finding this process's rank, and a first way to exchange bytes with the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringcoll import lazy

if TYPE_CHECKING:
    from ringcoll.bootstrap.contract import Bootstrap, SingleBootstrap
    from ringcoll.bootstrap.joining import bootstrap_of, ending, joined, post_failure
    from ringcoll.bootstrap.sockets import run_ranks
    from ringcoll.bootstrap.store import StoreBootstrap

__all__ = [
    "Bootstrap",
    "SingleBootstrap",
    "StoreBootstrap",
    "bootstrap_of",
    "ending",
    "joined",
    "post_failure",
    "run_ranks",
]

# Ranks that are threads of one process need none of these.
__getattr__ = lazy.attributes(
    __name__,
    {
        "Bootstrap": "ringcoll.bootstrap.contract",
        "SingleBootstrap": "ringcoll.bootstrap.contract",
        "StoreBootstrap": "ringcoll.bootstrap.store",
        "bootstrap_of": "ringcoll.bootstrap.joining",
        "ending": "ringcoll.bootstrap.joining",
        "joined": "ringcoll.bootstrap.joining",
        "post_failure": "ringcoll.bootstrap.joining",
        "run_ranks": "ringcoll.bootstrap.sockets",
    },
)
