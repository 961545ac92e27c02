"""The profile in wide and narrow terminals, of a GPU and of a CPU."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stepscope.records.codec import from_json
from stepscope.records.profile import Profile, RankProfile
from stepscope.report.kit.terminal import draw_blocks
from stepscope.report.trial.profile import (
    notes_text,
    operators_table,
    profile_blocks,
    profile_dict,
)

FOLDER = Path("/somewhere", *["with a long path"] * 8, "trial")
LONG = "autograd::engine::evaluate_function: ConvolutionBackward0"


def stored(rank: int = 0, *, gpu: bool = True) -> dict[str, Any]:
    """Return five steps with twenty operators; the first operator takes half of the time."""
    parts = [19.0] + [1.0] * 19
    return {
        "device": f"cuda:{rank}" if gpu else "cpu",
        "steps": 5,
        "step_us": [20_000.0] * 5,
        "operators": [
            {
                "name": LONG if index == 1 else f"aten::operator{index}",
                "kind": "operator",
                "calls": 10,
                "self_cpu_us": part * 500,
                "cpu_us": part * 1000,
                "self_cuda_us": part * 5000 if gpu else None,
                "cuda_us": part * 6000 if gpu else None,
            }
            for index, part in enumerate(parts)
        ],
        "kernels": [{"name": "gemm", "calls": 40, "us": 90_000.0}] if gpu else [],
        "sums": {
            "operator_cpu_us": 19_000.0,
            "runtime_cpu_us": 5000.0 if gpu else None,
            "synchronize_cpu_us": 1000.0 if gpu else None,
            "kernels": 1000 if gpu else None,
            "kernel_us": 180_000.0 if gpu else None,
            "launches": 900 if gpu else None,
            "memcpy_us": 9000.0 if gpu else None,
            "memset_us": 1000.0 if gpu else None,
        },
        "copies": {
            "to_device": {"calls": 10, "us": 9000.0, "pageable_us": 500.0},
            "from_device": {"calls": 5, "us": 10.0, "pageable_us": 0.0},
        }
        if gpu
        else None,
        "memory": {
            "cpu": {"allocated": 2 << 20, "reserved": None},
            **({f"cuda:{rank}": {"allocated": 10 << 30, "reserved": 12 << 30}} if gpu else {}),
        },
        "missing": "",
        "trace": {
            "file": f"trace{rank}.json.gz",
            "bytes": 3 << 20,
            "unzipped_bytes": 100 << 20,
        },
    }


def profile_of(by_rank: dict[int, dict[str, Any]], failed: dict[int, str] | None = None) -> Profile:
    ranks = {rank: from_json(RankProfile, plain) for rank, plain in by_rank.items()}
    return Profile(ranks, failed or {})


ONE_GPU = profile_of({0: stored()})
ONE_CPU = profile_of({0: stored(gpu=False)})
RANKS = profile_of({0: stored(0), 1: stored(1)}, {2: "The PyTorch profiler failed: no memory"})


def printed(profile: Profile, width: int) -> str:
    out = io.StringIO()
    draw_blocks(Console(file=out, width=width), profile_blocks(profile, FOLDER))
    return out.getvalue()


@pytest.mark.parametrize("width", [50, 80, 120, 200])
@pytest.mark.parametrize("profile", [ONE_GPU, ONE_CPU, RANKS])
def test_only_paths_exceed_the_width(profile: Profile, width: int) -> None:
    lines = printed(profile, width).splitlines()
    assert max(len(line) for line in lines if not line.startswith("Trace")) <= width
    for rank in profile.ranks.values():
        path = str(FOLDER / rank.trace.file)
        assert any(f"Trace   {path}  (3.00 MiB, uncompressed 100 MiB)" == line for line in lines)
    assert lines[-1] == "Open a trace at ui.perfetto.dev"


def test_totals_of_a_gpu() -> None:
    text = printed(ONE_GPU, 100)
    for part in (
        "Means per step over 5 steps, 20.0 ms per step under the profiler\n",
        "CPU     3.80 ms per step in operators, 1.00 ms in CUDA calls, 0.200 ms waiting",
        "CUDA    36.0 ms per step in 200 kernels (180 launches), 1.80 ms in copies, 0.200 ms",
        "Copies  1.80 ms in 2 copies to the device (0.100 ms from or to pageable",
        "10.0 GiB on cuda:0, 12.0 GiB reserved",
        "2.00 MiB on cpu, added by the profiled steps",
    ):
        assert part in text


def test_operators_of_a_gpu() -> None:
    table = operators_table(ONE_GPU.ranks[0])
    titles = [column.title for column in table.columns]
    assert len(table.rows) == 13
    assert dict(zip(titles, table.rows[0], strict=True)) == {
        "Operator": "aten::operator0",
        "Calls": "2",
        "CPU ms": "1.90",
        "CPU ms, total": "3.80",
        "CUDA ms": "19.0",
        "CUDA ms, total": "22.8",
        "Share": "50%",
    }
    rest = dict(zip(titles, table.rows[-1], strict=True))
    assert (rest["Operator"], rest["Calls"], rest["CUDA ms"]) == ("8 more", "16", "8.00")
    assert rest["CUDA ms, total"] == "–", "operators call each other"


def test_operators_of_a_cpu_have_no_cuda_columns() -> None:
    table = operators_table(ONE_CPU.ranks[0])
    titles = [column.title for column in table.columns]
    assert not [title for title in titles if "CUDA" in title]
    assert dict(zip(titles, table.rows[0], strict=True))["CPU ms"] == "1.90"
    assert "CUDA" not in printed(ONE_CPU, 120)


def test_narrow_tables_drop_columns_and_shorten_names() -> None:
    titles = [column.title for column in operators_table(ONE_GPU.ranks[0]).compact(80).columns]
    assert titles == ["Operator", "Calls", "CPU ms", "CUDA ms", "CUDA ms, total", "Share"]
    narrow = operators_table(ONE_GPU.ranks[0]).compact(50)
    assert [column.title for column in narrow.columns][:4] == titles[:4]
    assert narrow.rows[1][0].startswith("autograd") and narrow.rows[1][0].endswith("Backward0")
    assert operators_table(ONE_GPU.ranks[0]).rows[1][0] == LONG


def test_first_rank_is_shown() -> None:
    second = stored(1)
    second["kernels"] = [{"name": "elsewhere", "calls": 5, "us": 10.0}]
    text = printed(profile_of({0: stored(0), 1: second}), 200)
    assert "over 5 steps of rank 0, 20.0 ms per step under the profiler; profile<rank>.json" in text
    (kernel,) = (line for line in text.splitlines() if line.startswith("gemm"))
    assert kernel.split() == ["gemm", "8", "18.0", "50%"], "of the first rank only"
    assert "elsewhere" not in text
    assert "over 5 steps of rank 1," in printed(profile_of({1: second}, {0: "no"}), 200)


def test_notes_on_missing_parts() -> None:
    assert notes_text(RANKS) == ("rank 2: The PyTorch profiler failed: no memory",)
    missing = profile_of({0: {**stored(gpu=False), "missing": "no CUPTI"}})
    assert "Note    rank 0: no CUPTI" in printed(missing, 80)
    nothing = profile_of({}, {0: "no\x1b[2J"})
    assert printed(nothing, 80).strip() == "Note  rank 0: no�[2J"


def test_names_are_escaped() -> None:
    plain = stored()
    plain["operators"][0]["name"] = "a\x1b[2Jb[red]"
    assert "a�[2Jb[red]" in printed(profile_of({0: plain}), 80)


@pytest.mark.parametrize("profile", [ONE_GPU, ONE_CPU, RANKS, profile_of({})])
def test_profile_as_json(profile: Profile) -> None:
    plain = json.loads(json.dumps(profile_dict(profile), allow_nan=False))
    assert [rank["rank"] for rank in plain["ranks"]] == list(profile.ranks)
    assert set(plain["failed"]) == {str(rank) for rank in profile.failed}
    for rank in plain["ranks"]:
        assert rank["steps"] == 5
        assert rank["operators"][0]["calls"] == {"total": 10, "per_step": 2}
        assert rank["sums"]["operator_cpu_us"] == {"total": 19_000, "per_step": 3800}
        has_device = rank["device"] != "cpu"
        assert (rank["copies"] is not None) == (rank["sums"]["kernels"] is not None) == has_device
        if has_device:
            assert rank["copies"][0]["direction"] == "to_device"
            assert rank["copies"][0]["us"] == {"total": 9000, "per_step": 1800}
