// Protocols LL and LL128: signals ride in the data.
//
// SCRATCH is arrays of lines. With LL a line is 16 bytes of one thread: 8 of data and the call's
// epoch twice. With LL128 it is 16 bytes of each of LANES neighbouring threads: the last 8 are the
// epoch, all others data. A thread owns the same packs of all chunks, so what it (or its warp)
// receives was sent by the same thread of the other ranks: it runs the whole program for a pack
// without a barrier. The last warp of a block exchanges and compares the hellos meanwhile.
#pragma once

#include "call.cuh"
#include "ops.cuh"
#include "trace.cuh"
#include "types.cuh"

namespace rc::ll {

// Where a chunk lies: in the user's memory, in lines as elements, in lines as accumulators, or in
// the registers of this thread, which has just computed it.
enum class Kind { USER, LINES, PARTIAL, KEPT };

// The kinds of a step's sources or destinations, two bits each, the first lowest.
template <u64 PACKED>
struct Kinds {
    RC_DEVICE static constexpr Kind at(u32 k) { return static_cast<Kind>(PACKED >> (2 * k) & 3); }
};

constexpr u32 LANES = RC_LANES;            // threads of a line: 1 with LL, 8 with LL128
constexpr u32 HELD = LANES > 1 ? 2 : 1;    // words of a line, 8 bytes each, that a thread holds
constexpr u32 LINE_WORDS = 2 * LANES - 1;  // words of data in a line

// A pack is what a thread holds: with LL 8 bytes of elements, or one element if that is larger;
// with LL128 16 bytes, of which the last thread of a line uses 8.
template <class T>
struct Pack {
    using Raw = typename T::Raw;
    using Acc = typename T::Acc;
    static constexpr u32 COUNT = sizeof(Raw) < 8 * HELD ? 8 * HELD / sizeof(Raw) : 1;
    static constexpr u32 WORDS = COUNT * sizeof(Raw) / 8;
    static constexpr u32 LINES = WORDS / HELD;
    static constexpr u32 WIDE = COUNT * sizeof(Acc) / 8 / HELD;  // lines of a partial
};

template <class T>
union Elements {
    typename T::Raw raw[Pack<T>::COUNT];
    u64 words[Pack<T>::WORDS];
    RC_DEVICE Elements() {
#pragma unroll
        for (u32 i = 0; i < Pack<T>::WORDS; ++i) words[i] = 0;
    }
};

template <class T>
union Partials {
    typename T::Acc acc[Pack<T>::COUNT];
    u64 words[Pack<T>::WIDE * HELD];
    RC_DEVICE Partials() {
#pragma unroll
        for (u32 i = 0; i < Pack<T>::WIDE * HELD; ++i) words[i] = 0;
    }
};

// The user's memory is aligned to its elements and ends anywhere. RC_WHOLE: all of it begins at 8
// bytes and ends with a whole word; the branches for the rest cost 0.2 to 0.8 µs.
template <class T>
RC_DEVICE bool whole(u64 at, u32 count) {
    return RC_WHOLE || (at % 8 == 0 && count * sizeof(typename T::Raw) % 8 == 0);
}

// Whether word i of a pack holds any of its first `count` elements.
template <class T>
RC_DEVICE bool holds(u32 i, u32 count) {
    return i * 8 < count * sizeof(typename T::Raw);
}

template <class T>
RC_DEVICE Elements<T> read_user(u64 at, u32 count) {
    Elements<T> pack;
    if (whole<T>(at, count)) {
#pragma unroll
        for (u32 i = 0; i < Pack<T>::WORDS; ++i)
            pack.words[i] = ld_u64_if(holds<T>(i, count), at + 8 * i);
    } else {
#pragma unroll
        for (u32 i = 0; i < Pack<T>::COUNT; ++i)
            if (i < count) pack.raw[i] = load<typename T::Raw>(at + i * sizeof(typename T::Raw));
    }
    return pack;
}

template <class T>
RC_DEVICE void write_user(u64 at, u32 count, const Elements<T>& pack) {
    if (whole<T>(at, count)) {
#pragma unroll
        for (u32 i = 0; i < Pack<T>::WORDS; ++i)
            if (holds<T>(i, count)) store<u64>(at + 8 * i, pack.words[i]);
    } else {
#pragma unroll
        for (u32 i = 0; i < Pack<T>::COUNT; ++i)
            if (i < count) store(at + i * sizeof(typename T::Raw), pack.raw[i]);
    }
}

// The factors of a step's raw sources, as their ranks send them.
template <class T, u32 RAW, u32 SRCS>
struct Factors {
    using Acc = typename T::Acc;
    static constexpr u32 COUNT = Factor<Acc>::COUNT;
    Vector lines[SRCS][COUNT];

