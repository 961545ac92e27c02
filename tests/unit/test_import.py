"""Importing stepscope is fast and does not import large packages."""

from __future__ import annotations

import subprocess
import sys

LARGE = ("pyarrow", "numpy", "pandas", "torch", "tensorflow", "jax", "keras", "rich", "typer")


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_fast() -> None:
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


def test_import_does_not_import_large_packages() -> None:
    program = f"""
import sys, stepscope
stepscope.mark("epoch", 1)
with stepscope.phase("eval"): pass
print([name for name in {LARGE!r} if name in sys.modules])
"""
    assert run(program) == "[]"


def test_every_public_name_exists() -> None:
    assert run("import stepscope; [getattr(stepscope, n) for n in stepscope.__all__]") == ""
    assert "AttributeError" in run(
        "import stepscope\ntry: stepscope.nonsense\nexcept AttributeError as e: print(repr(e))"
    )


def test_function_is_not_shadowed_by_the_package_with_its_name() -> None:
    for first in ("stepscope.fit.result", "stepscope.api", "stepscope"):
        assert run(f"import stepscope, {first}; print(stepscope.fit.__module__)") == "stepscope.api"


def test_trials_do_not_import_a_framework() -> None:
    """The runner never imports one, and the process of a trial imports it as late as possible."""
    frameworks = LARGE[3:7]
    program = "import sys, stepscope.api; print([n for n in {names!r} if n in sys.modules])"
    assert run(program.format(names=frameworks)) == "[]"
    child = "import sys, stepscope.trials.child; print([n for n in {names!r} if n in sys.modules])"
    assert run(child.format(names=LARGE)) == "[]"
