"""Work objects, messages, groups, their ends and what profilers see, on 4 CPU ranks."""

import pytest

from tests.torch.world import names_of

MODULES = "works", "messages", "groups", "fakes", "pairs", "profiles"


@pytest.mark.parametrize("name", [name for module in MODULES for name in names_of(module)])
def test_on_ranks(ranks, name):
    ranks(name)
