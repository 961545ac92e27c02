"""A user's file is found, checked and helped with, without being run."""

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

from stepscope.errors import BadWorkload
from stepscope.workloads.code_place import is_place
from stepscope.workloads.own import OwnPlace, find_own, hint_for, skeleton, where_in
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
    """A file of the user, in the folder they are in."""
    monkeypatch.chdir(tmp_path)

    def write(source: str, name: str = "mine.py") -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(dedent(source))
        return name

    return write


def line_of(source: str) -> int | None:
    return training_line(ast.parse(source))


def refusal(model: str) -> str:
    with pytest.raises(BadWorkload) as refused:
        find_own(model)
    return str(refused.value)


def code_in(refused: str) -> str:
    """The source that an error offers, which must at least be Python."""
    code = refused.partition("\n\n")[2]
    ast.parse(code)
    return code


def test_a_file_is_found(file: Callable[[str], str], tmp_path: Path) -> None:
    name = file(FINE)
    place = OwnPlace((tmp_path / name).resolve(), "workload")
    assert find_own(f"{name}:workload") == place
    assert find_own(f"./{name}:workload") == place
    assert find_own(f"{tmp_path / name}:workload") == place
    assert place.shown == name


def test_a_module_is_found_and_nothing_above_it_runs(
    file: Callable[..., str], tmp_path: Path
) -> None:
    file("raise SystemExit('it ran')", "pack/__init__.py")
    file(FINE, "pack/inner/train.py")
    found = find_own("pack.inner.train:workload")
    assert found == OwnPlace(
        (tmp_path / "pack/inner/train.py").resolve(), "workload", "pack.inner.train"
    )
    file(FINE, "mine.py")
    assert find_own("mine:helper").module_name == "mine"


def test_installed_modules_are_found_too() -> None:
    assert find_own("json.decoder:JSONDecoder").file.name == "decoder.py"


@pytest.mark.parametrize("name", ["nowhere", "json.nowhere", "json.decoder.nowhere", "sys"])
def test_a_module_that_is_not_there(name: str) -> None:
    assert f"There is no module '{name}'" in refusal(f"{name}:workload")


def test_a_file_that_is_not_there_lists_those_like_it(file: Callable[[str], str]) -> None:
    file(FINE)
    assert refusal("mien.py:workload") == "There is no file mien.py. Did you mean mine.py?"
    assert refusal("no/mine.py:workload").startswith("There is no folder no")
    assert "is no Python file" in refusal("./:workload")


def test_a_folder_without_python(tmp_path: Path) -> None:
    assert "There is no Python in" in refusal(f"{tmp_path}/train.py:workload")


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
    assert find_own(f"{file(source)}:workload").function == "workload"


def test_a_function_that_is_not_there(file: Callable[[str], str]) -> None:
    name = file(FINE)
    assert refusal(f"{name}:worklaod") == (
        "There is no function 'worklaod' in mine.py. Did you mean workload?"
    )
    assert "def bert_tiny():" in code_in(refusal(f"{name}:bert_tiny"))


def test_a_function_only_a_script_has_is_not_there(file: Callable[[str], str]) -> None:
    name = file("if __name__ == '__main__':\n    def workload(): ...")
    assert "There is no function 'workload'" in refusal(f"{name}:workload")


def test_a_file_alone_is_told_what_it_lacks(file: Callable[[str], str]) -> None:
    assert refusal(file(FINE)) == "mine.py is a file, not a function. Give mine.py:workload"
    assert "def workload():" in code_in(refusal(file("import torch")))


def test_a_file_that_is_no_python(file: Callable[[str], str], tmp_path: Path) -> None:
    assert refusal(f"{file('def f(:')}:workload") == "mine.py:1: SyntaxError: invalid syntax"
    (tmp_path / "mine.py").write_bytes(b"x = '\0'")
    assert refusal("mine.py:workload").startswith("mine.py")
    (tmp_path / "mine.py").write_bytes(b"x = '\xff'")
    assert refusal("mine.py:workload").startswith("mine.py")


def test_other_encodings_are_read(file: Callable[[str], str], tmp_path: Path) -> None:
    name = file("")
    source = "# coding: latin-1\ndef workload(): return 'é'\n"
    (tmp_path / name).write_bytes(source.encode("latin-1"))
    assert find_own(f"{name}:workload").function == "workload"


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
def test_places_are_told_from_names(model: str, is_one: bool) -> None:
    assert is_place(model) is Workload(model).is_own is is_one


@pytest.mark.parametrize("training", TRAININGS)
def test_training_is_seen_wherever_an_import_comes_to(training: str) -> None:
    body = indent(training, "    ")
    assert line_of(training)
    assert line_of(f"with torch.device('cpu'):\n{body}")
    assert line_of(f"try:\n{body}except OSError:\n    pass\n")
    assert line_of(f"if debug:\n    pass\nelse:\n{body}")
    assert line_of(f"if __name__ == '__main__':\n    pass\nelse:\n{body}")
    assert line_of(f"def main():\n{body}\nmain()\n")
    assert line_of(f"def train():\n{body}\ndef main():\n    train()\n\nmain()\n")


@pytest.mark.parametrize("training", TRAININGS)
def test_training_is_not_seen_where_no_import_comes(training: str) -> None:
    body = indent(training, "    ")
    assert line_of(f"def main():\n{body}") is None
    assert line_of(f"class Mine:\n    def train(self):\n{indent(body, '    ')}") is None
    assert line_of(f"if __name__ == '__main__':\n{body}") is None
    assert line_of(f"if '__main__' == __name__ and not x:\n{body}") is None
    assert line_of(f"def main():\n{body}\nif __name__ == '__main__':\n    main()\n") is None


