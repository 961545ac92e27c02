"""The file of a study: what it says, and what is told of one that cannot be used."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stepscope.errors import BadDesign
from stepscope.studies.design.file import (
    KEYS,
    parse_duration,
    parse_share,
    read_design,
    trials_text,
)
from stepscope.studies.design.nodes import MOST_BYTES
from stepscope.studies.design.records import Budget, Design

GIB = 1 << 30

WHOLE = """\
name: cnn-on-two-cores
workload: cnn
fixed:
  seconds: 3
  memory: 4GiB
factors:
  batch_size: [32, 128]
  workers: [0, 2]
  cpus: [1, 1.5]
  lr: [1e-3, .1]
  gpu_memory: [8GiB, ~]
skip:
  - workers > 2 * cpus
  - {when: "memory < '2GiB'", because: no room}
repeats: 3
choose: {random: 40}
seed: 7
budget: {time: 2h, trials: 200}
blocks: {size: 4, reruns: 2, sentinel: {batch_size: 32}}
oom: {skip: no, test: 10%}
"""


def read(folder: Path, text: str | bytes, name: str = "cnn.yaml") -> Design:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_design(file)


def refusal(folder: Path, text: str | bytes) -> str:
    with pytest.raises(BadDesign) as error:
        read(folder, text)
    assert error.value.exit_code == 6
    return str(error.value).replace(f"{folder}/", "")


def test_all_that_a_file_can_say(tmp_path: Path) -> None:
    design = read(tmp_path, WHOLE)
    assert design.name == "cnn-on-two-cores" and design.repeats == 3 and design.seed == 7
    assert design.fixed == {"model": "cnn", "seconds": 3.0, "memory": 4 * GIB}
    assert [(factor.name, factor.levels) for factor in design.factors] == [
        ("batch_size", (32, 128)),
        ("workers", (0, 2)),
        ("cpus", (1.0, 1.5)),
        ("lr", (0.001, 0.1)),
        ("gpu_memory", (8 * GIB, None)),
    ]
    assert [(rule.plain, rule.line, rule.because) for rule in design.rules] == [
        ("workers > 2 * cpus", 13, ""),
        ("memory < '2GiB'", 14, "no room"),
    ]
    assert design.sample == 40
    assert design.budget == Budget(7200.0, 200)
    assert (design.block, design.reruns, design.reference) == (4, 2, {"batch_size": 32})
    assert design.with_reference and not design.skip_dominated and design.tested_share == 0.1
    assert design.file == tmp_path / "cnn.yaml" and design.text == WHOLE


def test_little_is_enough(tmp_path: Path) -> None:
    design = read(tmp_path, "factors: {model: [cnn, lstm]}\nskip: workers > 2\nbudget: 30 min\n")
    assert design.name == "cnn" and design.fixed == {} and design.repeats == 1
    assert design.budget == Budget(1800.0) and len(design.rules) == 1 and design.sample is None
    assert design.with_reference and design.reference is None and design.skip_dominated
    for off in ("none", "~", "no"):
        text = f"workload: cnn\nfactors: {{workers: [0, 1]}}\nblocks: {{sentinel: {off}}}\n"
        assert not read(tmp_path, text).with_reference


def test_what_was_left_empty_is_as_if_it_was_not_there(tmp_path: Path) -> None:
    keys = "".join(f"{key}:\n" for key in KEYS if key not in ("workload", "factors"))
    empty = read(tmp_path, f"workload: cnn\nfactors: {{workers: [0, 1]}}\n{keys}")
    bare = read(tmp_path, "workload: cnn\nfactors: {workers: [0, 1]}\n")
    assert dataclasses.replace(empty, text="") == dataclasses.replace(bare, text="")


def test_anchors_and_merges(tmp_path: Path) -> None:
    design = read(
        tmp_path,
        "workload: cnn\n"
        "fixed: &base {seconds: 3, cpus: 2}\n"
        "factors: {workers: &two [0, 1], prefetch: [2, 4]}\n"
        "blocks: {sentinel: {<<: *base, cpus: 1}}\n",
    )
    assert design.reference == {"cpus": 1.0, "seconds": 3.0}


def test_functions_of_users_are_looked_for_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def workload():\n    raise SystemExit('imported')\n")
    text = "workload: train.py:{}\nfactors: {{batch_size: [1, 2]}}\n"
    assert read(tmp_path, text.format("workload")).fixed == {"model": "train.py:workload"}
    said = refusal(tmp_path, text.format("wrokload"))
    assert said.startswith("cnn.yaml:1: There is no function 'wrokload'")
    assert "Did you mean workload?" in said
    said = refusal(tmp_path, "factors:\n  model: [cnn, tain.py:workload]\n")
    assert said.startswith("cnn.yaml:2: There is no file tain.py. Did you mean train.py?")
    (tmp_path / "script.py").write_text("import torch\nfor x in range(3):\n    loss.backward()\n")
    said = refusal(tmp_path, "workload: script.py:workload\nfactors: {workers: [0, 1]}\n")
    assert "would start to train" in said and "if __name__" in said


MODEL = "workload: cnn\n"
START = MODEL + "factors:\n  workers: [0, 2]\n"

BAD: list[tuple[str, int, str]] = [
    (
        MODEL + "factors:\n  batchsize: [32]\n",
        3,
        "there is no setting or limit 'batchsize'. Did you mean batch_size",
    ),
    (MODEL + "factors:\n  batch_size: []\n", 3, "batch_size has no levels"),
    (MODEL + "factors:\n  batch_size: 32\n", 3, "Put it under fixed, or in a list: [32]"),
    (MODEL + "factors:\n  batch_size: {a: 1}\n", 3, "are a list, not names with values"),
    (MODEL + "factors:\n  batch_size: [[32]]\n", 3, "one value is wanted here, not a list"),
    (
        MODEL + "factors:\n  batch_size:\n    - 32\n    - 64\n    - 32\n",
        6,
        "batch_size 32 is there twice",
    ),
    (MODEL + "factors:\n  memory: [8GiB, 8192MiB]\n", 3, "memory 8 GiB is there twice"),
    (MODEL + "factors:\n  memory:\n  - 8GiB\n  - 8XiB\n", 5, "'8XiB' is no size"),
    (MODEL + "factors:\n  memory: [1MiB]\n", 3, "memory 1 MiB is too small"),
    (MODEL + "factors:\n  batch_size: [32, 0]\n", 3, "batch_size 0 is too small. At least 1"),
    (MODEL + "factors:\n  batch_size: [32, big]\n", 3, "batch_size 'big' is no whole number"),
    (MODEL + "factors:\n  batch_size: ['32']\n", 3, "Leave the quotes out"),
    (MODEL + "factors:\n  batch_size: [1:30]\n", 3, "YAML reads 1:30 as 90"),
    (MODEL + "factors:\n  batch_size: [2024-01-01]\n", 3, "as a date"),
    (MODEL + "factors:\n  batch_size: [!!binary YQ==]\n", 3, "of a kind that is not known"),
    (MODEL + "factors:\n  batch_size: [!!python/name:os.system ]\n", 3, "not known here"),
    (MODEL + "factors:\n  batch_size: [!!int a]\n", 3, "'a' cannot be read"),
    (MODEL + "factors:\n  workers: [08]\n", 3, "octal, or text, for YAML: 08. Write 8"),
    (MODEL + "factors:\n  workers: [010]\n", 3, "Write 10"),
    (MODEL + "factors:\n  precision: [fp16, ~]\n", 3, "precision cannot be nothing"),
    (MODEL + "factors:\n  precision: [fp61]\n", 3, "fp61 is not known. Did you mean fp16"),
    (MODEL + "factors:\n  cache: [no]\n", 3, "YAML reads no as false: put it in quotes"),
    (MODEL + "factors:\n  compile: ['yes']\n", 3, "Leave the quotes out"),
    (MODEL + "factors:\n  data: [resident:jepg]\n", 3, "There is no data 'jepg'"),
    (MODEL + "factors:\n  gpus: [-1]\n", 3, "gpus -1 cannot be"),
    (MODEL + "factors:\n  cpus: [.inf]\n", 3, "cpus .inf cannot be"),
    (MODEL + "factors:\n  batch_size: [1" + "0" * 5000 + "]\n", 3, "cannot be read"),
    (MODEL + "fixed: {cpus: 1}\nfactors:\n  cpus: [1, 2]\n", 4, "cpus is fixed already, in line 2"),
    (MODEL + "fixed:\n  cpus: [1, 2]\nfactors: {workers: [0]}\n", 3, "should be one value here"),
    (MODEL + "fixed:\n  cups: 1\nfactors: {workers: [0]}\n", 3, "Did you mean cpus"),
    (MODEL + "fixed: 3\nfactors: {workers: [0]}\n", 2, "fixed should be names with values"),
    (
        MODEL + "fixed:\n  epochs: 1\n  steps: 3\nfactors: {workers: [0]}\n",
        3,
        "epochs and steps were both given. Give one of them",
    ),
    (MODEL + "fixed: {data: own}\nfactors: {workers: [0]}\n", 2, "cnn has no data of its own"),
    (MODEL + "factors: {model: [cnn]}\n", 1, "the model is said twice"),
    (MODEL + "fixed: {model: cnn}\nfactors: {workers: [0]}\n", 1, "the model is said twice"),
    ("workload: 3\nfactors: {workers: [0]}\n", 1, "3 is no model"),
    ("workload: [cnn]\nfactors: {workers: [0]}\n", 1, "one value is wanted here"),
    ("workload: train.py:f\nfactors: {workers: [0]}\n", 1, "There is no file"),
    ("factors: {workers: [0]}\n", 1, "there is no workload"),
    (MODEL, 1, "there are no factors"),
    (MODEL + "factors: {}\n", 2, "there are no factors"),
    (MODEL + "factors:\n", 2, "there are no factors"),
    (START + "factor: {}\n", 4, "a study has no 'factor'. Did you mean factors"),
    (START + "batch_size: 3\n", 4, "Put batch_size under fixed or factors"),
    (START + "  workers: [1]\n", 4, "workers is there twice, first in line 3"),
    (START + "seed: 1\nseed: 2\n", 5, "seed is there twice, first in line 4"),
    (START + "? [a, b]\n: 3\n", 4, "this is no name"),
    (START + "repeats: 0\n", 4, "repeats should be a whole number, at least 1"),
    (START + "repeats: yes\n", 4, "repeats should be a whole number"),
    (START + "repeats: 1.5\n", 4, "repeats should be a whole number"),
    (START + "seed: -1\n", 4, "seed should be a whole number, at least 0"),
    (START + "choose: half\n", 4, "Give full or {random: 40}"),
    (START + "oom: {test: 3/2}\n", 4, "'3/2' is more than all"),
    (START + "oom: {test: 1/0}\n", 4, "'1/0' is no part of a whole"),
    (START + "choose: {random: 0}\n", 4, "random should be a whole number, at least 1"),
    (START + "choose: {rnadom: 2}\n", 4, "choose has no 'rnadom'. Did you mean random"),
    (START + "budget: 1:30\n", 4, "'1:30' is no time. Give 90s, 30 min, 2h"),
    (START + "budget: 2 fortnights\n", 4, "there is no unit 'fortnights'"),
    (START + "budget: {time: 0}\n", 4, "'0' is no time at all"),
    (START + "budget: {time: [1h]}\n", 4, "one value is wanted here, not a list"),
    (START + "budget: {trials: some}\n", 4, "trials should be a whole number, at least 1"),
    (START + "budget: {tiem: 1h}\n", 4, "budget has no 'tiem'. Did you mean time"),
    (START + "blocks: {size: 0}\n", 4, "size should be a whole number, at least 1"),
    (START + "blocks: 8\n", 4, "blocks should be names with values, not one value"),
    (START + "blocks:\n  sentinel:\n    batch: 3\n", 6, "there is no setting or limit 'batch'"),
    (START + "blocks: {sentinel: {workers: -1}}\n", 4, "workers -1 is too small"),
    (START + "blocks: {sentinel: yes}\n", 4, "the sentinel is none, or settings"),
    (START + "oom: {skip: maybe}\n", 4, "skip is true or false"),
    (START + "oom: {test: 2}\n", 4, "'2' is more than all"),
    (START + "name: a/b\n", 4, "'a/b' cannot name a study"),
    (START + "name: ..\n", 4, "'..' cannot name a study"),
    (START + "skip: workers > 2 * cpsu\n", 4, "no setting or limit 'cpsu'. Did you mean cpus"),
    (START + "skip:\n- workers > 1\n- workers = 3\n", 6, "Equal is written =="),
    (START + "skip:\n- because: of that\n", 5, "a rule says when"),
    (START + "skip:\n- {when: workers > 1, becuase: x}\n", 5, "Did you mean because"),
    (START + "skip: true\n", 4, "this is no rule"),
    (START + "skip: [[workers > 1]]\n", 4, "a rule should be names with values, not a list"),
    (START + "skip: |\n  workers > 2\n  and foo > 3\n", 4, "there is no setting or limit 'foo'"),
    (START + "\tseed: 1\n", 4, "Indent with spaces, not with tabs"),
    (START + "  cpus: [1\n", 5, "this is no YAML"),
    (START + "skip: {when: workers in [0, 2], because: x}\n", 4, "needs quotes"),
    (START + "name: a: b\n", 4, "a text with `: ` needs quotes"),
    (START + "seed: *none\n", 4, "undefined alias"),
    (START + "---\nseed: 3\n", 4, "leave out the second ---"),
    (START + "name: a\x07b\n", 4, "special characters are not allowed"),
    ("just text\n", 1, "a study should be names with values, not one value"),
    ("- a\n- b\n", 1, "a study should be names with values, not a list"),
    ("[" * 5000, 1, "nested too deeply"),
]


@pytest.mark.parametrize(("text", "line", "said"), BAD, ids=[said for _, _, said in BAD])
def test_what_cannot_be_used(tmp_path: Path, text: str, line: int, said: str) -> None:
    told = refusal(tmp_path, text)
    first = told.splitlines()[0]
    assert first.startswith(f"cnn.yaml:{line}: ") and said in first
    assert len(re.findall("^cnn.yaml:", told, re.MULTILINE)) == 1, "one mistake is told once"


def test_a_mistake_is_shown_where_it_is(tmp_path: Path) -> None:
    text = START + 'skip:\n  - "workers > 2 * cpsu"\n'
    assert refusal(tmp_path, text).splitlines()[1:] == [
        '      - "workers > 2 * cpsu"',
        "                       ^",
    ]
    assert refusal(tmp_path, MODEL + "factors:\n  workers: [0, 2, -1]\n").splitlines() == [
        "cnn.yaml:3: workers -1 is too small. At least 0",
        "      workers: [0, 2, -1]",
        "                      ^",
    ]
    long = ", ".join(map(str, range(1, 200)))
    shown, caret = refusal(tmp_path, MODEL + f"factors:\n  workers: [{long}, -1]\n").splitlines()[
        1:
    ]
    assert len(shown) <= 100 and shown[len(caret) - 1 :].startswith("-1")


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    text = MODEL + "factors:\n  cups: [1]\n  workers: [0, x]\nrepeats: 0\nskip: foo > 1\n"
    told = re.findall(r"^cnn.yaml:(\d+)", refusal(tmp_path, text), re.MULTILINE)
    assert told == ["3", "4", "5", "6"]
    many = MODEL + "factors:\n" + "".join(f"  knob{number}: [1]\n" for number in range(25))
    told_of_many = refusal(tmp_path, many)
    assert len(re.findall(r"^cnn.yaml:\d+", told_of_many, re.MULTILINE)) == 10
    assert told_of_many.endswith("and 15 more like these")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cnn.yaml is empty"),
        (b"# nothing yet\n", "cnn.yaml is empty"),
        (b"workload: cnn\nname: \xff\n", "cnn.yaml:2: this is not UTF-8"),
        ("workload: cnn\n".encode("utf-16"), "cnn.yaml:1: this is not UTF-8"),
        (b"#" * (MOST_BYTES + 1), "cnn.yaml is larger than 256 KiB"),
        (b"\0" * 100, "cnn.yaml:1: this is no YAML"),
    ],
)
def test_what_is_no_design_at_all(tmp_path: Path, content: bytes, said: str) -> None:
    assert refusal(tmp_path, content).startswith(said)


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(START)
    with pytest.raises(BadDesign, match=r"There is no file .*stduy.yaml. Did you mean study.yaml"):
        read_design(tmp_path / "stduy.yaml")
    with pytest.raises(BadDesign, match="is a folder"):
        read_design(tmp_path)
    with pytest.raises(BadDesign, match="cannot be read"):
        read_design(tmp_path / ("x" * 300))
    with pytest.raises(BadDesign, match="cannot be read"):
        read_design(tmp_path / "study.yaml" / "x")
    assert read(tmp_path, "\ufeff" + START).fixed == {"model": "cnn"}


def test_the_digest_is_of_what_is_tried(tmp_path: Path) -> None:
    digest = trials_text(read(tmp_path, WHOLE))
    for same in (
        WHOLE.replace("repeats: 3", "repeats: 5   # more"),
        WHOLE.replace("time: 2h", "time: 3h"),
        WHOLE.replace("workers > 2 * cpus", "workers>2*cpus"),
        WHOLE.replace("4GiB", "4096MiB"),
        WHOLE.replace("name: cnn-on-two-cores", "name: other"),
    ):
        assert same != WHOLE and trials_text(read(tmp_path, same)) == digest
    for other in (
        WHOLE.replace("[32, 128]", "[32, 64]"),
        WHOLE.replace("2 * cpus", "3 * cpus"),
        WHOLE.replace("seed: 7", "seed: 8"),
        WHOLE.replace("random: 40", "random: 20"),
        WHOLE.replace("seconds: 3", "seconds: 4"),
        WHOLE.replace("sentinel: {batch_size: 32}", "sentinel: none"),
    ):
        assert other != WHOLE and trials_text(read(tmp_path, other)) != digest


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("30 min", 1800),
        ("2h", 7200),
        ("1.5h", 5400),
        ("1h30m", 5400),
        ("1h 30 min", 5400),
        ("2 days", 172_800),
        ("1d2h3m4s", 93_784),
        (".5h", 1800),
        ("1 Hour", 3600),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "h", "1h30", "1:30", "-5s", "0s", "5 x", "1e3s", "inf", "1..5h"]
)
def test_no_durations(text: str) -> None:
    with pytest.raises(ValueError):
        parse_duration(text)


@given(st.integers(0, 10_000), st.integers(1, 10_000))
def test_shares(part: int, whole: int) -> None:
    if part <= whole:
        assert parse_share(f"{part}/{whole}") == parse_share(f"{part} / {whole}") == part / whole
    else:
        with pytest.raises(ValueError):
            parse_share(f"{part}/{whole}")
    assert parse_share("0.25") == parse_share("25%") == parse_share(".25") == 0.25


_LEVELS: dict[str, st.SearchStrategy[Any]] = {
    "batch_size": st.integers(1, 10**6),
    "workers": st.integers(0, 64),
    "lr": st.floats(1e-9, 100),
    "precision": st.sampled_from(["fp32", "tf32", "bf16", "fp16"]),
    "compile": st.booleans(),
    "pin": st.booleans() | st.none(),
    "cpus": st.floats(0.25, 512),
    "memory": st.integers(64 << 20, 1 << 42) | st.none(),
    "data": st.sampled_from(["jpeg", "resident", "loader-only:text"]),
    "data_path": st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
    "model": st.sampled_from(["cnn", "lstm", "resnet18"]),
    "gpus": st.integers(0, 8) | st.just("0,2"),
}
_FACTORS = st.lists(st.sampled_from(sorted(_LEVELS)), min_size=1, unique=True).flatmap(
    lambda names: st.fixed_dictionaries(
        {name: st.lists(_LEVELS[name], min_size=1, max_size=5, unique=True) for name in names}
    )
)
_IN_A_FOLDER = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60
)


@_IN_A_FOLDER
@given(factors=_FACTORS, flow=st.booleans())
@example(factors={"data_path": ["0E0", "08"]}, flow=False)
def test_any_factors_come_back(tmp_path: Path, factors: dict[str, list[Any]], flow: bool) -> None:
    told = {"factors": factors, **({} if "model" in factors else {"workload": "cnn"})}
    design = read(tmp_path, yaml.safe_dump(told, default_flow_style=flow, sort_keys=False))
    assert {factor.name: list(factor.levels) for factor in design.factors} == factors
    assert [factor.name for factor in design.factors] == list(factors)


_PIECES = st.sampled_from(
    [
        "workload: cnn",
        "factors:",
        "  workers: [0, 1]",
        "fixed:",
        "skip:",
        "- ",
        "{",
        "}",
        "[",
        "]",
        ":",
        "&a ",
        "*a",
        "<<: *a",
        "!!set",
        "? ",
        "|",
        ">",
        "'",
        '"',
        "\t",
        "\n",
        "  ",
        "~",
        "08",
        "1e3",
        "#",
        "choose: ",
        "budget: ",
        "blocks: ",
        "sentinel: ",
        "model",
        "when: ",
        '"\\0"',
        "a.py:f",
        "a" * 300,
    ]
)


@_IN_A_FOLDER
@given(text=st.text(max_size=200) | st.lists(_PIECES, max_size=30).map("".join))
@example("workload: &a [*a]\nfactors: &b {<<: *b, workers: *a}")
@example('workload: "\\0.py:f"\nfactors: {workers: [1]}')
@example("workload: " + "a/" * 300 + "b.py:f\nfactors: {workers: [1]}")
@example('name: "\\U00110000"')
@example("a: !!timestamp 2024-99-99\nrepeats: 2024-99-99\n? !!float x\n: y")
@example("seed: !!float abc\nrepeats: 0b\nfactors: {lr: [0x, 1__0, .e1, -.nan]}")
def test_any_text_is_a_design_or_told_to_be_none(tmp_path: Path, text: str) -> None:
    try:
        design = read(tmp_path, text.encode("utf-8", "surrogatepass"))
    except BadDesign:
        return
    assert design.factors and all(factor.levels for factor in design.factors)


@_IN_A_FOLDER
@given(st.binary(max_size=100))
def test_any_bytes_too(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(BadDesign):
        read(tmp_path, content)
