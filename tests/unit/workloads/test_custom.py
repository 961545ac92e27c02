"""References to user code: the file is found and checked without running it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import WorkloadError
from stepscope.workloads.code_reference import is_reference
from stepscope.workloads.custom import CustomWorkload, find_custom, hint_for, skeleton, where_in
from stepscope.workloads.spec import Workload
from stepscope.workloads.user_file import skeleton_of, training_line

EXAMPLES = Path(__file__).parents[3] / "examples"

FINE = """
import torch

def workload(batch_size=32):
    return {}

def helper():
    pass
"""
LOOP = "for batch in loader:\n    loss = model(batch)\n    loss.backward()\n    optimizer.step()\n"
TRAININGS = (
    LOOP,
    "while True:\n    opt.step()\n",
    "[loss_of(batch).backward() for batch in loader]\n",
    "Trainer(max_epochs=3).fit(model, loader)\n",
    "pl.Trainer().fit(model)\n",
    "trainer.train()\n",
    "self.trainer.fit(model)\n",
    "model.fit(x, y, epochs=3)\n",
    "learner.fit_one_cycle(3)\n",
)
HARMLESS = (
    "model.train()\n",
    "loss.backward()\n",
    "scheduler.step()\n",
    "for _ in range(3):\n    environment.step()\n",
    "scaler.fit(x)\n",
    "for name in names:\n    register(name)\n",
    "def train():\n    loss.backward()\n",
)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a user's file into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(source: str, name: str = "mine.py") -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(dedent(source))
        return name

    return write


def line_of(source: str) -> int | None:
    return training_line(ast.parse(source))


def error_of(model: str) -> str:
    with pytest.raises(WorkloadError) as error:
        find_custom(model)
    return str(error.value)


def code_in(message: str) -> str:
    """The source in an error message, which must be valid Python."""
    code = message.partition("\n\n")[2]
    ast.parse(code)
    return code


def test_a_file_is_found(file: Callable[[str], str], tmp_path: Path) -> None:
    name = file(FINE)
    custom = CustomWorkload((tmp_path / name).resolve(), "workload")
    assert find_custom(f"{name}:workload") == custom
    assert find_custom(f"./{name}:workload") == custom
    assert find_custom(f"{tmp_path / name}:workload") == custom
    assert custom.shown == name
    assert custom.location == f"{name}:4 in workload"


def test_a_module_is_found_without_running_its_parent_packages(
    file: Callable[..., str], tmp_path: Path
) -> None:
    file("raise SystemExit('it ran')", "pack/__init__.py")
    file(FINE, "pack/inner/train.py")
    found = find_custom("pack.inner.train:workload")
    assert found == CustomWorkload(
        (tmp_path / "pack/inner/train.py").resolve(), "workload", "pack.inner.train"
    )
    file(FINE, "mine.py")
    assert find_custom("mine:helper").module_name == "mine"


def test_installed_modules_are_found() -> None:
    assert find_custom("json.decoder:JSONDecoder").file.name == "decoder.py"


@pytest.mark.parametrize("name", ["nowhere", "json.nowhere", "json.decoder.nowhere", "sys"])
def test_missing_modules(name: str) -> None:
    assert f"No Python source found for module '{name}'" in error_of(f"{name}:workload")


def test_missing_files(file: Callable[[str], str]) -> None:
    file(FINE)
    assert error_of("mien.py:workload") == "No such file: mien.py. Did you mean 'mine.py'?"
    assert error_of("no/mine.py:workload").startswith("No such folder: no. The current folder is ")
    assert "is not a Python file" in error_of("./:workload")
    assert error_of("./mine.py.workload").endswith("in a file, write 'mine.py:workload'")


def test_a_folder_without_python(tmp_path: Path) -> None:
    assert "There are no Python files in" in error_of(f"{tmp_path}/train.py:workload")


@pytest.mark.parametrize(
    "source",
    [
        "from functools import partial\nworkload = partial(dict, model=1)",
        "from elsewhere import something as workload",
        "from elsewhere import *",
        "try:\n    import torch\nexcept ImportError:\n    pass\nelse:\n    def workload(): ...",
        "if True:\n    class workload: ...",
        "workload: object = make()",
    ],
)
def test_a_function_may_come_from_anywhere(file: Callable[[str], str], source: str) -> None:
    assert find_custom(f"{file(source)}:workload").function == "workload"


def test_missing_functions(file: Callable[[str], str]) -> None:
    name = file(FINE)
    assert error_of(f"{name}:worklaod") == (
        "No function 'worklaod' in mine.py. Did you mean 'workload'?"
    )
    assert "def bert_tiny():" in code_in(error_of(f"{name}:bert_tiny"))


def test_functions_under_the_main_guard_are_not_found(file: Callable[[str], str]) -> None:
    name = file("if __name__ == '__main__':\n    def workload(): ...")
    assert "No function 'workload' in" in error_of(f"{name}:workload")


def test_a_file_without_a_function_name(file: Callable[[str], str]) -> None:
    assert error_of(file(FINE)) == "mine.py is a file, not a function. Use mine.py:workload"
    assert "def workload():" in code_in(error_of(file("import torch")))


def test_files_that_are_not_python(file: Callable[[str], str], tmp_path: Path) -> None:
    assert error_of(f"{file('def f(:')}:workload") == "mine.py:1: SyntaxError: invalid syntax"
    (tmp_path / "mine.py").write_bytes(b"x = '\0'")
    assert error_of("mine.py:workload").startswith("mine.py")
    (tmp_path / "mine.py").write_bytes(b"x = '\xff'")
    assert error_of("mine.py:workload").startswith("mine.py")


def test_other_encodings_are_read(file: Callable[[str], str], tmp_path: Path) -> None:
    name = file("")
    source = "# coding: latin-1\ndef workload(): return 'é'\n"
    (tmp_path / name).write_bytes(source.encode("latin-1"))
    assert find_custom(f"{name}:workload").function == "workload"


@pytest.mark.parametrize(
    ("model", "is_one"),
    [
        ("train.py", True),
        ("train.py:workload", True),
        ("package.module:workload", True),
        ("sub/train", True),
        ("resnet50", False),
        ("vit_b_16", False),
    ],
)
def test_references_and_names(model: str, is_one: bool) -> None:
    assert is_reference(model) is Workload(model).is_custom is is_one


@pytest.mark.parametrize("training", TRAININGS)
def test_training_at_import_is_detected(training: str) -> None:
    body = indent(training, "    ")
    assert line_of(training)
    assert line_of(f"with torch.device('cpu'):\n{body}")
    assert line_of(f"try:\n{body}except OSError:\n    pass\n")
    assert line_of(f"if debug:\n    pass\nelse:\n{body}")
    assert line_of(f"if __name__ == '__main__':\n    pass\nelse:\n{body}")
    assert line_of(f"def main():\n{body}\nmain()\n")
    assert line_of(f"def train():\n{body}\ndef main():\n    train()\n\nmain()\n")


@pytest.mark.parametrize("training", TRAININGS)
def test_training_that_does_not_run_at_import_is_ignored(training: str) -> None:
    body = indent(training, "    ")
    assert line_of(f"def main():\n{body}") is None
    assert line_of(f"class Mine:\n    def train(self):\n{indent(body, '    ')}") is None
    assert line_of(f"if __name__ == '__main__':\n{body}") is None
    assert line_of(f"if '__main__' == __name__ and not x:\n{body}") is None
    assert line_of(f"def main():\n{body}\nif __name__ == '__main__':\n    main()\n") is None


@pytest.mark.parametrize("harmless", HARMLESS)
def test_other_calls_do_not_count_as_training(harmless: str) -> None:
    assert line_of(harmless) is None


def test_a_step_in_a_function_counts_if_it_is_called_in_a_loop() -> None:
    one_step = "def one_step():\n    loss.backward()\n\n"
    assert line_of(f"{one_step}one_step()\n") is None
    assert line_of(f"{one_step}for _ in range(3):\n    one_step()\n") == 5


def test_recursive_functions() -> None:
    assert line_of("def a():\n    b()\n\ndef b():\n    a()\n\na()\n") is None


def test_a_trainer_may_have_any_name() -> None:
    assert line_of("boss = lightning.Trainer()\nboss.fit(module)\n") == 2


@given(
    before=st.lists(st.sampled_from(HARMLESS), max_size=4),
    training=st.sampled_from(TRAININGS),
    after=st.lists(st.sampled_from(HARMLESS), max_size=4),
)
def test_the_line_is_in_the_training(before: list[str], training: str, after: list[str]) -> None:
    start = "".join(before).count("\n") + 1
    found = line_of("".join([*before, training, *after]))
    assert found is not None and start <= found < start + training.count("\n")


def test_a_file_that_trains_gets_a_skeleton(file: Callable[[str], str]) -> None:
    name = file(
        """
        import torch
        from torch import nn
        from torch.utils.data import Dataset

        class Block(nn.Module):
            pass

        class Net(nn.Module):
            def __init__(self, width, depth=3, *, norm, act=None): ...

        class Faces(Dataset):
            def __init__(self, folder): ...

        def main():
            for batch in Faces("."):
                batch.backward()

        main()
        """
    )
    error = error_of(f"{name}:workload")
    code = code_in(error)
    assert error.startswith(
        "Importing mine.py would start training (line 19). Change it as follows:"
    )
    assert '"model": Net(width=..., norm=...),' in code
    assert '"data": Faces(folder=...),' in code
    assert code.rstrip().endswith("# move line 19 and the lines after it here")


SCRIPT = """\
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

