"""A user's function is imported, called and understood, or told what is wrong with it."""

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

from stepscope.errors import BadWorkload
from stepscope.workloads.frameworks.torch.models import Built
from stepscope.workloads.frameworks.torch.returned import LightningStep, built_from
from stepscope.workloads.frameworks.torch.user import load_own
from stepscope.workloads.own import OwnPlace
from stepscope.workloads.spec import SETTINGS, make_workload

ROOT = Path(__file__).parents[3]
DATA = Path(__file__).parent / "data"
RETURNS = DATA / "own_returns.py"


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What importing a user's file changes in a process is put back."""
    modules = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    yield
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "tests")):
            del sys.modules[name]


def load(function: str, file: Path = RETURNS, **settings: Any) -> Built:
    return load_own(make_workload(f"{file}:{function}", {"batch_size": 16, **settings}))


def refusal(function: str, file: Path = RETURNS, **settings: Any) -> str:
    with pytest.raises(BadWorkload) as refused:
        load(function, file, **settings)
    return str(refused.value)


def train(built: Built, steps: int = 8, **loader: Any) -> list[float]:
    """A loop as simple as can be."""
    assert built.own is not None
    batches = DataLoader(built.own.data, 16, collate_fn=built.own.collate, **loader)
    make = built.own.optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05))
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
def test_what_it_may_return(function: str) -> None:
    torch.manual_seed(0)
    losses = train(load(function))
    assert losses[-1] < losses[0]


def test_its_optimizer_is_used() -> None:
    for function in ("with_optimizer", "with_made_optimizer"):
        built = load(function)
        assert built.own and built.own.optimizer
        made = built.own.optimizer(list(built.model.parameters()))
        assert isinstance(made, torch.optim.Adam) and made.defaults["lr"] == 0.05
    own = load("workload").own
    assert own and own.optimizer is None


def test_of_a_loader_the_data_and_the_collate_are_used() -> None:
    own = load("with_loader").own
    assert own and own.collate and len(own.data) == 64  # type: ignore[arg-type]
    _, doubled = own.collate([(torch.ones(1), torch.ones(1))])
    assert doubled.item() == 2
    own = load("with_plain_loader").own
    assert own and own.collate is None


def test_what_a_loader_has_otherwise_is_noted() -> None:
    own = load("with_loader", workers=2).own
    assert own and own.notes == (
        "the DataLoader's batch_size 7 gave way to --batch-size 16",
        "the DataLoader's num_workers 0 gave way to --workers 2",
        "the DataLoader's shuffle=False gave way to a shuffle that --seed fixes",
        "the DataLoader's drop_last=False gave way to whole batches only",
    )
    for function in ("with_like_loader", "workload"):
        own = load(function).own
        assert own and own.notes == ()
    for function, sampler in [
        ("with_sampler", "WeightedRandomSampler"),
        ("with_batch_sampler", "batch_sampler"),
    ]:
        own = load(function).own
        assert own and own.notes[0].startswith(f"the DataLoader's {sampler} gave way to")


def test_settings_that_it_names_are_passed() -> None:
    load("taking_some", fraction=0.5)
    called_with = sys.modules["own_returns"].CALLED_WITH
    assert called_with == {"batch_size": 16, "image_size": 48, "fraction": 0.5}
    load("taking_some", image_size=64)
    assert called_with["image_size"] == 64
    load("taking_all", workers=3)
    assert set(called_with) == set(SETTINGS)
    assert called_with["workers"] == 3
    assert called_with["image_size"] is None, "a setting nobody set, where there is no default"
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
def test_a_part_of_the_data_is_taken_unless_the_function_does(
    function: str, settings: dict[str, Any], count: int
) -> None:
    own = load(function, **settings).own
    again = load(function, **settings).own
    assert own and again and len(own.data) == count  # type: ignore[arg-type]
    assert torch.equal(own.data[0][0], again.data[0][0])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("returning_nothing", "returned None, not a dict"),
        ("returning_a_model", "returned a Linear, not a dict"),
        ("returning_four", "returned a tuple of 4"),
        ("without_model", "returned no 'model'"),
        ("without_data", "returned no 'data'"),
        ("with_a_generator", "as 'data' a generator, not a Dataset"),
    ],
)
def test_what_it_may_not_return(function: str, said: str) -> None:
    refused = refusal(function)
    assert said in refused
    assert f"{function}() of" in refused
    assert f"def {function}():\n" in refused and '"model": ' in refused


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("with_a_typo", "returned 'los', which means nothing. Did you mean loss?"),
        ("with_a_class", "as 'model' the class Labelled, which is still to be called"),
        ("with_loss_and_step", "both 'loss' and 'step'"),
        ("with_a_loss_class", "as 'loss' the class MSELoss, which is still to be called"),
        ("with_a_short_step", "a 'step' that does not take (model, batch)"),
        ("with_a_dict_of_data", "as 'data' a dict, not a Dataset. Return one of those in it"),
        ("with_no_sample", "'data' without a sample"),
        ("with_whole_batches", "a DataLoader that makes no batches"),
        ("with_a_number_as_optimizer", "as 'optimizer' a float"),
        ("with_a_number_as_collate", "as 'collate' an int"),
    ],
)
def test_where_a_sentence_is_enough_it_is_one(function: str, said: str) -> None:
    refused = refusal(function)
    assert said in refused
    assert f"{function}() of" in refused
    assert "\n" not in refused and "?." not in refused


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("with_a_float_loss", "The loss gave a float, not a loss"),
        ("with_many_losses", r"a tensor of shape \(16, 1\), not a loss"),
        ("with_loss_for_dicts", "A batch is a dict, and 'loss' is for pairs"),
        ("with_pairs_and_no_loss", "nothing tells how to make a loss of it"),
        ("with_no_labels", "got no labels or has no loss, gave None"),
        ("with_a_wrong_optimizer", "The 'optimizer' gave a str"),
    ],
)
def test_what_shows_at_the_first_step(function: str, said: str) -> None:
    built = load(function)
    with pytest.raises(BadWorkload, match=said):
        train(built)


