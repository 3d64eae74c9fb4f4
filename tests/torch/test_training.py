"""Training on 4 CPU ranks, and what it is made of."""

import pytest

from tests.torch.world import names_of


@pytest.mark.parametrize("name", names_of("training"))
def test_on_ranks(ranks, name):
    ranks(name)
