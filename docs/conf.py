"""How Sphinx builds this site: Markdown pages, and a reference out of the docstrings."""

import dataclasses
import re
from typing import Any

import paceline

project = "paceline"
version = release = paceline.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

# Links may lead to headings, down to those of the third level.
myst_heading_anchors = 3

# A word between single backticks is code, as it is in Markdown.
default_role = "code"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False

html_theme = "furo"
html_title = "paceline"
html_copy_source = False
html_show_sphinx = False

CALLED_BY_USERS = {"paceline.Cluster", "paceline.Session"}


def readable(
    app: Any, kind: str, name: str, thing: Any, options: Any, signature: str, returned: str
) -> tuple[str, str]:
    """Leave out the arguments of classes that only the library makes objects of, but for records.

    Where a default is no expression, Sphinx shows types with their modules; it shows none here.
    """
    if kind == "class" and name not in CALLED_BY_USERS and not dataclasses.is_dataclass(thing):
        return "", ""
    return tuple(text and re.sub(r"~(\w+\.)+", "", text) for text in (signature, returned))


def setup(app: Any) -> None:
    """What Sphinx calls first."""
    app.connect("autodoc-process-signature", readable)
