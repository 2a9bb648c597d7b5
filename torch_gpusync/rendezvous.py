"""How ranks agree while they set something up: through the process group's own c10d store."""

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_gpusync.errors import SyncError, SyncTimeoutError


class Deadline:
    """The moment when a set-up call gives up. ``watch`` is called meanwhile, and raises to give up before.

    ``gone`` tells which ranks will never come: they are not waited for until then.
    """

    def __init__(
        self,
        seconds: float,
        watch: Callable[[], None] | None = None,
        gone: Callable[[], list[int]] | None = None,
    ) -> None:
        self.start = time.monotonic()
        self.seconds = seconds
        self.watch = watch
        self.gone = gone

    @property
    def waited(self) -> float:
        return time.monotonic() - self.start

    @property
    def expired(self) -> bool:
        return self.waited > self.seconds


# Verdicts on a round, as stored. A round that was not met names the rank that ended it and why.
_MET = "met"
_TIMEOUT, _REFUSED, _LEFT = "timeout", "refused", "left"
_STORE_GRACE = 0.8  # seconds beyond the deadline for the store to answer


class Rendezvous:
    """The ranks of one process group, meeting over its store.

    A set-up call is a series of rounds, numbered in the order in which a rank makes them, whatever they are,
    so that ranks which make different calls meet and find out. In a round every rank publishes a value and
    waits for all the others'. Each round ends with one verdict for all, by the store's compare-and-set: met,
    or given up by the first rank that could not wait any longer. So no rank goes on from a round that a peer
    has given up, and all of them are in step for another try.

    Keys of a round that was met are removed by the last rank to read them; of the others the verdict remains.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, global_ranks: Sequence[int], prefix: str
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.global_ranks = list(global_ranks)
        self._store = store
        self._prefix = prefix
        self._round = 0
        self._step = 0  # rounds since the call began
        self._skipped = ""  # why earlier rounds were given up without this rank
        self._left_behind: threading.Thread | None = None  # waits for a store that did not answer in time
        self._turn = threading.Lock()

    @contextmanager
    def turn(self, what: str, group: str, deadline: Deadline) -> Iterator[None]:
        """A whole set-up call is made inside: threads of this rank take turns, as the rounds of two would mix.

        Raises:
            SyncError: another thread has not ended its call by the deadline.
        """
        if not self._turn.acquire(
            timeout=min(max(deadline.seconds - deadline.waited, 0), threading.TIMEOUT_MAX)
        ):
            raise SyncError(
                f"gpusync: {what} of group '{group}' has waited {deadline.waited:.1f} s for another set-up call, which "
                f"another thread of rank {self.rank} makes on the same process group: make them one after the other, in "
                "the same order on all ranks"
            )
        try:
            yield
        finally:
            self._turn.release()

    def agree(self, arguments: dict[str, Any], what: str, group: str, deadline: Deadline) -> None:
        """Begin a set-up call: check that all ranks make the same one with the same ``arguments``.

        Raises:
            SyncError: they do not, or one of them has refused it.
            SyncTimeoutError: some ranks had not come at the deadline.
        """
        everybody = self._run(lambda stop: self._open(arguments, what, group, deadline, stop), deadline)
        # Other calls have other arguments: that they are other calls is what matters then.
        for key in sorted({key for theirs in everybody for key in theirs}, key=lambda k: (k != "call", k)):
            values = [theirs.get(key) for theirs in everybody]
            if any(value != values[0] for value in values):
                listed = "; ".join(f"rank {r}: {value!r}" for r, value in enumerate(values))
                raise SyncError(
                    f"gpusync: the ranks of group '{group}' disagree on {key} in {what} ({listed}): make the "
                    "same calls with the same arguments, in the same order, on every rank"
                )

    def refuse(self, reason: str, what: str, group: str, deadline: Deadline) -> None:
        """Tell the peers that this rank cannot make the set-up call, instead of :meth:`agree`: they raise
        ``reason``.

        Does not wait for them. The caller raises the error itself.
        """

        def body(stop: threading.Event) -> None:
            self._skip(what, group)
            self._begin_round()
            self._conclude({"kind": _REFUSED, "rank": self.rank, "why": reason})

        self._run(body, deadline)

    def exchange(self, value: Any, what: str, group: str, deadline: Deadline) -> list[Any]:
        """One more round of a call that :meth:`agree` has begun: everybody's ``value`` (JSON), by rank.

        Raises:
            SyncTimeoutError: some ranks had not come at the deadline.
            SyncError: a rank has left the call, or the store does not answer.
        """
        told: list[Any] = self._run(lambda stop: self._meet(value, what, group, deadline, stop), deadline)
        return told

    def confirm(self, problem: str, what: str, group: str, deadline: Deadline) -> None:
        """A round that tells whether every rank's part has worked (``problem`` is empty); else all raise."""
        for r, theirs in enumerate(self.exchange(problem, what, group, deadline)):
            if theirs:
                raise SyncError(f"gpusync: {what} of group '{group}' failed on rank {r}: {theirs}")

    def scratch(self) -> dist.Store:
        """A place in the store for what the ranks do together behind the last round: empty, and the same for all."""
        return dist.PrefixStore(f"{self._prefix}/{self._round}/scratch", self._store)

    # ---- one round

    def _key(self, name: str | int, number: int | None = None) -> str:
        return f"{self._prefix}/{self._round if number is None else number}/{name}"

    def _begin_round(self) -> None:
        self._round += 1

    def _verdict(self, number: int) -> dict[str, Any] | None:
        """Why round ``number`` was given up; None while it is open and when it was met."""
        key = self._key("verdict", number)
        if not self._store.check([key]):
            return None
        text = self._store.get(key).decode()
        return None if text == _MET else json.loads(text)

    def _conclude(self, verdict: dict[str, Any] | None) -> dict[str, Any] | None:
        """Propose a verdict (None: met) on the round; the first proposal stands and is returned."""
        text = _MET if verdict is None else json.dumps(verdict)
        standing = self._store.compare_set(self._key("verdict"), "", text).decode()
        return None if standing == _MET else json.loads(standing)

    def _skip(self, what: str, group: str) -> None:
        """Pass over rounds that were given up before this rank came: peers that try again are beyond them."""
        self._step, self._skipped = 0, ""
        while (verdict := self._verdict(self._round + 1)) is not None:
            self._begin_round()
            if verdict["kind"] == _REFUSED:
                raise self._given_up(verdict, what, group)
            self._skipped = f" (rank {verdict['rank']} has given up an earlier one)"

    def _open(
        self, arguments: dict[str, Any], what: str, group: str, deadline: Deadline, stop: threading.Event
    ) -> list[Any]:
        while True:
            self._skip(what, group)
            told = self._meet(arguments, what, group, deadline, stop)
            if told is not None:
                return told

    def _meet(
        self, value: Any, what: str, group: str, deadline: Deadline, stop: threading.Event
    ) -> list[Any] | None:
        """One round. None: the call is yet to begin, for a peer that was making another one has left it."""
        self._begin_round()
        keys = [self._key(r) for r in range(self.world_size)]
        self._store.set(keys[self.rank], json.dumps([self._step, value]))
        leaving = {"kind": _LEFT, "rank": self.rank, "call": [what, group]}
        try:
            verdict = self._await(keys, deadline, stop)
        except (SyncError, KeyboardInterrupt) as error:  # of deadline.watch, and of Ctrl-C
            self._conclude(leaving | {"why": str(error) or "it was interrupted"})
            raise
        if verdict is not None:
            self._store.delete_key(keys[self.rank])
            if self._step == 0 and verdict["kind"] == _LEFT and verdict["call"] != [what, group]:
                return None
            raise self._given_up(verdict, what, group)
        told = [json.loads(self._store.get(key)) for key in keys]
        if self._store.add(self._key("read"), 1) == self.world_size:
            for key in (*keys, self._key("verdict"), self._key("read")):
                self._store.delete_key(key)
        steps = [step for step, _ in told]
        if any(step != steps[0] for step in steps):
            apart = ", ".join(f"rank {r}: step {step}" for r, step in enumerate(steps))
            raise SyncError(
                f"gpusync: {what} of group '{group}': the ranks are not in the same set-up call ({apart}), "
                "for one of them has left an earlier one halfway: make the call again on all ranks"
            )
        self._step += 1
        return [value for _, value in told]

    def _await(self, keys: list[str], deadline: Deadline, stop: threading.Event) -> dict[str, Any] | None:
        """Wait for everybody's key; the round's verdict."""
        pause = 0.0002
        while not self._store.check(keys):
            # Polled, not waited for: a peer may give the round up, and not every store bounds a wait.
            verdict = self._verdict(self._round)
            if verdict is not None:
                return verdict
            if stop.is_set():
                raise KeyboardInterrupt
            # In this order: why a rank has gone comes before that it has, and it may have come before it went.
            gone = deadline.gone() if deadline.gone is not None else []
            if deadline.watch is not None:
                deadline.watch()
            candidates = range(self.world_size) if deadline.expired else gone
            if missing := [r for r in candidates if not self._store.check([keys[r]])]:
                return self._conclude(
                    {
                        "kind": _TIMEOUT,
                        "rank": self.rank,
                        "missing": missing,
                        "gone": [r for r in missing if r in gone],
                        "waited": deadline.waited,
                    }
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return self._conclude(None)

    def _given_up(self, verdict: dict[str, Any], what: str, group: str) -> SyncError:
        call = f"gpusync: {what}(group='{group}') on {self._name(self.rank)} "
        by = int(verdict["rank"])
        if verdict["kind"] == _REFUSED:
            return SyncError(f"gpusync: {what} of group '{group}' failed on rank {by}: {verdict['why']}")
        if verdict["kind"] == _LEFT:
            return SyncError(f"{call}stopped because {self._name(by)} has left it: {verdict['why']}")
        missing, waited = list(verdict["missing"]), float(verdict["waited"])
        who = "" if by == self.rank else f"stopped because {self._name(by)} "
        awaited = ", ".join(
            f"{self._name(r)}, which has ended or has closed the group"
            if r in verdict["gone"]
            else self._name(r)
            for r in missing
        )
        return SyncTimeoutError(
            f"{call}{who}waited {waited:.1f} s for {awaited}: every rank of the process group has to make this "
            f"call{self._skipped}",
            group=group,
            op=what,
            channel=-1,
            missing_ranks=missing,
            waited_s=waited,
        )

    def _name(self, rank: int) -> str:
        return f"rank {rank} (global {self.global_ranks[rank]})"

    # ---- bounding the store itself

    def _run(self, body: Callable[[threading.Event], Any], deadline: Deadline) -> Any:
        """``body(stop)``, bounded by the deadline even when the store's host hangs, which no store call is by
        itself.

        ``body`` runs in a thread of its own, so that this one can leave it behind, and can take Ctrl-C.
        """
        stop = threading.Event()
        if isinstance(self._store, dist.HashStore):  # in this process: it always answers
            return body(stop)
        silent = SyncError(
            f"gpusync: the process group's store has not answered in {deadline.seconds:.1f} s: is the "
            "process that hosts it (global rank 0, or torchrun) stopped, or its host unreachable?"
        )
        if self._left_behind is not None:
            self._left_behind.join(min(deadline.seconds, threading.TIMEOUT_MAX))
            if self._left_behind.is_alive():
                raise silent
            self._left_behind = None
        result: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                result.set_result(body(stop))
            except BaseException as error:
                result.set_exception(error)

        thread = threading.Thread(target=run, name="gpusync set-up", daemon=True)
        thread.start()
        limit = min(max(deadline.seconds - deadline.waited, 0.0) + _STORE_GRACE, threading.TIMEOUT_MAX)
        try:
            return result.result(limit)
        except futures.TimeoutError:
            self._left_behind = thread
            raise silent from None
        except dist.DistNetworkError as error:
            raise SyncError(
                "gpusync: the process group's store does not answer: has the process that hosts it (global "
                f"rank 0, or torchrun) ended? ({str(error).splitlines()[0]})"
            ) from None
        except KeyboardInterrupt:
            stop.set()
            futures.wait([result], _STORE_GRACE)  # lets the peers know before this process goes
            raise


class GroupState:
    """What is kept for a process group as long as it lives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rendezvous = Rendezvous(
            dist.distributed_c10d._get_process_group_store(group),
            dist.get_rank(group),
            dist.get_world_size(group),
            dist.get_process_group_ranks(group),
            "gpusync",
        )
        self.default_names = 0


_states: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupState] = weakref.WeakKeyDictionary()


def resolve_group(group: dist.ProcessGroup | DeviceMesh | str | None) -> dist.ProcessGroup:
    """The c10d process group that a user means.

    Raises:
        SyncError: there is none, or this process is not in it.
    """
    if not dist.is_initialized():
        raise SyncError(
            "gpusync: torch.distributed is not initialised: call "
            "torch.distributed.init_process_group('gloo') first (under torchrun it needs no more arguments), "
            "or use torch_gpusync.virtual_ranks(n) for ranks in one process"
        )
    resolved: Any = group
    if group is None:
        resolved = dist.group.WORLD
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise SyncError(
                f"gpusync: group must be a 1-D DeviceMesh, got {group.ndim}-D: pass mesh['dimension']"
            )
        resolved = group.get_group()
    elif isinstance(group, str):
        try:
            resolved = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
        except (RuntimeError, ValueError, KeyError):
            raise SyncError(
                f"gpusync: there is no process group '{group}' here: pass the group itself, or its group_name"
            ) from None
    if resolved == dist.GroupMember.NON_GROUP_MEMBER:
        raise SyncError(
            "gpusync: this process is not in the process group: make the SyncGroup on its members only"
        )
    if not isinstance(resolved, dist.ProcessGroup):
        raise SyncError(
            "gpusync: group must be a ProcessGroup, a 1-D DeviceMesh or a process group's name, not "
            f"{group!r}"
        )
    try:
        dist.get_rank(resolved)
    except ValueError:
        raise SyncError(
            "gpusync: the process group was destroyed: make the SyncGroup on one that is in use"
        ) from None
    return resolved


def of_group(group: dist.ProcessGroup) -> GroupState:
    """The state kept for ``group``."""
    state = _states.get(group)
    if state is None:
        state = _states[group] = GroupState(group)
    return state


def find(group: "weakref.ref[dist.ProcessGroup]") -> Rendezvous | None:
    """Where the ranks of ``group`` meet; None once it was destroyed (it may be alive as an object all the same)."""
    alive = group()
    try:
        dist.get_rank(alive)
    except ValueError:
        return None
    return None if alive is None else of_group(alive).rendezvous


def default_name(group: dist.ProcessGroup) -> str:
    """``world`` or the process group's name; ``/1``, ``/2``, ... for the second and later SyncGroups on it.

    Names are constants of compiled graphs, so they are the same on all ranks and in every run.
    """
    number = of_group(group).default_names
    base = "world" if group == dist.group.WORLD else str(group.group_name)
    return base if number == 0 else f"{base}/{number}"
