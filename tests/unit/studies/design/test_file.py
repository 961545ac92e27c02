"""The design file: valid designs, and the messages for invalid ones."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stepscope.errors import DesignError
from stepscope.studies.design.file import (
    KEYS,
    parse_duration,
    parse_share,
    read_design,
    trials_text,
)
from stepscope.studies.design.nodes import MAX_BYTES
from stepscope.studies.design.points import points_of
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
  - {when: "memory < '2GiB'", reason: too small}
repeats: 3
choose: {random: 40}
seed: 7
budget: {time: 2h, trials: 200}
blocks: {size: 4, reruns: 2, reference: {batch_size: 32}}
oom: {skip: no, test: 10%}
"""


def read(folder: Path, text: str | bytes, name: str = "cnn.yaml") -> Design:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_design(file)


def error_text(folder: Path, text: str | bytes) -> str:
    with pytest.raises(DesignError) as error:
        read(folder, text)
    assert error.value.exit_code == 6
    return str(error.value).replace(f"{folder}/", "")


def test_every_key(tmp_path: Path) -> None:
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
    assert [(rule.plain, rule.line, rule.reason) for rule in design.rules] == [
        ("workers > 2 * cpus", 13, ""),
        ("memory < '2GiB'", 14, "too small"),
    ]
    assert design.sample == 40
    assert design.budget == Budget(7200.0, 200)
    assert (design.block, design.reruns, design.reference) == (4, 2, {"batch_size": 32})
    assert design.with_reference and not design.skip_dominated and design.tested_share == 0.1
    assert design.file == tmp_path / "cnn.yaml" and design.text == WHOLE


def test_minimal_designs(tmp_path: Path) -> None:
    design = read(tmp_path, "factors: {model: [cnn, lstm]}\nskip: workers > 2\nbudget: 30 min\n")
    assert design.name == "cnn" and design.fixed == {} and design.repeats == 1
    assert design.budget == Budget(1800.0) and len(design.rules) == 1 and design.sample is None
    assert design.with_reference and design.reference is None and design.skip_dominated
    for off in ("none", "~", "no"):
        text = f"workload: cnn\nfactors: {{workers: [0, 1]}}\nblocks: {{reference: {off}}}\n"
        assert not read(tmp_path, text).with_reference


def test_empty_keys_are_ignored(tmp_path: Path) -> None:
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
        "blocks: {reference: {<<: *base, cpus: 1}}\n",
    )
    assert design.reference == {"cpus": 1.0, "seconds": 3.0}


def test_custom_workloads_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def workload():\n    raise SystemExit('imported')\n")
    text = "workload: train.py:{}\nfactors: {{batch_size: [1, 2]}}\n"
    assert read(tmp_path, text.format("workload")).fixed == {"model": "train.py:workload"}
    message = error_text(tmp_path, text.format("wrokload"))
    assert message.startswith("cnn.yaml:1: ") and "'wrokload'" in message
    assert re.search(r"Did you mean '?workload'?\?", message)
    message = error_text(tmp_path, "factors:\n  model: [cnn, tain.py:workload]\n")
    assert message.startswith("cnn.yaml:2: ") and "tain.py" in message
    assert re.search(r"Did you mean '?train.py'?\?", message)
    (tmp_path / "script.py").write_text("import torch\nfor x in range(3):\n    loss.backward()\n")
    message = error_text(tmp_path, "workload: script.py:workload\nfactors: {workers: [0, 1]}\n")
    assert "train" in message.splitlines()[0] and "if __name__" in message


def test_models_of_other_frameworks_and_of_finished_studies_are_not_checked(tmp_path: Path) -> None:
    for framework in ("fixed: {framework: a.py:A}", "factors: {framework: [torch, a.py:A]}"):
        text = f"workload: mlp\n{framework}\n"
        text += "factors: {workers: [0]}\n" if "fixed" in framework else ""
        assert read(tmp_path, text).fixed["model"] == "mlp"
    (tmp_path / "kept.yaml").write_text("workload: resnet9000\nfactors: {workers: [0]}\n")
    design = read_design(tmp_path / "kept.yaml", is_kept=True)
    assert [spec.workload.model for spec in points_of(design).chosen] == ["resnet9000"]


