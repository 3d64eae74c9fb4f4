// Calls whose signals ride in the data: protocol LL.
//
// Every piece of SCRATCH is an array of 16-byte lines that carry 8 bytes and the call's epoch. A
// thread owns the same places of all chunks, so what it receives is what its twins on the other
// ranks have sent: it runs the whole program for a place without a barrier. The last warp of a block
// does not: it exchanges and compares the hellos meanwhile.
#pragma once

#include "call.cuh"
#include "ops.cuh"
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

// A place is what 8 bytes of elements hold, or one element if that is larger.
template <class T>
struct Place {
    using Raw = typename T::Raw;
    using Acc = typename T::Acc;
    static constexpr u32 COUNT = sizeof(Raw) < 8 ? 8 / sizeof(Raw) : 1;
    static constexpr u32 BYTES = COUNT * sizeof(Raw);
    static constexpr u32 LINES = BYTES / 8;
    static constexpr u32 WIDE = COUNT * sizeof(Acc) / 8;  // lines of a partial
};

template <class T>
union Elements {
    typename T::Raw raw[Place<T>::COUNT];
    u64 words[Place<T>::LINES];
    RC_DEVICE Elements() {
#pragma unroll
        for (u32 i = 0; i < Place<T>::LINES; ++i) words[i] = 0;
    }
};

template <class T>
union Partials {
    typename T::Acc acc[Place<T>::COUNT];
    u64 words[Place<T>::WIDE];
    RC_DEVICE Partials() {
#pragma unroll
        for (u32 i = 0; i < Place<T>::WIDE; ++i) words[i] = 0;
    }
};

// The user's memory has the alignment of its elements and ends anywhere; RC_WHOLE says that all of
// it begins at 8 bytes and ends with a whole place: the branches for the rest cost 0.2 to 0.8 µs.
template <class T>
RC_DEVICE Elements<T> read_user(u64 at, u32 count) {
    Elements<T> place;
    if (RC_WHOLE || (count == Place<T>::COUNT && at % 8 == 0)) {
        for (u32 i = 0; i < Place<T>::LINES; ++i) place.words[i] = load<u64>(at + 8 * i);
    } else {
        for (u32 i = 0; i < Place<T>::COUNT; ++i)
            if (i < count) place.raw[i] = load<typename T::Raw>(at + i * sizeof(typename T::Raw));
    }
    return place;
}

template <class T>
RC_DEVICE void write_user(u64 at, u32 count, const Elements<T>& place) {
    if (RC_WHOLE || (count == Place<T>::COUNT && at % 8 == 0)) {
        for (u32 i = 0; i < Place<T>::LINES; ++i) store<u64>(at + 8 * i, place.words[i]);
    } else {
        for (u32 i = 0; i < Place<T>::COUNT; ++i)
            if (i < count) store(at + i * sizeof(typename T::Raw), place.raw[i]);
    }
}

// A thread at one place of the call.
template <class T>
struct Thread {
    Call& call;
    u64 place;
    Elements<T> kept;  // the elements that the last reducing step has made
    bool alive = true;

    RC_DEVICE Thread(Call& c) : call(c), place(0) {}

    // How many elements of a chunk of `count` lie at this place.
    RC_DEVICE u32 here(u64 count) const {
        const u64 first = place * Place<T>::COUNT;
        if (count <= first) return 0;
        if (RC_WHOLE) return Place<T>::COUNT;
        return count - first < Place<T>::COUNT ? static_cast<u32>(count - first) : Place<T>::COUNT;
    }
    RC_DEVICE u64 user(u64 chunk) const { return chunk + place * Place<T>::BYTES; }
    RC_DEVICE u64 line(u64 chunk, u32 lines) const {
        return chunk + call.half() + place * lines * 16;
    }
};

// `ROWS` steps of one shape, none of which needs another: all their lines are polled together.
//
// Words of a row: its count, then its sources, then its destinations. Bit k of RAW says that source k
// is a contribution that the operator has yet to load; FINAL, that the operator finishes the result.
// A step that does not reduce has one source and moves it as it is.
template <class T, class Op, bool REDUCES, bool FINAL, u32 RAW, u32 ROWS, u32 SRCS, u32 DSTS,
          class Srcs, class Dsts>
