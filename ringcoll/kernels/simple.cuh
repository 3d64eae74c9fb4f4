// Protocol Simple: signals are flags of their own, posted behind a fence.
//
// A block of the program is run by `replicas` CUDA blocks, each on its own share of every slice and
// with flags of its own, so that no two of them ever wait for each other. Words of a rank:
//
//     number of blocks, then for each where its words begin
//     of a block: rows, slices, window, elements of the widest slice of any chunk, and the words of
//     each row one after the other
//     of a row: head, elements, elements a slice, the chunks (2 words each), the rank of every
//     source's contribution where the operator has factors, waits, signals (2 each)
//
// After a block's rows, which every slice repeats, stand two that run once and move nothing: the
// last signals and the last waits.
//
// All warps of a CUDA block but two move data. Meanwhile one of these waits for the signals of the
// next row, and the last posts those of the row before: its fence waits until the block's stores
// have arrived at the peers, a microsecond or more in which the others move the next slice.
#pragma once

#include "move.cuh"
#include "trace.cuh"

namespace rc::simple {

// {kind 8, sources 8, destinations 8, waits 16, signals 16}
struct Head {
    u32 kind, srcs, dsts, waits, signals;
    RC_DEVICE explicit Head(u64 word)
        : kind(word & 255),
          srcs(word >> 8 & 255),
          dsts(word >> 16 & 255),
          waits(word >> 24 & 0xffff),
          signals(word >> 40 & 0xffff) {}
};

// Counts of a pair of blocks: so many a slice, so many credits a slice, and as many in the slice
// under way up to this row. {a slice 16, here 16, credits a slice 16, credits here 15, credit 1}
struct Counts {
    u64 word;
    RC_DEVICE bool credit_only() const { return word >> 63; }
    // Slices before this one: `slice` of them, `credited` of which had credits; `guard`: has this.
    RC_DEVICE u64 at(u64 slice, u64 credited, bool guard) const {
        const u64 per = word & 0xffff, here = word >> 16 & 0xffff;
        const u64 credits = word >> 32 & 0xffff, credits_here = word >> 48 & 0x7fff;
        return per * slice + here + credits * credited + (guard ? credits_here : 0);
    }
};

// Of even turns and of odd ones: the waiting warp has aborted; the moving warps have seen so.
struct Turns {
    u32 aborted[2], seen[2];
};

// What the threads of a CUDA block share.
struct Shared {
    Bases bases;
    Turns turns;

    // Before a barrier of the block and the first Runner of a launch.
    RC_DEVICE void clear() {
        if (thread_index() == 0) turns = {};
    }
};

// Bytes of an element, and whether the operator has factors: of the types that a text names, or of
// the launch (generic_simple.cuh).
template <class T>
RC_DEVICE u64 item_bytes(const Local& /*local*/) {
    return sizeof(typename T::Raw);
}
template <class Op>
RC_DEVICE bool scales(const Local& /*local*/) {
    return Op::SCALES;
}

// One CUDA block at work on its share of a program's block. `Calling`: a Call, or what is one.
//
// Each row is a turn. Moving and waiting warps meet at its named barrier BEGUN, so a turn begins
// when its signals are there and all movers have ended the turn before; movers arrive at its
// barrier ENDED, where the posting warp waits. Barriers and Turns are used again two turns later:
// the posting warp arrives at a turn's BEGUN only when the turn before the last is posted, so that
// no warp is more than two turns ahead. The wait for a row begins while the row before is still
// moving: its timeout covers both.
template <class Calling>
struct Runner {
    static constexpr u32 BEGUN = 0, ENDED = 2;

    Calling& call;
    Shared& shared;
    u32 replica, replicas;
    u32 place = 0;  // among the CUDA blocks of the program, for a trace
    u64 slices = 0, window = 0, width = 0;
    u32 turn = 0;

    RC_DEVICE u64 value(u64 count) const { return call.epoch << 32 | count; }

