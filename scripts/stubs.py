"""Generates the stub of the native module from its Rust sources, or with --check says whether it is up to date.

PyO3 puts the signatures into the module when it is built with the feature `stubs`, and maturin takes them out again. What it
cannot know yet is added here; an entry that it comes to know is an error, so that the tables do not outlive their use.
"""

import difflib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = Path("bindings/python")
STUB = PACKAGE / "python/towline/_native.pyi"
HEADER = """\
# Generated from the Rust sources by `make stubs`. Do not edit.
import builtins
import sys
from collections.abc import Iterable
from ._errors import Error
from typing_extensions import CapsuleType
"""

# The types of properties, which take no annotations in Rust.
PROPERTIES = {
    ("DeviceArray", "__cuda_array_interface__"): ("dict", "dict[str, Any]"),
    ("DeviceArray", "shape"): ("tuple", "tuple[int, ...]"),
    ("SharedArray", "__array_interface__"): ("dict", "dict[str, Any]"),
    ("SharedArray", "shape"): ("tuple", "tuple[int, ...]"),
    # Inside the class, `range` is the property itself.
    ("Ticket", "range"): ("range", "builtins.range"),
}

# Classes with the buffer protocol, which has a method from Python 3.12 on.
BUFFERS = ["SharedArray"]
BUFFER = """\
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...
"""


def change(text: str, pattern: str, by: str) -> str:
    """The text with its one place of that pattern replaced."""
    text, places = re.subn(pattern, lambda _: by, text, flags=re.MULTILINE)
    if places != 1:
        sys.exit(f"{places} places of {pattern!r} in what was generated, where there has to be one: see {__file__}")
    return text


def generate() -> str:
    """The stub, from a module that is built now if it is not there."""
    with tempfile.TemporaryDirectory() as out:
        maturin = Path(sys.executable).with_name("maturin")
        manifest = PACKAGE / "Cargo.toml"
        subprocess.run([maturin, "generate-stubs", "--features", "stubs", "--manifest-path", manifest, "--out", out], check=True)
        (generated,) = Path(out).rglob("*.pyi")
        text = generated.read_text()
    classes = re.split(r"^(?=@final\nclass |def )", text, flags=re.MULTILINE)
    for number, body in enumerate(classes):
        name = re.match(r"@final\nclass (\w+):\n", body)
        if not name:
            continue
        for (owner, property), (wrong, right) in PROPERTIES.items():
            if owner == name[1]:
                line = f"    def {property}(self, /) -> "
                body = change(body, rf"^{re.escape(line + wrong)}(?=:)", line + right)
        if name[1] in BUFFERS:
            body = body.rstrip() + "\n" + BUFFER + "\n"
        classes[number] = body
    return change("".join(classes), r'(?<=^"""\n)\nfrom ', "\n" + HEADER + "from ")


def main() -> None:
    """Writes the stub or compares it."""
    stub = generate()
    if "--check" not in sys.argv:
        STUB.write_text(stub)
        return
    there = STUB.read_text()
    if there != stub:
        lines = difflib.unified_diff(there.splitlines(), stub.splitlines(), str(STUB), "what was generated", lineterm="", n=0)
        sys.exit("\n".join([*lines, "The stub is not what the sources say: run `make stubs` and commit it."]))


if __name__ == "__main__":
    main()
