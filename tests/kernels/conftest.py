"""What tests of kernels on the CPU share."""

import pytest

from tests.kernels.sanitizer import why_not


@pytest.fixture(scope="session")
def sanitizer() -> None:
    """Skips a test where ThreadSanitizer does not serve."""
    if why_not():
        pytest.skip(f"ThreadSanitizer: {why_not()}")
