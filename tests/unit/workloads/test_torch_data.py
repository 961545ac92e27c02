"""Every dataset through a real loader, in every shape that it supports."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("torchvision")

from torch.utils.data import DataLoader  # noqa: E402

from stepscope.errors import WorkloadError  # noqa: E402
from stepscope.workloads.datasets.cifar import generated_cifar  # noqa: E402
from stepscope.workloads.datasets.jpeg import generated_jpegs  # noqa: E402
from stepscope.workloads.frameworks.torch.data import (  # noqa: E402
    Data,
    build_data,
    choose_part,
    prepare_cache,
)
from stepscope.workloads.frameworks.torch.models import Shape  # noqa: E402
from stepscope.workloads.spec import Workload, make_workload  # noqa: E402

IMAGE = Shape("image", 7, size=48)
SMALL = Shape("image", 100, size=32)
CLIP = Shape("clip", 4, size=56, frames=4)
TEXT = Shape("tokens", 2, sequence_length=12, vocabulary=50)


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One data store for the module, so that tests share generated data."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPSCOPE_DATA", str(folder))
        generated_cifar(60).rename(folder / "cifar-100-python")
    return folder


@pytest.fixture(autouse=True)
def _store(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_DATA", str(home))


def build(shape: Shape, **settings: Any) -> Data:
    return build_data(make_workload("cnn", settings), shape)


def batches(data: Data, **loading: Any) -> list[Any]:
    return list(DataLoader(data.dataset, batch_size=4, **loading))


@pytest.mark.parametrize(
    ("name", "shape", "sizes"),
    [
        ("random", IMAGE, (3, 48, 48)),
        ("random", CLIP, (3, 4, 56, 56)),
        ("random", TEXT, (12,)),
        ("text", TEXT, (12,)),
        ("", TEXT, (12,)),
        ("jpeg", IMAGE, (3, 48, 48)),
        ("cifar100", SMALL, (3, 32, 32)),
        ("cifar100", IMAGE, (3, 48, 48)),
        ("video", CLIP, (3, 4, 56, 56)),
    ],
)
def test_batches_through_workers(name: str, shape: Shape, sizes: tuple[int, ...]) -> None:
    if name == "video":
        pytest.importorskip("av")
    data = build(shape, data=name, samples=8)
    got = batches(data, num_workers=2)
    assert [tuple(inputs.shape) for inputs, _ in got] == [(4, *sizes)] * 2
    expected = torch.int64 if shape.kind == "tokens" else torch.float32
    for inputs, labels in got:
        assert inputs.dtype == expected
        assert labels.dtype == torch.int64
        assert labels.min() >= 0 and labels.max() < shape.classes
        assert inputs.max() > inputs.min()
    assert (data.facts["samples"], data.facts["available_samples"]) == (8, 8)
    again = pickle.loads(ForkingPickler.dumps(data.dataset))
    assert len(again) == 8
    assert tuple(again[0][0].shape) == sizes


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        (SMALL, 60_000),
        (Shape("image", 1000, size=224), 1783),
        (Shape("clip", 400, size=112, frames=16), 445),
        (TEXT, 60_000),
    ],
    ids=["DT1", "224", "clips", "tokens"],
)
def test_the_default_count_depends_on_the_sample_size(shape: Shape, count: int) -> None:
    facts = build(shape, fraction=0.001).facts
    assert facts["available_samples"] == count
    assert facts["samples"] == round(count / 1000) or facts["samples"] == 1
    assert facts["source"] == "memory"
    assert ("note" in facts) == (count != 60_000)


def test_random_data_depends_on_the_seed_only() -> None:
    first, same, other = (build(SMALL, samples=20, seed=seed).dataset for seed in (1, 1, 2))
    assert torch.equal(first.tensors[0], same.tensors[0])
    assert not torch.equal(first.tensors[0], other.tensors[0])
    assert first.tensors[0].is_contiguous() and first.tensors[0].shape == (20, 3, 32, 32)
    assert first.tensors[0].min() >= 0 and first.tensors[0].max() < 1
    facts = build(SMALL, samples=20).facts
    assert facts["bytes"] == 20 * (3 * 32 * 32 * 4 + 8)


def test_random_data_has_at_least_one_step() -> None:
    huge = Shape("image", 10, size=6000)
    assert build(huge, batch_size=3, accumulate=2, fraction=0.2).facts["available_samples"] == 6


def test_data_that_does_not_fit_in_memory_is_an_error() -> None:
    with pytest.raises(WorkloadError, match=r"needs 1144\.4 GiB, but the machine has") as caught:
        build(SMALL, samples=100_000_000)
    assert "--samples" in caught.value.hint
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with pytest.raises(WorkloadError, match="in each of 64 ranks"):
        build(SMALL, samples=total // (12288 * 60), ranks=64)


def test_jpeg_facts() -> None:
    data = build(IMAGE, data="jpeg", samples=12)
    assert data.facts["source"] == "generated"
    assert "/" not in data.facts["path"]
    assert data.facts["bytes"] > 12 * 50_000
    assert data.facts["note"] == "the labels of the 10 classes are taken modulo 7"
    assert data.files == ()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the user."""
    from PIL import Image

    root = tmp_path_factory.mktemp("photos")
    for label in ("cat", "dog"):
        (root / label).mkdir()
        for number in range(5):
            Image.new("RGB", (64, 50), (number * 40, 99, 0)).save(root / label / f"{number}.png")
    return root


