// A call as each CUDA block sees it: its epoch, the ranks' hellos, deadlines and failures.
#pragma once

#include "program.cuh"

namespace rc {

// Reading the clock and the abort word costs as much as many polls, and a deadline of seconds
// bears a check every millisecond or so.
constexpr u32 POLLS_PER_CHECK = 1024;

RC_DEVICE u64 hello_at(u64 workspace, u64 epoch, u32 source, u32 line) {
    const u32 slot = static_cast<u32>(epoch) & (HELLO_SLOTS - 1);
    const u32 lines = HELLO_LINES + FACTOR_LINES;
    return workspace + HELLOS + ((slot * RC_RANKS + source) * lines + line) * 16;
}

// Report to the host what went wrong at call `when`, which is `epoch` or the one before, and stop
// this rank and its peers; PEER_FAILED came from a peer, so the others know. `mine` and `theirs`:
// launches.
//
// Many threads may fail at once: the first to exchange CLAIMED writes the whole report. It also
// writes this rank's hello, for the host compares the hellos of all ranks and this call may have
// failed before it sent its own. On a mismatch the peers get that hello too, so that they find the
// same cause: block 0, which sends hellos, may not have come so far and will not after this.
RC_APART static void fail(const Args& args, const Local& local, u64 epoch, u64 when, u32 kind,
                          u32 peer, u32 step, u32 mine, u32 theirs) {
    const u64 hello = static_cast<u64>(local.launch) << 32 | args.signature;
    if (atom_exch_relaxed_gpu_u32(local.own + CLAIMED, 1) == 0) {
        st_relaxed_sys_ll(hello_at(local.own, epoch, local.rank, 0), hello,
                          static_cast<u32>(epoch));
        st_relaxed_sys_u32(local.report + 4, peer);
        st_relaxed_sys_u64(local.report + 8, when);
        st_relaxed_sys_u32(local.report + 16, step);
        st_relaxed_sys_u32(local.report + 20, theirs);
        st_relaxed_sys_u32(local.report + 28, mine);
        fence_acq_rel_sys();
        st_relaxed_sys_u32(local.report, kind);
    }
    if (kind == PEER_FAILED) return;
#pragma unroll 1
    for (u32 p = 0; p < RC_RANKS; ++p) {
        if (kind == MISMATCH && when == epoch)
            st_relaxed_sys_ll(hello_at(local.peers[p], epoch, local.rank, 0), hello,
                              static_cast<u32>(epoch));
        fence_acq_rel_sys();
        st_relaxed_sys_u32(local.peers[p] + BROKEN, 1);
    }
}

// Whether to stop waiting for `peer` at `step` after `waited` ns: a deadline, an abort by the host,
// a failure at a peer, or a rank that has left and never enters this call.
RC_APART static bool should_abort(const Args& args, const Local& local, u64 epoch, u64 time,
                                  u64 waited, u32 peer, u32 step) {
    u32 kind = waited < args.timeout ? 0 : EXPIRED, theirs = 0;
    if (ld_relaxed_sys_u32(local.report + 24) != 0) kind = ABORTED;
    // A rank that makes another call never sends what is awaited: compare one hello each time.
    const u32 other = static_cast<u32>(time >> 10) % RC_RANKS;
    const u32 left = ld_relaxed_sys_u32(local.report + LEFT_RANKS + other * 4);
    if (left != 0 && epoch >= left) kind = LEFT, peer = other;
    const Vector hello = ld_relaxed_sys_v4_u32(hello_at(local.own, epoch, other, 0));
    if (arrived(hello, static_cast<u32>(epoch)) && hello.x != args.signature) {
        kind = MISMATCH, peer = other, step = STEP_HELLO, theirs = hello.z;
    }
    if (ld_relaxed_sys_u32(local.own + BROKEN) != 0) kind = PEER_FAILED;
    if (kind == 0) return false;
    fail(args, local, epoch, epoch, kind, peer, step, local.launch, theirs);
    return true;
}

struct Call {
    const Args& args;
    const Local& local;
    u64 epoch;
    u64 known;
    u64 began;  // ns; when the wait under way was found to be long

