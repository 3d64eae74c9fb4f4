"""The collectives of a group, in the shapes by which torch calls them.

torch's Python functions find these methods by name, and what is written in C++ (DDP's reducer,
functional collectives) by a table of the same names. Lists hold one entry for each device that a
rank has: always one here. The names of parameters are those of groups in C++.
"""

from __future__ import annotations

from ringcoll.torch.exchanges import Exchanges
from ringcoll.torch.in_place import InPlace
from ringcoll.torch.lists import Lists
from ringcoll.torch.singles import Singles

__all__ = ["Collectives"]


class Collectives(InPlace, Singles, Lists, Exchanges):
    """The collectives, for a group that says which engine serves a tensor."""

    # The names of torch before 2.13.
    _allgather_base = Singles.all_gather_single
    _reduce_scatter_base = Singles.reduce_scatter_single
    alltoall_base = Exchanges.all_to_all_single
    allgather_into_tensor_coalesced = Singles.all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = Singles.reduce_scatter_single_coalesced
