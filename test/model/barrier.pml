/* PullController::sync<kFence, kStart>: the barrier on slots, as it is shipped.

   A rank is one thread block, its lanes deal with one peer each and work in any order. (The lane that
   greets its own rank waits for nobody else; it is left out.) Every rank calls sync ROUNDS * STAGES times;
   with two stages these are pull_start, pull_end, pull_start, ..., each stage with slots and an epoch of
   its own. Checked: nobody passes its n-th sync before all ranks have begun theirs; where the stage
   promises it, everything that any rank wrote before its n-th sync is visible to all after it; nobody waits
   forever.

   STAGES               1 or 2
   FENCE0, FENCE1       kFence of the start and of the end stage: whether an arrival releases
   SEE0, SEE1           check visibility behind that stage
   POSTED               stores land later than the lane goes on, in any order between slots
   HOST                 one lane deals with all peers in turn, as on the CPU
   Mutants: EQUAL, UNSIGNED (common.inc), NO_TRAILING, NO_LEADING, NO_ACQUIRE */

#include "common.inc"

#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef STAGES
#define STAGES 1
#endif
#ifndef FENCE0
#define FENCE0 1
#endif
#ifndef FENCE1
#define FENCE1 1
#endif
#ifndef SEE0
#define SEE0 FENCE0
#endif
#ifndef SEE1
#define SEE1 FENCE1
#endif
#define SYNCS (ROUNDS * STAGES)
#define FENCED(stage) (((stage) == 0 && FENCE0) || ((stage) == 1 && FENCE1))
#define SEEN(stage) (((stage) == 0 && SEE0) || ((stage) == 1 && SEE1))
#define SLOT(owner, source, stage) (((owner) * N + (source)) * STAGES + (stage))
/* An event, as a bit: "rank has written what it wrote before its n-th sync". */
#define EVENT(rank, n) (1 << ((rank) * SYNCS + (n) - 1))

byte slot[N * N * STAGES];      /* Semaphore::m_slot, the half that holds the epoch */
byte epoch[N * N * STAGES];     /* Semaphore::m_epoch, its owner's alone: each lane has its copy */
int carried[N * N * STAGES];    /* GHOST: the events that an acquire of this slot takes over */
byte begun[N];                  /* GHOST: syncs that the rank has begun: it is through the leading barrier */

#ifdef POSTED
/* A store under way. A later one to the same word replaces it: nothing obliges the word to show both. */
bit flying[N * N * STAGES];
byte flying_epoch[N * N * STAGES];
int flying_carried[N * N * STAGES];

proctype wire(byte i) {
end:
  do
  :: atomic { flying[i] ->
       slot[i] = flying_epoch[i]; carried[i] = flying_carried[i];
       flying[i] = 0; flying_epoch[i] = 0; flying_carried[i] = 0 }
  od
}
#endif

/* Semaphore::arrive<kFence>. A relaxed store carries nothing, and cuts off what an earlier release left. */
inline arrive(i, value, events) {
#ifdef POSTED
  flying[i] = 1; flying_epoch[i] = value; flying_carried[i] = events
#else
  slot[i] = value; carried[i] = events
#endif
}

/* What every thread of the block relies on when sync has returned. */
inline check_passed() {
  for (q : 0 .. N - 1) {
    assert(begun[q] >= n);                                           /* execution: q has come */
    if :: SEEN(stage) -> assert((known & EVENT(q, n)) != 0)          /* visibility: q's writes are here */
       :: else
    fi
  }
  q = 0
}

/* Leading block barrier (for block::Alone: the kernel's start): the block's writes are done, and every lane's
   release will carry them. */
inline lead() { led = 1; begun[me] = n; known = known | EVENT(me, n); released = known }
#ifdef NO_LEADING   /* lanes may arrive while others of the block still write */
#define LEAD
#define LEAD_LATE :: atomic { !led -> lead() }
#else
#define LEAD lead();
#define LEAD_LATE
#endif

#ifdef HOST
#define MAY_ARRIVE(p) TURN(arrived, p)
#define MAY_WAIT(p) (arrived == ALL && TURN(reached, p))
#else
#define MAY_ARRIVE(p) 1
#define MAY_WAIT(p) HAS(arrived, p)
#endif

/* Lane p announces the arrival to rank p ... */
#define ARRIVE(p) :: atomic { !HAS(arrived, p) && MAY_ARRIVE(p) -> \
  epoch[SLOT(me, p, stage)] = EPOCH(epoch[SLOT(me, p, stage)] + 1); \
  arrive(SLOT(p, me, stage), epoch[SLOT(me, p, stage)], released * FENCED(stage)); \
  arrived = arrived | BIT(p) }

/* ... and waits for rank p's (Wait::until): Semaphore::peek until it is there, then Semaphore::acquire_from
   once. The acquire may read a newer value than the last peek; that it reads the same one here is the case in
   which it learns least. */
#ifdef NO_ACQUIRE
#define ACQUIRE(p)
#else
#define ACQUIRE(p) known = known | carried[SLOT(me, p, stage)];
#endif
#ifdef NO_TRAILING   /* the lane goes on to its work as soon as its own peer is there */
#define LANE_PASSED check_passed();
#else
#define LANE_PASSED
#endif
#define WAIT(p) :: atomic { led && !HAS(reached, p) && MAY_WAIT(p) && \
                        REACHED(slot[SLOT(me, p, stage)], epoch[SLOT(me, p, stage)]) -> \
  ACQUIRE(p) reached = reached | BIT(p); LANE_PASSED }

/* Trailing block barrier (for block::Alone: the kernel's end): all lanes are through, each with its peer. */
#define TRAIL :: atomic { reached == ALL -> check_passed(); n++; break }

proctype rank(byte me) {
  byte n = 1;                     /* this is my n-th sync */
  byte stage;
  byte arrived, reached;          /* lanes that have stored their arrival; that have seen their peer's */
  bit led;
  int known, released;            /* GHOST: the events visible to me; those an arrival of mine releases */
  byte q;
  do
  :: n <= SYNCS ->
     atomic { stage = (n - 1) % STAGES; led = 0;
              arrived = BIT(me); reached = BIT(me); LEAD }
     do
     LEAD_LATE
     EACH(ARRIVE)
     EACH(WAIT)
     TRAIL
     od
  :: else -> break
  od
}

init {
  byte i;
  atomic {
    for (i : 0 .. N * N * STAGES - 1) { epoch[i] = START; slot[i] = START }
#ifdef POSTED
    for (i : 0 .. N * N * STAGES - 1) { run wire(i) }
#endif
    for (i : 0 .. N - 1) { run rank(i) }
  }
}
