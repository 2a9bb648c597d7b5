#!/usr/bin/env bash
# Runs the stress program for MINUTES and says how many barriers it has counted: soak.sh MINUTES
#
# A quarter of the time each: barriers as fast as they go, of 2 ranks as threads and of 3 as processes; barriers of 3 ranks as
# threads with delays and disturbances, from shortly before the counters wrap around; a mixture of everything, as processes.
set -euo pipefail
minutes=${1:?minutes}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/gpusync-soak-XXXXXX")
trap 'rm -rf "$work"' EXIT
seconds=$(awk "BEGIN { print $minutes * 60 / 4 }")
watchdog=$(awk "BEGIN { print int($seconds * 2 + 60) }")
"$here/build.sh" "$here/../../csrc" "$work/stress" -O2

run() {
  "$work/stress" "$@" rounds=1000000000000 "seconds=$seconds" "watchdog=$watchdog" "seed=$(date +%s)"
}
run barriers ranks=2
run barriers ranks=3 processes=1
run barriers ranks=3 delay_us=500 disturb_us=2000 preset=0xFFFFFFF0
run mixed ranks=3 processes=1 delay_us=200 disturb_us=1000
