// A call as each CUDA block sees it: its epoch, the ranks' hellos, deadlines and failures.
#pragma once

#include "program.cuh"

namespace rc {

constexpr u32 LOOKS = 1024;  // looks at memory between two looks at the clock

RC_DEVICE u64 hello_at(u64 arena, u64 epoch, u32 source, u32 line) {
    const u32 slot = static_cast<u32>(epoch) & (HELLO_SLOTS - 1);
    const u32 lines = HELLO_LINES + FACTOR_LINES;
    return arena + HELLOS + ((slot * RC_RANKS + source) * lines + line) * 16;
}

// Note for the host what went wrong at call `when`, at `epoch` or before it, and stop this rank and
// its peers, which know already if it was noted elsewhere (TOLD). `mine` and `theirs`: launches.
//
// Many threads may come at once: the first writes all of the report, the others nothing. The host
// compares this call with the peers' hellos, though this rank may have come too late to say its own.
// Who finds that calls differ lets the peers see so too: the block that says hello may not have come
// so far, and would no more.
RC_APART static void fail(const Args& args, const Local& local, u64 epoch, u64 when, u32 kind,
                          u32 peer, u32 step, u32 mine, u32 theirs) {
    const u64 said = static_cast<u64>(local.launch) << 32 | args.signature;
    if (claim(local.own + CLAIMED)) {
        ll_store(hello_at(local.own, epoch, local.rank, 0), said, static_cast<u32>(epoch));
        tell(local.report + 4, peer);
        tell_wide(local.report + 8, when);
        tell(local.report + 16, step);
        tell(local.report + 20, theirs);
        tell(local.report + 28, mine);
        fence();
        tell(local.report, kind);
    }
    if (kind == TOLD) return;
#pragma unroll 1
    for (u32 p = 0; p < RC_RANKS; ++p) {
        if (kind == DIFFERENT && when == epoch)
            ll_store(hello_at(local.peers[p], epoch, local.rank, 0), said, static_cast<u32>(epoch));
        fence();
        tell(local.peers[p] + BROKEN, 1);
    }
}

// Whether to give up waiting for `peer` at `step` after `waited` ns, by what the peers, the host and the
// clock say. Apart from the loops that ask, whose text is shorter for it.
RC_APART static bool give_up(const Args& args, const Local& local, u64 epoch, u64 time, u64 waited,
                             u32 peer, u32 step) {
    u32 kind = waited < args.timeout ? 0 : EXPIRED, theirs = 0;
    if (look(local.report + 24) != 0) kind = GIVEN_UP;
    // Nothing need come from ranks that make another call: look at one each time.
    const u32 other = static_cast<u32>(time >> 10) % RC_RANKS;
    const Vector said = ll_load(hello_at(local.own, epoch, other, 0));
    if (arrived(said, static_cast<u32>(epoch)) && said.x != args.signature) {
        kind = DIFFERENT, peer = other, step = STEP_HELLO, theirs = said.z;
    }
    if (look(local.own + BROKEN) != 0) kind = TOLD;
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

    // Of a call that is counted elsewhere.
    RC_DEVICE Call(const Args& a, const Local& l, u64 e)
        : args(a), local(l), epoch(e), known(e), began(0) {}

    RC_DEVICE u32 flag() const { return static_cast<u32>(epoch); }
    RC_DEVICE u64 half() const { return (epoch & 1) * args.half; }

    // Whether this call must not begin: one has failed, here or at a peer, or flags begin anew and
    // lines of 2^32 calls ago would be taken for this call's.
    RC_DEVICE bool barred() const {
        const bool broken = look(local.own + BROKEN) != 0;
        if (!rare(broken || flag() == 0)) return false;
        fail(epoch, broken ? TOLD : WORN, local.rank, STEP_HELLO, local.launch, 0);
        return true;
    }

    RC_DEVICE void fail(u64 when, u32 kind, u32 peer, u32 step, u32 mine, u32 theirs) const {
        rc::fail(args, local, epoch, when, kind, peer, step, mine, theirs);
    }

    // To be asked every LOOKS looks of a wait: whether to give up waiting for `peer` at `step`. Each
    // wait has its time from its first asking on: those before it have ended, which is progress.
    // `looks` never comes round to that count again.
    RC_DEVICE bool late(u32& looks, u32 peer, u32 step) {
        const u64 time = now();
        if (looks == LOOKS) began = time;
        looks = LOOKS;
        return give_up(args, local, epoch, time, time - began, peer, step);
    }

    // Tell `peer`, or this rank itself, that this rank has entered and which call it makes; with
    // all lines also where its buffers are.
    RC_DEVICE void say_hello(u32 peer, u32 lines) const {
        const u64 to = local.peers[peer];
        const u64 said = static_cast<u64>(local.launch) << 32 | args.signature;
        ll_store(hello_at(to, epoch, local.rank, 0), said, flag());
        for (u32 line = 1; line < lines; ++line)
            ll_store(hello_at(to, epoch, local.rank, line), local.hello[line - 1], flag());
    }

    // Tell `peer`, or this rank itself, the factor of this rank's contributions.
    RC_DEVICE void say_factor(u32 peer) const {
        for (u32 k = 0; k < FACTOR_LINES; ++k)
            ll_store(factor_at(local.peers[peer], local.rank, k), local.factor[k], flag());
    }

    RC_DEVICE u64 factor_at(u64 arena, u32 source, u32 k) const {
        return hello_at(arena, epoch, source, HELLO_LINES + k);
    }

    // Wait for a line of a peer's hello at epoch `when`; false: gave up.
    RC_DEVICE bool hear(u32 peer, u64 when, u32 line, u64& said) {
        const u64 at = hello_at(local.own, when, peer, line);
        for (u32 looks = 1;; ++looks) {
            const Vector v = ll_load(at);
            if (arrived(v, static_cast<u32>(when))) {
                said = data_of(v);
                return true;
            }
            if (rare(looks % LOOKS == 0) && late(looks, peer, STEP_HELLO)) return false;
            pause();
        }
    }

    // Wait until a flag holds `wanted` or more: then what its writer had written before is seen.
    // False: gave up waiting for `peer`.
    RC_DEVICE bool reach(u64 at, u64 wanted, u32 peer, u32 step) {
        for (u32 looks = 1; look_wide(at) < wanted; ++looks) {
            if (rare(looks % LOOKS == 0) && late(looks, peer, step)) return false;
            pause();
        }
        fence();
        return true;
    }

    // Wait for a peer's hello at this epoch; false: it makes another call, or gave up.
    RC_DEVICE bool agree(u32 peer) {
        u64 said;
        if (!hear(peer, epoch, 0, said)) return false;
        return same(peer, epoch, args.signature, local.launch, said);
    }

    // Whether a peer has said at call `when` what this rank has; else that is noted.
    RC_DEVICE bool same(u32 peer, u64 when, u32 signature, u32 mine, u64 said) const {
        if (!rare(!(static_cast<u32>(said) == signature))) return true;
        fail(when, DIFFERENT, peer, STEP_HELLO, mine, static_cast<u32>(said >> 32));
        return false;
    }

    // Wait for a peer's hello of the call before this one, at which this rank said `mine`: nobody
    // may have compared the hellos of a rooted call.
    RC_DEVICE bool agreed(u32 peer, const Vector& mine) {
        u64 said;
        return hear(peer, epoch - 1, 0, said) && same(peer, epoch - 1, mine.x, mine.z, said);
    }

    // Every thread of a warp: before its first access to a peer's memory. Call x may write to peers
    // only when all ranks are known to have entered call x - 1: after a call that was not total its
    // hellos tell, one for each lane. `ordered`: what follows is written without flags of its own.
    // False: gave up; warps of a block may differ.
    RC_DEVICE bool enter(bool ordered) {
        bool heard = !barred();
        if (rare(known + 1 < epoch)) {
            const Vector mine = ll_load(hello_at(local.own, epoch - 1, local.rank, 0));
#pragma unroll 1
            for (u32 p = thread_index() % WARP; heard && p < RC_RANKS; p += WARP)
                heard = p == local.rank || agreed(p, mine);
            if (ordered) fence();
            heard = !warp_any(!heard);
        }
        return heard;
    }

    // `count` threads from `first` on, once no thread of the block needs the old words: the next
    // launch makes the next call. It may be noted before the call has ended: one that fails leaves
    // BROKEN behind, and no call begins after it.
    RC_DEVICE void leave(u32 first, u32 count) const {
        const u64 now_known = args.total ? epoch : (known + 1 >= epoch ? known : epoch - 1);
        const Progress after = {epoch, now_known};
        const u32 lane = thread_index() - first;
        if (lane == 0) store(local.progress + block_index() * sizeof(Progress), after);
        // Blocks that this launch does not have must not fall behind.
        if (block_index() == 0)
#pragma unroll 1
            for (u32 b = grid_blocks() + lane; b < MOST_BLOCKS; b += count)
                store(local.progress + b * sizeof(Progress), after);
    }
};

}  // namespace rc
