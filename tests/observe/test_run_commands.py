"""`sparkhvd runs`, `report` and `compare` on a store of reports, and refusals of `reproduce`."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path

import pytest

from sparkhvd.__main__ import main
from sparkhvd.data.store.locks import dump_sealed
from sparkhvd.data.store.store import Store
from sparkhvd.observe.report.page import dumps
from tests.observe.documents import document

pytestmark = pytest.mark.pure


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.create(tmp_path / "store")
    for name in ("a", "b"):
        given = document(run_id=name, params={"epochs": name})
        store.write_bytes(f"runs/{name}/report.json", dumps(given))
    store.write_bytes("runs/b/report.html", b"kept")
    store.write_bytes("runs/old/program.pkl", b"")
    return store


def test_runs_command_lists_the_runs_of_a_store(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs", "store"]) == 0
    relative = capsys.readouterr().out
    assert main(["runs", store.url]) == 0
    assert (listed := capsys.readouterr().out) == relative
    header, *rows = listed.splitlines()
    assert header.split()[:4] == ["run", "state", "epochs", "loss"]
    assert [row.split()[:6] for row in rows] == [
        ["a", "report", "3", "0.3333", "0.5", "10.0"],
        ["b", "report", "3", "0.3333", "0.5", "10.0"],
        ["old", "interrupted", "0", "-", "-", "-"],
    ]


DEEP = b"[" * 200_000
DAMAGED = {
    "report.json": [
        b"",
        b"[]",
        b'{"format": 1, "history": 5}',
        b'{"format": 1, "history": [[1]]}',
        b'{"format": [1]}',
        DEEP,
    ],
    "checkpoints/latest.json": [
        b"nonsense",
        DEEP,
        dump_sealed({"step": 0}),
        dump_sealed({"epoch": "3", "step": 0}),
        dump_sealed({"epoch": -1, "step": 0}),
        dump_sealed({"epoch": None, "step": [1]}),
    ],
    "holder.json": [
        b"",
        DEEP,
        dump_sealed({"owner": "x"}),
        dump_sealed({"owner": "x", "renewed": 10**400}),
        dump_sealed({"owner": "x", "renewed": 1.0, "since": 1e300}),
        dump_sealed({"owner": "x", "renewed": 1.0, "process": {"pid": 10**30}}),
        dump_sealed({"owner": "x", "renewed": 1.0, "process": [1]}),
    ],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_file_of_a_run_hides_no_other_run(
    store: Store, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for content in DAMAGED[name]:
        store.write_bytes(f"runs/bad/{name}", content)
        assert main(["runs", store.url]) == 0
        rows = {row.split()[0]: row for row in capsys.readouterr().out.splitlines()[1:]}
        assert rows.keys() == {"a", "b", "bad", "old"}, content[:80]
        assert rows["a"].split()[:4] == ["a", "report", "3", "0.3333"]
        if name != "report.json":
            assert f"unreadable: {name}" in rows["bad"], (content[:80], rows["bad"])
        assert {run.run_id for run in store.runs()} == rows.keys()
    store.clean(runs=True)
    store.write_bytes("runs/bad/x", b"")
    store.write_bytes(f"runs/bad/{name}", DAMAGED[name][-1])
    store.delete_run("bad")


def test_control_characters_in_run_names_are_escaped(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.write_bytes("runs/\x1b]0;title\x07/program.pkl", b"")
    assert main(["runs", store.url]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert r"\x1b]0;title\x07" in printed


def test_runs_command_names_a_folder_without_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", str(tmp_path / "nowhere")]) == 0
    assert capsys.readouterr().out == (
        f"No runs are in file://{tmp_path}/nowhere/runs. Give the folder of the store.\n"
    )


def test_report_command_prints_the_page_path_and_rebuilds_missing_pages(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in ("runs/b", "runs/b/report.json"):
        assert main(["report", store.full_url(run)]) == 0
        assert capsys.readouterr().out.strip() == store.local_path("runs/b/report.html")
    assert store.read_bytes("runs/b/report.html") == b"kept"
    assert main(["report", store.full_url("runs/a")]) == 0
    assert b"</html>" in store.read_bytes("runs/a/report.html")
    assert main(["report", store.full_url("runs/b"), "-o", str(tmp_path / "b.html")]) == 0
    assert "</html>" in (tmp_path / "b.html").read_text()


def test_compare_command_prints_differences(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", store.full_url("runs/a"), store.full_url("runs/b")]) == 0
    assert "epochs                a  b" in capsys.readouterr().out


def test_run_without_a_report_gives_a_one_line_error(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", store.full_url("runs/old")]) == 1
    assert capsys.readouterr().err.startswith(
        f"sparkhvd: {store.full_url('runs/old/report.json')} is not there. Give the folder of a run"
    )


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


def test_reproduce_without_the_key_executes_no_code_of_the_run(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = store.full_url("runs/a")
    assert main(["reproduce", run]) == 1
    assert "recipe.json does not exist" in capsys.readouterr().err
    data = pickle.dumps(Evil(tmp_path / "touched"))
    facts = {
        "format": 1,
        "table": {"format": "delta", "name": "t", "url": "t", "uuid": "u", "version": 0},
        "seed": 1,
        "num_proc": 1,
        "environment": {"torch": "", "python": "", "sparkhvd": "", "cpu": ""},
        "params": hashlib.sha256(data).hexdigest(),
    }
    store.write_bytes("runs/a/recipe.pkl", data)
    key = tmp_path / "key"
    key.write_text("00" * 32)
    for seal, arguments, message in (
        ({}, [], "Give the key of the run"),
        ({}, ["--key-file", str(key)], "was not written by the fit with this key"),
        ({"hmac": "00" * 32}, ["--key-file", str(key)], "was not written by the fit with this key"),
        ({"hmac": 5}, ["--key-file", str(key)], "was not written by the fit with this key"),
        ({"seed": "1"}, ["--trust"], "cannot be used"),
    ):
        store.write_bytes("runs/a/recipe.json", dump_sealed({**facts, **seal}))
        assert main(["reproduce", run, *arguments]) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "damaged",
    [
        {"phases": 5},
        {"phases": [{"a": 1}]},
        {"phases": [{"name": ["materialize"], "seconds": 1.0}]},
        {"phases": [{"name": 10**400, "seconds": 1.0}]},
        {"params": "\x1b]0;title\x07"},
        {"settings": [1]},
        {"data": 10**400},
        {"versions": True},
    ],
)
def test_compare_works_if_one_part_of_a_report_is_damaged(
    store: Store, damaged: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    given = json.loads(dumps(document(run_id="b"))) | damaged
    store.write_bytes("runs/b/report.json", json.dumps(given).encode())
    folders = [f"{store.url}/runs/{name}" for name in ("a", "b")]
    assert main(["compare", *folders]) == 0
    shown = capsys.readouterr().out
    assert "cannot be shown" in shown
    assert "at the end" in shown
    assert "\x1b" not in shown


def test_control_characters_in_file_messages_are_escaped(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    text = json.dumps({"format": "\x1b]52;c;YQ==\x07", "history": []})
    store.write_bytes("runs/a/report.json", text.encode())
    assert main(["compare", f"{store.url}/runs/a", f"{store.url}/runs/b"]) == 1
    shown = capsys.readouterr().err
    assert "\\x1b]52;c" in shown
    assert "\x1b" not in shown