@pytest.mark.parametrize(
    ("function", "settings", "said"),
    [
        ("wanting_a_size", {}, "wants image_size, which was not set. Give --image-size"),
        ("wanting_a_stranger", {}, "'bach_size', which is no setting. .* Did you mean batch_size"),
        ("not_a_function", {}, "'not_a_function' in .* is no function"),
        ("with_stream", {"epochs": 1}, "no telling when an epoch ends. Give --steps"),
        ("with_stream", {"fraction": 0.5}, "has no part"),
        ("workload", {"samples": 65}, "--samples 65 is more than the data has: 64"),
    ],
)
def test_settings_that_it_cannot_have(function: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BadWorkload, match=said):
        load(function, **settings)


def test_a_stream_needs_a_length_only_for_epochs() -> None:
    assert load("with_stream", steps=3) and load("with_stream")
    assert load("with_sized_stream", epochs=2)


def test_errors_in_it_are_told_with_their_line() -> None:
    shown = str(RETURNS.relative_to(ROOT)) if Path.cwd() == ROOT else str(RETURNS)
    at = line_with("it breaks here")
    assert refusal("raising") == f"{shown}:{at} in deep: ZeroDivisionError: division by zero"
    at = line_with("it ends here")
    assert f"{shown}:{at} in exiting: this ends Python when" in refusal("exiting")


def test_training_in_it_is_stopped() -> None:
    at = line_with("it trains here")
    said = f"own_returns.py:{at} in training: this trains when training() is called"
    assert said in refusal("training")
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.step()  # nobody is stopped afterwards


def test_training_at_import_is_stopped() -> None:
    file = DATA / "own_trains_unseen.py"
    refused = refusal("workload", file)
    at = line_with("it trains here", file)
    assert f":{at} in run: this trains when it is imported" in refused


def test_the_end_of_python_at_import_is_no_end() -> None:
    file = DATA / "own_exits.py"
    refused = refusal("workload", file)
    assert f":{line_with('it ends here', file)}: this ends Python when it is imported" in refused
    assert "(exit code 2)" in refused


def test_what_is_missing_at_import_is_told() -> None:
    file = DATA / "own_breaks.py"
    refused = refusal("workload", file)
    at = line_with("it breaks here", file)
    assert f":{at}: ModuleNotFoundError: No module named 'no_such_package'" in refused
    assert sys.executable in refused


def test_files_beside_it_are_imported_and_our_options_are_not_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["child", "spec.json", "--what"])
    own = load("workload", DATA / "own_reads_options.py").own
    assert own and len(own.data) == 48  # type: ignore[arg-type]


def test_names_that_cannot_be_imported(tmp_path: Path) -> None:
    source = "def workload(): return {}"
    for name in ("json.py", "train.v2.py"):
        (tmp_path / name).write_text(source)
    assert "json.py has the name of another module" in refusal("workload", tmp_path / "json.py")
    assert "one dot is enough" in refusal("workload", tmp_path / "train.v2.py")


def test_a_module_is_imported_from_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package/parts.py").write_text(RETURNS.read_text())
    (tmp_path / "own_package/train.py").write_text("from .parts import workload")
    monkeypatch.chdir(tmp_path)
    built = load_own(make_workload("own_package.train:workload", {}))
    assert type(built.own and built.own.data).__module__ == "own_package.parts"
    refused = refusal("workload", tmp_path / "own_package/train.py")
    assert "A file of a package is named as a module" in refused


