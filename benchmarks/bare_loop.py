"""Compare the throughput of a trial with that of a hand-written loop.

    python benchmarks/bare_loop.py [--pairs 5] [--steps 100] [--model resnet50] [--batch-size 256]

The same model is trained with the same batch, which stays on the device, in a bare loop in a fresh
process without stepscope, and as `stepscope trial --data resident`. They alternate, and the order
is reversed each time. The bare loop is timed from the end of its warm-up to the end of its last
step; the trial reports its own throughput. Goal: at least 98% on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import results_file

BARE = """
import json, sys, time
import torch, torchvision
model, precision = sys.argv[1:3]
batch, warmup, steps, size = map(int, sys.argv[3:])
device = "cuda" if torch.cuda.is_available() else "cpu"
kind = torch.channels_last
net = torchvision.models.get_model(model, weights=None).to(device, memory_format=kind).train()
images = torch.rand(batch, 3, size, size, device=device).to(memory_format=kind)
labels = torch.randint(0, 1000, (batch,), device=device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
def step():
    with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
        loss = torch.nn.functional.cross_entropy(net(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
for _ in range(warmup):
    step()
wait()
began = time.perf_counter()
for _ in range(steps):
    step()
wait()
print(json.dumps({"samples_per_second": steps * batch / (time.perf_counter() - began)}))
"""


def bare(options: argparse.Namespace) -> float:
    """Return the samples per second of a hand-written loop."""
    numbers = [options.batch_size, options.warmup, options.steps, options.image_size]
    done = subprocess.run(
        [sys.executable, "-c", BARE, options.model, options.precision, *map(str, numbers)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(json.loads(done.stdout)["samples_per_second"])


def trial(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the result of `stepscope trial` for the same workload."""
    words = [
        "trial",
        options.model,
        "--data",
        "resident",
        "--precision",
        options.precision,
        "--channels-last",
        "--batch-size",
        options.batch_size,
        "--image-size",
        options.image_size,
        "--steps",
        options.warmup + options.steps,
        "--out",
        folder,
        "--json",
        "--quiet",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", *map(str, words)],
        env=os.environ | {"STEPSCOPE_STATE": str(folder / "state")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=results_file.RESULTS)
    options = parser.parse_args()
    bare_rates, trial_rates, result = [], [], {}
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(options.pairs):
            for is_trial in (pair % 2 == 0, pair % 2 == 1):
                if is_trial:
                    result = trial(options, Path(folder))
                    trial_rates.append(float(result["samples_per_second"]))
                else:
                    bare_rates.append(bare(options))
            print(f"bare loop {bare_rates[-1]:,.0f}, trial {trial_rates[-1]:,.0f} samples/s")
    ratios = [t / b for t, b in zip(trial_rates, bare_rates, strict=True)]
    share = statistics.mean(trial_rates) / statistics.mean(bare_rates)
    print(
        f"the trial reaches {share:.1%} of the bare loop ({min(ratios):.1%} to {max(ratios):.1%})"
    )
    figures = {
        "model": options.model,
        "batch_size": options.batch_size,
        "precision": options.precision,
        "device": result.get("device_name"),
        "bare_samples_per_second": bare_rates,
        "trial_samples_per_second": trial_rates,
        "share": share,
        "shares_of_pairs": ratios,
    }
    print(f"written: {os.path.relpath(results_file.write('bare_loop', figures, options.out))}")


if __name__ == "__main__":
    main()
