/* How a group of GPU ranks breaks: gpusync::escape and DeviceWait (csrc/include/gpusync/device_wait.h).

   Every pad has a status word of its own; who changes the claim, in rank 0's pad, from 0 decides. A kernel
   looks at its status before it arrives, and not behind its wait, where it would cost time. That late
   arrivals are seen all the same rests on two times: the deciding rank lets a grace period go by between
   its announcement and its scan, longer than any rank takes from the look at its status to its last
   arrival; and the limit on a decision is longer than any decision takes. Here both hold by assumption:
   grace ends when no live rank is between that look and its last arrival, and the limit expires only if the
   decider is dead. (A rank that ends a wait early, for a peer that has closed the group, decides in the same
   way; here a wait may expire at any moment.)

   ROUNDS barriers; waits may expire at any moment; DEATHS ranks may die at any moment. Checked:
     1. a rank that was found missing when a barrier was given up never passes that barrier;
     2. nobody passes a barrier that not all have reached;
     3. nobody hangs: every rank that lives passes all barriers or gives up;
     4. the failure record that the hosts read is complete;
     5. RECORDED: once a rank has given up, there is a record in the end, so that its host can raise;
     6. CLOSES: a rank that has closed the group finds it broken for good, so that graphs which it captured touch
        nothing when they are replayed.

   Mutants: NO_GRACE, NO_LOOK (arrives whatever the status), RESTORE_LATE (returns the claim before the
   statuses), REASON_FIRST (the record's `reason` before the rest), REVIVE (a decision is told to everybody,
   whatever their status), NO_LIMIT, and two that hold only as long as no rank dies in a decision:
   NO_TAKE_OVER (who finds the decider dead gives up alone), POLL_ON (who finds the claim taken polls on and
   tries again) */

#include "common.inc"

#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#define SLOT(owner, source) ((owner) * N + (source))
#define WHOLE 0
#define DECIDING 1
#define BROKEN 2
#ifdef REVIVE           /* mutant: tells everybody */
#define IS_TOLD(r, from) true
#else
#define IS_TOLD(r, from) (status[r] == from)
#endif

byte claim;             /* 0, or 1 + the rank that decides */
byte status[N];
byte slot[N * N];
bit reason, rest;       /* DeviceFailure */
bit dead[N];
bit closed[N];          /* GHOST */
byte deaths;

bit arriving[N];        /* GHOST, for the grace period: between the look at the status and the last arrival */
byte begun[N];          /* GHOST: the barrier that the rank has reached */
byte passed[N];         /* GHOST: the last barrier that it has passed */
byte missed[ROUNDS + 1];/* GHOST: whom the rank that gave up this barrier had found missing */
bit gave_up;            /* GHOST: some rank has given up */
byte ended;             /* GHOST: ranks that are through */
bit over[N];            /* GHOST */

/* escape::announce: one compare-and-swap for each rank. */
inline announce(from, value) {
  r = 0;
  do
  :: atomic { r < N ->
       if
       :: IS_TOLD(r, from) -> status[r] = value
       :: else
       fi;
       assert(!closed[r] || status[r] == BROKEN);    /* 6 */
       r++
     }
  :: else -> r = 0; break
  od
}

/* escape::announce_broken */
inline announce_broken() {
  r = 0;
  do
  :: r < N -> status[r] = BROKEN; r++
  :: else -> r = 0; break
  od
}

/* escape::write_failure: `reason` last, for it tells the hosts that the rest is there. */
inline write_failure() {
#ifdef REASON_FIRST     /* mutant */
  reason = 1; rest = 1
#else
  rest = 1; reason = 1
#endif
}

/* escape::settle. `before_arrival`: the look at the status that the grace period counts from. `expired`: my
   wait has expired, and somebody else holds the claim; polling on and expiring again changes nothing. */
inline settle(before_arrival, expired) {
  do
  :: atomic { status[me] == WHOLE && (!expired || claim == 0) ->
       whole = 1; arriving[me] = before_arrival; break }
  :: atomic { status[me] == BROKEN -> whole = 0; break }
#ifndef NO_LIMIT        /* mutant: waits for the decider for ever */
#ifndef NO_TAKE_OVER
  :: atomic { (status[me] == DECIDING || expired) && claim > 0 && dead[claim - 1] -> claim = 1 + me }
     write_failure();
     announce_broken()
#else                   /* mutant */
  :: atomic { status[me] == DECIDING && claim > 0 && dead[claim - 1] -> whole = 0 }
     status[me] = BROKEN; break
#endif
#endif
  od
}

