// all_gather and all_to_all of small inputs, pushed: my rows go to the peers in parcels, and theirs come to
// me. No barrier: the data is the signal.
#include "exchange.h"
#include "parcels.cuh"

namespace gpusync::cuda {
namespace {

/// A thread takes the same parcel of every peer, kPeers of them at a time.
template <class T, uint32_t kPeers>
__global__ void __launch_bounds__(512, kResidentBlocks)
    push_copy_kernel(const __grid_constant__ ExchangeParams p) {
  const uint32_t rank = p.pull.rank();
  const uint32_t peers = p.pull.world_size() - 1;
  // The k-th rank behind me, for a k beyond the last the last: loads need no branch, and may be in flight
  // together.
  const auto peer = [&](uint32_t k) {
    const uint32_t r = rank + 1 + min(k, peers - 1);
    return r <= peers ? r : r - peers - 1;
  };
  const uint32_t row = p.rows != 1 ? 1 : 0;  // of my input, for the next rank
  const auto input = [&](uint32_t r) { return static_cast<const T*>(p.input) + r * row * p.columns; };
  const auto output = [&](uint32_t r) { return static_cast<T*>(p.output) + r * p.columns; };
  const uint64_t parcels = (p.numel + Half<T>::kItems - 1) / Half<T>::kItems;
  const bool rows_aligned = p.columns % Half<T>::kItems == 0;
  const uint64_t whole = rows_aligned ? whole_halves(input(0), output(0), p.numel) : 0;
  const MyPacks mine;  // here of parcels, which are smaller
  const uint32_t call = call_number(p);
  const Mail mail(p, call);

  const auto load = [&](uint32_t r, uint64_t i) {
    return i < whole ? reinterpret_cast<const Half<T>*>(input(r))[i] : load_half(input(r), i, p.numel);
  };
  const auto store = [&](uint32_t r, uint64_t i, const Half<T>& data) {
    if (i < whole) {
      reinterpret_cast<Half<T>*>(output(r))[i] = data;
    } else {
      store_half(output(r), i, p.numel, data);
    }
  };
  const auto send_to_peers = [&](uint64_t i, auto&& load_for) {
    for (uint32_t first = 0; first < peers; first += kPeers) {
      Half<T> held[kPeers];
#pragma unroll
      for (uint32_t k = 0; k < kPeers; ++k) held[k] = load_for(peer(first + k));
#pragma unroll
      for (uint32_t k = 0; k < kPeers; ++k) {
        if (first + k < peers) mail.send_to(peer(first + k), i, held[k]);
      }
    }
  };
  const auto post = [&] {
    mine.visit<1>(
        whole, parcels,
        [&](uint64_t i, auto) {
          send_to_peers(i, [&](uint32_t r) { return reinterpret_cast<const Half<T>*>(input(r))[i]; });
        },
        [&](uint64_t i) { send_to_peers(i, [&](uint32_t r) { return load_half(input(r), i, p.numel); }); });
    mail.announce();
  };
  const auto receive = [&](uint64_t i) {
    for (uint32_t first = 0; first < peers; first += kPeers) {
      Parcel parcels_of[kPeers];
      bool here = false;
      for (uint32_t polls = 0; !here && polls < kPollsBetweenChecks; ++polls) {
#pragma unroll
        for (uint32_t k = 0; k < kPeers; ++k) parcels_of[k] = mail.look_from(peer(first + k), i);
        here = true;
#pragma unroll
        for (uint32_t k = 0; k < kPeers; ++k) here = here && is_here(parcels_of[k], mail.flags);
      }
      if (!here) return false;
#pragma unroll
      for (uint32_t k = 0; k < kPeers; ++k) {
        if (first + k < peers) store(peer(first + k), i, unpack<T>(parcels_of[k]));
      }
    }
    return true;
  };
  const auto missing = [&](uint64_t i) {
    uint64_t mask = 0;
    for (uint32_t k = 0; k < peers; ++k) {
      if (!is_here(mail.look_from(peer(k), i), mail.flags)) mask |= uint64_t{1} << peer(k);
    }
    return mask;
  };

  const bool posted = DeviceWait(p.wait).ready();
  if (posted) post();
  bool complete = posted;
  for (uint64_t i = mine.first; i < parcels; i += mine.step) {
    store(rank, i, load(rank, i));
    complete = complete && receive(i);
  }
  if (!__syncthreads_and(complete)) [[unlikely]] {
    if (!receive_late(mail, posted, mine, parcels, post, receive, missing)) {
      Half<T> poison;
      *reinterpret_cast<uint64_t*>(&poison) = p.poison;
      for (uint64_t i = mine.first; i < parcels; i += mine.step) {
        for (uint32_t r = 0; r <= peers; ++r) store(r, i, poison);
      }
    }
  }
  touch(p.token);
  finish_call(p, call);
}

template <class T>
ExchangeKernel for_world(uint32_t world_size) {
  switch (world_size) {
    case 2: return push_copy_kernel<T, 1>;
    case 3:
    case 4: return push_copy_kernel<T, 3>;
    default: return push_copy_kernel<T, 7>;
  }
}

}  // namespace

ExchangeKernel push_copying(size_t item, uint32_t world_size) {
  switch (item) {
    case 1: return for_world<uint8_t>(world_size);
    case 2: return for_world<uint16_t>(world_size);
    case 4: return for_world<uint32_t>(world_size);
    default: return for_world<uint64_t>(world_size);
  }
}

}  // namespace gpusync::cuda
