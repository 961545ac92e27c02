"""Generated images and clips: reproducible, and similar to the real datasets."""

from __future__ import annotations

import hashlib
import pickle
import statistics
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from stepscope.errors import WorkloadError
from stepscope.workloads.datasets import cifar, video
from stepscope.workloads.datasets.jpeg import draw, generated_jpegs
from stepscope.workloads.datasets.locate import class_folders, labeled_files, locate
from stepscope.workloads.datasets.store import data_home
from stepscope.workloads.spec import make_workload


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_DATA", str(tmp_path / "data"))


def digests(folder: Path, suffix: str) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob(f"*{suffix}"))
    }


def test_pixels_are_the_same_on_every_machine() -> None:
    hashed = hashlib.sha256()
    for number in range(3):
        for plane in draw(0, number, number):
            hashed.update(repr(plane.shape).encode() + plane.tobytes())
    assert hashed.hexdigest()[:16] == "7fc6a046f14b0664"


def test_jpegs_are_the_same_from_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "from stepscope.workloads.datasets.jpeg import generated_jpegs; print(generated_jpegs(5))"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    there = Path(made.stdout.strip())
    monkeypatch.setenv("STEPSCOPE_DATA", str(tmp_path / "elsewhere"))
    here = generated_jpegs(5)
    assert here != there
    assert digests(here, ".jpg") == digests(there, ".jpg")
    assert len(set(digests(here, ".jpg").values())) == 5


def test_jpegs_are_similar_to_imagenet() -> None:
    folder = generated_jpegs(60)
    paths = sorted(folder.rglob("*.jpg"))
    sizes = [Image.open(path).size for path in paths]
    assert len(paths) == 60
    assert {path.parent.name for path in paths} == {f"class{label:04d}" for label in range(10)}
    assert 90_000 < statistics.mean(path.stat().st_size for path in paths) < 130_000
    assert 440 < statistics.mean(max(size) for size in sizes) < 560
    assert 0.1 < statistics.mean(width < height for width, height in sizes) < 0.45
    assert len(set(sizes)) > 50


def test_data_sets_of_different_sizes_share_files() -> None:
    small = generated_jpegs(20)
    large = generated_jpegs(30)
    smaller = generated_jpegs(12)
    first = "class0000/0000000.jpg"
    assert len({(folder / first).stat().st_ino for folder in (small, large, smaller)}) == 1
    assert digests(small, ".jpg").items() <= digests(large, ".jpg").items()
    assert len(digests(smaller, ".jpg")) == 12


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.integers(0, 10**6))
def test_any_image_has_structure_and_grain(number: int, label: int) -> None:
    light, blue, red = draw(0, number, label)
    assert light.shape == blue.shape == red.shape
    assert 380 <= max(light.shape) <= 620
    assert light.std() > 10
    assert np.diff(light.astype(int)).std() > 1
    assert all(plane.dtype == np.uint8 for plane in (light, blue, red))


def test_generated_cifar_is_read_by_torchvision() -> None:
    torchvision = pytest.importorskip("torchvision")
    folder = cifar.generated_cifar(200)

    class Unchecked(torchvision.datasets.CIFAR100):  # type: ignore[misc, name-defined]
        train_list = [["train", None]]  # noqa: RUF012
        test_list = []  # noqa: RUF012

        def _load_meta(self) -> None: ...

    expected = Unchecked(str(folder.parent))
    images = cifar.read_cifar(folder)
    assert np.array_equal(expected.data, images.pixels)
    assert expected.targets == images.labels.tolist()
    assert "not CIFAR-100" in (folder.parent / "README.txt").read_text()


def test_generated_cifar_is_the_same_each_time() -> None:
    images = cifar.read_cifar(cifar.generated_cifar(50))
    assert hashlib.sha256(images.pixels.tobytes()).hexdigest()[:16] == "23c9a11f5c55728e"
    with (cifar.generated_cifar(50) / "train").open("rb") as file:
        stored = pickle.load(file)
    assert {len(stored[key]) for key in ("filenames", "fine_labels", "coarse_labels")} == {50}
    assert stored["data"].shape == (50, 3072)


