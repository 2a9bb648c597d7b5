// Runs the kernels of the collectives on the CPU, a host thread for each GPU thread, and compares every
// output bit for bit. The kernels, controllers and waits are the library's own sources; sanitizers see their
// accesses.
//
// It ends with 0, or with 1 and a message at the first output that is wrong, or with 3 and a message when the
// watchdog finds it still running. cuda_on_host.h is what CUDA has built in, gpu.cpp runs a rank's stream,
// group.h has the ranks' memory, call.cpp makes and checks one collective, scene.cpp a whole group's life.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "scene.h"

namespace collectives {
namespace {

[[noreturn]] void usage(const std::string& why) {
  std::fprintf(stderr, "collectives: %s\nusage: collectives KIND [OPTION=VALUE ...]\nkinds: mixed",
               why.c_str());
  for (const char* kind : kKinds) std::fprintf(stderr, " %s", kind);
  std::fprintf(
      stderr,
      "\noptions: ranks blocks threads dtypes calls pause_us breaks timeout seconds groups seed watchdog "
      "(scene.h and call.h say what they mean)\n");
  std::exit(2);
}

void set(Options& options, const std::string& argument) {
  const size_t equals = argument.find('=');
  if (equals == std::string::npos) usage("no '=' in " + argument);
  const std::string name = argument.substr(0, equals);
  const double value = std::strtod(argument.c_str() + equals + 1, nullptr);
  const auto whole = static_cast<uint64_t>(value);
  const auto word = static_cast<uint32_t>(whole);
  if (name == "ranks" && word >= 1 && word <= gpusync::kMaxRanks) {
    options.ranks = word;
  } else if (name == "blocks" && word >= 1 && word <= cuda::kMaxBlocks) {
    options.limits.blocks = word;
  } else if (name == "threads" && word >= 1) {
    options.limits.threads = word;
  } else if (name == "dtypes" && word >= 1 && word <= 6) {
    options.limits.dtypes = word;
  } else if (name == "calls" && word >= 1) {
    options.calls = word;
  } else if (name == "pause_us") {
    options.pause_us = word;
  } else if (name == "breaks") {
    options.breaks = word;
  } else if (name == "timeout") {
    options.timeout = value;
  } else if (name == "seconds") {
    options.seconds = value;
  } else if (name == "groups") {
    options.groups = whole;
  } else if (name == "seed") {
    options.seed = whole;
  } else if (name == "watchdog") {
    options.watchdog = word;
  } else {
    usage("unknown option or value: " + argument);
  }
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int main(int count, char** arguments) {
  if (count < 2) usage("which kind?");
  Options options;
  const std::string kind = arguments[1];
  const auto* found = std::find(std::begin(kKinds), std::end(kKinds), kind);
  if (found == std::end(kKinds) && kind != "mixed") usage("unknown kind " + kind);
  options.limits.kind = static_cast<uint32_t>(found - std::begin(kKinds));
  for (int i = 2; i < count; ++i) set(options, arguments[i]);

  std::thread([seconds = options.watchdog] {
    sleep(seconds);
    std::fprintf(stderr, "collectives: the watchdog ends it after %u s\n", seconds);
    print_scene();
    _exit(3);
  }).detach();

  Random random(options.seed);
  Counts counts;
  const double start = now();
  while (counts.groups < options.groups && now() - start < options.seconds) {
    if (const std::string wrong = run_scene(options, random, counts); !wrong.empty()) {
      std::fprintf(stderr, "collectives: group %lu of seed %lu: %s\n",
                   static_cast<unsigned long>(counts.groups), static_cast<unsigned long>(options.seed),
                   wrong.c_str());
      return 1;
    }
  }
  std::printf(
      "collectives: %s: %u ranks, %.2f s, %lu groups (%lu broken), %lu calls, %lu launches, no mismatch\n",
      kind.c_str(), options.ranks, now() - start, static_cast<unsigned long>(counts.groups),
      static_cast<unsigned long>(counts.broken), static_cast<unsigned long>(counts.calls),
      static_cast<unsigned long>(counts.launches));
  std::fflush(stdout);
  return 0;
}

}  // namespace
}  // namespace collectives

int main(int count, char** arguments) { return collectives::main(count, arguments); }