MODEL = "workload: cnn\n"
START = MODEL + "factors:\n  workers: [0, 2]\n"

INVALID: list[tuple[str, int, str]] = [
    (
        MODEL + "factors:\n  batchsize: [32]\n",
        3,
        "Unknown setting or limit 'batchsize'. Did you mean ",
    ),
    (
        MODEL + "factors:\n  batch_size: []\n",
        3,
        "`batch_size` has no levels. Add levels, or remove `batch_size`",
    ),
    (
        MODEL + "factors:\n  batch_size: 32\n",
        3,
        "Expected a list of levels for `batch_size`, found a number. Move it to `fixed`, or write "
        "[32]",
    ),
    (
        MODEL + "factors:\n  batch_size: {a: 1}\n",
        3,
        "Expected a list of levels for `batch_size`, found a mapping. For example, [32, 128]",
    ),
    (MODEL + "factors:\n  batch_size: [[32]]\n", 3, "Expected a single value, found a list"),
    (
        MODEL + "factors:\n  batch_size:\n    - 32\n    - 64\n    - 32\n",
        6,
        "Duplicate level 32 of `batch_size`",
    ),
    (MODEL + "factors:\n  memory: [8GiB, 8192MiB]\n", 3, "Duplicate level 8 GiB of `memory`"),
    (MODEL + "factors:\n  memory:\n  - 8GiB\n  - 8XiB\n", 5, "8XiB"),
    (MODEL + "factors:\n  memory: [1MiB]\n", 3, "64 MiB"),
    (MODEL + "factors:\n  batch_size: [32, 0]\n", 3, "batch_size"),
    (MODEL + "factors:\n  batch_size: [32, big]\n", 3, "big"),
    (MODEL + "factors:\n  batch_size: ['32']\n", 3, "Remove the quotes"),
    (MODEL + "factors:\n  batch_size: [1:30]\n", 3, "YAML reads 1:30 as 90"),
    (MODEL + f"factors:\n  batch_size: [1{':59' * 3000}]\n", 3, "Invalid value '1:59:59"),
    (
        MODEL + "factors:\n  batch_size: [2024-01-01]\n",
        3,
        "YAML reads 2024-01-01 as a date. Put it in quotes if it is text",
    ),
    (MODEL + "factors:\n  batch_size: [!!binary YQ==]\n", 3, "Unsupported YAML type for 'YQ=='"),
    (MODEL + "factors:\n  batch_size: [!!python/name:os.system ]\n", 3, "Unsupported YAML type"),
    (MODEL + "factors:\n  batch_size: [!!int a]\n", 3, "Invalid value 'a'"),
    (
        MODEL + "factors:\n  workers: [08]\n",
        3,
        "YAML reads 08 as an octal number or as text. Write 8",
    ),
    (MODEL + "factors:\n  workers: [010]\n", 3, "Write 10"),
    (
        MODEL + "factors:\n  precision: [fp16, ~]\n",
        3,
        "`precision` must not be null. Remove it to use the default",
    ),
    (MODEL + "factors:\n  precision: [fp61]\n", 3, "fp61"),
    (MODEL + "factors:\n  page_cache: [no]\n", 3, "YAML reads no as false: put it in quotes"),
    (MODEL + "factors:\n  compile: ['yes']\n", 3, "Remove the quotes"),
    (MODEL + "factors:\n  data: [resident:jepg]\n", 3, "'jepg'. Did you mean "),
    (
        MODEL + "factors:\n  gpus: [-1]\n",
        3,
        "Invalid value -1 for `gpus`. Use a number of GPUs, or a list of them in quotes such as",
    ),
    (
        MODEL + "factors:\n  cpus: [.inf]\n",
        3,
        "Invalid value .inf for `cpus`. Use a number of CPUs such as 2 or 1.5",
    ),
    (MODEL + "factors:\n  batch_size: [1" + "0" * 5000 + "]\n", 3, "Invalid value '1000"),
    (
        MODEL + "fixed: {cpus: 1}\nfactors:\n  cpus: [1, 2]\n",
        4,
        "`cpus` is set in both `fixed` (line 2) and `factors`. Remove one of them",
    ),
    (
        MODEL + "fixed:\n  cpus: [1, 2]\nfactors: {workers: [0]}\n",
        3,
        "Expected a single value for `cpus`, found a list. Move it to `factors` to vary it",
    ),
    (MODEL + "fixed:\n  cups: 1\nfactors: {workers: [0]}\n", 3, "'cups'. Did you mean "),
    (
        MODEL + "fixed: 3\nfactors: {workers: [0]}\n",
        2,
        "Expected a mapping for `fixed`, found a number",
    ),
    (
        MODEL + "fixed:\n  epochs: 1\n  steps: 3\nfactors: {workers: [0]}\n",
        3,
        "steps",
    ),
    (MODEL + "fixed: {data: custom}\nfactors: {workers: [0]}\n", 2, "cnn"),
    (
        MODEL + "factors: {model: [cnn]}\n",
        1,
        "The model is set by both `workload` and `model`. Remove `workload` if `model` is a factor",
    ),
    (
        MODEL + "fixed: {model: cnn}\nfactors: {workers: [0]}\n",
        1,
        "The model is set by both `workload` and `model`",
    ),
    ("workload: 3\nfactors: {workers: [0]}\n", 1, "Invalid model 3"),
    ("workload: [cnn]\nfactors: {workers: [0]}\n", 1, "Expected a single value, found a list"),
    ("workload: train.py:f\nfactors: {workers: [0]}\n", 1, "train.py"),
    ("factors: {workers: [0]}\n", 1, "`workload` is missing. Set it, for example `workload: cnn`"),
    (
        MODEL,
        1,
        "`factors` is missing: a study needs at least one factor. For example, "
        "`factors: {batch_size: [32, 128]}`",
    ),
    (MODEL + "factors: {}\n", 2, "`factors` is empty: a study needs at least one factor"),
    (MODEL + "factors:\n", 2, "`factors` is empty: a study needs at least one factor"),
    (START + "factor: {}\n", 4, "Unknown key 'factor'. Did you mean "),
    (
        START + "batch_size: 3\n",
        4,
        "Unknown key 'batch_size'. Move `batch_size` to `fixed` or `factors`",
    ),
    (START + "  workers: [1]\n", 4, "Duplicate key 'workers', first set on line 3"),
    (START + "seed: 1\nseed: 2\n", 5, "Duplicate key 'seed', first set on line 4"),
    (START + "? [a, b]\n: 3\n", 4, "Invalid key in the design: expected a name"),
    (START + "repeats: 0\n", 4, "`repeats` must be an integer from 1 to 1,000"),
    (START + "repeats: yes\n", 4, "`repeats` must be an integer"),
    (START + "repeats: 1.5\n", 4, "`repeats` must be an integer"),
    (START + "seed: -1\n", 4, "`seed` must be an integer of at least 0"),
    (START + "choose: half\n", 4, "Invalid value for `choose`. Use full or {random: 40}"),
    (START + "oom: {test: 3/2}\n", 4, "Invalid share '3/2': it must not be greater than 1"),
    (START + "oom: {test: 1/0}\n", 4, "Invalid share '1/0'. Use 1/2, 0.5 or 50%"),
    (START + "choose: {random: 0}\n", 4, "`random` must be an integer of at least 1"),
    (START + "choose: {rnadom: 2}\n", 4, "Unknown key 'rnadom' in `choose`. Did you mean "),
    (START + "budget: 1:30\n", 4, "Invalid duration '1:30'. Use 90s, 30 min, 2h, 1.5h, 1h30m or a"),
    (START + "budget: 2 fortnights\n", 4, "unknown unit 'fortnights'"),
    (START + "budget: {time: 0}\n", 4, "Invalid duration '0': it must be greater than 0"),
    (START + "budget: {time: [1h]}\n", 4, "Expected a single value, found a list"),
    (START + "budget: {trials: some}\n", 4, "`trials` must be an integer of at least 1"),
    (START + "budget: {tiem: 1h}\n", 4, "Unknown key 'tiem' in `budget`. Did you mean "),
    (START + "blocks: {size: 0}\n", 4, "`size` must be an integer of at least 1"),
    (START + "blocks: 8\n", 4, "Expected a mapping for `blocks`, found a number"),
    (START + "blocks:\n  reference:\n    batch: 3\n", 6, "Unknown setting or limit 'batch'"),
    (START + "blocks: {reference: {workers: -1}}\n", 4, "workers"),
    (
        START + "blocks: {reference: yes}\n",
        4,
        "`reference` must be `none` or a mapping. For example, `reference: {batch_size: 32}`",
    ),
    (START + "oom: {skip: maybe}\n", 4, "`skip` must be true or false"),
    (START + "oom: {test: 2}\n", 4, "Invalid share '2': it must not be greater than 1"),
    (START + "name: a/b\n", 4, "Invalid study name 'a/b'"),
    (START + "name: ..\n", 4, "Invalid study name '..'"),
    (START + "skip: workers > 2 * cpsu\n", 4, "Unknown setting or limit 'cpsu'. Did you mean "),
    (START + "skip:\n- workers > 1\n- workers = 3\n", 6, "Use == to test for equality"),
    (START + "skip:\n- reason: of that\n", 5, "`when` is missing from the rule"),
    (
        START + "skip:\n- {when: workers > 1, reason: [x]}\n",
        5,
        "Expected text for `reason`, found a",
    ),
    (START + "skip:\n- {when: workers > 1, raeson: x}\n", 5, "Unknown key 'raeson' in a rule"),
    (START + "skip: true\n", 4, "Expected a rule, found a boolean"),
    (START + "skip: [[workers > 1]]\n", 4, "Expected a mapping for a rule, found a list"),
    (START + "skip: |\n  workers > 2\n  and foo > 3\n", 4, "Unknown setting or limit 'foo'"),
    (START + "\tseed: 1\n", 4, "Indent with spaces, not tabs"),
    (START + "  cpus: [1\n", 4, "<stream end>'. Close this bracket"),
    (
        START + "skip: {when: workers in [0, 2], reason: x}\n",
        4,
        "put text that contains brackets in quotes",
    ),
    (START + "name: a: b\n", 4, "text with `: ` needs quotes"),
    (START + "seed: *none\n", 4, "undefined alias"),
    (START + "---\nseed: 3\n", 4, "remove the second ---"),
    (START + "name: a\x07b\n", 4, "special characters are not allowed"),
    ("just text\n", 1, "Expected a mapping for the design, found text"),
    ("- a\n- b\n", 1, "Expected a mapping for the design, found a list"),
    ("[" * 5000, 1, "The YAML is nested too deeply"),
]


