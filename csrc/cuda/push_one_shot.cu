// All-reduce, push one-shot: write my input into every peer's memory, with flag words beside the data, and
// reduce what arrives in mine. No barrier: the data is the signal.
#include "reduce.cuh"

namespace gpusync::cuda {
namespace {

using escape::kPollsBetweenChecks;

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

#if !defined(__CUDA_ARCH__)
/// Half a parcel, data and flag. The device orders the calls around this one by the ends of their kernels;
/// what looks at the order on the host does not know of such, so that it stands on the parcels.
inline std::atomic_ref<uint64_t> word_of(const uint32_t* half) {
  return std::atomic_ref(*reinterpret_cast<uint64_t*>(const_cast<uint32_t*>(half)));
}
#endif

__device__ __forceinline__ void send(Parcel* target, uint2 data, Flags flags) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(data.x),
               "r"(flags.low), "r"(data.y), "r"(flags.high)
               : "memory");
#else
  word_of(&target->low).store(uint64_t{flags.low} << 32 | data.x, std::memory_order_release);
  block::relax();  // so that a peer may see one half alone
  word_of(&target->high).store(uint64_t{flags.high} << 32 | data.y, std::memory_order_release);
#endif
}

__device__ __forceinline__ Parcel look(const Parcel* source) {
  Parcel parcel;
#if defined(__CUDA_ARCH__)
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(parcel.low), "=r"(parcel.low_flag), "=r"(parcel.high), "=r"(parcel.high_flag)
               : "l"(source)
               : "memory");
#else
  const uint64_t low = word_of(&source->low).load(std::memory_order_acquire);
  block::relax();
  const uint64_t high = word_of(&source->high).load(std::memory_order_acquire);
  parcel = {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
            static_cast<uint32_t>(high >> 32)};
#endif
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

/// Half `index` of `numel` elements at `data`, however that is aligned; elements beyond the end are zero.
template <class T>
__device__ __forceinline__ Half<T> load_half(const T* data, uint64_t index, uint64_t numel) {
  const uint64_t first = index * Half<T>::kItems;
  Half<T> half;
#pragma unroll
  for (uint32_t k = 0; k < Half<T>::kItems; ++k) half.items[k] = first + k < numel ? data[first + k] : T{};
  return half;
}

template <class T>
__device__ __forceinline__ void store_half(T* data, uint64_t index, uint64_t numel, const Half<T>& half) {
  const uint64_t first = index * Half<T>::kItems;
#pragma unroll
  for (uint32_t k = 0; k < Half<T>::kItems; ++k) {
    if (first + k < numel) data[first + k] = half.items[k];
  }
}

/// How many halves from the first on can be loaded and stored as such.
template <class T>
__device__ __forceinline__ uint64_t whole_halves(const T* input, const T* output, uint64_t numel) {
  const uintptr_t both = reinterpret_cast<uintptr_t>(input) | reinterpret_cast<uintptr_t>(output);
  return both % sizeof(Half<T>) == 0 ? numel / Half<T>::kItems : 0;
}

