// CUDA calls that fail throw. (torch's own macro would need libtorch_cuda, which a CPU-only torch has not.)
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace gpusync::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // not left behind for somebody else's check
  throw std::runtime_error(std::string("gpusync: ") + what + " failed: " + cudaGetErrorString(status));
}

/// Makes `device` current for as long as it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&m_before), "cudaGetDevice");
    m_changed = m_before != device;
    if (m_changed) check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (m_changed) (void)cudaSetDevice(m_before);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int m_before = 0;
  bool m_changed = false;
};

/// Waits for all that the current device has to do. cudaDeviceSynchronize() would end what another thread is
/// capturing; freeing memory waits as well, and does not, given OutsideCaptures.
inline void wait_for_device() {
  void* nothing = nullptr;
  if (cudaMalloc(&nothing, 1) == cudaSuccess) {
    (void)cudaFree(nothing);
  } else {
    (void)cudaGetLastError();  // else the next launch of this thread would be blamed
  }
}

/// The graph that `stream`, which is being captured, adds to.
inline cudaGraph_t captured_graph(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph);
#else
  const cudaError_t error = cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, &graph);
#endif
  check(error, "cudaStreamGetCaptureInfo");
  return graph;
}

/// For as long as it lives, calls of this thread that allocate, free or wait are none of a capture's
/// business: otherwise one of them ends whatever another thread is capturing just then.
class OutsideCaptures {
 public:
  OutsideCaptures() { (void)cudaThreadExchangeStreamCaptureMode(&m_mode); }
  ~OutsideCaptures() { (void)cudaThreadExchangeStreamCaptureMode(&m_mode); }
  OutsideCaptures(const OutsideCaptures&) = delete;
  OutsideCaptures& operator=(const OutsideCaptures&) = delete;

 private:
  cudaStreamCaptureMode m_mode = cudaStreamCaptureModeRelaxed;
};

}  // namespace gpusync::cuda
