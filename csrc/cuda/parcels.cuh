// Data on its way in parcels: stores that bring their flags along, so that nobody has to be asked whether it
// is there; and the wait for them.
#pragma once

#include "reduce.cuh"

namespace gpusync::cuda {

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

  /// Neither is ever the zero of memory that nothing was sent to: a collective's fingerprint has no top bit.
  __device__ __forceinline__ Flags(uint32_t call, uint32_t key) : low(call | 0x80000000u), high(low ^ key) {}
};
static_assert(static_cast<uint32_t>(Op::kReduce) < 16);

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

/// The parcels of one call: where they lie, and which they are.
///
/// Two halves suffice without any clearing: half k % 2 is written again in call k + 2, after my kernel k + 1
/// has received data that every peer sent after its own kernel k had ended. So every rank has to hear from
/// every other in each call: no broadcast can be pushed like this.
struct Mail {
  const AllReduceParams& p;
  uint32_t call;
  uint64_t half;
  Flags flags;

  __device__ __forceinline__ Mail(const AllReduceParams& params, uint32_t number)
      : p(params), call(number), half((call % kHalves) * p.half_bytes), flags(call, p.key) {}

  /// In `owner`'s memory, what `source` sends.
  __device__ __forceinline__ Parcel* slot(uint32_t owner, uint32_t source) const {
    return reinterpret_cast<Parcel*>(p.area[owner] + half + source * p.slot_bytes);
  }

  template <class T>
  __device__ __forceinline__ void send_to(uint32_t peer, uint64_t i, const Half<T>& data) const {
    send(slot(peer, p.pull.rank()) + i, *reinterpret_cast<const uint2*>(&data), flags);
  }

  __device__ __forceinline__ Parcel look_from(uint32_t source, uint64_t i) const {
    return look(slot(p.pull.rank(), source) + i);
  }

  /// Waits for `source`'s parcel i; false: it is not here after many polls.
  __device__ __forceinline__ bool receive_from(uint32_t source, uint64_t i, Parcel& parcel) const {
    parcel = look_from(source, i);
    for (uint32_t polls = 0; !is_here(parcel, flags); ++polls) {
      if (polls >= kPollsBetweenChecks) return false;
      parcel = look_from(source, i);
    }
    return true;
  }

  /// Every call of the group's collectives arrives once in the start stage of block 0, be it pushed or
  /// pulled.
  __device__ __forceinline__ Arrival arrival() const { return {call + 1, p.key}; }

  /// Announces the call in the peers' slots, relaxed and without waiting: what a wait that takes too long
  /// looks at, to tell who is missing or does something else. By block 0.
  __device__ __forceinline__ void announce() const {
    if (blockIdx.x == 0) p.pull.announce(arrival(), DeviceWait(p.wait));
  }
};

/// What a block does when its parcels have not all come after many polls, or the group was not whole when it
/// began: `receive(i)` once more for each of its threads' parcels, as long as the group lives. `missing(i)`:
/// the ranks that have not sent. True: all is received.
template <class Post, class Receive, class Missing>
__device__ __forceinline__ bool receive_late(const Mail& mail, bool posted, const MyPacks& mine,
                                             uint64_t parcels, Post&& post, Receive&& receive,
                                             Missing&& missing) {
  const AllReduceParams& p = mail.p;
  bool complete = posted || DeviceWait(p.wait).settle();
  if (complete && !posted) post();
  const uint64_t start = escape::now();
  const Semaphore& arrivals = p.pull.own(0);
  for (uint64_t i = mine.first; i < parcels && complete; i += mine.step) {
    while (complete && !receive(i)) {
      // Every call is announced once, by its block 0, whose own count may not be up yet.
      const uint64_t expected = mail.arrival().pack();
      bool mismatch = false;
      for (uint32_t r = 0; r < p.pull.world_size(); ++r)
        mismatch = mismatch || compare(arrivals.peek(r), expected) == Seen::kMismatch;
      complete = escape::go_on(p.wait, arrivals, expected, mismatch, start, [&] { return missing(i); });
    }
  }
  return complete;
}

}  // namespace gpusync::cuda
