"""Delivery of a fit's numbers to loggers: in order, once, with retries while a server is down, without delay of the fit."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from sparkhvd import MLflowLogger, TensorBoardLogger, TorchEstimator
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.observe.loggers import base
from sparkhvd.observe.loggers.base import Delivery, Fit, Logger, Metric, Sink
from sparkhvd.observe.loggers.fanout import LoggerFanout

pytestmark = [pytest.mark.pure, pytest.mark.timeout(60)]


class Server(Sink):
    """A sink that can be down, and can refuse entries."""

    place = "the server"

    def __init__(self) -> None:
        self.is_up = True
        self.refused: set[str] = set()
        self.calls: list[str] = []
        self.metrics: list[Metric] = []
        self.parts: list[int] = []
        self.tries = 0

    def _answer(self, call: str) -> None:
        self.tries += 1
        if not self.is_up:
            raise ConnectionError("no listener")
        if call in self.refused:
            raise ValueError(f"no {call} here\nand a second line")
        self.calls.append(call)

    def start(self) -> None:
        self._answer("start")

    def log(self, metrics: Sequence[Metric]) -> None:
        self._answer("log")
        self.metrics += metrics
        self.parts.append(len(metrics))

    def log_model(self, model: object) -> None:
        self._answer(f"model {model}")

    def finish(self, state: str, files: object) -> None:
        self._answer(state)

    def is_refused(self, error: Exception) -> bool:
        return isinstance(error, ValueError)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(base, "_FIRST_PAUSE_S", 0.01)
    yield
    until(lambda: not [t for t in threading.enumerate() if t.name == "sparkhvd-logger"])


def numbers(count: int, begin: int = 0) -> list[Metric]:
    return [Metric("loss", float(n), n, 0.0) for n in range(begin, begin + count)]


def test_numbers_and_calls_arrive_in_order_in_large_batches(
    server: Server, said: list[str]
) -> None:
    server.is_up = False
    sent = Delivery(server, 60, said.append)
    sent.put(numbers(1500))
    sent.call(lambda sink: sink.log_model("m"))
    sent.put(numbers(2, 1500))
    sent.call(lambda sink: sink.finish("finished", {}))
    server.is_up = True
    sent.close()
    assert server.metrics == numbers(1502)
    assert server.calls == ["start", "log", "log", "model m", "log", "finished"]
    assert server.parts == [1000, 500, 2]


def test_outage_loses_no_number_and_prints_two_lines(server: Server, said: list[str]) -> None:
    sent = Delivery(server, 60, said.append)
    for number in range(40):
        if number == 10:
            until(lambda: len(server.metrics) == 10)
            server.is_up = False
        if number == 30:
            until(lambda: said)
            assert len(server.metrics) == 10
            server.is_up = True
        sent.put(numbers(1, number))
        time.sleep(0.005)
    sent.close()
    assert server.metrics == numbers(40)
    assert said == [
        "the server does not respond (ConnectionError: no listener). Training continues; undelivered numbers are kept.",
        "the server responds again; the waiting entries are logged.",
    ]


def until(condition: object) -> None:
    deadline = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_fit_waits_for_a_server_no_longer_than_its_patience(
    server: Server, said: list[str]
) -> None:
    server.is_up = False
    sent = Delivery(server, 0.3, said.append)
    sent.put(numbers(3))
    began = time.monotonic()
    with pytest.warns(
        UserWarning, match=r"for 0.3 s, .* 3 numbers and 1 other entries are missing"
    ):
        sent.close()
    assert 0.25 < time.monotonic() - began < 10
    assert len(said) == 1


def comes_up(server: Server, sent: Delivery) -> None:
    server.is_up = True
    sent.close()


def test_a_refused_entry_causes_a_warning_and_the_rest_is_logged(
    server: Server, said: list[str]
) -> None:
    server.is_up, server.refused = False, {"model m"}
    sent = Delivery(server, 60, said.append)
    sent.call(lambda sink: sink.log_model("m"))
    sent.put(numbers(1))
    expected = r"the server refuses an entry: ValueError: no model m here$"
    with pytest.warns(UserWarning, match=expected):
        comes_up(server, sent)
    assert server.calls == ["start", "log"]


def test_no_entry_is_sent_after_the_start_is_refused(server: Server, said: list[str]) -> None:
    server.is_up, server.refused = False, {"start"}
    sent = Delivery(server, 60, said.append)
    sent.put(numbers(3))
    sent.call(lambda sink: sink.finish("finished", {}))
    with pytest.warns(UserWarning, match="the server refuses this fit: ValueError: no start here"):
        comes_up(server, sent)
    assert server.calls == []


class ToServer(Logger):
    """Logger of a user."""

    def __init__(self, server: Server, fits: list[Fit]) -> None:
        self.server, self.fits = server, fits

    def begin(self, fit: Fit) -> Sink:
        self.fits.append(fit)
        return self.server


class Broken(Logger):
    """Logger that cannot begin."""

    def begin(self, fit: Fit) -> Sink:
        raise OSError("no")


def test_records_reach_loggers_despite_a_broken_logger(
    server: Server,
) -> None:
    fits: list[Fit] = []
    with pytest.warns(UserWarning, match="does not log this fit: OSError: no"):
        fanout = LoggerFanout([Broken(), ToServer(server, fits)], lambda: Fit("mine"), print)
    record = {"epoch": 2, "loss": 0.5, "note": "x", "lr": None, "rows": 12, "flag": True}
    fanout.epoch(record)
    fanout.finished("it", {})
    assert fits == [Fit("mine")]
    assert [(m.name, m.value, m.step) for m in server.metrics] == [
        ("loss", 0.5, 2),
        ("rows", 12, 2),
    ]
    assert server.calls == ["start", "log", "model it", "finished"]


def test_loggers_learn_how_a_fit_failed(server: Server) -> None:
    for error, state in ((ValueError(), "failed"), (KeyboardInterrupt(), "interrupted")):
        fanout = LoggerFanout([ToServer(server, [])], lambda: Fit("mine"), print)
        fanout.failed(error, {"run_id": "mine"})
        assert server.calls[-1] == state


def test_loggers_without_a_final_call_end_immediately(server: Server) -> None:
    server.is_up = False
    with LoggerFanout([ToServer(server, [])], lambda: Fit("mine"), print) as fanout:
        fanout.epoch({"epoch": 1, "loss": 0.5})
        until(lambda: server.tries)
        began = time.monotonic()
    assert time.monotonic() - began < 1
    (delivery,) = fanout._deliveries
    delivery._thread.join(10)
    assert not delivery._thread.is_alive()
    assert server.calls == []


def test_fit_description_is_not_requested_without_loggers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fanout = LoggerFanout([], lambda: pytest.fail("asked"), print)
        fanout.epoch({"epoch": 1, "loss": 1.0})
        fanout.finished(None, {})


def test_estimator_refuses_invalid_loggers(server: Server) -> None:
    logger = ToServer(server, [])
    assert TorchEstimator(loggers=logger).getLoggers() == [logger]
    with pytest.raises(TypeError, match="loggers"):
        TorchEstimator(loggers=["mlflow"])


@pytest.mark.parametrize("kind", [MLflowLogger, TensorBoardLogger])
def test_error_names_the_missing_package_of_a_logger(
    kind: type[Logger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidArgumentError, match=r"pip install 'sparkhvd\["):
        kind()


def profile_of(moments: Sequence[float], epoch: int) -> dict[str, Any]:
    columns = {
        "host": "host-a",
        "time": list(moments),
        "cpu_percent": [100.0] * len(moments),
        "rss_megabytes": [300.0] * len(moments),
        "gpu_percent": [None] * len(moments),
        "gpu_megabytes": [None] * len(moments),
    }
    return {"every": 1, "epochs": [{"epoch": epoch}], "load": [columns]}


def test_load_samples_are_logged_once_with_node_and_time(server: Server) -> None:
    fanout = LoggerFanout([ToServer(server, [])], lambda: Fit("mine"), print)
    assert not fanout.is_behind
    fanout.epoch({"epoch": 1})
    assert fanout.is_behind
    fanout.load(profile_of([50.0, 51.0], 1))
    assert not fanout.is_behind
    fanout.load(profile_of([50.0, 52.5], 2))  # every second one of the older samples is kept
    fanout.finished("it", {})
    found = [(m.name, m.value, m.step, m.time) for m in server.metrics]
    node = "system/host-a-rank-0"
    assert found == [
        (f"{node}/{name}", value, int(moment - 50), moment)
        for moment in (50.0, 51.0, 52.5)
        for name, value in (("cpu_utilization_percentage", 100.0), ("rss_megabytes", 300.0))
    ]
