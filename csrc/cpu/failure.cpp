// How a group breaks: one decision for all ranks, and the words for it.
//
// A rank whose wait expires may not simply leave: a late peer could then find all arrivals in place and pass
// a barrier that others have given up. So the first to expire moves the group's state to kDeciding and looks
// at its slots once more. A rank whose wait is complete looks at the state after its own arrival; stores,
// scan and state are sequentially consistent, hence either the scan sees the late arrival (the group lives on
// and everybody passes) or the late rank sees the decision. test/model/ explores it.
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "futex.h"
#include "group.h"

namespace gpusync::cpu {
namespace {

// Seconds. A decision takes microseconds; a rank that is stopped or dies in the middle must not hold the
// others for ever.
constexpr double kDecisionLimit = 1.0;

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", value);
  return text;
}

/// The kernel's one-letter state of a process ('R', 'S', 'T', 'Z', ...), 0 when there is none.
char process_state(int32_t pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(stat, line)) return 0;
  const size_t name_end = line.rfind(')');
  return name_end != std::string::npos && name_end + 2 < line.size() ? line[name_end + 2] : 0;
}

/// What a slot's word says of a call.
CallRecord from_slot(uint64_t slot) {
  const auto fingerprint = static_cast<uint32_t>(slot >> 32);
  CallRecord call;
  call.number = static_cast<uint32_t>(slot);
  call.op = op_of(fingerprint);
  call.fence = fence_of(fingerprint);
  if (call.op == Op::kUser) {
    call.sizes[0] = key_of(fingerprint);
    call.sizes[1] = blocks_of(fingerprint);
    return call;
  }
  call.dtype = dtype_of(fingerprint);
  call.reduce_op = reduce_op_of(fingerprint);
  call.algo = algo_of(fingerprint);
  return call;
}

std::string list_ranks(uint64_t ranks) {
  std::string text = (ranks & (ranks - 1)) == 0 ? "rank " : "ranks ";
  const char* separator = "";
  for (uint32_t r = 0; ranks >> r != 0; ++r) {
    if ((ranks >> r & 1) == 0) continue;
    text += separator + std::to_string(r);
    separator = ", ";
  }
  return text;
}

bool is_dead(int32_t pid) {
  if (kill(pid, 0) != 0 && errno == ESRCH) return true;
  const char state = process_state(pid);
  return state == 'Z' || state == 'X';
}

}  // namespace

bool Group::is_gone(uint32_t rank) const {
  const int32_t pid = std::atomic_ref<int32_t>(page(rank).pid).load(std::memory_order_acquire);
  return pid == -1 || (pid > 0 && m_config.pids_visible && is_dead(pid));
}

uint64_t Group::gone_among(uint64_t ranks) const {
  for (uint32_t r = 0; r < m_config.world_size; ++r) {
    if ((ranks >> r & 1) != 0 && !is_gone(r)) ranks &= ~(uint64_t{1} << r);
  }
  return ranks;
}

std::string Group::describe_rank(uint32_t rank) const {
  const RankPage& peer = page(rank);
  const int32_t pid =
      std::atomic_ref<int32_t>(const_cast<int32_t&>(peer.pid)).load(std::memory_order_acquire);
  std::string text = std::to_string(rank) + " (";
  if (pid == 0) return text + "has not opened the group)";
  text += "global " + std::to_string(peer.global_rank) + ", host " + peer.host + ", ";
  if (pid == -1) {
    text += "has closed the group";
  } else {
    text += "pid " + std::to_string(pid);
    if (m_config.pids_visible) {
      text += is_dead(pid) ? ", dead" : process_state(pid) == 'T' ? ", stopped" : ", alive";
    }
  }
  const uint32_t calls =
      std::atomic_ref<uint32_t>(const_cast<uint32_t&>(peer.calls)).load(std::memory_order_relaxed);
  if (calls == 0) return text + "; no call yet)";
  return text + "; last call " + std::to_string(calls) + " " + describe(peer.ring.read(calls)) + ")";
}

bool Group::move_state(State from, State to) {
  return std::atomic_ref<uint32_t>(group_page().state)
      .compare_exchange_strong(from.word, to.word, std::memory_order_seq_cst);
}

