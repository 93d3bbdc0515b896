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
    where.add_argument(
        "--nixl-devices",
        metavar="NAMES",
        default="",
        help="the network devices that NIXL may use with peers that run the original, separated by commas "
        "(mlx5_0:1, lo; tcp for all interfaces); without it, offer=nixl lets it use RDMA devices alone",
    )
    given = parser.parse_args()
    print(dropin.path(given.offer, [name for name in given.nixl_devices.split(",") if name]))


if __name__ == "__main__":
    main()
