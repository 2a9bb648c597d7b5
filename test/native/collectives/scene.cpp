#include "scene.h"

#include <unistd.h>

#include <deque>
#include <mutex>

#include "gpu.h"

namespace collectives {
namespace {

enum class End { kWhole, kMismatch, kLate, kInTime };

/// What happens at call `call`: one rank calls something else, or does not come before its peers give up, or
/// only while they decide whether to. A slow one takes its time in the call before, which all have come to.
struct Plan {
  End end = End::kWhole;
  uint32_t call = ~0u;
  uint32_t odd = ~0u;
  uint32_t slow = ~0u;

  Outcome outcome(uint32_t c) const {
    // A rank that was still waiting in the call before may hear of the end first.
    return c + 1 < call || call == ~0u ? Outcome::kRight
           : c + 1 == call             ? Outcome::kRightOrPoison
           : end == End::kInTime       ? Outcome::kRightOrPoison
                                       : Outcome::kPoison;
  }
};

Plan draw_plan(const Options& options, Random& random, uint32_t calls) {
  if (options.ranks == 1 || random.below(4) >= options.breaks) return {};
  Plan plan;
  // A timeout takes a tenth of a second, a mismatch no time.
  plan.end = random.one_in(10) ? End::kLate : random.one_in(10) ? End::kInTime : End::kMismatch;
  plan.call = static_cast<uint32_t>(random.below(calls));
  plan.odd = static_cast<uint32_t>(random.below(options.ranks));
  plan.slow = static_cast<uint32_t>(random.below(options.ranks));
  return plan;
}

std::mutex g_mutex;
std::deque<Gpu>* g_gpus = nullptr;

void watch(std::deque<Gpu>* gpus) {
  const std::lock_guard lock(g_mutex);
  g_gpus = gpus;
}

std::string check_failure(const Group& group, const Plan& plan) {
  const auto reason = static_cast<DeviceReason>(escape::load(&group.failure().reason));
  const DeviceReason wanted = plan.end == End::kWhole      ? DeviceReason::kNone
                              : plan.end == End::kMismatch ? DeviceReason::kMismatch
                                                           : DeviceReason::kTimeout;
  if (reason == wanted || (plan.end == End::kInTime && reason == DeviceReason::kNone)) return "";
  return "the group's failure has the reason " + std::to_string(static_cast<uint32_t>(reason)) +
         " instead of " + std::to_string(static_cast<uint32_t>(wanted));
}

}  // namespace

void print_scene() {
  const std::lock_guard lock(g_mutex);
  if (g_gpus == nullptr) return;
  for (const Gpu& gpu : *g_gpus) gpu.print();
}

std::string run_scene(const Options& options, Random& random, Counts& counts) {
  const uint32_t ranks = options.ranks;
  std::vector<Call> calls;
  const auto n = static_cast<uint32_t>(1 + random.below(options.calls));
  for (uint32_t c = 0; c < n; ++c) {
    if (c != 0 && random.one_in(2)) {
      calls.push_back(Call(random, options.limits, calls[c - 1 - random.below(std::min(c, 2u))]));
    } else {
      calls.push_back(Call(random, options.limits, ranks));
    }
  }
  const Plan plan = draw_plan(options, random, n);
  constexpr uint32_t kFinished[] = {0, 1, 0x7ffffffd, 0xfffffffd};
  Group group(ranks, random.one_in(2) ? 0 : 2048 + random.below(6000), kFinished[random.below(4)]);
  const auto timeout = static_cast<uint64_t>(options.timeout * 1e9);
  group.set_timeout(timeout);

  struct Launched {
    uint32_t call;
    Call::Launch launch;
  };
  std::vector<std::vector<Launched>> launched(ranks);
  std::vector<std::vector<Kernel>> streams(ranks);
  for (uint32_t r = 0; r < ranks; ++r) {
    for (uint32_t c = 0; c < n; ++c) {
      const bool odd = c == plan.call && r == plan.odd;
      const uint32_t pause = r == plan.slow && c + 1 == plan.call ? 50 * options.pause_us
                             : random.one_in(3)                   ? options.pause_us
                                                                  : 0;
      for (auto& launch : calls[c].launches(group.seat(r), odd && plan.end == End::kMismatch)) {
        Kernel kernel{launch.kernel, c, launch.blocks, calls[c].width().threads, pause, launch.row_blocks};
        const bool first = launched[r].empty() || launched[r].back().call != c;
        if (odd && first && plan.end != End::kMismatch) {
          kernel.before = [&group, r, end = plan.end, timeout] {
            group.set_timeout(5'000'000);
            while (group.status(r) == DeviceStatus::kWhole) usleep(200);
            if (end == End::kInTime) group.set_timeout(timeout);
            while (end == End::kLate && group.status(r) != DeviceStatus::kBroken) usleep(200);
          };
        }
        streams[r].push_back(std::move(kernel));
        launched[r].push_back({c, std::move(launch)});
      }
    }
  }
  {
    std::deque<Gpu> gpus;
    for (uint32_t r = 0; r < ranks; ++r)
      gpus.emplace_back(r, std::move(streams[r]), options.limits.blocks, options.limits.threads,
                        random.next() % 1'000'000);
    watch(&gpus);
    for (Gpu& gpu : gpus) gpu.join();
    watch(nullptr);
  }

  // A mutant may make what comes after wrong data poison: the data is the better message.
  std::string wrong = check_failure(group, plan);
  bool told = false;
  for (uint32_t r = 0; r < ranks; ++r) {
    for (const auto& [c, launch] : launched[r]) {
      const std::string found = calls[c].check(r, launch, plan.outcome(c));
      if (found.empty() || told) continue;
      told = found.find("is wrong") != std::string::npos;
      wrong = "call " + std::to_string(c) + " of " + std::to_string(n) + ", " + found;
    }
    if (group.token(r) != static_cast<int32_t>(launched[r].size())) wrong = "the token was not counted up";
  }
  ++counts.groups;
  counts.calls += n;
  counts.launches += launched[0].size();
  counts.broken += group.failure().reason != 0 ? 1 : 0;
  return wrong;
}

}  // namespace collectives