def pad(samples): ...
val_set = TensorDataset(torch.zeros(4, 20), torch.zeros(4))
train_set = TensorDataset(torch.zeros(8, 20), torch.zeros(8))
val_loader = DataLoader(val_set, batch_size=64)
loader = DataLoader(train_set, batch_size=64, collate_fn=pad)
teacher_model = nn.Linear(20, 2)
net = nn.Sequential(nn.Linear(20, 2))
criterion = nn.CrossEntropyLoss()
opt = torch.optim.Adam(net.parameters(), lr=0.001)

for epoch in range(3):
    for x, y in loader:
        loss = criterion(net(x), y)
        loss.backward()
        opt.step()
print(loss)

def after(): ...

torch.save(net, "net.pt")
"""
SKELETON = """\
def workload():
    return {
        "model": net,
        "loss": criterion,
        "data": train_set,
        "collate": pad,
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.001),
    }


if __name__ == "__main__":
    ...  # move line 15 and the lines after it here
"""


def test_the_skeleton_contains_what_the_training_uses(file: Callable[[str], str]) -> None:
    assert code_in(error_of(f"{file(SCRIPT)}:workload")) == SKELETON


def test_a_file_that_trains_and_has_the_function_gets_only_a_main_guard(
    file: Callable[[str], str],
) -> None:
    code = code_in(error_of(f"{file(FINE + LOOP)}:workload"))
    assert "def workload" not in code and 'if __name__ == "__main__":' in code


@pytest.mark.parametrize(
    ("source", "model", "data"),
    [
        ("model = Net()\nval_data = make()\ndataset = CIFAR10('.')", "model", "dataset"),
        ("class A(pl.LightningModule): ...\nclass B(pl.LightningDataModule): ...", "A()", "..."),
        ("class A(nn.Module): ...\nclass B(A): ...\nclass C(IterableDataset): ...", "B()", "C()"),
        ("class A(nn.Module): ...\nnet = A()\ny = DataLoader(x, 4)", "net", "x"),
        (
            "class A(BertPreTrainedModel):\n    def __init__(self, config): ...",
            "A(config=...)",
            "...",
        ),
    ],
)
def test_names_in_a_skeleton(
    file: Callable[[str], str], source: str, model: str, data: str
) -> None:
    code = skeleton(Path(file(source)))
    assert f'"model": {model},' in code
    assert f'"data": {data},' in code


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning", "transformers"])
def test_some_models_have_a_loss(file: Callable[[str], str], package: str) -> None:
    assert '"loss"' in skeleton(Path(file("import torch")))
    assert '"loss"' not in skeleton(Path(file(f"import {package}.something")))
    assert '"loss"' not in skeleton(Path(file(f"from {package} import something")))


@given(st.lists(st.sampled_from([*TRAININGS, *HARMLESS, FINE]), max_size=6).map("".join))
def test_a_skeleton_is_valid_python(source: str) -> None:
    tree = ast.parse(source)
    parsed = ast.parse(skeleton_of(tree, "workload"))
    (function,) = [node for node in parsed.body if isinstance(node, ast.FunctionDef)]
    assert function.name == "workload"
    assert training_line(parsed) is None


@pytest.mark.parametrize(
    "name",
    [
        "workload_plain_loop",
        "workload_huggingface",
        "workload_lightning",
        "workload_variable_length",
    ],
)
def test_examples_are_found(name: str) -> None:
    example = EXAMPLES / name / "train.py"
    assert find_custom(f"{example}:workload").file == example.resolve()


def test_no_framework_is_imported() -> None:
    program = (
        "import sys; from stepscope.workloads.custom import find_custom; "
        f"find_custom({str(EXAMPLES / 'workload_plain_loop/train.py')!r} + ':workload'); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def error_in(file: Path) -> BaseException:
    """The error of a library call two calls deep in a file."""
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    with pytest.raises(ValueError) as raised:
        names["workload"]()
    return raised.value


def test_the_location_of_an_error_is_the_innermost_line_of_user_code(
    file: Callable[[str], str], tmp_path: Path
) -> None:
    source = tmp_path / file(
        """\
        import json
        def step():
            return json.loads("{")
        def workload():
            return step()
        """
    )
    error = error_in(source)
    assert where_in(error, source) == "mine.py:3 in step"
    assert where_in(error, tmp_path / "train.py") == "mine.py:3 in step", "another file of the user"
    assert where_in(error, Path("/elsewhere/train.py")) == "mine.py:3 in step", "the current folder"
    try:
        raise RuntimeError("raised by stepscope") from error
    except RuntimeError as wrapper:
        assert where_in(wrapper, source) == "mine.py:3 in step"


def test_installed_packages_are_not_user_code(file: Callable[..., str], tmp_path: Path) -> None:
    library = "def work():\n    raise ValueError\n"
    package = Path(file(library, "venv/lib/site-packages/package.py")).resolve()
    names: dict[str, Any] = {}
    exec(compile(library, str(package), "exec"), names)
    with pytest.raises(ValueError) as raised:
        names["work"]()
    where = where_in(raised.value, tmp_path / "train.py")
    assert where is None


def test_the_location_of_an_error_in_a_loader_worker(tmp_path: Path) -> None:
    text = f"""Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/lib/fetch.py", line 54, in fetch
    data = [self.dataset[index] for index in indices]
  File "{tmp_path}/mine.py", line 28, in __getitem__
    return self.read(index)
  File "/lib/tensor.py", line 3, in stack
ValueError: no
"""
    where = where_in(ValueError(text), tmp_path / "mine.py")
    assert where == f"{tmp_path}/mine.py:28 in __getitem__"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("stack expects each tensor to be equal size, but got [3] at entry 0", "pads them"),
        ("not enough values to unpack (expected 3, got 2)", "same parts as a sample"),
        ("expected scalar type Long but found Float", "data types of the samples"),
        (
            "Expected all tensors to be on the same device, but found",
            "moves the model and the batches to the device",
        ),
        ("Target 10 is out of bounds.", "A label is out of range"),
        ("an unknown error", ""),
    ],
)
def test_hints_for_frequent_mistakes(text: str, hint: str) -> None:
    result = hint_for(RuntimeError(f"Caught it in a worker\nRuntimeError: {text}\n"))
    assert hint in result and bool(hint) == bool(result)
