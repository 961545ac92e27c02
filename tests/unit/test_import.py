"""Importing stepscope is quick and brings nothing heavy."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("pyarrow", "numpy", "pandas", "torch", "tensorflow", "jax", "keras", "rich", "typer")


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_quick() -> None:
    times = [
        float(
            run(
                "import time; t = time.process_time(); import stepscope, stepscope.marks;"
                "print(time.process_time() - t)"
            )
        )
        for _ in range(3)
    ]
    assert min(times) < 0.2


def test_import_brings_nothing_heavy() -> None:
    program = f"""
import sys, stepscope
stepscope.mark("epoch", 1)
with stepscope.phase("eval"): pass
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    assert run(program) == "[]"


def test_every_public_name_is_there() -> None:
    assert run("import stepscope; [getattr(stepscope, n) for n in stepscope.__all__]") == ""
    assert "AttributeError" in run(
        "import stepscope\ntry: stepscope.nonsense\nexcept AttributeError as e: print(repr(e))"
    )


def test_a_function_is_not_hidden_by_the_package_of_its_name() -> None:
    for first in ("stepscope.fit.answer", "stepscope.api", "stepscope"):
        assert run(f"import stepscope, {first}; print(stepscope.fit.__module__)") == "stepscope.api"


def test_trials_are_run_without_a_framework() -> None:
    """The runner never imports one, and a trial's own process not before it must."""
    frameworks = HEAVY[3:7]
    program = "import sys, stepscope.api; print([n for n in {names!r} if n in sys.modules])"
    assert run(program.format(names=frameworks)) == "[]"
    child = "import sys, stepscope.trials.child; print([n for n in {names!r} if n in sys.modules])"
    assert run(child.format(names=HEAVY)) == "[]"
