#!/usr/bin/env bash
# Runs the stress program under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer, and makes sure that
# ThreadSanitizer reports the mutants that only it can see. run_sanitizers.sh [SECONDS FOR EACH RUN]
#
# ThreadSanitizer sees ranks as threads of one mapping only: it does not follow memory into other processes, and takes
# one page that is mapped twice for two.
set -euo pipefail
seconds=${1:-2}
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
work=$(mktemp -d "${TMPDIR:-/tmp}/gpusync-sanitizers-XXXXXX")
trap 'rm -rf "$work"' EXIT

# ThreadSanitizer cannot cope with every randomisation of addresses.
fixed=()
if setarch -R true 2>/dev/null; then fixed=(setarch -R); fi
export TSAN_OPTIONS=halt_on_error=1
export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1
export UBSAN_OPTIONS=print_stacktrace=1

build() { # NAME CSRC FLAGS...
  "$here/build.sh" "$2" "$work/$1" "${@:3}" -fno-omit-frame-pointer -fno-sanitize-recover=all
}

mutants=(relaxed_publish relaxed_acquire)
echo '==> building'
{
  for name in thread address undefined; do
    printf '%s\0%s\0%s\0' "$name" "$root/csrc" "-fsanitize=$name"
  done
  for name in "${mutants[@]}"; do
    python3 "$here/../mutants.py" "$name" "$work/csrc-$name"
    printf '%s\0%s\0%s\0' "$name" "$work/csrc-$name" -fsanitize=thread
  done
} >"$work/builds"
export -f build
export here work
xargs -0 -n 3 -P 2 bash -c 'set -euo pipefail; build "$@"' _ <"$work/builds"

delays="delay_us=200 disturb_us=500 seconds=$seconds rounds=1000000 watchdog=100"
failed=0
check() { # SANITIZER ARGUMENTS...
  local output
  printf '%-10s %s\n' "$1" "${*:2}"
  # shellcheck disable=SC2086
  if ! output=$("${fixed[@]}" "$work/$1" "${@:2}" $delays 2>&1); then
    printf '%s\n' "$output"
    failed=1
  fi
}

echo "==> running, at most $seconds s each"
for workload in barriers pulls signals pushes all_reduces exchanges mixed opening closing expiring mismatches give_ups kernels keeping resets; do
  check thread "$workload" ranks=3
  check address "$workload" ranks=3
  check undefined "$workload" ranks=4 processes=1
done
for sanitizer in thread address undefined; do
  check "$sanitizer" mixed ranks=3 cores=64 preset=0xFFFFFFF0
  check "$sanitizer" mixed ranks=40
done
check address mixed ranks=3 processes=1
check address expiring ranks=3 processes=1

echo '==> what has to be reported'
for name in "${mutants[@]}"; do
  # shellcheck disable=SC2086
  if "${fixed[@]}" "$work/$name" barriers ranks=3 $delays >"$work/output" 2>&1 ||
    ! grep -q 'WARNING: ThreadSanitizer: data race' "$work/output"; then
    echo "ThreadSanitizer did not report the mutant $name:"
    cat "$work/output"
    failed=1
  else
    echo "$name: data race reported"
  fi
done
if ((failed)); then
  echo 'sanitizers: FAILED'
  exit 1
fi
echo 'sanitizers: no report but of the mutants'
