/* What Open MPI does in the place of a group of Towline. Started by `towline bench comm` under mpirun.
 *
 * Rank 0 reads one order per line and answers with the seconds of one operation, of the slowest rank:
 *   reduce BYTES REPEATS    MPI_Allreduce of floats
 *   put COUNT               8 bytes there and back: MPI_Put and MPI_Win_flush into a locked window, seen by polling
 * Between orders nobody spins: the cores belong to whoever is measured then. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { QUIT, REDUCE, PUT };
enum { WARMUP = 200 };

static int rank, nranks;

/* Gives everybody the order of rank 0; who waits sleeps. */
static void pass_on(long order[3]) {
    if (rank == 0) {
        for (int peer = 1; peer < nranks; peer++) MPI_Send(order, 3, MPI_LONG, peer, 7, MPI_COMM_WORLD);
        return;
    }
    MPI_Request request;
    int here = 0;
    MPI_Irecv(order, 3, MPI_LONG, 0, 7, MPI_COMM_WORLD, &request);
    for (;;) {
        MPI_Test(&request, &here, MPI_STATUS_IGNORE);
        if (here) return;
        usleep(2000);
    }
}

static double reduce(long bytes, long repeats) {
    static float *send, *recv;
    static long size;
    if (size != bytes) {
        free(send);
        free(recv);
        send = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
        recv = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
        if (!send || !recv) MPI_Abort(MPI_COMM_WORLD, 1);
        memset(send, 0, bytes);
        memset(recv, 0, bytes);
        size = bytes;
        MPI_Allreduce(send, recv, bytes / 4, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    /* Others had the cores before. */
    for (long i = 0; i < repeats / 8; i++) MPI_Allreduce(send, recv, bytes / 4, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    double start = MPI_Wtime();
    for (long i = 0; i < repeats; i++) MPI_Allreduce(send, recv, bytes / 4, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    return (MPI_Wtime() - start) / repeats;
}

static double put(long count) {
    static MPI_Win window;
    static volatile long *mine;
    static long round;
    if (!mine) {
        void *base;
        MPI_Win_allocate(4096, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &base, &window);
        mine = base;
        *mine = 0;
        MPI_Win_lock_all(MPI_MODE_NOCHECK, window);
        MPI_Win_sync(window);
        MPI_Barrier(MPI_COMM_WORLD);
    }
    int peer = 1 - rank;
    double start = 0;
    for (long i = 0; i < WARMUP + count && rank < 2; i++) {
        if (i == WARMUP) start = MPI_Wtime();
        long number = ++round;
        for (int turn = 0; turn < 2; turn++) {
            if (turn == rank) {
                MPI_Put(&number, 8, MPI_BYTE, peer, 0, 8, MPI_BYTE, window);
                MPI_Win_flush(peer, window);
            } else {
                while (*mine < number) MPI_Win_sync(window);
            }
        }
    }
    return (MPI_Wtime() - start) / count;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);
    for (;;) {
        long order[3] = {QUIT, 0, 1};
        char line[128];
        if (rank == 0 && fgets(line, sizeof line, stdin)) {
            if (sscanf(line, "reduce %ld %ld", &order[1], &order[2]) == 2) order[0] = REDUCE;
            else if (sscanf(line, "put %ld", &order[1]) == 1) order[0] = PUT;
        }
        pass_on(order);
        if (order[0] == QUIT) break;
        double mine = order[0] == REDUCE ? reduce(order[1], order[2]) : put(order[1]), most = 0;
        MPI_Reduce(&mine, &most, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (rank == 0) {
            printf("%.9g\n", most);
            fflush(stdout);
        }
    }
    MPI_Finalize();
    return 0;
}
