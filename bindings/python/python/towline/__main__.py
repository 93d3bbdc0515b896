"""``python -m towline``: what programs around the package need to know of it."""

from __future__ import annotations

import argparse

from . import __version__, dropin


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m towline", description=__doc__)
    parser.add_argument("--version", action="version", version=f"towline {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    where = commands.add_parser(
        "dropin-path",
        help="print the directory that makes dynamo.nixl_connect resolve to towline.nixl_connect when it is "
        "first on the path",
    )
    where.add_argument(
        "--offer",
        choices=["towline", "nixl"],
        default="towline",
        help="whom passive operations are offered to: nixl where peers run the original",
    )
    print(dropin.path(parser.parse_args().offer))


if __name__ == "__main__":
    main()