def test_a_part_of_a_users_folder(photos: Path) -> None:
    whole = build(IMAGE, data="jpeg", data_path=str(photos))
    assert (whole.facts["samples"], whole.facts["source"]) == (10, "folder")
    assert whole.facts["path"] == photos.name
    some = build(IMAGE, data="jpeg", data_path=str(photos), samples=8, fraction=0.5)
    assert (some.facts["samples"], some.facts["available_samples"], len(some.dataset)) == (4, 8, 4)
    same = build(IMAGE, data="jpeg", data_path=str(photos), samples=8, fraction=0.5)
    assert some.dataset.indices == same.dataset.indices
    with pytest.raises(
        WorkloadError, match=rf"`--samples 11` is more than {photos.name} has \(10\)"
    ):
        build(IMAGE, data="jpeg", data_path=str(photos), samples=11)


@given(st.integers(1, 300), st.floats(0.001, 1), st.floats(0.001, 1), st.integers(0, 2**40))
def test_a_smaller_part_is_a_subset_of_a_larger_one(
    count: int, one: float, other: float, seed: int
) -> None:
    few, many = (
        choose_part(count, count, Workload("cnn", fraction=fraction, seed=seed))
        for fraction in sorted((one, other))
    )
    assert 1 <= len(few) == len(set(few)) <= len(many) <= count
    assert set(few) <= set(many) <= set(range(count))


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (None, "nothing", "No such folder: "),
        ({}, "", "contains no folders"),
        ({"cat/a.txt": b"x"}, "", "Cannot read images from .*: Found no valid file"),
        ({"cat/a.jpg": b"x"}, "", r"Cannot decode .*a\.jpg as an image"),
        ({"a.jpg": b"x"}, "", "contains no folders"),
        ({"a.jpg": b"x"}, "a.jpg", "is a file"),
    ],
)
def test_invalid_image_folders(
    tmp_path: Path, content: dict[str, bytes] | None, name: str, message: str
) -> None:
    for path, text in (content or {}).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(text)
    with pytest.raises(WorkloadError, match=message) as caught:
        build(IMAGE, data="jpeg", data_path=str(tmp_path / name))
    assert caught.value.hint


def test_a_truncated_image_is_named_in_the_error_of_a_worker(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "cat").mkdir()
    whole = io.BytesIO()
    Image.effect_noise((64, 64), 50).convert("RGB").save(whole, "JPEG")
    (tmp_path / "cat/0.jpg").write_bytes(whole.getvalue())
    (tmp_path / "cat/1.jpg").write_bytes(whole.getvalue()[:600])
    data = build(IMAGE, data="jpeg", data_path=str(tmp_path))
    loading: Any = iter(DataLoader(data.dataset, batch_size=2, num_workers=1))
    with pytest.raises(WorkloadError, match=r"Cannot decode .*cat/1\.jpg as an image"):
        next(loading)
    loading._shutdown_workers()  # the garbage collector would take 5 s


