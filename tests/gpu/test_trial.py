"""Trials on a real GPU: models, GPU memory limits and cleanup."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from conftest import Tried
from stepscope.sensors.gpu.nvml import open_nvml

pytestmark = pytest.mark.gpu
Trial = Callable[..., Tried]

PAPER_MODELS = (
    "alexnet",
    "vgg16",
    "inception_v3",
    "resnet34",
    "resnet50",
    "resnet152",
    "densenet201",
    "r3d_18",
    "cnn",
)
OTHER_MODELS = (
    "vit_b_16",
    "convnext_tiny",
    "efficientnet_b0",
    "mobilenet_v3_large",
    "swin_t",
    "lstm",
)


@pytest.mark.parametrize("model", [*PAPER_MODELS, *OTHER_MODELS])
def test_models(trial: Trial, model: str) -> None:
    done = trial(
        model, "--batch-size", "16", "--samples", "64", "--steps", "20", "--precision", "bf16"
    )
    assert done.code == 0, done.err
    result = done.told
    assert result["device"].startswith("cuda") and result["steps"] == 20
    assert result["samples_per_second"] > 0 and result["compute_seconds"] > 0
    assert result["copy_seconds"] > 0 and result["data_wait_share"] is not None
    assert result["reserved_peak_bytes"] >= result["allocated_peak_bytes"] > 1e6
    assert result["host_memory_peak_bytes"] > 5e8


def test_gpu_oom_and_the_next_trial(trial: Trial) -> None:
    """The message of the allocator is kept, all memory is released, and the next trial runs."""
    done = trial(
        "resnet50",
        "--batch-size",
        "256",
        "--steps",
        "8",
        "--gpu-memory",
        "4GiB",
        "--data",
        "resident",
        "--samples",
        "256",
    )
    assert done.code == 10, done.err
    result = done.told
    assert result["outcome"] == "gpu_oom"
    assert "Tried to allocate" in done.run.exit_status.evidence["message"]
    assert done.run.json["limits"]["gpu_memory"] == {
        "requested": 4 << 30,
        "enforced_by": "framework",
    }
    assert result["leftovers"] == []
    for gpu in open_nvml().gpus:
        assert gpu.memory_used() < 4e9
    smaller = trial(
        "resnet50",
        "--batch-size",
        "16",
        "--steps",
        "8",
        "--gpu-memory",
        "4GiB",
        "--samples",
        "64",
        "--name",
        "smaller",
    )
    assert smaller.code == 0, smaller.err
    assert smaller.told["reserved_peak_bytes"] <= 4 << 30


def test_data_from_files(trial: Trial) -> None:
    done = trial(
        "resnet18",
        "--data",
        "jpeg",
        "--samples",
        "256",
        "--batch-size",
        "32",
        "--workers",
        "8",
        "--steps",
        "40",
        "--channels-last",
        "--precision",
        "fp16",
        "--page-cache",
        "cold",
    )
    assert done.code == 0, done.err
    assert done.told["workload"]["pin"] is True
    assert done.told["shutdown_seconds"] < 3
    run = done.run
    assert run.summary().totals["gpu_pcie_received"] > 32 * 40 * 3 * 224 * 224 * 4 * 0.9


def test_video(trial: Trial) -> None:
    pytest.importorskip("av")
    done = trial(
        "r3d_18",
        "--data",
        "video",
        "--samples",
        "16",
        "--batch-size",
        "4",
        "--workers",
        "4",
        "--steps",
        "12",
    )
    assert done.code == 0, done.err


def test_precision_changes_throughput(trial: Trial) -> None:
    """fp32 is slower than TF32, which is slower than bf16."""
    rates = {}
    for precision in ("fp32", "tf32", "bf16"):
        done = trial(
            "resnet50",
            "--data",
            "resident",
            "--samples",
            "64",
            "--batch-size",
            "64",
            "--steps",
            "40",
            "--precision",
            precision,
            "--name",
            precision,
        )
        assert done.code == 0, done.err
        rates[precision] = done.told["samples_per_second"]
    assert rates["bf16"] > rates["tf32"] > 1.2 * rates["fp32"]


def test_compiled(trial: Trial) -> None:
    done = trial("cnn", "--data", "resident", "--compile", "--steps", "40", "--samples", "64")
    assert done.code == 0, done.err


def test_unavailable_gpus_and_limits(trial: Trial) -> None:
    done = trial("cnn", "--gpus", "7", "--steps", "8")
    assert done.code == 5 and "GPU" in done.err
    many = trial("cnn", "--ranks", "3", "--steps", "8", "--samples", "512")
    assert many.code == 5 and "--ranks 1" in many.err
    too_much = trial("cnn", "--gpu-memory", "9000GiB", "--steps", "8")
    assert too_much.code in (4, 5), too_much.err


def test_cpu_on_a_machine_with_a_gpu(trial: Trial) -> None:
    done = trial("cnn", "--device", "cpu", "--steps", "8", "--samples", "512")
    assert done.code == 0, done.err
    assert done.told["device"] == "cpu"


def test_profile(trial: Trial) -> None:
    done = trial("resnet18", "--samples", "64", "--batch-size", "16", "--steps", "10", "--profile")
    assert done.code == 0, done.err
    profile = json.loads((done.run.path / "trial" / "profile0.json").read_text())
    assert "error" not in profile, profile
    assert "CUDA" in done.err