@pytest.mark.parametrize(("text", "line", "expected"), INVALID, ids=[each[2] for each in INVALID])
def test_invalid_designs(tmp_path: Path, text: str, line: int, expected: str) -> None:
    message = error_text(tmp_path, text)
    first = message.splitlines()[0]
    assert first.startswith(f"cnn.yaml:{line}: ") and expected in first
    assert len(re.findall("^cnn.yaml:", message, re.MULTILINE)) == 1, "one problem, one message"


def test_an_error_shows_the_line_with_a_caret(tmp_path: Path) -> None:
    text = START + 'skip:\n  - "workers > 2 * cpsu"\n'
    assert error_text(tmp_path, text).splitlines()[1:] == [
        '      - "workers > 2 * cpsu"',
        "                       ^",
    ]
    assert error_text(tmp_path, MODEL + "factors:\n  workers: [0, 2, x-1]\n").splitlines()[1:] == [
        "      workers: [0, 2, x-1]",
        "                      ^",
    ]
    long = ", ".join(map(str, range(1, 200)))
    message = error_text(tmp_path, MODEL + f"factors:\n  workers: [{long}, -1]\n")
    _, shown, caret = message.splitlines()
    assert len(shown) <= 100 and shown[len(caret) - 1 :].startswith("-1")


