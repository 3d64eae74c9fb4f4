// Gates: kernels of one block that wait and signal for the copies before and after them on a stream.
//
// A copy engine knows no flags, so a lane of copies is a stream: gate, copies, gate, copies. Streams
// carry the order of memory to the flags. A gate starts when the copies before it are complete, so
// its fence puts them before the flag that it stores, as if it had written them itself: a peer that
// acquires the flag sees them. A copy starts when the gate before it has ended, after the fence that
// follows the look that found the flag: it reads, and overwrites, only what is free by then.
//
// The first gates of a call enter it and hear that every rank has; the last leaves it. A gate that
// gives up fails like any kernel, and those after it end at once; the copies between them still run
// and move what happens to be there, within the buffers of the call and SCRATCH.
//
// Words: head {what 8, step 24, signals 16, waits 16}, then each signal and wait in two words:
// address of the flag; {count 32, words 16, peer 16}. A block of a kernel has a word a replica.
#pragma once

#include "call.cuh"

namespace rc::gates {

constexpr u32 ENTER = 1, MEET = 2, LEAVE = 4;

// One word of a signal or wait, by number; `there`: the other side has so many.
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

// Tell peers that this rank has entered; false: gave up.
RC_DEVICE bool enter(Call& call) {
    if (block_any(!call.enter(true))) return false;
    for (u32 p = thread_index(); p < RC_RANKS; p += block_threads())
        call.say_hello(p, 1);
    return true;
}

// Wait until all ranks have entered and make this call; false: gave up.
RC_DEVICE bool meet(Call& call) {
    bool met = true;
    for (u32 p = thread_index(); p < RC_RANKS; p += block_threads())
        if (p != call.local.rank) met = call.agree(p) && met;
    // Hellos order nothing, and the copies after this read what peers' streams wrote before it.
    if (thread_index() < RC_RANKS) fence();
    return !block_any(!met);
}

RC_DEVICE void signal(const Call& call, const u64* pairs, u32 count) {
    const u32 words = count * call.args.replicas;
    for (u32 k = thread_index(); k < words; k += block_threads()) {
        const Word word(call, pairs, k);
        if (!word.there) continue;
        fence();
        tell_wide(word.at, word.value);
    }
}

RC_DEVICE bool wait(Call& call, const u64* pairs, u32 count, u32 step) {
    bool reached = true;
    const u32 words = count * call.args.replicas;
    for (u32 k = thread_index(); reached && k < words; k += block_threads()) {
        const Word word(call, pairs, k);
        if (word.there) reached = call.reach(word.at, word.value, word.peer, step);
    }
    return !block_any(!reached);
}

// A gate: enter, meet, signal, wait, leave, whatever of it its words ask for.
RC_DEVICE void run(const Args& args, const Local& local) {
    Call call(args, local);
    const u64 head = local.words[0];
    const u32 what = head & 255, step = head >> 8 & 0xffffff;
    const u32 signals = head >> 32 & 0xffff, waits = static_cast<u32>(head >> 48);
    bool done = what & ENTER ? enter(call) : !block_any(call.barred());
    if (done && what & MEET) done = meet(call);
    if (done) signal(call, local.words + 1, signals);
    if (done) done = wait(call, local.words + 1 + 2 * signals, waits, step);
    if (done && what & LEAVE) call.leave(0, block_threads());
}

}  // namespace rc::gates
