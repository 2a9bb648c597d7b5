/* gpusync::compare (semaphore.h): a fingerprint of the call beside the epoch, in one word.

   In every round each rank calls one of two ops, as it likes. A rank that finds a peer's fingerprint
   different from its own at the same epoch raises and calls no more. Checked: a rank passes only if all
   ranks have called the same; it raises only if they have not; nobody waits forever.

   Mutants: TORN (epoch and fingerprint in two stores, the epoch first), TORN_BACK (the fingerprint first),
   COMPARE_AHEAD (compares the fingerprint also of a peer that is one call ahead) */

#include "common.inc"

#ifndef ROUNDS
#define ROUNDS 3
#endif
#define SLOT(owner, source) ((owner) * N + (source))

byte slot_epoch[N * N];                 /* Arrival::epoch and Arrival::fingerprint: one 64-bit word */
bit slot_print[N * N];
bit called[(ROUNDS + 1) * N];           /* GHOST: what the rank has called in that round */

inline check_same() { for (q : 0 .. N - 1) { assert(called[n * N + q] == print) } q = 0 }
inline check_different() {
  different = 0;
  for (q : 0 .. N - 1) { different = different || called[n * N + q] != print }
  q = 0;
  assert(different);
  different = 0
}

proctype rank(byte me) {
  byte n = 1, next = START, p, q;
  bit print, different, mismatch;
  do
  :: n <= ROUNDS && !mismatch ->
     atomic {
       if :: print = 0 :: print = 1 fi;
       called[n * N + me] = print; next = EPOCH(next + 1); p = 0
     }
     /* Semaphore::arrive */
     do
     :: p < N ->
#if defined(TORN)
        slot_epoch[SLOT(p, me)] = next; slot_print[SLOT(p, me)] = print;
#elif defined(TORN_BACK)
        slot_print[SLOT(p, me)] = print; slot_epoch[SLOT(p, me)] = next;
#else
        atomic { slot_epoch[SLOT(p, me)] = next; slot_print[SLOT(p, me)] = print }
#endif
        p++
     :: else -> p = 0; break
     od;
     /* Wait::until and Wait::persist: Semaphore::peek and compare. */
     do
     :: atomic { p < N && REACHED(slot_epoch[SLOT(me, p)], next) ->
          if
#ifdef COMPARE_AHEAD
          :: slot_print[SLOT(me, p)] != print ->
#else
          :: slot_epoch[SLOT(me, p)] == next && slot_print[SLOT(me, p)] != print ->
#endif
             check_different(); mismatch = 1; break
          :: else -> p++
          fi }
     :: atomic { p == N -> check_same(); n++; break }
     od
  :: else -> break
  od
}

init {
  byte i;
  atomic {
    for (i : 0 .. N * N - 1) { slot_epoch[i] = START }
    for (i : 0 .. N - 1) { run rank(i) }
  }
}