#define QUIET(q) (!arriving[q] || dead[q])
#if N == 2
#define GRACE (QUIET(0) && QUIET(1))
#else
#define GRACE (QUIET(0) && QUIET(1) && QUIET(2))
#endif

/* escape::go_on, when the wait has expired, and escape::decide. Leaves whole = 0 if it is given up. */
inline go_on() {
  if
  :: atomic { claim == 0 -> claim = 1 + me }
     announce(WHOLE, DECIDING);
#ifndef NO_GRACE        /* mutant: scans at once */
     GRACE;
#endif
     absent = 0;
     do
     :: r < N ->
        if
        :: r != me && slot[SLOT(me, r)] < k -> absent = absent | BIT(r)
        :: r == me || slot[SLOT(me, r)] >= k
        fi;
        r++
     :: else -> r = 0; break
     od;
     if
     :: absent == 0 ->
#ifdef RESTORE_LATE     /* mutant */
        claim = 0;
        announce(DECIDING, WHOLE);
#else
        announce(DECIDING, WHOLE);
        claim = 0;
#endif
        whole = 1
     :: else ->
        write_failure();
        atomic {
          missed[k] = absent;
          for (q : 0 .. N - 1) { assert(!HAS(absent, q) || passed[q] < k) }     /* 1 */
          q = 0
        }
        announce_broken();
        whole = 0
     fi;
     absent = 0
#ifdef POLL_ON          /* mutant: a rank that polls for ever is a cycle, not a dead end */
  :: claim != 0 -> settle(0, 0)
#else
  :: claim != 0 -> settle(0, 1)
#endif
  fi
}

inline check_passed() {
  assert(!HAS(missed[k], me));                      /* 1 */
  for (q : 0 .. N - 1) { assert(begun[q] >= k) }    /* 2 */
  q = 0;
  passed[me] = k
}

proctype rank(byte me) {
  byte k = 1;
  byte p, q, r, absent;
  bit whole;
  {
    do
    :: k <= ROUNDS ->
       /* PullController::sync: DeviceWait::ready or DeviceWait::settle, ... */
       begun[me] = k;
#ifdef NO_LOOK          /* mutant */
       arriving[me] = 1;
#else
       settle(1, 0);
       if :: whole :: else -> goto lost fi;
#endif
       /* ... Semaphore::arrive at every peer, ... */
       do
       :: atomic { p == me -> p++ }
       :: atomic { p < N && p != me -> slot[SLOT(p, me)] = k; p++ }
       :: atomic { p == N -> p = 0; arriving[me] = 0; break }
       od;
       /* ... DeviceWait::persist. */
       do
       :: atomic { p == me -> p++ }
       :: atomic { p < N && p != me && slot[SLOT(me, p)] >= k -> p++ }
       :: p < N && p != me && slot[SLOT(me, p)] < k ->
          if
          :: status[me] != WHOLE -> settle(0, 0)
          :: status[me] == WHOLE -> go_on()
          fi;
          if :: whole :: else -> goto lost fi
       :: atomic { p == N -> p = 0; check_passed(); k++; break }
       od
    :: else -> break
    od;
    goto through;
lost:
    gave_up = 1;
through:
#ifdef CLOSES           /* cuda::Group::stop_graphs */
    atomic { status[me] = BROKEN; closed[me] = 1 }
#endif
    atomic { ended++; over[me] = 1 }
  } unless { dead[me] }
}

/* cpu::Group::take_over_device_failure: the hosts look at the record at any time. */
proctype host() {
end:
  if
  :: reason -> assert(rest)     /* 4 */
  fi
}

#ifdef RECORDED
proctype observer() {
end:
  atomic { ended + deaths >= N && gave_up -> assert(reason) }   /* 5 */
}
#endif

#define KILL(victim) \
  :: atomic { deaths < DEATHS && !dead[victim] && !over[victim] -> deaths++; dead[victim] = 1 }
proctype death() {
end:
  do
  EACH(KILL)
  od
}

init {
  byte i;
  atomic {
    run host();
#ifdef RECORDED
    run observer();
#endif
#if DEATHS > 0
    run death();
#endif
    for (i : 0 .. N - 1) { run rank(i) }
  }
}
