/* What is kept of a rank and of its small calls; all shared words are 8 bytes, aligned, and have
 * one writer: see ringcoll/executors/shared_state.py. */

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#include <numpy/arrayobject.h>
#include <numpy/ufuncobject.h>

#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define INTERFACE 10  /* raised with every change of what Python gives */
#define BUCKETS 256   /* a power of two */
#define SLOTS 4       /* hellos of a rank, by epoch & 3 */
#define SMALL 16384   /* bytes of an array */
#define MOST 32       /* messages that are made together */
#define INTERVAL 0.02 /* seconds between looks at who has died */

/* Objects of a rank: RankState, CpuExecutor, Fabric, the set of open groups, its resume and rest,
 * the numbers of the texts that the rank keeps, Progress, and what is under way of messages. */
enum { STATE, HOST, FABRIC, GROUPS, RESUME, REST, NUMBERS, PROGRESS, ENTERED, OWNED };

/* Locks of a rank: of its calls, where VECTOR's messages are too, and of its messages. */
enum { MESSAGES, VECTOR, CONTEXTS };

enum { FIRST, SECOND, NOWHERE, ABSOLUTE = NOWHERE }; /* what a place is an offset of */

typedef struct {
    uint64_t* word;
    uint64_t count; /* without the epoch */
} Flag;

/* At base + offset + slots * (bytes of a slot) + stride * (units of the call). */
typedef struct {
    int base;
    intptr_t offset, slots, stride;
} Place;

typedef struct {
    int nwaits, nsignals, nsrcs, ndsts; /* nsrcs 0: nothing moves */
    Flag *waits, *signals;
    Place* places;               /* of the sources, then of the destinations */
    npy_intp fixed, each, item;  /* elements, those of each unit, and the bytes of one */
    PyUFuncGenericFunction loop; /* NULL: the bytes of one source are copied */
    void* data;
} Row;

typedef struct {
    int nrows;
    Row* rows;
    PyObject* active; /* an ActiveCall; NULL: the call has not run on this half yet */
} Half;

/* What arguments a known call takes. */
typedef struct {
    PyObject *name, *op, *how; /* op: of messages, their ends or counts; how: a dict of options */
    PyArray_Descr* kinds[2];   /* NULL: None is given */
    npy_intp sizes[2];         /* elements of the arrays for each unit */
    int flags[2];              /* of the arrays, in FLAGS */
} Shape;

typedef struct Entry {
    struct Entry* next;
    int refs; /* of the table, and of threads that run the call */
    Shape shape;
    PyObject* timeout; /* of a call without its own */
    Place places[2];   /* of INPUT and OUTPUT in the arguments */
    long root;
    bool total, in_place, counted; /* counted: the hello has the count */
    bool one;                      /* whether both arguments are the same memory */
    uint64_t digest, record;       /* of the hello */
    long long first, last;         /* units that it serves; the last is not among them */
    long long count;               /* of the call; -1: its units */
    long long align, widest;       /* elements on whose multiples slots end, and bytes of one */
    Half halves[2];
} Entry;

/* What a message of a pair waits for and posts, and where it lands, for one parity of epochs. */
typedef struct {
    int nwaits, nsignals;
    Flag *waits, *signals;
    char* zone;
} Landing;

/* A send or a receive of a known exchange; `own` and `other` are the indices of the pair's words.
 */
typedef struct {
    PyObject* pair; /* (peer, sends), by which its epochs are kept */
    int peer, sends;
    Py_ssize_t own, other;
    unsigned long long signature, record, count, label; /* of the hello */
    int base;                                           /* the argument where its elements lie */
    Py_ssize_t offset, nbytes;
    Landing landings[2];
} Message;

/* The segment that a rank sends to itself. */
typedef struct {
    int from, to;
    Py_ssize_t source, destination, nbytes;
} Copy;

/* Sends and receives that one call makes. */
typedef struct Exchange {
    struct Exchange* next;
    int refs;
    Shape shape;
    PyObject* kept;                         /* the Exchange of Python */
    int context, later, nmessages, ncopies; /* later: nobody waits for it in the call */
    Message* messages;
    Copy* copies;
} Exchange;

/* What moves the messages of a context: its Pairs, their epochs, and in Python the rest of a call
 * that has to wait. */
typedef struct {
    PyObject *pairs, *epochs, *go_on;
} Context;

/* One call: what it is, and where its buffers lie. */
typedef struct {
    Entry* entry;
    long long units, count;
    intptr_t bases[3], slot; /* INPUT, OUTPUT and 0; bytes of a slot of SCRATCH */
    uint64_t signature;
    PyObject* timeout;
    PyObject* active; /* borrowed of the entry */
    bool later;       /* nobody waits for it in the call */
    PyObject* rest;   /* of such a call: what Python is to go on with, if anything */
} Call;

typedef struct {
    PyObject ob_base;
    vectorcallfunc vectorcall;
    PyObject* owned[OWNED];
    int nranks, rank, spins, yields;
    int running; /* threads that run a call: one, and others that it lets make their own inside */
    bool closed;
    char lost;        /* whether messages that peers have seen ended in an error */
    Py_buffer* views; /* of every rank's words, which keep their memory */
    Py_buffer alarm;
    Py_ssize_t entered, signatures[SLOTS];
    double due;
    PyObject *acquire[CONTEXTS], *release[CONTEXTS];
    Context contexts[CONTEXTS];
    Entry* table[BUCKETS];
    Exchange* exchanges[BUCKETS];
} Calls;

#define FLAGS (NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | NPY_ARRAY_WRITEABLE)

/* The attributes that are read or written. */
/* clang-format off */
#define NAMES(X)                                                                                   \
    X(closed) X(inherited) X(broken) X(_worker) X(_last) X(ended) X(_failed) X(progress) X(left)   \
    X(running) X(trace) X(uncompared) X(known) X(epoch) X(entered) X(_ended) X(signature) X(timeout)  \
    X(_held) X(_queues) X(_closing) X(_finished) X(_finish) X(_source) X(_count) X(_state)         \
    X(_messages)
/* clang-format on */

#define DECLARE(name) static PyObject* s_##name;
NAMES(DECLARE)

static inline uint64_t load(const uint64_t* word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void store(uint64_t* word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline uint64_t* words_of(const Calls* self, int rank) { return self->views[rank].buf; }

static inline Py_ssize_t words_in(const Calls* self, int rank) {
    return self->views[rank].len / (Py_ssize_t)sizeof(uint64_t);
}

/* Where the table has the calls of a name on arrays like the first argument. */
static size_t bucket_of(PyObject* name, PyArray_Descr* kind) {
    uintptr_t hash = (uintptr_t)name >> 4 ^ (uintptr_t)kind >> 5;
    return (hash ^ hash >> 8 ^ hash >> 16) % BUCKETS;
}