@pytest.mark.parametrize("where", ["given", "parent", "store"])
def test_real_cifar_is_found(tmp_path: Path, where: str) -> None:
    folder = data_home() if where == "store" else tmp_path / "mine"
    folder.mkdir(parents=True)
    cifar.generated_cifar(10).rename(folder / "cifar-100-python")
    given = {"given": f"{folder}/cifar-100-python", "parent": str(folder), "store": None}[where]
    location = locate(make_workload("cnn", {"data": "cifar100", "data_path": given}))
    assert location is not None
    assert (location.path, location.generated) == (folder / "cifar-100-python", False)


@pytest.mark.long
def test_generated_cifar_is_as_large_as_the_real_one() -> None:
    location = locate(make_workload("cnn", {"data": "cifar100"}))
    assert location is not None and location.generated
    assert len(cifar.read_cifar(location.path).labels) == 50_000


@given(st.binary(max_size=200))
def test_invalid_cifar_files(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("cifar")
    (folder / "train").write_bytes(content)
    with pytest.raises(WorkloadError, match="CIFAR-100"):
        cifar.read_cifar(folder)


@pytest.mark.parametrize(
    "content",
    [
        {"data": np.zeros((2, 3072), np.uint8), "fine_labels": [1]},
        {"data": np.zeros((0, 3072), np.uint8), "fine_labels": []},
        {"data": np.zeros((2, 100), np.uint8), "fine_labels": [1, 2]},
        {"data": np.zeros((1, 3072), np.uint8), "fine_labels": [-1]},
        {"fine_labels": [1]},
        [1, 2],
        subprocess.Popen,
    ],
    ids=["labels", "empty", "rows", "negative", "no data", "list", "code"],
)
def test_invalid_cifar_pickles(tmp_path: Path, content: object) -> None:
    (tmp_path / "train").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(WorkloadError):
        cifar.read_cifar(tmp_path)


def test_a_folder_without_cifar(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="No CIFAR-100 data found in") as caught:
        cifar.find_cifar(str(tmp_path))
    assert "cifar-100-python" in caught.value.hint


def decoded(path: Path) -> np.ndarray:
    av = pytest.importorskip("av")
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_clips_are_similar_to_ucf101(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    av = pytest.importorskip("av")
    folder = video.generated_clips(4, 2)
    files = labeled_files(folder, video.SUFFIXES)
    assert [label for _, label in files] == [0, 0, 1, 1]
    lengths = set()
    for path, _ in files:
        with av.open(path) as container:
            stream = container.streams.video[0]
            assert (stream.codec_context.name, stream.average_rate) == ("mpeg4", 25)
            lengths.add(stream.frames)
        frames = decoded(Path(path))
        assert frames.shape[1:] == (240, 320, 3)
        moved = np.abs(np.diff(frames.astype(int), axis=0)).mean()
        assert moved > 0.5, "the texture does not move"
    assert len(lengths) > 1 and all(75 <= length <= 175 for length in lengths)
    made = digests(folder, ".avi")
    monkeypatch.setenv("STEPSCOPE_DATA", str(tmp_path / "elsewhere"))
    assert digests(video.generated_clips(4, 2), ".avi") == made


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("av")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("STEPSCOPE_DATA", str(tmp_path_factory.mktemp("clip")))
        (path,) = video.generated_clips(1).rglob("*.avi")
    return path


@pytest.fixture(scope="module")
def all_frames(clip: Path) -> np.ndarray:
    return decoded(clip)


@settings(max_examples=25)
@given(begin=st.integers(0, 59), frames=st.integers(1, 16))
def test_a_window_equals_the_frames_of_the_whole_clip(
    clip: Path, all_frames: np.ndarray, begin: int, frames: int
) -> None:
    window = video.read_window(clip, frames, lambda count: begin)
    assert np.array_equal(window, all_frames[begin : begin + frames])


@pytest.mark.parametrize("suffix", [".mkv", ".mp4"])
def test_other_containers_and_frame_rates(tmp_path: Path, suffix: str) -> None:
    av = pytest.importorskip("av")
    from fractions import Fraction

    path = tmp_path / f"clip{suffix}"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(30000, 1001))
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(40):
            gray = np.full((48, 64, 3), number * 6, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(gray, format="rgb24")))
        container.mux(stream.encode())
    whole = decoded(path)
    for begin in (0, 1, 13, 32):
        assert np.array_equal(
            video.read_window(path, 8, lambda count, begin=begin: begin), whole[begin : begin + 8]
        )
    possible: list[int] = []
    video.read_window(path, 8, lambda count: possible.append(count) or 0)  # type: ignore[func-returns-value]
    assert 32 <= possible[0] <= 33


