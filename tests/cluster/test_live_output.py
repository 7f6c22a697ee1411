"""Live output of ranks on a Spark Connect client, through the store or a port of the client, and a flood from an executor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.cluster import Cluster, Unseen, run_client
from tests.harness.soak import soak
from tests.harness.spark import run_on, with_folder

pytestmark = [pytest.mark.spark, pytest.mark.timeout(450)]

# The rank waits until the client has shown its line, and says so through the store.
PROGRAM = """
import io, os, threading, torch
from torch import nn
from sparkhvd import Store, TorchEstimator, log_to_driver, run

class Shown(io.StringIO):
    def write(self, text):
        if "a live line" in text and not shown.is_set():
            self.since = time.time() - float(text.partition("a live line ")[2].split()[0])
            shown.set()
        terminal.write(text)
        return super().write(text)

shown = threading.Event()
store = Store.create(FOLDER + "/store")
df = spark.createDataFrame([([float(i % 5)], float(i % 7)) for i in range(8)], "x array<double>, y double")

def waits(output, label):
    if not os.path.exists(FOLDER + "/printed"):
        open(FOLDER + "/printed", "w").close()
        print("a live line", time.time())
        log_to_driver("a message")
        deadline = time.monotonic() + 60
        while not os.path.exists(FOLDER + "/store/shown"):
            assert time.monotonic() < deadline, "no client has seen it"
            time.sleep(0.05)
    print("a step")
    return ((output - label) ** 2).mean()

def answer():
    assert shown.wait(60)
    store.write_bytes("shown", b"")

terminal, sys.stderr = sys.stderr, Shown()
answering = threading.Thread(target=answer)
answering.start()
TorchEstimator(
    model=nn.Linear(1, 1), optimizer=lambda p: torch.optim.SGD(p, lr=0.01), loss=waits, feature_cols=["x"],
    label_cols=["y"], batch_size=4, epochs=1, num_proc=1, max_retries=0, run_id="r", store=store,
    pairs_rows=False).fit(df)  # else the driver calls the loss first
answering.join()
written, sys.stderr = sys.stderr, terminal
lines = written.getvalue().splitlines()
assert sum("a live line" in line for line in lines) == 1, lines
assert lines.count("[0] a message") == 1 and lines.count("[0] a step") >= 2, lines
print("SHOWN after", written.since)
assert written.since < 3.0, written.since
assert not [path for path in store.list("runs/r/attempts", recursive=True) if "live" in path]
print("ALL WELL")
"""

# The same without a store, through a port of the client that executors reach.
RUN = """
import io, os, threading
from pyspark.sql.connect.client import DefaultChannelBuilder
from pyspark.sql.connect.session import SparkSession as Remote
from sparkhvd import run
from sparkhvd.runner import live_output
from sparkhvd.spark import SparkShim

def waits(number):
    print("a live line", number)
    deadline = time.monotonic() + 60
    while not os.path.exists(FOLDER + f"/seen{number}"):
        assert time.monotonic() < deadline, "no client has seen it"
        time.sleep(0.05)
    print("last words")

class Shown(io.StringIO):
    def __init__(self, text, number):
        super().__init__()
        self.text, self.path = text, FOLDER + f"/seen{number}"

    def write(self, text):
        if self.text in text:
            open(self.path, "w").close()
        terminal.write(text)
        return super().write(text)

class Nameless(DefaultChannelBuilder):
    @property
    def host(self):
        raise NotImplementedError

def lines_of(text, number, session):
    sys.stderr = Shown(text, number)
    try:
        run(waits, (number,), num_proc=1, spark=session, max_retries=0)
        return sys.stderr.getvalue().splitlines()
    finally:
        sys.stderr = terminal

terminal = sys.stderr
own = ["[0] a live line 0", "[0] last words"]
assert lines_of("a live line", 0, spark) == own

# As a client behind NAT. What ranks have printed comes in the end.
live_output._REACH_S, reach = 1.0, SparkShim.own_addresses
SparkShim.own_addresses = lambda shim: ("127.0.0.1", "192.0.2.1")
late, *rest = lines_of("no rank has reached", 1, spark)
SparkShim.own_addresses = reach
assert "No live output of the ranks: for 1 s no rank has reached this client of Spark Connect at 192.0.2.1, port " in late, late
assert rest == ["[0] a live line 1", "[0] last words"], rest

