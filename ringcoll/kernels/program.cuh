// What a launch carries, and what a rank keeps in device memory between two launches.
//
// executors/cuda/params.py, workspace.py and reports.py hold the same layouts: fields have a fixed
// size, 8-byte fields come first. RC_RANKS, RC_LOCAL and RC_WORDS are constants of the shape.
#pragma once

// In angle brackets, so that the include path chooses: this folder's file, or the tests' for a CPU.
#include <system.cuh>

namespace rc {

constexpr u32 MOST_BLOCKS = 160;  // of one rank's grid
// By epoch & 3. Three hellos are in use at once: a rank in call x still compares those of x - 1,
// and a peer can be in call x + 1 at most. Four make the index a mask.
constexpr u32 HELLO_SLOTS = 4;
constexpr u32 HELLO_LINES = 3;   // {signature, launch}, INPUT and OUTPUT as peers reach them
constexpr u32 FACTOR_LINES = 2;  // after these, where the operator has a factor: its bytes

// Offsets into the workspace of a rank, which its peers map.
constexpr u64 BROKEN = 0;   // u32: not 0 once a call has failed here or at a peer
constexpr u64 CLAIMED = 4;  // u32: not 0 once a thread of this rank reports a failure
constexpr u64 HELLOS = 64;  // LL lines [slot][source rank][line]

// Of each block: the last call that it has ended, and the last call that all ranks are known to
// have entered.
struct alignas(16) Progress {
    u64 epoch;
    u64 known;
};

// Host-mapped: the first call that failed. `kind` is stored last, behind a fence: it publishes the
// other fields.
struct Report {
    u32 kind;
    u32 peer;  // who was waited for, or who made another call
    u64 epoch;
    u32 step;    // row of the program, or STEP_HELLO
    u32 launch;  // the peer's, if it made another call
    u32 abort;   // stored by the host: give up
    u32 mine;    // this rank's own launch of the call
    // Stored by the host when a rank has left: 1 + the last call that it entered. All bits: it has
    // entered all calls of this rank, but makes no more sends and receives.
    u32 left[RC_RANKS];
};
constexpr u64 LEFT_RANKS = 32;  // offset of `left`

// Kinds of reports: a deadline, different calls, aborted by the host, a failure at a peer, 2^32
// calls, a peer that has left.
constexpr u32 EXPIRED = 1, MISMATCH = 2, ABORTED = 3, PEER_FAILED = 4, EPOCH_WRAPPED = 5, LEFT = 6;
constexpr u32 STEP_HELLO = 0xffffffffu;
constexpr u32 STEP_PAIR = 0x40000000u;  // of a send or receive; with the two bits below
constexpr u32 PAIR_SENDS = 1, PAIR_ENTRY = 2;
constexpr u32 SOURCE = 0x80000000u;  // `peer` counts the step's sources or signals instead

struct Local {
    u64 progress;         // Progress[MOST_BLOCKS]
    u64 report;           // Report
    u64 own;              // the workspace of this rank, peers[rank]
    u64 peers[RC_RANKS];  // the workspaces, this rank's own too
    u64 mappings;         // u64[mapping][rank]: the blocks of symmetric memory
    u64 hello[2];         // INPUT and OUTPUT as peers reach them, mapping << 48 | offset
    u64 factor[2];        // bytes of this rank's factor, in the accumulator's type
    u64 user[2];          // INPUT and OUTPUT
    u32 rank;
    u32 program;   // which of the text's programs this rank runs
    u32 launch;    // by which the host finds this rank's call again
    u32 compared;  // bit p % 32: rank p has entered when this rank ends, so its hello is compared
    u64 words[RC_WORDS];  // of the program: counts, addresses, flags
};

struct Args {
    u64 timeout;    // ns
    u64 packs;      // LL: of the longest chunk, see ll.cuh
    u64 half;       // bytes between the two halves of SCRATCH
    u32 signature;  // of the call: equal on all ranks, or an error
    u32 total;      // whether a rank ends only after all have entered
    u32 replicas;   // CUDA blocks for each block of the program
    u32 mapped;     // whether peers' INPUT or OUTPUT may be reached, as their hellos say
    Local local[RC_LOCAL];
};

}  // namespace rc
