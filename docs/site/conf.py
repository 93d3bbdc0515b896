"""How Sphinx builds the site: `make docs`. Warnings are errors there, broken references included."""

import ast
import tomllib
from pathlib import Path
from typing import Any

import towline

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



def _typed_signatures() -> dict[str, tuple[str, str | None]]:
    """The signatures in the stub of the native module, by the names that its classes have in `towline`."""
    stub = ROOT / "bindings/python/python/towline/_native.pyi"
    found: dict[str, tuple[str, str | None]] = {}
    for outer in ast.parse(stub.read_text()).body:
        # Some of them have namesakes in Python, which have their types already.
        if not isinstance(outer, ast.ClassDef) or getattr(towline, outer.name, None) is not getattr(
            towline._native, outer.name
        ):
            continue
        for one in outer.body:
            by = [ast.unparse(by) for by in getattr(one, "decorator_list", [])]
            if isinstance(one, ast.FunctionDef) and "property" not in by:
                # The object itself, which is not part of a call.
                one.args.posonlyargs.clear()
                arguments = _plain(f"({ast.unparse(one.args)})")
                if one.name == "__new__" and outer.name != "SharedArray":
                    found[f"towline.{outer.name}"] = (arguments, None)
                elif one.returns is not None:
                    found[f"towline.{outer.name}.{one.name}"] = (arguments, _plain(ast.unparse(one.returns)))
    return found


def _plain(types: str) -> str:
    """Types as readers think of them: what is taken for a number is a number."""
    for exact, plain in (
        ("builtins.", ""),
        ("SupportsFloat | SupportsIndex", "float"),
        ("SupportsIndex", "int"),
        ("SupportsGetItem[int, ", "Sequence["),
        ("'", ""),
    ):
        types = types.replace(exact, plain)
    return types


def setup(app: Any) -> None:
    signatures = _typed_signatures()
    app.connect("autodoc-process-signature", lambda app, what, name, *_: signatures.get(name))


# In docstrings, one pair of backticks is a name that must exist.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [
    # What the standard library documents; looking it up would need the network.
    ("py:.*", r"(asyncio|collections|types|typing|numpy)\..*"),
    # Names of types that the pages explain in words.
    ("py:.*", r"(Access|Algorithm|Blocks|Isolation|Locals?|Names|Remotes|.*\bT_co)"),
    # Memory of a GPU from mem_alloc: something with __cuda_array_interface__, and no more is said of it.
    ("py:class", r"towline\._native\.DeviceArray"),
    # A base that only says which ranks an error is about.
    ("py:class", r"towline\.nccl\._errors\._GroupError"),
]

html_theme = "furo"
html_title = f"Towline {release}"
html_static_path: list[str] = []
html_show_copyright = False
html_show_sourcelink = False
