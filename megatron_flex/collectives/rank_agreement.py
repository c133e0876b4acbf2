"""Short messages between ranks: flags, small objects, and the comparison of hooks."""

from __future__ import annotations

import hashlib
import json
import pickle
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_flex.collectives.gloo_workers import run_collective
from megatron_flex.collectives.host_groups import device_of
from megatron_flex.collectives.meter import call_metered
from megatron_flex.collectives.rank_liveness import FINISHED, rank_liveness
from megatron_flex.collectives.store_round import COMPLETE, DIFFERENT, VALUES, Statements, StoreRound
from megatron_flex.config import flex_config
from megatron_flex.errors import MAX_NAMED_RANKS, HookError, describe_error, name_ranks
from megatron_flex.mesh import Axis, Mesh

ABSENT_RANKS = (
    "{ranks} did not compare hooks within {seconds:g} s: hooks are registered on some ranks only, or "
    "those ranks died, or wait for a tensor of this one; register the same hooks on every rank, and run "
    "what stages send each other within their steps (`with flex.step():`)"
)
DIFFERENT_PLACES = (
    "ranks are at different points ({places}): run as many steps on every rank, and call on all of them what "
    "every rank has to call"
)
GAVE_UP = (
    "rank {rank} came to {place} and waited for this rank, rank {me}, but gave up: {why}; call it again on "
    "all ranks, or let ranks wait longer (FLEX_AGREE_SECONDS)"
)
PLACE_SEPARATOR = "\n"  # in a place: the text after it is compared too, but not shown
PLACE_MARK = "@"  # prefix of the places at which ranks compare hooks
AT_HOOKS = "hooks"  # where a rank waits that compares hooks
LOOKS = 100  # how often in a second the ranks of a job look whether others wait, all together
MEETING = 1800.0  # seconds, as for torch's collectives: a rank may still have steps to run
FAILED_MEETING = 30.0  # seconds after a failed step: the others may wait for this rank inside of it
MIN_WAIT = 600.0  # seconds; the first step of a large job compiles, reads data and opens connections
WATCH_SECONDS = 1.0  # seconds that a rank waits for others before it calls its watcher, in a small job
WATCHING_RANKS = 1000  # ranks that may call their watchers in one second, which ask the store
FIRST_FLAGS = 28  # flags in the first message of an exchange
EXCHANGE_BYTES = 8 * (4 + FIRST_FLAGS)  # bytes of that message
Watcher = Callable[[], None]


def max_over_ranks(flags: Sequence[int], mesh: Mesh, at: str = "", watch: Watcher | None = None) -> list[int]:
    """The greatest value of each flag over all ranks of the mesh.

    Collective over every axis with more than one rank. The first message always has the same size and
    identifies the exchange, so that ranks at different exchanges detect it.

    Args:
        flags: the flags, the same number on all ranks.
        mesh: the axes.
        at: a description of the exchange, the same on all ranks.
        watch: called repeatedly while this rank waits for others; it may raise.

    Raises:
        HookError: on all ranks, if they are at different exchanges.
    """
    axes = [a for a in mesh if a.size > 1]
    if not axes:
        return list(flags)
    device = device_of(axes[0].group)
    code, count = zlib.crc32(at.encode()), len(flags)
    first = [code, -code, count, -count, *flags[:FIRST_FLAGS]]
    greatest = _all_reduce_max(first + [0] * (FIRST_FLAGS - len(flags)), axes, device, watch)
    if greatest[0] != -greatest[1] or greatest[2] != -greatest[3]:
        raise HookError(
            _describe_difference(_all_gather_items((dist.get_rank(), at or "another exchange"), axes))
        )
    rest = _all_reduce_max(flags[FIRST_FLAGS:], axes, device, watch) if count > FIRST_FLAGS else []
    return [*greatest[4 : 4 + min(count, FIRST_FLAGS)], *rest]


def equal_over_ranks(number: int, mesh: Mesh, at: str = "", watch: Watcher | None = None) -> bool:
    """Whether a number is the same on all ranks. Arguments, collective and errors as in `max_over_ranks`."""
    greatest, negative = max_over_ranks([number, -number], mesh, at, watch)
    return greatest == -negative


