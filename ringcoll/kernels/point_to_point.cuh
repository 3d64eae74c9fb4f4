// Point-to-point: a rank's halves of any number of pairs in one launch.
//
// A *pair* is one rank that sends and one that receives, with a plan of two ranks (simple.cuh runs
// it), hellos, flags, a zone and a sequence number of its own; collectives' epochs are not touched.
// Call x of a pair may write to the peer's zone when both have entered call x - 1. A large message
// does when both have entered call x itself: the receiver's hello says where its buffer is mapped,
// or that the message is staged, in memory without halves. Words of a rank:
//
//     number of halves, then for each where its words begin
//     of a half: {peer 16, sends 1, calls 15, first CUDA block 16, CUDA blocks 16}, addresses of
//     its sequence numbers (0: a plain copy, which has no peer), of the peer's hellos, and of its
//     own at the peer
//     of each of its calls: {signature 32, record 32}, {replicas 16, replicas of the direct block
//     16 (0: a small message, IN_SCRATCH: staged in the large SCRATCH of copy engines), words 16,
//     words of both blocks 16}, the receive buffer as the sender maps it, and the words of its
//     block or blocks, staged and direct, see simple.cuh; they count bytes
//
// Both ends cut a call into the same `replicas`; the CUDA blocks that share them may differ. A
// block takes its replicas in order, so the lowest one that has not ended on both ends is always
// under way on both: no deadlock. A copy engine cannot take them in order: in the large SCRATCH a
// message has as many as its receiver has blocks, whose hello says so.
#pragma once

#include "simple.cuh"

namespace rc::pairs {

using simple::Bases;
using simple::Runner;
using simple::Share;
using simple::Shared;

constexpr u64 GONE_NS = 250'000'000;
constexpr u32 IN_SCRATCH = 0xffff;

// One CUDA block of a half.
struct Half : Call {
    u32 peer, calls, mine, blocks;
    bool sends;
    u64 sequence, inbound, outbound;
    u32 signature, record;
    bool large, scratch, direct;
    // The receive buffer as the sender maps it: mapping << 48 | offset; or 0. In SCRATCH: replicas.
    u64 mapped;
    u64 left_since;  // ns; when a wait found that the peer had left; 0: it is here

    RC_DEVICE Half(const Args& a, const Local& l, const u64* words, u32 block)
        : Call(a, l, 0),
          peer(words[0] & 0xffff),
          calls(words[0] >> 17 & 0x7fff),
          mine(block),
          blocks(words[0] >> 48),
          sends(words[0] >> 16 & 1),
          sequence(words[1]),
          inbound(words[2]),
          outbound(words[3]),
          signature(0),
          record(0),
          large(false),
          scratch(false),
          direct(false),
          mapped(0),
          left_since(0) {
        if (sequence != 0) epoch = ld_relaxed_sys_u64(sequence + mine * 8);
    }

    RC_DEVICE bool local_copy() const { return sequence == 0; }
    RC_DEVICE u32 step(u32 more) const { return STEP_PAIR | (sends ? PAIR_SENDS : 0) | more; }

    // Go on to the next call of the pair.
    RC_DEVICE void next(const u64* call) {
        ++epoch;
        signature = static_cast<u32>(call[0] >> 32);
        record = static_cast<u32>(call[0]);
        large = (call[1] >> 16 & 0xffff) != 0;
        scratch = (call[1] >> 16 & 0xffff) == IN_SCRATCH;
        mapped = scratch ? blocks : call[2];
        direct = large && !scratch && mapped != 0;  // of a sender: enter() says so
    }

    // Write the first report of this rank: the peer, the call and both records.
    RC_DEVICE void report(u32 kind, u32 more, u32 theirs) const {
        if (ld_relaxed_sys_u32(local.report) != 0 ||
            atom_exch_relaxed_gpu_u32(local.own + CLAIMED, 1) != 0)
            return;
        st_relaxed_sys_u32(local.report + 4, peer);
        st_relaxed_sys_u64(local.report + 8, epoch);
        st_relaxed_sys_u32(local.report + 16, step(more));
        st_relaxed_sys_u32(local.report + 20, theirs);
        st_relaxed_sys_u32(local.report + 28, record);
        fence_acq_rel_sys();
        st_relaxed_sys_u32(local.report, kind);
    }

    // On a mismatch the peer gets this rank's hello, so that it finds the same cause: block 0,
    // which sends hellos, may not have come so far and will not after this.
    RC_DEVICE void fail(u32 kind, u32 more, u32 theirs = 0) const {
        report(kind, more, theirs);
        if (kind == MISMATCH) send_hello();
        fence_acq_rel_sys();
        for (u32 p = 0; p < RC_RANKS; ++p) st_relaxed_sys_u32(local.peers[p] + BROKEN, 1);
    }

