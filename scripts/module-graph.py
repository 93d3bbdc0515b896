"""Computes which top-level modules of a crate use which, and fails where they use each other in a circle, where one is used that nothing
in its crate may use, where ARCHITECTURE.md says that they stand in another order, where a thread is started past the one function for it,
and where a file of the project is too long.

Without arguments it checks; with --print it prints the graph of every crate first. What counts is a path in the code (`crate::a::B`,
`super::a::B`, in `use` lines and elsewhere), outside of what is compiled for tests only. A name that the root of the crate re-exports
counts for the module that it comes from.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

# Modules that nothing else in their crate uses.
LEAVES = {"crates/towline": ["connect", "nccl", "nixl"]}

# The crates whose threads are all started by one function, and the file that has it.
THREADS = {"crates/towline": "crates/towline/src/runtime/thread.rs", "crates/towline-comm": None}

# What is written by hand, and how many lines a file of it may have.
FOLDERS, MOST_LINES = ("bindings", "crates", "docs", "examples", "fuzz", "scripts", "tests"), 800

# ARCHITECTURE.md has the modules of a crate from bottom to top in a block of this kind: each uses only those that stand before it.
ORDER = re.compile(r"^```modules (?P<crate>\S+)\n(?P<names>.*?)^```", re.MULTILINE | re.DOTALL)

TOKEN = re.compile(
    r"""
    (?P<skip> //[^\n]* | /\*(?:[^*]|\*(?!/))*\*/ | \s+
            | b?c?r(?P<hashes>\#*)"(?:.|\n)*?"(?P=hashes)    # raw text
            | [bc]?"(?:\\(?:.|\n)|[^"\\])*"
            | b?'(?:\\(?:x..|u\{[^}]*\}|.)|[^'\\])'          # a character, and not a lifetime
    ) | (?P<token> '?[A-Za-z_]\w* | :: | [^\w\s] | \d\w* )
    """,
    re.VERBOSE,
)
# How an item begins; anything else behind `#[cfg(test)]` is a field, an arm or an argument, which a comma ends.
ITEM = {"async", "const", "enum", "extern", "fn", "impl", "let", "macro_rules", "mod", "pub", "static", "struct", "trait", "type", "unsafe", "use"}
OPENING, CLOSING = {"{", "(", "["}, {"}", ")", "]"}


class Crate:
    """One crate: its top-level modules, and for each pair of them the places where the first uses the second."""

    def __init__(self, root):
        self.uses = defaultdict(lambda: defaultdict(list))
        self.exports = {}
        self.folder = root.parent
        self.found = []  # (module, name at the root of the crate, place)
        self.threads = []  # (file, line) of what starts a thread by the standard library
        tokens = without_tests(tokens_of(root))
        self.modules = [tokens[at + 1][0] for at in range(len(tokens)) if is_declaration(tokens, at)]
        for at, (token, _) in enumerate(tokens):
            if token == "use":
                for path, name in expand(tokens, at + 1):
                    path = path[1:] if path[0] in ("crate", "self") else path
                    if len(path) > 1 and path[0] in self.modules:
                        if path[-1] == "*":
                            sys.exit(f"{root}: the root re-exports all of `{path[0]}`, which hides who uses it: name the items")
                        self.exports[name] = path[0]
        self.read_declared(tokens, self.folder, [])
        for module, name, place in self.found:
            target = name if name in self.modules else self.exports.get(name)
            if target and target != module and place not in self.uses[module][target]:
                self.uses[module][target].append(place)

    def read_declared(self, tokens, folder, path):
        """Reads the files of the modules that are declared here, whose own files lie in that folder."""
        names = [tokens[at + 1][0] for at in range(len(tokens)) if is_declaration(tokens, at)]
        # A macro that declares modules by a list declares all files of the folder that nothing else does.
        if any([token for token, _ in two] == ["mod", "$"] for two in zip(tokens, tokens[1:])):
            names += sorted(file.stem for file in folder.glob("*.rs") if file.stem not in names)
        for name in names:
            files = [file for file in (folder / f"{name}.rs", folder / name / "mod.rs") if file.exists()]
            if not files:
                sys.exit(f"{folder}: there is no file of the module `{name}`")
            self.read(files[0], [*path, name])

    def read(self, file, path):
        tokens = without_tests(tokens_of(file))
        self.read_declared(tokens, self.folder.joinpath(*path), path)
        inside = []  # for each brace that is open: whether it is that of a module
        self.threads += [(str(file), line) for at, (_, line) in enumerate(tokens) if starts_thread(tokens, at)]
        for at, (token, line) in enumerate(tokens):
            if token == "{":
                inside.append(at > 1 and tokens[at - 2][0] == "mod")
            elif token == "}":
                inside.pop()
            elif token in ("crate", "super") and tokens[at + 1][0] == "::" and tokens[at - 1][0] != "::":
                for names, _ in expand(tokens, at):
                    up = len(path) + sum(inside) if names[0] == "crate" else 0
                    while names and names[0] in ("crate", "super"):
                        up += names.pop(0) == "super"
                    if up != len(path) + sum(inside) or not names:
                        continue
                    if names[0] == "*":
                        sys.exit(f"{file}:{line}: a glob over the root of the crate hides what is used: name it")
                    self.found.append((path[0], names[0], f"{file}:{line}"))

    def cycles(self):
        """The sets of modules in which each one reaches every other (Tarjan's strongly connected components)."""
        number, lowest, stack, found = {}, {}, [], []

        def visit(module):
            number[module] = lowest[module] = len(number)
            stack.append(module)
            for used in self.uses[module]:
                if used not in number:
                    visit(used)
                if used in stack:
                    lowest[module] = min(lowest[module], lowest[used])
            if lowest[module] == number[module]:
                at = stack.index(module)
                if len(stack) - at > 1:
                    found.append(set(stack[at:]))
                del stack[at:]

        for module in self.modules:
            if module not in number:
                visit(module)
        return found


def starts_thread(tokens, at):
    """Whether the standard library's way to start a thread is named here: by its path, or as a method of a scope."""
    names = [token for token, _ in tokens[at : at + 3]]
    if names[:2] == ["thread", "::"]:
        return any(path[1:2] in (["Builder"], ["spawn"]) for path, _ in expand(tokens, at))
    return names[:2] == [".", "spawn_scoped"] or names == ["scope", ".", "spawn"]


def is_declaration(tokens, at):
    """Whether a module that has a file of its own is declared here."""
    return tokens[at][0] == "mod" and tokens[at + 2][0] == ";"


def tokens_of(file):
    """The tokens of a file with their lines, without comments, texts and characters."""
    text, tokens, line = file.read_text(), [], 1
    for match in TOKEN.finditer(text):
        if match["token"]:
            tokens.append((match["token"], line))
        line += match.group().count("\n")
    return tokens


def without_tests(tokens):
    """Leaves out what is compiled for tests only: what has an attribute `cfg(test)` or `cfg(all(test, …))`."""
    kept, at = [], 0
    while at < len(tokens):
        if tokens[at][0] == "#" and tokens[at + 1][0] == "[":
            end = closing(tokens, at + 1)
            attribute = "".join(token for token, _ in tokens[at + 2 : end])
            if re.match(r"cfg\((all\((.*,)?)?test\b(?!=)", attribute) and "any(" not in attribute:
                at = end_of_item(tokens, end + 1)
                continue
        kept.append(tokens[at])
        at += 1
    return kept


def end_of_item(tokens, at):
    """Where what begins here ends: an item, with its attributes, or a field or arm."""
    while tokens[at][0] == "#":
        at = closing(tokens, at + 1) + 1
    is_item = tokens[at][0] in ITEM
    while at < len(tokens) and tokens[at][0] not in CLOSING:
        token = tokens[at][0]
        if token in OPENING:
            at = closing(tokens, at)
        at += 1
        if token in ("{", ";") or (token == "," and not is_item):
            break
    return at


def closing(tokens, at):
    """Where the bracket that opens here is closed."""
    depth = 0
    while True:
        depth += (tokens[at][0] in OPENING) - (tokens[at][0] in CLOSING)
        if depth == 0:
            return at
        at += 1


def expand(tokens, at):
    """The paths that begin here, each as its names and the name that it is known by: `a::{b, c as d}` is a::b and a::c, d."""
    names = []
    while True:
        token = tokens[at][0]
        if token == "{":
            end, at, paths = closing(tokens, at), at + 1, []
            while at < end:
                paths += [([*names, *rest], name) for rest, name in expand(tokens, at)]
                while at < end and tokens[at][0] != ",":
                    at = (closing(tokens, at) if tokens[at][0] in OPENING else at) + 1
                at += 1
            return paths
        names.append(token)
        if tokens[at + 1][0] == "::" and (re.match(r"[A-Za-z_*{]", tokens[at + 2][0])):
            at += 2
            continue
        name = tokens[at + 2][0] if tokens[at + 1][0] == "as" else token
        return [(names, name)]


def wrong_in_order(crate, order):
    """What ARCHITECTURE.md says that is not so."""
    place = {module: at for at, module in enumerate(order)}
    yield from (f"ARCHITECTURE.md does not have the module {module}, or has it twice" for module in crate.modules if order.count(module) != 1)
    yield from (f"ARCHITECTURE.md has a module {name}, which is not there" for name in order if name not in crate.modules)
    for module in order:
        for used, places in crate.uses[module].items():
            if place.get(used, -1) > place[module]:
                yield f"{module} uses {used} ({', '.join(places[:3])}), which ARCHITECTURE.md has above it"


def too_long():
    """What is said of the files that have too many lines."""
    for file in sorted(file for folder in FOLDERS for end in ("rs", "py") for file in Path(folder).rglob(f"*.{end}")):
        lines = 0 if "target" in file.parts else file.read_bytes().count(b"\n")
        if lines > MOST_LINES:
            yield f"{file}: it has {lines} lines, and may have {MOST_LINES}: make two files of it"


def main():
    printing = sys.argv[1:] == ["--print"]
    if sys.argv[1:] and not printing:
        sys.exit(f"usage: {sys.argv[0]} [--print]")
    roots = sorted(
        root for folder in ("crates", "bindings") for root in Path(folder).glob("*/src/*.rs") if root.name in ("lib.rs", "main.rs")
    )
    if not roots:
        sys.exit("there are no crates here: run it at the root of the repository")
    orders = {found["crate"]: found["names"].split() for found in ORDER.finditer(Path("ARCHITECTURE.md").read_text())}
    gone = (set(LEAVES) | set(orders)) - {str(root.parent.parent) for root in roots}
    bad = bool(gone)
    for name in sorted(gone):
        print(f"{name}: this crate is gone: remove it from scripts/module-graph.py and ARCHITECTURE.md")
    for root in roots:
        crate, name = Crate(root), str(root.parent.parent)
        if printing:
            print(f"{name}:")
            for module in sorted(crate.modules):
                print(f"  {module} -> {', '.join(sorted(crate.uses[module])) or '(nothing)'}")
        for cycle in crate.cycles():
            bad = True
            print(f"{name}: these modules use each other in a circle: {', '.join(sorted(cycle))}")
            for module in sorted(cycle):
                for used in sorted(cycle & set(crate.uses[module])):
                    print(f"  {module} uses {used}: {', '.join(crate.uses[module][used][:3])}")
        wrong = list(wrong_in_order(crate, orders[name])) if name in orders else []
        for leaf in LEAVES.get(name, []):
            users = [f"{module} ({', '.join(uses[leaf][:3])})" for module, uses in crate.uses.items() if leaf in uses]
            wrong += [f"{leaf} is a leaf, and is used by {', '.join(users)}"] if users else []
        if name in THREADS:
            past = [f"{file}:{line}" for file, line in crate.threads if file != THREADS[name]]
            wrong += [f"a thread is started past `start_thread`: {place}" for place in past]
        for one in wrong:
            bad = True
            print(f"{name}: {one}")
    for one in too_long():
        bad = True
        print(one)
    sys.exit(bad)


main()
