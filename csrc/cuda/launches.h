// A collective as launches of its kernel: in parts that fit the staging memory, each as wide as it needs to
// be. Nothing of CUDA is called here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/group.h"
#include "cpu/reduce.h"
#include "exchange.h"
#include "pad.h"
#include "push_rms_norm.h"

namespace gpusync::cuda {

/// One rank's place in the collectives of its group.
struct Seat {
  const PullController& pull;
  WaitContext wait;
  const PadLayout& layout;
  const int64_t* pads;  // every rank's, as mapped into this process
  int32_t* token;

  template <class T>
  T* in_pad(uint32_t rank, size_t offset) const {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(pads[rank]) + offset);
  }
};

/// The most blocks that a launch may have, and the threads of each.
struct Width {
  uint32_t blocks;
  uint32_t threads;

  uint32_t blocks_for(uint64_t units) const {
    return static_cast<uint32_t>(std::clamp<uint64_t>((units + threads - 1) / threads, 1, blocks));
  }
};

/// What is the same in all launches of the call `key`. `area`: where in every pad the algorithm works.
inline AllReduceParams params_of(const Seat& seat, const CallKey& key, size_t area) {
  const uint32_t world_size = seat.pull.world_size();
  AllReduceParams params{
      .pull = seat.pull,
      .wait = seat.wait,
      .area = {},
      .half_bytes = seat.layout.half_bytes(),
      .slot_bytes = seat.layout.half_bytes() / world_size / 16 * 16,
      .groups = 0,
      .calls = seat.in_pad<uint32_t>(seat.pull.rank(), seat.layout.push_calls(seat.wait.channel)),
      .input = nullptr,
      .output = nullptr,
      .numel = 0,
      .token = seat.token,
      .key = fingerprint(key),
      .dtype = key.dtype,
      .reduce_op = key.reduce_op,
      .scale = 1.0 / world_size};
  for (uint32_t r = 0; r < world_size; ++r) params.area[r] = seat.in_pad<char>(r, area);
  return params;
}

/// Calls `launch(params, blocks)` for each part of the all-reduce `key` by the algorithm that it names.
template <class Launch>
void each_launch(const Seat& seat, const CallKey& key, const void* input, void* output, Width width,
                 Launch&& launch) {
  const bool push = key.algo == Algo::kPushOneShot;
  const size_t item = cpu::item_bytes(key.dtype);
  AllReduceParams params = params_of(seat, key, push ? seat.layout.push_area() : seat.layout.staging(0));
  // What one thread takes at a time, and how much fits: a pushed parcel of 16 bytes carries 8.
  const uint64_t unit = push ? 8 : key.algo == Algo::kPullTwoShot ? 16 * seat.pull.world_size() : 16;
  const uint64_t chunk = (push ? params.slot_bytes / 2 : params.half_bytes) / item;
  for (uint64_t first = 0; first < key.numel; first += chunk) {
    params.input = static_cast<const char*>(input) + first * item;
    params.output = static_cast<char*>(output) + first * item;
    params.numel = std::min(chunk, key.numel - first);
    params.groups = (params.numel * item + unit - 1) / unit;
    launch(params, width.blocks_for(params.groups));
  }
}

/// What an exchange's kernel takes for an element, in bytes.
inline size_t unit_of(const cpu::Exchange& what) { return std::min<size_t>(what.item_bytes, 8); }

/// Rows of an exchange's input.
inline uint32_t rows_of(const cpu::Exchange& what, const Seat& seat) {
  return what.is_split() ? seat.pull.world_size() : 1;
}

/// May the exchange be pushed? Every rank has to hear from every other, and a row to fit.
inline bool can_push(const Seat& seat, const CallKey& key, const cpu::Exchange& what) {
  const uint64_t row_bytes = key.numel / rows_of(what, seat) * what.item_bytes;
  const uint64_t slot = seat.layout.half_bytes() / seat.pull.world_size() / 16 * 16;
  return !what.has_root() && seat.pull.world_size() > 1 && (row_bytes + 7) / 8 * 16 <= slot;
}

