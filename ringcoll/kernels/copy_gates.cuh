// Gates: kernels of one warp that wait and signal for the copies before and after them on a
// stream.
//
// A copy engine neither polls nor posts flags, so a lane of copies is a stream: gate, copies, gate,
// copies. (cuStreamWaitValue takes an immediate: it can read no epoch in device memory and has no
// deadline.) A gate starts when the copies before it are complete, so its fence orders them before
// the flag that it stores, as if it had written them itself: a peer that acquires the flag sees
// them. A copy starts when the gate before it has ended, after the fence behind the flag.
//
// The first gates of a call enter it and wait until every rank has; the last leaves it. A gate that
// aborts fails like any kernel, and those after it end at once; the copies between them still run
// and move what happens to be there, within the buffers of the call and SCRATCH.
//
// Words: head {what 8, step 24, signals 16, waits 16}, then each signal and wait in two words:
// address of the flag; {count 32, words 16, peer 16}. A block of a kernel has a word a replica.
#pragma once

#include "call.cuh"

namespace rc::gates {

constexpr u32 ENTER = 1, WAIT_ALL = 2, LEAVE = 4;

// One flag of a signal or wait, by number; `there`: the other side has that replica.
struct Word {
    u64 at, value;
    u32 peer;
    bool there;

    RC_DEVICE Word(const Call& call, const u64* pairs, u32 number) {
        const u32 replica = number % call.args.replicas;
        const u64* pair = pairs + 2 * (number / call.args.replicas);
        at = pair[0] + replica * 8;
        value = call.epoch << 32 | (pair[1] & 0xffffffffu);
        peer = static_cast<u32>(pair[1] >> 48);
        there = replica < (pair[1] >> 32 & 0xffff);
    }
};

// Enter the call and send the hellos; false: aborted.
RC_DEVICE bool enter(Call& call) {
    if (block_barrier_or(!call.enter(true))) return false;
    for (u32 p = thread_index(); p < RC_RANKS; p += block_threads()) call.send_hello(p, 1);
    return true;
}

// Wait until all ranks have entered and make this call; false: aborted.
RC_DEVICE bool await_all(Call& call) {
    bool same = true;
    for (u32 p = thread_index(); p < RC_RANKS; p += block_threads())
        if (p != call.local.rank) same = call.await_same_call(p) && same;
    // Hellos are relaxed, and the copies after this read what peers' streams wrote before the call.
    if (thread_index() < RC_RANKS) fence_acq_rel_sys();
    return !block_barrier_or(!same);
}

RC_DEVICE void signal(const Call& call, const u64* pairs, u32 count) {
    const u32 words = count * call.args.replicas;
    if (thread_index() < words) fence_acq_rel_sys();
    for (u32 k = thread_index(); k < words; k += block_threads()) {
        const Word word(call, pairs, k);
        if (word.there) st_relaxed_sys_u64(word.at, word.value);
    }
}

// `Calling`: a Call, or what is one.
template <class Calling>
RC_DEVICE bool wait(Calling& call, const u64* pairs, u32 count, u32 step) {
    bool ok = true;
    const u32 words = count * call.args.replicas;
    for (u32 k = thread_index(); ok && k < words; k += block_threads()) {
        const Word word(call, pairs, k);
        if (word.there) ok = call.await_flag(word.at, word.value, word.peer, step);
    }
    return !block_barrier_or(!ok);
}

// What the words of the gate ask for, in this order.
RC_DEVICE void run(const Args& args, const Local& local) {
    Call call(args, local);
    const u64 head = local.words[0];
    const u32 what = head & 255, step = head >> 8 & 0xffffff;
    const u32 signals = head >> 32 & 0xffff, waits = static_cast<u32>(head >> 48);
    bool done = what & ENTER ? enter(call) : !block_barrier_or(call.must_not_begin());
    if (done && what & WAIT_ALL) done = await_all(call);
    if (done) signal(call, local.words + 1, signals);
    if (done) done = wait(call, local.words + 1 + 2 * signals, waits, step);
    if (done && what & LEAVE) call.leave(0, block_threads());
}

}  // namespace rc::gates