struct Batch {
    static constexpr u32 ROW = 1 + SRCS + DSTS;
    static constexpr u32 MOST = Place<T>::WIDE > Place<T>::LINES ? Place<T>::WIDE : Place<T>::LINES;

    RC_DEVICE static constexpr u32 lines_of(Kind kind) {
        if (kind == Kind::LINES) return Place<T>::LINES;
        return kind == Kind::PARTIAL ? Place<T>::WIDE : 0;
    }

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
                if (Srcs::at(s) == Kind::USER && count != 0)
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
        if (!poll(t, words, lines, step)) {
            t.alive = false;
            return;
        }
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            const u64* row = words + r * ROW;
            const u32 count = t.here(row[0]);
            if (count == 0) continue;
            if constexpr (REDUCES) {
                reduce(t, row, count, users.place[r], lines[r]);
            } else {
                move(t, row, count, users.place[r], lines[r]);
            }
        }
    }

    // Look at all lines of all rows before testing any, until all have come.
    RC_DEVICE static bool poll(Thread<T>& t, const u64* words, Vector (&lines)[ROWS][SRCS][MOST],
                               u32 step) {
        const u32 flag = t.call.flag();
        for (u32 looks = 1;; ++looks) {
            bool missing = false;
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r)
#pragma unroll
                for (u32 s = 0; s < SRCS; ++s)
#pragma unroll
                    for (u32 i = 0; i < lines_of(Srcs::at(s)); ++i)
                        if (t.here(words[r * ROW]) != 0)
                            lines[r][s][i] = ll_load(
                                t.line(words[r * ROW + 1 + s], lines_of(Srcs::at(s))) + 16 * i);
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r)
#pragma unroll
                for (u32 s = 0; s < SRCS; ++s)
#pragma unroll
                    for (u32 i = 0; i < lines_of(Srcs::at(s)); ++i)
                        if (t.here(words[r * ROW]) != 0)
                            missing = missing || !arrived(lines[r][s][i], flag);
            if (!missing) return true;
            if (looks % LOOKS == 0 && t.call.late(SOURCE | first_missing(words, lines, t), step))
                return false;
            pause();
        }
    }

    // Which line kept this thread waiting, counted over the rows' sources.
    RC_DEVICE static u32 first_missing(const u64* words, const Vector (&lines)[ROWS][SRCS][MOST],
                                       const Thread<T>& t) {
        u32 which = ROWS * SRCS;
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r)
#pragma unroll
            for (u32 s = 0; s < SRCS; ++s)
                if (which == ROWS * SRCS && lines_of(Srcs::at(s)) != 0 &&
                    t.here(words[r * ROW]) != 0 && !arrived(lines[r][s][0], t.call.flag()))
                    which = r * SRCS + s;
        return which;
    }

    RC_DEVICE static Elements<T> elements(const Thread<T>& t, Kind kind, const Elements<T>& user,
                                          const Vector (&lines)[MOST]) {
        if (kind == Kind::KEPT) return t.kept;
        if (kind == Kind::USER) return user;
        Elements<T> place;
#pragma unroll
        for (u32 i = 0; i < Place<T>::LINES; ++i) place.words[i] = data_of(lines[i]);
        return place;
    }

    // Source k in the accumulator's type.
    template <u32 K>
    RC_DEVICE static Partials<T> operand(const Thread<T>& t, const Elements<T> (&users)[SRCS],
                                         const Vector (&lines)[SRCS][MOST]) {
        Partials<T> place;
        if constexpr (Srcs::at(K) == Kind::PARTIAL) {
#pragma unroll
            for (u32 i = 0; i < Place<T>::WIDE; ++i) place.words[i] = data_of(lines[K][i]);
        } else {
            const Elements<T> raw = elements(t, Srcs::at(K), users[K], lines[K]);
#pragma unroll
            for (u32 i = 0; i < Place<T>::COUNT; ++i)
                place.acc[i] = (RAW >> K & 1) ? Op::load(raw.raw[i], typename T::Acc{})
                                              : T::widen(raw.raw[i]);
        }
        return place;
    }

    template <u32 K>
    RC_DEVICE static void fold(const Thread<T>& t, const Elements<T> (&users)[SRCS],
                               const Vector (&lines)[SRCS][MOST], Partials<T>& total) {
        if constexpr (K < SRCS) {
            const Partials<T> term = operand<K>(t, users, lines);
#pragma unroll
            for (u32 i = 0; i < Place<T>::COUNT; ++i)
                total.acc[i] = Op::combine(total.acc[i], term.acc[i]);
            fold<K + 1>(t, users, lines, total);
        }
    }

    RC_DEVICE static void reduce(Thread<T>& t, const u64* row, u32 count,
                                 const Elements<T> (&users)[SRCS],
                                 const Vector (&lines)[SRCS][MOST]) {
        Partials<T> total = operand<0>(t, users, lines);
        fold<1>(t, users, lines, total);
#pragma unroll
        for (u32 i = 0; i < Place<T>::COUNT; ++i)
            t.kept.raw[i] = T::narrow(FINAL ? Op::finish(total.acc[i], RC_RANKS) : total.acc[i]);
#pragma unroll
        for (u32 d = 0; d < DSTS; ++d) {
            const u64 chunk = row[1 + SRCS + d];
            if (Dsts::at(d) == Kind::USER) write_user<T>(t.user(chunk), count, t.kept);
            if (Dsts::at(d) == Kind::LINES) put(t, chunk, t.kept.words);
            if (Dsts::at(d) == Kind::PARTIAL) put(t, chunk, total.words);
        }
    }

    RC_DEVICE static void move(Thread<T>& t, const u64* row, u32 count,
                               const Elements<T> (&users)[SRCS],
                               const Vector (&lines)[SRCS][MOST]) {
        if constexpr (Srcs::at(0) == Kind::PARTIAL) {
            const Partials<T> place = operand<0>(t, users, lines);
#pragma unroll
            for (u32 d = 0; d < DSTS; ++d) put(t, row[1 + SRCS + d], place.words);
        } else {
            const Elements<T> place = elements(t, Srcs::at(0), users[0], lines[0]);
#pragma unroll
            for (u32 d = 0; d < DSTS; ++d) {
                const u64 chunk = row[1 + SRCS + d];
                if (Dsts::at(d) == Kind::USER) write_user<T>(t.user(chunk), count, place);
                if (Dsts::at(d) == Kind::LINES) put(t, chunk, place.words);
            }
        }
    }

    template <u32 LINES>
    RC_DEVICE static void put(Thread<T>& t, u64 chunk, const u64 (&words)[LINES]) {
        const u64 at = t.line(chunk, LINES);
#pragma unroll
        for (u32 i = 0; i < LINES; ++i) ll_store(at + 16 * i, words[i], t.call.flag());
    }
};