/// Is it, then? With more than so many bytes from all other ranks together, pulling is faster
/// (docs/performance_gpu.md).
inline bool is_pushed(const Seat& seat, const CallKey& key, const cpu::Exchange& what) {
  const uint64_t most = what.reduces() ? 512 << 10 : 256 << 10;
  const uint64_t row_bytes = key.numel / rows_of(what, seat) * what.item_bytes;
  return can_push(seat, key, what) && row_bytes * (seat.pull.world_size() - 1) <= most;
}

inline ExchangeKernel kernel_of(const Seat& seat, const CallKey& key, const cpu::Exchange& what, bool push) {
  const uint32_t world_size = seat.pull.world_size();
  if (what.reduces()) return (push ? push_reducing : reducing)(key.dtype, key.reduce_op, world_size);
  return push ? push_copying(unit_of(what), world_size) : copying(unit_of(what));
}

/// The same for the exchange `what`, pushed in one launch or pulled. `poison`: what a copy's output is filled
/// with in a broken group.
template <class Launch>
void each_launch(const Seat& seat, const CallKey& key, const cpu::Exchange& what, bool push, uint64_t poison,
                 const void* input, void* output, Width width, Launch&& launch) {
  const uint32_t rows = rows_of(what, seat);
  const size_t unit = unit_of(what);
  ExchangeParams params{params_of(seat, key, push ? seat.layout.push_area() : seat.layout.staging(0)),
                        key.numel / rows * (what.item_bytes / unit),
                        poison,
                        rows,
                        what.is_split() ? seat.pull.rank() : 0,
                        what.op == Op::kBroadcast ? key.root : kMaxRanks,
                        what.op == Op::kReduce ? key.root : kMaxRanks};
  // Whole packs of every row; a half holds 16 bytes of each rank at least.
  const uint64_t chunk = push ? params.columns : params.half_bytes / rows / 16 * 16 / unit;
  const uint64_t thread = push ? 8 : 16;  // bytes
  for (uint64_t first = 0; first < params.columns; first += chunk) {
    params.input = static_cast<const char*>(input) + first * unit;
    params.output = static_cast<char*>(output) + first * unit;
    params.numel = std::min(chunk, params.columns - first);
    params.groups = (params.numel * unit + thread - 1) / thread;
    launch(params, width.blocks_for(params.groups));
  }
}

/// What all_reduce_rms_norm is given beside its summand and the place of its sum.
struct RmsNorm {
  const void* residual;
  const void* weight;
  void* norm;
  uint64_t columns;  // of a row, which is made of whole parcels
  float eps;
  float weight_bias;
};

/// The same for all_reduce_rms_norm: `row_blocks` blocks for each row, so many rows at a time as there may be
/// blocks, of which every rank may have equally many.
template <class Launch>
void each_launch(const Seat& seat, const CallKey& key, const RmsNorm& what, uint32_t row_blocks,
                 const void* input, void* output, Width width, Launch&& launch) {
  const size_t row_bytes = what.columns * cpu::item_bytes(key.dtype);
  RmsNormParams params{params_of(seat, key, seat.layout.push_area()),
                       nullptr,
                       what.weight,
                       nullptr,
                       static_cast<uint32_t>(row_bytes / 8),
                       row_blocks,
                       1 / static_cast<float>(what.columns),
                       what.eps,
                       what.weight_bias};
  const uint64_t rows = key.numel / what.columns;
  const uint64_t most = std::min<uint64_t>(width.blocks / row_blocks, params.slot_bytes / 2 / row_bytes);
  for (uint64_t first = 0; first < rows; first += most) {
    const uint64_t n = std::min(most, rows - first);
    const auto part = [at = first * row_bytes](const void* data) {
      return static_cast<const char*>(data) + at;
    };
    params.input = part(input);
    params.residual = part(what.residual);
    params.output = static_cast<char*>(output) + first * row_bytes;
    params.norm = static_cast<char*>(what.norm) + first * row_bytes;
    params.numel = n * what.columns;
    params.groups = n * params.row_parcels;
    launch(params, static_cast<uint32_t>(n) * row_blocks);
  }
}

}  // namespace gpusync::cuda
