/* SignalController::signal and ::wait: point-to-point signals, counted for each pair of source and
   destination.

   Ranks 0 ... N-2 send SIGNALS signals each to rank N-1, which waits for each of them SIGNALS times, in
   every order. A wait may be given up, and is then repeated (in the product after a reset, or by another
   thread). Checked: the n-th wait for a source returns only after that source's n-th signal, and sees what
   the source wrote before it; n signals serve n waits: nobody waits forever, though signals run ahead of
   the waits, and nothing is left over.

   SIGNALS      all of them may pile up before the first wait; with more than M / 2 the signed difference
                overflows (in the product: 2^31 signals that nobody has waited for)
   Mutants: SHARED, COMMIT_EARLY, RELAXED; EQUAL, UNSIGNED (common.inc) */

#include "common.inc"

#ifndef SIGNALS
#define SIGNALS 4
#endif
#ifndef GIVE_UPS
#define GIVE_UPS 1                      /* waits that are given up, at most */
#endif
#define ME (N - 1)                      /* the receiver */

#ifdef SHARED                           /* mutant: one counter for all sources */
#define BOX(source) 0
#else
#define BOX(source) source
#endif
byte inbox[N];                          /* Mailbox::inbox of the receiver: the epochs in its slots */
byte sent[N], seen[N];                  /* Mailbox::sent of each source; Mailbox::seen of the receiver */
byte carried[N];                        /* GHOST: what an acquire of the slot takes over */
byte signalled[N];                      /* GHOST: signals that the source has begun */

/* A store under way; a later one to the same word replaces it. */
bit flying[N];
byte flying_epoch[N], flying_carried[N];
proctype wire(byte i) {
end:
  do
  :: atomic { flying[i] ->
       inbox[i] = flying_epoch[i]; carried[i] = flying_carried[i];
       flying[i] = 0; flying_epoch[i] = 0; flying_carried[i] = 0 }
  od
}

/* SignalController::signal: count, then one release store. Only this source ever writes the slot, so that no
   read-modify-write is needed. */
proctype source(byte me) {
  byte n = 1;
  do
  :: n <= SIGNALS ->
     atomic {
       signalled[me] = n;               /* and the data that go with the n-th signal are written */
#ifdef SHARED
       inbox[0] = EPOCH(inbox[0] + 1); carried[0] = n;
#else
       sent[me] = EPOCH(sent[me] + 1);
       flying[me] = 1; flying_epoch[me] = sent[me];
#ifndef RELAXED                         /* mutant: the store releases nothing */
       flying_carried[me] = n;
#endif
#endif
       n++
     }
  :: else -> break
  od
}

/* SignalController::wait: wait for one more than has been seen; count it only when it has come. */
#define WAIT(p) \
  :: atomic { p != ME && done[p] < SIGNALS && REACHED(inbox[BOX(p)], EPOCH(seen[BOX(p)] + 1)) -> \
       seen[BOX(p)] = EPOCH(seen[BOX(p)] + 1); done[p] = done[p] + 1; \
       assert(signalled[p] >= done[p]); assert(carried[BOX(p)] >= done[p]) } \
  :: atomic { p != ME && done[p] < SIGNALS && given_up < GIVE_UPS && \
              !REACHED(inbox[BOX(p)], EPOCH(seen[BOX(p)] + 1)) -> \
       given_up++; GIVE_UP(p) }
#ifdef COMMIT_EARLY                     /* mutant: counts before it has come */
#define GIVE_UP(p) seen[BOX(p)] = EPOCH(seen[BOX(p)] + 1)
#else
#define GIVE_UP(p)
#endif
#if N == 2
#define ALL_DONE (done[0] == SIGNALS)
#define SERVED (inbox[0] == seen[0])
#else
#define ALL_DONE (done[0] == SIGNALS && done[1] == SIGNALS)
#define SERVED (inbox[0] == seen[0] && inbox[1] == seen[1])
#endif

proctype receiver() {
  byte done[N], given_up;
  do
  EACH(WAIT)
  :: ALL_DONE -> break
  od;
  assert(SERVED)
}

init {
  byte i;
  atomic {
    for (i : 0 .. N - 1) { inbox[i] = START; sent[i] = START; seen[i] = START }
    for (i : 0 .. N - 2) { run wire(i); run source(i) }
    run receiver()
  }
}
