// Point-to-point: a rank's halves of any number of pairs in one launch.
//
// A *pair* is one rank that sends and one that receives, with a plan of two ranks (simple.cuh runs
// it), hellos, flags, a zone and a sequence number of its own; collectives' epochs are not touched.
// Call x of a pair may write to the peer when both have entered call x - 1. Words of a rank:
//
//     number of halves, then for each where its words begin
//     of a half: {peer 16, sends 1, calls 15, first CUDA block 16, CUDA blocks 16}, the sequence
//         numbers (0: a plain copy, which has no peer), the lines it hears, the lines it says
//     of each of its calls: {signature 32, record 32}, {replicas 32, words 32}, and so many words of
//         its block, see simple.cuh; they count bytes, and the kind of a row is how wide it may move
//
// A call is cut into `replicas` as both ends know; how many CUDA blocks of a rank share them is its
// own affair. A block takes its replicas in order, so the lowest one that has not ended on both ends
// is always under way on both.
#pragma once

#include "simple.cuh"

namespace rc::pairs {

using simple::Runner;
using simple::Share;
using simple::Shared;

// One CUDA block of a half.
struct Half : Call {
    u32 peer, calls, mine, blocks;
    bool sends;
    u64 sequence, hears, says;
    u32 signature, record;

    RC_DEVICE Half(const Args& a, const Local& l, const u64* words, u32 block)
        : Call(a, l, 0),
          peer(words[0] & 0xffff),
          calls(words[0] >> 17 & 0x7fff),
          mine(block),
          blocks(words[0] >> 48),
          sends(words[0] >> 16 & 1),
          sequence(words[1]),
          hears(words[2]),
          says(words[3]),
          signature(0),
          record(0) {
        if (sequence != 0) epoch = look_wide(sequence + mine * 8);
    }

    RC_DEVICE bool alone() const { return sequence == 0; }
    RC_DEVICE u32 step(u32 more) const { return STEP_PAIR | (sends ? PAIR_SENDS : 0) | more; }

    // Go on to the next call of the pair.
    RC_DEVICE void next(u64 word) {
        ++epoch;
        signature = static_cast<u32>(word >> 32);
        record = static_cast<u32>(word);
    }

    // Leave the first report of this rank: who was waited for, in which call, and both records.
    RC_DEVICE void note(u32 kind, u32 more, u32 theirs) const {
        if (look(local.report) != 0 || !claim(local.own + CLAIMED)) return;
        tell(local.report + 4, peer);
        tell_wide(local.report + 8, epoch);
        tell(local.report + 16, step(more));
        tell(local.report + 20, theirs);
        tell(local.report + 28, record);
        fence();
        tell(local.report, kind);
    }

    // Who finds that calls differ lets the peer see so too: block 0, which says hello, may not have
    // come so far, and would no more.
    RC_DEVICE void fail(u32 kind, u32 more, u32 theirs = 0) const {
        note(kind, more, theirs);
        if (kind == DIFFERENT) say_hello();
        fence();
        for (u32 p = 0; p < RC_RANKS; ++p) tell(local.peers[p] + BROKEN, 1);
    }

    // Both ends' hellos of this call are seen before a peer, or another block of this rank, tells
    // that they differ: whoever is told compares them then, or it would not know why.
    RC_DEVICE bool broken() const {
        if (look(local.own + BROKEN) == 0) return false;
        fence();
        Vector said;
        if (!alone() && arrived(ll_load(line(says, epoch)), flag()) && other(said))
            note(DIFFERENT, 0, said.z);
        else
            note(TOLD, 0, 0);
        return true;
    }

    // As Call's; simple.cuh knows neither the peer nor the half.
    RC_DEVICE bool reach(u64 at, u64 wanted, u32, u32) {
        for (u32 looks = 1; look_wide(at) < wanted; ++looks) {
            if (rare(looks % LOOKS == 0) && tired(looks, 0)) return false;
            pause();
        }
        fence();
        return true;
    }

    // Asked by whoever waits, every LOOKS looks; see Call's `late`.
    RC_DEVICE bool tired(u32& looks, u32 more) {
        if (broken() || differs()) return true;
        const u64 time = now();
        if (looks == LOOKS) began = time;
        looks = LOOKS;
        if (look(local.report + 24) != 0) {
            fail(GIVEN_UP, more);
            return true;
        }
        if (time - began < args.timeout) return false;
        fail(EXPIRED, more);
        return true;
    }

    RC_DEVICE u64 line(u64 lines, u64 when) const {
        return lines + (static_cast<u32>(when) & (HELLO_SLOTS - 1)) * 16;
    }

