"""Wrong designs, each as a small change of the text of csrc/, and what has to notice it.

A test that never fails proves nothing; these are the negative controls of test_native.py, test_ptx.py and
native/run_sanitizers.sh; collective_mutants.py has those of test_native_kernels.py. `python test/mutants.py NAME TARGET`
leaves a changed copy of csrc/ in TARGET. No torch here.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"


@dataclass(frozen=True)
class Edit:
    """Replaces `old`, which occurs exactly once in `file` (relative to csrc/), with `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """`run`: the native program's arguments under which it fails, with `sanitizer` if it takes one (a value of
    -fsanitize), and with `says` in what it prints. `kernels`: those of cuda/instantiate.cu whose golden code changes.
    """

    name: str
    edits: tuple[Edit, ...]
    run: str = ""
    says: str = ""
    sanitizer: str = ""
    kernels: tuple[str, ...] = ()


_MEMORY = "include/gpusync/memory_order.h"
_SEMAPHORE = "include/gpusync/semaphore.h"
_PULL = "include/gpusync/pull_controller.h"
_PUSH = "include/gpusync/push_controller.h"
_HANDLE = "include/gpusync/device_handle.h"
_DEVICE_WAIT = "include/gpusync/device_wait.h"
_SIGNAL = "include/gpusync/signal_controller.h"
_KEPT = "cuda/kept_memory.h"

# Pauses where a wake-up could be lost or a decision missed, and a sleep so long that a lost wake-up shows: they make some
# mutants fail in seconds. The protocol itself must pass with all of them, for it relies on nobody being quick.
_NAP = "futex_wait(&page.event, event, std::min(left, kNap));"
_BEGUN = "  require_usable(call);\n  RankPage& mine"
_LONG_NAP = Edit("cpu/wait.cpp", "constexpr double kNap = 0.05;", "constexpr double kNap = 60;")
_SLOW_START = Edit("cpu/group.cpp", _BEGUN, _BEGUN.replace(";\n", ";\n  usleep(200);\n"))
_EXPIRED = "switch (m_group.give_up(reason,"
_SLOW_EXPIRY = Edit("cpu/wait.cpp", _EXPIRED, _EXPIRED.replace("(m_", "(usleep(100), m_"))
_SLOW_DECISION = Edit(
    "cpu/failure.cpp",
    "  const uint64_t absent = missing();",
    "  usleep(50);\n  const uint64_t absent = missing();",
)
_SLOW_ARRIVAL = (
    Edit(_PULL, '#include "gpusync/block.h"\n', '#include "gpusync/block.h"\n#include <unistd.h>\n'),
    Edit(_PULL, "      wait.notify(peer);\n", "      wait.notify(peer);\n      usleep(50);\n"),
)
_SLOW_NAP = Edit("cpu/wait.cpp", _NAP, "usleep(300), " + _NAP)
PAUSES = (_LONG_NAP, _SLOW_NAP, _SLOW_START, _SLOW_EXPIRY, _SLOW_DECISION, *_SLOW_ARRIVAL)
_SEMAPHORE_INCLUDE = '#include "gpusync/semaphore.h"\n'
_SEND = "    m_mailboxes[destination]->inbox.template arrive<true>(m_rank, arrival.pack());\n"
NAP_RUN = "rings ranks=2 cores=1 rounds=1000000 seconds=20 delay_us=200 timeout=2 limit=1"
GIVE_UP_RUN = "give_ups rounds=1000000 seconds=20 disturb_us=300"
_LATE = "waited [0-9.]* s for rank|which wait for one another|a call took"

_STRESS = (
    Mutant(
        # One counter for all peers: a fast peer's second arrival stands in for a slow one's first. While every arrival
        # releases, the fast peer passes on what it had acquired from the slow one, and the barrier holds; but nobody
        # can say who is missing. (With relaxed arrivals it does not hold: see model/.)
        "shared_counter",
        (
            Edit(
                _SEMAPHORE,
                "publish<kFence>(&m_slot[source], arrival);",
                "(void)source, (void)arrival, std::atomic_ref<uint64_t>(m_slot[0]).fetch_add(1);",
            ),
            Edit(
                _PULL,
                "const Arrival arrival{mine.epoch(block::lane() % kMaxRanks) + 1, fingerprint};",
                "const Arrival arrival{mine.epoch(0) + m_world_size, 0 * fingerprint};",
            ),
            Edit(
                _PULL,
                "return wait.until(mine, peer, expected);",
                "return wait.until(mine, 0 * peer, expected);",
            ),
            Edit(
                _PULL,
                "return wait.persist(mine, peer, expected);",
                "return wait.persist(mine, 0 * peer, expected);",
            ),
        ),
        "expiring rounds=1000000 seconds=20",
        "is not the missing one",
    ),
    Mutant(
        # A peer that is already one call ahead does not count as arrived.
        "equal_only",
        (
            Edit(
                _SEMAPHORE, "static_cast<uint32_t>(expected)) >= 0;", "static_cast<uint32_t>(expected)) == 0;"
            ),
        ),
        "barriers rounds=1000000 seconds=20 delay_us=300 timeout=2",
        _LATE,
    ),
    Mutant(
        # Numbers compared instead of their difference: wrong when they wrap around.
        "unsigned_compare",
        (
            Edit(
                _SEMAPHORE,
                "return static_cast<int32_t>(static_cast<uint32_t>(slot) - static_cast<uint32_t>(expected)) >= 0;",
                "return static_cast<uint32_t>(slot) >= static_cast<uint32_t>(expected);",
            ),
        ),
        "barriers rounds=1000000 seconds=20 delay_us=300 preset=0xFFFFFFF0 timeout=2",
        f"message behind a barrier|{_LATE}",
    ),
    Mutant(
        # The wait leaves out the last rank, as happens when there are more ranks than lanes.
        "partial_wait",
        (
            Edit(
                _PULL,
                "return wait.until(mine, peer, expected);",
                "return peer + 1 == m_world_size || wait.until(mine, peer, expected);",
            ),
        ),
        "barriers rounds=1000000 seconds=20 delay_us=300",
        "message behind a barrier of rank 2",
    ),
    Mutant(
        # A rank clears its own slots when it opens the group, as if nobody could have signalled before.
        "zeroed_late",
        (
            Edit(
                "cpu/group.cpp",
                "  RankPage& mine = page(m_config.rank);\n  set_timeout(",
                "  for (uint32_t c = 0; c <= m_config.channels; ++c) {\n"
                "    std::memset(static_cast<void*>(&channel(m_config.rank, c)), 0, sizeof(Channel));\n"
                "  }\n"
                "  RankPage& mine = page(m_config.rank);\n  set_timeout(",
            ),
        ),
        "opening rounds=1000000 seconds=20 delay_us=2000 timeout=2",
        _LATE,
    ),
    Mutant(
        "one_staging_half",
        (
            Edit(
                "cpu/collectives.cpp",
                "return channel(m_config.rank, m_config.channels).stages[0].epoch(0) % kHalves;",
                "return 0;",
            ),
        ),
        "all_reduces rounds=1000000 seconds=20 disturb_us=500",
        "all_reduce .* is wrong",
    ),
    Mutant(
        # Two-shot reads its peers' shares without waiting until they are reduced.
        "two_shot_meets_once",
        (
            Edit(
                "cpu/collectives.cpp",
                "if (!m_pull[m_config.channels].sync<true, false>(part.key, wait) || !wait.agreed()) return false;",
                "if (!wait.agreed()) return false;",
            ),
        ),
        "all_reduces rounds=1000000 seconds=20 disturb_us=500",
        "all_reduce .* is wrong",
    ),
    Mutant(
        "one_push_half",
        (Edit(_PUSH, "return call(index) % kHalves;", "return 0 * call(index);"),),
        "pushes rounds=1000000 seconds=20 delay_us=300",
        "pushed message of rank",
    ),
    Mutant(
        # Signals that come while nobody waits count once.
        "signals_merge",
        (
            Edit(
                _SIGNAL,
                "if (complete) mine.seen[source] = arrival.epoch;",
                "if (complete) mine.seen[source] = static_cast<uint32_t>(mine.inbox.peek(source));",
            ),
        ),
        "signals rounds=1000000 seconds=20 delay_us=300 timeout=2",
        _LATE,
    ),
    Mutant(
        # A rank whose wait is complete does not look whether a peer has given up.
        "no_state_check",
        (
            Edit(
                "cpu/wait.h",
                "return m_group.state().phase() == Phase::kOk || m_group.settle(m_call);",
                "return true;",
            ),
            _SLOW_START,
        ),
        GIVE_UP_RUN,
        "was passed by",
    ),
    Mutant(
        # A rank gives up without looking once more, after it has said so.
        "no_rescan",
        (
            Edit(
                "cpu/failure.cpp",
                "const bool complete = reason == Reason::kTimeout && absent == 0;",
                "const bool complete = false && reason == Reason::kTimeout && absent == 0;",
            ),
            _SLOW_EXPIRY,
        ),
        GIVE_UP_RUN,
        "was passed by",
    ),
    Mutant(
        # The last look is at its own slots alone, so that a third rank may have seen what it did not.
        "own_row_only",
        (
            Edit("cpu/wait.cpp", "meeting && !come && owner", "false && meeting && !come && owner"),
            *_SLOW_ARRIVAL,
        ),
        GIVE_UP_RUN,
        "was passed by",
    ),
    Mutant(
        # A peer that closes the group behind its last call is taken for one that never came.
        "closed_is_missing",
        (
            Edit(
                "cpu/wait.cpp",
                "if (seen == Seen::kArrived) return true;",
                "if (seen == Seen::kArrived && !m_group.is_gone(peer)) return true;",
            ),
            Edit(
                "cpu/failure.cpp",
                "const bool complete = reason == Reason::kTimeout && absent == 0;",
                "const bool complete = false && reason == Reason::kTimeout && absent == 0;",
            ),
        ),
        "closing rounds=1000000 seconds=20 delay_us=300 disturb_us=500",
        r"has closed the group|for rank \.",
    ),
    Mutant(
        # Only the naps' ends would wake anybody.
        "no_doorbell",
        (
            Edit(
                "cpu/wait.h",
                "void notify(uint32_t peer) { m_group.ring_doorbell(peer); }",
                "void notify(uint32_t) {}",
            ),
            _LONG_NAP,
        ),
        NAP_RUN,
        _LATE,
    ),
    Mutant(
        # A rank says that it sleeps after its last look at the slot.
        "sleeps_unannounced",
        (
            Edit("cpu/wait.cpp", "  const Sleeper sleeper(page);\n", ""),
            Edit("cpu/wait.cpp", _NAP, "{ usleep(300); const Sleeper sleeper(page); " + _NAP + " }"),
            _LONG_NAP,
        ),
        NAP_RUN,
        _LATE,
    ),
    Mutant(
        # It reads the event word, which a wake-up changes, after its last look at the slot.
        "event_read_late",
        (
            Edit(
                "cpu/wait.cpp",
                _NAP,
                "usleep(300), " + _NAP.replace("event, std", "0 * event + load(page.event), std"),
            ),
            Edit(
                "cpu/wait.cpp",
                "bool Wait::sleep_until(",
                "static uint32_t load(uint32_t& word) { return std::atomic_ref(word).load(); }\n"
                "bool Wait::sleep_until(",
            ),
            _LONG_NAP,
        ),
        NAP_RUN,
        _LATE,
    ),
    Mutant(
        # A rank looks whether its peer sleeps before it has stored its arrival: what a machine may make of a store that
        # only releases.
        "doorbell_first",
        (
            Edit(_SIGNAL, _SEMAPHORE_INCLUDE, _SEMAPHORE_INCLUDE + "#include <unistd.h>\n"),
            Edit(
                _SIGNAL,
                _SEND + "    wait.notify(destination);\n",
                "    wait.notify(destination);\n    usleep(5000);\n" + _SEND,
            ),
            _LONG_NAP,
        ),
        NAP_RUN,
        _LATE,
    ),
    Mutant(
        "fingerprint_ignored",
        (
            Edit(
                _SEMAPHORE,
                "return same_call && slot != expected ?",
                "return false && same_call && slot != expected ?",
            ),
        ),
        "mismatches rounds=1000000 seconds=20 timeout=2",
        "a mismatch of kind",
    ),
    Mutant(
        "skipped_calls_ignored",
        (Edit("cpu/collectives.cpp", ".skipped = m_skipped};", ".skipped = 0};"),),
        "mismatches rounds=1000000 seconds=20 timeout=2",
        "a mismatch of kind 6",
    ),
    Mutant(
        # A reset that leaves the counters as they are.
        "reset_without_rebasing",
        (Edit("cpu/reset.cpp", "  preset(0);\n", ""),),
        "resets rounds=1000000 seconds=20 delay_us=300 timeout=2",
        f"does not match|message behind|{_LATE}",
    ),
    Mutant(
        "relaxed_publish",
        (
            Edit(
                _MEMORY,
                ".store(value, kPublishOrder<kFence>);",
                ".store(value, std::memory_order_relaxed);",
            ),
        ),
        "barriers rounds=1000000 seconds=20 delay_us=100",
        "ThreadSanitizer: data race",
        "thread",
    ),
    Mutant(
        "relaxed_acquire",
        (Edit(_MEMORY, ".load(kAcquireOrder);", ".load(std::memory_order_relaxed);"),),
        "barriers rounds=1000000 seconds=20 delay_us=100",
        "ThreadSanitizer: data race",
        "thread",
    ),
    Mutant(
        # Who finds the deciding rank dead gives up alone: nobody else hears of it, and there is no record of why.
        "kernels_give_up_alone",
        (
            Edit(
                _DEVICE_WAIT,
                "if (time - start <= kDecisionLimitNs || !move_claim(group, decider, 1 + group.rank)) continue;",
                "if (time - start <= kDecisionLimitNs) continue;\n"
                "    if (time != 0) {\n"
                "      store(context.status, static_cast<uint32_t>(DeviceStatus::kBroken));\n"
                "      return false;\n"
                "    }",
            ),
        ),
        "kernels rounds=7",
        "left the reason 0",
    ),
    Mutant(
        "kernels_wait_for_who_has_closed",
        (Edit(_DEVICE_WAIT, "~uint64_t{0} : host_word(group.gone);", "~uint64_t{0} : 0;"),),
        "kernels rounds=7",
        "took too long",
    ),
    Mutant(
        # A rank that has closed the group is told of a whole one: its graphs would touch memory that is gone.
        "kernels_revive_who_has_closed",
        (
            Edit(
                _DEVICE_WAIT,
                "move(group.status[r], static_cast<uint32_t>(from), static_cast<uint32_t>(to));",
                "store(group.status[r], static_cast<uint32_t>(to));\n  (void)from;",
            ),
        ),
        "kernels rounds=8",
        "scene 7 left the wrong status",
    ),
    Mutant(
        "graphs_free_on_the_drivers_thread",
        (Edit(_KEPT, "    m_next = s_left.load(", "    return delete this;\n    m_next = s_left.load("),),
        "keeping rounds=10",
        "on a thread of the driver's",
    ),
    Mutant(
        # What a group that is closed gives back is gone, whoever still has it.
        "graphs_keep_nothing",
        (
            Edit(
                _KEPT,
                "if (memory->is_last()) delete memory;",
                "memory->m_parts.clear();\n      if (memory->is_last()) delete memory;",
            ),
        ),
        "keeping rounds=10",
        "while a graph had it",
    ),
    Mutant(
        "handle_of_any_version",
        (Edit(_HANDLE, "if (head[0] != kVersion || head[1]", "if (head[1]"),),
        "kernels rounds=1",
        "a handle of another version was accepted",
    ),
    Mutant(
        # The next launch has more blocks, and they do not agree on the half.
        "each_block_counts_for_itself",
        (Edit(_PUSH, "b < blocks; b += block::lanes()) exit_unsafe(b);", "false; ) exit_unsafe(b);"),),
        "kernels rounds=1",
        "the other block's count",
    ),
)

MUTANTS = {mutant.name: mutant for mutant in _STRESS}


def copy(edits: tuple[Edit, ...], target: Path) -> Path:
    """Copies csrc/ to `target`, with the edits; an edit that does not fit is an error (adapt it to the new text)."""
    shutil.copytree(CSRC, target)
    for edit in edits:
        path = target / edit.file
        text = path.read_text()
        if (found := text.count(edit.old)) != 1:
            raise ValueError(f"{edit.file} has {found} places, not one, with this text:\n{edit.old}")
        path.write_text(text.replace(edit.old, edit.new))
    return target


if __name__ == "__main__":
    copy(MUTANTS[sys.argv[1]].edits, Path(sys.argv[2]))
