/* Shared by the models. Each model is checked for a few ranks and rounds, in every interleaving of its steps.

   N       ranks (2 to 4)
   M       the modulus of the epochs: a small stand-in for 2^32, so that they wrap around within a few rounds
   START   the epochs' first value: just below M, for the same reason
   GHOST   variables so named exist for the assertions alone: nothing in the protocol reads them. */

#ifndef N
#define N 3
#endif
#ifndef M
#define M 8
#endif
#ifndef START
#define START 6
#endif

#define EPOCH(x) ((x) & (M - 1))

/* gpusync::compare (semaphore.h): has a slot's word reached the epoch that is waited for? */
#if defined(EQUAL)            /* mutant: a peer that is one call ahead does not count */
#define REACHED(slot, epoch) ((slot) == (epoch))
#elif defined(UNSIGNED)       /* mutant: compares the numbers instead of their difference */
#define REACHED(slot, epoch) ((slot) >= (epoch))
#else
#define REACHED(slot, epoch) (EPOCH((slot) - (epoch)) < M / 2)
#endif

/* Sets of ranks (or of lanes: lane p deals with peer p). */
#define BIT(rank) (1 << (rank))
#define ALL (BIT(N) - 1)
#define HAS(set, rank) (((set) & BIT(rank)) != 0)

/* Whose turn it is when one lane deals with all peers in order, as on the CPU: the set holds all before `rank`. */
#define TURN(set, rank) (((set) & (BIT(rank) - 1)) == BIT(rank) - 1)

/* EACH(step) offers step(0) ... step(N-1) as alternatives of a do or an if: any may come first. */
#if N == 2
#define EACH(step) step(0) step(1)
#elif N == 3
#define EACH(step) step(0) step(1) step(2)
#else
#define EACH(step) step(0) step(1) step(2) step(3)
#endif