/// Parcels that a thread has in flight. More cost registers (see kResidentBlocks).
template <uint32_t kRanks>
inline constexpr uint32_t kParcelsAtOnce = kRanks == 2 ? 2 : 1;

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
  const auto* input_halves = static_cast<const Half<T>*>(p.input);
  auto* output_halves = static_cast<Half<T>*>(p.output);
  const uint64_t parcels = (p.numel + Half<T>::kItems - 1) / Half<T>::kItems;
  const uint64_t whole = whole_halves(input, output, p.numel);
  const MyPacks mine;  // here of parcels, which are smaller
  constexpr uint32_t kAtOnce = kParcelsAtOnce<kRanks>;
  const uint32_t call = call_number(p);
  const Flags flags(call, p.key);
  const uint64_t half = (call % kHalves) * p.half_bytes;
  const auto slot = [&](uint32_t owner, uint32_t source) {
    return reinterpret_cast<Parcel*>(p.area[owner] + half + source * p.slot_bytes);
  };
  const auto send_to_peers = [&](uint64_t i, const Half<T>& data) {
#pragma unroll
    for (uint32_t r = 0; r < world_size; ++r) {
      if (r != rank) send(slot(r, rank) + i, *reinterpret_cast<const uint2*>(&data), flags);
    }
  };
  const auto post = [&] {
    mine.visit<kAtOnce>(
        whole, parcels,
        [&]<uint32_t n>(uint64_t i, AtOnce<n>) {
          Half<T> held[n];
#pragma unroll
          for (uint32_t u = 0; u < n; ++u) held[u] = input_halves[mine.at(i, u)];
#pragma unroll
          for (uint32_t u = 0; u < n; ++u) send_to_peers(mine.at(i, u), held[u]);
        },
        [&](uint64_t i) { send_to_peers(i, load_half(input, i, p.numel)); });
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
  // Receives n of my parcels from i of every rank, reduces and stores them; false: not all here yet after
  // that many polls.
  const auto receive = [&]<uint32_t n>(uint64_t i, AtOnce<n>) {
    Half<T> own[n];
    Parcel parcels_of[n][kRanks];
#pragma unroll
    for (uint32_t u = 0; u < n; ++u) own[u] = input_halves[mine.at(i, u)];
    bool here = false;
    for (uint32_t polls = 0; !here && polls < kPollsBetweenChecks; ++polls) {
#pragma unroll
      for (uint32_t u = 0; u < n; ++u)
#pragma unroll
        for (uint32_t r = 0; r != kRanks; ++r) {
          if (r != rank) parcels_of[u][r] = look(slot(rank, r) + mine.at(i, u));
        }
      here = true;
#pragma unroll
      for (uint32_t u = 0; u < n; ++u)
#pragma unroll
        for (uint32_t r = 0; r != kRanks; ++r) here = here && (r == rank || is_here(parcels_of[u][r], flags));
    }
    if (!here) return false;
#pragma unroll
    for (uint32_t u = 0; u < n; ++u) {
      Reduction<T, Half<T>> sum;
#pragma unroll
      for (uint32_t r = 0; r != kRanks; ++r) {
        const Half<T> data = r == rank ? own[u] : unpack<T>(parcels_of[u][r]);
        r == 0 ? sum.first(data) : sum.template add<true>(p, data);
      }
      output_halves[mine.at(i, u)] = sum.result(p);
    }
    return true;
  };
  // The same for one parcel, in little code and for any number of ranks, one after the other.
  const auto receive_odd = [&](uint64_t i) {
    Reduction<T, Half<T>> sum;
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
    store_half(output, i, p.numel, sum.result(p));
    return true;
  };

  DeviceWait wait(p.wait);
  const bool posted = wait.ready();
  if (posted) post();
  bool complete = posted;
  const auto receive_next = [&](uint64_t i) { complete = complete && receive_odd(i); };
  if constexpr (kRanks != 0) {
    mine.visit<kAtOnce>(
        whole, parcels, [&](uint64_t i, auto n) { complete = complete && receive(i, n); }, receive_next);
  } else {
    for (uint64_t i = mine.first; i < parcels; i += mine.step) receive_next(i);
  }

  if (!__syncthreads_and(complete)) [[unlikely]] {
    complete = posted || wait.settle();
    if (complete && !posted) post();
    const uint64_t start = escape::now();
    const Semaphore& arrivals = p.pull.own(0);
    for (uint64_t i = mine.first; i < parcels && complete; i += mine.step) {
      while (complete && !receive_odd(i)) {
        // Every call is announced once, by its block 0, whose own count may not be up yet.
        const uint64_t expected = Arrival{call + 1, p.key}.pack();
        bool mismatch = false;
        for (uint32_t r = 0; r < world_size; ++r)
          mismatch = mismatch || compare(arrivals.peek(r), expected) == Seen::kMismatch;
        complete = escape::go_on(p.wait, arrivals, expected, mismatch, start, [&] { return missing(i); });
      }
    }
    if (!complete) {
      for (uint64_t i = mine.first; i < parcels; i += mine.step)
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