    // Tell the peer that this rank has entered, and which call it makes.
    RC_DEVICE void say_hello() const {
        ll_store(line(says, epoch), static_cast<u64>(record) << 32 | signature, flag());
    }

    // Whether the peer has entered this call and makes another one of it, as `said`.
    RC_DEVICE bool other(Vector& said) const {
        said = ll_load(line(hears, epoch));
        return arrived(said, flag()) && said.x != signature;
    }

    RC_DEVICE bool differs() const {
        Vector said;
        if (!other(said)) return false;
        fail(DIFFERENT, 0, said.z);
        return true;
    }

    // Wait until the peer has entered call `when` of the pair; false: gave up.
    RC_DEVICE bool hear(u64 when) {
        const u64 at = line(hears, when);
        for (u32 looks = 1; !arrived(ll_load(at), static_cast<u32>(when)); ++looks) {
            if (rare(looks % LOOKS == 0) && tired(looks, PAIR_ENTRY)) return false;
            pause();
        }
        return true;
    }

    // Every thread. Whoever receives has nothing to do before the sender is there, so it compares at
    // once; whoever sends needs to know only that the call before last has left the zone.
    RC_DEVICE bool enter() {
        bool met = true;
        if (thread_index() == 0) {
            if (flag() == 0) {  // lines of 2^32 calls ago would be taken for this call's
                fail(WORN, PAIR_ENTRY);
                met = false;
            } else {
                if (mine == 0) say_hello();
                const u64 when = sends ? epoch - 1 : epoch;
                met = (when == 0 || hear(when)) && !differs();
            }
        }
        return !block_any(!met);
    }

    // Every thread, between two calls of one launch: all blocks of the half have ended the call.
    RC_DEVICE bool settle() {
        bool settled = true;
        ended();
        for (u32 b = thread_index(); b < blocks; b += block_threads())
            settled = settled && reach(sequence + b * 8, epoch, peer, 0);
        return !block_any(!settled);
    }

    RC_DEVICE void ended() const {
        block_barrier();
        if (thread_index() != 0) return;
        fence();
        tell_wide(sequence + mine * 8, epoch);
    }

    // Every thread: the last thing that a block does. A failed call is never counted.
    RC_DEVICE void leave(bool done) const {
        if (thread_index() == 0 && mine == 0 && done && sends) done = !differs();
        if (block_any(!done)) return;
        ended();
        // Blocks that this launch does not have must not fall behind.
        if (mine == 0)
            for (u32 b = blocks + thread_index(); b < args.replicas; b += block_threads())
                tell_wide(sequence + b * 8, epoch);
    }
};

// A share of bytes as one of wider elements; all of it is a multiple of their size.
template <class Type>
RC_DEVICE Share elements(const Share& share) {
    constexpr u32 width = sizeof(typename Type::Raw);
    return {share.call, share.bases, share.slice, share.slot, share.first / width, share.count / width};
}

// This block's replicas of a call.
template <class Program>
RC_DEVICE bool moved(Half& half, u32 replicas, const u64* words) {
    Shared& shared = *block_memory<Shared>();  // without bases: nobody reaches a peer's arrays
    for (u32 replica = half.mine; replica < replicas; replica += half.blocks) {
        Runner<Half> runner{half, shared, replica, replicas};
        if (!runner.template run<UInt8, Program>(words)) return false;
    }
    return true;
}

// The calls of one half, one after the other.
template <class Program>
RC_DEVICE void run_half(Half& half, const u64* call) {
    bool done = true;
    block_memory<Shared>()->clear();
    for (u32 number = 0; done && number < half.calls; ++number) {
        if (number != 0 && !half.alone()) done = half.settle();
        half.next(call[0]);
        if (number == 0) done = !block_any(thread_index() == 0 && half.broken());
        if (done && !half.alone()) done = half.enter();
        done = done && moved<Program>(half, static_cast<u32>(call[1]), call + 2);
        call += 2 + (call[1] >> 32);
    }
    if (!half.alone()) half.leave(done);
}

// All halves of one rank; every CUDA block belongs to one of them, or to none.
template <class Program>
RC_DEVICE void run(const Args& args, const Local& local) {
    for (u32 number = 0; number < local.words[0]; ++number) {
        const u64* words = local.words + local.words[1 + number];
        const u32 first = words[0] >> 32 & 0xffff, blocks = words[0] >> 48;
        if (block_index() < first || block_index() - first >= blocks) continue;
        Half half(args, local, words, block_index() - first);
        return run_half<Program>(half, words + 4);
    }
}

}  // namespace rc::pairs
