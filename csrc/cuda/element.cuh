// Elements of the collectives' dtypes in kernels: what they are reduced in, fp32 for the 16-bit types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace gpusync::cuda {

template <class T>
struct Element {
  using Accumulator = T;
  __device__ static T load(T x) { return x; }
  __device__ static T store(T x) { return x; }
};

template <>
struct Element<__half> {
  using Accumulator = float;
  __device__ static float load(__half x) { return __half2float(x); }
  __device__ static __half store(float x) { return __float2half_rn(x); }
};

template <>
struct Element<__nv_bfloat16> {
  using Accumulator = float;
  __device__ static float load(__nv_bfloat16 x) { return __bfloat162float(x); }
  __device__ static __nv_bfloat16 store(float x) { return __float2bfloat16_rn(x); }
};

}  // namespace gpusync::cuda
