"""Members of the next generation of an elastic job, without processes, sockets or a clock."""

from __future__ import annotations

import random

import pytest

from sparkhvd.elastic.membership import (
    Arrival,
    Change,
    Decision,
    JoinRequest,
    Limits,
    MemberReport,
    Membership,
    Refusal,
    Running,
    Update,
)
from sparkhvd.rendezvous import Endpoint
from tests.harness.soak import amount

pytestmark = pytest.mark.pure


def endpoint(number: int) -> Endpoint:
    return Endpoint("127.0.0.1", 1000 + number, "host", f"{number}")


def ask(
    number: int, generation: int = 0, *, state: bool = False, version: int = 0, **more: object
) -> JoinRequest:
    return JoinRequest(generation, endpoint(number), state, version, **more)  # type: ignore[arg-type]


class Job:
    """A membership, and the messages to its members."""

    def __init__(self, first: int = 3, least: int = 1, most: int = 8, **more: object) -> None:
        limits = Limits(first, least, most, **more)  # type: ignore[arg-type]
        self.membership = Membership(limits)
        for number in range(first):
            self.membership.expect(number)

    def messages(self) -> dict[int, object]:
        """Take the last message to each member."""
        found = dict(self.membership.outbox)
        self.membership.outbox.clear()
        return found

    def change(self) -> Change:
        (made,) = self.membership.changes
        self.membership.changes.clear()
        return made

    def begin(self) -> None:
        for number in range(self.membership.limits.first):
            self.membership.receive(number, ask(number), 0.0)
        self.messages()
        self.change()
        for number in self.membership.members:
            self.membership.receive(number, MemberReport("synced", 1), 0.0)

    def decided(self) -> Decision:
        """Return the decision that exactly its members have received."""
        decisions = {n: m for n, m in self.messages().items() if isinstance(m, Decision)}
        (decision,) = set(decisions.values())
        assert set(decisions) == set(decision.members)
        return decision


def test_new_process_learns_whether_a_generation_is_running() -> None:
    job = Job(2)
    job.membership.receive(0, Arrival(), 0.0)
    assert job.messages() == {0: Running(0)}
    job.begin()
    job.membership.expect(2)
    job.membership.receive(2, Arrival(), 1.0)
    assert job.messages() == {2: Running(2)}  # and members get no message
    job.membership.end(1, "has died", 2.0)
    job.membership.receive(0, ask(0, 1, state=True), 2.0)
    assert job.decided().members == (0,)  # without the process that is not ready
    job.membership.receive(2, ask(2), 3.0)
    assert job.messages() == {0: Update(only_removals=False)}


@pytest.mark.parametrize("most", [1, 2, 8])
def test_last_state_holder_leaves_after_others_have_the_state(most: int) -> None:
    first = min(most, 2)
    job = Job(first, most=most)
    job.begin()
    job.membership.expect(2)  # it is starting
    for number in range(first):
        job.membership.remove(number, "its host will go", 1.0)
    if first == 2:
        assert job.messages() == {0: Update(True), 1: Update(True)}
        job.membership.receive(0, ask(0, 1, state=True, needs_sync=False), 2.0)
        job.membership.receive(1, ask(1, 1, state=True, needs_sync=False), 2.0)
        messages = job.messages()
        assert isinstance(messages[1], Refusal)
        assert isinstance(messages[0], Decision)
        assert messages[0].members == (0,)
        job.change()
    assert job.messages() == {}  # the remaining one continues to train
    job.membership.receive(2, ask(2), 3.0)
    assert job.messages() == {0: Update(only_removals=False)}
    job.membership.receive(0, ask(0, job.membership.generation, state=True), 4.0)
    assert job.decided().members == (0, 2)
    job.membership.receive(2, MemberReport("synced", 3), 5.0)
    job.membership.step(5.0)
    assert job.messages() == {0: Update(True), 2: Update(True)}
    job.membership.receive(0, ask(0, 3, state=True), 6.0)
    assert job.messages()[0] == Refusal("removed", "its host will go")


