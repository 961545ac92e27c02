"""The mistakes of new users: each ends with a message that says what is wrong, where and what to
do, with a documented exit code, without a traceback, and without a run folder.

No GPU is visible, so that every machine gives the same messages.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import stepscope
from conftest import STEPSCOPE, trial_environment
from stepscope.cli import app
from stepscope.errors import StepscopeError
from stepscope.opened_run import open_run
from synthetic import write_run

FILES = {
    "ok.py": "print('trained')\n",
    "imports.py": "import torhc\n",
    "fails.py": "config = {}\nprint(config['path'])\n",
    "notes.txt": "text\n",
    "script.sh": "text\n",
    "syntax.py": "def workload(:\n",
    "empty/": "",
    "texts/class/a.txt": "text",
    "no_json/run.json": "{",
    "no_run/run.json": "[]",
    "future/run.json": '{"format": 99}',
    "partial/run.json": '{"format": 1}',
    "invalid/run.json": '{"format": 1, "clock": {}, "monitor": {}, "exit_status": {}}',
}
WORKLOADS = """\
import torch
from torch import nn

def data(count=64):
    return torch.utils.data.TensorDataset(torch.randn(count, 8), torch.zeros(count).long())

def workload():
    return {"model": nn.Linear(8, 2), "loss": nn.functional.cross_entropy, "data": data()}

def returns_none():
    workload()

def returns_model():
    return nn.Linear(8, 2)

def returns_pair():
    return nn.Linear(8, 2), data()

def without_data():
    return {"model": nn.Linear(8, 2), "loss": nn.functional.cross_entropy}

def misspelled_key():
    return {"model": nn.Linear(8, 2), "los": nn.functional.cross_entropy, "data": data()}

def returns_class():
    return {"model": nn.Linear, "loss": nn.functional.cross_entropy, "data": data()}

def few_samples():
    return {"model": nn.Linear(8, 2), "loss": nn.functional.cross_entropy, "data": data(4)}

def raises():
    config = {}
    return config["path"]

def parameter(path):
    return workload()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 2)

    def forward(self, x):
        return self.layer(x)

def wrong_shape():
    return {"model": Net(), "loss": nn.functional.cross_entropy, "data": data()}