def any_over_ranks(flag: bool, mesh: Mesh, device: torch.device) -> torch.Tensor:
    """Whether the flag is true on any rank, as a tensor on the device, for which the host does not wait.

    Collective over every axis with more than one rank, on the process groups of the device.
    """
    any_flag = torch.full((), int(flag), dtype=torch.int32, device=device)
    for axis in mesh:
        if axis.size > 1:
            call_metered("all_reduce", axis, any_flag, dist.all_reduce, any_flag, dist.ReduceOp.MAX)
    return any_flag.bool()


def _all_reduce_max(
    numbers: Sequence[int], axes: Sequence[Axis], device: str, watch: Watcher | None
) -> list[int]:
    # The host need not wait for the few bytes: the driver has taken them when the call returns.
    tensor = torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)
    for axis in axes:
        options = {"op": dist.ReduceOp.MAX, "group": axis.group, "async_op": watch is not None}
        work = run_collective(dist.all_reduce, tensor, **options)
        if watch is not None and work is not None:
            _wait_and_watch(work, watch, blocking=device == "cpu")  # NCCL's aborts the collective
    return [int(n) for n in tensor.tolist()]


def watch_seconds() -> float:
    """Seconds that a rank waits for others before it looks what keeps them: longer in a large job."""
    return max(WATCH_SECONDS, dist.get_world_size() / WATCHING_RANKS)


def _wait_and_watch(work: Any, watch: Watcher, blocking: bool) -> None:
    """Wait for other ranks and call the watcher meanwhile; `blocking`: a timeout of a wait aborts nothing."""
    pause = WATCH_SECONDS  # the size of the world, which costs some calls, counts for ranks that wait longer
    if blocking:
        while True:
            try:
                work.wait(timedelta(seconds=pause))
                return
            except RuntimeError:
                if work.is_completed():  # it failed, or ended after the time was up
                    work.wait()
                    return
                if pause >= watch_seconds():
                    watch()
                pause = watch_seconds()
    patience, nap = time.monotonic() + pause, 1e-5
    while not work.is_completed():
        if time.monotonic() > patience:
            if pause >= watch_seconds():
                watch()
            pause = watch_seconds()
            patience = time.monotonic() + pause
        time.sleep(nap)
        nap = min(2 * nap, 1e-3)
    work.wait()


def gather_objects(item: Any, mesh: Mesh, axes: Sequence[str]) -> list[Any]:
    """The items of all ranks along `axes`, the last of them counting fastest.

    Collective over those axes. For setup and errors, never for tensors.

    Raises:
        HookError: on all ranks, if some ranks are at another exchange.
    """
    chosen = [mesh[name] for name in axes]
    max_over_ranks([], Mesh(tuple(chosen)))
    return _all_gather_items(item, chosen)


def _all_gather_items(item: Any, axes: Sequence[Axis]) -> list[Any]:
    items = [item]
    for axis in reversed(axes):
        if axis.size > 1:
            items = [i for slot in all_gather_pickled(items, axis.group) for i in slot]
    return items


def all_gather_pickled(item: Any, group: Any) -> list[Any]:
    """The items of all ranks of a process group.

    `all_gather_object` does the same with tensors of its own, for which the exit would not wait.
    """
    device = device_of(group)
    data = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8).to(device)
    lengths = _all_gather_rows(torch.tensor([len(data)], dtype=torch.int64, device=device), group)
    sizes = lengths.flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    rows = _all_gather_rows(padded, group).cpu()
    texts = [row[:n].numpy().tobytes() for row, n in zip(rows, sizes, strict=True)]
    return [pickle.loads(text) for text in texts]  # noqa: S301  # of ranks of this job, as torch does it


def _all_gather_rows(row: torch.Tensor, group: Any) -> torch.Tensor:
    rows = row.new_empty((dist.get_world_size(group), len(row)))
    run_collective(dist.all_gather, list(rows), row, group=group)
    return rows


class _Statement(NamedTuple):
    """What a rank compares: see `Agreement.compare_details`."""

    what: str
    code: str
    where: str
    values: str


