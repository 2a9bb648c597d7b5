/* gpusync::cpu::Group::pull_one_shot, pull_two_shot and push_one_shot (csrc/cpu/collectives.cpp) share one
   staging memory, in call k its half k % 2, and follow one another in any order, with no barrier at the end
   of any.

   A half has N parts. pull_one_shot stages its input in all parts of its own half, meets, reads
   everybody's. pull_two_shot stages likewise, meets, reduces part `me` of everybody's into its own part
   `me`, meets again, and reads part p of rank p. push_one_shot writes its input into part `me` of
   everybody's half, meets, reads its own. The first meeting of a call is in the start stage, whose epoch
   counts the calls; the second in the end stage. Which algorithm a call takes is any; all ranks agree on it
   (fingerprint.pml). Checked: what is read in call k was written in call k, and is what it should be, input
   or result; nobody waits forever.

   HALVES       2; with 1: mutant
   Mutant: ONE_MEETING (two-shot without its second meeting) */

#include "common.inc"

#ifndef CALLS
#define CALLS 3
#endif
#ifndef HALVES
#define HALVES 2
#endif
#define SLOT(owner, source) ((owner) * N + (source))
#define PART(owner, part) (((owner) * HALVES + k % HALVES) * N + (part))
#define INPUT (2 * k)
#define RESULT (2 * k + 1)
#if N == 2
#define ALL_PARTS(owner) (staged[PART(owner, 0)] == INPUT && staged[PART(owner, 1)] == INPUT)
#else
#define ALL_PARTS(owner) \
  (staged[PART(owner, 0)] == INPUT && staged[PART(owner, 1)] == INPUT && staged[PART(owner, 2)] == INPUT)
#endif
#define PULL_ONE_SHOT 0
#define PULL_TWO_SHOT 1
#define PUSH_ONE_SHOT 2

byte staged[N * HALVES * N];    /* INPUT or RESULT of which call lies in this part */
byte start[N * N], end_[N * N]; /* the slots of the two stages */
byte algo[CALLS + 1];

/* What one thread does for every p in turn: one step each. */
#define IN_TURN(action) \
  do \
  :: p < N -> atomic { action; p++ } \
  :: else -> p = 0; break \
  od

/* PullController::sync<true, ...> on the host: arrive at every peer in turn, then wait for each in turn. */
#define SYNC(slots) \
  IN_TURN(slots[SLOT(p, me)] = EPOCH(START + k)); \
  do \
  :: atomic { p < N && REACHED(slots[SLOT(me, p)], EPOCH(START + k)) -> p++ } \
  :: p == N -> p = 0; break \
  od

proctype rank(byte me) {
  byte k = 1, p;
  do
  :: k <= CALLS ->
     if
     :: algo[k] == PUSH_ONE_SHOT ->
        IN_TURN(staged[PART(p, me)] = INPUT);
        SYNC(start);
        IN_TURN(assert(staged[PART(me, p)] == INPUT))
     :: algo[k] != PUSH_ONE_SHOT ->
        IN_TURN(staged[PART(me, p)] = INPUT);
        SYNC(start);
        if
        :: algo[k] == PULL_ONE_SHOT ->
           IN_TURN(assert(ALL_PARTS(p)))
        :: algo[k] == PULL_TWO_SHOT ->
           IN_TURN(assert(staged[PART(p, me)] == INPUT));
           staged[PART(me, me)] = RESULT;
#ifndef ONE_MEETING
           SYNC(end_);
#endif
           IN_TURN(assert(staged[PART(p, p)] == RESULT))
        fi
     fi;
     k++
  :: else -> break
  od
}

init {
  byte i;
  atomic {
    for (i : 0 .. N * N - 1) { start[i] = START; end_[i] = START }
  }
  /* Any sequence of algorithms. */
  for (i : 1 .. CALLS) {
    if :: algo[i] = PULL_ONE_SHOT :: algo[i] = PULL_TWO_SHOT :: algo[i] = PUSH_ONE_SHOT fi
  }
  atomic { for (i : 0 .. N - 1) { run rank(i) } }
}
