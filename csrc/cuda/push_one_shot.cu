// All-reduce, push one-shot: write my input into every peer's memory, with flag words beside the data, and
// reduce what arrives in mine. No barrier: the data is the signal. And reduce_scatter of small inputs, where
// every peer is sent its own part.
#include "exchange.h"
#include "parcels.cuh"

namespace gpusync::cuda {
namespace {

/// Parcels that a thread has in flight. More cost registers (see kResidentBlocks).
template <uint32_t kRanks>
inline constexpr uint32_t kParcelsAtOnce = kRanks == 2 ? 2 : 1;

/// kSplit: the input has a row for every rank.
template <class T, uint32_t kRanks, bool kSplit>
__global__ void __launch_bounds__(512, kResidentBlocks) push_one_shot_kernel(
    const __grid_constant__ std::conditional_t<kSplit, ExchangeParams, AllReduceParams> p) {
  const uint32_t world_size = kRanks != 0 ? kRanks : p.pull.world_size();
  const uint32_t rank = p.pull.rank();
  const auto input = [&](uint32_t r) { return static_cast<const T*>(p.input) + (kSplit ? r * p.numel : 0); };
  const auto input_halves = [&](uint32_t r) { return reinterpret_cast<const Half<T>*>(input(r)); };
  auto* output = static_cast<T*>(p.output);
  auto* output_halves = static_cast<Half<T>*>(p.output);
  const uint64_t parcels = (p.numel + Half<T>::kItems - 1) / Half<T>::kItems;
  const bool parts_aligned = !kSplit || p.numel % Half<T>::kItems == 0;
  const uint64_t whole = parts_aligned ? whole_halves(input(0), output, p.numel) : 0;
  const MyPacks mine;  // here of parcels, which are smaller
  constexpr uint32_t kAtOnce = kParcelsAtOnce<kRanks>;
  const uint32_t call = call_number(p);
  const Mail mail(p, call);

  // `load(r, u)`: of what is for rank r, the u-th of n parcels.
  const auto send_to_peers = [&]<uint32_t n>(uint64_t i, AtOnce<n>, auto&& load) {
    if constexpr (kSplit) {
      // With the number of ranks known when compiling, all loads are in flight before the first send; else
      // four ranks'.
      constexpr uint32_t kPeers = kRanks != 0 ? kRanks : 4;
      for (uint32_t first = 0; first < world_size; first += kPeers) {
        Half<T> held[n][kPeers];
#pragma unroll
        for (uint32_t u = 0; u < n; ++u)
#pragma unroll
          for (uint32_t k = 0; k < kPeers; ++k) held[u][k] = load(min(first + k, world_size - 1), u);
#pragma unroll
        for (uint32_t u = 0; u < n; ++u)
#pragma unroll
          for (uint32_t k = 0; k < kPeers; ++k) {
            const uint32_t r = first + k;
            if (r != rank && r < world_size) mail.send_to(r, mine.at(i, u), held[u][k]);
          }
      }
    } else {
      Half<T> held[n];
#pragma unroll
      for (uint32_t u = 0; u < n; ++u) held[u] = load(0, u);
#pragma unroll
      for (uint32_t u = 0; u < n; ++u)
#pragma unroll
        for (uint32_t r = 0; r < world_size; ++r) {
          if (r != rank) mail.send_to(r, mine.at(i, u), held[u]);
        }
    }
  };
  const auto post = [&] {
    mine.visit<kAtOnce>(
        whole, parcels,
        [&](uint64_t i, auto n) {
          send_to_peers(i, n, [&](uint32_t r, uint32_t u) { return input_halves(r)[mine.at(i, u)]; });
        },
        [&](uint64_t i) {
          send_to_peers(i, AtOnce<1>{},
                        [&](uint32_t r, uint32_t) { return load_half(input(r), i, p.numel); });
        });
    mail.announce();
  };
  // Receives n of my parcels from i of every rank, reduces and stores them; false: not all here yet after
  // that many polls.
  const auto receive = [&]<uint32_t n>(uint64_t i, AtOnce<n>) {
    Half<T> own[n];
    Parcel parcels_of[n][kRanks];
#pragma unroll
    for (uint32_t u = 0; u < n; ++u) own[u] = input_halves(rank)[mine.at(i, u)];
    bool here = false;
    for (uint32_t polls = 0; !here && polls < kPollsBetweenChecks; ++polls) {
#pragma unroll
      for (uint32_t u = 0; u < n; ++u)
#pragma unroll
        for (uint32_t r = 0; r != kRanks; ++r) {
          if (r != rank) parcels_of[u][r] = mail.look_from(r, mine.at(i, u));
        }
      here = true;
#pragma unroll
      for (uint32_t u = 0; u < n; ++u)
#pragma unroll
        for (uint32_t r = 0; r != kRanks; ++r)
          here = here && (r == rank || is_here(parcels_of[u][r], mail.flags));
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
        data = load_half(input(rank), i, p.numel);
      } else {
        Parcel parcel;
        if (!mail.receive_from(r, i, parcel)) return false;
        data = unpack<T>(parcel);
      }
      r == 0 ? sum.first(data) : sum.template add<false>(p, data);
    }
    store_half(output, i, p.numel, sum.result(p));
    return true;
  };
  const auto missing = [&](uint64_t i) {
    uint64_t mask = 0;
    for (uint32_t r = 0; r < world_size; ++r) {
      if (r != rank && !is_here(mail.look_from(r, i), mail.flags)) mask |= uint64_t{1} << r;
    }
    return mask;
  };

  const bool posted = DeviceWait(p.wait).ready();
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
    if (!receive_late(mail, posted, mine, parcels, post, receive_odd, missing)) {
      for (uint64_t i = mine.first; i < parcels; i += mine.step)
        store_half(output, i, p.numel, poison<Half<T>>(p.dtype));
    }
  }
  touch(p.token);
  finish_call(p, call);
}

template <class T, uint32_t kRanks>
struct PushOneShot {
  static AllReduceKernel kernel() { return push_one_shot_kernel<T, kRanks, false>; }
};

template <class T, uint32_t kRanks>
struct PushReduceScatter {
  static ExchangeKernel kernel() { return push_one_shot_kernel<T, kRanks, true>; }
};

}  // namespace

AllReduceKernel push_one_shot(DType dtype, ReduceOp op, uint32_t world_size) {
  return choose_kernel<PushOneShot>(dtype, op, world_size);
}

ExchangeKernel push_reducing(DType dtype, ReduceOp op, uint32_t world_size) {
  return choose_kernel<PushReduceScatter>(dtype, op, world_size);
}

}  // namespace gpusync::cuda
