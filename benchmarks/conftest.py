"""What needs GPUs is left out without them, as among the tests."""

from __future__ import annotations

from tests.conftest import pytest_collection_modifyitems

__all__ = ["pytest_collection_modifyitems"]
