/* How a group of CPU ranks breaks: Group::give_up, Group::settle (csrc/cpu/failure.cpp), Wait::persist,
   Wait::missing, Wait::agreed (csrc/cpu/wait.cpp).

   ROUNDS barriers. A wait may expire at any moment (a rank may be arbitrarily slow), up to DEATHS ranks may
   die at any moment, also in the middle of a decision. One word holds the group's phase and the rank that
   decides. Checked:
     1. a rank that was found missing when a barrier was given up never passes that barrier;
     2. nobody passes a barrier that not all have reached, and nobody passes any barrier once the group is
        broken;
     3. nobody hangs: every rank that lives passes all barriers or raises (Spin reports every other end as
        invalid);
     4. the failure record that a raising rank reads is complete and of one writer;
     5. ATOMIC: a barrier is given up by all or by none: no rank passes it before or after another gives it
        up (STALL: not even if the deciding rank stalls and another takes over; that is more than the
        protocol promises);
     6. GONE: without deaths and expiries nobody raises, though ranks close the group once they are through;
        with deaths only ranks that are gone are called missing.

   ROW_ONLY     the scan of a decision looks at the decider's own slots alone: enough for 1 to 4, not for 5
   GONE         waits do not expire; they are given up when the awaited rank is dead or has closed the group
   REACH_x      not a property: asserts that a place cannot be reached, to show that it can
   BLAME_ALL    a mutant of GONE: whoever has not come counts as missing
   Mutants: NO_STATE_CHECK, NO_RESCAN, SCAN_EARLY, PLAIN_RETURN, RELEASE_ARRIVAL, RECORD_LATE, ONE_RECORD,
   NO_LIMIT */

#include "common.inc"

#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef STALLS
#define STALLS 1
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#define SLOT(owner, source) ((owner) * N + (source))

#ifdef REACH_STALL
#define REACHED_STALL assert(false)
#else
#define REACHED_STALL
#endif
#ifdef REACH_COMPLETE
#define REACHED_COMPLETE assert(false)
#else
#define REACHED_COMPLETE
#endif
/* State: one word, changed by compare-and-swap alone. The epochs do not wrap here (barrier.pml). */
#define OK 0
#define DECIDING 1
#define BROKEN 2
#define COMPLETE 1      /* verdicts */
#define RETRY 2
#define LOST 3
#define LATE 4          /* somebody else decides, or has taken over */
#define STATE(phase, rank) ((phase) * 8 + (rank))
#define PHASE(state) ((state) / 8)
byte state = STATE(OK, 0);
byte slot[N * N];
byte head[N], tail[N];  /* the failure records, one in each rank's page: two words for many */
bit gone[N];            /* the rank is dead or has closed the group */
bit dead[N];
byte deaths;
byte stalls;            /* decisions that were taken over though the decider lives: at most STALLS */

byte begun[N];          /* GHOST: the barrier that the rank has reached */
byte passed[N];         /* GHOST: the last barrier that it has passed */
byte missed[ROUNDS + 1];/* GHOST: whom the rank that gave up this barrier had found missing */
bit was_broken;         /* GHOST */

/* A store of an arrival. On the host it is sequentially consistent: it has landed when the rank goes on. */
#ifdef RELEASE_ARRIVAL  /* mutant: a release store may still be in the store buffer when the state is read */
bit flying[N * N];
byte flying_value[N * N];
proctype wire(byte i) {
end:
  do
  :: atomic { flying[i] -> slot[i] = flying_value[i]; flying[i] = 0; flying_value[i] = 0 }
  od
}
#define STORE(i, value) flying[i] = 1; flying_value[i] = value
#else
#define STORE(i, value) slot[i] = value
#endif

/* Group::write_failure, word by word. */
#ifdef ONE_RECORD       /* mutant: one record for the group */
#define RECORD(rank) 0
#else
#define RECORD(rank) rank
#endif
inline write_failure() { head[RECORD(me)] = 1 + me; tail[RECORD(me)] = 1 + me }

/* Group::break_group: the record, then the move that names it. */
inline break_group() {
#ifndef RECORD_LATE     /* mutant: written behind the move */
  write_failure();
#endif
  if
  :: atomic { state == STATE(DECIDING, me) ->
       state = STATE(BROKEN, me); was_broken = 1; verdict = LOST; check_given_up() }
  :: atomic { state != STATE(DECIDING, me) -> verdict = LATE }
  fi;
#ifdef RECORD_LATE
  write_failure()
#endif
}

