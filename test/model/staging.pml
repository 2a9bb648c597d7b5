/* All-reduce by pull, one-shot (csrc/cuda/pull_one_shot.cu; gpusync::cpu::Group::pull_one_shot): peers read
   my input out of my staging memory; two halves in turn, and no barrier at the end.

   Call k: copy the input to my half k % 2, one fenced start stage (PullController::sync<true, true>), read
   that half of every rank. Checked: what is read in call k is what its owner staged for call k; nobody
   waits forever.

   HALVES       2; with 1 (mutant) a fast rank stages its next input while a slow one still reads
   HOST         one lane deals with all peers in turn, as on the CPU
   END          an end stage behind the reading: with it one half is enough
   Mutants: RELAXED (the copy may land after the arrival) */

#include "common.inc"

#ifndef CALLS
#define CALLS 4
#endif
#ifndef HALVES
#define HALVES 2
#endif
#define SLOT(owner, source) ((owner) * N + (source))
#define STAGED(owner, half) ((owner) * HALVES + (half))

byte staged[N * HALVES];                /* the call whose input lies there */
byte slot[N * N];
byte end_slot[N * N];

/* A copy to the staging half that has not landed yet. */
bit copying[N * HALVES];
byte copying_call[N * HALVES];
proctype wire(byte i) {
end:
  do
  :: atomic { copying[i] -> staged[i] = copying_call[i]; copying[i] = 0; copying_call[i] = 0 }
  od
}

/* A release store of the arrival is not performed before the copy. */
#ifdef RELAXED
#define MAY_ARRIVE 1
#else
#define MAY_ARRIVE !copying[STAGED(me, k % HALVES)]
#endif
#ifdef HOST
#define IN_TURN(set, p) TURN(set, p)
#else
#define IN_TURN(set, p) 1
#endif
#define ARRIVE(p) :: atomic { MAY_ARRIVE && !HAS(sent, p) && IN_TURN(sent, p) -> \
  slot[SLOT(p, me)] = EPOCH(START + k); sent = sent | BIT(p) }
#define WAIT(p) :: atomic { HAS(sent, p) && !HAS(come, p) && IN_TURN(come, p) && \
                            REACHED(slot[SLOT(me, p)], EPOCH(START + k)) -> \
  come = come | BIT(p) }
/* Trailing block barrier behind the waits; then rank p's half is read. */
#define READ(p) :: atomic { come == ALL && sent == ALL && !HAS(read, p) && IN_TURN(read, p) -> \
  assert(staged[STAGED(p, k % HALVES)] == k); read = read | BIT(p) }
#define END_ARRIVE(p) :: atomic { read == ALL && !HAS(sent_end, p) -> \
  end_slot[SLOT(p, me)] = EPOCH(START + k); sent_end = sent_end | BIT(p) }
#define END_WAIT(p) :: atomic { HAS(sent_end, p) && !HAS(come_end, p) && \
                                REACHED(end_slot[SLOT(me, p)], EPOCH(START + k)) -> \
  come_end = come_end | BIT(p) }

proctype rank(byte me) {
  byte k = 1, sent, come, read, sent_end, come_end;
  do
  :: k <= CALLS ->
     atomic {
       copying[STAGED(me, k % HALVES)] = 1; copying_call[STAGED(me, k % HALVES)] = k;
       sent = BIT(me); come = BIT(me); read = BIT(me); sent_end = BIT(me); come_end = BIT(me)
     }
     do
     EACH(ARRIVE)
     EACH(WAIT)
     EACH(READ)
#ifdef END
     EACH(END_ARRIVE)
     EACH(END_WAIT)
     :: atomic { come_end == ALL -> k++; break }
#else
     :: atomic { read == ALL -> k++; break }
#endif
     od
  :: else -> break
  od
}

init {
  byte i;
  atomic {
    for (i : 0 .. N * N - 1) { slot[i] = START; end_slot[i] = START }
    for (i : 0 .. N * HALVES - 1) { run wire(i) }
    for (i : 0 .. N - 1) { run rank(i) }
  }
}
