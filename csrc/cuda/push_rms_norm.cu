// All-reduce, push one-shot, and what stands behind it in a transformer: the residual is added, and the RMS
// norm taken. The blocks of a row add its squares up among themselves; blocks of different rows need not
// meet.
#include "push_rms_norm.h"

#include "parcels.cuh"
#include "row_sum.cuh"

namespace gpusync::cuda {
namespace {

template <class T, uint32_t kRanks>
__global__ void __launch_bounds__(kRmsNormThreads, kResidentBlocks)
    push_rms_norm_kernel(const __grid_constant__ RmsNormParams p) {
  using E = Element<T>;
  const uint32_t world_size = kRanks != 0 ? kRanks : p.pull.world_size();
  const uint32_t rank = p.pull.rank();
  const auto* input = static_cast<const T*>(p.input);
  const auto* residual = static_cast<const T*>(p.residual);
  auto* output = static_cast<T*>(p.output);
  auto* norm = static_cast<T*>(p.norm);
  const auto halves = [](const T* data) { return reinterpret_cast<const Half<T>*>(data); };
  const RowSum row_sum(p.row_blocks);
  const uint64_t row = uint64_t{blockIdx.x / p.row_blocks} * p.row_parcels;  // its first parcel
  const uint64_t end = row + p.row_parcels;
  const auto* weight = static_cast<const T*>(p.weight);
  const MyPacks mine{row + blockIdx.x % p.row_blocks * blockDim.x + threadIdx.x, p.row_blocks * blockDim.x};
  const bool aligned = whole_halves(input, output, p.numel) != 0 &&
                       whole_halves(residual, norm, p.numel) != 0 && whole_halves(weight, norm, p.numel) != 0;
  const uint64_t whole = aligned ? end : 0;
  const uint32_t call = call_number(p);
  const Mail mail(p, call);

  const auto send = [&](uint64_t i, const Half<T>& data) {
#pragma unroll
    for (uint32_t r = 0; r < world_size; ++r) {
      if (r != rank) mail.send_to(r, i, data);
    }
  };
  const auto post = [&](const MyPacks& mine) {
    mine.visit<1>(
        whole, end, [&](uint64_t i, AtOnce<1>) { send(i, halves(input)[i]); },
        [&](uint64_t i) { send(i, load_half(input, i, p.numel)); });
    mail.announce();
  };

  float squares = 0;
  Half<T> total{};  // of the parcel that was received last: of a thread that has one, its own
  // all_reduce rounds, and the sum with the residual is rounded again: the bits are those of two steps.
  const auto add_to = [&](const Half<T>& before, const Half<T>& reduced) {
    Half<T> sum;
#pragma unroll
    for (uint32_t k = 0; k < Half<T>::kItems; ++k) {
      sum.items[k] = E::store(E::load(before.items[k]) + E::load(reduced.items[k]));
      squares += E::load(sum.items[k]) * E::load(sum.items[k]);
    }
    return sum;
  };
  // Receives my parcel i of every rank, adds it to the residual and stores that; false: not all here yet
  // after that many polls.
  const auto receive = [&](uint64_t i) {
    const Half<T> own = halves(input)[i];
    const Half<T> before = halves(residual)[i];
    Parcel parcel_of[kRanks != 0 ? kRanks : 1];
    bool here = false;
    for (uint32_t polls = 0; !here && polls < kPollsBetweenChecks; ++polls) {
#pragma unroll
      for (uint32_t r = 0; r != kRanks; ++r) {
        if (r != rank) parcel_of[r] = mail.look_from(r, i);
      }
      here = true;
#pragma unroll
      for (uint32_t r = 0; r != kRanks; ++r) here = here && (r == rank || is_here(parcel_of[r], mail.flags));
    }
    if (!here) return false;
    Reduction<T, Half<T>> sum;
#pragma unroll
    for (uint32_t r = 0; r != kRanks; ++r) {
      const Half<T> data = r == rank ? own : unpack<T>(parcel_of[r]);
      r == 0 ? sum.first(data) : sum.template add<true>(p, data);
    }
    reinterpret_cast<Half<T>*>(output)[i] = total = add_to(before, sum.result(p));
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
        Parcel parcel;
        if (!mail.receive_from(r, i, parcel)) return false;
        data = unpack<T>(parcel);
      }
      r == 0 ? sum.first(data) : sum.template add<true>(p, data);
    }
    total = add_to(load_half(residual, i, p.numel), sum.result(p));
    store_half(output, i, p.numel, total);
    return true;
  };
  const auto missing = [&](uint64_t i) {
    uint64_t mask = 0;
    for (uint32_t r = 0; r < world_size; ++r) {
      if (r != rank && !is_here(mail.look_from(r, i), mail.flags)) mask |= uint64_t{1} << r;
    }
    return mask;
  };

