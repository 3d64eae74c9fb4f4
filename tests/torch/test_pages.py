"""The pages of docs/: the blocks that need torch or JAX run on CPU ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, blocks_of, run_page

pytest.importorskip("torch")

HERE = frozenset({"torch", "jax"})
WANTED = [page for page in PAGES if any(block.need in HERE for block in blocks_of(page))]


@pytest.mark.timeout(500)
@pytest.mark.parametrize("page", WANTED, ids=lambda page: page.stem)
def test_every_block_of_a_page_that_needs_a_library_runs(page: Path, tmp_path: Path):
    if any(block.need == "jax" for block in blocks_of(page)):
        pytest.importorskip("jax")
    assert run_page(page, tmp_path, HERE, HERE) == sum(b.need in HERE for b in blocks_of(page))
