"""ringcoll as a backend of torch.distributed: ``init_process_group("ringcoll")``.

torch finds it by the entry point in the group ``torch.backends``; nothing else in ringcoll imports
this package, and nothing here is imported before a group is made.
"""

from __future__ import annotations

__all__: list[str] = []
