/* The job's reports of its steps. */
#include "stress.h"

#define REPORTS_READ 2000

static _Atomic int listening;

static void *report_steps(void *seg) {
    uint64_t random = 1;
    for (uint64_t step = 1; atomic_load(&listening); step++) {
        dcc_report_step(seg, step, step * 3, (double)step / 2);
        dawdle(&random);
    }
    return NULL;
}

void test_job(uint64_t seed) {
    struct comm *comm = comm_attach_profiler(6, CHILDREN_GPU, 6, "job", 1, 2, 0, NULL);
    if (!comm || !comm->seg)
        fail("job: no channel");
    struct dcc_job_view view;
    if (!dcc_job(comm->seg, &view) || view.reports || view.faults)
        fail("job: a report before the first");
    pthread_t thread;
    atomic_store(&listening, 1);
    pthread_create(&thread, NULL, report_steps, comm->seg);
    for (uint64_t read = 0, last = 0; read < REPORTS_READ;) {
        dawdle(&seed);
        if (!dcc_job(comm->seg, &view) || view.reports == 0)
            continue;
        if (view.step != view.reports || view.iteration_ns != view.step * 3 ||
            view.loss != (double)view.step / 2 || view.step < last)
            fail("job: report %llu is of step %llu, %llu ns, loss %g, after %llu",
                 (unsigned long long)view.reports, (unsigned long long)view.step,
                 (unsigned long long)view.iteration_ns, view.loss, (unsigned long long)last);
        read += view.step != last;
        last = view.step;
    }
    atomic_store(&listening, 0);
    pthread_join(thread, NULL);
    comm_detach_profiler(comm);
    printf("job: %d reports, none of them read in parts\n", REPORTS_READ);
}