/* Group::settle: waits until the decision under way has been made. The limit may expire at any moment; then
   the rank takes the decision over and breaks the group. Its moves fail if the other was only slow, and so do
   the other's if it was too slow. `passing`: this is Wait::agreed, and the load that finds OK is the pass. */
#ifdef GONE             /* nobody is slow: the limit expires only if the decider is dead */
#define LIMIT dead[state % 8]
#else
#define LIMIT (dead[state % 8] || stalls < STALLS)
#endif
inline settle(result, passing) {
  do
  :: atomic { PHASE(state) == OK -> result = 1; if :: passing -> check_passed() :: else fi; break }
  :: atomic { PHASE(state) == BROKEN -> result = 0; break }
#ifndef NO_LIMIT        /* mutant: waits for the decider for ever */
  :: atomic { PHASE(state) == DECIDING && state % 8 != me && LIMIT -> now = state }
     if
     :: atomic { state == now ->
          state = STATE(DECIDING, me); stalls = stalls + !dead[now % 8]; now = 0; stalled = 1; REACHED_STALL }
        break_group();
        atomic { stalled = 0; verdict = 0 }
     :: atomic { state != now -> now = 0 }
     fi
#endif
  od
}

/* Wait::missing: the scan of a decision, one load after the other, all behind the move to DECIDING. */
inline scan() {
  absent = 0; s = 0;
  do
  :: s < N && s == me -> s++
  :: s < N && s != me ->
#ifndef ROW_ONLY
     o = 0;
     do
     :: o < N && (o == s || slot[SLOT(o, s)] < k) -> o++
     :: atomic { o < N && o != s && slot[SLOT(o, s)] >= k -> o = 0; break }
     :: atomic { o == N -> absent = absent | BIT(s); o = 0; break }
     od;
#else
     if :: slot[SLOT(me, s)] < k -> absent = absent | BIT(s) :: slot[SLOT(me, s)] >= k fi;
#endif
     s++
  :: s == N -> s = 0; break
  od
}

#ifdef GONE
/* Before its time a wait is given up for ranks that are gone alone (Group::gone_among). Leaves them in
   `absent`; if there are none, those who have not come are on their way, and the wait goes on. */
inline blame() {
  on_their_way = absent != 0;
  do
  :: s < N && gone[s] -> s++
  :: s < N && !gone[s] -> absent = absent & ~BIT(s); s++
  :: s == N -> s = 0; break
  od
}
#endif

/* Group::give_up. Leaves `verdict`: COMPLETE (all had come), RETRY (another rank decided that the group lives
   on), LOST (broken). */
inline give_up() {
#ifdef SCAN_EARLY       /* mutant: loads that may be performed before the state is DECIDING */
  scan();
#endif
  verdict = LATE;
  if
  :: atomic { PHASE(state) == OK -> state = STATE(DECIDING, me) }
#if defined(NO_RESCAN)  /* mutant: relies on what the last poll saw */
     absent = BIT(p);
#elif !defined(SCAN_EARLY)
     scan();
#endif
#if defined(GONE) && !defined(BLAME_ALL)
     blame();
#endif
     if
     :: absent == 0 ->
#ifdef PLAIN_RETURN     /* mutant: stores OK without looking whether it is still the decider */
        atomic { state = STATE(OK, 0); verdict = COMPLETE; REACHED_COMPLETE }
#else
        if
        :: atomic { state == STATE(DECIDING, me) ->
             state = STATE(OK, 0); verdict = COMPLETE; REACHED_COMPLETE }
        :: state != STATE(DECIDING, me)
        fi
#endif
     :: else -> break_group()
     fi
  :: PHASE(state) != OK
  fi;
  absent = 0;
#ifdef GONE
  if :: verdict == COMPLETE && on_their_way -> verdict = RETRY :: else fi;
  on_their_way = 0;
#endif
  if
  :: verdict == LATE -> settle(ok, 0); if :: ok -> verdict = RETRY :: else -> verdict = LOST fi
  :: else
  fi;
  ok = 0
}

inline check_given_up() {
  if :: !stalled -> missed[k] = absent :: else fi;
  for (q : 0 .. N - 1) {
    assert(stalled || !HAS(absent, q) || passed[q] < k);    /* 1 */
#ifdef GONE
    assert(stalled || !HAS(absent, q) || gone[q]);          /* 6 */
#endif
#ifdef ATOMIC
    assert(stalled || passed[q] < k);                       /* 5 */
#endif
#ifdef STALL
    assert(passed[q] < k);
#endif
  }
  q = 0
}

