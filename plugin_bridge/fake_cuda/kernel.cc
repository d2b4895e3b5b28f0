// Reads what NCCL launches, as the beginning of every kernel does (src/device/common.h), with the structures
// of the very tree that it is built with.
#include "comm.h" // NCCL's
#include "device.h"

#include "kernel.h"

#include <algorithm>
#include <bitset>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "../gpu/gpu.h"
#include "cuda_api.h"
#include "fifo.h"

namespace {

struct Function {
    int func, algo, proto, element_bytes;
};

// By NCCL's device function id; made from the comments of its generated table (functions.py).
const Function functions[] = {
#include "functions.inc"
};

static_assert(sizeof(ncclDevProfiler) == sizeof(gpu_counters), "counters are as the virtual GPU has them");
static_assert(MAX_PROFILER_EVENTS_PER_CHANNEL == GPU_COUNTERS && MAXCHANNELS <= GPU_MAX_CHANNELS, "likewise");

enum Stub : unsigned char { DEVICE_KERNEL = 1, SYMMETRIC_KERNEL = 2 }; // the byte behind a stub, see stubs.py

struct Launched {
    const unsigned char *stub;
    std::vector<char> arguments;
    ncclDevKernelArgs *args() {
        return reinterpret_cast<ncclDevKernelArgs *>(arguments.data());
    }
};

// Everything that one kernel holds, before it is laid out for the player.
struct Reader {
    Launched &launched;
    ncclDevKernelArgs &args;
    ncclKernelComm &comm;
    std::vector<gpu_work> works;
    std::vector<gpu_batch> batches;
    std::vector<gpu_member> members;
    std::map<uint32_t, int> work_at; // offset -> index into works

    explicit Reader(Launched &l) : launched(l), args(*l.args()), comm(*args.comm) {}

    const char *work_memory(uint32_t offset) const {
        if (args.workStorageType == ncclDevWorkStorageTypeArgs)
            return launched.arguments.data() + offset;
        return static_cast<const char *>(args.workBuf) + (offset & args.workMask);
    }

    void read() {
        auto *first = reinterpret_cast<ncclDevWorkBatch *>(&args + 1);
        int block = 0;
        for (int channel = 0; channel < MAXCHANNELS; channel++)
            if (args.channelMask >> channel & 1)
                read_channel(first, block++, channel);
    }

    void read_channel(const ncclDevWorkBatch *batches_at, int index, int channel) {
        bool extends = false;
        for (;;) {
            const ncclDevWorkBatch &batch = batches_at[index];
            if (!extends)
                batches.push_back({static_cast<uint8_t>(channel), static_cast<uint16_t>(members.size()), 0});
            uint32_t size =
                static_cast<uint32_t>(ncclDevWorkSize(static_cast<ncclDevWorkType>(batch.workType)));
            for (uint64_t left = batch.offsetBitset; left != 0; left &= left - 1)
                read_work(batch, batch.offsetBase + static_cast<uint32_t>(__builtin_ctzll(left)) * size,
                          channel);
            if (batch.nextJump == 0)
                return;
            extends = batch.nextExtends;
            index += batch.nextJump;
        }
    }

    void read_work(const ncclDevWorkBatch &batch, uint32_t offset, int channel) {
        const Function &function = functions[batch.funcId];
        const char *at = work_memory(offset);
        float share = 1;
        bool is_new = work_at.emplace(offset, static_cast<int>(works.size())).second;
        if (is_new)
            works.push_back({});
        int index = work_at[offset];
        switch (static_cast<int>(batch.workType)) {
        case ncclDevWorkTypeP2p:
            if (is_new)
                transfer(*reinterpret_cast<const ncclDevWorkP2p *>(at), works[index]);
            break;
        case ncclDevWorkTypeColl:
        case ncclDevWorkTypeCollReg:
            if (is_new)
                collective(*reinterpret_cast<const ncclDevWorkColl *>(at), function, works[index]);
            share = share_of(*reinterpret_cast<const ncclDevWorkColl *>(at), function, channel);
            break;
        default: // broadcasts of several roots in one kernel, each in parts: together they are one collective
            if (is_new && works.size() > 1)
                works.pop_back();
            work_at[offset] = index = 0;
            works[0].func = 0;
            works[0].algo = static_cast<uint8_t>(function.algo);
            works[0].proto = static_cast<uint8_t>(function.proto);
            works[0].channels = static_cast<uint8_t>(__builtin_popcountll(args.channelMask));
            works[0].bytes += broadcast_bytes(at);
            // Each part counts as work of the channel.
            share = batches.back().count == 0 ? 1 : 0;
        }
        members.push_back({static_cast<uint16_t>(index), share});
        batches.back().count++;
    }

    static uint64_t broadcast_bytes(const char *at) {
#ifdef DYNAMICCL_HAS_BCAST_WORK
        return reinterpret_cast<const ncclDevWorkBcast *>(at)->bytes;
#else
        (void)at;
        return 0;
#endif
    }

    void transfer(const ncclDevWorkP2p &work, gpu_work &out) const {
        out.func = GPU_FUNC_SEND_RECV;
        out.send_peer = work.nSendChannels ? work.sendRank : -1;
        out.recv_peer = work.nRecvChannels ? work.recvRank : -1;
        out.send_bytes = work.sendBytes;
        out.recv_bytes = work.recvBytes;
        out.bytes = std::max(out.send_bytes, out.recv_bytes);
        out.channels = std::max(work.nSendChannels, work.nRecvChannels);
        out.profiled = work.profilerEnabled;
    }

