"""Processes agree on the machine whose GPUs they play."""

import pytest

from ringcoll.topology.document import write
from ringcoll.topology.presets import preset_document

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def test_a_file_that_the_environment_names(mpi, tmp_path):
    path = tmp_path / "dgx1.xml"
    path.write_text(write(preset_document("dgx1-v100")), encoding="utf-8")
    outcome = mpi("machine", 4, "play", RINGCOLL_TOPO_FILE=str(path))
    assert outcome.errors == "" and outcome.statuses == [0]
    assert outcome.word("right") == dict.fromkeys(range(4), True)
    assert len(set(outcome.word("text").values())) == 1
    assert set(outcome.word("rings").values()) == {80.0}
    assert outcome.word("part") == {0: 20.0, 1: 20.0, 2: 20.0, 3: 20.0}


def test_a_file_that_is_not_there(mpi):
    outcome = mpi("machine", 2, "refused", RINGCOLL_TOPO_FILE="/nowhere.xml", RINGCOLL_DEVICE="cpu")
    lines = [line for line in outcome.output.splitlines() if "error" in line]
    assert len(lines) == 2 and len(set(lines)) == 1
    assert "ArgumentError: init: topo_file='/nowhere.xml', read by rank 0: " in lines[0]
