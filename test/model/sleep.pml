/* gpusync::cpu::Wait::persist and Group::ring_doorbell: no wake-up is lost between a rank that goes to
   sleep and the peers that arrive.

   Rank 0 waits for its N-1 peers, one after the other, on one event word. Here a sleep has no limit, so
   that a lost wake-up shows as a hang (in the product it would cost a nap of 50 ms). All loads and stores
   are sequentially consistent.

   Mutants: DOORBELL_FIRST (the arriver reads `sleepers` before it has stored its slot), NO_RECHECK (the
   sleeper does not look at the slot again after raising `sleepers`), EVENT_LATE (it reads `event` only
   after that look), NO_EVENT (the arriver wakes without changing `event`) */

#include "common.inc"

byte slot[N];           /* Semaphore::m_slot: 1 when the peer has arrived */
byte event, sleepers;   /* RankPage of rank 0 */
bit asleep;             /* in the kernel: on the futex's queue */

/* Semaphore::arrive, then Wait::notify: Group::ring_doorbell. */
proctype arriver(byte me) {
  byte s;
#ifdef DOORBELL_FIRST
  s = sleepers;
  slot[me] = 1;
#else
  slot[me] = 1;
  s = sleepers;
#endif
  if
  :: s > 0 ->
#ifndef NO_EVENT
     event = event + 1;
#endif
     asleep = 0                         /* futex_wake_all */
  :: else
  fi
}

proctype waiter() {
  byte p = 1, seen, e;
  do
  :: p < N ->
     /* Wait::until spins, Wait::persist yields for a while ... */
     if
     :: slot[p] == 1 -> goto next
     :: slot[p] == 0                    /* ... and then Wait::sleep_until */
     fi;
     sleepers = sleepers + 1;
     do
     :: true ->
#ifndef EVENT_LATE
        e = event;
#endif
#ifndef NO_RECHECK
        if :: slot[p] == 1 -> break :: slot[p] == 0 fi;
#endif
#ifdef EVENT_LATE
        e = event;
#endif
        /* futex_wait: the kernel compares and enqueues in one step. */
        if
        :: atomic { event == e -> asleep = 1 } !asleep
        :: event != e
        fi;
#ifdef NO_RECHECK
        if :: slot[p] == 1 -> break :: slot[p] == 0 fi
#endif
     od;
     sleepers = sleepers - 1;
next:
     p++
  :: else -> break
  od
}

init {
  byte i;
  atomic {
    run waiter();
    for (i : 1 .. N - 1) { run arriver(i) }
  }
}
