"""Commands on the runs of a store: `runs`, `report`, `compare` and `reproduce`. They change no run."""

from __future__ import annotations

import contextlib
import sys
import webbrowser
from pathlib import Path

from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.observe.report.compare import compare, format_table
from sparkhvd.observe.report.page import HTML_NAME, JSON_NAME, Document, loads, number, render
from sparkhvd.terminal import visible


def list_runs(store_url: str) -> None:
    """Print the runs of a store: state, epochs, last losses, seconds, size, last change."""
    store = Store(_folder(store_url))
    rows = []
    for run in store.runs():
        document: Document = {}
        with contextlib.suppress(OSError, InvalidArgumentError):  # no report, or of a newer version
            document = _document(store.below(f"runs/{run.run_id}"))
        history = document.get("history") or [{}]
        losses = (_shown(history[-1].get(name), ".4g") for name in ("loss", "val_loss"))
        epochs = str(len(document.get("history") or ()) or run.epochs)
        seconds = _shown(document.get("seconds"), ".1f")
        size = f"{run.num_bytes / 2**20:.1f}"
        changed = "-" if run.changed is None else f"{run.changed:%Y-%m-%d %H:%M}"
        rows.append([run.run_id, run.state, epochs, *losses, seconds, size, changed])
    if not rows:
        sys.stdout.write(
            f"No runs are in {store.full_url('runs')}. Give the folder of the store.\n"
        )
        return
    header = ["run", "state", "epochs", "loss", "val_loss", "seconds", "MiB", "changed (UTC)"]
    sys.stdout.write(f"{format_table(header, rows)}\n")


def _shown(value: object, form: str) -> str:
    """Format a number of a document, or "-" if it is missing."""
    return "-" if value is None else f"{number(value):{form}}"


def show_report(run: str, output: str | None, *, is_opened: bool) -> None:
    """Print the location of a run's report page.

    Writes the page again if `output` is given or the page is missing.

    Args:
        run: folder of the run, `<store>/runs/<run_id>`, as a path or URL.
        output: file to write the page to, or None.
        is_opened: open the page in a browser.

    Raises:
        InvalidArgumentError: there is no report.
    """
    store = Store(_folder(run))
    place = output or store.local_path(HTML_NAME)
    if output or not store.exists(HTML_NAME):
        page = render(_document(store))
        place = place or f"{store.url.rstrip('/').rpartition('/')[2]}-{HTML_NAME}"
        Path(place).write_text(page, encoding="utf-8")
    sys.stdout.write(f"{place or store.full_url(HTML_NAME)}\n")
    if is_opened:
        webbrowser.open(Path(place).absolute().as_uri() if place else store.full_url(HTML_NAME))


def compare_runs(first: str, second: str) -> None:
    """Print the differences between two runs, each given as in `show_report`."""
    documents = [_document(Store(_folder(run))) for run in (first, second)]
    sys.stdout.write(f"{compare(*documents)}\n")


def reproduce_run(run: str, key_file: str | None, master: str | None, *, trusted: bool) -> bool:
    """Repeat a run's fit on a table. Print and return whether the results are bitwise equal.

    Args:
        run: folder of the run, as in `show_report`.
        key_file: file with the run's key; "-" reads standard input; None without a key.
        master: of the Spark session, if this process has none; None takes one local slot per rank.
        trusted: run the program in the run without its key.

    Raises:
        InvalidArgumentError: the run has no recipe, or its version of the table cannot be read.
        UntrustedError: the key does not fit, and the run is not trusted.
    """
    from pyspark.sql import SparkSession

    from sparkhvd.estimator.saving.recipe import differences, load_recipe, reproduce

    key = None
    if key_file is not None:
        key = sys.stdin.readline() if key_file == "-" else Path(key_file).read_text()
    store = Store(_folder(run))
    recipe, _ = load_recipe(store, key=key, trusted=trusted)
    where = f" where {recipe.table.where}" if recipe.table.where else ""
    say = sys.stdout.write
    say(f"{visible(recipe.table.text + where)}, seed {recipe.seed}, {recipe.num_proc} ranks\n")
    for name, (then, now) in differences(recipe).items():
        say(f"{name} was {visible(then)} and is {now}: other bits are possible\n")
    if not differences(recipe):
        say("torch, Python, sparkhvd and CPU features agree: equal bits are expected\n")
    sys.stdout.flush()
    builder = SparkSession.builder.appName("sparkhvd reproduce")
    if SparkSession.getActiveSession() is None:
        builder = builder.master(master or f"local[{recipe.num_proc}]")
    done = reproduce(store, builder.getOrCreate(), key=key, trusted=trusted)
    say(f"{done.text}\n")
    return done.is_equal


def _folder(run: str) -> str:
    for name in (JSON_NAME, HTML_NAME):
        run = run.removesuffix(f"/{name}")
    return run if "://" in run or run.startswith("dbfs:") else str(Path(run).absolute())


def _document(store: Store) -> Document:
    try:
        data = store.read_bytes(JSON_NAME)
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidArgumentError(
            f"{store.full_url(JSON_NAME)} is not there. Give the folder of a run whose fit has ended, <store>/runs/<run_id>; "
            "`sparkhvd runs <store>` lists them."
        ) from None
    return loads(data, store.full_url(JSON_NAME))