inline check_passed() {
  assert(!was_broken);                              /* 2 */
  assert(!HAS(missed[k], me));                      /* 1 */
#ifdef ATOMIC
  assert(missed[k] == 0);                           /* 5 */
#endif
  for (q : 0 .. N - 1) { assert(begun[q] >= k) }    /* 2 */
  q = 0;
  passed[me] = k
}

/* The wait for rank p ends without its arrival: the timeout has expired, or a rank that has not come is gone
   (p is looked for, and then looked at, so that it may have come in between: Wait::is_hopeless). */
#define WAITING p < N && p != me
#ifdef GONE
#define GONE_TOO(other) (other != me && slot[SLOT(me, other)] < k && gone[other])
#if N == 2
#define ANY_GONE (GONE_TOO(0) || GONE_TOO(1))
#elif N == 3
#define ANY_GONE (GONE_TOO(0) || GONE_TOO(1) || GONE_TOO(2))
#else
#define ANY_GONE (GONE_TOO(0) || GONE_TOO(1) || GONE_TOO(2) || GONE_TOO(3))
#endif
#define EXPIRED \
  :: WAITING && slot[SLOT(me, p)] < k -> if :: gone[p] || ANY_GONE -> give_up() :: !(gone[p] || ANY_GONE) fi
#else
#define EXPIRED :: WAITING && slot[SLOT(me, p)] < k -> give_up()
#endif

proctype rank(byte me) {
  byte k = 1;           /* the barrier under way */
  byte p, s, o, q, absent, now, verdict;
  bit ok;
  bit on_their_way;
  bit stalled;          /* GHOST: I have taken a decision over */
  {
    do
    :: k <= ROUNDS ->
       /* Group::begin: a broken group refuses. */
       if
       :: PHASE(state) == BROKEN -> goto raise
       :: atomic { PHASE(state) != BROKEN -> begun[me] = k }
       fi;
       /* PullController::sync: Semaphore::arrive at every peer in turn ... */
       do
       :: atomic { p == me -> p++ }
       :: atomic { p < N && p != me -> STORE(SLOT(p, me), k); p++ }
       :: atomic { p == N -> p = 0; break }
       od;
       /* ... and Wait::until, Wait::persist for every peer in turn: Semaphore::peek, the state, the clock. */
       do
       :: atomic { p == me -> p++ }
       :: atomic { p == N -> p = 0; break }
       :: atomic { WAITING && slot[SLOT(me, p)] >= k -> p++ }
       :: WAITING && PHASE(state) != OK -> settle(ok, 0); if :: ok :: else -> goto raise fi; ok = 0
       EXPIRED;
          if
          :: atomic { verdict == COMPLETE -> verdict = 0; p++ }
          :: atomic { verdict == LOST -> verdict = 0 } goto raise
          :: atomic { verdict < COMPLETE || verdict == RETRY -> verdict = 0 }
          fi
       od;
       /* Wait::agreed: all have come; but has a peer given up this call? */
#ifdef NO_STATE_CHECK   /* mutant */
       atomic { check_passed(); k++ }
#else
       settle(ok, 1);
       if :: atomic { ok -> ok = 0; k++ } :: else -> goto raise fi
#endif
    :: else -> break
    od;
    goto through;
raise:
    /* Group::throw_broken */
    atomic {
      assert(was_broken);
#ifdef GONE
      assert(deaths > 0)    /* 6 */
#endif
    }
    atomic { q = state % 8; assert(head[RECORD(q)] == 1 + q && tail[RECORD(q)] == 1 + q); q = 0 }    /* 4 */
through:
#ifdef GONE
    gone[me] = 1            /* Group::~Group */
#else
    skip
#endif
  } unless { dead[me] }
}

/* A rank dies: between any two of its steps, and for good. */
#define KILL(r) :: atomic { deaths < DEATHS && !dead[r] -> deaths++; dead[r] = 1; gone[r] = 1 }
proctype death() {
end:
  do
  EACH(KILL)
  od
}

init {
  byte i;
  atomic {
#ifdef RELEASE_ARRIVAL
    for (i : 0 .. N * N - 1) { run wire(i) }
#endif
#if DEATHS > 0
    run death();
#endif
    for (i : 0 .. N - 1) { run rank(i) }
  }
}
