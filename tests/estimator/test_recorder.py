"""The report of a fit on the driver: its content, and what must not be in it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from sparkhvd.data.store.addresses import without_passwords
from sparkhvd.data.store.store import Store
from sparkhvd.errors import StoreError
from sparkhvd.estimator.fitting.recorder import Recorder, masked_params
from sparkhvd.estimator.params.generated import FitOptions
from sparkhvd.observe.report.page import loads
from sparkhvd.settings import Settings

pytestmark = pytest.mark.pure

KEY, TOKEN = "wJalrXUtnFEMI/K7MDENG+bPxRfiCY", "AQoDYXdz\"EJr'session"


class Login(NamedTuple):
    """Secrets in fields."""

    user: str
    password: str


class Held(Store):
    """A store on S3 that keeps written files in memory."""

    def write_bytes(self, path: str, data: bytes) -> None:
        self.__dict__.setdefault("written", {})[path] = data


@pytest.fixture
def remote() -> Held:
    options = {"access_key": "AKIAIOSFODNN7", "secret_key": KEY, "session_token": TOKEN}
    return Held("s3://bucket/prefix", options)


class Client:
    """A user's object whose repr contains a secret."""

    def __repr__(self) -> str:
        return f"Client({KEY})"


def test_report_contains_no_secret_of_store_or_params(remote: Held) -> None:
    recorder = Recorder()
    params: dict[str, Any] = {
        "store": remote,
        "callbacks": [Client()],
        "inputs": {"api_token": "hf_123456", "devices": 1, "nested": {"password": "pw"}},
        "progress": Client(),
        "batch_size": 32,
        "run_id": f"{'r' * 60}{KEY}",  # cut in the middle of the secret
    }
    # A subclass of the estimator may set Params that the options do not have.
    options = FitOptions(explicit=frozenset({*params, "mp_start_method"}), **params)
    recorder.settled(options, Settings(isa="scalar"), remote)
    recorder.relaunched(f"rank 1: cannot read with {KEY}")
    error = RuntimeError(f"403 for key {KEY} and token {TOKEN}")
    recorder.write(remote, "runs/mine", history=[{"epoch": 1, "note": TOKEN}], error=error)
    files = remote.__dict__["written"]
    assert set(files) == {"runs/mine/report.json", "runs/mine/report.html"}
    document = loads(files["runs/mine/report.json"], "here")
    everything = "".join(map(str, (*files.values(), document, recorder.document)))
    for secret in (KEY, KEY[:12], TOKEN, "hf_123456", "'pw'", "AKIAIOSFODNN7", "EJr"):
        assert secret not in everything
    assert document["error"] == "RuntimeError: 403 for key *** and token ***"
    assert document["state"] == "failed"
    assert document["settings"] == {"isa": "scalar"}
    assert document["params"]["batch_size"] == "32"
    assert "'devices': 1" in document["params"]["inputs"]


def test_report_shows_params_by_class_and_size() -> None:
    net = torch.nn.Linear(3, 1)
    shown = masked_params(
        {"model": net, "optimizer": torch.optim.SGD, "loss": "mse", "x": None}, str
    )
    assert shown == {
        "model": "<Linear: 4 parameters>",
        "optimizer": "<torch.optim.sgd.SGD>",
        "loss": "'mse'",
        "x": "None",
    }


def test_secrets_of_any_form_are_hidden_by_name_and_in_urls() -> None:
    given = {
        "a": {"auth": ("user", "hidden-1")},
        "b": [{"passphrase": "hidden-2", "deep": {"api_key": ["hidden-3"]}}],
        "c": {"secret": {"a": {"b": "hidden-4"}}, "token": b"hidden-5"},
        "d": {"max_tokens": 5},
        "g": {"password": 271828, "db_pass": "hidden-8", "pin": 271828},
        "e": "mysql://me:hidden-6@db/x",
        "f": ["postgresql+psycopg://:hidden-7@db"],
        "h": {"mysql://me:hidden-9@db/x": 1},
        "i": Login("me", "hidden-10"),
        "j": "https://b/t?X-Amz-Credential=hidden-11&X-Amz-Signature=hidden-12&access_token=hidden-13",
        "k": ["https://h/p?api_key=hidden-14"],
        "l": [("api_key", "hidden-15"), ("jwt", "hidden-16")],
        "m": {
            "headers": ["Authorization: Bearer hidden-17", "bearer hidden-18-abcdefghijklm"],
            "cookie": "hidden-19",
        },
        "n": ["AccountKey=hidden-20;x=1", "host=h password=hidden-21"],
    }
    shown = masked_params(given, without_passwords)
    assert "hidden" not in str(shown)
    assert "271828" not in str(shown)
    assert shown["d"] == "{'max_tokens': 5}"
    assert shown["e"] == "'mysql://me:***@db/x'"
    assert without_passwords("mysql://u:p@ss@h/x?user=u&password=pw") == (
        "mysql://u:***@h/x?user=u&password=***"
    )
    began = time.process_time()
    without_passwords("a." * 200_000 + " ://" * 1000)
    assert time.process_time() - began < 1
    began = time.process_time()
    without_passwords("://" + "?" + "a" * 200_000 + "?key" * 50_000)
    assert time.process_time() - began < 1
    plain = "a basic understanding of authorization, password reset; s3://bucket/a:b@c http://host:80/x@y file:///a http://h/?monkey_see=1&max_tokens=5"
    assert without_passwords(plain) == plain


@pytest.fixture
def refusing(remote: Held, monkeypatch: pytest.MonkeyPatch) -> Held:
    def refuse(path: str, data: bytes) -> None:
        raise StoreError(f"{path} cannot be written with {KEY}")

    monkeypatch.setattr(remote, "write_bytes", refuse)
    return remote


def test_an_unwritable_report_causes_a_warning_without_secrets(refusing: Held) -> None:
    recorder = Recorder()
    with pytest.warns(
        UserWarning, match=r"^The report of this fit was not written: StoreError: runs/"
    ) as w:
        recorder.write(refusing, "runs/mine", history=[{"epoch": 1, "loss": 1.0}])
    assert KEY not in str(w[0].message)
    # A notebook still shows it.
    assert recorder.document["history"] == [{"epoch": 1, "loss": 1.0}]


def test_a_failure_is_reported_only_if_files_of_the_run_remain(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    Recorder().write_failure(store, "runs/gone", KeyboardInterrupt())
    assert store.list("runs") == []
    store.write_bytes("runs/mine/metrics.jsonl", b'{"epoch": 1, "loss": 2.0}\n')
    Recorder().write_failure(store, "runs/mine", KeyboardInterrupt())
    document = loads(store.read_bytes("runs/mine/report.json"), "here")
    assert document["state"] == "interrupted"
    assert document["history"] == [{"epoch": 1, "loss": 2.0}]
