/* All-reduce by push on GPUs (csrc/cuda/push_one_shot.cu): data pushed into two halves of the peers' memory
   in turn, with no barrier. PushController counts such calls for kernels of the user's own in the same way.

   Call k writes half k % 2 of every rank: parcels of two 8-byte words, each half data, half flag; the flags
   hold the call's number. One store sends a parcel, but its two words may land one before the other. Then
   the rank reads what each peer has sent to it: a parcel is here when both its flags are this call's.
   Checked: what is read in call k was sent in call k; nobody waits forever.

   HALVES       2; with 1 (mutant) a fast peer overwrites what a slow one still reads
   Mutants: ONE_FLAG (looks at the first word's flag alone), APART (a flag may land before its data),
   ONE_SENDER (in the second call rank 0 alone sends, so that it need not wait for anybody), SILENT (nobody
   sends in the second call, yet it counts) */

#include "common.inc"

#ifndef CALLS
#define CALLS 4
#endif
#ifndef HALVES
#define HALVES 2
#endif
#define PLACE(owner, half, source) (((owner) * HALVES + (half)) * N + (source))

/* Does `rank` send in the k-th call? */
#if defined(ONE_SENDER)
#define SENDS(rank) (k != 2 || (rank) == 0)
#elif defined(SILENT)
#define SENDS(rank) (k != 2)
#else
#define SENDS(rank) 1
#endif

/* One parcel for each place: two words, each the number of the call whose data it holds. Its flag is that
   number, too, and lands together with the data, but in the mutant. */
byte low[N * N * HALVES], high[N * N * HALVES];
byte low_flying[N * N * HALVES], high_flying[N * N * HALVES];
#ifdef APART
byte low_data[N * N * HALVES], low_data_flying[N * N * HALVES];
#define LOW_DATA(i) low_data[i]
#else
#define LOW_DATA(i) low[i]
#endif

proctype wire(byte i) {
end:
  do
  :: atomic { low_flying[i] != 0 -> low[i] = low_flying[i]; low_flying[i] = 0 }
  :: atomic { high_flying[i] != 0 -> high[i] = high_flying[i]; high_flying[i] = 0 }
#ifdef APART
  :: atomic { low_data_flying[i] != 0 -> low_data[i] = low_data_flying[i]; low_data_flying[i] = 0 }
#endif
  od
}

/* send(). What a rank keeps for itself does not travel; it is left out. */
inline send(i) {
  low_flying[i] = k; high_flying[i] = k;
#ifdef APART
  low_data_flying[i] = k
#endif
}
#define SEND(p) :: atomic { !HAS(sent, p) -> \
  if :: SENDS(me) -> send(PLACE(p, k % HALVES, me)) :: else fi; sent = sent | BIT(p) }

/* look() and is_here(): one 16-byte load, and equal flags. */
#ifdef ONE_FLAG
#define HERE(i) (low[i] == k)
#else
#define HERE(i) (low[i] == k && high[i] == k)
#endif
#define MINE(p) PLACE(me, k % HALVES, p)
#define READ(p) :: atomic { sent == ALL && !HAS(read, p) && (!SENDS(p) || HERE(MINE(p))) -> \
  assert(!SENDS(p) || (LOW_DATA(MINE(p)) == k && high[MINE(p)] == k)); read = read | BIT(p) }

proctype rank(byte me) {
  byte k = 1, sent = BIT(me), read = BIT(me);
  do
  :: k <= CALLS ->
     do
     EACH(SEND)
     EACH(READ)
     /* The kernel ends, and the call counts as done (PushController::exit): the halves change roles. */
     :: atomic { read == ALL -> sent = BIT(me); read = BIT(me); k++; break }
     od
  :: else -> break
  od
}

init {
  byte i;
  atomic {
    for (i : 0 .. N * N * HALVES - 1) { run wire(i) }
    for (i : 0 .. N - 1) { run rank(i) }
  }
}
