"""The rings of a machine, found by linear programming over its links.

``find`` is the search; ``cached`` keeps what it has found for the next call and the next process.
"""

from ringcoll.topology.search.find import find_rings

__all__ = ["find_rings"]
