"""How Sphinx builds this site: Markdown pages, and a reference out of the docstrings."""

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

html_theme = "furo"
html_title = "paceline"
html_copy_source = False
html_show_sphinx = False

CALLED_BY_USERS = {"paceline.Cluster", "paceline.Session"}


def without_arguments(
    app: Any, kind: str, name: str, thing: Any, options: Any, signature: str, returned: str
) -> tuple[str, str] | None:
    """Leave out the arguments of classes that only the library makes objects of."""
    hidden = kind == "class" and name not in CALLED_BY_USERS
    return ("", "") if hidden else None


def setup(app: Any) -> None:
    """What Sphinx calls first."""
    app.connect("autodoc-process-signature", without_arguments)
