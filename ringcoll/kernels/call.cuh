// A call as each CUDA block sees it: its epoch, the ranks' hellos, deadlines and failures.
#pragma once

#include "program.cuh"

namespace rc {

constexpr u32 LOOKS = 1024;  // looks at memory between two looks at the clock

struct Call {
    const Args& args;
    const Local& local;
    u64 epoch;
    u64 known;
    u64 began;  // ns; 0 until a wait has taken long

    RC_DEVICE Call(const Args& a, const Local& l) : args(a), local(l), began(0) {
        const u64 at = l.progress + block_index() * sizeof(Progress);
        const Progress before = load<Progress>(at);
        epoch = before.epoch + 1;
        known = before.known;
    }

    RC_DEVICE u32 flag() const { return static_cast<u32>(epoch); }
    RC_DEVICE u64 half() const { return (epoch & 1) * args.half; }
    RC_DEVICE u64 arena() const { return local.peers[local.rank]; }

    // Whether a call has failed here or at a peer; then the host learns that this one did too.
    RC_DEVICE bool broken() const {
        if (look(arena() + BROKEN) == 0) return false;
        if (look(local.report) == 0) {
            tell_wide(local.report + 8, epoch);
            fence();
            tell(local.report, TOLD);
        }
        return true;
    }

    // Whether flags begin anew: lines of 2^32 calls ago would be taken for this call's.
    RC_DEVICE bool worn() const {
        if (flag() != 0) return false;
        fail(WORN, local.rank, STEP_HELLO);
        return true;
    }

    // Note what went wrong for the host, and stop this rank and its peers.
    RC_DEVICE void fail(u32 kind, u32 peer, u32 step, u32 launch = 0) const {
        tell(local.report + 4, peer);
        tell_wide(local.report + 8, epoch);
        tell(local.report + 16, step);
        tell(local.report + 20, launch);
        fence();
        tell(local.report, kind);
        for (u32 p = 0; p < RC_RANKS; ++p) tell(local.peers[p] + BROKEN, 1);
    }

    // To be asked every LOOKS looks: whether to give up waiting for `peer` at `step`.
    RC_DEVICE bool late(u32 peer, u32 step) {
        if (broken()) return true;
        const u64 time = now();
        if (began == 0) began = time;
        if (look(local.report + 24) != 0) {
            fail(GIVEN_UP, peer, step);
            return true;
        }
        if (time - began < args.timeout) return false;
        fail(EXPIRED, peer, step);
        return true;
    }

    RC_DEVICE static u64 hello_at(u64 arena, u64 epoch, u32 source, u32 line) {
        const u32 slot = static_cast<u32>(epoch) & (HELLO_SLOTS - 1);
        return arena + HELLOS + ((slot * RC_RANKS + source) * HELLO_LINES + line) * 16;
    }

    // Tell `peer` that this rank has entered and which call it makes; with all lines also where its
    // buffers are.
    RC_DEVICE void say_hello(u32 peer, u32 lines) const {
        const u64 to = local.peers[peer];
        const u64 said = static_cast<u64>(args.launch) << 32 | args.signature;
        ll_store(hello_at(to, epoch, local.rank, 0), said, flag());
        for (u32 line = 1; line < lines; ++line)
            ll_store(hello_at(to, epoch, local.rank, line), local.hello[line - 1], flag());
    }

    // Wait for a line of a peer's hello at epoch `when`; false: gave up.
    RC_DEVICE bool hear(u32 peer, u64 when, u32 line, u64& said) {
        const u64 at = hello_at(arena(), when, peer, line);
        for (u32 looks = 1;; ++looks) {
            const Vector v = ll_load(at);
            if (arrived(v, static_cast<u32>(when))) {
                said = data_of(v);
                return true;
            }
            if (looks % LOOKS == 0 && late(peer, STEP_HELLO)) return false;
            pause();
        }
    }

    // Wait for a peer's hello at this epoch; false: it makes another call, or gave up.
    RC_DEVICE bool agree(u32 peer) {
        u64 said;
        if (!hear(peer, epoch, 0, said)) return false;
        if (static_cast<u32>(said) == args.signature) return true;
        fail(DIFFERENT, peer, STEP_HELLO, static_cast<u32>(said >> 32));
        return false;
    }

    // Every thread: before its first access to a peer's memory. Call x may write to peers only
    // when all ranks are known to have entered call x - 1. False: gave up. A peer may fail between
    // two looks, so threads of a block may differ: they must meet before they part at a barrier.
    RC_DEVICE bool enter(u32 first, u32 count) {
        bool heard = !broken() && !worn();
        if (known + 1 >= epoch) return heard;
        u64 said;
        const u32 lane = thread_index() - first;
        for (u32 p = lane; lane < count && p < RC_RANKS; p += count)
            heard = heard && (p == local.rank || hear(p, epoch - 1, 0, said));
        return !block_any(!heard);
    }

    // Every thread: the last thing that a block does. A failed call is never counted.
    RC_DEVICE void leave(bool done) {
        if (block_any(!done)) return;
        const u64 now_known = args.total ? epoch : (known + 1 >= epoch ? known : epoch - 1);
        const Progress after = {epoch, now_known};
        if (thread_index() == 0) store(local.progress + block_index() * sizeof(Progress), after);
        // Blocks that this launch does not have must not fall behind.
        if (block_index() == 0)
            for (u32 b = grid_blocks() + thread_index(); b < MOST_BLOCKS; b += block_threads())
                store(local.progress + b * sizeof(Progress), after);
    }
};

}  // namespace rc
