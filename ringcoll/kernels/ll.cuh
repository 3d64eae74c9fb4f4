// Calls whose signals ride in the data: protocols LL and LL128.
//
// Every piece of SCRATCH is an array of lines. With LL a line is 16 bytes of one thread: 8 of data and
// the call's epoch twice. With LL128 it is 16 bytes of each of LANES threads that are neighbours: the
// last 8 are the epoch, all others data. A thread owns the same places of all chunks, so what it (or
// its warp) receives is what its twins on the other ranks have sent: it runs the whole program for a
// place without a barrier. The last warp of a block does not: it exchanges and compares the hellos.
#pragma once

#include "call.cuh"
#include "ops.cuh"
#include "trace.cuh"
#include "types.cuh"

namespace rc::ll {

// How a chunk is kept: in the user's memory, in lines as elements, in lines as accumulators, or in
// the registers of this thread, which has just computed it.
enum class Kind { USER, LINES, PARTIAL, KEPT };

// The kinds of a step's sources or destinations, two bits each, the first lowest.
template <u64 PACKED>
struct Kinds {
    RC_DEVICE static constexpr Kind at(u32 k) { return static_cast<Kind>(PACKED >> (2 * k) & 3); }
};

constexpr u32 LANES = RC_LANES;              // threads of a line: 1 with LL, 8 with LL128
constexpr u32 HELD = LANES > 1 ? 2 : 1;      // words of a line, 8 bytes each, that a thread holds
constexpr u32 LINE_WORDS = 2 * LANES - 1;    // words of data in a line

// A place is what a thread holds: with LL 8 bytes of elements, or one element if that is larger; with
// LL128 16 bytes, of which the last thread of a line uses 8.
template <class T>
struct Place {
    using Raw = typename T::Raw;
    using Acc = typename T::Acc;
    static constexpr u32 COUNT = sizeof(Raw) < 8 * HELD ? 8 * HELD / sizeof(Raw) : 1;
    static constexpr u32 WORDS = COUNT * sizeof(Raw) / 8;
    static constexpr u32 LINES = WORDS / HELD;
    static constexpr u32 WIDE = COUNT * sizeof(Acc) / 8 / HELD;  // lines of a partial
};

template <class T>
union Elements {
    typename T::Raw raw[Place<T>::COUNT];
    u64 words[Place<T>::WORDS];
    RC_DEVICE Elements() {
#pragma unroll
        for (u32 i = 0; i < Place<T>::WORDS; ++i) words[i] = 0;
    }
};

template <class T>
union Partials {
    typename T::Acc acc[Place<T>::COUNT];
    u64 words[Place<T>::WIDE * HELD];
    RC_DEVICE Partials() {
#pragma unroll
        for (u32 i = 0; i < Place<T>::WIDE * HELD; ++i) words[i] = 0;
    }
};

// The user's memory has the alignment of its elements and ends anywhere; RC_WHOLE says that all of
// it begins at 8 bytes and ends with a whole word: the branches for the rest cost 0.2 to 0.8 µs.
template <class T>
RC_DEVICE bool whole(u64 at, u32 count) {
    return RC_WHOLE || (at % 8 == 0 && count * sizeof(typename T::Raw) % 8 == 0);
}

// Whether word i of a place holds any of its first `count` elements.
template <class T>
RC_DEVICE bool holds(u32 i, u32 count) {
    return i * 8 < count * sizeof(typename T::Raw);
}

template <class T>
RC_DEVICE Elements<T> read_user(u64 at, u32 count) {
    Elements<T> place;
    if (whole<T>(at, count)) {
#pragma unroll
        for (u32 i = 0; i < Place<T>::WORDS; ++i)
            place.words[i] = load_if(holds<T>(i, count), at + 8 * i);
    } else {
#pragma unroll
        for (u32 i = 0; i < Place<T>::COUNT; ++i)
            if (i < count) place.raw[i] = load<typename T::Raw>(at + i * sizeof(typename T::Raw));
    }
    return place;
}

template <class T>
RC_DEVICE void write_user(u64 at, u32 count, const Elements<T>& place) {
    if (whole<T>(at, count)) {
#pragma unroll
        for (u32 i = 0; i < Place<T>::WORDS; ++i)
            if (holds<T>(i, count)) store<u64>(at + 8 * i, place.words[i]);
    } else {
#pragma unroll
        for (u32 i = 0; i < Place<T>::COUNT; ++i)
            if (i < count) store(at + i * sizeof(typename T::Raw), place.raw[i]);
    }
}

// The factors of a step's raw sources, as their ranks send them.
template <class T, u32 RAW, u32 SRCS>
struct Factors {
    using Acc = typename T::Acc;
    static constexpr u32 COUNT = Factor<Acc>::COUNT;
    Vector lines[SRCS][COUNT];