    // All threads of a warp; `owners`: whose contribution each source is. False: aborted.
    RC_DEVICE bool await(Call& call, const u64* owners, u32 step) {
        for (u32 polls = 1;; ++polls) {
            u32 missing = SRCS;
#pragma unroll
            for (u32 s = 0; s < SRCS; ++s)
#pragma unroll
                for (u32 i = 0; i < COUNT; ++i)
                    if (RAW >> s & 1) {
                        const u32 owner = static_cast<u32>(owners[s]);
                        lines[s][i] =
                            ld_relaxed_sys_v4_u32(call.factor_at(call.local.own, owner, i));
                        if (missing == SRCS && !arrived(lines[s][i], call.flag())) missing = s;
                    }
            if (!warp_any(missing != SRCS)) return true;
            const bool late = missing != SRCS && polls % POLLS_PER_CHECK == 0 &&
                              call.check_abort(polls, SOURCE | missing, step);
            if (warp_any(late)) return false;
            pause();
        }
    }
    RC_DEVICE Acc of(u32 source) const {
        Factor<Acc> factor;
        if (RAW >> source & 1) {
#pragma unroll
            for (u32 i = 0; i < COUNT; ++i) factor.words[i] = data_of(lines[source][i]);
        }
        return factor.value;
    }
};

// A step without raw sources, or an operator without factors.
template <class T, u32 SRCS>
struct Factors<T, 0, SRCS> {
    RC_DEVICE bool await(Call&, const u64*, u32) { return true; }
    RC_DEVICE typename T::Acc of(u32) const { return {}; }
};

// A thread and the pack on which it works.
template <class T>
struct Thread {
    using Raw = typename T::Raw;

    Call& call;
    u64 pack;
    Elements<T> kept;  // the elements that the last reducing step has made
    bool alive = true;

    RC_DEVICE Thread(Call& c) : call(c), pack(0) {}

    RC_DEVICE u32 lane() const { return static_cast<u32>(pack % LANES); }
    RC_DEVICE bool last() const { return lane() == LANES - 1; }

    // Bytes of a chunk before this pack, and before its line.
    RC_DEVICE u64 before() const {
        if (LANES == 1) return pack * Pack<T>::WORDS * 8;
        return before_line() + 16 * lane();
    }
    RC_DEVICE u64 before_line() const { return pack / LANES * LINE_WORDS * 8; }

    // How many elements of a chunk of `count` lie in this pack.
    RC_DEVICE u32 here(u64 count) const {
        constexpr u32 MOST = Pack<T>::COUNT;
        const u32 most = LANES > 1 && last() ? MOST / 2 : MOST;
        const u64 first = before() / sizeof(Raw);
        if (count <= first) return 0;
        if (LANES == 1 && RC_WHOLE) return MOST;
        return count - first < most ? static_cast<u32>(count - first) : most;
    }

    // Whether a chunk of `count` elements has a line of this pack.
    RC_DEVICE bool has_line(u64 count) const {
        return LANES == 1 ? here(count) != 0 : before_line() < count * sizeof(Raw);
    }

    RC_DEVICE u64 user(u64 chunk) const { return chunk + before(); }

    // Line i of those that a chunk has for this pack.
    RC_DEVICE u64 line(u64 chunk, u32 lines, u32 i) const {
        const u64 number = pack / LANES * lines + i;
        return chunk + call.half() + (number * LANES + lane()) * 16;
    }
};

// `ROWS` steps of one shape, none of which needs another: all their lines are polled together.
//
// Words of a row: its count, then its sources, then its destinations. Bit k of RAW says that source
// k is a contribution that the operator has yet to load; FINAL, that the operator finishes the
// result. A step that does not reduce has one source and moves it as it is. Where the operator has
// factors, a reducing row ends with the rank of every source's contribution.
template <class T, class Op, bool REDUCES, bool FINAL, u32 RAW, u32 ROWS, u32 SRCS, u32 DSTS,
          class Srcs, class Dsts>
struct Batch {
    static constexpr bool SCALES = REDUCES && Op::SCALES;
    static constexpr u32 OWNERS = 1 + SRCS + DSTS;
    static constexpr u32 ROW = OWNERS + (SCALES ? SRCS : 0);
    static constexpr u32 MOST = Pack<T>::WIDE > Pack<T>::LINES ? Pack<T>::WIDE : Pack<T>::LINES;