def test_invalid_video_folders(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    with pytest.raises(WorkloadError, match="No videos found in the class folders"):
        build(CLIP, data="video", data_path=str(tmp_path))
    (tmp_path / "cat" / "x.AVI").write_bytes(b"nothing")
    pytest.importorskip("av")
    with pytest.raises(WorkloadError, match=r"Cannot decode .*x\.AVI as a video"):
        build(CLIP, data="video", data_path=str(tmp_path))


@pytest.mark.parametrize(
    ("shape", "name", "valid"),
    [
        (TEXT, "jpeg", "text, random"),
        (CLIP, "cifar100", "random, video"),
        (IMAGE, "video", "random, jpeg, cifar100"),
        (IMAGE, "text", "random, jpeg, cifar100"),
    ],
)
def test_data_that_does_not_match_the_model(shape: Shape, name: str, valid: str) -> None:
    with pytest.raises(WorkloadError, match=f"which {name} data does not contain") as caught:
        build(shape, data=name)
    assert caught.value.hint == f"Valid values for --data: {valid}"


def test_a_folder_for_data_in_memory_is_an_error(photos: Path) -> None:
    with pytest.raises(WorkloadError, match="`--data-path` has no effect on random data") as caught:
        build(IMAGE, data_path=str(photos))
    assert caught.value.hint == "Use --data jpeg or --data cifar100"
    with pytest.raises(WorkloadError, match="`--data-path` has no effect on text data"):
        build(TEXT, data_path=str(photos))


def test_building_uses_no_random_numbers(photos: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    build(IMAGE, data="jpeg", data_path=str(photos))
    build(SMALL, samples=3)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("requested", ["cold", "warm"])
def test_the_page_cache_is_prepared(requested: str) -> None:
    workload = make_workload("cnn", {"data": "jpeg", "samples": 12, "page_cache": requested})
    data = build_data(workload, IMAGE)
    assert len(data.files) == 12 and all(path.is_file() for path in data.files)
    share = {"cold": 0.0, "warm": 1.0}[requested]
    facts = prepare_cache(workload, data)
    if facts["state"] != requested and "memory" in facts["note"]:
        pytest.skip("the temporary folder is in memory")
    assert facts == {"state": requested, "resident_share": share}


def test_files_that_cannot_be_evicted_are_reported_as_warm() -> None:
    path = Path(f"/dev/shm/stepscope-test-cold-{os.getpid()}")
    if not os.access(path.parent, os.W_OK):
        pytest.skip("/dev/shm cannot be written")
    workload = make_workload("cnn", {"page_cache": "cold"})
    path.write_bytes(bytes(10_000))
    try:
        facts = prepare_cache(workload, Data(torch.utils.data.Dataset(), files=(path,)))
    finally:
        path.unlink()
    assert (facts["state"], facts["resident_share"]) == ("warm", 1.0)
    assert "100% of the file contents is still in memory" in facts["note"]


def test_page_cache_without_files() -> None:
    cold = make_workload("cnn", {"samples": 4, "page_cache": "cold"})
    assert prepare_cache(cold, build_data(cold, SMALL))["state"] == "none"
    as_is = make_workload("cnn", {"data": "jpeg", "samples": 12})
    assert prepare_cache(as_is, build_data(as_is, IMAGE)) == {"state": "as-is"}
    gone = Data(torch.utils.data.Dataset(), files=(Path("/nothing/here.jpg"),))
    with pytest.raises(WorkloadError, match=r"Cannot read .*here\.jpg: No such file"):
        prepare_cache(cold, gone)


def test_image_folder_reads_generated_jpegs(home: Path) -> None:
    from torchvision.datasets import ImageFolder

    folder = ImageFolder(str(generated_jpegs(12)))
    assert len(folder) == 12 and len(folder.classes) == 10
    assert folder[0][0].mode == "RGB"
