"""How Sphinx builds the site: `make docs`. Warnings are errors there, broken references included."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]

with (ROOT / "Cargo.toml").open("rb") as file:
    release = tomllib.load(file)["workspace"]["package"]["version"]

project = "Towline"
author = copyright = "the Towline authors"
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# The native classes have their docstrings inside the compiled module, so they are imported, not parsed.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True

# In docstrings, one pair of backticks is a name that must exist.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [
    # What the standard library documents; looking it up would need the network.
    ("py:.*", r"(asyncio|collections|types|typing|numpy)\..*"),
    # Names of types that the pages explain in words.
    ("py:.*", r"(Access|Blocks|Isolation|Local|Names|.*\bT_co)"),
]

html_theme = "furo"
html_title = f"Towline {release}"
html_static_path: list[str] = []
html_show_copyright = False
html_show_sourcelink = False
