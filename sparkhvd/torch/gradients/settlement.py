"""Agreement of all ranks on the gradients that are reduced, before the first reduction.

**Parameters and options** are compared when the first backward pass ends (`agreement`). Where strides differ, gradients are
sent row-major.

**Layouts**: which gradients are sparse is seen when they arrive, and a rank that did not use the layer has none. So the ranks
vote (`sparse`) before anything is submitted; a parameter that no rank gave a gradient is in no bucket, and in the votes of
later cycles until it has one (*late* parameters).
"""

from __future__ import annotations

from collections.abc import Sequence

from sparkhvd.errors import MismatchError
from sparkhvd.torch.context import Context
from sparkhvd.torch.gradients.agreement import Agreement
from sparkhvd.torch.gradients.buckets import Buckets
from sparkhvd.torch.gradients.entry import Entry, Parked
from sparkhvd.torch.gradients.plan import BucketPlanner
from sparkhvd.torch.gradients.powersgd import describe
from sparkhvd.torch.gradients.sparse import LayoutVote

__all__ = ["Settlement"]


class Settlement:
    """Settles with all ranks which gradients there are to reduce. Every rank of the process set makes one.

    Args:
        context: whose engine compares.
        label: of the reducer.
        planner: of the reducer, with its parameters.

    Attributes:
        is_settled: whether hooks may submit: all ranks have agreed on what there is to reduce.
        undecided: parameters of which it is not known yet whether their gradients are sparse.
    """

    def __init__(self, context: Context, label: str, planner: BucketPlanner) -> None:
        options = planner.options
        self._context = context
        self._label = label
        self._entries = planner.entries
        self._options = options
        self._is_flagged = planner.is_flagged
        self._is_on_gpu = planner.device is not None
        self.undecided: list[Entry] = []
        if not (options.as_views or options.sparse_as_dense or options.sharded):
            self.undecided = list(self._entries)
        self._vote: LayoutVote | None = None
        self.is_settled = False
        # Looked at when the first backward ends.
        self._agreement: Agreement | None = Agreement(
            context,
            label,
            options.process_set,
            options.ranks,
            _description(context, planner),
            [entry.stride for entry in self._entries],
        )

    @property
    def parked(self) -> set[int]:
        """Numbers of the parameters that are in no bucket; before it is settled every one counts as dense."""
        return {entry.index for entry in self.undecided} if self.is_settled else set()

    def settle_views(self) -> None:
        """Settle at once, where gradients are dense views: what is allocated follows from parameters and strides.

        Raises:
            MismatchError: ranks have different parameters or options.
        """
        self._check_agreement()
        self.is_settled = True

    def begin(self) -> bool:
        """Begin to settle when the first backward ends, without waiting for what other ranks submit in their `wait`.

        Returns:
            True if `settle` will wait for other ranks.
        """
        if self._agreement is not None:
            self._agreement.check()  # every rank has sent its part when it built the optimizer
        if self.undecided and self._vote is None:
            self.start_vote()
        # On a GPU the memory is made first, for which all ranks wait.
        return bool(self.undecided) or self._is_on_gpu

    def settle(self) -> bool:
        """Wait for the other ranks, before anything is submitted for the first time.

        Returns:
            True if the gradients must be divided anew.
        """
        self._check_agreement()
        decided: list[Entry] = []
        if self.undecided:
            vote, self._vote = self._vote or self._new_vote(), None
            votes = vote.wait()
            if not votes.is_complete:
                return False  # a rank has joined and does not learn of it; all vote again in the next cycle
            decided = self._decide(votes.layouts)
        self.is_settled = True
        return bool(self.undecided) or any([entry.sparse_dim for entry in decided])

    def start_vote(self) -> None:
        """Start to vote on the layouts of the undecided parameters."""
        self._vote = self._new_vote()

    def wait_for_vote(self) -> None:
        """Wait until no vote is in flight."""
        if self._vote is not None:
            self._vote.wait()

    def reduce_late(self, buckets: Buckets) -> None:
        """Reduce gradients that are the first of their parameter, if this cycle had a vote on them.

        Args:
            buckets: of the reducer; late parameters get buckets of their own, which stay.
        """
        if self._vote is None:
            return
        votes = self._vote.wait()
        if votes.is_complete:
            late = self._decide(votes.layouts)
            if late:
                buckets.reduce_late([entry.index for entry in late])
            return
        # A rank has joined and does not learn of the layouts, so they hold for this cycle only.
        layouts = zip(self.undecided, votes.layouts, strict=True)
        late = [entry for entry, layout in layouts if layout is not None]
        buckets.reduce_once({f"{self._label}.late.{entry.index}": entry for entry in late})
        for entry in late:
            entry.bucket = Parked()

    def reset(self) -> None:
        """Get ready for the next cycle."""
        self._vote = None
        for entry in self.undecided:
            entry.grad = None

    def _new_vote(self) -> LayoutVote:
        return LayoutVote(self._context, self._label, self._options, self.undecided)

    def _decide(self, layouts: Sequence[int | None]) -> list[Entry]:
        """Adopt the layouts that all ranks have together; return the parameters that are decided now."""
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

    def _forget_strides(self, agreement: Agreement) -> None:
        if self._options.sharded:
            name = self._entries[agreement.differing_strides()[0]].name
            raise MismatchError(
                f"{self._label}: ranks disagree on the memory layout (strides) of {name!r}, and sharded=True divides "
                "memory. Use the same memory format on every rank, or leave sharded out."
            )
        # Of all parameters, so that no rank asks which differ: a rank that has joined would not answer.
        for entry in self._entries:
            entry.forget_stride()


def _description(context: Context, planner: BucketPlanner) -> list[str]:
    """Describe the options, then each parameter; ranks with different descriptions cannot reduce together."""
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
