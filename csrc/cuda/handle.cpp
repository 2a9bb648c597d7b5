// What kernels of the user's own are given of a group: gpusync/device_handle.h.
#include "group.h"

namespace gpusync::cuda {

DeviceHandle Group::handle(int64_t channel) const {
  const uint32_t c = m_host.checked_channel(channel);
  return {DeviceHandle::kVersion,
          sizeof(DeviceHandle),
          m_host.rank(),
          m_host.world_size(),
          m_config.max_blocks,
          0,
          context(c),
          m_pull[c],
          m_signal[c],
          PushController(in_pad<uint32_t>(m_host.rank(), m_layout.push_calls(c)))};
}

}  // namespace gpusync::cuda
