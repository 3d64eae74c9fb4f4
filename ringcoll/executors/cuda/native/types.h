/* What is kept of a rank and of its calls. */

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>

#define INTERFACE 3 /* raised with every change of what Python gives */
#define BUCKETS 256 /* a power of two */
#define LIBRARIES 4 /* types of arrays */
#define GIVEN 4     /* addresses that a launch is given */
#define PLACES 256  /* chunks of INPUT and OUTPUT in the words of a call */
#define WIDTHS 8    /* numbers of threads that blocks may have */

/* Objects of a rank: the fields of FastPath, what keeps the streams of its last call, the set of
 * open groups, and CuPy's get_current_stream. */
enum {
    RANK,
    ORDER,
    TIMER,
    REPORT,
    RECORDS,
    GET_DEVICE,
    ORDINAL,
    THREAD,
    ERRORS,
    FABRIC,
    OWNERS,
    GROUPS,
    CURRENT,
    OWNED
};

/* How the arrays of a library are read. */
enum { CUPY, RAW, DLPACK, READERS };

/* cuLaunchKernel: a kernel, its grid and block, shared memory, a stream, its parameters, no extra.
 */
typedef int (*LaunchKernel)(uintptr_t, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            unsigned, uintptr_t, uintptr_t, uintptr_t);

/* cuCtxGetDevice: that of the thread's context, an error where it has none. */
typedef int (*GetDevice)(int*);

struct DLExchange;

typedef struct {
    PyTypeObject* type;
    int reader;
    const struct DLExchange* exchange; /* of DLPACK; the library's, which is there for ever */
    PyObject* owner;                   /* of DLPACK: what keeps its streams alive */
} Library;

/* An array, or no argument: without a library. */
typedef struct {
    const Library* library;
    uintptr_t start;
    long long size; /* elements */
    uintptr_t kind; /* its dtype: an object, or that of DLPack */
} Reading;

typedef struct {
    Py_ssize_t word;
    int number; /* of the address that goes there */
    uint64_t offset;
} Fill;

/* A kernel with its grid, and where the address of its parameter lies; the last alone where Python
 * enqueues it. */
typedef struct {
    uintptr_t function;
    unsigned blocks, locals, threads;
    uintptr_t pointers;
} Kernel;

typedef struct Entry {
    struct Entry* next;
    int refs; /* of the table, and of threads that make the call */
    PyObject *name, *op, *dtypes[2];
    long root;
    Reading arguments[2]; /* without addresses */
    unsigned alignment;   /* of both addresses: see key_of in CudaEngine */
    bool shared;          /* whether the arguments share memory, at this distance */
    intptr_t distance;
    Py_ssize_t nbytes[2];
    int bases[2];          /* the argument where INPUT and OUTPUT lie; 2: none */
    Py_ssize_t offsets[2]; /* where */
    PyObject *prepared, *launchable, *parameter;
    Kernel kernel;
    uint64_t* words; /* of the parameter */
    int nfills;
    Fill* fills;
} Entry;

/* -- calls of any count ------------------------------------------------------------------------ */

typedef struct {
    long long first, length; /* elements */
} Span;

/* Words of a parameter: the elements of a place, an address in the user's memory, and one in
 * SCRATCH. */
typedef struct {
    Py_ssize_t word;
    int place;
} CountWord;

typedef struct {
    Py_ssize_t word;
    int number, place; /* of the address, INPUT or OUTPUT, and where in it */
    int length;        /* the place whose elements lie there; -1: none */
} User;

typedef struct {
    Py_ssize_t word;
    unsigned long long start, index;
} Slot;

/* Calls that differ in their counts alone, and what of their parameter these decide: see
 * recounts.h. */
typedef struct Like {
    struct Like* next;
    int refs; /* of the table, and of threads that make a call */
    PyObject *name, *op, *dtypes[2];
    long root;
    Reading arguments[2]; /* of which the libraries and the kinds count */
    unsigned alignment;
    bool one;                     /* whether both arguments are one */
    long long items[2], units[2]; /* bytes of each argument: an element, and one of the count */
    long long odd[2];             /* bytes behind whole words */
    long long first, last;        /* counts, without the last */
    long long low, high, each;    /* bytes of a call, without the last; for one of the count */
    int bases[2];                 /* the argument of INPUT, and of OUTPUT; 2: none */
    long long offsets[2];         /* where they lie in it: bytes for one of the count */
    long long chunks, align;      /* of the layout */
    long long item, held, lanes, pack_bytes;
    bool whole;
    long long most, few, sync, widths[WIDTHS]; /* of the grid */
    int nwidths, nplaces, ncounts, nusers, nslots, nfixed;
    long long* places;
    CountWord* counts;
    User* users;
    Slot* slots;
    Fill* fixed;
    unsigned long long given[2], timeout;
    Py_ssize_t nwords, packs_at, signature_at, number_at, timeout_at;
    uint64_t* words;
    PyObject *begin, *launchable; /* Recounter.begin_new; whose parameter the words are */
    Kernel kernel;                /* without its grid */
} Like;

/* Where the elements of one count lie, and what tells the call from others. */
typedef struct {
    Like* like;
    long long count, packs;
    unsigned blocks, threads;
    uint64_t signature, number;
    Span spans[PLACES];
} Placed;

typedef struct {
    PyObject ob_base;
    vectorcallfunc vectorcall;
    PyObject* owned[OWNED];
    LaunchKernel launch;     /* cuLaunchKernel; NULL: Python enqueues */
    GetDevice get_device;    /* cuCtxGetDevice; NULL: Python is asked */
    int device_type, device; /* as DLPack names them */
    Library libraries[LIBRARIES];
    int nlibraries;
    Py_ssize_t size; /* entries */
    Entry* table[BUCKETS];
    Py_ssize_t nlikes;
    Like* likes[BUCKETS];
    uint64_t
        bound; /* the last thread that was seen to be bound to the device, by Python's number */
} Launches;
