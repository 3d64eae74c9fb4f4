"""The constants are NCCL's and RCCL's, through the spellings that files use."""

from __future__ import annotations

import pytest

from ringcoll.topology import tables


@pytest.mark.parametrize(
    ("sm", "rate"),
    [
        (60, 18.0),
        (61, 18.0),
        (70, 20.0),
        (75, 20.0),
        (80, 20.0),
        (86, 12.0),
        (87, 20.0),
        (89, 20.0),
        (90, 20.6),
        (100, 40.1),
        (120, 40.1),
        (52, 20.0),
        (None, 20.0),
    ],
)
def test_nvlink(sm, rate):
    assert tables.nvlink(sm) == rate


@pytest.mark.parametrize("sm", [60, 70, 80, 86, 87, 89, 90, 100, 103])
def test_a_link_carries_less_than_its_nominal_rate(sm):
    nominal = tables.nominal_nvlink(sm)
    assert (nominal is None) == (sm in (87, 89))
    assert nominal is None or tables.nvlink(sm) < nominal


@pytest.mark.parametrize(
    ("gfx", "rate"), [(906, 24.0), (908, 24.0), (910, 36.0), (942, 48.0), (950, 48.0), (None, 24.0)]
)
def test_xgmi(gfx, rate):
    assert tables.xgmi(gfx) == rate


@pytest.mark.parametrize(
    ("speed", "width", "rate"),
    [
        ("2.5 GT/s", 16, 3.0),
        ("2.5 GT/s PCIe", 1, 0.1875),
        ("5 GT/s", 16, 6.0),
        ("5.0 GT/s PCIe", 16, 6.0),
        ("8 GT/s", 16, 12.0),
        ("8.0 GT/s PCIe", 8, 6.0),
        ("16 GT/s", 16, 24.0),
        ("16.0 GT/s PCIe", 16, 24.0),
        ("32 GT/s PCIe/s", 16, 48.0),
        ("32.0 GT/s PCIe", 16, 48.0),
        ("64.0 GT/s PCIe", 16, 96.0),
        ("", 0, 12.0),
        ("Unknown speed", 16, 12.0),
        ("16.0 GT/s PCIe", 0, 24.0),
        ("16.0 GT/s PCIe", 255, 24.0),
    ],
)
def test_pci(speed, width, rate):
    assert tables.pci(speed, width) == rate
    guessed = not speed or "Unknown" in speed or width in (0, 255)
    assert tables.pci_is_known(speed, width) is not guessed


def test_the_speed_of_each_generation_of_pcie_has_a_rate():
    rates = [tables.pci(speed, 16) for speed in tables.PCI_SPEEDS.values()]
    assert all(tables.pci_is_known(speed, 16) for speed in tables.PCI_SPEEDS.values())
    assert rates == [3, 6, 12, 24, 48, 96]


@pytest.mark.parametrize(
    ("arch", "vendor", "family", "model", "rate"),
    [
        ("x86_64", "GenuineIntel", 6, 0x4F, 6.0),
        ("x86_64", "GenuineIntel", 6, 0x55, 10.0),
        ("x86_64", "GenuineIntel", 6, 0x6A, 10.0),
        ("x86_64", "GenuineIntel", 6, 0x8F, 22.0),
        ("x86_64", "GenuineIntel", 6, 0xAD, 22.0),
        ("x86_64", "GenuineIntel", 6, 0xCF, 40.0),
        ("x86_64", "GenuineIntel", 15, 0xCF, 6.0),
        ("x86_64", "AuthenticAMD", 175, 1, 16.0),
        ("x86_64", "CentaurHauls", 7, 0x5B, 9.0),
        ("x86_64", "  Shanghai  ", 7, 0, 6.0),
        ("ppc64", "", 0, 0, 32.0),
        ("arm64", "", 0, 0, 6.0),
        ("x86_64", "HygonGenuine", 24, 0, None),
        ("", "", 0, 0, None),
    ],
)
def test_between_cpus(arch, vendor, family, model, rate):
    assert tables.between_cpus(arch, vendor, family, model) == rate


@pytest.mark.parametrize(("speed", "rate"), [(100000, 12.5), (400000, 50.0), (0, 1.25), (-1, 1.25)])
def test_ports(speed, rate):
    assert tables.port(speed) == rate


def test_generation_by_device_id():
    found = [tables.sm_of_device(device) for device in (0x15F9, 0x1DB5, 0x20B0, 0x2330, 0x2901)]
    assert found == [60, 70, 80, 90, 100]
    assert tables.sm_of_device(0x0FFF) is None
