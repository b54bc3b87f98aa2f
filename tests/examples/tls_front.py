"""Speaks TLS for a server that was built without it: `tls_front.py HOST PORT SERVER_PORT CERTIFICATE KEY`."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until either end is gone; then both are."""
    with contextlib.suppress(OSError):
        while block := await reader.read(1 << 16):
            writer.write(block)
            await writer.drain()
    writer.close()


async def first_answer(port: int) -> None:
    """Returns once the server takes connections; it starts at the same time as this process."""
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.01)


async def serve(host: str, port: int, server_port: int, certificate: str, key: str) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", server_port)
        await asyncio.gather(pass_on(reader, server_writer), pass_on(server_reader, writer))

    await first_answer(server_port)
    server = await asyncio.start_server(meet, host, port, ssl=context)
    print("Ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]))
