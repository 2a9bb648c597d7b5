"""Wrong designs of the collectives' GPU kernels, and what has to notice them: the negative controls of test_native_kernels.py."""

from __future__ import annotations

from dataclasses import replace

from mutants import Edit, Mutant

_PULL = "include/gpusync/pull_controller.h"
_DEVICE_WAIT = "include/gpusync/device_wait.h"
_ONE_SHOT = "cuda/pull_one_shot.cu"
_TWO_SHOT = "cuda/pull_two_shot.cu"
_PARCELS = "cuda/parcels.cuh"
_EXCHANGE = "cuda/exchange_kernels.cu"
_REDUCE = "cuda/reduce.cuh"
_PACKS = "cuda/packs.cuh"
_RMS_NORM = "cuda/push_rms_norm.cu"
_HALF = "const uint64_t half = (call % kHalves) * p.half_bytes;"
_NO_HALF = "const uint64_t half = 0 * call;"
_START = "p.pull.sync<true, true>("
_END = "complete = p.pull.sync<true, false>(p.key, DeviceWait(p.wait));"
_LOW_FLAG = "parcel.low_flag == flags.low"
_HIGH_FLAG = "parcel.high_flag == flags.high"
_LONG = "ranks=3 dtypes=1 timeout=2 seconds=30"
_RACE = "ThreadSanitizer: data race"
_WRONG = "is wrong"

# Kernels for float32 alone: mutants are built in a third of the time.
_OTHER_DTYPES = """\
    case DType::kFloat64: return choose_ranks<Kernels, double>(op, world_size);
    case DType::kFloat16: return choose_ranks<Kernels, __half>(op, world_size);
    case DType::kBFloat16: return choose_ranks<Kernels, __nv_bfloat16>(op, world_size);
    case DType::kInt32: return choose_ranks<Kernels, int32_t>(op, world_size);
    case DType::kInt64: return choose_ranks<Kernels, int64_t>(op, world_size);
    case DType::kNone:
"""
_FLOAT32 = Edit(_REDUCE, _OTHER_DTYPES, "    default: break;\n    case DType::kNone:\n")

_COLLECTIVES = (
    Mutant(
        # A call of a broken group stages over what a slower peer still reads, for a call that was complete.
        "staging_in_a_broken_group",
        (Edit(_REDUCE, "return !DeviceWait(p.wait).broken();", "return p.numel != 0;"),),
        f"pull_one_shot breaks=4 {_LONG}",
        _WRONG,
    ),
    Mutant(
        "one_shot_has_one_half",
        (Edit(_ONE_SHOT, _HALF, _NO_HALF),),
        f"pull_one_shot breaks=0 {_LONG}",
        _WRONG,
    ),
    Mutant(
        # A parcel that is overwritten by the next call's is waited for in vain.
        "push_has_one_half",
        (Edit(_PARCELS, "half((call % kHalves) * p.half_bytes)", "half(0)"),),
        f"push_one_shot breaks=0 {_LONG}",
        "is poison",
    ),
    Mutant(
        "one_shot_start_relaxed",
        (Edit(_ONE_SHOT, _START, "p.pull.sync<false, true>("),),
        f"pull_one_shot {_LONG}",
        _RACE,
        "thread",
    ),
    Mutant(
        # What the end orders are the shares that this very kernel has reduced.
        "two_shot_end_relaxed",
        (Edit(_TWO_SHOT, _END, _END.replace("true", "false", 1)),),
        f"pull_two_shot {_LONG}",
        _RACE,
        "thread",
    ),
    Mutant("two_shot_has_no_end", (Edit(_TWO_SHOT, _END, ""),), f"pull_two_shot {_LONG}", _WRONG),
    Mutant(
        # What a peer pushed two calls ago is taken for its data.
        "push_flags_without_the_call",
        (Edit(_PARCELS, "low(call | 0x80000000u)", "low(0 * call | 0x80000000u)"),),
        f"push_one_shot breaks=0 {_LONG}",
        _WRONG,
    ),
    Mutant(
        "push_looks_at_the_first_flag",
        (Edit(_PARCELS, f"{_LOW_FLAG} && {_HIGH_FLAG}", _LOW_FLAG),),
        f"push_one_shot breaks=0 {_LONG}",
        _WRONG,
    ),
    Mutant(
        "push_looks_at_the_second_flag",
        (Edit(_PARCELS, f"{_LOW_FLAG} && {_HIGH_FLAG}", _HIGH_FLAG),),
        f"push_one_shot breaks=0 {_LONG}",
        _WRONG,
    ),
    Mutant(
        "push_reads_another_blocks_count",
        (Edit(_PARCELS, "mail.arrival().pack()", "Arrival{arrivals.epoch(p.pull.rank()), p.key}.pack()"),),
        f"push_one_shot {_LONG}",
        _RACE,
        "thread",
    ),
    Mutant(
        # The next launch has more blocks, and they do not agree on the half.
        "unused_blocks_do_not_count",
        (Edit(_REDUCE, "b < kMaxBlocks; b += blockDim.x) p.calls[b]", "false;) p.calls[b]"),),
        f"mixed {_LONG}",
        _WRONG,
    ),
    Mutant(
        "kernels_do_not_acquire",
        (
            Edit(
                _DEVICE_WAIT,
                "!= Seen::kArrived) return false;\n    mine.acquire_from(peer);",
                "!= Seen::kArrived) return false;",
            ),
        ),
        f"pull_one_shot {_LONG}",
        _RACE,
        "thread",
    ),
    Mutant(
        # Each lane's release carries what that lane has staged, and no more.
        "no_leading_barrier",
        (Edit(_PULL, "    Scope::barrier();\n", ""),),
        f"pull_one_shot {_LONG}",
        _RACE,
        "thread",
    ),
    Mutant(
        "packs_beyond_the_end",
        (Edit(_PACKS, "? numel / Pack<T>::kItems : 0;", "? packs_of<T>(numel) : 0;"),),
        f"mixed {_LONG}",
        "AddressSanitizer: heap-buffer-overflow",
        "address",
    ),
    Mutant(
        # Parcels that have come in time are taken again when others were late.
        "squares_of_the_late_count_twice",
        (Edit(_RMS_NORM, "    squares = 0;\n", ""),),
        f"rms_norm breaks=0 {_LONG}",
        _WRONG,
    ),
    Mutant(
        # The norm of a row needs all of it.
        "rms_norm_of_what_has_come",
        (Edit(_RMS_NORM, "      squares = NAN;", "      squares += 0;"),),
        f"rms_norm breaks=4 {_LONG}",
        _WRONG,
    ),
    Mutant(
        # A lane that waits for nobody reads what others still wait for.
        "no_trailing_barrier",
        (Edit(_PULL, "if (Scope::barrier_and(complete)) [[likely]]", "if (complete) [[likely]]"),),
        f"pull_one_shot {_LONG}",
        _RACE,
        "thread",
    ),
)

MUTANTS = {m.name: replace(m, edits=(*m.edits, _FLOAT32)) for m in _COLLECTIVES}
