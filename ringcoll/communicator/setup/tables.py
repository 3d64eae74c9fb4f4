"""Where tuning tables may be: what a rank's start asks before it loads what reads them."""

from __future__ import annotations

from pathlib import Path

from ringcoll.config import Settings
from ringcoll.fabric import Fabric
from ringcoll.folders import user_folder

OFF = "off"
SHIPPED = Path(__file__).parents[2] / "tuner" / "tables"
"""Tables of the package, of machines that its authors have measured."""


def maybe_tuned(fabric: Fabric, settings: Settings) -> bool:
    """Whether rank 0 may find a table, as far as can be said before devices are known."""
    if settings.tuning is not None:
        return settings.tuning != OFF
    other = settings.pace or settings.topo_file or settings.transport == "host"
    if fabric.rank or fabric.nranks == 1 or fabric.nodes or other:
        return False
    folder = user_folder(settings.cache_dir, "tuning")
    return any(each is not None and _is_folder(each) for each in (folder, SHIPPED))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # in a folder that this user may not enter, as another's home
        return False