// The first batch of a rank that moves nothing.
template <class T>
struct Nothing {
    struct Users {};
    RC_DEVICE static Users fetch(const Thread<T>&, u32) { return {}; }
    RC_DEVICE static void run(Thread<T>&, const Users&, u32, u32) {}
};

// The whole call of one rank. A Program has its batches in order: `First`, and `rest`, which runs
// the others for a place.
template <class T, class Program>
RC_DEVICE void run(const Args& args, const Local& local) {
    Call call(args, local);
    const u32 workers = block_threads() - SYNC_THREADS;
    const bool works = thread_index() < workers;
    Thread<T> thread(call);
    thread.place = static_cast<u64>(block_index()) * workers + thread_index();
    // These loads are on their way while the epoch is: one latency instead of two.
    typename Program::First::Users users;
    if (works) users = Program::First::fetch(thread, 0);
    bool done = call.enter(workers, SYNC_THREADS);
    if (done && !works) {
        const u32 lane = thread_index() - workers;
        for (u32 p = lane; p < RC_RANKS; p += SYNC_THREADS)
            if (block_index() == 0 && p != local.rank) call.say_hello(p, 1);
        for (u32 p = lane; p < RC_RANKS; p += SYNC_THREADS)
            if (args.total && p != local.rank) done = call.agree(p) && done;
    } else if (done && thread.place < args.places) {
        const u64 stride = static_cast<u64>(workers) * grid_blocks();
        for (;;) {
            Program::First::run(thread, users, 0, 0);
            Program::rest(thread);
            thread.place += stride;
            if (!thread.alive || thread.place >= args.places) break;
            users = Program::First::fetch(thread, 0);
        }
        done = thread.alive;
    }
    call.leave(done);
}

}  // namespace rc::ll
