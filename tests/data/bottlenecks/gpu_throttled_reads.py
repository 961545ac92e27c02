"""Planted: images come from a store with a limited transfer rate.

Typical origin: the dataset is in a bucket or on a busy file server. The workers use almost no CPU
and wait for data; more workers would share the same rate. `--fixed` uses a fast store.
"""

import multiprocessing
import os
import socket
import socketserver
import struct
import threading
import time

import torch
import torchvision
from common import Clock, parse_options
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

CAUSE = "input.fetch"
DEVICE = "gpu"

SMOKE = os.environ.get("SMOKE") == "1"  # small and on the CPU, to test the script without a GPU
BATCH = int(os.environ.get("BATCH") or (8 if SMOKE else 128))
MODEL = os.environ.get("MODEL", "resnet18" if SMOKE else "resnet101")
WORKERS = int(os.environ.get("WORKERS") or (2 if SMOKE else 8))
STORE_BYTES_PER_S = 1e6 * float(os.environ.get("STORE_MB_PER_S") or (1 if SMOKE else 190))
SIDE = 32 if SMOKE else 224
SAMPLE_BYTES = SIDE * SIDE * 3


class Store(socketserver.ThreadingTCPServer):
    """An object store: a request names a sample, the response is its bytes."""

    daemon_threads = True

    def __init__(self, bytes_per_s: float | None) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.content = bytes(range(256)) * (SAMPLE_BYTES // 256)
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._turn = threading.Lock()

    def stay_below_the_rate(self) -> None:
        """All connections share one rate, so each response waits for the previous ones."""
        if self._bytes_per_s is None:
            return
        with self._turn:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + SAMPLE_BYTES / self._bytes_per_s
            wait = self._free_at - now
        time.sleep(wait)


class Connection(socketserver.BaseRequestHandler):
    server: Store

    def handle(self) -> None:
        while self.request.recv(4):
            self.server.stay_below_the_rate()
            self.request.sendall(self.server.content)


def serve(bytes_per_s: float | None, ports: multiprocessing.Queue) -> None:
    with Store(bytes_per_s) as store:
        ports.put(store.server_address[1])
        store.serve_forever()


def start_store(bytes_per_s: float | None) -> tuple[multiprocessing.Process, int]:
    ports: multiprocessing.Queue = multiprocessing.Queue()
    process = multiprocessing.Process(target=serve, args=(bytes_per_s, ports), daemon=True)
    process.start()
    return process, ports.get()


class RemoteImages(Dataset):
    def __init__(self, port: int) -> None:
        self.port = port
        self.connection: socket.socket | None = None

    def __len__(self) -> int:
        return 500_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.connection is None:
            self.connection = socket.create_connection(("127.0.0.1", self.port))
        self.connection.sendall(struct.pack("<I", index))
        raw = self.connection.recv(SAMPLE_BYTES, socket.MSG_WAITALL)
        image = torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(SIDE, SIDE, 3)
        return image, index % 1000


def main() -> None:
    options = parse_options(__doc__)
    device = torch.device("cpu" if SMOKE else "cuda")
    store, port = start_store(None if options.fixed else STORE_BYTES_PER_S)
    loader = DataLoader(
        RemoteImages(port),
        batch_size=BATCH,
        shuffle=True,
        num_workers=WORKERS,
        pin_memory=True,
        persistent_workers=True,
        drop_last=True,
    )
    model = torchvision.models.get_model(MODEL)
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    clock = Clock(options.seconds)
    while not clock.over():
        for batch in loader:
            images = batch[0].to(device, non_blocking=True)
            labels = batch[1].to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = cross_entropy(model(images.permute(0, 3, 1, 2) / 255), labels)
            loss.backward()
            optimizer.step()
            clock.step(len(images))
            if clock.over():
                break
    clock.report()
    store.terminate()


if __name__ == "__main__":
    main()
