// Gates of a message whose sender's copies are a copy engine's: see copy_gates.cuh.
//
// The receiver runs its half as for any staged message (point_to_point.cuh), so the gates send the
// sender's hello and wait for the receiver's, post arrivals and await credits, a word a replica;
// the last counts the call. Words: those of a half with one call, without its blocks, then those of
// a gate, which posts one flag and awaits one at most.
#pragma once

#include "copy_gates.cuh"
#include "point_to_point.cuh"

namespace rc::pairs {

// A signal or wait with a word for each replica of the receiver, whose hello says how many.
struct Flags {
    u64 words[2];

    RC_DEVICE Flags(const Half& half, const u64* pair)
        : words{pair[0], (pair[1] & 0xffffffffu) | half.mapped << 32} {}
};

RC_DEVICE void run_gate(const Args& args, const Local& local) {
    const u64* gate = local.words + 7;
    const u32 what = gate[0] & 255, signals = gate[0] >> 32 & 0xffff;
    const u32 waits = static_cast<u32>(gate[0] >> 48);
    Half half(args, local, local.words, 0);
    half.next(local.words + 4);
    bool done = !block_barrier_or(thread_index() == 0 && half.broken());
    done = done && half.enter(block_memory<Shared>()->bases);
    const Flags posted(half, gate + 1), awaited(half, gate + 1 + 2 * signals);
    if (done) gates::signal(half, posted.words, signals);
    if (done) done = gates::wait(half, awaited.words, waits, 0);
    if (what & gates::LEAVE) half.leave(done);
}

}  // namespace rc::pairs
