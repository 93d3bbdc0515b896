"""Moves the pages of one request out of a paged KV cache, between two processes, by block indices.

    python paged_kv_cache.py

The prefill worker has computed keys and values for a request; they lie in whatever pages were free there. The decode
worker has other free pages. It reads the request's pages of all layers in one transfer and notifies the prefill worker,
which can then use its pages again. Needs NumPy.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import towline

LAYERS, PAGES, PAGE = 8, 64, 4096  # a page: the keys or the values of some tokens in one layer, 4096 bytes

# One layout names every page. Dimensions, outermost first: layers, keys and values, pages.
LAYOUT = towline.Layout(0, PAGE, [(LAYERS, 2 * PAGES * PAGE), (2, PAGES * PAGE), (PAGES, PAGE)])

# For the check at the end: each page of the prefill worker is filled with its number in the layout.
NUMBERS = np.arange(LAYERS * 2 * PAGES, dtype=np.uint32).reshape(LAYERS, 2, PAGES)


def blocks(pages: Sequence[int]) -> Any:
    """The numbers in the layout of some pages, in every layer, keys and values."""
    return NUMBERS[:, :, list(pages)].ravel()


def prefill() -> None:
    cache = towline.empty((LAYERS, 2, PAGES, PAGE // 4), "uint32")
    cache[:] = NUMBERS[..., None]
    pages = [17, 3, 42, 43, 44, 8]

    with towline.Endpoint("prefill") as endpoint:
        region = endpoint.register(cache, "read")
        # The channel is yours to choose; here it is a pipe. The layout travels in the ticket.
        request = {"ticket": str(region.ticket(LAYOUT)), "pages": pages}
        worker = subprocess.Popen([sys.executable, __file__, "decode"], stdin=subprocess.PIPE, text=True)
        worker.communicate(json.dumps(request), timeout=30)
        assert worker.returncode == 0, "the decode worker failed"

        assert endpoint.receive().message == b"request 1"
        print(f"prefill: the pages {pages} are free again")


def decode() -> None:
    request = json.load(sys.stdin)
    cache = np.zeros((LAYERS, 2, PAGES, PAGE // 4), dtype=np.uint32)
    pages = [0, 1, 5, 6, 30, 31]

    with towline.Endpoint("decode") as endpoint, endpoint.register(cache, "none") as local:
        remote = endpoint.import_(request["ticket"])
        assert remote.layout is not None
        transfer = endpoint.read(
            remote,
            local,
            blocks=(remote.layout, blocks(request["pages"]), LAYOUT, blocks(pages)),
            notify="request 1",
        )
        transfer.wait()
        print(f"decode: {transfer.nbytes} bytes over {transfer.path} into the pages {pages}")

    expected = np.zeros_like(cache)
    expected[:, :, pages] = NUMBERS[:, :, request["pages"], None]
    assert np.array_equal(cache, expected), "a page is wrong"


if __name__ == "__main__":
    if sys.argv[1:] == ["decode"]:
        decode()
    else:
        prefill()