    RC_DEVICE Call(const Args& a, const Local& l) : args(a), local(l), began(0) {
        const u64 at = l.progress + block_index() * sizeof(Progress);
        const Progress before = load<Progress>(at);
        epoch = before.epoch + 1;
        known = before.known;
    }

    // Of a send or receive, whose epoch is its pair's.
    RC_DEVICE Call(const Args& a, const Local& l, u64 e)
        : args(a), local(l), epoch(e), known(e), began(0) {}

    RC_DEVICE u32 flag() const { return static_cast<u32>(epoch); }
    // Two halves are enough: a peer in call x + 1 writes the other one, and call x + 2 begins
    // nowhere before this rank has entered x + 1 and so ended x.
    RC_DEVICE u64 half() const { return (epoch & 1) * args.half; }

    // Whether a call has failed here or at a peer, or the 32-bit flags wrap: lines of 2^32 calls
    // ago would be taken for this call's.
    RC_DEVICE bool must_not_begin() const {
        const bool broken = ld_relaxed_sys_u32(local.own + BROKEN) != 0;
        if (!unlikely(broken || flag() == 0)) return false;
        fail(epoch, broken ? PEER_FAILED : EPOCH_WRAPPED, local.rank, STEP_HELLO, local.launch, 0);
        return true;
    }

    RC_DEVICE void fail(u64 when, u32 kind, u32 peer, u32 step, u32 mine, u32 theirs) const {
        rc::fail(args, local, epoch, when, kind, peer, step, mine, theirs);
    }

    // Called every POLLS_PER_CHECK polls of a wait for `peer` at `step`. The timeout of a wait
    // begins with its first check: waits before it have ended, which is progress. `polls` starts
    // again behind that count, so that only the first check starts the clock.
    RC_DEVICE bool check_abort(u32& polls, u32 peer, u32 step) {
        const u64 time = globaltimer_ns();
        if (polls == POLLS_PER_CHECK) began = time;
        polls = POLLS_PER_CHECK;
        return should_abort(args, local, epoch, time, time - began, peer, step);
    }

    // Store this rank's hello at `peer`, or here: that it has entered and which call it makes; with
    // all lines also where its buffers lie.
    RC_DEVICE void send_hello(u32 peer, u32 lines) const {
        const u64 to = local.peers[peer];
        const u64 hello = static_cast<u64>(local.launch) << 32 | args.signature;
        st_relaxed_sys_ll(hello_at(to, epoch, local.rank, 0), hello, flag());
        for (u32 line = 1; line < lines; ++line)
            st_relaxed_sys_ll(hello_at(to, epoch, local.rank, line), local.hello[line - 1], flag());
    }

    // Store the factor of this rank's contributions at `peer`, or here.
    RC_DEVICE void send_factor(u32 peer) const {
        for (u32 k = 0; k < FACTOR_LINES; ++k)
            st_relaxed_sys_ll(factor_at(local.peers[peer], local.rank, k), local.factor[k], flag());
    }

    RC_DEVICE u64 factor_at(u64 workspace, u32 source, u32 k) const {
        return hello_at(workspace, epoch, source, HELLO_LINES + k);
    }

    // Wait for a line of a peer's hello at epoch `when`; false: aborted.
    RC_DEVICE bool await_hello(u32 peer, u64 when, u32 line, u64& hello) {
        const u64 at = hello_at(local.own, when, peer, line);
        for (u32 polls = 1;; ++polls) {
            const Vector v = ld_relaxed_sys_v4_u32(at);
            if (arrived(v, static_cast<u32>(when))) {
                hello = data_of(v);
                return true;
            }
            if (unlikely(polls % POLLS_PER_CHECK == 0) && check_abort(polls, peer, STEP_HELLO))
                return false;
            pause();
        }
    }