def test_a_short_clip_repeats_its_last_frame(clip: Path, all_frames: np.ndarray) -> None:
    window = video.read_window(clip, 400, lambda count: count - 1)
    assert len(window) == 400
    assert np.array_equal(window[: len(all_frames)], all_frames)
    assert np.array_equal(window[-1], all_frames[-1])


@pytest.mark.parametrize("content", [b"", b"not a video" * 100])
def test_a_file_that_is_not_a_video(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.avi"
    path.write_bytes(content)
    with pytest.raises(WorkloadError, match=r"Cannot decode .*broken.avi as a video"):
        video.read_window(path, 4, lambda count: 0)


def test_without_pyav() -> None:
    program = """
import sys
sys.modules["av"] = None
from stepscope.errors import WorkloadError
from stepscope.workloads.datasets.video import generated_clips
try: generated_clips(2)
except WorkloadError as error: print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "Video data needs PyAV. Install it with: pip install av"


@pytest.mark.parametrize("command", ["jpeg", "video", "locate"])
def test_no_framework_is_imported(command: str) -> None:
    program = (
        f"import sys, stepscope.workloads.datasets.{command};"
        "print([name for name in ('torch', 'av', 'PIL') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_class_folders(tmp_path: Path) -> None:
    for name in ("cat", "train"):
        (tmp_path / "classes" / name / "deep").mkdir(parents=True)
    (tmp_path / "split" / "train" / "cat").mkdir(parents=True)
    (tmp_path / "split" / "val" / "cat").mkdir(parents=True)
    assert class_folders(f"{tmp_path}/classes", "images") == tmp_path / "classes"
    assert class_folders(f"{tmp_path}/split", "images") == tmp_path / "split" / "train"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nothing", "No such folder: "),
        ("file", "is a file"),
        ("empty", "contains no folders"),
    ],
)
def test_invalid_class_folders(tmp_path: Path, given: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "1.jpg").write_text("")
    with pytest.raises(WorkloadError, match=message) as caught:
        class_folders(str(tmp_path / given), "images")
    assert "folder of images for each class" in caught.value.hint


@pytest.mark.parametrize(
    ("settings", "files"),
    [
        ({"data": "jpeg", "samples": 3}, 3),
        ({"data": "loader-only:jpeg", "samples": 4}, 4),
        ({"data": "video", "samples": 2}, 2),
        ({"data": "random"}, None),
        ({}, None),
    ],
)
def test_located_files(settings: dict[str, object], files: int | None) -> None:
    if settings.get("data") == "video":
        pytest.importorskip("av")
    location = locate(make_workload("cnn", settings))
    if files is None:
        assert location is None
    else:
        assert location is not None and location.generated
        assert len(labeled_files(location.path, (".jpg", ".avi"))) == files


@given(st.integers(1, 5000), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 5000)))
def test_the_default_number_of_files_is_enough_for_one_step(
    batch: int, ranks: int, samples: int | None
) -> None:
    settings = {"batch_size": batch, "ranks": ranks, "samples": samples, "data": "jpeg"}
    with patch("stepscope.workloads.datasets.jpeg.generated_jpegs", lambda count: Path(str(count))):
        location = locate(make_workload("cnn", settings))
    assert location and location.generated
    assert location.path == Path(str(samples or max(1024, batch * ranks)))
