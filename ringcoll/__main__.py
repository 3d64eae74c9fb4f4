"""``python -m ringcoll``."""

from __future__ import annotations

import sys

from ringcoll.cli import main

if __name__ == "__main__":
    sys.exit(main())
