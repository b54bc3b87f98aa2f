"""The other end of the raw measurements, as a process: `push ENDPOINT BYTES COUNT` or `echo ENDPOINT COUNT`."""

import sys

import zmq


def push(endpoint: str, size: str, count: str) -> None:
    """Sends `count` messages as fast as it can."""
    payload = b"x" * int(size)
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(endpoint)
        for _ in range(int(count)):
            socket.send(payload)


def echo(endpoint: str, count: str) -> None:
    """Sends back `count` messages."""
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.connect(endpoint)
        for _ in range(int(count)):
            socket.send(socket.recv())


if __name__ == "__main__":
    if sys.argv[1] == "push":
        push(*sys.argv[2:])
    else:
        echo(*sys.argv[2:])
