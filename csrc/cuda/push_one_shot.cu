// All-reduce, push one-shot: write my input into every peer's memory, with flag words beside the data, and
// reduce what arrives in mine. No barrier: the data is the signal.
#include "reduce.cuh"

namespace gpusync::cuda {
namespace {

// A poll takes about half a microsecond.
constexpr uint32_t kPollsBetweenChecks = 4096;

/// 8 bytes of data on their way, in one 16-byte store. The halves of such a store may become visible one
/// before the other, so each has a flag. Flags hold the number of the call, hence any bit pattern can be data
/// and nothing has to be cleared (NCCL's LL protocol works this way, too). The second holds the call's
/// fingerprint as well: what a rank sent that calls something else is never taken for data.
struct alignas(16) Parcel {
  uint32_t low, low_flag, high, high_flag;
};

struct Flags {
  uint32_t low, high;

  /// Neither is ever the zero of memory that nothing was sent to: a fingerprint of an all-reduce has no top
  /// bit.
  __device__ __forceinline__ Flags(uint32_t call, uint32_t key) : low(call | 0x80000000u), high(low ^ key) {}
};
static_assert(static_cast<uint32_t>(Op::kAllReduce) < 16);

__device__ __forceinline__ void send(Parcel* target, uint2 data, Flags flags) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(data.x),
               "r"(flags.low), "r"(data.y), "r"(flags.high)
               : "memory");
}

__device__ __forceinline__ Parcel look(const Parcel* source) {
  Parcel parcel;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(parcel.low), "=r"(parcel.low_flag), "=r"(parcel.high), "=r"(parcel.high_flag)
               : "l"(source)
               : "memory");
  return parcel;
}

__device__ __forceinline__ bool is_here(const Parcel& parcel, Flags flags) {
  return parcel.low_flag == flags.low && parcel.high_flag == flags.high;
}

/// Half a pack: what one parcel carries.
template <class T>
struct alignas(8) Half {
  static constexpr uint32_t kItems = 8 / sizeof(T);
  T items[kItems];
};

template <class T>
__device__ __forceinline__ Half<T> unpack(const Parcel& parcel) {
  Half<T> half;
  *reinterpret_cast<uint2*>(&half) = make_uint2(parcel.low, parcel.high);
  return half;
}

template <class T>
__device__ __forceinline__ Half<T> load_half(const T* data, uint64_t index, uint64_t numel) {
  const uint64_t first = index * Half<T>::kItems;
  if (first + Half<T>::kItems <= numel && reinterpret_cast<uintptr_t>(data) % 8 == 0) {
    return reinterpret_cast<const Half<T>*>(data)[index];
  }
  Half<T> half;
#pragma unroll
  for (uint32_t k = 0; k < Half<T>::kItems; ++k) half.items[k] = first + k < numel ? data[first + k] : T{};
  return half;
}

template <class T>
__device__ __forceinline__ void store_half(T* data, uint64_t index, uint64_t numel, const Half<T>& half) {
  const uint64_t first = index * Half<T>::kItems;
  if (first + Half<T>::kItems <= numel && reinterpret_cast<uintptr_t>(data) % 8 == 0) {
    reinterpret_cast<Half<T>*>(data)[index] = half;
    return;
  }
#pragma unroll
  for (uint32_t k = 0; k < Half<T>::kItems; ++k) {
    if (first + k < numel) data[first + k] = half.items[k];
  }
}