"""
SKELETON = (
    "Expected: def {name}(): from torch.nn.functional import cross_entropy return "
    '{{ "model": Net(), "loss": cross_entropy, "data": ..., # a Dataset of single samples }}'
)
SIZES = "Use bytes or a number with a unit: KiB, MiB, GiB, kB, MB, GB (k, m, g mean KiB, MiB, GiB)"
INTERVAL = "is out of range. Use 0.02 to 60 seconds"
NO_RUNS = "There are no runs in runs. Create one with `stepscope run -- python train.py`"


class Mistake(NamedTuple):
    command: str
    """The command line without `stepscope`."""
    code: int
    message: str
    """The whole message; one that ends with … is its beginning. White space is normalized."""


def usage(command: str, message: str) -> Mistake:
    """A mistake in the syntax of the command line."""
    return Mistake(command, 2, message)


COMMAND_LINE = [
    # Commands and options
    usage("expain", "No such command 'expain'. Did you mean 'explain'?"),
    usage("study plna", "No such command 'plna'. Did you mean 'plan'?"),
    usage(
        "python ok.py --lr 1",
        "No such command 'python'. To monitor a program: stepscope run -- python ok.py --lr 1",
    ),
    usage("ok.py", "No such command 'ok.py'. To monitor a program: stepscope run -- python ok.py"),
    usage("--versoin", "No such option: --versoin (Possible options: --version)"),
    usage("run --nam x -- true", "No such option: --nam (Possible options: --name)"),
    usage("watch --intreval 1 1", "No such option: --intreval (Possible options: --interval)"),
    usage("top --jsn", "No such option: --jsn (Possible options: --json)"),
    usage("report --opne", "No such option: --opne (Possible options: --json, --open)"),
    usage("explain --jsno", "No such option: --jsno (Possible options: --json)"),
    usage("doctor --quik", "No such option: --quik (Possible options: --quick)"),
    usage(
        "trial cnn --bacth-size 3", "No such option: --bacth-size (Possible options: --batch-si…"
    ),
    usage("fit cnn --headrom 5%", "No such option: --headrom (Possible options: --headroom)"),
    usage("study plan --jsn d", "No such option: --jsn (Possible options: --json)"),
    usage(
        "study run --intervall 1 d", "No such option: --intervall (Possible options: --interval)"
    ),
    usage("study show --jsn d", "No such option: --jsn (Possible options: --json)"),
    usage(
        "study report --opn d", "No such option: --opn (Possible options: --json, --open, --out)"
    ),
    usage("study merge --outt m a b", "No such option: --outt (Possible options: --out)"),
    usage("study merge a b", "Missing option '--out'."),
    usage("run", "Missing argument '-- CMD...'."),
    usage("run --", "Missing argument '-- CMD...'."),
    usage("trial", "Missing argument 'MODEL|FILE:FUNC'."),
    usage("watch abc", "Invalid value for 'PID': Input should be a valid integer…"),
    usage(
        "run --interval abc -- true", "Invalid value for '--interval': Input should be a valid n…"
    ),
    usage(
        "trial cnn --batch-size abc", "Invalid value for '--batch-size': Input should be a vali…"
    ),
    usage(
        "trial cnn --repeat 0", "Invalid value for '--repeat': Input should be greater than or …"
    ),
    # Runs
    Mistake("explain", 3, NO_RUNS),
    Mistake("top", 3, NO_RUNS),
    Mistake("report", 3, NO_RUNS),
    Mistake("report nowhere", 3, "No such run folder: nowhere. List the run folders with …"),
    Mistake("explain nowhere", 3, "No such run folder: nowhere. List the run folders with …"),
    Mistake("top nowhere", 3, "No such run folder: nowhere. List the run folders with `ls ru…"),
    Mistake(
        "report empty",
        3,
        "empty is not a run folder: it has no run.json. Pass the folder that `stepscope run` "
        "printed",
    ),
    Mistake("explain empty", 3, "empty is not a run folder: it has no run.json. Pass the folder …"),
    Mistake(
        "top empty", 3, "empty is not a run folder: it has no run.json. Pass the folder that …"
    ),
    Mistake(
        "report ok.py",
        3,
        "ok.py is not in a run folder. Pass the folder that `stepscope run` printed",
    ),
    Mistake("report no_json", 3, "no_json/run.json cannot be read: …"),
    Mistake(
        "report no_run",
        3,
        "no_run/run.json is not a valid run.json. The run folder is damaged: copy it again, …",
    ),
    Mistake(
        "report future",
        3,
        "future/run.json has format 99, but this version of stepscope reads formats up to 1. "
        "Install a newer version of stepscope",
    ),
    Mistake(
        "report partial",
        3,
        "partial/run.json is missing `clock`, `monitor`, `exit_status`. The run folder is damaged…",
    ),
    Mistake("report invalid", 3, "invalid/run.json is invalid: …"),
    Mistake("report damaged_samples", 3, "damaged_samples/host.0000.parquet cannot be read: …"),
    # Models
    Mistake("trial resnet5O", 4, "Unknown model 'resnet5O'. Did you mean 'resnet50'?"),
    Mistake("fit resnt50", 4, "Unknown model 'resnt50'. Did you mean 'resnet50'?"),
    Mistake(
        "trial mymodel.build",
        4,
        "Unknown model 'mymodel.build'. To use a function in a module, write 'mymodel:build'",
    ),
    Mistake("trial trian.py:workload", 4, "No such file: trian.py. Did you mean 'train.py'?"),
    Mistake(
        "trial experiment.py:workload",
        4,
        "No such file: experiment.py. The Python files in DIR are fails.py, imports.py, ok.py, "
        "syntax.py, train.py",
    ),
    Mistake(
        "fit nowhere/train.py:workload", 4, "No such folder: nowhere. The current folder is DIR"
    ),
    Mistake("trial train.py", 4, "train.py is a file, not a function. Use train.py:workload"),
    Mistake(
        "trial train.py:worklaod", 4, "No function 'worklaod' in train.py. Did you mean 'workload'?"
    ),
    Mistake(
        "trial ok.py:workload", 4, "No function 'workload' in ok.py. Add a function such as this …"
    ),
    Mistake("trial syntax.py:workload", 4, "syntax.py:1: SyntaxError: invalid syntax"),
    Mistake(
        "trial nowhere:workload",
        4,
        "No Python source found for module 'nowhere'. Modules are looked up from the current "
        "folder, as with `python -m`. To refer to a file, include its suffix: "
        "path/train.py:workload",
    ),
    # Settings
    Mistake(
        "trial cnn --data imagenet",
        4,
        "Unknown dataset 'imagenet'. To read your own images from class folders, use --data jpeg "
        "with "
        "--data-path DIR",
    ),
    Mistake("trial cnn --data jepg", 4, "Unknown dataset 'jepg'. Did you mean 'jpeg'?"),
    Mistake("trial cnn --device gpu", 4, "Unknown device 'gpu'. Did you mean 'cuda'?"),
    Mistake(
        "trial cnn --precision fp61",
        4,
        "Unknown precision 'fp61'. Valid values: bf16, fp16, fp32, tf32",
    ),
    Mistake(
        "trial cnn --optimizer adma", 4, "Unknown optimizer 'adma'. Valid values: adam, adamw, sgd"
    ),
    Mistake("trial cnn --batch-size 0", 4, "`--batch-size` must be at least 1, got 0"),
    Mistake("trial cnn --workers -1", 4, "`--workers` must be at least 0, got -1"),
    Mistake("trial cnn --lr 0", 4, "`--lr` must be greater than 0, got 0.0"),
    Mistake("trial cnn --fraction 2", 4, "`--fraction` must be at most 1, got 2.0"),
    Mistake(
        "trial cnn --epochs 1 --steps 3",
        4,
        "`--epochs` and `--steps` are mutually exclusive. Use only one of them",
    ),
    # Limits
    Mistake(
        "trial cnn --memory 8",
        5,
        "`--memory 8B` must be at least 64 MiB. A size without a unit is in bytes. Did you mean "
        "8GiB?",
    ),
    Mistake("trial cnn --memory -1GiB", 5, f"Invalid size '-1GiB'. {SIZES}"),
    Mistake("trial cnn --memory lots", 5, f"Invalid size 'lots'. {SIZES}"),
    Mistake("trial cnn --memory 1MiB", 5, "`--memory 1MiB` must be at least 64 MiB"),
    Mistake(
        "trial cnn --memory 900TiB",
        5,
        "`--memory 900TiB` is more than stepscope may use …",
    ),
    Mistake(
        "trial cnn --memory 900TB",
        5,
        "`--memory 818.5TiB` is more than stepscope may use …",
    ),
    Mistake("trial cnn --cpus 0", 5, "`--cpus 0` must be at least 0.01"),
    Mistake(
        "trial cnn --cpus 5000",
        5,
        "`--cpus 5000` is more than stepscope may use …",
    ),
    Mistake(
        "trial cnn --gpus two",
        5,
        "Invalid GPU 'two' in `--gpus`. Use indices or UUIDs as listed by nvidia-smi -L",
    ),
    Mistake("trial cnn --timeout 0", 5, "`--timeout 0` must be greater than 0 (seconds)"),
    Mistake("trial cnn --interval 100", 5, f"The sampling interval 100.0 s {INTERVAL}"),
    Mistake(
        "fit cnn --memory 8", 5, "`--memory 8B` must be at least 64 MiB. A size without a uni…"
    ),
    Mistake(
        "fit cnn --batch-size 8",
        4,
        "`--batch-size` cannot be used with `fit`, which finds the batch size. Remove "
        "--batch-size, or use `stepscope trial` to train at a given batch size",
    ),
    Mistake(
        "fit cnn --steps 3",
        4,
        "`--steps` cannot be used with `fit`, which sets the length of each probe. Remove --steps",
    ),
    Mistake(
        "fit cnn --headroom 100%", 5, "`--headroom 100%` leaves no memory. Pass less than 100%"
    ),
    Mistake("fit cnn --headroom -1GiB", 5, f"Invalid size '-1GiB'. {SIZES}"),
    Mistake(
        "fit cnn --predict-for ,,",
        5,
        "`--predict-for ,,` contains no size. Pass sizes such as --predict-for 10GiB,23GiB",
    ),
    Mistake("fit cnn --method fast", 5, "Unknown method 'fast'. Valid values: auto, linear2019"),
    Mistake(
        "fit cnn --gpu-memory 8GiB",
        5,
        "`--gpu-memory` needs a GPU, but no usable GPU was found. Remove --gpu-memory to search "
        "in host "
        "memory, or run `stepscope doctor` to see why",
    ),
    Mistake(
        "fit cnn --device cuda",
        5,
        "`--device cuda` needs a GPU, but no usable GPU was found. Remove --device, or run "
        "`stepscope doctor` to see why",
    ),
    # Studies
    Mistake("study run nowhere.yaml", 6, "No such file: nowhere.yaml. The current folder is DIR"),
    Mistake("study plan desing.yaml", 6, "No such file: desing.yaml. Did you mean 'design.yaml'?"),
    Mistake("study show design", 6, "No such file: design. Did you mean 'design.yaml'?"),
    Mistake(
        "study show design.yaml",
        3,
        "design.yaml has not been run yet: there is no study in DIR/studies/design. "
        "Run `stepscope study run design.yaml`",
    ),
    Mistake("study show nowhere", 6, "No such file: nowhere. The current folder is DIR"),
    Mistake(
        "study show empty",
        3,
        "DIR/empty is not a study: it has no study.json. Pass a design file, or the folder of a "
        "study",
    ),
    Mistake(
        "study report empty", 3, "DIR/empty is not a study: it has no study.json. Pass a desi…"
    ),
    Mistake(
        "study merge empty --out m",
        3,
        "Merging needs at least two studies. Pass the folders of two or more studies",
    ),
    Mistake(
        "study merge nowhere empty --out m",
        3,
        "No such study folder: DIR/nowhere. Pass a design file, or the folder of a study",
    ),
    Mistake("study run design.yaml --interval 0", 5, f"The sampling interval 0.0 s {INTERVAL}"),
]

START = "workload: cnn\n"
TWO = "factors:\n  workers: [0, 1]\n"
DESIGNS = [
    (
        f"{START}factors:\n\tworkers: [0, 1]\n",
        "3: YAML syntax error: found character '\\t' that cannot start any token. Indent with "
        "spaces, not tabs workers: [0, 1] ^",
    ),
    (
        f"{START}{TWO}   batch_size: [8]\n",
        "4: YAML syntax error: expected <block end>, but found '<block mapping start>'. Check "
        "the "
        "indentation; text that starts with a quotation mark must be in the other kind of quotes "
        "batch_size: [8] ^",
    ),
    (
        f"{START}factors:\n  workers: [0, 1\n",
        "3: YAML syntax error: expected ',' or ']', but got '<stream end>'. Close this bracket "
        "workers: [0, 1 ^",
    ),
    (f"{START}{TWO}repeat: 3\n", "4: Unknown key 'repeat'. Did you mean 'repeats'? repeat: 3 ^"),
    (f"{START}{TWO}repeats: 0\n", "4: `repeats` must be an integer from 1 to 1,000 repeats: 0 ^"),
    (f"workload: resnet5O\n{TWO}", "1: Unknown model 'resnet5O'. Did you mean 'resnet50'? …"),
    (
        "factors:\n  model: [resnet18, resnet5O]\n",
        "2: Unknown model 'resnet5O'. Did you mean 'resnet50'? model: [resnet18, resnet5O] ^",
    ),
    (
        f"workload: trian.py:workload\n{TWO}",
        "1: No such file: trian.py. Did you mean 'train.py'? …",
    ),
    (
        f"{START}fixed: {{batchsize: 3}}\n{TWO}",
        "2: Unknown setting or limit 'batchsize'. Did you mean 'batch_size'? …",
    ),
    (
        f"{START}factors:\n  worker: [0, 1]\n",
        "3: Unknown setting or limit 'worker'. Did you mean 'workers'? worker: [0, 1] ^",
    ),
    (f"{START}factors:\n  workers: [zero]\n", "3: `workers` must be an integer, got 'zero' …"),
    (f"{START}factors:\n  batch_size: [8, 0]\n", "3: `batch_size` must be at least 1, got 0 …"),
    (
        f"{START}factors:\n  workers: 3\n",
        "3: Expected a list of levels for `workers`, found a number. Move it to `fixed`, or write "
        "[3] …",
    ),
    (
        f"{START}factors:\n  memory: [8]\n",
        "3: `memory 8B` must be at least 64 MiB. A size without a unit is in bytes. Did you mean "
        "8GiB? …",
    ),
    (
        f"{START}factors:\n  data: [imagenet]\n",
        "3: Unknown dataset 'imagenet'. To read your own images from class folders, use data jpeg "
        "with data_path DIR …",
    ),
    (
        f"{START}factors:\n",
        "2: `factors` is empty: a study needs at least one factor. For example, "
        "`factors: {batch_size: [32, 128]}` …",
    ),
    (f"{START}factors:\n  workers: []\n", "3: `workers` has no levels. Add levels, or remove …"),
    (f"{START}{TWO}  workers: [2]\n", "4: Duplicate key 'workers', first set on line 3 …"),
    (
        f"{START}{TWO}skip: workers > cpsu\n",
        "4: Unknown setting or limit 'cpsu'. Did you mean 'cpus'? skip: workers > cpsu ^",
    ),
    (
        f"{START}{TWO}budget: {{time: soon}}\n",
        "4: Invalid duration 'soon'. Use 90s, 30 min, 2h, 1.5h, 1h30m or a number of seconds …",
    ),
    (TWO, "1: `workload` is missing. Set it, for example `workload: cnn`, or vary `model` …"),
]

RUNS = [
    Mistake(
        "watch 999999999",
        125,
        "There is no process 999999999. List your processes with `ps -u $USER -o pid,etime,args`",
    ),
    Mistake("watch 1 --interval 0", 125, f"The sampling interval 0.0 s {INTERVAL}"),
    Mistake("doctor --out ok.py", 125, "ok.py is not a folder. Choose another folder with --out …"),
    Mistake("run -- pyhton ok.py", 127, "Command not found: `pyhton`. Check the name and PATH"),
    Mistake(
        "run -- ok.py",
        127,
        "Command not found: `ok.py`. Run a script with its interpreter: "
        "stepscope run -- python ok.py",
    ),
    Mistake(
        "run ok.py --lr 1", 127, "Command not found: `ok.py`. Run a script with its interpret…"
    ),
    Mistake(
        "run -- 'python ok.py'",
        127,
        "Command not found: `python ok.py`. Remove the quotes around the command: "
        "stepscope run -- python ok.py",
    ),
    Mistake(
        "run -- ./notes.txt",
        126,
        "`./notes.txt` is not executable. Run it with its interpreter, or make it executable: "
        "chmod +x ./notes.txt",
    ),
    Mistake(
        "run -- ./script.sh",
        126,
        "`./script.sh` cannot be executed: Exec format error. A script needs a first line such as "
        "#!/bin/sh",
    ),
    Mistake("run -- empty", 126, "`empty` is a folder. Specify the program to run"),
    Mistake("run --interval 0 -- true", 125, f"The sampling interval 0.0 s {INTERVAL}"),
    Mistake("run --interval -1 -- true", 125, f"The sampling interval -1.0 s {INTERVAL}"),
    Mistake("run --interval 0.001 -- true", 125, f"The sampling interval 0.001 s {INTERVAL}"),
    Mistake("run --interval nan -- true", 125, f"The sampling interval nan s {INTERVAL}"),
    Mistake("run --interval 500 -- true", 125, f"The sampling interval 500.0 s {INTERVAL}"),
    Mistake(
        "run --out ok.py/runs -- true",
        125,
        "Cannot create a run folder in ok.py/runs: Not a directory. Choose another folder with "
        "--out DIR",
    ),
    Mistake(
        "run --epoch-pattern 'epoch (' -- true",
        125,
        "Invalid regular expression 'epoch (' for `--epoch-pattern`: missing ), unterminated "
        "subpattern at position 6. For example: --epoch-pattern 'Epoch (\\d+)'",
    ),
]

TRIALS = [
    Mistake(
        "trial train.py:returns_none",
        4,
        "`returns_none()` in train.py returned None, expected a dict. "
        + SKELETON.format(name="returns_none"),
    ),
    Mistake(
        "trial train.py:returns_model",
        4,
        "`returns_model()` in train.py returned a Linear, expected a dict. "
        + SKELETON.format(name="returns_model"),
    ),
    Mistake(
        "trial train.py:returns_pair",
        4,
        "The workload function returned no 'loss' and no 'step', and a batch is a list "
        "instead of a dict. Return a 'loss' for batches of the form (x, y), or a 'step'",
    ),
    Mistake(
        "trial train.py:without_data",
        4,
        "`without_data()` in train.py did not return 'data'. "
        + SKELETON.format(name="without_data"),
    ),
    Mistake(
        "trial train.py:misspelled_key",
        4,
        "`misspelled_key()` in train.py returned an unknown key 'los'. Did you mean 'loss'?",
    ),
    Mistake(
        "trial train.py:returns_class",
        4,
        "`returns_class()` in train.py returned the class Linear as 'model', expected a "
        "torch.nn.Module. Create an instance: Linear()",
    ),
    Mistake(
        "trial train.py:few_samples",
        4,
        "The data has 4 samples, fewer than one batch of 32. Use a --batch-size of at most 4, or "
        "more data",
    ),
    Mistake(
        "trial cnn --device cpu --samples 64 --epochs 1 --accumulate 4",
        4,
        "An epoch has fewer batches than `--accumulate 4` needs for a step. Use a smaller …",
    ),
    Mistake("trial train.py:raises", 4, "train.py:33 in raises: KeyError: 'path'"),
    Mistake(
        "trial train.py:parameter",
        4,
        "`parameter()` in train.py has a parameter 'path', which is not a setting. Give the "
        "parameter a default value. Did you mean 'data_path'?",
    ),
    Mistake(
        "trial imports.py:workload", 4, "No function 'workload' in imports.py. Add a function such…"
    ),
    Mistake(
        "trial cnn --data jpeg --data-path nowhere",
        4,
        "No such folder: nowhere. Use a folder that contains a folder of images for each class",
    ),
    Mistake(
        "trial cnn --data jpeg --data-path empty",
        4,
        "empty contains no folders. Use a folder that contains a folder of images for each class",
    ),
    Mistake(
        "trial cnn --data jpeg --data-path texts",
        4,
        "Cannot read images from texts: Found no valid file for the classes class. …",
    ),
    Mistake(
        "trial cnn --data-path empty",
        4,
        "`--data-path` has no effect on random data, which is not read from files. Use --data jpeg "
        "or --data cifar100",
    ),
    Mistake(
        "trial cnn --gpu-memory 8GiB",
        5,
        "`--gpu-memory` needs a GPU, and this trial does not use one. Remove it, or use --memory "
        "to limit host memory",
    ),
    Mistake(
        "trial cnn --device cuda",
        5,
        "PyTorch cannot use a GPU on this machine. Remove --device, or run `stepscope doctor` to "
        "see why",
    ),
    Mistake("trial cnn --gpus 0", 5, "`--gpus 0` is not available: …"),
    Mistake("fit cnn --gpus 0", 5, "`--gpus 0` is not available: …"),
]

PYTHON = [
    ("fit(lambda: None)", 4, "<lambda> cannot be imported by another process. Pass a function …"),
    ("fit(print)", 4, "print cannot be imported by another process. Pass a function that is def…"),
    ("fit(int)", 4, "int cannot be imported by another process. Pass a function that is defined…"),
    ("trial(lambda: None)", 4, "<lambda> cannot be imported by another process. Pass a function…"),
    ("trial(None)", 4, "NoneType cannot be imported by another process. Pass a function that is…"),
    ("trial('cnn', bacth_size=3)", 4, "Unknown setting 'bacth_size'. Did you mean 'batch_size'?"),
    ("trial('cnn', batch_size='8')", 4, "`--batch-size` must be an integer, got '8'"),
    ("trial('cnn', repeat=0)", 5, "`--repeat` must be at least 1, got 0"),
    ("trial('cnn', cpus='2')", 5, "`--cpus` must be a number, got '2'"),
    ("trial('cnn', timeout='9')", 5, "`--timeout` must be a number, got '9'"),
    ("trial('cnn', interval='x')", 5, "The sampling interval must be a number, got 'x'"),
    ("trial('cnn', memory=8)", 5, "`--memory 8B` must be at least 64 MiB. A size without a unit…"),
    ("fit('cnn', gpu_memroy='8GiB')", 4, "Unknown setting 'gpu_memroy'. Did you mean 'gpu_memor…"),
    (
        "fit('cnn', batch_size=8)",
        4,
        "`--batch-size` cannot be used with `fit`, which finds the batch size. Remove …",
    ),
    (
        "fit('cnn', seconds=8.0)",
        4,
        "`--seconds` cannot be used with `fit`, which sets the length of each probe. Remove …",
    ),
    (
        "fit('cnn', memory='900TiB')",
        5,
        "`--memory 900TiB` is more than stepscope may use …",
    ),
    ("fit('cnn', predict_for=['big'])", 5, f"Invalid size 'big'. {SIZES}"),
    ("fit('cnn', predict_for=['11GiB'])", 5, "`--predict-for` needs a GPU, but no usable GPU was…"),
    (
        "fit('cnn', gpus=['none'])",
        5,
        "Invalid GPU 'none' in `--gpus`. Use indices or UUIDs as lis…",
    ),
    (
        "fit('cnn', device='cpu', gpus=[0])",
        5,
        "`--device cpu` and `--gpus 0` are mutually exclusive. Remove one of them",
    ),
    (
        "fit('cnn', device='cpu', gpu_memory='1GiB')",
        5,
        "`--gpu-memory` needs a GPU, but `--device cpu` is set. Remove --gpu-memory to search in "
        "host "
        "memory, or remove --device cpu",
    ),
    ("fit('cnn', device='cpu', predict_for=['1GiB'])", 5, "`--predict-for` needs a GPU, but `--d…"),
    ("fit('cnn', method='linear2019')", 5, "`--method linear2019` needs a GPU, but no usable GPU…"),
    ("fit('cnn', method='linear')", 5, "Unknown method 'linear'. Did you mean 'linear2019'?"),
    ("fit('cnn', stall_timeout=0.0)", 5, "`--stall-timeout 0` must be greater than 0 (seconds)"),
    ("fit('cnn', headroom='-1')", 5, f"Invalid size '-1'. {SIZES}"),
    (
        "fit('cnn', headroom='x%')",
        5,
        "Invalid percentage 'x%' in `--headroom`. Pass a percentage such as 5%",
    ),
    ("fit('cnn', headroom='nan%')", 5, "Invalid percentage 'nan%' in `--headroom`. Pass a perce…"),
    (
        "fit('cnn', headroom='2GiB', memory='1GiB')",
        5,
        "`--headroom 2 GiB` leaves none of …",
    ),
    (
        "open_run('nowhere')",
        3,
        "No such run folder: nowhere. List the run folders with `ls run…",
    ),
    ("open_study('nowhere')", 6, "No such file: nowhere. The current folder is DIR"),
    ("study('nowhere.yaml')", 6, "No such file: nowhere.yaml. The current folder is DIR"),
    ("study('design.yaml', interval=0)", 5, f"The sampling interval 0 s {INTERVAL}"),
]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files of the user, and a terminal in which no message is wrapped."""
    for name, text in {**FILES, "train.py": WORKLOADS, "design.yaml": START + TWO}.items():
        path = tmp_path / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(text)
    (tmp_path / "script.sh").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for name, value in trial_environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.fixture(autouse=True)