    bool evenly_divided(const Function &function) const {
        return function.algo == NCCL_ALGO_COLLNET_DIRECT || function.algo == NCCL_ALGO_COLLNET_CHAIN ||
               (function.algo == NCCL_ALGO_NVLS && comm.nNodes > 1);
    }

    void collective(const ncclDevWorkColl &work, const Function &function, gpu_work &out) const {
        int channels = static_cast<int>(work.channelHi) - static_cast<int>(work.channelLo) + 1;
        uint64_t count = work.cbd.countLo + work.cbd.countMid * std::max(0, channels - 2) + work.cbd.countHi;
        uint64_t grains =
            work.cbd.countMid && channels > 2 ? work.cbd.chunkGrainsMid : work.cbd.chunkGrainsLo;
        uint64_t chunk = grains * static_cast<uint64_t>(ncclProtoGrainSize(function.proto));
        auto element = static_cast<uint64_t>(function.element_bytes);
        if (evenly_divided(function)) {
            count = work.collnet.count;
            chunk = work.collnet.chunkCount * element;
        }
        bool per_rank = function.func == ncclFuncAllGather || function.func == ncclFuncReduceScatter;
        out.func = static_cast<uint8_t>(function.func);
        out.algo = static_cast<uint8_t>(function.algo);
        out.proto = static_cast<uint8_t>(function.proto);
        out.channels = static_cast<uint8_t>(channels);
        out.bytes = count * element * static_cast<uint64_t>(per_rank ? comm.nRanks : 1);
        out.chunk_bytes = static_cast<uint32_t>(chunk);
        out.send_peer = out.recv_peer = -1;
        out.profiled = work.profilerEnabled;
    }

    float share_of(const ncclDevWorkColl &work, const Function &function, int channel) const {
        if (evenly_divided(function))
            return 1;
        size_t most = std::max({work.cbd.countLo, work.cbd.countMid, work.cbd.countHi}),
               here = work.cbd.countMid;
        if (channel == static_cast<int>(work.channelLo))
            here = work.cbd.countLo;
        else if (channel == static_cast<int>(work.channelHi))
            here = work.cbd.countHi;
        return most ? static_cast<float>(here) / static_cast<float>(most) : 1;
    }
};

template <typename T> T *copied(const std::vector<T> &from) {
    auto *to = static_cast<T *>(malloc(from.size() * sizeof(T) + 1));
    if (to == nullptr)
        abort();
    if (!from.empty())
        memcpy(to, from.data(), from.size() * sizeof(T));
    return to;
}

// What the proxies of this rank wait for, on the channels of a kernel.
void connect_fifos(const ncclDevKernelArgs &args, const ncclKernelComm &comm) {
    for (int c = 0; c < MAXCHANNELS; c++) {
        if (!(args.channelMask >> c & 1))
            continue;
        ncclDevChannelPeer **peers = comm.channels[c].peers;
        for (int peer = 0; peers && peer <= comm.nRanks; peer++) {
            if (peers[peer] == nullptr)
                continue;
            for (int i = 0; i < NCCL_MAX_CONNS; i++) {
                const ncclConnInfo &send = peers[peer]->send[i], &receive = peers[peer]->recv[i];
                if (send.connFifo && send.tail)
                    fake::feed(&send.connFifo[0].size, NCCL_STEPS, sizeof send.connFifo[0], send.tail);
                if (receive.connFifo && receive.head)
                    fake::drain(receive.head);
            }
        }
    }
}

void parse(void *argument, gpu_kernel *kernel) {
    Launched &launched = *static_cast<Launched *>(argument);
    if (launched.stub[1] != DEVICE_KERNEL)
        return;
    Reader reader(launched);
    reader.read();
    connect_fifos(reader.args, reader.comm);
    kernel->comm = gpu_comm_find(reader.args.comm);
    kernel->abort = const_cast<uint32_t *>(reader.comm.abortFlag);
    kernel->started = reinterpret_cast<gpu_counters *>(reader.comm.workStarted);
    kernel->completed = reinterpret_cast<gpu_counters *>(reader.comm.workCompleted);
    for (int c = 0; c < MAXCHANNELS; c++)
        if (reader.args.channelMask >> c & 1)
            kernel->work_counter[c] =
                &reinterpret_cast<ncclKernelCommAndChannels *>(reader.args.comm)->channels[c].workCounter;
    kernel->works = copied(reader.works);
    kernel->batches = copied(reader.batches);
    kernel->members = copied(reader.members);
    kernel->n_works = static_cast<uint32_t>(reader.works.size());
    kernel->n_batches = static_cast<uint32_t>(reader.batches.size());
    kernel->n_members = static_cast<uint32_t>(reader.members.size());
}

void release(void *argument) {
    delete static_cast<Launched *>(argument);
}

} // namespace

namespace fake {

void launch_kernel(gpu_stream *stream, const void *function, const void *arguments, size_t bytes) {
    auto *launched = new Launched{static_cast<const unsigned char *>(function), {}};
    auto *from = static_cast<const char *>(arguments);
    launched->arguments.assign(from, from + bytes);
    gpu_launch(stream, parse, release, launched);
}

} // namespace fake

// See ../gpu/gpu.h.
API void gpu_comm_identity(const void *nccl_comm, const void **key, uint64_t *id) {
    auto *comm = static_cast<const ncclComm *>(nccl_comm);
    *key = comm->devComm;
    *id = comm->commHash;
}
