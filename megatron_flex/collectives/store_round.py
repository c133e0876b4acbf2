"""One comparison of ranks through a store: few requests of each rank, and keys that the last ranks delete.

Each rank compares its digest with that of the rank that arrives first, and counts itself; the last rank to
arrive publishes the outcome. Only the first rank, and a few that differ from it, publish details.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

from megatron_flex.errors import MAX_NAMED_RANKS

COMPLETE = "complete"  # the outcome: all members arrived, with the same digest
DIFFERENT = "different"  # the outcome: all members arrived, some with another digest
VALUES = "values"  # the outcome: all members arrived, with the same digest, and some with other values
BUCKET = 32  # members whose arrival one number in the store records, a bit each


class Statements(NamedTuple):
    """What members published in a round.

    Attributes:
        first: the member that arrived first.
        text: its details.
        others: details of members that differ from it, by member, in ascending order; at most
            `MAX_NAMED_RANKS`.
        unnamed: the number of further members that differ.
    """

    first: int
    text: str
    others: dict[int, str]
    unnamed: int


class StoreRound:
    """One member's part in one comparison.

    Where nothing differs a member makes five requests, whatever their number, and none of them is larger
    than a digest. The first member, members that wait longer than usual, and members that differ make more.

    Args:
        store: the store, shared by all members.
        prefix: begins the keys of this round.
        members: the number of members.
        member: this member's index.
    """

    def __init__(self, store: Any, prefix: str, members: int, member: int) -> None:
        self._store, self._prefix, self._members, self._member = store, prefix, members, member

    def arrive(self, digest: str, values: str, details: str) -> bool:
        """Take part: compare `digest` and `values`, which may differ, with those of the first member.

        Args:
            digest: of what must be the same.
            values: a digest of what may differ.
            details: published if this member is the first, or one of the first that differ.

        Returns:
            Whether this is the first member.
        """
        entry = f"{self._member} {digest} {values}"
        first = self._store.compare_set(self._key("first"), "", entry).decode()
        _, first_digest, first_values = first.split(" ")
        if first == entry:
            self._store.set(self._key("details"), details)
        elif digest != first_digest:
            self._publish_difference(DIFFERENT, details)
        elif values != first_values:
            self._publish_difference(VALUES, details)
        bucket = self._member // BUCKET
        present = self._store.add(self._key(f"arrived{bucket}"), 1 << (self._member % BUCKET))
        if present == self._full(bucket) and self._store.add(self._key("full"), 1) == self._buckets:
            kinds = (kind for kind in (DIFFERENT, VALUES) if self._store.check([self._key(kind)]))
            self.set_outcome(next(kinds, COMPLETE))
        return bool(first == entry)

    def await_outcome(self, seconds: float) -> str:
        """Wait until the round has an outcome; stores raise various errors if it has none in time."""
        key = self._key("outcome")
        self._store.wait([key], timedelta(seconds=seconds))
        return str(self._store.get(key).decode())

    def outcome(self) -> str:
        """`COMPLETE`, `DIFFERENT`, `VALUES`, or the text of a member that gave up; empty before."""
        key = self._key("outcome")
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def set_outcome(self, outcome: str) -> bool:
        """Set the outcome, unless another member did; return whether this member has set it."""
        return bool(self._store.compare_set(self._key("outcome"), "", outcome).decode() == outcome)

    def has_arrived(self, member: int) -> bool:
        """Whether a member takes part."""
        return bool(self._arrivals(member // BUCKET) >> (member % BUCKET) & 1)

    def find_missing(self) -> list[int]:
        """The members that have not arrived."""
        arrivals = [self._arrivals(bucket) for bucket in range(self._buckets)]
        return [m for m in range(self._members) if not arrivals[m // BUCKET] >> (m % BUCKET) & 1]

    def statements(self, kind: str) -> Statements:
        """The details of the first member, and of those that differ from it.

        Args:
            kind: `DIFFERENT` for those with another digest, `VALUES` for those with other values only.
        """
        first = int(self._store.get(self._key("first")).decode().partition(" ")[0])
        count = self._count(kind)
        others = {}
        for number in range(1, min(count, MAX_NAMED_RANKS) + 1):
            member, _, text = self._store.get(self._key(f"{kind}{number}")).decode().partition(" ")
            others[int(member)] = text
        details = self._store.get(self._key("details")).decode()
        return Statements(first, details, dict(sorted(others.items())), count - len(others))

    def announce_wait(self, name: str, number: int) -> None:
        """Publish, for members that have not arrived, that one waits for them; the least number is kept."""
        known, entry = "", f"{number} {self._member}"
        while True:
            published = self._store.compare_set(self._key(name), known, entry).decode()
            if int(published.partition(" ")[0]) <= number:
                break
            known = published
        if not known and published == entry:  # a name of the members' choice, which the last one has to know
            self._store.set(self._key(f"waiting{self._store.add(self._key('waiting'), 1)}"), name)

    def find_waiting(self, name: str) -> int | None:
        """The least number published under a name; None if there is none."""
        key = self._key(name)
        return int(self._store.get(key).partition(b" ")[0]) if self._store.check([key]) else None

    def leave(self) -> None:
        """End this member's part, after which it reads nothing more; the last members delete the keys."""
        bucket = self._member // BUCKET
        if self._store.add(self._key(f"left{bucket}"), 1) < self._full(bucket).bit_count():
            return
        self._delete(f"arrived{bucket}", f"left{bucket}")
        if self._store.add(self._key("left"), 1) == self._buckets:
            self._delete(*self._list_names())

    def _delete(self, *names: str) -> None:
        for name in names:
            self._store.delete_key(self._key(name))

    def _list_names(self) -> Iterator[str]:
        """The names of all keys that the round may have, but for those of buckets."""
        yield from ("first", "details", "full", "outcome", "left")
        for kind in (DIFFERENT, VALUES):
            if count := self._count(kind):
                yield from (kind, *(f"{kind}{n}" for n in range(1, min(count, MAX_NAMED_RANKS) + 1)))
        if count := self._count("waiting"):
            yield "waiting"
            for name in (f"waiting{n}" for n in range(1, count + 1)):
                yield from (str(self._store.get(self._key(name)).decode()), name)

    def _count(self, name: str) -> int:
        """A count; 0 where nobody has counted."""
        return int(self._store.get(self._key(name))) if self._store.check([self._key(name)]) else 0

    def _publish_difference(self, kind: str, details: str) -> None:
        number = self._store.add(self._key(kind), 1)
        if number <= MAX_NAMED_RANKS:
            self._store.set(self._key(f"{kind}{number}"), f"{self._member} {details}")

    def _arrivals(self, bucket: int) -> int:
        # Not `get`, which waits for a key that others have deleted since, once the round has an outcome.
        return int(self._store.add(self._key(f"arrived{bucket}"), 0))

    @property
    def _buckets(self) -> int:
        return -(-self._members // BUCKET)

    def _full(self, bucket: int) -> int:
        return (1 << min(BUCKET, self._members - bucket * BUCKET)) - 1

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"