    // Whether a call has failed here or at a peer. Who found a mismatch stored both hellos before
    // it set BROKEN: compared again here, they give the cause.
    RC_DEVICE bool broken() const {
        if (ld_relaxed_sys_u32(local.own + BROKEN) == 0) return false;
        fence_acq_rel_sys();
        Vector hello;
        if (!local_copy() && arrived(ld_relaxed_sys_v4_u32(line(outbound, epoch)), flag()) &&
            peer_differs(hello))
            report(MISMATCH, 0, hello.z);
        else
            report(PEER_FAILED, 0, 0);
        return true;
    }

    // As Call's; the peer is known.
    RC_DEVICE bool await_flag(u64 at, u64 wanted, u32, u32) {
        for (u32 polls = 1; ld_relaxed_sys_u64(at) < wanted; ++polls) {
            if (unlikely(polls % POLLS_PER_CHECK == 0) && check_abort(polls, 0)) return false;
            pause();
        }
        fence_acq_rel_sys();
        return true;
    }

    // As Call's.
    RC_DEVICE bool check_abort(u32& polls, u32 more) {
        if (broken() || differs()) return true;
        const u64 time = globaltimer_ns();
        if (polls == POLLS_PER_CHECK) began = time;
        polls = POLLS_PER_CHECK;
        if (ld_relaxed_sys_u32(local.report + 24) != 0) {
            fail(ABORTED, more);
            return true;
        }
        // What a peer sent before it left has come since a check found it gone; and the host, which
        // looks every 100 ms, has had time to find that it goes on in a new thread.
        const bool here = ld_relaxed_sys_u32(local.report + LEFT_RANKS + peer * 4) == 0;
        if (here || left_since == 0) left_since = here ? 0 : time;
        const bool left = left_since != 0 && time - left_since > GONE_NS;
        if (!left && time - began < args.timeout) return false;
        fail(left ? LEFT : EXPIRED, more);
        return true;
    }

    RC_DEVICE u64 line(u64 lines, u64 when) const {
        return lines + (static_cast<u32>(when) & (HELLO_SLOTS - 1)) * 16;
    }

    // The line behind a hello: the receive buffer of a large message, or its replicas in SCRATCH.
    RC_DEVICE u64 buffer_line(u64 lines) const { return line(lines, epoch) + HELLO_SLOTS * 16; }

    // Store this rank's hello at the peer: that it has entered and which call it makes.
    RC_DEVICE void send_hello() const {
        if (large && !sends) st_relaxed_sys_ll(buffer_line(outbound), mapped, flag());
        st_relaxed_sys_ll(line(outbound, epoch), static_cast<u64>(record) << 32 | signature,
                          flag());
    }

    // Whether the peer's hello of this call is there and differs.
    RC_DEVICE bool peer_differs(Vector& hello) const {
        hello = ld_relaxed_sys_v4_u32(line(inbound, epoch));
        return arrived(hello, flag()) && hello.x != signature;
    }

    RC_DEVICE bool differs() const {
        Vector hello;
        if (!peer_differs(hello)) return false;
        fail(MISMATCH, 0, hello.z);
        return true;
    }

    // As Call's: enter() and leave() compare the peer's hello.
    RC_DEVICE bool await_same_calls(u32, u32) const { return true; }

    // Wait until a line of the peer's of call `when` of the pair has come; false: aborted.
    RC_DEVICE bool await_line(u64 at, u64 when, Vector& found) {
        for (u32 polls = 1;; ++polls) {
            found = ld_relaxed_sys_v4_u32(at);
            if (arrived(found, static_cast<u32>(when))) return true;
            if (unlikely(polls % POLLS_PER_CHECK == 0) &&
                check_abort(polls, when == epoch ? 0 : PAIR_ENTRY))
                return false;
            pause();
        }
    }

    RC_DEVICE bool await_hello(u64 when) {
        Vector hello;
        return await_line(line(inbound, when), when, hello);
    }

    // One thread of a sender, whose peer has entered: find the buffer that the peer's hello names.
    // Its row of the table may be written later than the peer learns that it can be used: the
    // symmetric memory was made while this launch was waiting.
    RC_DEVICE bool find_buffer(Bases& bases) {
        Vector buffer;
        if (!await_line(buffer_line(inbound), epoch, buffer)) return false;
        mapped = bases.at[0][0] = data_of(buffer);
        if (scratch) return true;
        const u64 row = (mapped >> 48) * RC_RANKS + peer;
        u64 start = 0;
        for (u32 polls = 1; mapped != 0 && start == 0; ++polls) {
            start = ld_relaxed_sys_u64(local.mappings + row * 8);
            if (unlikely(polls % POLLS_PER_CHECK == 0) && check_abort(polls, 0)) return false;
        }
        bases.at[1][0] = mapped == 0 ? 0 : start + (mapped & 0xffffffffffffull);
        return true;
    }

