/* SyncGroup.reset, of cpu::Group::is_idle, rebase and revive: a group is made usable again, in place.

   First era: one barrier, in which some ranks may give up; each rank has then raised or passed. All call
   reset. Second era: ROUNDS barriers. How ranks agree to give up is breaking.pml's matter; here it is one
   step. Checked: no arrival of the first era counts in the second; no arrival of the second era is wiped
   out by the reset (that would be a hang, or a raise without cause); nobody raises in the second era unless
   somebody gave up in the second era; once that has happened, nobody passes and the group stays broken; a
   reset that fails, because a rank dies, leaves the group broken, or whole and as it was; never whole with
   some ranks re-based and others not.

   EXPIRE       waits of the second era may expire as well (else only if a rank is dead)
   DEATHS       ranks that may die, at any moment
   Mutants: NO_DRAIN, NO_FIRST_BARRIER, NO_SECOND_BARRIER, OK_BY_ALL, OK_BY_RANK_0, OK_BEFORE,
   NOT_BROKEN_FIRST */

#include "common.inc"

#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#define SLOT(owner, source) ((owner) * N + (source))
#define STATE(generation, phase) ((generation) * 2 + (phase))
#define OK 0
#define BROKEN 1

byte state = STATE(0, OK);
byte slot[N * N];
byte epoch[N];
/* Stores under way: an arrival may land late, for instance from a kernel that still runs. */
bit flying[N * N];
byte flying_epoch[N * N];
/* The rendezvous store's two barriers: who has come. */
byte come[2];

bit dead[N];
byte deaths;
byte begun[N];          /* GHOST: barriers of the second era that the rank has begun */
bit broken;             /* GHOST: somebody has given up in the first era ... */
bit broken_again;       /* GHOST: ... in the second */
byte ended;             /* GHOST: ranks that are through */
bit rebased;            /* GHOST: somebody has re-based */

proctype wire(byte i) {
end:
  do
  :: atomic { flying[i] -> slot[i] = flying_epoch[i]; flying[i] = 0; flying_epoch[i] = 0 }
  od
}

/* A barrier in the store (Rendezvous.agree, confirm); bounded, so that a rank that dies makes it fail. */
inline store_barrier(b) {
  come[b] = come[b] + 1;
  if
  :: come[b] == N
  :: atomic { deaths > 0 && come[b] < N -> assert(!(broken || rebased) || come[1] == N || state % 2 == BROKEN) }
     goto failed
  fi
}

#if DEATHS > 0 || defined(EXPIRE)
#define MAY_EXPIRE (era == 0 || EXPIRES || deaths > 0)
#else
#define MAY_EXPIRE (era == 0)
#endif
#ifdef EXPIRE
#define EXPIRES 1
#else
#define EXPIRES 0
#endif

/* The barrier of breaking.pml and barrier.pml, in short: Group::begin, PullController::sync, Wait::agreed.
   Leaves raised = 1 when it ends with an error. As in sync, the epoch advances all the same. */
inline barrier() {
  if
  :: atomic { state % 2 == BROKEN -> raised = 1 }
  :: atomic { state % 2 == OK -> begun[me] = begun[me] + era; next = EPOCH(epoch[me] + 1) }
     p = 0;
     do
     :: p < N ->
        atomic {
          if :: p != me -> flying[SLOT(p, me)] = 1; flying_epoch[SLOT(p, me)] = next :: else fi;
          p++
        }
     :: else -> break
     od;
     p = 0;
     do
     :: atomic { p < N && (p == me || REACHED(slot[SLOT(me, p)], next)) -> p++ }
     :: atomic { p < N && p != me && state % 2 == BROKEN -> raised = 1; break }
     :: atomic { p < N && p != me && !REACHED(slot[SLOT(me, p)], next) && state % 2 == OK && MAY_EXPIRE ->
          state = STATE(state / 2, BROKEN); broken = broken || !era; broken_again = era; raised = 1; break }
     :: atomic { p == N && state % 2 == BROKEN -> raised = 1; break }
     :: atomic { p == N && state % 2 == OK -> check_passed(); break }
     od;
     epoch[me] = next
  fi;
  atomic { assert(!(era == 1 && raised) || broken_again); p = 0; next = 0 }
}
inline check_passed() {
  assert(!(era == 1 && broken_again));
  for (q : 0 .. N - 1) { assert(era == 0 || begun[q] >= begun[me]) }
  q = 0
}

#define LANDED(p) !flying[SLOT(p, me)]
#if N == 2
#define DRAINED (LANDED(0) && LANDED(1))
#else
#define DRAINED (LANDED(0) && LANDED(1) && LANDED(2))
#endif

proctype rank(byte me) {
  byte era, k, p, q, next, old;
  bit raised;
  {
    barrier();

    /* SyncGroup.reset. Drain (Group::is_idle, on GPUs torch.cuda.synchronize): no call of mine is under way,
       and what my calls have stored has landed. */
#ifndef NO_DRAIN
    DRAINED;
#endif
#ifndef NO_FIRST_BARRIER
    store_barrier(0);
#endif
    /* Group::rebase. A group that is whole is broken first (Group::give_up); behind that nobody changes the
       state any more. */
#ifndef NOT_BROKEN_FIRST
    if :: atomic { state % 2 == OK -> state = STATE(state / 2, BROKEN) } :: state % 2 == BROKEN fi;
#endif
    old = state;
#ifdef OK_BEFORE        /* mutant: moves to OK between the barriers; right until a rank dies there */
    state = STATE(1, OK);
#endif
    /* Re-base: my own slots and epoch, by myself. Their addresses stay. */
    p = 0; rebased = 1;
    do
    :: p < N -> atomic { slot[SLOT(me, p)] = START; p++ }
    :: else -> break
    od;
    atomic { epoch[me] = START; p = 0 }
#ifndef NO_SECOND_BARRIER
    store_barrier(1);
#endif
    /* Group::revive. One compare-and-swap per rank: the first succeeds, and a late one cannot undo what happened since. */
#if defined(OK_BY_ALL)
    state = STATE(1, OK);
#elif defined(OK_BY_RANK_0)
    if :: me == 0 -> state = STATE(1, OK) :: else fi;
#elif !defined(OK_BEFORE)
    if :: atomic { state == old -> state = STATE(1, OK) } :: state != old fi;
#endif

    atomic { era = 1; raised = 0; old = 0 }
    do
    :: k < ROUNDS && !raised -> barrier(); k++
    :: else -> break
    od;
failed:
    ended++
  } unless { dead[me] }
}

/* When all are through: a group that broke again is still broken. */
proctype observer() {
end:
  atomic { ended == N -> assert(!broken_again || state % 2 == BROKEN) }
}

#define KILL(r) :: atomic { deaths < DEATHS && !dead[r] -> deaths++; dead[r] = 1 }
proctype death() {
end:
  do
  EACH(KILL)
  od
}

init {
  byte i;
  atomic {
    for (i : 0 .. N - 1) { epoch[i] = START }
    for (i : 0 .. N * N - 1) { slot[i] = START }
    for (i : 0 .. N * N - 1) { run wire(i) }
    run observer();
#if DEATHS > 0
    run death();
#endif
    for (i : 0 .. N - 1) { run rank(i) }
  }
}
