/* NOT shipped: one counter per rank instead of a slot per peer. It is here to show what the slots are for.

   Every rank adds 1 to every rank's counter at its start stage and again at its end stage, and waits until
   its own counter has grown by N (start) or 2N (end). Lane p adds at rank p; lane `me` waits. As an
   execution barrier that is right; but with three ranks or more a fast peer's next arrival can stand in for
   a slow peer's, so that the counter neither tells who is missing nor carries visibility.

   IDENTITY     check that each peer's own arrival, not another's, has let me pass
   SEE          check that behind the (fenced) end stage all ranks' writes are visible; the start stage is
                relaxed
   LOOP         no block barrier behind the end stage: other lanes run ahead into the next round's start
   Mutant of its own: EQUAL (of what has been added) */

#include "common.inc"
#undef REACHED

#ifndef ROUNDS
#define ROUNDS 1
#endif
#define SYNCS (2 * ROUNDS)
#define EVENT(rank, n) (1 << ((rank) * SYNCS + (n) - 1))
#define WRAP 32                         /* the counter's modulus: it grows by 2N per round */
#define GROWN ((counter[me] - base + WRAP) % WRAP)
#define TARGET ((n % 2) * N + (1 - n % 2) * 2 * N)
#ifdef EQUAL
#define REACHED (GROWN == TARGET)
#else
#define REACHED (GROWN >= TARGET && GROWN < WRAP / 2 + N)
#endif

byte counter[N];
int carried[N];                         /* GHOST: what an acquire of the counter takes over */
byte begun[N];                          /* GHOST */
byte added[N * N];                      /* GHOST: arrivals of a rank at an owner */

#define ADD(p) :: atomic { !HAS(arrived, p) -> add(p, n); arrived = arrived | BIT(p) }
inline add(p, sync) {
  counter[p] = (counter[p] + 1) % WRAP;
  /* Read-modify-writes continue a release sequence: a relaxed add leaves what is there. */
  if :: (sync) % 2 == 0 -> carried[p] = carried[p] | released :: else fi;
  added[p * N + me] = added[p * N + me] + 1;
  if :: begun[me] < sync -> begun[me] = sync :: else fi
}

#ifdef LOOP
#define AHEAD(p) :: atomic { n % 2 == 0 && n < SYNCS && p != me && HAS(arrived, p) && !HAS(early, p) -> \
  add(p, n + 1); early = early | BIT(p) }
#else
#define AHEAD(p)
#endif

inline check_passed() {
  for (q : 0 .. N - 1) {
    assert(begun[q] >= n);
#ifdef IDENTITY
    assert(added[me * N + q] >= n);
#endif
#ifdef SEE
    assert(n % 2 == 1 || (known & EVENT(q, n)) != 0);
#endif
  }
  q = 0
}

proctype rank(byte me) {
  byte n = 1, q, arrived, early, base = 26;
  bit done;
  int known, released;
  do
  :: n <= SYNCS ->
     atomic { known = known | EVENT(me, n); released = known; arrived = early; early = 0; done = 0 }
     do
     EACH(ADD)
     EACH(AHEAD)
     :: atomic { !done && HAS(arrived, me) && REACHED ->
          known = known | carried[me]; check_passed(); done = 1;
          if :: n % 2 == 0 -> base = (base + 2 * N) % WRAP :: else fi }
     :: atomic { done && arrived == ALL -> n++; break }
     od
  :: else -> break
  od
}

init {
  byte i;
  atomic {
    for (i : 0 .. N - 1) { counter[i] = 26 }
    for (i : 0 .. N - 1) { run rank(i) }
  }
}