class Agreement:
    """Compares values on all ranks; all ranks raise if the values differ.

    The ranks compare through the rendezvous store instead of a collective: if a rank never takes part
    (because a hook was registered on some ranks only), the others raise after a timeout, where a collective
    would hang. Each comparison is a `StoreRound`; between comparisons ranks make next to no requests.
    """

    def __init__(
        self, name: str, seconds: float, ranks: Sequence[int] = (), absent: str = ABSENT_RANKS
    ) -> None:
        """For `ranks`, or all ranks of the job if empty; `absent` is the error message for missing ranks."""
        joined = dist.is_available() and dist.is_initialized()
        self._ranks = tuple(ranks) or tuple(range(dist.get_world_size() if joined else 1))
        few = f"ranks{_digest('-'.join(map(str, self._ranks)))}/" if joined and ranks else ""
        self.name, self.seconds, self.absent, self._number = few + name, seconds, absent, 0
        joined = joined and len(self._ranks) > 1
        self._store: Any = rank_liveness().store if joined else None
        self._members = {rank: member for member, rank in enumerate(self._ranks)}
        self._looked = time.monotonic()

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks to compare with."""
        return self._store is not None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that take part."""
        return self._ranks

    def looks_due(self) -> bool:
        """Whether this rank may look for waiting ranks again: all ranks together look `LOOKS` times a second.

        The many ranks of a large job would otherwise ask the one process that serves the store at each step.
        """
        now = time.monotonic()
        if self._store is None or now - self._looked < len(self._ranks) / LOOKS:
            return False
        self._looked = now
        return True

    def is_awaited(self, step: int, replica: int | None = None) -> bool:
        """Whether another rank has waited for this one for a while, for example to compare hooks.

        A rank that waits at a later place, such as `restore()` after a step that this rank has not run yet,
        is not counted: without communication, ranks may be several steps apart.

        Args:
            step: the step that this rank begins, or is in.
            replica: its data parallel replica, if replicas may run different numbers of steps.
        """
        if self._store is None:
            return False
        at = self._round()
        if at.find_waiting(AT_HOOKS) is not None:
            return True
        waiting = at.find_waiting(_place_key(replica))
        return waiting is not None and waiting < step

    def barrier(
        self,
        place: str,
        where: str,
        last_step: tuple[int, int] | None = None,
        same_action: bool = False,
        failed: bool = False,
    ) -> None:
        """Wait at a place, such as `restore()`, that all ranks must reach.

        Args:
            place: a description of the place.
            where: a description of the preceding action, shown if some ranks do not arrive.
            last_step: the last step that this rank ran, and its data parallel replica: a rank in a later step
                detects that this one waits in vain; None where this rank detected another one.
            same_action: whether `where` must be the same on all ranks, too.
            failed: whether the last step raised an error on this rank. Where only this rank had it, the
                others wait for this rank inside the step, and do not come: this rank does not wait long.

        Raises:
            HookError: on every rank, if some ranks are at another place, or did not arrive in time.
        """
        what = f"{PLACE_MARK}{place}{PLACE_SEPARATOR}{where}" if same_action else PLACE_MARK + place
        seconds = FAILED_MEETING if failed else MEETING
        waits = {_place_key(None): last_step[0], _place_key(last_step[1]): last_step[0]} if last_step else {}
        self._compare(_Statement(what, "", where, ""), None, seconds, waits)

    def check_ended(self) -> None:
        """Raise if a rank ended with an error, or was killed.

        Raises:
            HookError: on the ranks that call this.
        """
        ended = rank_liveness().find_ended() if self._store is not None else {}
        for rank, why in ended.items():
            if why != FINISHED and rank in self._members:
                raise HookError(f"rank {rank} ended ({why}); see its own error, and restart the job")

    def compare(self, what: str, where: str = "") -> None:
        """Compare `what` on all ranks; `where` is shown with it if they differ.

        Raises:
            HookError: on every rank, if any two values differ or some rank did not arrive in time.
        """
        self.compare_details(what, where=where)

    def compare_details(
        self,
        what: str,
        code: str = "",
        values: str = "",
        differ: Callable[[dict[int, str]], str] | None = None,
        where: str = "",
    ) -> dict[int, str]:
        """Compare a text and its details on all ranks, in one exchange.

        Args:
            what: a text that must be the same; shown if it differs.
            code: a text that must be the same; `differ` describes the difference.
            values: a text that may differ; each rank reads at most a few of the others'.
            differ: describes the `code` of each rank.
            where: a text that is shown if ranks are at different places.

        Returns:
            If `values` differ, those of the rank that arrived first and of some ranks that differ from it, by
            rank; the same on every rank. Otherwise an empty dict.

        Raises:
            HookError: on every rank, if `what` or `code` of any two differ, or a rank did not arrive in time.
        """
        return self._compare(_Statement(what, code, where, values), differ, self.seconds, {AT_HOOKS: 0})

    def _compare(
        self,
        statement: _Statement,
        differ: Callable[[dict[int, str]], str] | None,
        seconds: float,
        waits: Mapping[str, int],
    ) -> dict[int, str]:
        """Compare in the next round; `waits`: what to tell ranks that do not come, and the step."""
        if self._store is None:
            return {}
        at, gave_up = self._round(), True
        try:
            if at.arrive(
                _digest(json.dumps(statement[:2])), _digest(statement.values), json.dumps(statement)
            ):
                # At once: a rank without a change may go on into a collective of the framework.
                for name, step in waits.items():
                    at.announce_wait(name, step)
                waits = {}
            outcome = self._await_outcome(at, statement, seconds, waits)
            gave_up = outcome not in (COMPLETE, DIFFERENT, VALUES)
            if gave_up:
                other, _, why = outcome.partition(" ")
                place, me = _describe_place(statement.what), dist.get_rank()
                raise HookError(GAVE_UP.format(rank=other, place=place, me=me, why=why))
            if outcome == DIFFERENT:
                raise HookError(self._differing(at.statements(DIFFERENT), differ))
            return self._differing_values(at.statements(VALUES)) if outcome == VALUES else {}
        finally:
            with suppress(Exception):  # of a store that has ended; what was raised before says so
                self._leave(at)
                while gave_up and self._round().outcome():
                    self._leave(self._round())  # ranks that came before gave up more than once
            self._looked = time.monotonic()

    def _round(self) -> StoreRound:
        prefix = f"megatron_flex/{self.name}/{self._number}"
        return StoreRound(self._store, prefix, len(self._ranks), self._members[dist.get_rank()])

    def _leave(self, at: StoreRound) -> None:
        self._number += 1  # also where the store fails: this rank has been counted in this round
        at.leave()

    def _await_outcome(
        self, at: StoreRound, statement: _Statement, seconds: float, waits: Mapping[str, int]
    ) -> str:
        """Wait until all ranks have arrived, or one has given up: the first of them sets the outcome.

        Raises:
            HookError: this rank gave up: a rank has ended, or did not arrive in time.
        """
        place, me, end = _describe_place(statement.what), dist.get_rank(), time.monotonic() + seconds
        while True:
            began = time.monotonic()
            pause = min(watch_seconds() / (2 if waits else 1), max(end - began, 0.01))
            try:
                return at.await_outcome(pause)
            except Exception as error:  # stores raise various errors for a timeout
                if time.monotonic() - began < pause / 2:
                    raise HookError(
                        f"rank {me} cannot compare with other ranks at {place}: "
                        f"the rendezvous store failed ({describe_error(error)}); restart the job"
                    ) from error
                for name, step in waits.items():
                    at.announce_wait(name, step)
                waits, why, text = {}, f"it waited {seconds:g} s", ""
                if ended := self._find_ended(at):
                    why = ", ".join(f"rank {r} ended ({reason})" for r, reason in ended.items())
                    text = (
                        f"{why} before it came to {place}, where rank {me} is; "
                        "see its own error, and restart the job"
                    )
                elif time.monotonic() >= end:
                    text = self._absent(at, statement, seconds)
                if text and at.set_outcome(f"{me} {why}"):
                    raise HookError(text) from error

    def _find_ended(self, at: StoreRound) -> dict[int, str]:
        """The ranks that have ended without arriving in this round."""
        ended = rank_liveness().find_ended()
        missing = [r for r in ended if r in self._members and not at.has_arrived(self._members[r])]
        return {r: ended[r] for r in missing[:MAX_NAMED_RANKS]}

    def _absent(self, at: StoreRound, statement: _Statement, seconds: float) -> str:
        missing = name_ranks([self._ranks[member] for member in at.find_missing()])
        if not statement.what.startswith(PLACE_MARK):
            return self.absent.format(ranks=missing, seconds=seconds)
        return (
            f"{missing} did not come within {seconds:g} s to {_describe_place(statement.what)}, where rank "
            f"{dist.get_rank()} is ({statement.where}): run as many steps on every rank, and call it on all"
        )

    def _differing_values(self, known: Statements) -> dict[int, str]:
        """The values of the first rank and of those that differ from it."""
        texts = {known.first: known.text, **known.others}
        return {self._ranks[m]: _Statement(*json.loads(texts[m])).values for m in sorted(texts)}

    def _differing(self, known: Statements, differ: Callable[[dict[int, str]], str] | None) -> str:
        """Describe statements that differ; of many that differ from the first rank's only some are named."""
        first, first_rank = _Statement(*json.loads(known.text)), self._ranks[known.first]
        others = {self._ranks[m]: _Statement(*json.loads(text)) for m, text in known.others.items()}
        # Whether further ranks are like the first one is known only if all that differ are.
        same_as_first = [first_rank] if known.unnamed else [r for r in self._ranks if r not in others]
        statements = dict(sorted({**dict.fromkeys(same_as_first, first), **others}.items()))
        more = f"; and {known.unnamed} more ranks differ from rank {first_rank}" if known.unnamed else ""
        if any(statement.what.startswith(PLACE_MARK) for statement in statements.values()):
            # Ranks at one place may have come from different steps; the first one's is known.
            shown = {first_rank, *others}
            places = [
                (r, _describe_place(statement.what) + (f", {statement.where}" if r in shown else ""))
                for r, statement in statements.items()
            ]
            return _describe_difference(places, more)
        groups: dict[str, list[int]] = {}
        for rank, statement in statements.items():
            groups.setdefault(statement.what or "no hook", []).append(rank)
        if len(groups) == 1 and differ is not None:
            return differ({r: statement.code for r, statement in statements.items()})
        differences = "; ".join(f"{name_ranks(ranks)}: {what}" for what, ranks in groups.items())
        return (
            f"hooks differ between ranks ({differences}{more}); register the same hooks, in the same order, "
            "on every rank"
        )


