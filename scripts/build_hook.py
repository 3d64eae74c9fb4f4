"""Build the compiled parts of the package: by hatchling for a wheel or an editable installation.

Without a C compiler, numpy's or Python's headers, or setuptools, which runs the compiler, there are
none, and the package works without them. ``HATCH_BUILD_NO_HOOKS=true`` leaves them out, for a wheel
that serves every Python. As a program, ``python scripts/build_hook.py``, it builds the parts in the
checkout for the Python that runs it, where the sources have changed since.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parents[1]
PARTS = "ringcoll.executors.cpu._small_calls", "ringcoll.executors.cuda._launches"
SHARED = Path("ringcoll/executors/native")  # headers of several


def sources(root: Path, name: str) -> list[Path]:
    """The C files of a part below a checkout, the one that includes the others first."""
    folder = root.joinpath(*name.split(".")).with_name("native")
    headers = [*folder.glob("*.h"), *(root / SHARED).glob("*.h")]
    return [*sorted(folder.glob("*.c")), *sorted(headers)]


def target(root: Path, name: str) -> Path:
    """Where this Python finds what is compiled."""
    return root.joinpath(*name.split(".")).with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))


def build(root: Path, name: str) -> Path:
    """Compile a part into the package; what goes wrong is the compiler's error."""
    import numpy as np
    from setuptools import Distribution, Extension

    extension = Extension(
        name,
        [str(sources(root, name)[0])],
        include_dirs=[np.get_include()],
        extra_compile_args=["-std=c11", "-O2"],
    )
    command: Any = Distribution({"name": "ringcoll", "ext_modules": [extension]}).get_command_obj(
        "build_ext"
    )
    with tempfile.TemporaryDirectory() as objects:
        command.build_lib, command.build_temp = str(root), objects
        command.force = True  # by its source alone setuptools would not see a header that changed
        command.ensure_finalized()
        command.run()
    return target(root, name)


class CompiledParts(BuildHookInterface[Any]):
    """Adds the compiled parts to a wheel where they can be built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build them; a wheel that has one is one of this Python and this machine."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        for name in PARTS:
            try:
                built = build(root, name)
            except (Exception, SystemExit) as error:  # a compiler that is missing ends the program
                self.app.display_warning(f"without the compiled part {name}: {error}")
                continue
            build_data["pure_python"], build_data["infer_tag"] = False, True
            build_data["artifacts"].append(f"/{built.relative_to(root)}")


if __name__ == "__main__":
    for part in PARTS:
        place = target(ROOT, part)
        newest = max(file.stat().st_mtime for file in sources(ROOT, part))
        if not place.exists() or place.stat().st_mtime <= newest:
            print(build(ROOT, part))
    sys.exit(0)
