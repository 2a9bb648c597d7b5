// The stress program's command line; see stress.h.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>

#include "stress.h"

namespace stress {
namespace {

constexpr Workload kWorkloads[] = {
    {"barriers", barriers, {"barriers", nullptr}},
    {"pulls", pulls, {nullptr, nullptr}},
    {"signals", signals, {nullptr, nullptr}},
    {"rings", rings, {"rings", nullptr}},
    {"pushes", pushes, {nullptr, nullptr}},
    {"all_reduces", all_reduces, {nullptr, nullptr}},
    {"exchanges", exchanges, {nullptr, nullptr}},
    {"mixed", mixed, {nullptr, nullptr}},
    {"opening", opening, {nullptr, nullptr}},
    {"closing", closing, {nullptr, nullptr}},
    {"expiring", expiring, {"broken groups", nullptr}},
    {"mismatches", mismatches, {"broken groups", nullptr}},
    {"give_ups", give_ups, {"passed", "given up"}},
    {"kernels", kernels, {"passed", "given up"}},
    {"keeping", keeping, {"freed", nullptr}},
    {"resets", resets, {"broken groups", "resets"}},
};

[[noreturn]] void usage(const std::string& why) {
  std::fprintf(stderr, "stress: %s\nusage: stress WORKLOAD [OPTION=VALUE ...]\nworkloads:", why.c_str());
  for (const Workload& workload : kWorkloads) std::fprintf(stderr, " %s", workload.name);
  std::fprintf(
      stderr,
      "\noptions: ranks processes rounds seconds seed preset delay_us disturb_us cores timeout limit "
      "skip_meeting watchdog (stress.h says what they mean)\n");
  std::exit(2);
}

void set(Options& options, const std::string& argument) {
  const size_t equals = argument.find('=');
  if (equals == std::string::npos) usage("no '=' in " + argument);
  const std::string name = argument.substr(0, equals);
  const char* text = argument.c_str() + equals + 1;
  char* end = nullptr;
  const double value = std::strtod(text, &end);  // takes 0x... too
  if (end == text || *end != 0 || value < 0) usage("not a number: " + argument);
  const auto whole = static_cast<uint64_t>(value);
  if (name == "ranks") {
    options.ranks = static_cast<uint32_t>(whole);
  } else if (name == "processes") {
    options.processes = whole != 0;
  } else if (name == "rounds") {
    options.rounds = whole;
  } else if (name == "seconds") {
    options.seconds = value;
  } else if (name == "seed") {
    options.seed = whole;
  } else if (name == "preset") {
    options.preset = static_cast<uint32_t>(whole);
  } else if (name == "delay_us") {
    options.delay_us = static_cast<uint32_t>(whole);
  } else if (name == "disturb_us") {
    options.disturb_us = static_cast<uint32_t>(whole);
  } else if (name == "cores") {
    options.cores = static_cast<uint32_t>(whole);
  } else if (name == "timeout") {
    options.timeout = value;
  } else if (name == "skip_meeting") {
    options.skip_meeting = static_cast<uint32_t>(whole);
  } else if (name == "limit") {
    options.limit = value;
  } else if (name == "watchdog") {
    options.watchdog = static_cast<unsigned>(whole);
  } else {
    usage("unknown option " + argument);
  }
}

int main(int count, char** arguments) {
  if (count < 2) usage("which workload?");
  Options options;
  options.workload = arguments[1];
  for (int i = 2; i < count; ++i) set(options, arguments[i]);
  if (options.ranks < 1 || options.ranks > gpusync::kMaxRanks) usage("ranks: 1 to 64");
  if (options.disturb_us >= 1'000'000) usage("disturb_us: below a second");
  for (const Workload& workload : kWorkloads) {
    if (options.workload == workload.name) return run(options, workload);
  }
  usage("unknown workload " + options.workload);
}

}  // namespace
}  // namespace stress

int main(int count, char** arguments) { return stress::main(count, arguments); }