    // Every thread. A receiver waits for the sender's hello anyway and compares it at once; so does
    // the sender of a large message. That of a small one needs to know only that the peer has
    // entered the call before: then the half of the zone that it writes, last used two calls ago,
    // is free.
    RC_DEVICE bool enter(Bases& bases) {
        bool same = true;
        if (thread_index() == 0) {
            if (flag() == 0) {  // lines of 2^32 calls ago would be taken for this call's
                fail(EPOCH_WRAPPED, PAIR_ENTRY);
                same = false;
            } else {
                if (mine == 0) send_hello();
                const u64 when = sends && !large ? epoch - 1 : epoch;
                same = (when == 0 || await_hello(when)) && !differs();
                if (same && sends && large) same = find_buffer(bases);
                if (large) fence_acq_rel_sys();  // the peer is behind all that used the memory
            }
        }
        if (block_barrier_or(!same)) return false;
        if (sends && large) mapped = bases.at[0][0];
        direct = large && !scratch && mapped != 0;
        return true;
    }

    // Every thread, between two calls of one launch: wait until all blocks of the half have ended.
    RC_DEVICE bool await_blocks() {
        bool ok = true;
        count_call();
        for (u32 b = thread_index(); b < blocks; b += block_threads())
            ok = ok && await_flag(sequence + b * 8, epoch, peer, 0);
        return !block_barrier_or(!ok);
    }

    RC_DEVICE void count_call() const {
        block_barrier();
        if (thread_index() != 0) return;
        fence_acq_rel_sys();
        st_relaxed_sys_u64(sequence + mine * 8, epoch);
    }

    // Every thread, at the end of a block. A failed call is not counted.
    RC_DEVICE void leave(bool done) const {
        if (thread_index() == 0 && mine == 0 && done && sends) done = !differs();
        if (block_barrier_or(!done)) return;
        count_call();
        // The next launch may have more blocks: they must find the same epoch.
        if (mine == 0)
            for (u32 b = blocks + thread_index(); b < args.replicas; b += block_threads())
                st_relaxed_sys_u64(sequence + b * 8, epoch);
    }
};

// A share of a row, a plain copy: between absolute addresses, and the width of elements that both
// have, where their vectors of 16 bytes are not aligned.
struct Copy {
    u64 words[4];
    Share share;
    u32 width;

    RC_DEVICE Copy(const Share& given, const u64* chunks)
        : words{start(given, chunks), 0, start(given, chunks + 2), 0},
          share{given.local, given.bases, 0, 0, 0, given.first, given.count},
          width(1) {
        const u64 ends = words[0] | words[2], bits = ends | given.count;
        if (ends % 16 != 0)
            while (width < 8 && bits % (2 * width) == 0) width *= 2;
    }

    // Where a chunk's part of this slice begins.
    RC_DEVICE static u64 start(const Share& share, const u64* words) {
        const u64 at = words[0], meta = words[1], stride = meta >> 16;
        switch (static_cast<simple::Where>(meta & 3)) {
            case simple::Where::SCRATCH:
                return at + (meta & simple::WHOLE ? 0 : share.half) + share.slot * stride;
            case simple::Where::PEER: return share.bases.at[1][0] + at + share.slice * stride;
            default: return at + share.slice * stride;
        }
    }
};

// A share in bytes as one in wider elements, whose size divides all of it.
template <class Type>
RC_DEVICE Share elements(const Share& share) {
    constexpr u32 width = sizeof(typename Type::Raw);
    return {share.local, share.bases,         share.half,         share.slice,
            share.slot,  share.first / width, share.count / width};
}

// This block's replicas of a call.
template <class Program>
RC_DEVICE bool moved(Half& half, const u64* call) {
    Shared& shared = *block_memory<Shared>();
    const u64 counts = call[1] >> (half.direct ? 16 : 0);
    const u32 replicas = static_cast<u32>((half.scratch ? half.mapped : counts) & 0xffff);
    const u64* words = call + 3 + (half.direct ? call[1] >> 32 & 0xffff : 0);
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
    Shared& shared = *block_memory<Shared>();
    shared.clear();
    for (u32 number = 0; done && number < half.calls; ++number) {
        if (number != 0 && !half.local_copy()) done = half.await_blocks();
        half.next(call);
        if (number == 0) done = !block_barrier_or(thread_index() == 0 && half.broken());
        if (done && !half.local_copy()) done = half.enter(shared.bases);
        done = done && moved<Program>(half, call);
        call += 3 + (call[1] >> 48);
    }
    if (!half.local_copy()) half.leave(done);
}

// All halves of one rank; a CUDA block works on one of them, or on none.
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
