/* What is kept of a rank and of its calls. */

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#define INTERFACE 1 /* raised with every change of what Python gives */
#define BUCKETS 256 /* a power of two */
#define LIBRARIES 4 /* types of arrays */
#define GIVEN 4     /* addresses that a launch is given */

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
    uint64_t
        bound; /* the last thread that was seen to be bound to the device, by Python's number */
} Launches;