    RC_DEVICE static constexpr u32 lines_of(Kind kind) {
        if (kind == Kind::LINES) return Pack<T>::LINES;
        return kind == Kind::PARTIAL ? Pack<T>::WIDE : 0;
    }

    using Scale = Factors<T, SCALES ? RAW : 0, SRCS>;

    // What the steps read of the user's own memory: no other rank writes it, so it needs no wait.
    struct Users {
        Elements<T> pack[ROWS][SRCS];
    };

    RC_DEVICE static Users fetch(const Thread<T>& t, u32 first) {
        const u64* words = t.call.local.words + first;
        Users users;
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            const u32 count = t.here(words[r * ROW]);
#pragma unroll
            for (u32 s = 0; s < SRCS; ++s)
                if (Srcs::at(s) == Kind::USER)
                    users.pack[r][s] = read_user<T>(t.user(words[r * ROW + 1 + s]), count);
        }
        return users;
    }

    RC_DEVICE static void run(Thread<T>& t, u32 first, u32 step) {
        if (t.alive) run(t, fetch(t, first), first, step);
    }

    RC_DEVICE static void run(Thread<T>& t, const Users& users, u32 first, u32 step) {
        const u64* words = t.call.local.words + first;
        Vector lines[ROWS][SRCS][MOST];
        Scale scale;
        static_assert(!SCALES || ROWS == 1);
        if (!scale.await(t.call, words + OWNERS, step) || !poll(t, words, lines, step)) {
            t.alive = false;
            return;
        }
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            const u64* row = words + r * ROW;
            if (t.pack < t.call.args.packs)
                trace(t.call, 0, step << 16 | r, t.pack, t.here(row[0]));
            // The threads of a line stay together, also those that hold none of its elements.
            if (LANES == 1 && !t.has_line(row[0])) continue;
            const u32 count = t.here(row[0]);
            if constexpr (REDUCES) {
                reduce(t, row, count, users.pack[r], lines[r], scale);
            } else {
                move(t, row, count, users.pack[r], lines[r]);
            }
        }
    }

    RC_DEVICE static u64 line(const Thread<T>& t, const u64* words, u32 r, u32 s, u32 i) {
        return t.line(words[r * ROW + 1 + s], lines_of(Srcs::at(s)), i);
    }

    RC_DEVICE static bool poll(Thread<T>& t, const u64* words, Vector (&lines)[ROWS][SRCS][MOST],
                               u32 step) {
        if constexpr (LANES == 1) return poll_lines(t, words, lines, step);
        return poll_flags(t, words, lines, step);
    }

    // LL: load all lines of all rows before testing any, so that their latencies overlap.
    RC_DEVICE static bool poll_lines(Thread<T>& t, const u64* words,
                                     Vector (&lines)[ROWS][SRCS][MOST], u32 step) {
        const u32 flag = t.call.flag();
        each_line([&](u32 r, u32 s, u32 i) {  // a pack beyond a chunk has nothing to wait for
            const u32 found = t.has_line(words[r * ROW]) ? flag - 1 : flag;
            lines[r][s][i] = {0, found, 0, found};
        });
        for (u32 polls = 1;; ++polls) {
            each_line([&](u32 r, u32 s, u32 i) {
                ld_relaxed_sys_v4_u32_if_missing(lines[r][s][i], line(t, words, r, s, i), flag);
            });
            u32 missing = 0;
            each_line([&](u32 r, u32 s, u32 i) {
                missing |= (lines[r][s][i].y ^ flag) | (lines[r][s][i].w ^ flag);
            });
            if (missing == 0) return true;
            if (unlikely(polls % POLLS_PER_CHECK == 0)) {
                u32 which = ROWS * SRCS;
                each_line([&](u32 r, u32 s, u32 i) {
                    if (which == ROWS * SRCS && !arrived(lines[r][s][i], flag))
                        which = r * SRCS + s;
                });
                if (t.call.check_abort(polls, SOURCE | which, step)) return false;
            }
            pause();
        }
    }

    // LL128: the last thread of each line polls its flags; then the warp loads the data again, for
    // the other threads' parts of the load that found a flag may be older than the flag.
    RC_DEVICE static bool poll_flags(Thread<T>& t, const u64* words,
                                     Vector (&lines)[ROWS][SRCS][MOST], u32 step) {
        for (u32 polls = 1;; ++polls) {
            u32 missing = 0, which = ROWS * SRCS;
            if (t.last()) {
                u64 flags[ROWS][SRCS][MOST];
                each_line([&](u32 r, u32 s, u32 i) {
                    flags[r][s][i] = ld_relaxed_sys_u64(line(t, words, r, s, i) + 8);
                });
                each_line([&](u32 r, u32 s, u32 i) {
                    if (flags[r][s][i] == t.call.epoch || !t.has_line(words[r * ROW])) return;
                    missing = 1;
                    if (which == ROWS * SRCS) which = r * SRCS + s;
                });
            }
            if (!warp_any(missing != 0)) break;
            if (unlikely(polls % POLLS_PER_CHECK == 0) &&
                warp_any(missing != 0 && t.call.check_abort(polls, SOURCE | which, step)))
                return false;
            pause();
        }
        each_line([&](u32 r, u32 s, u32 i) {
            lines[r][s][i] = ld_relaxed_sys_v4_u32(line(t, words, r, s, i));
        });
        return true;
    }

    template <class Visit>
    RC_DEVICE static void each_line(const Visit& visit) {
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r)
#pragma unroll
            for (u32 s = 0; s < SRCS; ++s)
