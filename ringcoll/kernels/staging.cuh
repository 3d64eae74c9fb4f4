// A stream and the host hand pinned memory to each other: kernels of one thread between the copies.
//
// A piece is copied from the device to the host; SAY tells the host that it is there. The host works
// on it meanwhile, and AWAIT lets the copy back to the device come after that. The words lie in
// host-mapped memory, and the kernels count themselves, so that all pieces share one parameter.
//
// Copies before SAY are complete when it starts, so its fence puts them before the word. The copy
// after AWAIT starts when it has ended, after the fence that follows the look that found the word.
//
// Words: what; addresses of said, done, taken, failed (see executors/cuda_nodes/lane.py).
#pragma once

#include "program.cuh"

namespace rc::staging {

constexpr u32 SAY = 1, AWAIT = 2;
constexpr u32 LOOKS = 1024;  // looks at the host's memory between two looks at the clock

// One more piece is in the host's memory.
RC_DEVICE void say(u64 said) {
    fence();
    tell_wide(said, look_wide(said) + 1);
}

// Wait until the host has done one more piece. The host answers, whatever has gone wrong; the
// deadline is for a host that stands still: then `failed` holds the number of the piece, and no
// later wait begins.
RC_DEVICE void await(const Args& args, u64 done, u64 taken, u64 failed) {
    const u64 wanted = look_wide(taken) + 1;
    u64 began = 0;
    for (u32 looks = 1; look_wide(done) < wanted; ++looks) {
        if (rare(looks % LOOKS == 0)) {
            if (look_wide(failed) != 0) break;
            const u64 time = now();
            if (began == 0) began = time;
            if (time - began >= args.timeout) {
                tell_wide(failed, wanted);
                break;
            }
        }
        pause();
    }
    fence();
    tell_wide(taken, wanted);
}

RC_DEVICE void run(const Args& args) {
    const u64* words = args.local[0].words;
    if (thread_index() != 0) return;
    if (words[0] == SAY) say(words[1]);
    if (words[0] == AWAIT) await(args, words[2], words[3], words[4]);
}

}  // namespace rc::staging