    // Wait for a signal; false: aborted.
    RC_DEVICE bool await(const u64* words, u64 slice, u32 step, u32 number) {
        const Counts counts{words[1]};
        const bool guard = slice >= window;
        if (counts.credit_only() && !guard) return true;
        const u64 wanted = value(counts.at(slice, guard ? slice - window : 0, guard));
        const u64 at = words[0] + replica * 8;
        return call.await_flag(at, wanted, SOURCE | number, step);
    }

    RC_DEVICE void post(const u64* words, u64 slice) const {
        const Counts counts{words[1]};
        const u64 granted = slices > window ? slices - window : 0;
        const bool guard = slice < granted;
        if (counts.credit_only() && !guard) return;
        fence_acq_rel_sys();
        st_relaxed_sys_u64(words[0] + replica * 8,
                           value(counts.at(slice, guard ? slice : granted, guard)));
    }

    // Run the words of a block; Program::move(kind, share, chunks) does a row's work. False on all
    // threads: aborted.
    template <class T, class Program>
    RC_DEVICE bool run(const u64* words) {
        const u32 rows = static_cast<u32>(words[0]);
        slices = words[1];
        window = words[2];
        width = words[3];
        if (posts()) barrier_arrive(BEGUN, block_threads());
        const u64 *body = words + 4, *row = body;
        for (u64 slice = 0; slice < slices; ++slice) {
            row = body;
            for (u32 step = 0; step < rows; ++step)
                if (!advance<T, Program>(row, slice, step, false)) return false;
        }
        return advance<T, Program>(row, slices - 1, rows, false) &&
               advance<T, Program>(row, slices - 1, rows + 1, true);
    }

    RC_DEVICE static bool waits() {
        return thread_index() >= movers() && thread_index() < movers() + WARP;
    }
    RC_DEVICE static bool posts() { return thread_index() >= movers() + WARP; }

    // Take part in a row and advance to the next.
    template <class T, class Program>
    RC_DEVICE bool advance(const u64*& row, u64 slice, u32 step, bool last) {
        const Head head(row[0]);
        const u32 owners = scales<typename Program::Op>(call.local) ? head.srcs : 0;
        const u32 odd = turn++ & 1;
        const u64* waited = row + 3 + 2 * (head.srcs + head.dsts) + owners;
        const u64* posted = waited + 2 * head.waits;
        bool alive;
        if (waits()) {
            alive = wait(waited, head.waits, slice, step, odd, last);
        } else if (posts()) {
            alive = signal(posted, head.signals, slice, odd, last);
        } else {
            alive = move<T, Program>(head, row, slice, step, odd);
        }
        row = posted + 2 * head.signals;
        return alive;
    }

    // Wait for a row's signals, and let it begin. Beside the last row that moves, compare hellos.
    RC_DEVICE bool wait(const u64* words, u32 count, u64 slice, u32 step, u32 odd, bool last) {
        const u32 lane = thread_index() % WARP;
        bool alive = true;
        for (u32 k = lane; k < count; k += WARP)
            alive = await(words + 2 * k, slice, step, k) && alive;
        if (last && !call.args.mapped) alive = call.await_same_calls(lane, WARP) && alive;
        alive = !warp_any(!alive);
        if (!alive && thread_index() % WARP == 0) shared.turns.aborted[odd] = 1;
        barrier_sync(BEGUN + odd, block_threads());
        return alive;
    }

    // Do a row's work. BEGUN orders it behind the acquired data and the other movers' last row.
    template <class T, class Program>
    RC_DEVICE bool move(const Head& head, const u64* row, u64 slice, u32 step, u32 odd) {
        barrier_sync(BEGUN + odd, block_threads());
        const bool alive = shared.turns.aborted[odd] == 0;
        const u64 moved = alive && head.srcs != 0 ? work<T, Program>(head, row, slice) : 0;
        if (alive && thread_index() == 0 && row[0] != 0) trace(call, place, step, slice, moved);
        if (!alive && thread_index() == 0) shared.turns.seen[odd] = 1;
        barrier_arrive(ENDED + odd, movers() + WARP);
        return alive;
    }