def test_all_errors_are_reported_together(tmp_path: Path) -> None:
    text = MODEL + "factors:\n  cups: [1]\n  workers: [0, x]\nrepeats: 0\nskip: foo > 1\n"
    lines = re.findall(r"^cnn.yaml:(\d+)", error_text(tmp_path, text), re.MULTILINE)
    assert lines == ["3", "4", "5", "6"]
    many = MODEL + "factors:\n" + "".join(f"  setting{number}: [1]\n" for number in range(25))
    message = error_text(tmp_path, many)
    assert len(re.findall(r"^cnn.yaml:\d+", message, re.MULTILINE)) == 10
    assert message.endswith("and 15 more errors")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "cnn.yaml is empty"),
        (b"# nothing yet\n", "cnn.yaml is empty"),
        (b"workload: cnn\nname: \xff\n", "cnn.yaml:2: Invalid UTF-8"),
        ("workload: cnn\n".encode("utf-16"), "cnn.yaml:1: Invalid UTF-8"),
        (b"#" * (MAX_BYTES + 1), "cnn.yaml is larger than 256 KiB"),
        (b"\0" * 100, "cnn.yaml:1: YAML syntax error"),
    ],
)
def test_files_that_are_not_a_design(tmp_path: Path, content: bytes, expected: str) -> None:
    assert error_text(tmp_path, content).startswith(expected)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(START)
    with pytest.raises(
        DesignError, match=r"No such file: .*stduy.yaml. Did you mean '?study.yaml'?\?"
    ):
        read_design(tmp_path / "stduy.yaml")
    with pytest.raises(DesignError, match="is a folder"):
        read_design(tmp_path)
    with pytest.raises(DesignError, match="Cannot read"):
        read_design(tmp_path / ("x" * 300))
    with pytest.raises(DesignError, match="Cannot read"):
        read_design(tmp_path / "study.yaml" / "x")
    assert read(tmp_path, "\ufeff" + START).fixed == {"model": "cnn"}