def agreement_seconds() -> float:
    """How long a rank waits for the others: `FLEX_AGREE_SECONDS`, or as long as torch's collectives, and at
    least `MIN_WAIT`.
    """
    if flex_config.agree_seconds:
        return flex_config.agree_seconds
    if not (dist.is_available() and dist.is_initialized()):
        return MIN_WAIT
    group: Any = dist.group.WORLD
    backends = [group._get_backend(device) for device in group._device_types]
    # Not every backend has options: torch's fake one has none.
    options = [b.options for b in backends if getattr(b, "options", None) is not None]
    return max([MIN_WAIT, *(float(o._timeout.total_seconds()) for o in options)])


def _place_key(replica: int | None) -> str:
    return "place" if replica is None else f"place{replica}"


def _describe_place(what: str) -> str:
    return (
        what[1:].partition(PLACE_SEPARATOR)[0]
        if what.startswith(PLACE_MARK)
        else f"the beginning of a step ({what or 'no hook'})"
    )


def _describe_difference(differing: Sequence[tuple[int, str]], more: str = "") -> str:
    places: dict[str, list[int]] = {}
    for rank, at in differing:
        places.setdefault(at, []).append(rank)
    texts = "; ".join(f"{name_ranks(ranks)}: {at}" for at, ranks in places.items())
    return DIFFERENT_PLACES.format(places=texts + more)


def store_value(key: str, value: Any) -> None:
    """Publish a small value in the rendezvous store, as JSON, because reading JSON executes no code."""
    store: Any = dist.distributed_c10d._get_default_store()
    store.set(f"megatron_flex/{key}", json.dumps(value))


def await_value(key: str, seconds: float) -> Any:
    """Wait for the value that another rank stores under a key.

    Raises:
        HookError: no rank stored a value within `seconds`.
    """
    store = dist.distributed_c10d._get_default_store()
    try:
        store.wait([f"megatron_flex/{key}"], timedelta(seconds=seconds))
    except Exception as error:  # stores raise various errors for a timeout
        raise HookError(
            f"another rank did not publish {key} within {seconds:g} s; run the same calls on all ranks"
        ) from error
    return json.loads(store.get(f"megatron_flex/{key}"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
