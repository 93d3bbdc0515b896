"""The other process of the tests of operations: makes operations over one path and follows its orders."""

import os
import signal
import sys

import towline
from towline.connect import Operation

PATTERN = bytes(range(251))


def pattern(nbytes: int) -> bytes:
    return (PATTERN * (nbytes // 251 + 1))[:nbytes]


def main() -> None:
    path, memory = sys.argv[1], sys.argv[2]
    # The path is chosen by the active side, which is sometimes this one.
    connector = towline.Connector(endpoint=towline.Endpoint("peer", require=path))
    operation: Operation | None = None
    buffer = towline.empty(1)

    def made(nbytes: int, content: bytes) -> towline.Descriptor:
        nonlocal buffer
        buffer = towline.empty(nbytes) if memory == "shared" else bytearray(nbytes)
        memoryview(buffer)[:] = content
        return towline.Descriptor(buffer)

    def begun(kind: str, text: str) -> Operation:
        remote = towline.RdmaMetadata.from_json(text)
        nbytes = remote.descriptors[0].size
        if kind == "read":
            return connector.begin_read_sync(remote, made(nbytes, bytes(nbytes)))
        return connector.begin_write_sync(made(nbytes, pattern(nbytes)), remote)

    for line in sys.stdin:
        command, *arguments = line.split()
        answer = "done"
        try:
            if command == "readable":
                nbytes = int(arguments[0])
                readable = connector.create_readable_sync(made(nbytes, pattern(nbytes)))
                operation, answer = readable, readable.metadata().to_json()
            elif command == "writable":
                nbytes = int(arguments[0])
                writable = connector.create_writable_sync(made(nbytes, bytes(nbytes)))
                operation, answer = writable, writable.metadata().to_json()
            elif command in ("read", "write"):
                operation = begun(command, arguments[0])
                operation.wait()
            elif command == "begin-and-stop":
                operation = begun(arguments[0], arguments[1])
                os.kill(os.getpid(), signal.SIGSTOP)
            elif command == "wait":
                assert operation is not None
                operation.wait(30)
            elif command == "cancel":
                assert operation is not None
                operation.cancel()
            elif command == "bytes":
                answer = bytes(memoryview(buffer)[int(arguments[0]) : int(arguments[1])]).hex()
            if command in ("read", "write", "wait"):
                assert operation is not None
                answer = str(operation.status)
        except towline.Error as error:
            status = "" if operation is None else operation.status
            answer = f"{status} {type(error).__name__} {error.message}".replace("\n", " ")
        print(answer, flush=True)


main()
