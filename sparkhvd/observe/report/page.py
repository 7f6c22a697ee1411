"""Render a report's document as an HTML page, and read and write documents as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, TypeAlias, TypeGuard

from sparkhvd.errors import InvalidArgumentError
from sparkhvd.observe.report.charts import (
    NUM_COLOURS,
    Series,
    bars,
    format_number,
    format_seconds,
    histogram,
    lines,
    waterfall,
)
from sparkhvd.wire import read_json

_STYLE = """
:root{color-scheme:light dark;--bg:#fcfcfb;--fg:#1b1b1a;--dim:#63625d;--line:#dedcd6;--card:#f3f2ee;--bad:#b3261e;
--c0:#2a78d6;--c1:#eb6834;--c2:#1baf7a;--c3:#eda100;--c4:#e87ba4;--c5:#4a3aa7;--c6:#008300;--c7:#8a8984}
@media screen and (prefers-color-scheme:dark){:root{--bg:#1a1a19;--fg:#f4f3ef;--dim:#aaa9a2;--line:#3a3a37;--card:#252523;--bad:#ff8a80;
--c0:#3987e5;--c1:#d95926;--c2:#199e70;--c3:#c98500;--c4:#d55181;--c5:#9085e9;--c6:#2fa82f;--c7:#8f8e88}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1000px;padding:24px;background:var(--bg);color:var(--fg);font:14px/1.5 system-ui,sans-serif}
h1{font-size:22px;margin:0;overflow-wrap:anywhere}h2{font-size:16px;margin:32px 0 8px}h3{font-size:13px;margin:0 0 4px}
p{margin:4px 0 8px}.dim,.axis,figcaption{color:var(--dim)}.bad{color:var(--bad)}
.tiles,.charts{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));margin-top:16px}
.charts{grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:20px}
.tile{background:var(--card);border-radius:6px;padding:8px 12px}.tile b{display:block;font-size:20px;font-weight:600}.tile span{color:var(--dim)}
figure{margin:0;max-width:560px;break-inside:avoid}svg{display:block;width:100%;height:auto}svg text{font-size:11px;fill:var(--dim)}
.grid{stroke:var(--line)}polyline{fill:none;stroke-width:2;stroke-linejoin:round}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;margin-bottom:4px;color:var(--dim)}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
.row{display:flex;align-items:center;gap:8px;margin:3px 0}.row b{flex:0 0 130px;font-weight:400;overflow-wrap:anywhere}.row span{flex:0 0 110px;white-space:nowrap}
.bar{flex:1;display:flex;gap:1px;height:16px}.bar i{height:100%;min-width:1px}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:3px 16px 3px 0;border-bottom:1px solid var(--line);vertical-align:top;overflow-wrap:anywhere}
th{font-weight:600}th,td{white-space:nowrap}td:last-child{white-space:normal}.n{text-align:right}pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0}
@media screen and (max-width:500px){body{padding:16px}.row b{flex-basis:90px}.row span{flex-basis:84px}}
@media print{body{max-width:none;padding:0;font-size:11px}h2{break-after:avoid}tr{break-inside:avoid}i,.tile{print-color-adjust:exact}.wide{overflow:visible}}
""" + "".join(
    f".s{i}{{stroke:var(--c{i})}}.f{i}{{fill:var(--c{i})}}.b{i}{{background:var(--c{i})}}\n"
    for i in range(NUM_COLOURS)
)
_HEAD = (
    '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
)


def render(document: Document) -> str:
    """Make the HTML page of a document, without missing parts."""
    name = escape(str(document.get("run_id") or "fit"))
    parts: list[tuple[str, Callable[[Document], str], str]] = [
        ("Time of the fit", _phases, ""),
        ("Losses and metrics", _curves, "charts"),
        ("Throughput", _throughput, "charts"),
        ("Wait times", _waits, ""),
        ("Load of the ranks", _load, "charts"),
        ("Epochs", _epochs, ""),
        ("Relaunches", _relaunches, ""),
        ("Elastic training", _rank_changes, ""),
        ("Collectives of rank 0", _collectives, ""),
        ("Buckets of gradients", _buckets, ""),
        ("Ranks", _ranks, ""),
        ("Data", lambda d: _names(d.get("data")), ""),
        ("Params", lambda d: _names(d.get("params")), ""),
        ("Settings", lambda d: _names(d.get("settings")), ""),
        ("Versions", lambda d: _names(d.get("versions")), ""),
    ]
    sections = [_built(_header, document)]
    sections += [_section(title, _built(build, document), kind) for title, build, kind in parts]
    return f"{_HEAD}<title>{name}</title><style>{_STYLE}</style></head><body>{''.join(sections)}</body></html>\n"


def _built(build: Callable[[Document], str], document: Document) -> str:
    """Build a part of the page, or an error message for a damaged part of the document."""
    try:
        return build(document)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return f"<p>Cannot be shown: {escape(type(error).__name__)}: {escape(str(error)[:200])}</p>"


def _load(document: Document) -> str:
    return "".join(_figure(title, chart) for title, chart in load_charts(document))


def _section(title: str, content: str, kind: str = "") -> str:
    if not content:
        return ""
    return f'<section><h2>{escape(title)}</h2><div class="{kind}">{content}</div></section>'


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Build a table with right-aligned numbers, formatted by `format_number`."""
    body = list(rows)
    if not body:
        return ""
    aligned = ["n" if isinstance(cell, (int, float)) else "" for cell in body[0]]
    head = "".join(
        f'<th class="{a}">{escape(h)}</th>' for a, h in zip(aligned, header, strict=True)
    )
    lines_ = []
    for row in body:
        texts = (format_number(c) if isinstance(c, (int, float)) else str(c) for c in row)
        cells = (
            f'<td class="{a}">{escape(text)}</td>' for a, text in zip(aligned, texts, strict=True)
        )
        lines_.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines_)}</tbody></table></div>'