builder = Nameless(f"sc://{spark.client._builder.endpoint}")
nameless = Remote.builder.channelBuilder(builder).create()
assert lines_of("", 2, nameless) == [
    "sparkhvd: No live output of the ranks: this process cannot listen (the session's channel builder does not provide the host of the "
    "Spark Connect server). The output is in the executors' logs."]
nameless.stop()
print("ALL WELL")
"""

# A rank in a separate executor prints as fast as it can.
FLOOD = """
import io, os, re
from sparkhvd import run

def prints(seconds):
    block = b"".join(b"a line of a flood, of about a hundred characters, one of very many %045d\\n" % i for i in range(1000))
    until, lines = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        view = memoryview(block)
        while view:
            view = view[os.write(1, view):]
        lines += 1000
    return lines

output = io.StringIO()
began = time.monotonic()
printed = run(prints, (5,), num_proc=1, spark=spark, stdout=output)[0]
lines = output.getvalue().splitlines()
counts = [re.fullmatch(r"\\[0\\] \\(([\\d,]+) lines? left out here; the executor's log has all\\)", line) for line in lines]
left_out = sum(int(found[1].replace(",", "")) for found in counts if found)
shown = sum(found is None for found in counts)
print("FLOOD", printed, "printed", shown, "shown", left_out, "left out", time.monotonic() - began, "s")
assert shown + left_out == printed
assert shown < 2000 * (time.monotonic() - began + 2)
spark.stop()
print("ALL WELL")
"""


@soak("runner/test_live")
def test_omitted_lines_of_a_flood_are_counted(tmp_path: Path) -> None:
    output = run_on("local-cluster[1,1,1024]", FLOOD, tmp_path)
    print(*(line for line in output.splitlines() if "FLOOD" in line))
    assert "ALL WELL" in output, output


@soak("runner/test_live")
def test_a_client_with_its_own_server_shows_each_line_once(tmp_path: Path) -> None:
    body = """
from sparkhvd import run

run(print, ("a line",), num_proc=2, spark=spark)
run(print, ("a quiet line",), num_proc=2, spark=spark, verbose=0)
"""
    output = run_on("local[2]", body, tmp_path, remote=True)
    assert sorted(line for line in output.splitlines() if " line" in line) == [
        "[0] a line",
        "[1] a line",
    ], output


@soak("runner/test_launching")
@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.invalid"])
def test_local_master_ranks_connect_although_driver_host_is_unreachable(
    tmp_path: Path, host: str
) -> None:
    body = """
from sparkhvd import run

def sums():
    import sparkhvd.torch as hvd
    import torch

    hvd.init()
    print("a line")
    return float(hvd.allreduce(torch.ones(1), op=hvd.Sum))

assert run(sums, num_proc=2, spark=spark) == [2.0, 2.0]
"""
    output = run_on("local[2]", body, tmp_path, conf={"spark.driver.host": host})
    assert {"[0] a line", "[1] a line"} <= set(output.splitlines()), output
    assert "No live output" not in output


@soak("runner/test_live; lines of a fit over Connect: test_fits")
def test_connect_client_shows_live_output_through_a_visible_store(
    cluster: Cluster, tmp_path: Path
) -> None:
    body = with_folder(PROGRAM, tmp_path)
    output = run_client(cluster.remote, body, tmp_path)
    assert "ALL WELL" in output, output


@soak("runner/test_reach")
def test_connect_client_without_store_listens_and_reports_missing_connections(
    cluster: Cluster, tmp_path: Path
) -> None:
    output = run_client(cluster.remote, with_folder(RUN, tmp_path), tmp_path)
    assert "ALL WELL" in output, output


@soak("lines of a fit over Connect: test_fits")
def test_connect_client_shows_live_output_of_an_unseen_store(
    unseen_store: Unseen, tmp_path: Path
) -> None:
    output = unseen_store.run(PROGRAM, tmp_path)
    assert "ALL WELL" in output, output
