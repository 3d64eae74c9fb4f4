// Arrays of one rank's memory folded into one: what a rank has got from others, summed.
//
// The sources lie one after the other and are combined in that order, in the accumulator. They are
// elements as users have them (RAW) or partial results in the accumulator's type; so is what comes
// out. FINAL: it is the whole.
//
// Words: sources; the first one's address; bytes from one to the next; where to; elements; ranks.
#pragma once

#include "ops.cuh"
#include "program.cuh"

namespace rc::fold {

template <class T, class Op, bool RAW_IN, bool RAW_OUT, bool FINAL>
RC_DEVICE void run(const Args& args) {
    using Raw = typename T::Raw;
    using Acc = typename T::Acc;
    constexpr u32 IN = RAW_IN ? sizeof(Raw) : sizeof(Acc),
                  OUT = RAW_OUT ? sizeof(Raw) : sizeof(Acc);
    const u64* words = args.local[0].words;
    const u64 sources = words[0], first = words[1], stride = words[2], to = words[3];
    const u64 count = words[4], nranks = words[5];
    const auto loaded = [&](u64 at) {
        if constexpr (RAW_IN) return Op::load(load<Raw>(at), Acc{});
        if constexpr (!RAW_IN) return load<Acc>(at);
    };
    const u64 threads = static_cast<u64>(block_threads()) * grid_blocks();
    const u64 mine = static_cast<u64>(block_index()) * block_threads() + thread_index();
    for (u64 k = mine; k < count; k += threads) {
        Acc total = loaded(first + k * IN);
        for (u64 s = 1; s < sources; ++s)
            total = Op::combine(total, loaded(first + s * stride + k * IN));
        if constexpr (FINAL) total = Op::finish(total, static_cast<u32>(nranks));
        if constexpr (RAW_OUT) store<Raw>(to + k * OUT, T::narrow(total));
        if constexpr (!RAW_OUT) store<Acc>(to + k * OUT, total);
    }
}

}  // namespace rc::fold
