"""Another process on the machine: uses CPU or GPU for a while, outside the monitored run.

python thief.py --cpu 2 --seconds 30
python thief.py --gpu --seconds 30
"""

import argparse
import multiprocessing
import os
import time


def burn_cpu(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(10_000))


def burn_gpu(seconds: float) -> None:
    """Run matrix products without a pause; busy processes get equal shares of a GPU."""
    import torch

    smoke = os.environ.get("SMOKE") == "1"
    side, device = (256, "cpu") if smoke else (8192, "cuda")
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(20):
            product = matrix @ matrix
        product[0, 0].item()  # keeps the queue of launches short


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", type=int, default=0, metavar="N", help="busy processes")
    parser.add_argument("--gpu", action="store_true", help="keep the first GPU busy")
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    burners = [
        multiprocessing.Process(target=burn_cpu, args=(options.seconds,), daemon=True)
        for _ in range(options.cpu)
    ]
    for burner in burners:
        burner.start()
    if options.gpu:
        burn_gpu(options.seconds)
    for burner in burners:
        burner.join()


if __name__ == "__main__":
    main()