def _history(document: Document) -> list[Mapping[str, Any]]:
    return list(document.get("history") or ())


def measures(document: Document) -> list[str]:
    """List the losses, metrics and logged numbers in the history, also of validation and also non-finite."""
    history = _history(document)
    names = dict.fromkeys(name for record in history for name in record if name not in OF_EPOCH)
    return [name for name in names if any(is_number(r.get(name)) for r in history)]


def paired(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Pair the training and validation names of each measure, with "" for a missing name.

    `val_loss` pairs with `loss`, or with `train_loss` as logged by Lightning modules.
    """
    known = {"", *names}
    found: dict[str, tuple[str, str]] = {}
    for name in names:
        base = name.removeprefix("val_")
        plain = base.removeprefix("train_")
        if f"val_{base}" not in known and f"val_{plain}" in known and plain not in known:
            base = plain  # train_loss
        training = next(n for n in (base, f"train_{base}", "") if n in known)
        found[base] = training, f"val_{base}" if f"val_{base}" in known else ""
    return found


def _header(document: Document) -> str:
    history, state = _history(document), str(document.get("state") or "")
    facts = [state, str(document.get("began") or ""), str(document.get("store") or "")]
    shown = f'<p class="dim">{escape("  ·  ".join(filter(None, facts)))}</p>'
    if error := document.get("error"):
        shown += f'<pre class="bad">{escape(str(error))}</pre>'
    tiles = [("epochs", format_number(len(history)))]
    last = history[-1] if history else {}
    found = measures(document)
    # The value on validation rows is preferred, because it says more than the value on training rows.
    pairs = list(paired(found).items())[:3]
    tiles += [
        (name, format_number(number(last.get(name))))
        for training, validation in (pair for _, pair in pairs)
        for name in (training, validation)
        if name
    ]
    tiles += _best(document, history, found)
    if rows := total([r.get("rows") for r in history]):
        seconds = total([r.get("seconds") for r in history])
        tiles.append(("rows/s in training", format_number(round(rows / max(seconds, 1e-9)))))
    if "seconds" in document:
        tiles.append(("whole fit", format_seconds(number(document["seconds"]))))
    if ranks := document.get("ranks"):
        tiles.append(("ranks", format_number(len(ranks))))
    if relaunches := document.get("relaunches"):
        tiles.append(("relaunches", format_number(len(relaunches))))
    if changes := sum(1 for each in document.get("rank_changes") or () if each.get("before")):
        tiles.append(("changes of ranks", format_number(changes)))
    cells = "".join(
        f'<div class="tile"><b>{escape(v)}</b><span>{escape(n)}</span></div>' for n, v in tiles
    )
    return f'<h1>{escape(str(document.get("run_id") or "fit"))}</h1>{shown}<div class="tiles">{cells}</div>'


def _best(
    document: Document, history: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> list[tuple[str, str]]:
    """Make the tile of the best epoch: by the monitored number, else by the validation loss, else by the loss."""
    if best := document.get("best"):
        text = f"best {best['name']}, epoch {format_number(number(best['epoch']))}"
        return [(text, format_number(number(best["value"])))]
    name = next((name for name in ("val_loss", "loss") if name in names), None)
    losses = [(number(r.get(name or "")), number(r.get("epoch"))) for r in history]
    finite = [(loss, epoch) for loss, epoch in losses if math.isfinite(loss)]
    if name is None or len(finite) < 2:
        return []
    loss, epoch = min(finite)
    return [(f"lowest {name}, epoch {format_number(epoch)}", format_number(loss))]


def _phases(document: Document) -> str:
    phases = [(str(p["name"]), number(p["seconds"])) for p in document.get("phases") or ()]
    return waterfall(phases)


def _figure(title: str, chart: str, note: str = "") -> str:
    if not chart:
        return ""
    caption = f"<figcaption>{escape(note)}</figcaption>" if note else ""
    return f"<figure><h3>{escape(title)}</h3>{chart}{caption}</figure>"


def _curves(document: Document) -> str:
    history = _history(document)
    epochs = [number(record.get("epoch")) for record in history]
    figures = []
    for title, pair in paired(measures(document)).items():
        keys = dict(zip(pair, ("training", "validation"), strict=True))
        named = {key: text for key, text in keys.items() if key}
        series = [
            Series(text if len(named) > 1 else key, epochs, [number(r.get(key)) for r in history])
            for key, text in named.items()
        ]
        figures.append(_figure(title, lines(title, series)))
    rates = [number(record.get("lr")) for record in history]
    if len(set(rates)) > 1:
        figures.append(_figure("lr", lines("lr", [Series("lr", epochs, rates)])))
    return "".join(figures)


def _throughput(document: Document) -> str:
    kept = document.get("epochs") or ()
    epochs = [number(e["epoch"]) for e in kept]
    rates = [
        [rows / seconds if seconds > 0 else math.nan for rows, seconds in zip(*both, strict=True)]
        for both in ((e["rows"], e["seconds"]) for e in kept)
    ]
    num_ranks = max(map(len, rates), default=0)  # the number of ranks of an elastic job varies
    if num_ranks > NUM_COLOURS:
        found = [("fastest rank", max), ("slowest rank", min)]
        series = [Series(name, epochs, [choose(row) for row in rates]) for name, choose in found]
    else:
        series = [
            Series(
                f"rank {rank}",
                epochs,
                [row[rank] if rank < len(row) else math.nan for row in rates],
            )
            for rank in range(num_ranks)
        ]
    shown = _figure("rows/s per rank", lines("rows per second", series, from_zero=True))
    steps = document.get("steps") or {}
    if counts := [number(count) for count in steps.get("counts") or ()]:
        edges = [steps["first_s"] * 2 ** (i / steps["per_octave"]) for i in range(len(counts) + 1)]
        marks = ", ".join(
            f"{share:.0%} below {format_seconds(_quantile(counts, edges, share))}"
            for share in (0.5, 0.9, 0.99)
        )
        chart = histogram("durations of steps", counts, edges)
        note = f"{format_number(sum(counts))} steps of all ranks: {marks}."
        shown += _figure("durations of steps", chart, note)
    return shown


def _quantile(counts: Sequence[float], edges: Sequence[float], share: float) -> float:
    """Find the upper edge of a quantile's bin."""
    seen, wanted = 0.0, share * sum(counts)
    for count, edge in zip(counts, edges[1:], strict=True):
        seen += count
        if seen >= wanted:
            return edge
    return edges[-1]


def _split_time(epochs: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Split each rank's seconds into computing and waiting for data, slower ranks and gradients: (ranks, 4).

    The rank that waits least for reduced gradients waits only for the transfer. The additional wait of other ranks is a
    wait for this rank.
    """
    split = [[0.0] * 4 for _ in range(max((len(epoch["rows"]) for epoch in epochs), default=0))]
    for epoch in epochs:
        least = min(map(number, epoch["gradient_wait_s"]))
        for rank, row in enumerate(split[: len(epoch["rows"])]):
            seconds, data, gradients = (
                number(epoch[name][rank]) for name in ("seconds", "data_wait_s", "gradient_wait_s")
            )
            parts = (seconds - data - gradients, data, gradients - least, least)
            row[:] = [before + max(0.0, part) for before, part in zip(row, parts, strict=True)]
    return split if all(math.isfinite(x) for row in split for x in row) else []


def _waits(document: Document) -> str:
    split = _split_time(document.get("epochs") or ())
    if not split or not any(map(sum, split)):
        return ""
    # The slowest ranks are shown first.
    order = sorted(range(len(split)), key=lambda rank: split[rank][2])
    shown = order[:_MOST_RANKS]
    slowest = order[0]
    parts = ["computing", "waiting for data", "waiting for slower ranks", "waiting for gradients"]
    whole = [sum(column) for column in zip(*split, strict=True)]
    shares = [f"{part} {value / sum(whole):.0%}" for part, value in zip(parts, whole, strict=True)]
    text = f"All ranks together: {', '.join(shares)}."
    if len(split) > 1:
        longest = max(row[2] for row in split)
        text += f" The other ranks waited most for rank {slowest}, up to {format_seconds(longest)}."
        own = split[slowest]
        text += f" It spent {own[0] / max(sum(own), 1e-12):.0%} computing and {own[1] / max(sum(own), 1e-12):.0%} waiting for data."
    if len(split) > len(shown):
        text += f" {len(shown)} of {len(split)} ranks are shown, starting with the rank that other ranks waited for most."
    names = [f"rank {rank}" for rank in shown]
    return f"<p>{escape(text)}</p>" + bars(names, parts, [split[rank] for rank in shown])


def _epochs(document: Document) -> str:
    history = _history(document)
    names = measures(document)
    every = max(1, math.ceil(len(history) / _MOST_EPOCHS))
    kept = [r for i, r in enumerate(history) if i % every == 0 or i == len(history) - 1]
    waits = {"data_wait_s": "data wait", "rank_wait_s": "rank wait", "comm_wait_s": "gradient wait"}
    waits = {name: text for name, text in waits.items() if any(name in r for r in kept)}
    has_slowest = any("slowest_rank" in record for record in kept)
    rows = []
    for record in kept:
        seconds = number(record.get("seconds"))
        cells = [number(record.get("epoch")), *(number(record.get(name)) for name in names)]
        shares = [f"{number(record.get(name)) / max(seconds, 1e-9):.0%}" for name in waits]
        slowest = [str(record.get("slowest_rank", "-"))] if has_slowest else []
        rate = number(record.get("rows_per_s"))
        rows.append([*cells, rate, format_seconds(seconds), *shares, *slowest])
    header = ["epoch", *names, "rows/s", "time", *waits.values()]
    note = f"<p>One in {every} of the {len(history):,} epochs, and the last.</p>"
    table = _table([*header, "slowest rank"] if has_slowest else header, rows)
    return (note if every > 1 else "") + table


def _relaunches(document: Document) -> str:
    rows = (
        (f"after {format_seconds(number(r.get('seconds')))}", str(r.get("cause")))
        for r in document.get("relaunches") or ()
    )
    return _table(["when", "cause"], rows)


def _rank_changes(document: Document) -> str:
    rows = []
    for each in document.get("rank_changes") or ():
        before, after = format_number(number(each["before"])), format_number(number(each["after"]))
        repeated = format_number(number(each.get("repeated_rows"))) if each.get("before") else ""
        rows.append(
            (
                f"after {format_seconds(number(each['seconds']))}",
                f"{before} \u2192 {after}",
                format_seconds(number(each["took_s"])),
                format_number(number(each.get("epoch"))),
                repeated,
                str(each["why"]),
            )
        )
    header = ["when", "ranks", "connect time", "epoch", "repeated rows", "reason"]
    return _table(header, rows)


def _collectives(document: Document) -> str:
    header = ["collective", "algorithm", "operations", "failed", "bytes", "mean bytes"]
    rows = []
    for entry in document.get("collectives") or ():
        count = number(entry["operations"])
        means = (
            format_seconds(number(entry[f"{name}_us"]) / 1e6 / max(1.0, count + entry["failures"]))
            for name in ("negotiation", "queue", "run")
        )
        size = round(number(entry["bytes"]) / max(1.0, count))
        cells = (count, number(entry["failures"]), number(entry["bytes"]), size)
        rows.append([str(entry["collective"]), str(entry["algorithm"]), *cells, *means])
    return _table([*header, "negotiation", "queue", "run"], rows)


def _buckets(document: Document) -> str:
    rows = (
        (str(b["name"]), str(b["kind"]), number(b["parameters"]), number(b["bytes"]))
        for b in document.get("buckets") or ()
    )
    return _table(["operation", "kind", "parameters", "bytes"], rows)


def _ranks(document: Document) -> str:
    names = {
        "peak_rss_bytes": "peak memory, MiB",
        "sent_bytes": "sent, MiB",
        "received_bytes": "received, MiB",
        "shared_bytes": "shared memory, MiB",
    }
    rows = [
        [
            f"rank {rank}",
            str(r.get("host") or ""),
            str(r.get("device") or ""),
            *(round(number(r.get(name) or 0) / 2**20, 1) for name in names),
        ]
        for rank, r in enumerate(document.get("ranks") or ())
    ]
    return _table(["rank", "host", "device", *names.values()], rows)


def _names(values: Mapping[str, object] | None) -> str:
    return _table(["name", "value"], ((n, str(v)) for n, v in sorted((values or {}).items())))


# ----------------------------------------------------------------------------------------------------
# The document of a report is JSON with these entries, each of which may be missing. Lists "by rank" have an entry per
# rank.
#     run_id, store, state, error    name of the run; "finished", "failed" or "interrupted"; the error
#     began, seconds                 time of the start (ISO, UTC); seconds of the whole fit on the driver
#     phases                         [{"name", "seconds"}], in order; their sum is `seconds`
#     history                        records of the epochs, as `TorchModel.history`
#     best                           {"name", "epoch", "value"} of the epoch whose weights the model has, if chosen
#     epochs                         [{"epoch", "rows", "seconds", "data_wait_s", "gradient_wait_s"}], each a list by rank
#     load                           by rank {"host", "time", "cpu_percent", "rss_megabytes", "gpu_percent",
#                                    "gpu_megabytes"}: lists by sample, one per second or less; `time` in seconds since
#                                    1970; null if unknown
#     steps                          steps of all ranks by duration: `counts[i]` steps of at least
#                                    `first_s` * 2 ** (i / `per_octave`) seconds
#     collectives                    counters of rank 0's engine, see docs/monitoring.md
#     buckets                        [{"name", "kind", "parameters", "bytes"}]
#     ranks                          by rank {"host", "device", "phases", "peak_rss_bytes", ...}
#     relaunches                     [{"cause", "seconds"}]; seconds after the start
#     rank_changes                   of an elastic job [{"seconds", "before", "after", "took_s", "why", "epoch",
#                                    "repeated_rows"}]: seconds after the start, numbers of ranks, repeated rows of the
#                                    epoch; the last two may be missing
#     data                           texts by name: rows, columns, table and version
#     params, settings, versions     texts by name, if given or different from the default
#
# A number that is not finite is a text ("nan", "inf", "-inf"), which JSON can hold.

Document: TypeAlias = "Mapping[str, Any]"

JSON_NAME, HTML_NAME = "report.json", "report.html"
_FORMAT = 1
_NOT_FINITE = ("nan", "inf", "-inf")
# Entries of an epoch's record that describe its execution, not its results.
OF_EPOCH = (
    "epoch",
    "seconds",
    "rows",
    "rows_per_s",
    "data_wait_s",
    "comm_wait_s",
    "rank_wait_s",
    "slowest_rank",
    "lr",
    "ranks",
    "repeated_rows",
    "rank_changes",
    "data",
    "broken_rows",
    "val_broken_rows",
)


def dumps(document: Document) -> bytes:
    """Encode a document as JSON."""
    values = {"format": _FORMAT, **document}
    return json.dumps(_plain(values), allow_nan=False, indent=1).encode()


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value


def loads(data: bytes, place: str) -> dict[str, Any]:
    """Decode the document that `dumps` encoded.

    Raises:
        InvalidArgumentError: the data are not a document, or have a newer format; the message names `place`.
    """
    try:
        values = read_json(data)
        version, history = values["format"], values.get("history", [])
        if not all(isinstance(record, dict) for record in [values, *history]):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidArgumentError(
            f"{place} is not a report of a fit. Give the folder of a run, or its {JSON_NAME}."
        ) from None
    if version != _FORMAT:
        raise InvalidArgumentError(
            f"{place} has format version {version}, but this sparkhvd reads {_FORMAT}. Read it with the sparkhvd that wrote it."
        )
    return dict(values)


def is_number(value: object) -> TypeGuard[float | str]:
    """Whether a value is a number in a document, finite or not."""
    return isinstance(value, (int, float)) or value in _NOT_FINITE


def number(value: object) -> float:
    """Convert a number in a document to float, or return NaN for other text or None."""
    try:
        return float(value) if is_number(value) else math.nan
    except OverflowError:  # the whole number has hundreds of digits
        return math.inf


def total(values: Sequence[object]) -> float:
    """Sum the finite numbers."""
    return math.fsum(x for x in map(number, values) if math.isfinite(x))


# ----------------------------------------------------------------------------------------------------
# Draw the load of the ranks over the time of a training.

# Entry of the load -> title of its chart, in the order of the charts.
_TITLES = {
    "cpu_percent": "CPU of each rank, percent of one",
    "rss_megabytes": "memory of each rank, MB",
    "gpu_percent": "GPU of each rank, percent of the time",
    "gpu_megabytes": "memory of each rank's GPU, MB",
}


def load_charts(document: Document) -> list[tuple[str, str]]:
    """Make title and chart of each known number of the load.

    With many ranks, charts show only the first ranks.
    """
    ranks = list(document.get("load") or ())[:NUM_COLOURS]
    began = min((number(t) for rank in ranks for t in rank["time"]), default=math.nan)
    charts = []
    for name, title in _TITLES.items():
        series = [
            Series(
                f"rank {index}",
                [number(t) - began for t in rank["time"]],
                [number(value) for value in rank[name]],
            )
            for index, rank in enumerate(ranks)
            if rank["time"]
        ]
        if series and (chart := lines(title, series, from_zero=True, axis="seconds")):
            charts.append((title, chart))
    return charts


# Most epochs, and most ranks, in a table or chart.
_MOST_EPOCHS, _MOST_RANKS = 40, 16