#pragma unroll
                for (u32 i = 0; i < lines_of(Srcs::at(s)); ++i) visit(r, s, i);
    }

    // The words of a pack from its `COUNT` lines.
    template <u32 COUNT>
    RC_DEVICE static void take(u64 (&words)[COUNT * HELD], const Vector (&lines)[MOST]) {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            if (LANES == 1) {
                words[i] = data_of(lines[i]);
            } else {
                words[i] = static_cast<u64>(lines[i].y) << 32 | lines[i].x;
                words[COUNT * (HELD - 1) + i] = static_cast<u64>(lines[i].w) << 32 | lines[i].z;
            }
        }
    }

    RC_DEVICE static Elements<T> elements(const Thread<T>& t, Kind kind, const Elements<T>& user,
                                          const Vector (&lines)[MOST]) {
        if (kind == Kind::KEPT) return t.kept;
        if (kind == Kind::USER) return user;
        Elements<T> pack;
        take<Pack<T>::LINES>(pack.words, lines);
        return pack;
    }

    // Source k in the accumulator's type.
    template <u32 K>
    RC_DEVICE static Partials<T> operand(const Thread<T>& t, const Elements<T> (&users)[SRCS],
                                         const Vector (&lines)[SRCS][MOST], const Scale& scale) {
        Partials<T> pack;
        if constexpr (Srcs::at(K) == Kind::PARTIAL) {
            take<Pack<T>::WIDE>(pack.words, lines[K]);
        } else {
            const Elements<T> raw = elements(t, Srcs::at(K), users[K], lines[K]);
#pragma unroll
            for (u32 i = 0; i < Pack<T>::COUNT; ++i)
                pack.acc[i] =
                    (RAW >> K & 1) ? Op::load(raw.raw[i], scale.of(K)) : T::widen(raw.raw[i]);
        }
        return pack;
    }

    template <u32 K>
    RC_DEVICE static void fold(const Thread<T>& t, const Elements<T> (&users)[SRCS],
                               const Vector (&lines)[SRCS][MOST], const Scale& scale,
                               Partials<T>& total) {
        if constexpr (K < SRCS) {
            const Partials<T> term = operand<K>(t, users, lines, scale);
#pragma unroll
            for (u32 i = 0; i < Pack<T>::COUNT; ++i)
                total.acc[i] = Op::combine(total.acc[i], term.acc[i]);
            fold<K + 1>(t, users, lines, scale, total);
        }
    }

    RC_DEVICE static void reduce(Thread<T>& t, const u64* row, u32 count,
                                 const Elements<T> (&users)[SRCS],
                                 const Vector (&lines)[SRCS][MOST], const Scale& scale) {
        Partials<T> total = operand<0>(t, users, lines, scale);
        fold<1>(t, users, lines, scale, total);
#pragma unroll
        for (u32 i = 0; i < Pack<T>::COUNT; ++i)
            t.kept.raw[i] = T::narrow(FINAL ? Op::finish(total.acc[i], RC_RANKS) : total.acc[i]);
#pragma unroll
        for (u32 d = 0; d < DSTS; ++d) {
            const u64 chunk = row[1 + SRCS + d];
            if (Dsts::at(d) == Kind::USER) write_user<T>(t.user(chunk), count, t.kept);
            if (Dsts::at(d) == Kind::LINES) put<Pack<T>::LINES>(t, row[0], chunk, t.kept.words);
            if (Dsts::at(d) == Kind::PARTIAL) put<Pack<T>::WIDE>(t, row[0], chunk, total.words);
        }
    }

    RC_DEVICE static void move(Thread<T>& t, const u64* row, u32 count,
                               const Elements<T> (&users)[SRCS],
                               const Vector (&lines)[SRCS][MOST]) {
        if constexpr (Srcs::at(0) == Kind::PARTIAL) {
            const Partials<T> pack = operand<0>(t, users, lines, Scale{});
#pragma unroll
            for (u32 d = 0; d < DSTS; ++d)
                put<Pack<T>::WIDE>(t, row[0], row[1 + SRCS + d], pack.words);
        } else {
            const Elements<T> pack = elements(t, Srcs::at(0), users[0], lines[0]);
#pragma unroll
            for (u32 d = 0; d < DSTS; ++d) {
                const u64 chunk = row[1 + SRCS + d];
                if (Dsts::at(d) == Kind::USER) write_user<T>(t.user(chunk), count, pack);
                if (Dsts::at(d) == Kind::LINES) put<Pack<T>::LINES>(t, row[0], chunk, pack.words);
            }
        }
    }

    template <u32 COUNT>
    RC_DEVICE static void put(const Thread<T>& t, u64 elements, u64 chunk,
                              const u64 (&words)[COUNT * HELD]) {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            const u64 at = t.line(chunk, COUNT, i);
            if (LANES == 1) {
                st_relaxed_sys_ll(at, words[i], t.call.flag());
            } else {
                const u64 high = t.last() ? t.call.epoch : words[COUNT * (HELD - 1) + i];
                st_relaxed_sys_v2_u64_if(t.has_line(elements), at, words[i], high);
            }
        }
    }
};

