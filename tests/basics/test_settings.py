"""Sources of settings, and errors for invalid settings."""

from __future__ import annotations

import warnings
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.settings import JobSettings, RankSettings, Settings, conf_keys, markdown_table

pytestmark = pytest.mark.pure


def test_settings_have_defaults_without_variables() -> None:
    assert Settings.resolve({}) == Settings()


def test_environment_overrides_default_and_code_overrides_environment() -> None:
    environ = {"SPARKHVD_SPIN_US": "7"}
    assert Settings.resolve(environ).spin_us == 7
    with pytest.warns(UserWarning, match="spin_us") as caught:
        assert Settings.resolve(environ, spin_us=9).spin_us == 9
    assert str(caught[0].message) == (
        "spin_us=9 was given in code and SPARKHVD_SPIN_US=7 in the environment; the code wins."
    )


def test_equal_or_missing_values_in_two_sources_cause_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Settings.resolve({"SPARKHVD_SPIN_US": "7"}, spin_us=7).spin_us == 7
        assert Settings.resolve({"SPARKHVD_SPIN_US": "7"}, spin_us=None).spin_us == 7
        assert Settings.resolve({"SPARKHVD_SPIN_US": ""}).spin_us == Settings().spin_us


def test_horovod_variables_are_aliases_that_sparkhvd_variables_override() -> None:
    environ = {"HOROVOD_FUSION_THRESHOLD": "1000", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "12.5"}
    assert Settings.resolve(environ).bucket_bytes == 1000
    assert Settings.resolve(environ).stall_shutdown_s == 12.5
    assert Settings.resolve({"HOROVOD_FUSION_THRESHOLD": "0"}).bucket_bytes == 0  # no fusion
    environ["SPARKHVD_BUCKET_BYTES"] = "2000"
    assert Settings.resolve(environ).bucket_bytes == 2000


@pytest.mark.parametrize(
    ("text", "value"), [("0", False), ("1", True), ("true", True), ("False", False)]
)
def test_boolean_variables_accept_digits_and_words(text: str, value: bool) -> None:
    assert Settings.resolve({"SPARKHVD_SHARED_MEMORY": text}).shared_memory is value


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"SPARKHVD_BUCKET_BYTES": "64MB"},
            "SPARKHVD_BUCKET_BYTES='64MB' is not a valid int. Give a number such as 4194304, or remove it.",
        ),
        (
            {"SPARKHVD_SHARED_MEMORY": "maybe"},
            "SPARKHVD_SHARED_MEMORY='maybe' is not a valid bool. Give 0 or 1, or remove it.",
        ),
        (
            {"SPARKHVD_ISA": "sse"},
            "SPARKHVD_ISA is 'sse'; it must be one of auto, scalar, avx2, avx512, neon.",
        ),
        ({"SPARKHVD_SLOTS": "1"}, "SPARKHVD_SLOTS is 1; it must be from 2 to 64."),
        ({"SPARKHVD_HOST_LOSS_S": "1"}, "SPARKHVD_HOST_LOSS_S is 1.0; it must be at least 3."),
        (
            {"SPARKHVD_PORT_RANGE": "9-5"},
            "SPARKHVD_PORT_RANGE is '9-5'; it must be like 40000-40100.",
        ),
        (
            {"HOROVOD_FUSION_THRESHOLD": "-5"},
            "HOROVOD_FUSION_THRESHOLD is -5; it must be 0 or more.",
        ),
    ],
)
def test_error_names_a_bad_value_and_the_expected_type(
    environ: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Settings.resolve(environ)
    assert str(caught.value) == message


def test_unknown_name_lists_the_settings() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"'slot' is not a setting. Settings are: .*slots"
    ):
        Settings.resolve({}, slot=3)


def test_port_range_text_becomes_a_range() -> None:
    assert Settings().ports == range(1)
    assert Settings(port_range="40000-40002").ports == range(40000, 40003)
    assert Settings(port_range="40000").ports == range(40000, 40001)


def test_numbers_of_other_types_convert_to_the_setting_type() -> None:
    written: Any = {"shared_memory": 0, "keep_freed_memory": 1, "bucket_bytes": 16e6}
    settings = Settings(**written)
    assert (settings.shared_memory, settings.keep_freed_memory) == (False, True)
    assert type(settings.bucket_bytes) is int
    assert Settings.from_json(settings.to_json()) == settings


