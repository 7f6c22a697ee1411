"""The order in which launches of one application get its slots, with threads as launches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from sparkhvd.errors import PreflightError
from sparkhvd.runner import slots as admission
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.pure


class Launch:
    """A launch in its own thread, which holds its slots until `end()`."""

    def __init__(
        self,
        size: int,
        *,
        slots: Callable[[], int | None] = lambda: 4,
        kind: object = None,
        is_alone: bool = False,
        limit_s: float = 20,
    ) -> None:
        self.size = size
        self.said: list[str] = []
        self.attempts = 0
        self.error: BaseException | None = None
        self._slots, self._kind, self._is_alone, self._limit_s = slots, kind, is_alone, limit_s
        self._is_over, self._is_lost = threading.Event(), threading.Event()
        self.is_running = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            with admission.launch_ticket(
                "app", self._kind, self.size, is_alone=self._is_alone
            ) as mine:
                while not self._is_over.is_set():
                    with mine.slots(self._slots, self._limit_s, self.said.append):
                        self.attempts += 1
                        self.is_running.set()
                        self._is_lost.wait(20)
                        self._is_lost.clear()
                    self.is_running.clear()
        except BaseException as e:  # noqa: BLE001 - the test looks at it
            self.error = e

    def lose(self) -> None:
        """End the attempt. The launch requests its slots again."""
        self._is_lost.set()

    def stop(self) -> None:
        self._is_over.set()
        self._is_lost.set()

    def end(self) -> None:
        self.stop()
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture
def start() -> Iterator[Callable[[Launch], Launch]]:
    """Start a launch and wait until it runs or waits. All end with the test."""
    started: list[Launch] = []

    def starts(launch: Launch) -> Launch:
        started.append(launch)
        launch.thread.start()
        wait_until(lambda: launch.is_running.is_set() or launch.said, "it runs or waits")
        return launch

    yield starts
    for launch in started:
        launch.stop()
    for launch in started:
        launch.end()
    assert not admission.is_launched("app")


Start = Callable[[Launch], Launch]


def runs(launch: Launch) -> bool:
    return wait_until(launch.is_running.is_set, f"the launch of {launch.size} runs")


def test_launches_run_concurrently_while_slots_are_free(start: Start) -> None:
    first, second, third = start(Launch(2)), start(Launch(1)), start(Launch(2))
    assert (first.said, second.said) == ([], [])
    assert third.said == [
        "Waiting for 2 of 4 task slots: 2 launches of this application run, and 0 earlier launches wait."
    ]
    assert not third.is_running.is_set()
    assert start(Launch(4, kind="another")).said == []  # between kinds Spark decides
    first.end()
    assert runs(third)


def test_small_launches_do_not_overtake_a_large_launch(start: Start) -> None:
    small, large = start(Launch(2)), start(Launch(4))
    late = start(Launch(1))
    assert "and 1 earlier launches wait" in late.said[0]
    small.end()
    assert runs(large)
    assert not late.is_running.is_set()
    large.end()
    assert runs(late)


def test_lost_launch_is_relaunched_before_later_launches(start: Start) -> None:
    first, second = start(Launch(3)), start(Launch(2))
    first.lose()
    wait_until(lambda: first.attempts == 2, "it is launched again")
    assert not second.is_running.is_set()


def test_only_the_wait_for_executors_has_a_time_limit(start: Start) -> None:
    registered = [4]

    def slots() -> int:
        return registered[0]

    first = start(Launch(4, slots=slots))
    second = start(Launch(2, slots=slots, limit_s=0.2))
    first.lose()
    registered[0] = 3  # an executor is lost, and with it what the first launch needs
    assert runs(second)  # it has waited longer than its limit, and only for the other launch
    second.end()
    assert second.error is None
    late = Launch(4, slots=slots, limit_s=0.2)
    late.thread.start()
    late.thread.join(20)
    assert isinstance(late.error, PreflightError)
    assert "after 0.2 s the application has 3 task slots" in str(late.error)
    registered[0] = 4
    assert runs(first)


def test_launches_that_use_gpus_by_local_rank_run_alone(
    start: Start,
) -> None:
    def unknown() -> None:
        return None

    first = start(Launch(9, slots=unknown, is_alone=True))
    assert start(Launch(9, slots=unknown)).said == []
    second = start(Launch(1, slots=unknown, is_alone=True))
    assert second.said[0].startswith("Waiting for the GPUs: ")
    first.end()
    assert runs(second)


def test_interrupted_wait_leaves_no_queue_entry(start: Start) -> None:
    start(Launch(4))

    def interrupted() -> int:
        raise KeyboardInterrupt

    waits = Launch(1, slots=interrupted)
    waits.thread.start()
    waits.thread.join(20)
    assert isinstance(waits.error, KeyboardInterrupt)
    assert len(admission._turns) == 1
