// A record of every executed row, in builds that define RC_TRACE: the number of the word that holds
// the address of the rank's record. See executors/cuda/trace.py.
#pragma once

#include "call.cuh"

namespace rc {

// The head of a record. Rows that find no room are counted all the same.
struct Record {
    u64 rows;  // that were executed
    u64 room;
};

// `step` is a row of the program, or STEP_HELLO. `at` is the slice with protocol Simple; with LL,
// which executes a row once for each pack, the pack; with STEP_HELLO the program that runs.
struct Executed {
    u32 block;  // with Simple its place, a block's replicas one after the other; with LL 0
    u32 step;
    u64 at;
    u64 count;  // elements that were moved
};

#ifdef RC_TRACE
RC_DEVICE void trace(const Call& call, u32 block, u32 step, u64 at, u64 count) {
    const u64 record = call.local.words[RC_TRACE];
    if (record == 0) return;
    const u64 row = atom_add_relaxed_gpu_u64(record, 1);
    if (row >= load<u64>(record + 8)) return;
    const Executed executed = {block, step, at, count};
    store(record + sizeof(Record) + row * sizeof(Executed), executed);
}
#else
RC_DEVICE void trace(const Call&, u32, u32, u64, u64) {}
#endif

}  // namespace rc
