"""Build the compiled part of the package: by hatchling for a wheel or an editable installation.

Without a C compiler, numpy's or Python's headers, or setuptools, which runs the compiler, there is
none, and the package works without it. ``HATCH_BUILD_NO_HOOKS=true`` leaves it out, for a wheel
that serves every Python. As a program, ``python scripts/build_hook.py``, it builds the part in the
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
NAME = "ringcoll.executors.cpu._small_calls"


def sources(root: Path) -> list[Path]:
    """The C files below a checkout, the one that includes the others first."""
    folder = root.joinpath(*NAME.split(".")).with_name("native")
    return [*sorted(folder.glob("*.c")), *sorted(folder.glob("*.h"))]


def target(root: Path) -> Path:
    """Where this Python finds what is compiled."""
    return root.joinpath(*NAME.split(".")).with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))


def build(root: Path) -> Path:
    """Compile the part into the package; what goes wrong is the compiler's error."""
    import numpy as np
    from setuptools import Distribution, Extension

    extension = Extension(
        NAME,
        [str(sources(root)[0])],
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
    return target(root)


class CompiledPart(BuildHookInterface[Any]):
    """Adds the compiled part to a wheel where it can be built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build it; a wheel that has it is one of this Python and this machine."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        try:
            built = build(root)
        except (Exception, SystemExit) as error:  # a compiler that is missing ends the program
            self.app.display_warning(f"without the compiled part: {error}")
            return
        build_data["pure_python"], build_data["infer_tag"] = False, True
        build_data["artifacts"].append(f"/{built.relative_to(root)}")


if __name__ == "__main__":
    place = target(ROOT)
    newest = max(file.stat().st_mtime for file in sources(ROOT))
    if not place.exists() or place.stat().st_mtime <= newest:
        print(build(ROOT))
    sys.exit(0)
