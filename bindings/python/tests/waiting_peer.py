"""The other process of `test_interrupts.py`: everything that a call can wait for, and no reply once it is stopped.

Asked to by a message, it reads memory of the sender, over and over, so that it is inside that memory when it is stopped.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import towline
from towline import connect, nccl, nixl

NBYTES = 32 << 20


def main() -> None:
    endpoint = towline.Endpoint("peer")
    regions = [endpoint.register(bytearray(NBYTES), "read+write"), endpoint.register(bytearray(64), "read+write")]
    connector = connect.Connector()
    readable = connector.create_readable_sync(connect.Descriptor(bytearray(NBYTES)))
    agent = nixl.Agent(sys.argv[1], engine="embedded")
    lent = agent.register(bytearray(NBYTES))
    settings = {
        "tickets": [str(region.ticket()) for region in regions],
        "readable": readable.metadata().to_json(),
        "agent": agent.metadata().hex(),
        "ranges": lent.descriptors.ranges,
        "meeting": nccl.get_unique_id().as_bytes.hex(),
    }
    print(json.dumps(settings), flush=True)

    def read(ticket: str) -> None:
        remote = endpoint.import_(ticket)
        with endpoint.register(bytearray(remote.nbytes), "none") as target:
            while True:
                endpoint.read(remote, target).wait()

    def read_of_agent(metadata: str, ranges: Any) -> None:
        peer = agent.add_peer(bytes.fromhex(metadata))
        while True:
            agent.read(lent, [tuple(one) for one in ranges], peer).wait()

    while True:
        order = json.loads(endpoint.receive(timeout=3600).message)
        reader = read if "ticket" in order else read_of_agent
        threading.Thread(target=reader, kwargs=order, daemon=True).start()


main()
