"""How torch hears of the backend, and what must never break ``import torch``."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENTRY = re.search(
    r'^\[project\.entry-points\."torch\.backends"\]\nringcoll = "([\w.:]+)"$',
    (ROOT / "pyproject.toml").read_text(encoding="utf-8"),
    re.MULTILINE,
)

WORLD_OF_ONE = """
import json, sys
import torch, torch.distributed as dist
loaded = sorted({"cupy", "mpi4py", "numpy"} & set(sys.modules))
dist.init_process_group("ringcoll", init_method="file://" + sys.argv[1], rank=0, world_size=1)
x = torch.ones(3)
dist.all_reduce(x)
loaded += {"torch._dynamo"} & set(sys.modules)  # it takes seconds
print(json.dumps({"sum": x.tolist(), "backend": dist.get_backend(), "loaded": loaded}))
dist.destroy_process_group()
"""


@pytest.fixture
def installed(tmp_path):
    """A folder that tells Python what an installed ringcoll would: its entry point."""
    assert ENTRY is not None
    told = tmp_path / "site" / "ringcoll-0.1.0.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: ringcoll\nVersion: 0.1.0\n")
    (told / "entry_points.txt").write_text(f"[torch.backends]\nringcoll = {ENTRY[1]}\n")
    return told.parent


def python(code, *arguments, path, check=True, **environment):
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert not check or result.returncode == 0, result.stderr
    return result


def test_no_import_is_needed(installed, tmp_path):
    said = json.loads(python(WORLD_OF_ONE, tmp_path / "s", path=[ROOT, installed]).stdout)
    assert said["sum"] == [1, 1, 1]
    assert said["backend"] == "ringcoll"
    assert {"cupy", "mpi4py", "torch._dynamo"}.isdisjoint(said["loaded"])


@pytest.mark.parametrize("broken", ["ml_dtypes", "cupy", "mpi4py"])
def test_a_broken_dependency_does_not_break_torch(installed, tmp_path, broken):
    """Trap 9: an entry point that raises breaks ``import torch`` for everyone."""
    bad = tmp_path / "bad" / broken
    bad.mkdir(parents=True)
    (bad / "__init__.py").write_text("raise RuntimeError('this library is broken')\n")
    code = (
        "import torch, torch.distributed as dist\n"
        "print(torch.ones(2).sum().item(), 'ringcoll' in dist.Backend.backend_list)"
    )
    result = python(code, path=[bad.parent, ROOT, installed])
    assert result.stdout.split() == ["2.0", "True"]


def test_registering_raises_never_and_twice_is_once(tmp_path):
    code = (
        "import logging, torch.distributed as dist\n"
        "from ringcoll.torch_entry import register\n"
        "register(); register()\n"
        "assert dist.Backend.backend_list.count('ringcoll') == 1\n"
        "dist.Backend.backend_list.remove('ringcoll')\n"
        "dist.Backend.register_backend = None\n"
        "logging.basicConfig()\n"
        "register()\n"
    )
    result = python(code, path=[ROOT])
    assert "no backend ringcoll" in result.stderr


COMPOSITE = """
import sys
import torch, torch.distributed as dist
from ringcoll.torch_entry import register
register()
dist.init_process_group(
    "cpu:gloo,cuda:ringcoll",
    init_method="file://" + sys.argv[2],
    rank=int(sys.argv[1]),
    world_size=2,
)
group, rank = dist.group.WORLD, dist.get_rank()
assert group.name() == "ringcoll"
assert group._get_backend(torch.device("cpu")).name() == "gloo"
assert group._get_backend(torch.device("cuda", 0)).name() == "ringcoll"
x = torch.full((3,), float(rank))
dist.all_reduce(x)
out = [torch.zeros(3) for _ in range(2)]
dist.all_gather(out, x)
work = dist.all_reduce(x, async_op=True)
work.wait()
assert x.tolist() == [2.0] * 3 and out[1].tolist() == [1.0] * 3
if rank:
    dist.send(x, 0)
else:
    dist.recv(x)
found = [None] * 2
dist.all_gather_object(found, rank)
assert found == [0, 1]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.randn(2, 2)).sum().backward()
dist.barrier()
assert group._host is None, "gloo has carried it all"
dist.destroy_process_group()
print("well")
"""


def test_beside_gloo(programs, tmp_path):
    """Trap 8: torch drops what stands beside a backend that is written in Python."""
    for code, out, err in programs.run(COMPOSITE, 2, tmp_path / "s"):
        assert (code, out.strip()) == (0, "well"), err


def test_beside_another_backend_is_refused(programs, tmp_path):
    code = COMPOSITE.replace("cpu:gloo,cuda:ringcoll", "cpu:ringcoll,cuda:gloo")
    for status, _, err in programs.run(code, 2, tmp_path / "s"):
        assert status == 1
        assert "ringcoll cannot be combined with cuda:gloo" in err


NAMED_DEVICE = """
import sys
from unittest import mock
import torch, torch.distributed as dist
from ringcoll.torch_entry import register
register()
device = torch.device("cuda", 0)
has = {"current_accelerator": lambda *_: device, "device_count": lambda: 1}
with mock.patch.multiple(torch.accelerator, **has):
    dist.init_process_group(
        "ringcoll", init_method="file://" + sys.argv[2], rank=0, world_size=1, device_id=device
    )
    group = dist.new_group([0])
x = torch.ones(2)
dist.all_reduce(x, group=group)
assert dist.group.WORLD.bound_device_id is None
dist.destroy_process_group()
print("well")
"""


def test_a_device_that_is_named_at_the_start(programs, tmp_path):
    """Trap 6: torch asks the group's backend whether it can split."""
    ((code, out, err),) = programs.run(NAMED_DEVICE, 1, tmp_path / "s")
    assert (code, out.strip()) == (0, "well"), err
