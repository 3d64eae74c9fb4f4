"""Training on 4 CPU ranks, what it is made of, and torch.compile."""

import pytest

from tests.torch.world import names_of


@pytest.mark.parametrize("name", names_of("training") + names_of("compiling"))
def test_on_ranks(ranks, name):
    ranks(name)
