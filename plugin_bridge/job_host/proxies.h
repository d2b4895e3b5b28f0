/* NCCL's proxy threads. A real kernel waits for what they send; one of the virtual GPU does not, so a host
 * that never waits would run ahead of them without end. */
#ifndef DYNAMICCL_JOB_PROXIES_H
#define DYNAMICCL_JOB_PROXIES_H

/* Waits until those of this process have nothing to do, at most PROXIES_WAIT_MS. They are known by the name
 * that they have with NCCL_SET_THREAD_NAME=1; without, there is nothing to wait for. */
#define PROXIES_WAIT_MS 5000
void proxies_wait(void);

#endif
