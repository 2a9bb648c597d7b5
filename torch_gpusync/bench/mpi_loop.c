/* The benchmark's peer in MPI: a loop around one call, in C.
 *
 *   mpi_loop ROUNDS SAMPLE_SECONDS OP:BYTES...
 *
 * OP is barrier or all_reduce (fp32 sum, out of place). Prints a line `OP BYTES CALLS MICROSECONDS` for each sample of
 * CALLS calls, with the slowest rank's time per call. Exits with 1 when a sum was wrong.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, world_size;

struct job {
  int is_barrier;
  long numel;
  float *input, *output;
};

static void run(const struct job *job, long calls) {
  for (long i = 0; i < calls; ++i) {
    if (job->is_barrier) {
      MPI_Barrier(MPI_COMM_WORLD);
    } else {
      MPI_Allreduce(job->input, job->output, (int)job->numel, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    }
  }
}

/* Seconds of the slowest rank. */
static double timed(const struct job *job, long calls) {
  MPI_Barrier(MPI_COMM_WORLD);
  const double start = MPI_Wtime();
  run(job, calls);
  double mine = MPI_Wtime() - start, slowest;
  MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return slowest;
}

/* Whole numbers below 2^24 / 64: their fp32 sums over 64 ranks are exact in any order. */
static float value(long index, int of_rank, int draw) { return (float)((index * 7 + draw * 31) % 4096 + of_rank); }

static void refresh(const struct job *job, int draw) {
  for (long i = 0; i < job->numel; ++i) job->input[i] = value(i, rank, draw);
}

static void check(const struct job *job, int draw) {
  refresh(job, draw);
  memset(job->output, 0xff, sizeof(float) * (size_t)job->numel);
  run(job, 1);
  for (long i = 0; i < job->numel; ++i) {
    float expected = 0;
    for (int r = 0; r < world_size; ++r) expected += value(i, r, draw);
    if (job->output[i] != expected) {
      fprintf(stderr, "mpi_loop: rank %d: wrong sum at element %ld\n", rank, i);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
  }
}

static void measure(const char *what, int rounds, double sample_seconds) {
  const char *colon = strchr(what, ':');
  const long bytes = colon ? atol(colon + 1) : 0;
  struct job job = {strncmp(what, "barrier", 7) == 0, bytes / (long)sizeof(float), NULL, NULL};
  job.input = malloc((size_t)bytes + 64);
  job.output = malloc((size_t)bytes + 64);
  refresh(&job, 0);
  long calls = 1;
  double elapsed = timed(&job, calls);
  while (elapsed < sample_seconds / 10 && calls < 1000000) elapsed = timed(&job, calls *= 4);
  calls = (long)((double)calls * sample_seconds / elapsed) + 1;
  if (calls < 3) calls = 3;
  for (int round = 1; round <= rounds; ++round) {
    refresh(&job, round);
    run(&job, calls / 20 + 1);
    const double seconds = timed(&job, calls);
    if (rank == 0) {
      printf("%s %ld %ld %.4f\n", job.is_barrier ? "barrier" : "all_reduce", bytes, calls, 1e6 * seconds / (double)calls);
      fflush(stdout);
    }
  }
  if (!job.is_barrier) check(&job, rounds + 1);
  free(job.input);
  free(job.output);
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  for (int i = 3; i < argc; ++i) measure(argv[i], atoi(argv[1]), atof(argv[2]));
  MPI_Finalize();
  return 0;
}