    // All threads of a warp; `owners`: whose contribution each source is. False: gave up.
    RC_DEVICE bool await(Call& call, const u64* owners, u32 step) {
        for (u32 looks = 1;; ++looks) {
            u32 missing = SRCS;
#pragma unroll
            for (u32 s = 0; s < SRCS; ++s)
#pragma unroll
                for (u32 i = 0; i < COUNT; ++i)
                    if (RAW >> s & 1) {
                        const u32 owner = static_cast<u32>(owners[s]);
                        lines[s][i] = ll_load(call.factor_at(call.local.own, owner, i));
                        if (missing == SRCS && !arrived(lines[s][i], call.flag())) missing = s;
                    }
            if (!warp_any(missing != SRCS)) return true;
            const bool late =
                missing != SRCS && looks % LOOKS == 0 && call.late(looks, SOURCE | missing, step);
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

// A thread at one place of the call.
template <class T>
struct Thread {
    using Raw = typename T::Raw;

    Call& call;
    u64 place;
    Elements<T> kept;  // the elements that the last reducing step has made
    bool alive = true;

    RC_DEVICE Thread(Call& c) : call(c), place(0) {}

    RC_DEVICE u32 lane() const { return static_cast<u32>(place % LANES); }
    RC_DEVICE bool last() const { return lane() == LANES - 1; }

    // Bytes of a chunk before this place, and before its line.
    RC_DEVICE u64 before() const {
        if (LANES == 1) return place * Place<T>::WORDS * 8;
        return before_line() + 16 * lane();
    }
    RC_DEVICE u64 before_line() const { return place / LANES * LINE_WORDS * 8; }

    // How many elements of a chunk of `count` lie at this place.
    RC_DEVICE u32 here(u64 count) const {
        constexpr u32 MOST = Place<T>::COUNT;
        const u32 most = LANES > 1 && last() ? MOST / 2 : MOST;
        const u64 first = before() / sizeof(Raw);
        if (count <= first) return 0;
        if (LANES == 1 && RC_WHOLE) return MOST;
        return count - first < most ? static_cast<u32>(count - first) : most;
    }

    // Whether a chunk of `count` elements has a line here.
    RC_DEVICE bool has_line(u64 count) const {
        return LANES == 1 ? here(count) != 0 : before_line() < count * sizeof(Raw);
    }

    RC_DEVICE u64 user(u64 chunk) const { return chunk + before(); }

    // Line i of those that a chunk has at this place.
    RC_DEVICE u64 line(u64 chunk, u32 lines, u32 i) const {
        const u64 number = place / LANES * lines + i;
        return chunk + call.half() + (number * LANES + lane()) * 16;
    }
};

// `ROWS` steps of one shape, none of which needs another: all their lines are polled together.
//
// Words of a row: its count, then its sources, then its destinations. Bit k of RAW says that source k
// is a contribution that the operator has yet to load; FINAL, that the operator finishes the result.
// A step that does not reduce has one source and moves it as it is. Where the operator has factors,
// a reducing row ends with the rank of every source's contribution.
template <class T, class Op, bool REDUCES, bool FINAL, u32 RAW, u32 ROWS, u32 SRCS, u32 DSTS,
          class Srcs, class Dsts>
struct Batch {
    static constexpr bool SCALES = REDUCES && Op::SCALES;
    static constexpr u32 OWNERS = 1 + SRCS + DSTS;
    static constexpr u32 ROW = OWNERS + (SCALES ? SRCS : 0);
    static constexpr u32 MOST = Place<T>::WIDE > Place<T>::LINES ? Place<T>::WIDE : Place<T>::LINES;

    RC_DEVICE static constexpr u32 lines_of(Kind kind) {
        if (kind == Kind::LINES) return Place<T>::LINES;
        return kind == Kind::PARTIAL ? Place<T>::WIDE : 0;
    }

    using Scale = Factors<T, SCALES ? RAW : 0, SRCS>;

    // What the steps read of the user's own memory, which is there before any rank has entered.
    struct Users {
        Elements<T> place[ROWS][SRCS];
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
                    users.place[r][s] = read_user<T>(t.user(words[r * ROW + 1 + s]), count);
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
            if (t.place < t.call.args.places)
                trace(t.call, step << 16 | r, t.place, t.here(row[0]));
            // The threads of a line stay together: who has none of its elements goes along.
            if (LANES == 1 && !t.has_line(row[0])) continue;
            const u32 count = t.here(row[0]);
            if constexpr (REDUCES) {
                reduce(t, row, count, users.place[r], lines[r], scale);
            } else {
                move(t, row, count, users.place[r], lines[r]);
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

    // LL: look at all lines of all rows before testing any, until all have come.
    RC_DEVICE static bool poll_lines(Thread<T>& t, const u64* words,
                                     Vector (&lines)[ROWS][SRCS][MOST], u32 step) {
        const u32 flag = t.call.flag();
        each_line([&](u32 r, u32 s, u32 i) {  // a place beyond a chunk has nothing to wait for
            const u32 found = t.has_line(words[r * ROW]) ? flag - 1 : flag;
            lines[r][s][i] = {0, found, 0, found};
        });
        for (u32 looks = 1;; ++looks) {
            each_line([&](u32 r, u32 s, u32 i) {
                ll_look(lines[r][s][i], line(t, words, r, s, i), flag);
            });
            u32 missing = 0;
            each_line([&](u32 r, u32 s, u32 i) {
                missing |= (lines[r][s][i].y ^ flag) | (lines[r][s][i].w ^ flag);
            });
            if (missing == 0) return true;
            if (rare(looks % LOOKS == 0)) {
                u32 which = ROWS * SRCS;
                each_line([&](u32 r, u32 s, u32 i) {
                    if (which == ROWS * SRCS && !arrived(lines[r][s][i], flag)) which = r * SRCS + s;
                });
                if (t.call.late(looks, SOURCE | which, step)) return false;
            }
            pause();
        }
    }

    // LL128: the last thread of each line looks at its flags. When the warp has all, it loads the
    // data, and not before: the threads' parts of one load need not be of one moment.
    RC_DEVICE static bool poll_flags(Thread<T>& t, const u64* words,
                                     Vector (&lines)[ROWS][SRCS][MOST], u32 step) {
        for (u32 looks = 1;; ++looks) {
            u32 missing = 0, which = ROWS * SRCS;
            if (t.last()) {
                u64 flags[ROWS][SRCS][MOST];
                each_line([&](u32 r, u32 s, u32 i) {
                    flags[r][s][i] = look_wide(line(t, words, r, s, i) + 8);
                });
                each_line([&](u32 r, u32 s, u32 i) {
                    if (flags[r][s][i] == t.call.epoch || !t.has_line(words[r * ROW])) return;
                    missing = 1;
                    if (which == ROWS * SRCS) which = r * SRCS + s;
                });
            }
            if (!warp_any(missing != 0)) break;
            if (rare(looks % LOOKS == 0) &&
                warp_any(missing != 0 && t.call.late(looks, SOURCE | which, step)))
                return false;
            pause();
        }
        each_line([&](u32 r, u32 s, u32 i) { lines[r][s][i] = ll_load(line(t, words, r, s, i)); });
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

    // The words of a place in `COUNT` lines of it.
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
        Elements<T> place;
        take<Place<T>::LINES>(place.words, lines);
        return place;
    }

    // Source k in the accumulator's type.
    template <u32 K>
    RC_DEVICE static Partials<T> operand(const Thread<T>& t, const Elements<T> (&users)[SRCS],
                                         const Vector (&lines)[SRCS][MOST], const Scale& scale) {
        Partials<T> place;
        if constexpr (Srcs::at(K) == Kind::PARTIAL) {
            take<Place<T>::WIDE>(place.words, lines[K]);
        } else {
            const Elements<T> raw = elements(t, Srcs::at(K), users[K], lines[K]);
#pragma unroll
            for (u32 i = 0; i < Place<T>::COUNT; ++i)
                place.acc[i] = (RAW >> K & 1) ? Op::load(raw.raw[i], scale.of(K))
                                              : T::widen(raw.raw[i]);
        }
        return place;
    }

    template <u32 K>
    RC_DEVICE static void fold(const Thread<T>& t, const Elements<T> (&users)[SRCS],
                               const Vector (&lines)[SRCS][MOST], const Scale& scale,
                               Partials<T>& total) {
        if constexpr (K < SRCS) {
            const Partials<T> term = operand<K>(t, users, lines, scale);
#pragma unroll
            for (u32 i = 0; i < Place<T>::COUNT; ++i)
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
        for (u32 i = 0; i < Place<T>::COUNT; ++i)
            t.kept.raw[i] = T::narrow(FINAL ? Op::finish(total.acc[i], RC_RANKS) : total.acc[i]);
#pragma unroll
        for (u32 d = 0; d < DSTS; ++d) {
            const u64 chunk = row[1 + SRCS + d];
            if (Dsts::at(d) == Kind::USER) write_user<T>(t.user(chunk), count, t.kept);
            if (Dsts::at(d) == Kind::LINES) put<Place<T>::LINES>(t, row[0], chunk, t.kept.words);
            if (Dsts::at(d) == Kind::PARTIAL) put<Place<T>::WIDE>(t, row[0], chunk, total.words);
        }
    }

    RC_DEVICE static void move(Thread<T>& t, const u64* row, u32 count,
                               const Elements<T> (&users)[SRCS],
                               const Vector (&lines)[SRCS][MOST]) {
        if constexpr (Srcs::at(0) == Kind::PARTIAL) {
            const Partials<T> place = operand<0>(t, users, lines, Scale{});
#pragma unroll
            for (u32 d = 0; d < DSTS; ++d)
                put<Place<T>::WIDE>(t, row[0], row[1 + SRCS + d], place.words);
        } else {
            const Elements<T> place = elements(t, Srcs::at(0), users[0], lines[0]);
#pragma unroll
            for (u32 d = 0; d < DSTS; ++d) {
                const u64 chunk = row[1 + SRCS + d];
                if (Dsts::at(d) == Kind::USER) write_user<T>(t.user(chunk), count, place);
                if (Dsts::at(d) == Kind::LINES) put<Place<T>::LINES>(t, row[0], chunk, place.words);
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
                ll_store(at, words[i], t.call.flag());
            } else {
                const u64 high = t.last() ? t.call.epoch : words[COUNT * (HELD - 1) + i];
                line_store(t.has_line(elements), at, words[i], high);
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

// The last warp of a block: greets the peers, moves the epoch on, and ends only when every peer is
// known to make the same call, if that is to be known. The others need not wait for it.
template <class Op>
RC_DEVICE void attend(const Args& args, const Local& local, u32 workers) {
    Call call(args, local);
    const u32 lane = thread_index() - workers;
    const bool entered = call.enter(false);
    if (entered && block_index() == 0)
#pragma unroll 1  // most often once: less text is sooner there
        for (u32 p = lane; p < RC_RANKS; p += SYNC_THREADS) call.say_hello(p, 1);
    if constexpr (Op::SCALES)
        for (u32 p = lane; entered && p < RC_RANKS; p += SYNC_THREADS)
            if (block_index() == 0) call.say_factor(p);
    block_await();
    if (entered) call.leave(workers, SYNC_THREADS);
    bool agreed = entered && args.total;
#pragma unroll 1
    for (u32 p = lane; agreed && p < RC_RANKS; p += SYNC_THREADS)
        agreed = p == local.rank || call.agree(p);
}

// The whole call of one rank. A Program has its batches in order: `First`, and `rest`, which runs
// the others for a place.
template <class T, class Program>
RC_DEVICE void run(const Args& args, const Local& local) {
    const u32 workers = block_threads() - SYNC_THREADS;
    if (thread_index() >= workers) return attend<typename Program::Op>(args, local, workers);
    Call call(args, local);
    Thread<T> thread(call);
    thread.place = static_cast<u64>(block_index()) * workers + thread_index();
    // These loads are on their way while the epoch is: one latency instead of two.
    typename Program::First::Users users = Program::First::fetch(thread, 0);
    bool entered = call.enter(false);
    if (LANES > 1) entered = !warp_any(!entered);  // the threads of a line go together
    block_arrive();
    if (!entered || thread.place >= args.places) return;
    const u64 stride = static_cast<u64>(workers) * grid_blocks();
    for (;;) {
        Program::First::run(thread, users, 0, 0);
        Program::rest(thread);
        thread.place += stride;
        if (!thread.alive || thread.place >= args.places) return;
        users = Program::First::fetch(thread, 0);
    }
}

}  // namespace rc::ll