def test_settings_survive_json_and_are_immutable() -> None:
    settings = Settings(isa="scalar", port_range="5-9", shared_memory=False)
    assert Settings.from_json(settings.to_json()) == settings
    with pytest.raises(FrozenInstanceError):
        settings.isa = "auto"  # type: ignore[misc]
    with pytest.raises(InvalidArgumentError):
        replace(settings, slots=0)


def test_settings_table_has_a_line_per_setting() -> None:
    lines = markdown_table().splitlines()
    assert len(lines) == 2 + len(fields(Settings))
    assert (
        "| `spin_us` | `SPARKHVD_SPIN_US` | `100` | us | Time that a waiting thread spins before it "
        "sleeps. It should be longer than it takes to wake a thread. |" in lines
    )


def test_spark_conf_overrides_environment_and_its_errors_name_the_key() -> None:
    environ = {"SPARKHVD_SPIN_US": "7", "SPARKHVD_SLOTS": "5"}
    conf = {"spark.sparkhvd.spin_us": "8", "spark.sparkhvd.shared_memory": "false"}
    found = Settings.resolve(environ, conf=conf)
    assert (found.spin_us, found.slots, found.shared_memory) == (8, 5, False)
    assert Settings.resolve({}, conf=conf, spin_us=9).spin_us == 9
    for text, message in (
        (
            "x",
            "spark.sparkhvd.slots='x' is not a valid int. Give a number such as 4, or remove it.",
        ),
        ("1", "spark.sparkhvd.slots is 1; it must be from 2 to 64."),
    ):
        with pytest.raises(InvalidArgumentError) as failed:
            Settings.resolve({}, conf={"spark.sparkhvd.slots": text})
        assert str(failed.value) == message


def test_executor_variables_in_conf_override_environment_but_not_conf() -> None:
    environ = {"SPARKHVD_SPIN_US": "7", "SPARKHVD_BUCKET_BYTES": "1"}
    conf = {
        "spark.executorEnv.HOROVOD_FUSION_THRESHOLD": "2",
        "spark.executorEnv.SPARKHVD_SPIN_US": "8",
        "spark.sparkhvd.spin_us": "9",
    }
    found = Settings.resolve(environ, conf=conf)
    assert (found.bucket_bytes, found.spin_us) == (2, 9)
    assert set(conf) <= set(conf_keys())


def test_later_variables_override_earlier_ones_but_not_values_given_in_code() -> None:
    earlier = Settings(spin_us=7, slots=5)
    found = earlier.overridden({"SPARKHVD_SPIN_US": "8", "SPARKHVD_SLOTS": "", "OTHER": "x"})
    assert found == Settings(spin_us=8)  # an empty variable restores the default
    with pytest.warns(UserWarning, match=r"spin_us=7 was given in code and SPARKHVD_SPIN_US=8"):
        kept = earlier.overridden({"SPARKHVD_SPIN_US": "8"}, earlier.given)
    assert kept == earlier


def test_a_rank_reads_variables_set_by_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKHVD_SPIN_US", "3")  # of the host: not the job's
    monkeypatch.setenv("SPARKHVD_PORT_RANGE", "5-9")
    job = JobSettings(Settings(spin_us=7, slots=5), ("slots",))
    rank = RankSettings(JobSettings.from_json(job.to_json()))
    assert rank.current() == job.values
    monkeypatch.setenv("HOROVOD_TIMELINE", "/t.json")
    monkeypatch.setenv("SPARKHVD_SPIN_US", "4")
    monkeypatch.setenv("SPARKHVD_SLOTS", "6")
    with pytest.warns(UserWarning, match="slots=5 was given in code"):
        assert rank.current() == replace(job.values, spin_us=4, timeline="/t.json")
    monkeypatch.setenv("SPARKHVD_PORT_RANGE", "10-11")
    monkeypatch.setenv("SPARKHVD_SLOTS", "5")
    with pytest.raises(InvalidArgumentError, match="PORT_RANGE='10-11' was set in a rank.*env="):
        rank.current()