@pytest.mark.parametrize("why", ["failed", "removed", "over"])
def test_a_new_process_that_cannot_join_is_refused_immediately(why: str) -> None:
    job = Job(2)
    job.begin()
    job.membership.expect(2)
    if why == "failed":
        job.membership.fail("it is so", 1.0)
    elif why == "removed":
        job.membership.remove(2, "its slot is gone", 1.0)
    else:
        job.membership.receive(0, MemberReport("finished", 1), 1.0)
    job.membership.receive(2, Arrival(), 1.0)
    refusal = job.messages()[2]
    assert isinstance(refusal, Refusal)
    assert refusal.kind == why


def test_first_generation_waits_for_all_starting_members() -> None:
    job = Job(first=3, least=2)
    job.membership.receive(2, ask(2), 0.0)
    job.membership.receive(0, ask(0), 1.0)
    assert job.messages() == {}
    assert job.membership.next_step_at() == 600.0
    job.membership.receive(1, ask(1), 2.0)
    assert job.decided() == Decision(1, (0, 1, 2), tuple(map(endpoint, range(3))), True)
    assert job.change() == Change(1, 0, (0, 1, 2), {}, (0, 1, 2), 0.0, "", True)


@pytest.mark.parametrize("ends", [True, False])
def test_first_generation_begins_without_ended_or_late_members(ends: bool) -> None:
    job = Job(first=3, least=2)
    for number in range(2):
        job.membership.receive(number, ask(number), 0.0)
    if ends:
        job.membership.end(2, "exited with 1", 1.0)
    else:
        job.membership.step(599.0)
        assert job.messages() == {}
        job.membership.step(600.0)
    assert job.decided().members == (0, 1)


def test_survivors_keep_their_order_after_two_deaths() -> None:
    job = Job(first=5)
    job.begin()
    job.membership.receive(4, ask(4, 1, state=True, why="rank 0 is gone"), 10.0)
    job.membership.end(0, "was ended by SIGKILL", 10.0)
    job.membership.receive(2, ask(2, 1, state=True, dead=(3,)), 10.0)
    assert job.messages() == {}  # rank 1 has not noticed yet
    job.membership.receive(1, ask(1, 1, state=True), 10.1)
    assert job.decided() == Decision(2, (1, 2, 4), tuple(map(endpoint, (1, 2, 4))), True)
    change = job.change()
    assert change.lost == {0: "was ended by SIGKILL", 3: "has died"}
    assert (change.before, change.why, change.asked_at) == (5, "rank 0 is gone", 10.0)


def test_death_during_shrinking_starts_another_generation() -> None:
    job = Job()
    job.begin()
    job.membership.end(2, "died", 1.0)
    for number in (0, 1):
        job.membership.receive(number, ask(number, 1, state=True), 1.0)
    assert job.decided().members == (0, 1)
    job.membership.end(0, "died", 1.1)
    job.membership.receive(1, ask(1, 2, state=True), 1.2)
    assert job.decided().members == (1,)
    assert job.membership.generation == 3


def test_silent_member_is_excluded_permanently() -> None:
    job = Job(patience_s=5.0)
    job.begin()
    for number in (0, 2):
        job.membership.receive(number, ask(number, 1, state=True), 10.0)
    assert job.membership.next_step_at() == 15.0
    job.membership.step(14.9)
    assert job.messages() == {}
    job.membership.step(15.0)
    messages = job.messages()
    assert isinstance(messages[1], Refusal)
    assert messages[1].kind == "left out"
    assert "waited 5 s" in messages[1].text
    assert isinstance(messages[0], Decision)
    assert messages[0].members == (0, 2)
    job.membership.receive(1, ask(1, 1, state=True), 100.0)
    assert job.messages() == {1: messages[1]}


