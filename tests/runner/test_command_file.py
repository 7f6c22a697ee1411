"""Flags of `sparkhvdrun` from a file in horovodrun's form."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.runner.command import _parser, _variables, flags_of, main

pytestmark = pytest.mark.pure

CONFIG = """
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 5
  hierarchical_allreduce: true
autotune:
  enabled: true
  log_file: out.txt
timeline:
  filename: out.json
  mark_cycles: yes
stall_check:
  enabled: false
library_options:
  num_nccl_streams: 2
logging:
  level: INFO
  with_timestamp: false
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def test_a_config_file_sets_options_that_flags_override(config: Path) -> None:
    parser = _parser()
    parser.set_defaults(**flags_of(str(config), vars(parser.parse_args([]))))
    parsed = parser.parse_args(["--timeline-filename", "mine.json", "--no-autotune"])
    assert _variables(parsed) == {
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
        "HOROVOD_TIMELINE": "mine.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_AUTOTUNE": "0",
        "SPARKHVD_STALL_WARNING_S": "0",
        "SPARKHVD_STALL_SHUTDOWN_S": "0",
    }


def test_config_file_options_without_effect_are_reported_by_flag(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-np", "1", "--config-file", str(config), "/no/program"]) == 2
    said = capsys.readouterr().err
    ignored = [line.split()[1] for line in said.splitlines() if "has no effect" in line]
    assert ignored == [
        "--cycle-time-ms",
        "--hierarchical-allreduce",
        "--num-nccl-streams",
        "--gloo",
        "--log-level",
        "--autotune-log-file",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("params: {no_such: 1}", "has params.no_such, which is no option"),
        ("other: {a: 1}", "has the section 'other'"),
        ("- 1", "has no sections; it must have sections, such as"),
        ("# a comment", "is empty; it must have sections, such as"),
        (
            "params: {fusion_threshold_mb: -1}",
            "fusion_threshold_mb is -1; it must be a number of 0",
        ),
        ("params: {fusion_threshold_mb: [1]}", r"is \[1\]; it must be one number"),
        ("params: {fusion_threshold_mb: .nan}", "is nan; it must be a number of 0"),
        ("controller: [gloo]", "it must be a name such as gloo"),
        ("params: 3", "has the section 'params'"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_wrong_config_file_raises_a_clear_error(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=problem):
        flags_of(str(path), vars(_parser().parse_args([])))


def test_error_names_missing_pyyaml(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(InvalidArgumentError, match="needs PyYAML"):
        flags_of(str(config), ())
