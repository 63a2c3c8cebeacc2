# SPDX-License-Identifier: Apache-2.0
"""The documentation site, by Sphinx: `make docs` builds it into build/docs, warnings as errors.

Sphinx, because the docstrings are written in its markup (roles and math), it has a search of its
own that needs no server, and it is well kept. Pages are Markdown (MyST).
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package, built in place or installed editable

import fused_layernorm  # noqa: E402

project = "fused_layernorm"
author = "the fused_layernorm authors"
copyright = "the fused_layernorm authors, Apache-2.0"
release = fused_layernorm.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]

# Headings get the anchors that links on GitHub use; `$x$` is math.
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]

autodoc_member_order = "groupwise"
autodoc_inherit_docstrings = False  # nn.Module's say nothing of these modules
autodoc_typehints_format = "short"
add_module_names = False
napoleon_use_rtype = False

# Every reference must lead somewhere, but for those into PyTorch and Python: the build needs no
# network to read their inventories.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|nn|typing|collections|contextlib|types)\..*"),
    (r"py:class", r"(Tensor|LayerNorm|dtype|fused_layernorm\.swap\.swapping\.Model)"),
]

html_theme = "furo"
html_title = f"fused_layernorm {release}"
html_show_sphinx = False
html_copy_source = False