// The first batch of a rank that moves nothing.
template <class T>
struct Nothing {
    struct Users {};
    RC_DEVICE static Users fetch(const Thread<T>&, u32) { return {}; }
    RC_DEVICE static void run(Thread<T>&, const Users&, u32, u32) {}
};

// The last warp of a block sends the hellos and counts the epoch. It also compares the hellos of
// the ranks whose bytes come here, off the critical path: the other warps do not wait for it.
template <class Op>
RC_DEVICE void run_sync_warp(const Args& args, const Local& local, u32 workers) {
    Call call(args, local);
    const u32 lane = thread_index() - workers;
    const bool entered = call.enter(false);
    if (entered && block_index() == 0)
#pragma unroll 1  // runs once on up to 32 ranks: unrolled it only delays the fetch of instructions
        for (u32 p = lane; p < RC_RANKS; p += SYNC_THREADS) call.send_hello(p, 1);
    if constexpr (Op::SCALES)
        for (u32 p = lane; entered && p < RC_RANKS; p += SYNC_THREADS)
            if (block_index() == 0) call.send_factor(p);
    block_await();
    if (entered) call.leave(workers, SYNC_THREADS);
    if (entered) call.await_same_calls(lane, SYNC_THREADS);
}

// The whole call of one rank. A Program has its batches in order: `First`, and `rest`, which runs
// the others on a pack.
template <class T, class Program, class Worker = Thread<T>>
RC_DEVICE void run(const Args& args, const Local& local) {
    const u32 workers = block_threads() - SYNC_THREADS;
    if (thread_index() >= workers) return run_sync_warp<typename Program::Op>(args, local, workers);
    Call call(args, local);
    Worker thread(call);
    thread.pack = static_cast<u64>(block_index()) * workers + thread_index();
    // These loads are in flight beside that of the epoch: one latency instead of two.
    typename Program::First::Users users = Program::First::fetch(thread, 0);
    bool entered = call.enter(false);
    if (LANES > 1) entered = !warp_any(!entered);  // the threads of a line stay together
    block_arrive();
    if (!entered || thread.pack >= args.packs) return;
    const u64 stride = static_cast<u64>(workers) * grid_blocks();
    for (;;) {
        Program::First::run(thread, users, 0, 0);
        Program::rest(thread);
        thread.pack += stride;
        if (!thread.alive || thread.pack >= args.packs) return;
        users = Program::First::fetch(thread, 0);
    }
}

}  // namespace rc::ll
