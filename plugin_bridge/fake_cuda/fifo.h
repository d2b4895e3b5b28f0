// The kernel's end of the FIFOs between kernels and NCCL's proxy threads.
//
// No kernel fills or empties a buffer here. Instead a sender's slots always hold a message of no bytes, which
// needs no flags in any protocol, and a receiver has always read far ahead: so the proxies run through all of
// their steps, over real sockets, as fast as they can.
#ifndef DYNAMICCL_FAKE_CUDA_FIFO_H
#define DYNAMICCL_FAKE_CUDA_FIFO_H

#include <cstddef>
#include <cstdint>

namespace fake {

// `size` is the first of `slots` words, `stride` bytes apart, which the proxy sets to -1 when it wants the
// next message.
void feed(volatile void *size, int slots, size_t stride, volatile uint64_t *tail);
void drain(volatile uint64_t *head);
// Nothing at these addresses is touched from now on. Memory that is shared goes on being fed: the proxy of
// another process may still send from it, and here its kernel has ended long ago.
void forget(const void *base, size_t bytes);

} // namespace fake
#endif