def test_new_members_wait_for_the_next_commit_and_get_the_state() -> None:
    job = Job(first=2, most=3)
    job.begin()
    for number in (5, 6):
        job.membership.receive(number, ask(number), 1.0)
    assert job.messages() == dict.fromkeys((0, 1), Update(only_removals=False))
    job.membership.receive(1, ask(1, 1, state=True, version=3, needs_sync=False), 2.0)
    job.membership.receive(0, ask(0, 1, state=True, version=3, needs_sync=False), 2.0)
    decision = job.decided()
    assert (decision.members, decision.sync) == ((0, 1, 5), True)
    assert job.membership.waiting() == (6,)  # there is no place
    job.membership.end(5, "died", 3.0)
    assert job.messages() == dict.fromkeys((0, 1), Update(only_removals=False))


def test_removed_members_leave_at_a_commit_without_a_sync() -> None:
    job = Job()
    job.begin()
    job.membership.remove(1, "its host is not there any more", 1.0)
    assert job.messages() == dict.fromkeys((0, 1, 2), Update(only_removals=True))
    for number in range(3):
        job.membership.receive(number, ask(number, 1, state=True, version=1, needs_sync=False), 2.0)
    messages = job.messages()
    assert messages[1] == Refusal("removed", "its host is not there any more")
    assert messages[0] == messages[2] == Decision(2, (0, 2), tuple(map(endpoint, (0, 2))), False)


def test_last_state_holder_stays_until_another_member_joins() -> None:
    job = Job(first=2, most=2)
    job.begin()
    for number in range(2):
        job.membership.remove(number, "its slot is gone", 1.0)
    job.messages()
    for number in range(2):
        job.membership.receive(number, ask(number, 1, state=True, needs_sync=False), 2.0)
    messages = job.messages()
    assert messages[1] == Refusal("removed", "its slot is gone")
    assert messages[0] == Decision(2, (0,), (endpoint(0),), False)
    job.membership.expect(2)
    job.membership.receive(2, ask(2), 3.0)
    assert job.messages() == {0: Update(only_removals=False)}
    job.membership.receive(0, ask(0, 2, state=True), 4.0)
    job.membership.receive(2, MemberReport("synced", 3), 5.0)
    job.membership.receive(0, ask(0, 3, state=True), 6.0)
    assert job.messages()[0] == Refusal("removed", "its slot is gone")


def test_all_members_sync_if_one_needs_the_state() -> None:
    job = Job(first=2)
    job.begin()
    job.membership.receive(0, ask(0, 1, state=True, version=2, needs_sync=False), 1.0)
    job.membership.receive(1, ask(1, 1, state=True, version=1, needs_sync=True), 1.0)
    assert job.decided().sync


def test_member_with_the_newest_state_becomes_rank_0() -> None:
    job = Job(first=3)
    job.begin()
    job.membership.receive(7, ask(7), 1.0)
    for number, version in ((0, 4), (1, 5), (2, 5)):
        job.membership.receive(number, ask(number, 1, state=True, version=version), 1.0)
    assert job.decided().members == (1, 2, 0, 7)


def test_a_job_that_lost_its_state_ends_instead_of_restarting() -> None:
    job = Job(first=2)
    job.begin()
    job.membership.receive(2, ask(2), 1.0)
    job.messages()
    for number in (0, 1):
        job.membership.end(number, "died", 2.0)
    refusal = job.messages()[2]
    assert isinstance(refusal, Refusal)
    assert refusal.kind == "failed"
    assert "state is gone" in refusal.text


def test_too_few_members_wait_until_timeout_and_fail() -> None:
    job = Job(first=3, least=2, timeout_s=50.0)
    job.begin()
    for number in (1, 2):
        job.membership.end(number, "died", 1.0)
    job.membership.receive(0, ask(0, 1, state=True), 1.0)
    assert job.membership.next_step_at() == 51.0
    assert job.messages() == {}
    job.membership.receive(3, ask(3), 2.0)
    assert job.decided().members == (0, 3)
    job.membership.end(3, "died", 3.0)
    job.membership.receive(0, ask(0, 2, state=True), 3.0)
    job.membership.step(53.0)
    refusal = job.messages()[0]
    assert isinstance(refusal, Refusal)
    assert "1 of the 2 ranks that it needs" in refusal.text
    assert "50 s" in refusal.text