def test_running_out_of_memory_stays_what_it_is(tmp_path: Path) -> None:
    file = tmp_path / "own_too_large.py"
    file.write_text(
        "import torch\n\ndef workload():\n    raise torch.cuda.OutOfMemoryError('full')"
    )
    with pytest.raises(torch.cuda.OutOfMemoryError):
        load("workload", file)


SPAWNED = """
import sys
from torch.utils.data import DataLoader
from stepscope.workloads.frameworks.torch.user import load_own
from stepscope.workloads.spec import make_workload

if __name__ == "__main__":
    built = load_own(make_workload(sys.argv[1], {}))
    loader = DataLoader(built.own.data, 16, num_workers=1, multiprocessing_context="spawn")
    print(built.loss(built.model, next(iter(loader))).item())
"""


def test_the_data_goes_to_workers_that_are_spawned(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SPAWNED)
    done = subprocess.run(
        [sys.executable, str(program), f"{DATA / 'own_reads_options.py'}:workload"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert float(done.stdout) >= 0, done.stderr


class Lit(nn.Module):
    """What there is of a LightningModule without a Trainer."""

    def __init__(self, optimizers: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self._optimizers = optimizers
        self.told: list[Any] = []

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return {"loss": nn.functional.mse_loss(self.layer(x), y)}

    def configure_optimizers(self) -> Any:
        return self._optimizers(self) if self._optimizers else None

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.told.append(args)
        return super().to(*args, **kwargs)


def built_lit(module: nn.Module) -> Built:
    data = list(zip(torch.rand(32, 4), torch.rand(32, 1), strict=True))
    place = OwnPlace(RETURNS, "workload")
    return built_from((module, data), make_workload("any.py:workload", {}), place)


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
def test_a_lightning_module_brings_its_optimizer(optimizers: Any) -> None:
    built = built_lit(Lit(optimizers))
    assert built.own and built.own.optimizer
    assert built.own.optimizer([]).defaults["lr"] == 0.25
    assert train(built)


def test_a_lightning_module_without_a_usable_optimizer() -> None:
    def ask_the_trainer(module: nn.Module) -> None:
        raise RuntimeError("not attached to a Trainer")

    own = built_lit(Lit()).own
    assert own and own.optimizer is None
    assert own.notes == ("configure_optimizers gives no optimizer: --optimizer is used",)
    own = built_lit(Lit(ask_the_trainer)).own
    assert own and own.optimizer is None
    said = "configure_optimizers needs a Trainer (not attached to a Trainer): --optimizer is used"
    assert own.notes == (said,)


def test_of_several_optimizers_it_is_said_that_the_first_is_used() -> None:
    own = built_lit(Lit(lambda m: [sgd(m), sgd(m)])).own
    assert own and own.notes == (
        "of the 2 optimizers that configure_optimizers gives, the first is used",
    )
    own = built_lit(Lit(sgd)).own
    assert own and own.notes == ()


def test_a_lightning_module_is_told_its_device() -> None:
    module = Lit()
    built = built_lit(module)
    assert isinstance(built.model, LightningStep)
    assert built.model.to("cpu") is built.model
    assert module.told == [("cpu",)]


def test_a_lightning_module_that_steps_by_itself_is_refused() -> None:
    module = Lit()
    module.automatic_optimization = False  # type: ignore[assignment]
    with pytest.raises(BadWorkload, match=r"steps its own optimizers\. Add a 'step'"):
        built_lit(module)


LOSSES = """
import json, sys, torch
from torch.utils.data import DataLoader
from stepscope.workloads.frameworks.torch.user import load_own
from stepscope.workloads.spec import make_workload

torch.manual_seed(0)
torch.set_num_threads(1)
built = load_own(make_workload(sys.argv[1], {"samples": 64}))
make = built.own.optimizer or (lambda p: torch.optim.SGD(p, lr=0.1))
optimizer, losses = make(list(built.model.parameters())), []
for _ in range(4):
    for batch in DataLoader(built.own.data, 32, collate_fn=built.own.collate):
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
        ("own_plain_loop", "SGD"),
        ("own_huggingface", "AdamW"),
        ("own_lightning", "AdamW"),
        ("own_variable_length", "Adam"),
    ],
)
def test_examples_are_workloads(example: str, optimizer: str) -> None:
    place = f"{ROOT / 'examples' / example / 'train.py'}:workload"
    done = subprocess.run([sys.executable, "-c", LOSSES, place], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    used, losses = json.loads(done.stdout)
    assert used == optimizer
    assert losses[-1] < losses[0]
    assert "self.log" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "example", ["own_plain_loop", "own_huggingface", "own_lightning", "own_variable_length"]
)
def test_examples_train_by_themselves(example: str, tmp_path: Path) -> None:
    program = ROOT / "examples" / example / "train.py"
    command = [sys.executable, str(program), "--epochs", "1", "--samples", "256"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "loss " in done.stdout