    // Post a row's signals once it is done.
    RC_DEVICE bool signal(const u64* words, u32 count, u64 slice, u32 odd, bool last) {
        if (!last) barrier_arrive(BEGUN + 1 - odd, block_threads());
        barrier_sync(ENDED + odd, movers() + WARP);
        if (shared.turns.seen[odd] != 0) return false;
        for (u32 k = thread_index() % WARP; k < count; k += WARP) post(words + 2 * k, slice);
        return true;
    }

    // Blocks share a slice in pieces of 512 bytes, so that no two write to one cache line. Each has
    // one contiguous part: by tiles of 32, 128 or 512 KiB in turns an all_gather of 64 MiB and more
    // took up to 7 % longer, a reduce of 96 MiB up to 16 %, and a reduce_scatter of up to 192 MiB
    // up to 2 % less (gpu_reads_2.json). Shorter slices are shared like the widest one: a block's
    // credits are for its own part of the slot. Returns the elements of this block's part.
    template <class T, class Program>
    RC_DEVICE u64 work(const Head& head, const u64* row, u64 slice) const {
        const u64 grain = 512 / item_bytes<T>(call.local);
        const u64 length = row[1], piece = row[2], before = slice * piece;
        const u64 count = length <= before ? 0 : length - before < piece ? length - before : piece;
        const u64 even = (width + replicas - 1) / replicas;
        const u64 most = (even + grain - 1) / grain * grain, first = replica * most;
        if (first >= count) return 0;
        const u64 mine = count - first < most ? count - first : most;
        const u64 half = call.half(), slot = slice % window;
        const Share share{call.local, shared.bases, half, slice, slot, first, mine};
        Program::move(head.kind, share, row + 3);
        return mine;
    }
};

// Read all ranks' hellos: what call they make, and where their buffers lie.
RC_DEVICE bool read_hellos(Call& call, Bases& bases) {
    bool same = true;
    for (u32 p = thread_index(); p < RC_RANKS; p += block_threads()) {
        if (p == call.local.rank) {
            bases.at[0][p] = call.local.user[0];
            bases.at[1][p] = call.local.user[1];
            continue;
        }
        same = call.await_same_call(p) && same;
        for (u32 buffer = 0; same && buffer < 2; ++buffer) {
            u64 hello = 0;
            same = call.await_hello(p, call.epoch, 1 + buffer, hello);
            const u64 mapping = hello >> 48, offset = hello & 0xffffffffffffull;
            const u64 table = call.local.mappings + (mapping * RC_RANKS + p) * 8;
            // A relaxed load, not a plain one: rows of one cache line are written at different
            // times, and L1 could hold an older row.
            bases.at[buffer][p] = hello == 0 || !same ? 0 : ld_relaxed_sys_u64(table) + offset;
        }
    }
    // Hellos are relaxed: without the fence a peer's INPUT could be read as it was before the
    // peer's stream wrote it.
    if (thread_index() < RC_RANKS) fence_acq_rel_sys();
    return !block_barrier_or(!same);
}

// Read the factors of all ranks' contributions.
RC_DEVICE bool read_factors(Call& call, Bases& bases) {
    bool ok = true;
    for (u32 p = thread_index(); p < RC_RANKS; p += block_threads())
        for (u32 k = 0; k < FACTOR_LINES; ++k)
            ok = ok && call.await_hello(p, call.epoch, HELLO_LINES + k, bases.factors[p][k]);
    return !block_barrier_or(!ok);
}

// A launch carries two programs where the ranks cannot know ahead which buffers their peers can
// map: the root's own of a rooted call, or all. If the hellos name all of these buffers the second
// program runs, on all ranks. Before the words of both programs stand
//
//     where each begins, replicas of each, and the buffers that decide: {first 32, end 32} of all
//     ranks' INPUT and OUTPUT in turns
struct ProgramChoice {
    const u64* words;
    u32 replicas, second;