/// Two halves suffice without any clearing: half k % 2 is written again in call k + 2, after my kernel k + 1
/// has received data that every peer sent after its own kernel k had ended.
///
/// Block 0 also announces the call in the peers' slots, relaxed and without waiting: what a wait that takes
/// too long looks at, to tell who is missing or does something else.
template <class T, uint32_t kRanks>
__global__ void __launch_bounds__(512, kResidentBlocks)
    push_one_shot_kernel(const __grid_constant__ AllReduceParams p) {
  const auto* input = static_cast<const T*>(p.input);
  auto* output = static_cast<T*>(p.output);
  const uint32_t world_size = kRanks != 0 ? kRanks : p.pull.world_size();
  const uint32_t rank = p.pull.rank();
  const uint64_t parcels = (p.numel + Half<T>::kItems - 1) / Half<T>::kItems;
  const uint64_t first = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  const uint32_t call = call_number(p);
  const Flags flags(call, p.key);
  const uint64_t half = (call % kHalves) * p.half_bytes;
  const auto slot = [&](uint32_t owner, uint32_t source) {
    return reinterpret_cast<Parcel*>(p.area[owner] + half + source * p.slot_bytes);
  };
  const auto post = [&] {
    for (uint64_t i = first; i < parcels; i += stride) {
      const Half<T> data = load_half(input, i, p.numel);
#pragma unroll
      for (uint32_t r = 0; r < world_size; ++r) {
        if (r != rank) send(slot(r, rank) + i, *reinterpret_cast<const uint2*>(&data), flags);
      }
    }
    if (blockIdx.x == 0) p.pull.announce(p.key, DeviceWait(p.wait));
  };
  // Which ranks' parcel i is not here?
  const auto missing = [&](uint64_t i) {
    uint64_t mask = 0;
    for (uint32_t r = 0; r < world_size; ++r) {
      if (r != rank && !is_here(look(slot(rank, r) + i), flags)) mask |= uint64_t{1} << r;
    }
    return mask;
  };
  // Receives parcel i of every rank, reduces and stores; false: not all here yet after that many polls.
  const auto receive = [&](uint64_t i) {
    Reduction<T, Half<T>> sum;
    if constexpr (kRanks != 0) {
      Parcel parcels_of[kRanks];
      bool here = false;
      for (uint32_t polls = 0; !here && polls < kPollsBetweenChecks; ++polls) {
        here = true;
#pragma unroll
        for (uint32_t r = 0; r < kRanks; ++r) {
          if (r != rank) parcels_of[r] = look(slot(rank, r) + i);
        }
#pragma unroll
        for (uint32_t r = 0; r < kRanks; ++r) here = here && (r == rank || is_here(parcels_of[r], flags));
      }
      if (!here) return false;
      const Half<T> own = load_half(input, i, p.numel);
#pragma unroll
      for (uint32_t r = 0; r < kRanks; ++r) {
        const Half<T> data = r == rank ? own : unpack<T>(parcels_of[r]);
        r == 0 ? sum.first(data) : sum.template add<true>(p, data);
      }
    } else {
      for (uint32_t r = 0; r < world_size; ++r) {
        Half<T> data;
        if (r == rank) {
          data = load_half(input, i, p.numel);
        } else {
          Parcel parcel = look(slot(rank, r) + i);
          for (uint32_t polls = 0; !is_here(parcel, flags); ++polls) {
            if (polls >= kPollsBetweenChecks) return false;
            parcel = look(slot(rank, r) + i);
          }
          data = unpack<T>(parcel);
        }
        r == 0 ? sum.first(data) : sum.template add<false>(p, data);
      }
    }
    store_half(output, i, p.numel, sum.result(p));
    return true;
  };

  DeviceWait wait(p.wait);
  const bool posted = wait.ready();
  if (posted) post();
  bool complete = posted;
  for (uint64_t i = first; i < parcels && complete; i += stride) complete = receive(i);

  if (!__syncthreads_and(complete)) [[unlikely]] {
    complete = posted || wait.settle();
    if (complete && !posted) post();
    const uint64_t start = escape::now();
    const Semaphore& mine = p.pull.own(0);
    for (uint64_t i = first; i < parcels && complete; i += stride) {
      while (complete && !receive(i)) {
        const uint64_t expected = Arrival{mine.epoch(rank), p.key}.pack();
        bool mismatch = false;
        for (uint32_t r = 0; r < world_size; ++r)
          mismatch = mismatch || compare(mine.peek(r), expected) == Seen::kMismatch;
        complete = escape::go_on(p.wait, mine, expected, mismatch, start, [&] { return missing(i); });
      }
    }
    if (!complete) {
      for (uint64_t i = first; i < parcels; i += stride)
        store_half(output, i, p.numel, poison<Half<T>>(p.dtype));
    }
  }
  touch(p.token);
  finish_call(p, call);
}

template <class T, uint32_t kRanks>
struct PushOneShot {
  static AllReduceKernel kernel() { return push_one_shot_kernel<T, kRanks>; }
};

}  // namespace

AllReduceKernel push_one_shot(DType dtype, ReduceOp op, uint32_t world_size) {
  return choose_kernel<PushOneShot>(dtype, op, world_size);
}

}  // namespace gpusync::cuda