void Group::tell_awaiting(const Semaphore* mine, uint64_t expected, uint64_t ranks) {
  Awaiting& told = page(m_config.rank).awaiting;
  store(told.semaphore, 0);
  if (mine == nullptr) return;
  store(told.expected, expected);
  store(told.ranks, ranks);
  store(told.semaphore, reinterpret_cast<const char*>(mine) - static_cast<const char*>(m_memory));
}

/// From the slots themselves: a rank that has been woken and has not run yet waits for nobody.
uint64_t Group::awaited_by(uint32_t rank) const {
  const Awaiting& told = page(rank).awaiting;
  const uint64_t offset = load(told.semaphore);
  if (offset == 0 || is_gone(rank)) return 0;
  const auto& row = *at<Semaphore>(offset);
  uint64_t ranks = load(told.ranks) & all_ranks() & ~(uint64_t{1} << rank);
  for (uint32_t r = 0; r < m_config.world_size; ++r) {
    if (compare(row.acquire_from(r), load(told.expected)) != Seen::kNotYet) ranks &= ~(uint64_t{1} << r);
  }
  return ranks;
}

/// I wait for the ranks in `absent`: is there a circle of ranks, here or where that leads to, of whom each
/// waits for the next? Then nobody is late; they call different things. (Unless they all wait for signals,
/// which everybody sends as it likes.)
bool Group::is_crossed(uint64_t absent) const {
  uint64_t edges[kMaxRanks];
  uint64_t meets = 0;
  uint64_t left = 0;
  for (uint32_t r = 0; r < m_config.world_size; ++r) {
    edges[r] = r == m_config.rank ? absent & ~(uint64_t{1} << r) : awaited_by(r);
    if (edges[r] != 0) left |= uint64_t{1} << r;
    if (edges[r] != 0 && load(page(r).awaiting.ranks) == all_ranks()) meets |= uint64_t{1} << r;
  }
  // Who waits only for ranks that wait for nobody is not in a circle, nor does it lead to one.
  for (uint64_t before = 0; before != left;) {
    before = left;
    for (uint32_t r = 0; r < m_config.world_size; ++r) {
      if ((edges[r] & left) == 0) left &= ~(uint64_t{1} << r);
    }
  }
  return (left >> m_config.rank & 1) != 0 && (left & meets) != 0;
}

Group::Verdict Group::give_up(Reason reason, const CallRecord& call, double waited, bool expired,
                              const std::function<uint64_t()>& missing) {
  const State before = state();
  const State deciding = before.with(m_config.rank, Phase::kDeciding);
  if (before.phase() != Phase::kOk || !move_state(before, deciding)) {
    return settle(call) ? Verdict::kRetry : Verdict::kBroken;
  }
  const uint64_t absent = missing();
  const bool complete = reason == Reason::kTimeout && absent == 0;
  // Before its time a wait ends for a rank that is gone, and that one is missing, not those who are on their
  // way. It may also have come before it went: then those who are on their way are still to be waited for.
  const uint64_t blamed = reason == Reason::kTimeout && !expired ? gone_among(absent) : absent;
  const bool goes_on = complete || (absent != 0 && blamed == 0);
  const bool crossed = reason == Reason::kTimeout && expired && !goes_on && is_crossed(absent);
  if (goes_on ? move_state(deciding, before)
              : break_group(deciding, crossed ? Reason::kCrossed : reason, call, waited, blamed)) {
    return complete ? Verdict::kComplete : goes_on ? Verdict::kRetry : Verdict::kBroken;
  }
  return settle(call) ? Verdict::kRetry : Verdict::kBroken;  // I was so slow that a peer has taken over
}

bool Group::break_group(State deciding, Reason reason, const CallRecord& call, double waited,
                        uint64_t missing) {
  write_failure(reason, call, waited, missing, m_config.rank);
  if (!move_state(deciding, deciding.with(m_config.rank, Phase::kBroken))) return false;
  for (uint32_t r = 0; r < m_config.world_size; ++r) ring_doorbell(r);
  return true;
}

