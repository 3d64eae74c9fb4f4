"""Sphinx' configuration of these pages.

Sphinx, furo and MyST were chosen because they are well kept (attrs and msgspec use the same three),
because the sources are Markdown that reads well without a build, and because autodoc and napoleon
make the API reference from the docstrings that an editor shows. Nothing is fetched during a build.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from ringcoll.version import __version__  # noqa: E402

project = "ringcoll"
author = "the authors of ringcoll"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_generated"]
nitpicky = True
# Types of other packages have no pages here, and no index of theirs is fetched. Docstrings
# also name private modules, for those who read the code.
nitpick_ignore_regex = [("py:.*", r"(?!ringcoll\b).*"), ("py:.*", r"ringcoll\.[a-z_]+\..*")]

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"ringcoll {release}"
html_static_path = ["_static"]
html_css_files = ["ringcoll.css"]
html_copy_source = False
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "monokai"


def setup(app: Any) -> None:
    """Make what pages show of the code and of the records before they are read."""
    import generate

    app.connect("builder-inited", lambda _: generate.main(HERE / "_generated"))
