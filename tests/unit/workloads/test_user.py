"""The function of a custom workload: import, call, checks of what it returns, and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from stepscope.errors import WorkloadError
from stepscope.workloads.custom import CustomWorkload, describe_error, error_location
from stepscope.workloads.frameworks.torch.custom import load_custom
from stepscope.workloads.frameworks.torch.models import Built
from stepscope.workloads.frameworks.torch.returned import LightningStep, built_from
from stepscope.workloads.spec import SETTINGS, make_workload

ROOT = Path(__file__).parents[3]
DATA = Path(__file__).parent / "data"
RETURNS = DATA / "custom_returns.py"
SHOWN = RETURNS.relative_to(ROOT) if Path.cwd() == ROOT else RETURNS
SHAPES = DATA / "custom_shapes.py"


@pytest.fixture(autouse=True)
def restore_process_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what importing a user's file changes in the process."""
    modules = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    yield
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "tests")):
            del sys.modules[name]


def load(function: str, file: Path = RETURNS, **settings: Any) -> Built:
    return load_custom(make_workload(f"{file}:{function}", {"batch_size": 16, **settings}))


def error_of(function: str, file: Path = RETURNS, **settings: Any) -> str:
    with pytest.raises(WorkloadError) as error:
        load(function, file, **settings)
    return str(error.value)


def train(built: Built, steps: int = 8, **loader: Any) -> list[float]:
    """A minimal training loop."""
    assert built.custom is not None
    batches = DataLoader(built.custom.data, 16, collate_fn=built.custom.collate, **loader)
    make = built.custom.optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    optimizer = make(list(built.model.parameters()))
    losses: list[float] = []
    while len(losses) < steps:
        for batch in batches:
            loss = built.loss(built.model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def line_with(text: str, file: Path = RETURNS) -> int:
    return next(n for n, line in enumerate(file.read_text().splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    "function",
    [
        "workload",
        "with_step",
        "with_step_of_dict",
        "as_tuple",
        "as_pair",
        "as_record",
        "as_named_tuple",
        "with_labels",
        "with_tensors",
        "with_list",
        "with_collate",
        "with_loader",
        "with_plain_loader",
        "with_stream",
        "with_sized_stream",
        "with_optimizer",
        "with_made_optimizer",
    ],
)
def test_valid_return_values(function: str) -> None:
    torch.manual_seed(0)
    losses = train(load(function))
    assert losses[-1] < losses[0]


def test_the_optimizer_of_the_user_is_used() -> None:
    for function in ("with_optimizer", "with_made_optimizer"):
        built = load(function)
        assert built.custom and built.custom.optimizer
        made = built.custom.optimizer(list(built.model.parameters()))
        assert isinstance(made, torch.optim.Adam) and made.defaults["lr"] == 0.05
    parts = load("workload").custom
    assert parts and parts.optimizer is None


def test_data_and_collate_of_a_loader_are_used() -> None:
    parts = load("with_loader").custom
    assert parts and parts.collate and len(parts.data) == 64  # type: ignore[arg-type]
    _, doubled = parts.collate([(torch.ones(1), torch.ones(1))])
    assert doubled.item() == 2
    parts = load("with_plain_loader").custom
    assert parts and parts.collate is None


def test_replaced_properties_of_a_loader_are_noted() -> None:
    parts = load("with_loader", workers=2).custom
    assert parts and parts.notes == (
        "batch_size 7 of the DataLoader is replaced by --batch-size 16",
        "num_workers 0 of the DataLoader is replaced by --workers 2",
        "shuffle=False of the DataLoader is replaced by shuffling with --seed",
        "drop_last=False of the DataLoader is replaced by drop_last=True",
    )
    for function in ("with_like_loader", "workload"):
        parts = load(function).custom
        assert parts and parts.notes == ()
    for function, sampler in [
        ("with_sampler", "WeightedRandomSampler"),
        ("with_batch_sampler", "batch_sampler"),
    ]:
        parts = load(function).custom
        assert parts and parts.notes[0].startswith(f"{sampler} of the DataLoader is replaced by")


def test_parameters_receive_settings() -> None:
    load("taking_some", fraction=0.5)
    called_with = sys.modules["custom_returns"].CALLED_WITH
    assert called_with == {"batch_size": 16, "image_size": 48, "fraction": 0.5}
    load("taking_some", image_size=64)
    assert called_with["image_size"] == 64
    load("taking_all", workers=3)
    assert set(called_with) == set(SETTINGS)
    assert called_with["workers"] == 3
    assert called_with["image_size"] is None, "a setting without a value"
    assert called_with["samples"] == 40


@pytest.mark.parametrize(
    ("function", "settings", "count"),
    [
        ("workload", {"fraction": 0.5}, 32),
        ("workload", {"samples": 10}, 10),
        ("workload", {"samples": 40, "fraction": 0.1}, 4),
        ("taking_some", {"fraction": 0.5}, 64),
        ("taking_all", {"samples": 10}, 64),
    ],
)
def test_a_part_of_the_data_is_used_unless_the_function_selects_it(
    function: str, settings: dict[str, Any], count: int
) -> None:
    parts = load(function, **settings).custom
    again = load(function, **settings).custom
    assert parts and again and len(parts.data) == count  # type: ignore[arg-type]
    assert torch.equal(parts.data[0][0], again.data[0][0])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("returning_nothing", "returned None, expected a dict"),
        ("returning_a_model", "returned a Linear, expected a dict"),
        ("returning_four", "returned a tuple of 4 items, expected a dict"),
        ("without_model", "did not return 'model'"),
        ("without_data", "did not return 'data'"),
        ("with_a_generator", "returned a generator as 'data', expected a Dataset"),
    ],
)
def test_invalid_return_values_get_a_skeleton(function: str, message: str) -> None:
    error = error_of(function)
    assert error.startswith(f"`{function}()` in {SHOWN} {message}. Expected:\n\n")
    assert f"def {function}():\n" in error and '"model": ' in error


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("with_a_typo", "returned an unknown key 'los'. Did you mean 'loss'?"),
        (
            "with_a_class",
            "returned the class Labelled as 'model', expected a torch.nn.Module. "
            "Create an instance: Labelled()",
        ),
        ("with_loss_and_step", "returned both 'loss' and 'step'. Return only one of them"),
        (
            "with_a_loss_class",
            "returned the class MSELoss as 'loss', expected a function of (output, target). "
            "Create an instance: MSELoss()",
        ),
        ("with_a_short_step", "returned a 'step' that does not accept (model, batch)"),
        (
            "with_a_dict_of_data",
            "returned a dict as 'data', expected a Dataset. Return one of its values",
        ),
        ("with_no_sample", "returned 'data' without samples"),
        ("with_whole_batches", "returned a DataLoader without batching (batch_size=None)"),
        ("with_a_number_as_optimizer", "returned a float as 'optimizer', expected a function"),
        ("with_a_number_as_collate", "returned an int as 'collate', expected a function"),
    ],
)
def test_invalid_return_values_get_a_hint(function: str, message: str) -> None:
    error = error_of(function)
    assert error.startswith(f"`{function}()` in {SHOWN} {message}")
    assert "\n" not in error and "?." not in error


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("with_a_float_loss", "`loss` returned a float instead of a scalar loss"),
        (
            "with_many_losses",
            r"`loss` returned a tensor of shape \(16, 1\) instead of a scalar "
            "loss",
        ),
        (
            "with_loss_for_dicts",
            r"'loss' needs batches of the form \(x, y\), but a batch is a dict",
        ),
        ("with_pairs_and_no_loss", "no 'loss' and no 'step', and a batch is a list"),
        (
            "with_no_labels",
            "The model returned None instead of a scalar loss. Check that the batches",
        ),
        ("with_a_wrong_optimizer", "`optimizer` returned a str instead of a torch.optim.Optimizer"),
    ],
)
def test_errors_of_the_first_step(function: str, message: str) -> None:
    built = load(function)
    with pytest.raises(WorkloadError, match=message):
        train(built)