def test_trials_text_depends_only_on_the_trials(tmp_path: Path) -> None:
    expected = trials_text(read(tmp_path, WHOLE))
    for same in (
        WHOLE.replace("repeats: 3", "repeats: 5   # more"),
        WHOLE.replace("time: 2h", "time: 3h"),
        WHOLE.replace("workers > 2 * cpus", "workers>2*cpus"),
        WHOLE.replace("4GiB", "4096MiB"),
        WHOLE.replace("name: cnn-on-two-cores", "name: other"),
    ):
        assert same != WHOLE and trials_text(read(tmp_path, same)) == expected
    for other in (
        WHOLE.replace("[32, 128]", "[32, 64]"),
        WHOLE.replace("2 * cpus", "3 * cpus"),
        WHOLE.replace("seed: 7", "seed: 8"),
        WHOLE.replace("random: 40", "random: 20"),
        WHOLE.replace("seconds: 3", "seconds: 4"),
        WHOLE.replace("reference: {batch_size: 32}", "reference: none"),
    ):
        assert other != WHOLE and trials_text(read(tmp_path, other)) != expected


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
def test_invalid_durations(text: str) -> None:
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
def test_any_factors_are_read_unchanged(
    tmp_path: Path, factors: dict[str, list[Any]], flow: bool
) -> None:
    content = {"factors": factors, **({} if "model" in factors else {"workload": "cnn"})}
    design = read(tmp_path, yaml.safe_dump(content, default_flow_style=flow, sort_keys=False))
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
        "reference: ",
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
def test_any_text_is_a_design_or_a_design_error(tmp_path: Path, text: str) -> None:
    try:
        design = read(tmp_path, text.encode("utf-8", "surrogatepass"))
    except DesignError:
        return
    assert design.factors and all(factor.levels for factor in design.factors)


@_IN_A_FOLDER
@given(st.binary(max_size=100))
def test_random_bytes_are_a_design_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DesignError):
        read(tmp_path, content)
