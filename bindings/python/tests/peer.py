"""The other process of the tests: owns a region of `nbytes` bytes, filled with 0, 1, ... 250, 0, 1 and so on."""

import sys

import towline


def main() -> None:
    nbytes, access, memory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    pattern = bytes(range(251)) * (nbytes // 251 + 1)
    buffer = towline.empty(nbytes) if memory == "shared" else bytearray(nbytes)
    view = memoryview(buffer)
    view[:] = pattern[:nbytes]
    endpoint = towline.Endpoint("peer")
    region = endpoint.register(buffer, access)  # type: ignore[arg-type]
    print(region.ticket(), flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "bytes":
            start, stop = map(int, arguments)
            print(bytes(view[start:stop]).hex(), flush=True)
        elif command == "receive":
            print(endpoint.receive(30).message.hex(), flush=True)
        elif command == "signal":
            print(region.wait_signal(int(arguments[0]), int(arguments[1])), flush=True)
        elif command == "close":
            region.close()
            print("closed", flush=True)
        elif command == "notify":
            back = endpoint.import_(arguments[0])
            endpoint.notify(back, arguments[1]).wait()
            print("sent", flush=True)


main()
