/* Setting up: every rank zeroes its pad before any peer can know its address.

   Each rank zeroes its slots, lets the zeroing land (on a GPU: synchronises the device), meets the others
   in the rendezvous store, publishes its address there, meets them again, and goes on with ROUNDS barriers.
   Checked: no arrival is wiped out: nobody waits forever, nobody passes early.

   NO_STORE_BARRIERS    not a mutant: what protects the pads is that an address is published after the
                        zeroing
   Mutants: ZERO_LATE (zeroes after the address exchange), NO_SYNCHRONIZE (publishes while the zeroing is
   under way) */

#include "common.inc"

#ifndef ROUNDS
#define ROUNDS 1
#endif
#define SLOT(owner, source) ((owner) * N + (source))

byte slot[N * N];
bit zeroing[N];                         /* the rank's zeroing is under way; it may land at any time */
bit published[N];                       /* the rank's address is in the store */
byte come[2];                           /* the store's two barriers */
byte begun[N];                          /* GHOST: barriers that the rank has begun */

proctype wire(byte owner) {
  byte i;
end:
  do
  :: atomic { zeroing[owner] -> for (i : 0 .. N - 1) { slot[SLOT(owner, i)] = 0 } zeroing[owner] = 0; i = 0 }
  od
}

inline zero() {
  zeroing[me] = 1;
#ifndef NO_SYNCHRONIZE
  !zeroing[me]
#endif
}
#ifdef NO_STORE_BARRIERS
inline store_barrier(b) { skip }
#else
inline store_barrier(b) { come[b] = come[b] + 1; come[b] == N }
#endif

/* Semaphore::arrive needs the peer's address; it waits in the rendezvous until that is there. */
#define ARRIVE(p) :: atomic { !HAS(sent, p) && published[p] -> slot[SLOT(p, me)] = k; sent = sent | BIT(p) }
#define WAIT(p) :: atomic { HAS(sent, p) && !HAS(seen, p) && slot[SLOT(me, p)] >= k -> \
  assert(begun[p] >= k); seen = seen | BIT(p) }

proctype rank(byte me) {
  byte k = 1, sent, seen;
#ifndef ZERO_LATE
  zero();
#endif
  store_barrier(0);
  published[me] = 1;
  store_barrier(1);
#ifdef ZERO_LATE
  zero();
#endif
  do
  :: k <= ROUNDS ->
     atomic { begun[me] = k; sent = BIT(me); seen = BIT(me) }
     do
     EACH(ARRIVE)
     EACH(WAIT)
     :: atomic { seen == ALL -> k++; break }
     od
  :: else -> break
  od
}

init {
  byte i;
  atomic {
    /* What the memory held before: an earlier group's last epochs. */
    for (i : 0 .. N * N - 1) { slot[i] = ROUNDS }
    for (i : 0 .. N - 1) { run wire(i) }
    for (i : 0 .. N - 1) { run rank(i) }
  }
}
