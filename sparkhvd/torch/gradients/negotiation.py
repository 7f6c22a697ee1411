"""Agreement of the ranks about the gradients to reduce, before the first reduction.

**Parameters and options** are compared when the first backward pass ends. Gradients with different strides are sent row-major.

**Layouts**: a sparse gradient is recognized when it arrives, and a rank that did not use the layer has no gradient. So the ranks
vote (`sparse`) before the first submission. A parameter without a gradient on any rank has no bucket, and takes part in the votes
of later cycles until it has one (*late* parameters).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from sparkhvd.engine.work import Work
from sparkhvd.errors import MismatchError
from sparkhvd.torch.collectives.allgathers import gathered, start_allgather
from sparkhvd.torch.collectives.broadcasts import start_broadcast
from sparkhvd.torch.collectives.tensors import Operation
from sparkhvd.torch.context import Context
from sparkhvd.torch.gradients.buckets import Buckets
from sparkhvd.torch.gradients.dense import GradientSlot, ReduceOptions, UnusedParameters
from sparkhvd.torch.gradients.plan import BucketPlanner
from sparkhvd.torch.gradients.powersgd import describe
from sparkhvd.torch.gradients.sparse import LayoutVote
from sparkhvd.wire import read_json


class GradientNegotiation:
    """Lets the ranks agree about the gradients to reduce. Every rank of the process set creates an object.

    Args:
        context: the context whose engine compares.
        label: name of the reducer.
        planner: planner of the reducer, with its parameters.

    Attributes:
        is_negotiated: whether hooks may submit, because all ranks have agreed on the gradients to reduce.
        undecided: parameters whose gradients may be sparse or dense.
    """

    def __init__(self, context: Context, label: str, planner: BucketPlanner) -> None:
        options = planner.options
        self._context = context
        self._label = label
        self._entries = planner.entries
        self._options = options
        self._is_flagged = planner.is_flagged
        self._is_on_gpu = planner.device is not None
        self.undecided: list[GradientSlot] = []
        if not (options.as_views or options.sparse_as_dense or options.sharded):
            self.undecided = list(self._entries)
        self._vote: LayoutVote | None = None
        self.is_negotiated = False
        # Its result is checked when the first backward pass ends.
        self._agreement: ParameterCheck | None = ParameterCheck(
            context,
            label,
            options.process_set,
            options.ranks,
            _description(context, planner),
            [entry.stride for entry in self._entries],
        )

    @property
    def unused(self) -> set[int]:
        """Numbers of the parameters without a bucket.

        Before the ranks agree every parameter has a bucket.
        """
        return {entry.index for entry in self.undecided} if self.is_negotiated else set()

    def settle_views(self) -> None:
        """Finish the negotiation now for gradient views. They are dense on every rank.

        Raises:
            MismatchError: ranks have different parameters or options.
        """
        self._check_agreement()
        self.is_negotiated = True

    def begin(self) -> bool:
        """Begin the negotiation at the end of the first backward pass.

        No operation of this method waits for other ranks' `negotiate`.

        Returns:
            True if `negotiate` will wait for other ranks.
        """
        if self._agreement is not None:
            self._agreement.check()  # every rank sent its digest when it built the optimizer
        if self.undecided and self._vote is None:
            self.start_vote()
        # On a GPU the allocation of the buckets' memory waits for all ranks.
        return bool(self.undecided) or self._is_on_gpu

    def negotiate(self) -> bool:
        """Wait for the other ranks, before the first submission.

        Returns:
            True if new buckets are needed.
        """
        self._check_agreement()
        decided: list[GradientSlot] = []
        if self.undecided:
            vote, self._vote = self._vote or self._new_vote(), None
            votes = vote.wait()
            if not votes.is_complete:
                # A rank in `join()` did not vote, so all ranks vote again in the next cycle.
                return False
            decided = self._decide(votes.layouts)
        self.is_negotiated = True
        return bool(self.undecided) or any([entry.sparse_dim for entry in decided])

    def start_vote(self) -> None:
        """Start to vote on the layouts of the undecided parameters."""
        self._vote = self._new_vote()

    def wait_for_vote(self) -> None:
        """Wait until no vote is in flight."""
        if self._vote is not None:
            self._vote.wait()

    def reduce_late(self, buckets: Buckets) -> None:
        """Reduce gradients of parameters unused so far on all ranks, if this cycle voted on them.

        Args:
            buckets: buckets of the reducer; the late parameters get separate, permanent buckets.
        """
        if self._vote is None:
            return
        votes = self._vote.wait()
        if votes.is_complete:
            late = self._decide(votes.layouts)
            if late:
                buckets.reduce_late([entry.index for entry in late])
            return
        # A rank in `join()` does not learn the layouts, so the ranks use them for this cycle only.
        layouts = zip(self.undecided, votes.layouts, strict=True)
        late = [entry for entry, layout in layouts if layout is not None]
        buckets.reduce_once({f"{self._label}.late.{entry.index}": entry for entry in late})
        for entry in late:
            entry.bucket = UnusedParameters()

    def reset(self) -> None:
        """Get ready for the next cycle."""
        self._vote = None
        for entry in self.undecided:
            entry.grad = None

    def _new_vote(self) -> LayoutVote:
        return LayoutVote(self._context, self._label, self._options, self.undecided)

    def _decide(self, layouts: Sequence[int | None]) -> list[GradientSlot]:
        """Adopt the layouts of all ranks and return the newly decided parameters."""
        voted = list(zip(self.undecided, layouts, strict=True))
        if not self._is_flagged:  # a rank without a gradient sends zeros
            voted = [(entry, layout or 0) for entry, layout in voted]
        self.undecided = [entry for entry, layout in voted if layout is None]
        for entry, layout in voted:
            entry.sparse_dim = layout or 0
        return [entry for entry, layout in voted if layout is not None]

    def _check_agreement(self) -> None:
        if self._agreement is not None:
            self._agreement.check()
            if not self._agreement.has_equal_strides:
                self._forget_strides(self._agreement)
            self._agreement = None

    def _forget_strides(self, agreement: ParameterCheck) -> None:
        if self._options.sharded:
            name = self._entries[agreement.differing_strides()[0]].name
            raise MismatchError(
                f"{self._label}: ranks disagree on the memory layout (strides) of {name!r}, but sharded=True needs the same "
                "layout on every rank. Use the same memory format on every rank, or leave sharded out."
            )
        # Ignore the strides of all parameters. To find the different ones the ranks would have to exchange them, and a
        # rank in `join()` does not answer.
        for entry in self._entries:
            entry.forget_stride()


def _description(context: Context, planner: BucketPlanner) -> list[str]:
    """Describe the options, then each parameter. Ranks can reduce together only if their descriptions are equal."""
    options, entries = planner.options, planner.entries
    groups = f"groups {options.groups}" if options.groups else "no groups"
    states = [""] * len(entries)
    if planner.low_rank is not None:
        states = planner.low_rank.fingerprint(entries)
    tuning = context.engine.settings.tuning
    device_bytes = f", device_bucket_bytes {options.device_bucket_bytes}" if planner.device else ""
    return [
        f"op {options.op.name.title()}, predivide factor {options.predivide}, "
        f"{describe(options.compression)}, bucket_bytes {options.bucket_bytes}, {groups}"
        f"{', gradients as views' if options.as_views else ''}"
        f"{', sharded' if options.sharded else ''}"
        f"{', sparse as dense' if options.sparse_as_dense else ''}"
        f"{f', autotune {tuning}' if tuning else ''}"
        f"{device_bytes}",
        *[
            f"{entry.name!r} with shape {entry.shape}, {entry.dtype}"
            f"{'' if entry.param.is_cpu else ' on a GPU'}{state}"
            for entry, state in zip(entries, states, strict=True)
        ],
    ]


# ----------------------------------------------------------------------------------------------------
# Comparison of parameters and options between ranks. If strides differ, gradients are sent row-major.

_DIGEST_BYTES = 32

_T = TypeVar("_T")


class ParameterCheck:
    """Comparison of parameters and options of all ranks.

    The constructor sends, and `check` waits for the other ranks. Every rank of the process set creates an object. Each
    sends two digests. The ranks exchange the texts only if the digests differ.

    Args:
        context: the context whose engine compares.
        label: name of the optimizer.
        process_set: the engine's number of the process set.
        ranks: global ranks of the process set, ascending.
        description: the options, then a sentence per parameter; must be equal on all ranks.
        strides: of every parameter's gradient.
    """

    def __init__(
        self,
        context: Context,
        label: str,
        process_set: int,
        ranks: Sequence[int],
        description: list[str],
        strides: Sequence[tuple[int, ...]],
    ) -> None:
        self._context = context
        self._label = label
        self._process_set = process_set
        self._ranks = ranks
        self._description = description
        self._strides = [list(each) for each in strides]
        digests = _digest(description) + _digest(self._strides)
        self._digests = torch.tensor(list(digests), dtype=torch.uint8)
        self._work: Work = start_allgather(context, f"{label}.digest", self._digests, process_set)
        self._difference: str | None = None

    def check(self) -> None:
        """Wait for the other ranks' digests, sent when they built the optimizer.

        Raises:
            MismatchError: parameters or options differ; on every rank, with the first difference.
        """
        if not bool(self._is_equal()[:, :_DIGEST_BYTES].all()):
            if self._difference is None:  # exchange once, also if this rank checks again
                texts = self._exchange("description", self._description)
                self._difference = _difference(self._label, self._ranks, texts)
            raise MismatchError(self._difference)

    @property
    def has_equal_strides(self) -> bool:
        """Whether all strides are the same on every rank. Call `check` first."""
        return bool(self._is_equal().all())

    def differing_strides(self) -> list[int]:
        """Find the parameters whose strides differ between ranks. Every rank must call this, after `check`.

        Returns:
            Numbers of the parameters whose strides differ between ranks; the same list on every rank.
        """
        if self.has_equal_strides:
            return []
        strides = self._exchange("strides", self._strides)
        return [
            i
            for i, each in enumerate(zip(*strides, strict=True))
            if any(s != each[0] for s in each)
        ]

    def _is_equal(self) -> Tensor:
        self._work.wait()
        digests = self._digests
        by_rank = gathered(self._work, digests.dtype, digests.shape)[0].view(-1, len(digests))
        return by_rank == digests

    def _exchange(self, what: str, value: _T) -> list[_T]:
        """Gather the values of all ranks, by rank."""
        text: Tensor = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        work = start_allgather(self._context, f"{self._label}.{what}", text, self._process_set)
        work.wait()
        joined, rows = gathered(work, text.dtype, text.shape)
        return [
            read_json(bytes(part.tolist()), most_bytes=None) for part in joined.split(list(rows))
        ]


def _digest(value: object) -> bytes:
    return hashlib.sha256(json.dumps(value).encode()).digest()


def _difference(label: str, ranks: Sequence[int], descriptions: list[list[str]]) -> str:
    """Describe the first difference between the first rank and another rank."""
    first = descriptions[0]
    place = next(place for place, texts in enumerate(descriptions) if texts != first)
    differing, rank = descriptions[place], ranks[place]
    advice = "Build the same model and the same optimizer, in the same order, on every rank."
    for number, (ours, theirs) in enumerate(zip(first, differing, strict=False)):
        if ours != theirs:
            what = "the options" if number == 0 else f"parameter {number - 1}"
            return f"{label}: ranks disagree on {what}. Rank {ranks[0]} has {ours}; rank {rank} has {theirs}. {advice}"
    return (
        f"{label}: ranks disagree on the number of parameters. Rank {ranks[0]} has {len(first) - 1}, "
        f"rank {rank} has {len(differing) - 1}. {advice}"
    )


# ----------------------------------------------------------------------------------------------------
# Order in which gradients become ready. All ranks adopt the first rank's order for their buckets.


class ReadyOrder:
    """Records the order of a cycle's gradients, and broadcasts the first rank's order.

    Every rank of the process set creates an object.

    Args:
        context: the context whose engine sends.
        label: name of the reducer.
        options: options of the reducer.
        count: number of its parameters.

    Attributes:
        seen: numbers of the parameters in the ready order of this cycle's gradients.
    """

    def __init__(self, context: Context, label: str, options: ReduceOptions, count: int) -> None:
        self._context = context
        self._label = label
        self._options = options
        self._count = count
        self.seen: list[int] = []
        self._offered: tuple[Tensor, Operation] | None = None

    def offer(self) -> None:
        """Start to send the first rank's order to every rank, once per cycle."""
        if self._offered is not None:
            return
        late = set(range(self._count)).difference(self.seen)
        numbers = [*dict.fromkeys(self.seen), *sorted(late, reverse=True)]
        order = torch.tensor(numbers, dtype=torch.int64)
        name, options = f"{self._label}.order", self._options
        work = start_broadcast(
            self._context, name, order, order, options.ranks[0], options.process_set
        )
        self._offered = (order, work)

    def agreed(self) -> list[int] | None:
        """Wait for the offered order and return it, or return None without an order in this cycle."""
        if self._offered is None:
            return None
        order, work = self._offered
        self._offered = None
        try:
            work.wait()
        except MismatchError:
            # A rank in `join()` did not take part, so all ranks retry in the next cycle.
            return None
        return order.tolist()
