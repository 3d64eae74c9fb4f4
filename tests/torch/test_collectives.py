"""torch.distributed's collectives on 4 CPU ranks."""

import pytest

from tests.torch.world import names_of


@pytest.mark.parametrize("name", names_of("collectives") + names_of("overloads"))
def test_on_ranks(ranks, name):
    ranks(name)