    // Wait until a flag holds `wanted` or more, and acquire what its writer released with it.
    // False: aborted.
    RC_DEVICE bool await_flag(u64 at, u64 wanted, u32 peer, u32 step) {
        for (u32 polls = 1; ld_relaxed_sys_u64(at) < wanted; ++polls) {
            if (unlikely(polls % POLLS_PER_CHECK == 0) && check_abort(polls, peer, step))
                return false;
            pause();
        }
        fence_acq_rel_sys();
        return true;
    }

    // Wait for a peer's hello at this epoch; false: it makes another call, or aborted.
    RC_DEVICE bool await_same_call(u32 peer) {
        u64 hello;
        if (!await_hello(peer, epoch, 0, hello)) return false;
        return compare_hello(peer, epoch, args.signature, local.launch, hello);
    }

    // Compare the hellos of the ranks whose bytes have come here, each by one of `count` threads;
    // false: one makes another call, or aborted. They have entered: the wait is short.
    RC_DEVICE bool await_same_calls(u32 thread, u32 count) {
        bool same = true;
#pragma unroll 1
        for (u32 p = thread; same && p < RC_RANKS; p += count)
            same = !(local.compared >> p % 32 & 1) || await_same_call(p);
        return same;
    }

    // Whether a peer's hello of call `when` has this rank's signature; reports a mismatch.
    RC_DEVICE bool compare_hello(u32 peer, u64 when, u32 signature, u32 mine, u64 hello) const {
        if (!unlikely(!(static_cast<u32>(hello) == signature))) return true;
        fail(when, MISMATCH, peer, STEP_HELLO, mine, static_cast<u32>(hello >> 32));
        return false;
    }

    // The same for the call before, in which this rank sent `mine`: a rooted call ends before all
    // hellos have come, so the next call compares them.
    RC_DEVICE bool await_same_previous_call(u32 peer, const Vector& mine) {
        u64 hello;
        return await_hello(peer, epoch - 1, 0, hello) &&
               compare_hello(peer, epoch - 1, mine.x, mine.z, hello);
    }

    // Every thread of a warp calls it before its first access to a peer's memory. Call x may write
    // to peers only when all ranks are known to have entered call x - 1: a total call implies it,
    // after any other the hellos of x - 1 are awaited, one by each lane. `ordered`: stores without
    // flags of their own follow, so they need a fence. False: aborted; warps of a block may differ.
    RC_DEVICE bool enter(bool ordered) {
        bool ok = !must_not_begin();
        if (unlikely(known + 1 < epoch)) {
            const Vector mine =
                ld_relaxed_sys_v4_u32(hello_at(local.own, epoch - 1, local.rank, 0));
#pragma unroll 1
            for (u32 p = thread_index() % WARP; ok && p < RC_RANKS; p += WARP)
                ok = p == local.rank || await_same_previous_call(p, mine);
            if (ordered) fence_acq_rel_sys();
            ok = !warp_any(!ok);
        }
        return ok;
    }

    // `count` threads from `first` on count the call, once all threads of the block have read the
    // old epoch. That may be before the call has ended: one that fails sets BROKEN, and no call
    // begins after it.
    RC_DEVICE void leave(u32 first, u32 count) const {
        const u64 now_known = args.total ? epoch : (known + 1 >= epoch ? known : epoch - 1);
        const Progress after = {epoch, now_known};
        const u32 lane = thread_index() - first;
        if (lane == 0) store(local.progress + block_index() * sizeof(Progress), after);
        // The next launch may have more blocks: they must find the same epoch.
        if (block_index() == 0)
#pragma unroll 1
            for (u32 b = grid_blocks() + lane; b < MOST_BLOCKS; b += count)
                store(local.progress + b * sizeof(Progress), after);
    }
};

}  // namespace rc