@pytest.mark.parametrize(
    ("function", "line", "shapes"),
    [
        (
            "with_wrong_layer",
            "in forward: wrong layer",
            "input shape (16, 4), target shape (16, 1)",
        ),
        ("with_wrong_step", "in step: wrong target", "input shape (16, 4), target shape (16, 1)"),
        ("with_wrong_sequence", "def with_wrong_sequence", "input shape (16, 4), target shape "),
        ("with_wrong_target", "def with_wrong_target", "input shape (16, 4), target shape (16, 1)"),
        ("with_wrong_dict", "in forward: wrong labels", "x shape (16, 4), labels shape (16, 1)"),
        ("with_wrong_module", "in forward: wrong module", "input shape (16, 4), target shape "),
    ],
)
def test_a_step_that_fails_has_a_location_and_shapes(
    function: str, line: str, shapes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The innermost line of the user, or the function if the error is in PyTorch alone."""
    monkeypatch.chdir(DATA)
    file = DATA / ("custom_parts.py" if function == "with_wrong_module" else SHAPES.name)
    name = line.partition(":")[0].split()[-1]
    workload = make_workload(f"{SHAPES.name}:{function}", {})
    with pytest.raises(Exception, match=r"shape|target") as raised:
        train(load_custom(workload))
    where = f"{file.name}:{line_with(line, file)} in {name}, {shapes}"
    assert str(error_location(raised.value, workload)).startswith(where)
    message, _ = describe_error(raised.value, workload)
    assert message.startswith(where)


def test_running_out_of_memory_in_a_step_has_no_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DATA)
    workload = make_workload(f"{SHAPES.name}:with_too_much_memory", {})
    with pytest.raises(MemoryError) as raised:
        train(load_custom(workload))
    at = line_with("out of memory", SHAPES)
    assert error_location(raised.value, workload) == f"{SHAPES.name}:{at} in step"


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        ("wanting_a_size", {}, "needs image_size, which is not set. Pass --image-size"),
        (
            "wanting_a_stranger",
            {},
            "has a parameter 'bach_size', which is not a setting. "
            "Give the parameter a default value. Did you mean 'batch_size'?",
        ),
        ("not_a_function", {}, "'not_a_function' in .* is not a function"),
        ("with_stream", {"epochs": 1}, "`--epochs` needs data with a length. Use --steps"),
        (
            "with_stream",
            {"fraction": 0.5},
            "`--fraction` need a dataset with __len__",
        ),
        ("workload", {"samples": 65}, r"`--samples 65` is more than the data has \(64\)"),
    ],
)
def test_settings_that_do_not_match(function: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        load(function, **settings)


def test_a_stream_needs_a_length_only_for_epochs() -> None:
    assert load("with_stream", steps=3) and load("with_stream")
    assert load("with_sized_stream", epochs=2)


def test_errors_in_the_function_have_a_line() -> None:
    at = line_with("it breaks here")
    assert error_of("raising") == f"{SHOWN}:{at} in deep: ZeroDivisionError: division by zero"
    at = line_with("it ends here")
    assert f"{SHOWN}:{at} in exiting: this line exits Python when exiting() is called" in error_of(
        "exiting"
    )


def test_training_in_the_function_is_stopped() -> None:
    at = line_with("it trains here")
    message = (
        f"custom_returns.py:{at} in training: this line starts training when training() is called"
    )
    assert message in error_of("training")
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.step()  # works again afterwards


def test_training_at_import_is_stopped() -> None:
    file = DATA / "custom_trains_unseen.py"
    at = line_with("it trains here", file)
    assert f":{at} in run: this line starts training when the file is imported" in error_of(
        "workload", file
    )


def test_a_file_that_exits_python_at_import() -> None:
    file = DATA / "custom_exits.py"
    error = error_of("workload", file)
    assert (
        f":{line_with('it ends here', file)}: this line exits Python when the file is imported"
        in error
    )
    assert "(exit code 2)" in error


def test_a_missing_package_at_import() -> None:
    file = DATA / "custom_breaks.py"
    error = error_of("workload", file)
    at = line_with("it breaks here", file)
    assert f":{at}: ModuleNotFoundError: No module named 'no_such_package'" in error
    assert sys.executable in error


def test_other_files_of_the_folder_can_be_imported_and_arguments_are_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["child", "spec.json", "--what"])
    parts = load("workload", DATA / "custom_reads_options.py").custom
    assert parts and len(parts.data) == 48  # type: ignore[arg-type]


def test_names_that_cannot_be_imported(tmp_path: Path) -> None:
    source = "def workload(): return {}"
    for name in ("json.py", "train.v2.py"):
        (tmp_path / name).write_text(source)
    assert "json.py has the same name as another module" in error_of(
        "workload", tmp_path / "json.py"
    )
    assert "its name contains more than one dot" in error_of("workload", tmp_path / "train.v2.py")


def test_a_module_is_imported_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_package").mkdir()
    (tmp_path / "user_package/parts.py").write_text(RETURNS.read_text())
    (tmp_path / "user_package/train.py").write_text("from .parts import workload")
    monkeypatch.chdir(tmp_path)
    built = load_custom(make_workload("user_package.train:workload", {}))
    assert type(built.custom and built.custom.data).__module__ == "user_package.parts"
    error = error_of("workload", tmp_path / "user_package/train.py")
    assert "Refer to a file in a package by its module name" in error


def test_running_out_of_memory_is_not_a_workload_error(tmp_path: Path) -> None:
    file = tmp_path / "user_too_large.py"
    file.write_text(
        "import torch\n\ndef workload():\n    raise torch.cuda.OutOfMemoryError('full')"
    )
    with pytest.raises(torch.cuda.OutOfMemoryError):
        load("workload", file)


SPAWNED = """
import sys
from torch.utils.data import DataLoader
from stepscope.workloads.frameworks.torch.custom import load_custom
from stepscope.workloads.spec import make_workload

if __name__ == "__main__":
    built = load_custom(make_workload(sys.argv[1], {}))
    loader = DataLoader(built.custom.data, 16, num_workers=1, multiprocessing_context="spawn")
    print(built.loss(built.model, next(iter(loader))).item())
"""


def test_spawned_workers_can_load_the_data(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SPAWNED)
    done = subprocess.run(
        [sys.executable, str(program), f"{DATA / 'custom_reads_options.py'}:workload"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert float(done.stdout) >= 0, done.stderr


class Lit(nn.Module):
    """The interface of a LightningModule without a Trainer."""

    def __init__(self, optimizers: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self._optimizers = optimizers
        self.moves: list[Any] = []

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return {"loss": nn.functional.mse_loss(self.layer(x), y)}

    def configure_optimizers(self) -> Any:
        return self._optimizers(self) if self._optimizers else None

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.moves.append(args)
        return super().to(*args, **kwargs)


def built_lit(module: nn.Module) -> Built:
    data = list(zip(torch.rand(32, 4), torch.rand(32, 1), strict=True))
    custom = CustomWorkload(RETURNS, "workload")
    return built_from((module, data), make_workload("any.py:workload", {}), custom)


def sgd(module: nn.Module, lr: float = 0.25) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr)


@pytest.mark.parametrize(
    "optimizers",
    [
        sgd,
        lambda m: [sgd(m)],
        lambda m: {"optimizer": sgd(m), "lr_scheduler": None},
        lambda m: ([sgd(m), sgd(m, 1.0)], []),
        lambda m: [{"optimizer": sgd(m)}, {"optimizer": sgd(m, 1.0)}],
    ],
)
def test_the_optimizer_of_a_lightning_module(optimizers: Any) -> None:
    built = built_lit(Lit(optimizers))
    assert built.custom and built.custom.optimizer
    assert built.custom.optimizer([]).defaults["lr"] == 0.25
    assert train(built)


def test_a_lightning_module_without_a_usable_optimizer() -> None:
    def use_the_trainer(module: nn.Module) -> None:
        raise RuntimeError("not attached to a Trainer")

    parts = built_lit(Lit()).custom
    assert parts and parts.optimizer is None
    assert parts.notes == ("configure_optimizers returns no optimizer: `--optimizer` is used",)
    parts = built_lit(Lit(use_the_trainer)).custom
    assert parts and parts.optimizer is None
    note = "configure_optimizers needs a Trainer (not attached to a Trainer): `--optimizer` is used"
    assert parts.notes == (note,)


def test_only_the_first_of_several_optimizers_is_used() -> None:
    parts = built_lit(Lit(lambda m: [sgd(m), sgd(m)])).custom
    assert parts and parts.notes == (
        "configure_optimizers returns 2 optimizers: only the first is used",
    )
    parts = built_lit(Lit(sgd)).custom
    assert parts and parts.notes == ()


def test_a_lightning_module_is_moved_by_its_own_method() -> None:
    module = Lit()
    built = built_lit(module)
    assert isinstance(built.model, LightningStep)
    assert built.model.to("cpu") is built.model
    assert module.moves == [("cpu",)]


def test_manual_optimization_of_a_lightning_module_is_an_error() -> None:
    module = Lit()
    module.automatic_optimization = False  # type: ignore[assignment]
    with pytest.raises(
        WorkloadError, match=r"LightningModule with manual optimization\. Add a 'step'"
    ):
        built_lit(module)


LOSSES = """
import json, sys, torch
from torch.utils.data import DataLoader
from stepscope.workloads.frameworks.torch.custom import load_custom
from stepscope.workloads.spec import make_workload

torch.manual_seed(0)
torch.set_num_threads(1)
built = load_custom(make_workload(sys.argv[1], {"samples": 64}))
make = built.custom.optimizer or (lambda p: torch.optim.SGD(p, lr=0.1))
optimizer, losses = make(list(built.model.parameters())), []
for _ in range(4):
    for batch in DataLoader(built.custom.data, 32, collate_fn=built.custom.collate):
        loss = built.loss(built.model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
print(json.dumps([type(optimizer).__name__, losses]))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("example", "optimizer"),
    [
        ("workload_plain_loop", "SGD"),
        ("workload_huggingface", "AdamW"),
        ("workload_lightning", "AdamW"),
        ("workload_variable_length", "Adam"),
    ],
)
def test_examples_are_workloads(example: str, optimizer: str) -> None:
    model = f"{ROOT / 'examples' / example / 'train.py'}:workload"
    done = subprocess.run([sys.executable, "-c", LOSSES, model], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    used, losses = json.loads(done.stdout)
    assert used == optimizer
    assert losses[-1] < losses[0]
    assert "self.log" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "example",
    [
        "workload_plain_loop",
        "workload_huggingface",
        "workload_lightning",
        "workload_variable_length",
    ],
)
def test_examples_run_without_stepscope(example: str, tmp_path: Path) -> None:
    program = ROOT / "examples" / example / "train.py"
    command = [sys.executable, str(program), "--epochs", "1", "--samples", "256"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "loss " in done.stdout
