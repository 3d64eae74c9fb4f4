"""``python -m ringcoll``."""

from __future__ import annotations

import sys

from ringcoll.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
