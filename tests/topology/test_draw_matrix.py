"""The matrix of who reaches whom how."""

from __future__ import annotations

import pytest

from ringcoll.topology.draw.matrix import format_matrix
from tests.topology.real import built, system


def rows(text: str) -> dict[str, list[str]]:
    """The cells of each row of the first table, by its head."""
    head, *lines = text.split("\n\n")[0].splitlines()
    found = {line.split()[0]: line.split()[1:] for line in lines}
    assert all(len(cells) == len(head.split()) for cells in found.values())
    return found


def test_every_pair_of_a_switch_has_all_its_links():
    found = rows(format_matrix(system("vm-8xh200-flat.xml")))
    assert len(found) == 8
    for i in range(8):
        assert found[f"GPU{i}"] == [*("X" if i == j else "NV18" for j in range(8)), "?"]


def test_rows_of_visible_switches_add_up():
    found = rows(format_matrix(system("oci-H100-topology.xml")))
    assert found["GPU0"][:8] == ["X", *["NV18"] * 7]
    assert found["GPU0"][8:12] == ["PIX", "PIX", "PHB", "PHB"]
    assert found["GPU0"][-2:] == ["SYS", "0"]
    assert found["GPU7"][-3:] == ["PIX", "PIX", "1"]


def test_direct_links_are_counted_and_what_lies_beneath_is_named_elsewhere():
    found = rows(format_matrix(system("dgx1-p100.xml")))
    assert found["GPU0"] == ["X", "NV1", "NV1", "NV1", "NV1", "SYS", "SYS", "SYS", "0"]
    assert found["GPU7"] == ["SYS", "SYS", "SYS", "NV1", "NV1", "NV1", "NV1", "X", "1"]
    minsky = rows(format_matrix(system("s822lc-minsky-4xp100.xml")))
    assert minsky["GPU1"] == ["NV2", "X", "SYS", "SYS", "0"]


def test_pcie_alone():
    text = format_matrix(system("panlichen-8x3090-topo.xml"))
    found = rows(text)
    assert found["GPU0"] == ["X", *["PIX"] * 3, *["SYS"] * 5, "0"]
    assert found["NIC0"] == [*["SYS"] * 4, *["PIX"] * 4, "X", "1"]
    assert "NIC0: mlx5_0" in text
    legend = text.split("legend:")[1].split("\n")
    assert [line.split()[0] for line in legend if line.strip()] == ["X", "PIX", "SYS"]


def test_amd_gpus_have_xgmi():
    text = format_matrix(system("amd-topo_4p1h.xml"))
    assert rows(text)["GPU0"] == ["X", "XGMI", "XGMI", "PXB", "PXB", "0"]
    assert "NV#" not in text


def test_a_matrix_is_symmetric():
    found = rows(format_matrix(system("amd-topo_8p1h.xml")))
    heads = list(found)
    for i, a in enumerate(heads):
        assert found[a][i] == "X"
        for j, b in enumerate(heads):
            assert found[a][j] == found[b][i]


def test_many_nics_that_are_alike_share_a_row():
    nets = "".join(f'<net dev="{i}" name="eth{i}" speed="10000"/>' for i in range(61))
    found = built(
        f'<system version="1"><cpu numaid="3"><pci busid="0000:01:00.0" class="0x030200">'
        f'<gpu dev="0" sm="80"/></pci><nic>{nets}</nic></cpu></system>'
    )
    assert rows(format_matrix(found)) == {"GPU0": ["X", "PHB", "3"], "NIC0+60": ["PHB", "X", "3"]}


def test_nvmls_numbers_are_said_where_the_order_is_another():
    gpus = "".join(
        f'<pci busid="0000:0{i}:00.0" class="0x030200"><gpu dev="{dev}" rank="{i}" sm="80"/></pci>'
        for i, dev in enumerate((3, 1))
    )
    found = built(f'<system version="1"><cpu numaid="0">{gpus}</cpu></system>')
    assert "GPU0: dev 3, GPU1: dev 1" in format_matrix(found)
    assert "dev" not in format_matrix(system("dgx1-p100.xml"))


def test_hosts_that_are_alike_have_one_table():
    def host(at: int) -> str:
        gpus = "".join(
            f'<pci busid="0000:0{i}:00.0" class="0x030200"><gpu dev="{i}" sm="80" '
            f'rank="{2 * at + i}"/></pci>'
            for i in range(2)
        )
        nic = f'<nic><net dev="0" name="ib{at}" speed="100000"/></nic>'
        return f'<system version="1"><cpu numaid="0">{gpus}{nic}</cpu></system>'

    text = format_matrix(built(f"<systems>{''.join(map(host, range(3)))}</systems>"))
    assert text.startswith("host 0; hosts like it, with GPUs and NICs of their own: 1-2\n")
    assert text.count("GPU1") == 2 and "GPU2" not in text
    assert "between GPUs of different hosts: NET" in text


@pytest.mark.parametrize("name", ["aws-g5.48xl-topo.xml", "azure-ndv4-topo.xml"])
def test_templates_have_no_gpus(name):
    assert format_matrix(system(name)) == "no GPUs\n"
