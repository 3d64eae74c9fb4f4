"""The pages of docs/: the blocks that need a GPU run on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, blocks_of, run_page

HERE = frozenset({"gpu"})
WANTED = [page for page in PAGES if any(block.need == "gpu" for block in blocks_of(page))]


@pytest.mark.gpu
@pytest.mark.parametrize("page", WANTED, ids=lambda page: page.stem)
def test_every_block_of_a_page_that_needs_a_gpu_runs(page: Path, tmp_path: Path):
    assert run_page(page, tmp_path, HERE, HERE) == sum(b.need == "gpu" for b in blocks_of(page))
