"""Code blocks of README.md and of every page run as a reader would run them (`tests/harness/pages.py`).

Programs are found automatically: a new page needs no line here. Programs without Spark run in one job of two ranks, a few
with Spark in the shared session. `make soak` runs every program in its own process, and `make test-users` runs the programs
that import libraries outside of the extra `test`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import io
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sparkhvd.runner import run_local
from tests.harness.by_value import by_value
from tests.harness.pages import ALL, Program
from tests.harness.soak import soak
from tests.harness.spark import run_here, run_script

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

travels_by_value = by_value(__name__)

# Not in the extra `test`, so programs that need them may be skipped.
LIBRARIES = {"fastapi", "mlflow", "onnxruntime", "peft", "tensorboard", "transformers", "uvicorn"}
# Programs that run only in `make soak` because they take long, except these.
ALWAYS = ("README.md", "docs/quickstart.md", "docs/datasets.md:petastorm")
# Programs without Spark that only `make soak` runs, each with the tests that run instead.
LEFT_TO_SOAK = {
    "docs/coming_from_ddp.md:before": "plain torch without sparkhvd; each rank would import the compiler",
    "docs/lightning.md:trainer": "lightning/test_page: this very program",
    "docs/lightning.md:fabric": "lightning/test_page: this very program",
}
RANK_TIMEOUT_S = 80.0


def plain(program: Program) -> bool:
    return not program.modules & LIBRARIES


WITHOUT_SPARK = [program for program in ALL if not program.uses_spark and plain(program)]
WITH_SPARK = [program for program in ALL if program.uses_spark and plain(program)]
IN_SESSION = [program for program in WITH_SPARK if program.title.startswith(ALWAYS)]
OF_LIBRARIES = [program for program in ALL if not plain(program)]


# --- Output of programs. ---


def check_readme(output: str) -> None:
    assert re.findall(r"^epoch (\d)/3 ", output, re.MULTILINE) == ["1", "2", "3"]
    assert number(r"^r2 ([\d.]+)$", output) > 0.9
    assert "|prediction|" in output.replace(" ", "")


def check_tabular(output: str) -> None:
    assert number(r"^area under ROC ([\d.]+)$", output) > 0.9
    assert "|prediction|" in output


def check_quickstart(output: str) -> None:
    assert re.findall(r"^epoch (\d)/5 ", output, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    for name in ("area under ROC", "accuracy"):
        assert number(rf"^{name} ([\d.]+)$", output) > 0.95
    assert output.count("|left|") == 2  # of the model, and of the loaded one
    assert "val_accuracy" in output


def check_search(output: str) -> None:
    errors = [float(x) for x in re.findall(r"^rate [\d.]+ rmse ([\d.e-]+)$", output, re.MULTILINE)]
    assert errors[1] < errors[0]


def check_distributor(output: str) -> None:
    first, second = map(float, output.split()[-2:])
    assert first == pytest.approx(second, rel=1e-4)


def check_training(output: str) -> None:
    """Every level prints its epochs, and its loss decreases."""
    losses = [float(x) for x in re.findall(r"^epoch .* val_loss (\S+)", output, re.MULTILINE)]
    assert len(losses) == 9
    for level in range(3):
        assert losses[3 * level + 2] < losses[3 * level]
    assert "'mae': " in output
    epochs, good = re.findall(r"^(\d+) ([\d.]+)$", output, re.MULTILINE)[-1]
    assert 1 <= int(epochs) < 50
    assert good == "1.0"
    assert "y__output" in output


def check_models(output: str) -> None:
    for column in ("mean", "y__output", "output"):
        assert re.search(rf"\| +{column}\|", output), output
    assert float(output.split()[-1]) < 1e-6


CHECKS: dict[str, Callable[[str], None]] = {
    "README.md": check_readme,
    "README.md:loop": lambda output: in_text("[0.5, 0.5]", output),
    "README.md:ddp": lambda output: in_text("[2, 2]", output),
    "docs/tabular.md": check_tabular,
    "docs/quickstart.md": check_quickstart,
    "docs/pipelines.md": check_search,
    "docs/coming_from_ddp.md:sparkhvd": check_distributor,
    "docs/resume.md": lambda output: in_text("[1, 2, 3, 4, 5]", output),
    "docs/serving.md": lambda output: in_text("\n2000\n", output),
    "docs/training.md": check_training,
    "docs/models.md": check_models,
}


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text, re.MULTILINE)
    assert found, f"no {pattern!r} in:\n{text}"
    return float(found[1])


def in_text(part: str, text: str) -> None:
    assert part in text


def check(program: Program, output: str) -> None:
    CHECKS.get(program.title, lambda _: None)(output)


def test_every_check_belongs_to_a_program_of_the_pages() -> None:
    assert {*CHECKS, *LEFT_TO_SOAK} <= {program.title for program in ALL}
    assert len({program.title for program in ALL}) == len(ALL)


# --- Ways to run. ---


def in_folder(program: Program, folder: Path) -> str:
    return program.text.replace("/tmp/", f"{folder}/")


def title(program: Program) -> str:
    return program.title


@pytest.mark.parametrize("program", IN_SESSION, ids=title)
def test_page_program_runs_in_the_shared_session(
    program: Program, spark: SparkSession, tmp_path: Path
) -> None:
    """The program runs in this process, where its `getOrCreate` finds a session of the same master."""
    check(program, run_here(spark, in_folder(program, tmp_path), tmp_path))


def run_in_turn(programs: list[tuple[str, str]], folder: str) -> dict[str, str]:
    """Run programs one after the other on a rank, and return the tracebacks of those that failed."""
    import torch.distributed as dist

    import sparkhvd.torch as hvd

    faulthandler.dump_traceback_later(RANK_TIMEOUT_S, exit=True)
    failed = {}
    for number, (name, text) in enumerate(programs):
        # `start.py` reads its arguments, and each program needs its own port.
        sys.argv[:] = [name]
        here = Path(folder, str(number))
        here.mkdir(exist_ok=True)
        os.chdir(here)
        before = dict(os.environ)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(text, name, "exec"), {"__name__": "__page__"})  # noqa: S102
            if dist.is_initialized():
                dist.destroy_process_group()
        except BaseException:  # noqa: BLE001 - of a reader's program
            failed[name] = traceback.format_exc()
            break  # the other rank may wait for this one
        finally:
            hvd.shutdown()
            os.environ.clear()
            os.environ.update(before)
    faulthandler.cancel_dump_traceback_later()
    return failed


@pytest.mark.timeout(100)
@pytest.mark.usefixtures("zygote_has_torch")
def test_page_programs_without_spark_run_on_two_ranks(tmp_path: Path) -> None:
    programs = [
        (program.title, in_folder(program, tmp_path))
        for program in WITHOUT_SPARK
        if program.title not in LEFT_TO_SOAK
    ]
    env = {"OMP_NUM_THREADS": "1"}
    failed = run_local(run_in_turn, (programs, str(tmp_path)), num_proc=2, env=env)
    assert failed == [{}, {}]


def run_alone(program: Program, folder: Path, timeout_s: float) -> None:
    script = folder / "program.py"
    script.write_text(in_folder(program, folder))
    result = run_script(script, timeout_s=timeout_s)
    assert result.returncode == 0, result.output
    check(program, result.output)


@soak("in a session, or in one job: here; the same calls in estimator and training")
@pytest.mark.timeout(320)
@pytest.mark.parametrize("program", [*WITH_SPARK, *WITHOUT_SPARK], ids=title)
def test_page_program_runs_in_a_separate_process(program: Program, tmp_path: Path) -> None:
    run_alone(program, tmp_path, 300)


@soak("tests/soak/users has the same libraries; tests/estimator the same Params")
@pytest.mark.timeout(320)
@pytest.mark.parametrize("program", OF_LIBRARIES, ids=title)
def test_page_program_with_an_optional_library_runs(program: Program, tmp_path: Path) -> None:
    for name in sorted(program.modules & LIBRARIES):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not here: make test-users")
    run_alone(program, tmp_path, 300)


def test_readme_example_has_about_twenty_lines() -> None:
    (program,) = [program for program in ALL if program.title == "README.md"]
    assert len([line for line in program.text.splitlines() if line.strip()]) <= 22