@pytest.mark.parametrize("harmless", HARMLESS)
def test_what_trains_nothing_is_left_alone(harmless: str) -> None:
    assert line_of(harmless) is None


def test_a_step_in_a_function_counts_once_it_is_called_in_a_loop() -> None:
    one_step = "def one_step():\n    loss.backward()\n\n"
    assert line_of(f"{one_step}one_step()\n") is None
    assert line_of(f"{one_step}for _ in range(3):\n    one_step()\n") == 5


def test_functions_that_call_each_other_are_followed_once() -> None:
    assert line_of("def a():\n    b()\n\ndef b():\n    a()\n\na()\n") is None


def test_a_trainer_of_any_name_is_known() -> None:
    assert line_of("boss = lightning.Trainer()\nboss.fit(module)\n") == 2


@given(
    before=st.lists(st.sampled_from(HARMLESS), max_size=4),
    training=st.sampled_from(TRAININGS),
    after=st.lists(st.sampled_from(HARMLESS), max_size=4),
)
def test_the_line_is_that_of_the_training(
    before: list[str], training: str, after: list[str]
) -> None:
    start = "".join(before).count("\n") + 1
    found = line_of("".join([*before, training, *after]))
    assert found is not None and start <= found < start + training.count("\n")


def test_a_file_that_trains_is_helped(file: Callable[[str], str]) -> None:
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
    refused = refusal(f"{name}:workload")
    code = code_in(refused)
    assert "would start to train as soon as it is imported, at line 19" in refused
    assert '"model": Net(width=..., norm=...),' in code
    assert '"data": Faces(folder=...),' in code
    assert code.rstrip().endswith("# move line 19 and what follows here")


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
OFFERED = """\
def workload():
    return {
        "model": net,
        "loss": criterion,
        "data": train_set,
        "collate": pad,
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.001),
    }


if __name__ == "__main__":
    ...  # move line 15 and what follows here
"""


def test_what_the_training_uses_is_offered(file: Callable[[str], str]) -> None:
    assert code_in(refusal(f"{file(SCRIPT)}:workload")) == OFFERED


def test_a_file_that_trains_and_has_its_function_is_only_told_where(
    file: Callable[[str], str],
) -> None:
    code = code_in(refusal(f"{file(FINE + LOOP)}:workload"))
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
def test_names_in_the_skeleton(
    file: Callable[[str], str], source: str, model: str, data: str
) -> None:
    code = skeleton(Path(file(source)))
    assert f'"model": {model},' in code
    assert f'"data": {data},' in code


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning", "transformers"])
def test_some_models_bring_their_loss(file: Callable[[str], str], package: str) -> None:
    assert '"loss"' in skeleton(Path(file("import torch")))
    assert '"loss"' not in skeleton(Path(file(f"import {package}.something")))
    assert '"loss"' not in skeleton(Path(file(f"from {package} import something")))


@given(st.lists(st.sampled_from([*TRAININGS, *HARMLESS, FINE]), max_size=6).map("".join))
def test_a_skeleton_is_python(source: str) -> None:
    tree = ast.parse(source)
    offered = ast.parse(skeleton_of(tree, "workload"))
    (function,) = [node for node in offered.body if isinstance(node, ast.FunctionDef)]
    assert function.name == "workload"
    assert training_line(offered) is None


@pytest.mark.parametrize(
    "name", ["own_plain_loop", "own_huggingface", "own_lightning", "own_variable_length"]
)
def test_examples_are_found(name: str) -> None:
    example = EXAMPLES / name / "train.py"
    assert find_own(f"{example}:workload").file == example.resolve()


def test_no_framework_is_imported() -> None:
    program = (
        "import sys; from stepscope.workloads.own import find_own; "
        f"find_own({str(EXAMPLES / 'own_plain_loop/train.py')!r} + ':workload'); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def broken(file: Path) -> BaseException:
    """What is raised two calls into a file, by something that is not in it."""
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    with pytest.raises(ValueError) as raised:
        names["workload"]()
    return raised.value


def test_an_error_is_told_with_the_innermost_line_of_the_file(
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
    error = broken(source)
    assert where_in(error, source) == "mine.py:3 in step"
    assert where_in(error, tmp_path / "other.py") is None
    try:
        raise RuntimeError("of ours") from error
    except RuntimeError as ours:
        assert where_in(ours, source) == "mine.py:3 in step"


def test_an_error_of_a_worker_is_told_from_its_text(tmp_path: Path) -> None:
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
    ("said", "hint"),
    [
        ("stack expects each tensor to be equal size, but got [3] at entry 0", "pads them"),
        ("not enough values to unpack (expected 3, got 2)", "parts that a sample has"),
        ("expected scalar type Long but found Float", "number types"),
        ("Expected all tensors to be on the same device, but found", "moved to the device"),
        ("Target 10 is out of bounds.", "no class of the model"),
        ("something that nobody knows", ""),
    ],
)
def test_well_known_mistakes_have_a_hint(said: str, hint: str) -> None:
    found = hint_for(RuntimeError(f"Caught it in a worker\nRuntimeError: {said}\n"))
    assert hint in found and bool(hint) == bool(found)