def _restore_signals() -> Iterator[None]:
    """Restore the handlers that commands set in this process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def as_shown(text: str) -> str:
    """Return a message without its frame, its white space and the folder of the test."""
    text = re.sub(r"[│╭╮╰╯─]+( Error )?", " ", text.replace(str(Path.cwd()), "DIR"))
    return " ".join(text.split())


def check(shown: str, message: str) -> None:
    expected = " ".join(message.split())
    if expected.endswith("…"):
        assert shown.startswith(expected[:-1].rstrip())
    else:
        assert shown == expected


def check_error(mistake: Mistake, code: Any, out: str, err: str) -> None:
    """Check the exit code and the message, and that nothing else was printed or written."""
    assert (code, out) == (mistake.code, ""), err
    assert "Traceback" not in err
    if mistake.code == 2:
        _, _, shown = as_shown(err).partition("' for help. ")
        check(shown, mistake.message)
    else:
        assert err.startswith("stepscope: ")
        check(as_shown(err).removeprefix("stepscope: "), mistake.message)
    assert not [*Path().glob("runs/*"), *Path().glob("studies/*")]


def in_process(
    mistake: Mistake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exit_process(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", exit_process)  # a command that succeeds
    monkeypatch.setattr(sys, "argv", ["stepscope", *shlex.split(mistake.command)])
    with pytest.raises(SystemExit) as exit_:
        app.main()
    check_error(mistake, exit_.value.code, *capsys.readouterr())


def run(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*STEPSCOPE, *shlex.split(command)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize("mistake", COMMAND_LINE, ids=lambda mistake: mistake.command)
def test_command_line(
    mistake: Mistake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "damaged_samples" in mistake.command:
        paths = write_run(Path("damaged_samples"))
        (paths.folder / "host.0000.parquet").write_bytes(b"PAR1")
    in_process(mistake, monkeypatch, capsys)


@pytest.mark.parametrize(("text", "message"), DESIGNS, ids=[message for _, message in DESIGNS])
def test_design(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("design.yaml").write_text(text)
    mistake = Mistake("study plan design.yaml", 6, f"design.yaml:{message}")
    in_process(mistake, monkeypatch, capsys)


@pytest.mark.parametrize("mistake", [*RUNS, *TRIALS], ids=lambda mistake: mistake.command)
def test_process(mistake: Mistake) -> None:
    done = run(mistake.command)
    check_error(mistake, done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(("call", "code", "message"), PYTHON, ids=[call for call, *_ in PYTHON])
def test_python(call: str, code: int, message: str) -> None:
    with pytest.raises(StepscopeError) as error:
        eval(f"stepscope.{call}", {"stepscope": stepscope})
    check(as_shown(str(error.value)), message)
    assert error.value.exit_code == code


@pytest.mark.parametrize(
    ("command", "code", "error"),
    [
        ("python trian.py", 2, "python: can't open file 'DIR/trian.py': [Errno 2] No such file …"),
        ("python -m trian", 1, "DIR/python: No module named trian"),
        ("python imports.py", 1, "ModuleNotFoundError: No module named 'torhc'"),
        ("python fails.py", 1, "KeyError: 'path'"),
    ],
)
def test_script_that_fails_at_once(command: str, code: int, error: str) -> None:
    """The error of the script is followed by its outcome: no tables, and no recommendation."""
    done = run(f"run -- {command}")
    assert (done.returncode, done.stdout) == (code, "")
    folder = Path(sys.executable).parent
    lines = done.stderr.replace(f"{folder}/", "DIR/").splitlines()
    at = next(number for number, line in enumerate(lines) if "  crashed  " in line)
    check(as_shown(lines[at - 1]), error)
    name = "python" if "-m" in command else Path(command.split()[1]).stem
    (run_folder,) = Path("runs").iterdir()
    report = (run_folder / "derived" / "report.html").absolute().as_uri()
    duration, shown_report = (line for line in lines[at + 1 :] if line)
    assert lines[at] == f"{name}  crashed  exit code {code}"
    assert re.fullmatch(r"Duration  [\d.]+ m?s", duration.strip())
    assert shown_report == f"Report    {report}"


def test_step_with_wrong_shapes() -> None:
    """Both commands name the line of the user, and the shapes of the batch."""
    error = "RuntimeError: mat1 and mat2 shapes cannot be multiplied ({}x8 and 16x2)"
    where = "train.py:44 in forward, input shape ({0}, 8), target shape ({0},)"

    done = run("trial train.py:wrong_shape --steps 2")
    assert done.returncode == 14 and "Traceback" not in done.stderr
    shown = as_shown(done.stderr)
    assert shown.startswith(f"train.wrong_shape crashed {error.format(32)} custom data, CPU")
    assert f"Failure at {where.format(32)} Samples/s – (no steps were completed)" in shown
    (folder,) = Path("runs").iterdir()
    assert shown.endswith(f"Full error output: DIR/runs/{folder.name}/stderr.log")
    assert open_run(folder).exit_status.outcome == "crashed"

    done = run("fit train.py:wrong_shape")
    assert done.returncode == 4 and done.stdout == ""
    failure = f"{error.format(8)} ({where.format(8)})"
    assert done.stderr.splitlines() == [
        f"stepscope: batch size 8: failed in step 1: {failure}",
        f"stepscope: Batch size 8 fails for a reason other than memory: {failure}. Run "
        "`stepscope trial` to see the full output",
    ]


def test_decimal_size_is_shown_in_binary_units() -> None:
    """8GB are 7.451 GiB, and one table has one system of units."""
    done = run("trial cnn --memory 8GB --steps 1")
    assert done.returncode == 0, done.stderr
    shown = as_shown(done.stderr)
    assert "Limits 7.451 GiB host memory" in shown
    assert not re.search(r"\d (kB|MB|GB)\b", shown)


def test_function_without_a_file() -> None:
    code = "import stepscope\ndef workload(): ...\nstepscope.fit(workload)\n"
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        "stepscope.errors.WorkloadError: workload is not defined in a file. The probes import it "
        "in separate processes: define it in a .py file"
    )


@pytest.mark.parametrize("command", ["report --json", "top --json", "report"])
def test_full_standard_output(command: str) -> None:
    write_run(Path("run"))
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*STEPSCOPE, *command.split(), "run"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "stepscope: Cannot write to standard output: No space left on device\n"


def test_completion_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    command = [str(Path(sys.executable).with_name("stepscope")), "--install-completion", "bash"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    script = tmp_path / ".bash_completions" / "stepscope.sh"
    assert "_stepscope_completion" in script.read_text()
    assert str(script) in (tmp_path / ".bashrc").read_text()