    // The one program of most calls.
    RC_DEVICE ProgramChoice(const Args& args, const Local& local)
        : words(local.words), replicas(args.replicas), second(0) {}

    // After read_hellos.
    RC_DEVICE void choose(const Local& local, const Bases& bases) {
        const u64 first = words[4] & 0xffffffff, end = words[4] >> 32;
        second = 1;
        for (u64 k = first; k < end; ++k) {
            const u64 rank = k >> 1, buffer = k & 1;
            const u64 at = rank == local.rank ? local.hello[buffer] : bases.at[buffer][rank];
            if (at == 0) second = 0;
        }
        replicas = static_cast<u32>(words[2 + second]);
        words += words[second];
    }
};

// Which block of a program a CUDA block runs, and which of its replicas; one that runs none has the
// number behind the last block.
//
// In a grid of more CUDA blocks than the GPU has pairs of multiprocessors (TPCs) most neighbours
// share one, and so what it can write. So a program that has at most half of the grid leaves out
// CUDA blocks between its own, and others have their lanes in turns: on 4 H200 an all_to_all of
// 512 MiB by 64 of 128 to 132 CUDA blocks took 1239 us so and 1314 to 1531 by the first 64, an
// all_reduce of 64 MiB 308 and 317 to 329. By lanes in turns an all_reduce of 64 MiB on 2 took 199
// us and else 200 to 206, some of that on other GPUs; on 4 nothing was won (gpu_places_4.json).
struct Place {
    u32 block, replica;
    RC_DEVICE Place(u32 index, u32 grid, u32 blocks, u32 replicas) : block(blocks), replica(0) {
        const u32 used = blocks * replicas;
        if (used == 0) return;
        const u32 step = grid < 2 * used ? 1 : grid / used, place = index / step;
        if (index % step != 0 || place >= used) return;
        block = place % blocks;
        replica = place / blocks;
    }
};

// The whole call of one rank; `dual`: it has two programs. Or, `gated`, the blocks of a call that
// gates enter and leave (copy_gates.cuh): their words hold all addresses.
template <class T, class Program>
RC_DEVICE void run(const Args& args, const Local& local, bool dual = false, bool gated = false) {
    Call call(args, local);
    Shared& shared = *block_memory<Shared>();
    Bases& bases = shared.bases;
    shared.clear();
    bool done = !block_barrier_or(gated ? call.must_not_begin() : !call.enter(true));
    if (done && !gated && block_index() == 0)
        for (u32 p = thread_index(); p < RC_RANKS; p += block_threads())
            call.send_hello(p, HELLO_LINES);
    if (scales<typename Program::Op>(local)) {
        if (done && block_index() == 0)
            for (u32 p = thread_index(); p < RC_RANKS; p += block_threads()) call.send_factor(p);
        if (done) done = read_factors(call, bases);
    }
    const bool mapped = args.mapped && !gated;
    if (done && mapped) done = read_hellos(call, bases);
    ProgramChoice choice(args, local);
    if (done && dual) choice.choose(local, bases);
    const u32 blocks = static_cast<u32>(choice.words[0]), replicas = choice.replicas;
    const Place here(block_index(), grid_blocks(), blocks, replicas);
    if (done && here.block < blocks) {
        const u32 place = here.block * replicas + here.replica;
        if (thread_index() == 0 && mapped) trace(call, place, STEP_HELLO, choice.second, 0);
        Runner<Call> runner{call, shared, here.replica, replicas, place};
        done = runner.template run<T, Program>(choice.words + choice.words[1 + here.block]);
    }
    if (!block_barrier_or(!done) && !gated) call.leave(0, block_threads());
}

// The same of the blocks beside copy engines.
template <class T, class Program>
RC_DEVICE void run_gated(const Args& args, const Local& local) {
    run<T, Program>(args, local, false, true);
}

// The same of a call with two programs.
template <class T, class Program>
RC_DEVICE void run_dual(const Args& args, const Local& local) {
    run<T, Program>(args, local, true);
}

}  // namespace rc::simple
