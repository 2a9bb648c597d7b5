// One group's life: collectives one after the other on all ranks, each rank at its own pace, and maybe its
// end.
#pragma once

#include <cstdint>
#include <string>

#include "call.h"

namespace collectives {

struct Options {
  uint32_t ranks = 3;
  Limits limits;
  uint32_t calls = 12;      // of one group, at most
  uint32_t pause_us = 300;  // the longest random pause of a thread, in some calls of some ranks
  uint32_t breaks = 2;      // of four groups so many break
  double timeout = 60;      // of the groups that do not, seconds
  double seconds = 2;
  uint64_t groups = ~uint64_t{0};  // whichever ends first
  uint64_t seed = 1;
  uint32_t watchdog = 100;  // seconds
};

struct Counts {
  uint64_t groups = 0;
  uint64_t calls = 0;
  uint64_t launches = 0;
  uint64_t broken = 0;
};

/// Runs it; returns what is wrong, or nothing.
std::string run_scene(const Options& options, Random& random, Counts& counts);

/// Prints where every thread of the scene under way is.
void print_scene();

}  // namespace collectives