  // The first load is under way while the group's status is.
  const bool ahead = mine.first < whole;
  Half<T> first{};
  if (ahead) first = halves(input)[mine.first];
  const bool posted = DeviceWait(p.wait).ready();
  if (posted) {
    if (ahead) send(mine.first, first);
    post({mine.first + (ahead ? mine.step : 0), mine.step});
  }
  row_sum.meet();
  const auto weight_of = [&](uint64_t i) {
    return aligned ? halves(weight)[i - row] : load_half(weight, i - row, p.row_parcels * Half<T>::kItems);
  };
  // With one parcel for each thread nothing has to be read again. The weight is loaded, from memory maybe,
  // while the peers' data is on its way.
  const bool one = p.row_parcels <= mine.step;
  Half<T> by{};
  if (one && mine.first < end) by = weight_of(mine.first);
  bool complete = posted;
  const auto receive_next = [&](uint64_t i) { complete = complete && receive_odd(i); };
  if constexpr (kRanks != 0) {
    mine.visit<1>(
        whole, end, [&](uint64_t i, AtOnce<1>) { complete = complete && receive(i); }, receive_next);
  } else {
    for (uint64_t i = mine.first; i < end; i += mine.step) receive_next(i);
  }
  if (!complete) [[unlikely]] {
    squares = 0;
    if (!receive_late(mail, posted, mine, end, [&] { post(mine); }, receive_odd, missing)) {
      for (uint64_t i = mine.first; i < end; i += mine.step)
        store_half(output, i, p.numel, poison<Half<T>>(p.dtype));
      squares = NAN;  // the whole row has no norm then
    }
  }

  const auto store_norm = [&](uint64_t i, const Half<T>& by, float scale) {
    Half<T> result;
#pragma unroll
    for (uint32_t k = 0; k < Half<T>::kItems; ++k)
      result.items[k] = E::store(E::load(total.items[k]) * scale * (E::load(by.items[k]) + p.weight_bias));
    if (aligned)
      reinterpret_cast<Half<T>*>(norm)[i] = result;
    else
      store_half(norm, i, p.numel, result);
  };
  const float scale = rsqrtf(row_sum(squares) * p.one_by_columns + p.eps);
  if (one) {
    if (mine.first < end) store_norm(mine.first, by, scale);
  } else {
    for (uint64_t i = mine.first; i < end; i += mine.step) {
      total = load_half(output, i, p.numel);
      store_norm(i, weight_of(i), scale);
    }
  }
  touch(p.token);
  finish_call(p, call);
}

template <class T>
RmsNormKernel for_ranks(uint32_t world_size) {
  switch (world_size) {
    case 2: return push_rms_norm_kernel<T, 2>;
    case 4: return push_rms_norm_kernel<T, 4>;
    case 8: return push_rms_norm_kernel<T, 8>;
    default: return push_rms_norm_kernel<T, 0>;
  }
}

}  // namespace

RmsNormKernel push_rms_norm(DType dtype, uint32_t world_size) {
  switch (dtype) {
    case DType::kFloat32: return for_ranks<float>(world_size);
    case DType::kFloat16: return for_ranks<__half>(world_size);
    case DType::kBFloat16: return for_ranks<__nv_bfloat16>(world_size);
    default: throw std::runtime_error("gpusync: no RMS norm of this dtype");
  }
}

}  // namespace gpusync::cuda
