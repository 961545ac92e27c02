"""Planted: samples come from a store with a limited transfer rate.

Typical origin: the dataset is in a bucket or on a busy file server. The workers use almost no CPU
and wait for data; more workers would share the same rate.
"""

import asyncio
import multiprocessing
import socket
import struct

import torch
from common import Clock, parse_options
from torch import nn
from torch.utils.data import DataLoader, Dataset

CAUSE = "input.fetch"
DEVICE = "cpu"

SIDE = 96
SAMPLE_BYTES = 3 * SIDE * SIDE
STORE_BYTES_PER_S = 11_000_000


class Store:
    """An object store in a separate process: for each request, it sends the bytes of a sample."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def serve(self, ports) -> None:
        asyncio.run(self._serve(ports))

    async def _serve(self, ports) -> None:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        ports.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        content = bytes(range(256)) * (SAMPLE_BYTES // 256)
        while await reader.read(4):
            await self._stay_below_the_rate()
            writer.write(content)
            await writer.drain()
        writer.close()

    async def _stay_below_the_rate(self) -> None:
        """All connections share one rate, so each response waits for the previous ones."""
        if self._bytes_per_s is None:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + SAMPLE_BYTES / self._bytes_per_s
        await asyncio.sleep(self._free_at - now)


def start_store(bytes_per_s: float | None) -> tuple[multiprocessing.Process, int]:
    ports: multiprocessing.Queue = multiprocessing.Queue()
    process = multiprocessing.Process(target=Store(bytes_per_s).serve, args=(ports,), daemon=True)
    process.start()
    return process, ports.get()


class RemoteImages(Dataset):
    def __init__(self, port: int) -> None:
        self.port = port
        self.connection: socket.socket | None = None

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.connection is None:
            self.connection = socket.create_connection(("127.0.0.1", self.port))
        self.connection.sendall(struct.pack("<I", index))
        raw = self.connection.recv(SAMPLE_BYTES, socket.MSG_WAITALL)
        image = torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(3, SIDE, SIDE)
        return image, index % 10


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    store, port = start_store(None if options.fixed else STORE_BYTES_PER_S)
    loader = DataLoader(RemoteImages(port), batch_size=16, shuffle=True, num_workers=2)
    model = small_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clock = Clock(options.seconds)
    while not clock.over():
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images / 255.0), labels)
            loss.backward()
            optimizer.step()
            clock.step(len(images))
            if clock.over():
                break
    clock.report()
    store.terminate()


if __name__ == "__main__":
    main()
