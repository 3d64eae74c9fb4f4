// Pinned memory changes hands between a stream and the host: kernels of one thread between copies.
//
// A piece is copied from the device to the host, and POST counts it up for the host. AWAIT waits
// until the host has counted it as done, and the copy back to the device follows. The counts lie in
// host-mapped memory, and the kernels keep them, so that all pieces share one parameter.
//
// Copies before POST are complete when it starts, so its fence orders them before the count. The
// copy after AWAIT starts when it has ended, after its fence.
//
// Words: what; addresses of posted, done, taken, failed (see executors/cuda_nodes/lane.py).
#pragma once

#include "program.cuh"

namespace rc::staging {

constexpr u32 POST = 1, AWAIT = 2;
constexpr u32 POLLS_PER_CHECK = 1024;  // polls of the host's memory between two of the clock

// One more piece is in the host's memory.
RC_DEVICE void post(u64 posted) {
    fence_acq_rel_sys();
    st_relaxed_sys_u64(posted, ld_relaxed_sys_u64(posted) + 1);
}

// Wait until the host has done one more piece. The host counts it even after an error; the deadline
// is for a host that hangs: then `failed` holds the number of the piece, and no later wait begins.
RC_DEVICE void await(const Args& args, u64 done, u64 taken, u64 failed) {
    const u64 wanted = ld_relaxed_sys_u64(taken) + 1;
    u64 began = 0;
    for (u32 polls = 1; ld_relaxed_sys_u64(done) < wanted; ++polls) {
        if (unlikely(polls % POLLS_PER_CHECK == 0)) {
            if (ld_relaxed_sys_u64(failed) != 0) break;
            const u64 time = globaltimer_ns();
            if (began == 0) began = time;
            if (time - began >= args.timeout) {
                st_relaxed_sys_u64(failed, wanted);
                break;
            }
        }
        pause();
    }
    fence_acq_rel_sys();
    st_relaxed_sys_u64(taken, wanted);
}

RC_DEVICE void run(const Args& args) {
    const u64* words = args.local[0].words;
    if (thread_index() != 0) return;
    if (words[0] == POST) post(words[1]);
    if (words[0] == AWAIT) await(args, words[2], words[3], words[4]);
}

}  // namespace rc::staging