def test_exceeding_the_reset_limit_refuses_all_members() -> None:
    job = Job(first=2, resets=1)
    job.begin()
    for generation in (1, 2):
        for number in (0, 1):
            job.membership.receive(number, ask(number, generation, state=True), 1.0)
        messages = job.messages()
        if generation == 1:
            assert isinstance(messages[0], Decision)
        else:
            assert all(isinstance(each, Refusal) for each in messages.values())
            assert "reset 1 times" in str(messages[0])


def test_processes_cannot_join_after_the_function_returned() -> None:
    job = Job(first=2, least=2)
    job.begin()
    job.membership.receive(0, MemberReport("finished", 1), 1.0)
    job.membership.receive(5, ask(5), 1.0)
    job.membership.receive(1, ask(1, 1, state=True), 2.0)  # its last steps, without other ranks
    messages = job.messages()
    assert messages[5] == Refusal("over", "the others have finished")
    assert isinstance(messages[1], Decision)
    assert messages[1].members == (1,)


class World:
    """Processes that ask, die, stop and join in any order, and the answers to them."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        first = self.dice.randint(1, 5)
        most = self.dice.randint(first, 8)
        self.membership = Job(first=first, most=most, patience_s=10.0).membership
        self.now, self.count = 0.0, first
        self.alive, self.may_ask = set(range(first)), set(range(first))
        self.stopped: set[int] = set()
        self.known: dict[int, int] = {}  # by member, the last generation that it knows
        self.generations: dict[int, tuple[int, ...]] = {}
        self.out: set[int] = set()

    def step(self) -> None:
        self.now += self.dice.random() * 3
        self.dice.choice([self.die, self.stop_or_go, self.join, self.ask, self.ask, self.end])()
        self.membership.step(self.now)
        self.read()

    def die(self) -> None:
        if self.alive:
            number = self.dice.choice(sorted(self.alive))
            self.alive.discard(number)
            self.membership.end(number, "died", self.now)

    def stop_or_go(self) -> None:
        if self.alive:
            self.stopped ^= {self.dice.choice(sorted(self.alive))}

    def join(self) -> None:
        self.membership.expect(self.count)
        self.alive.add(self.count)
        self.may_ask.add(self.count)
        self.count += 1

    def ask(self) -> None:
        if ready := sorted((self.may_ask & self.alive) - self.stopped - self.out):
            self.send(self.dice.choice(ready))

    def end(self) -> None:
        """End the generation: its members may ask for the next."""
        self.may_ask |= set(self.membership.members) - set(self.membership.waiting())

    def send(self, number: int) -> None:
        self.may_ask.discard(number)
        state = number in self.known
        question = ask(number, self.known.get(number, 0), state=state)
        self.membership.receive(number, question, self.now)

    def read(self) -> None:
        for number, message in self.membership.outbox:
            if isinstance(message, Decision):
                assert number not in self.out
                assert number in message.members
                agreed = self.generations.setdefault(message.generation, message.members)
                assert agreed == message.members
                self.known[number] = message.generation
            elif isinstance(message, Refusal):
                self.out.add(number)
                assert message.kind == "left out" or "state is gone" in message.text
        self.membership.outbox.clear()


@pytest.mark.parametrize("seed", range(amount(200, 5000)))
def test_members_agree_after_random_events(seed: int) -> None:
    world = World(seed)
    for _ in range(world.dice.randint(5, 60)):
        world.step()
    # At the end, all processes that are alive and answer ask, and form the generation.
    membership = world.membership
    final = world.alive - world.stopped - world.out
    for _ in range(2):  # a joining process waits for the second time
        for number in sorted(final - world.out - set(membership.waiting())):
            world.send(number)
        world.now += 600.0  # for silent processes, and for starting ones
        membership.step(world.now)
        world.read()
    final -= world.out  # a process whose time was over before it could ask
    if not membership.failure and final & set(membership.members):
        # The rendezvous notices a process that was stopped after it had asked.
        assert set(membership.members) <= final | world.stopped
        assert len(membership.members) >= min(len(final), membership.limits.most)
