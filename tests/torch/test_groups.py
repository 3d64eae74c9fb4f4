"""Work objects, messages, groups and their ends, on 4 CPU ranks."""

import pytest

from tests.torch.world import names_of


@pytest.mark.parametrize("name", [*names_of("works"), *names_of("messages"), *names_of("groups")])
def test_on_ranks(ranks, name):
    ranks(name)