bool Group::settle(const CallRecord& call) {
  auto start = std::chrono::steady_clock::now();
  State seen = state();
  for (;;) {
    const State now = state();
    if (now.phase() != Phase::kDeciding) return now.phase() == Phase::kOk;
    if (now.word != seen.word) {  // a peer has taken over before me: it has its own time
      seen = now;
      start = std::chrono::steady_clock::now();
    }
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    const State mine = now.with(m_config.rank, Phase::kDeciding);
    if (waited.count() > kDecisionLimit && now.rank() != m_config.rank && move_state(now, mine)) {
      // The deciding rank is gone or stopped. Should it come back, its own move fails, for the state is no
      // longer its.
      break_group(mine, Reason::kTimeout, call, waited.count(), uint64_t{1} << now.rank());
    }
    const timespec pause{0, 100'000};
    nanosleep(&pause, nullptr);
  }
}

/// What each rank called. Of one that has not come it is an earlier call.
std::string Group::list_calls(const FailureRecord& record) const {
  std::string text;
  for (uint32_t r = 0; r < m_config.world_size; ++r) {
    const CallRecord& call = record.calls[r];
    text += (r == 0 ? " rank " : "; rank ") + std::to_string(r);
    const bool late = (record.missing >> r & 1) != 0 && awaited_by(r) == 0;
    if (late) text += " has not come yet: its last was";
    text += call.number == 0 ? " no call" : " call " + std::to_string(call.number) + " " + describe(call);
  }
  return text;
}

/// A hint for ranks that make the same calls, and one of them one more or less: some of them then repeat
/// what they called before, and the others do not.
std::string Group::compare_histories(const FailureRecord& record) const {
  uint64_t repeating = 0;
  uint64_t others = 0;
  for (uint32_t r = 0; r < m_config.world_size; ++r) {
    const CallRecord& last = record.calls[r];
    if ((record.missing >> r & 1) != 0 && awaited_by(r) == 0) continue;
    CallRecord before;
    for (uint32_t back = 1; back < CallRing::kRecords && back < last.number && !is_meeting(before.op);
         ++back) {
      before = page(r).ring.read(last.number - back);
    }
    (is_alike(before, last) ? repeating : others) |= uint64_t{1} << r;
  }
  if (repeating == 0 || others == 0) return "";
  return ". If they make the same calls otherwise, they are out of step, by a call too many or too few: " +
         list_ranks(repeating) + " called again what came before, " + list_ranks(others) + " something new";
}

void Group::write_failure(Reason reason, const CallRecord& call, double waited, uint64_t missing,
                          uint32_t rank, const uint64_t* seen) {
  FailureRecord& record = page(m_config.rank).failure;
  record.reason = reason;
  record.rank = rank;
  record.missing = missing;
  record.waited_us = static_cast<uint64_t>(waited * 1e6);
  record.call = call;
  for (uint32_t r = 0; r < m_config.world_size; ++r) {
    const uint32_t calls = std::atomic_ref<uint32_t>(page(r).calls).load(std::memory_order_relaxed);
    record.calls[r] = calls == 0 ? CallRecord{} : page(r).ring.read(calls);
    // A host runs ahead of its device, and a replayed graph does without it: the slot knows better, if it
    // knows.
    const Op announced = seen == nullptr ? Op::kNone : op_of(static_cast<uint32_t>(seen[r] >> 32));
    if (announced != Op::kNone && announced != record.calls[r].op) record.calls[r] = from_slot(seen[r]);
  }
  const RankPage& mine = page(rank);
  std::string text =
      (reason == Reason::kReset ? "reset" : name(call.op)) + ("(group='" + m_config.name + "'");
  if (call.channel >= 0) text += ", channel=" + std::to_string(call.channel);
  if (call.number != 0) text += ", call " + std::to_string(call.number);
  if (call.op == Op::kUser) text += ", key=" + std::to_string(call.sizes[0]);
  text += ") on rank " + std::to_string(rank) + " (global " + std::to_string(mine.global_rank) + ", host " +
          mine.host + ", pid " + std::to_string(mine.pid) + ") ";
  switch (reason) {
    case Reason::kTimeout: {
      text += "waited " + seconds(waited) + " for rank ";
      const char* separator = "";
      for (uint32_t r = 0; r < m_config.world_size; ++r) {
        if ((missing >> r & 1) == 0) continue;
        text += separator + describe_rank(r);
        separator = ", rank ";
      }
      break;
    }
    case Reason::kMismatch: text += "does not match what other ranks called:" + list_calls(record); break;
    case Reason::kCrossed:
      text += "waited " + seconds(waited) +
              " and does not match what other ranks called, which wait for one another:" + list_calls(record);
      break;
    case Reason::kBadOffset: text += "got an offset, in a device tensor, that lies outside the buffer"; break;
    case Reason::kBadGrid:
      text += "was launched with more than max_blocks blocks, or in more than one dimension";
      break;
    case Reason::kReset: text += "was begun, and not all ranks have ended it"; break;
    case Reason::kInterrupted:
    case Reason::kNone: text += "was interrupted by SIGINT after " + seconds(waited); break;
  }
  const bool differ = reason == Reason::kMismatch || reason == Reason::kCrossed;
  if (differ && seen == nullptr) text += compare_histories(record);
  std::snprintf(record.text, sizeof record.text, "%s", text.c_str());
}

/// Kernels cannot put a failure into words: what they left in the shared page becomes the group's failure
/// record here, by whichever rank's host looks first.
void Group::take_over_device_failure() {
  DeviceFailure& device = group_page().device_failure;
  const auto reason =
      static_cast<DeviceReason>(std::atomic_ref<uint32_t>(device.reason).load(std::memory_order_acquire));
  if (reason == DeviceReason::kNone) return;
  const State before = state();
  const State deciding = before.with(m_config.rank, Phase::kDeciding);
  if (before.phase() != Phase::kOk || !move_state(before, deciding)) {
    settle(CallRecord{});
    return;
  }
  CallRecord call = from_slot(Arrival{device.epoch, device.fingerprint}.pack());
  if (call.op == Op::kSignal)
    call.op = Op::kWaitSignal;  // they share a fingerprint, and a signal cannot fail
  if (call.op == Op::kNone) {   // it failed before it came to its slots
    const uint32_t calls = std::atomic_ref<uint32_t>(page(device.rank).calls).load(std::memory_order_relaxed);
    if (calls != 0) call = page(device.rank).ring.read(calls);
  }
  if (device.channel < m_config.channels) call.channel = static_cast<int16_t>(device.channel);
  const auto translate = [](DeviceReason why) {
    switch (why) {
      case DeviceReason::kTimeout: return Reason::kTimeout;
      case DeviceReason::kMismatch: return Reason::kMismatch;
      case DeviceReason::kBadOffset: return Reason::kBadOffset;
      case DeviceReason::kBadGrid: return Reason::kBadGrid;
      case DeviceReason::kNone: break;
    }
    return Reason::kNone;
  };
  write_failure(translate(reason), call, static_cast<double>(device.waited_ns) * 1e-9, device.missing,
                device.rank, reason == DeviceReason::kMismatch ? device.seen : nullptr);
  move_state(deciding, deciding.with(m_config.rank, Phase::kBroken));
}

const FailureRecord* Group::failure() {
  if (m_device_part != nullptr) take_over_device_failure();
  const State now = state();
  return now.phase() == Phase::kBroken ? &page(now.rank()).failure : nullptr;
}

void Group::throw_broken(const CallRecord& call) {
  const FailureRecord& record = page(state().rank()).failure;
  std::string text = record.text;
  const bool mine = record.rank == m_config.rank && record.call.number == call.number;
  if (!mine) {
    text = describe(call) + " on rank " + std::to_string(m_config.rank) + " stopped because group '" +
           m_config.name + "' is broken: " + text;
  }
  throw std::runtime_error(
      "gpusync: " + text +
      ". The group stays broken until all ranks call reset(), or close it and make it again");
}

std::string Group::dump() const {
  std::string text;
  for (uint32_t r = 0; r < m_config.world_size; ++r) {
    text += "rank " + describe_rank(r) + "\n";
    const uint32_t calls = std::atomic_ref<uint32_t>(page(r).calls).load(std::memory_order_relaxed);
    const uint32_t kept = std::min(calls, CallRing::kRecords);
    for (uint32_t number = calls - kept + 1; number != calls + 1; ++number) {
      text += "  call " + std::to_string(number) + " " + describe(page(r).ring.read(number)) + "\n";
    }
  }
  return text;
}

}  // namespace gpusync::cpu
