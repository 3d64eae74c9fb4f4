/* The launch of a call, as FastPath.launch, which says why each word is looked at. */

#pragma once

#include <time.h>

#include "names.h"
#include "recounts.h"
#include "types.h"

/* Whether an item of the list of record numbers is that of a call: 1, 0 or -1. */
static int is_recorded(const Launches* self, PyObject* prepared) {
    long long slot;
    if (number_of(prepared, &n_slot, &slot) < 0) return -1;
    PyObject* number = get(prepared, &n_number);
    if (number == NULL) return -1;
    PyObject* record = PyList_GetItem(self->owned[RECORDS], (Py_ssize_t)slot); /* borrowed */
    int same = record == NULL ? -1 : PyObject_RichCompareBool(record, number, Py_EQ);
    Py_DECREF(number);
    return same;
}

/* Whether the timer's next look at the peers is not due, and no alarm is given: 1, 0 or -1. */
static int is_early(const Launches* self) {
    PyObject* alarm = get(self->owned[TIMER], &n_alarm);
    int given = alarm == NULL ? -1 : is_first_true(alarm);
    Py_XDECREF(alarm);
    if (given != 0) return given < 0 ? -1 : 0;
    PyObject* due = get(self->owned[TIMER], &n_due);
    if (due == NULL) return -1;
    double when = PyFloat_AsDouble(due);
    Py_DECREF(due);
    if (when == -1.0 && PyErr_Occurred()) return -1;
    struct timespec now; /* as Python's time.monotonic() */
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9 < when;
}

/* Whether this thread has been bound to the device, which it stays: 1, 0 or -1. */
static int is_bound(Launches* self) {
    uint64_t thread = PyThreadState_GetID(PyThreadState_Get()); /* no other thread ever has it */
    if (thread == self->bound) return 1;
    int bound = is_true(self->owned[THREAD], &n_bound);
    if (bound == 1) self->bound = thread;
    return bound;
}

/* Whether the device of a rank is this thread's: 1, 0 or -1. */
static int is_here(Launches* self) {
    int same = is_bound(self);
    if (same != 1) return same;
    if (self->get_device != NULL) {
        int device;
        return self->get_device(&device) == 0 && device == self->device;
    }
    PyObject* device = PyObject_CallNoArgs(self->owned[GET_DEVICE]);
    if (device == NULL) return -1;
    same = PyObject_RichCompareBool(device, self->owned[ORDINAL], Py_EQ);
    Py_DECREF(device);
    return same;
}

/* Whether the slow path would do no more than enqueue: 1, 0 or -1. `prepared`: NULL where the call
 * is yet to be recorded. */
static int is_plain(Launches* self, PyObject* prepared, PyObject* stream) {
    PyObject* settled = get(self->owned[ORDER], &n_settled);
    if (settled == NULL) return -1;
    int plain = PyObject_RichCompareBool(settled, stream, Py_EQ);
    Py_DECREF(settled);
    if (plain == 1) plain = is_early(self);
    if (plain == 1) { /* behind the first: a rank that has closed has freed it */
        int reported = is_first_true(self->owned[REPORT]);
        plain = reported < 0 ? -1 : !reported;
    }
    if (plain == 1 && prepared != NULL) plain = is_recorded(self, prepared);
    return plain == 1 ? is_here(self) : plain;
}

/* Read what the driver is told of a kernel. */
static int read_kernel(const Launches* self, PyObject* launchable, Kernel* kernel) {
    long long function = 0, pointers, blocks = 0, locals = 0, threads = 0;
    if (number_of(launchable, &n_pointers, &pointers) < 0) return -1;
    if (self->launch != NULL && (number_of(launchable, &n_function, &function) < 0 ||
                                 number_of(launchable, &n_blocks, &blocks) < 0 ||
                                 number_of(launchable, &n_locals, &locals) < 0 ||
                                 number_of(launchable, &n_threads, &threads) < 0))
        return -1;
    *kernel = (Kernel){(uintptr_t)function, (unsigned)blocks, (unsigned)locals, (unsigned)threads,
                       (uintptr_t)pointers};
    return 0;
}

/* Let a kernel that Python has take the grid of this one. */
static int use_grid_of(PyObject* launchable, const Kernel* kernel) {
    PyObject* used =
        PyObject_CallMethod(launchable, "use_grid", "II", kernel->blocks, kernel->threads);
    Py_XDECREF(used);
    return used == NULL ? -1 : 0;
}

/* Give a kernel to the driver: without Python's lock, since CUDA waits here for a queue that is
 * full behind a kernel that waits for a peer. Where the driver refuses, Python asks it again and
 * words the error: that of the second time. `regrids`: whether Python's kernel may have another
 * grid. */
static int enqueue(const Launches* self, PyObject* launchable, const Kernel* kernel,
                   PyObject* stream, bool regrids) {
    if (self->launch != NULL) {
        uintptr_t on = (uintptr_t)PyLong_AsVoidPtr(stream);
        if (on == 0 && PyErr_Occurred()) return -1;
        int status;
        Py_BEGIN_ALLOW_THREADS;
        status = self->launch(kernel->function, kernel->blocks, kernel->locals, 1, kernel->threads,
                              1, 1, 0, on, kernel->pointers, 0);
        Py_END_ALLOW_THREADS;
        if (status == 0) return 0;
    }
    if (regrids && use_grid_of(launchable, kernel) < 0) return -1;
    PyObject* pointers = PyLong_FromUnsignedLongLong(kernel->pointers);
    PyObject* zero = PyLong_FromLong(0);
    PyObject* done = NULL;
    if (pointers != NULL && zero != NULL)
        done = PyObject_CallMethodObjArgs(launchable, n_enqueue.text, stream, pointers, zero, NULL);
    Py_XDECREF(pointers);
    Py_XDECREF(zero);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Write down that a call has been enqueued. */
static int note(const Launches* self, PyObject* prepared, PyObject* stream) {
    /* Read after the launch: another thread may have begun to mark ends meanwhile. */
    int marking = is_true(self->owned[ORDER], &n_marking);
    if (marking == 1) {
        PyObject* marked = PyObject_CallMethodOneArg(self->owned[ORDER], n_mark.text, stream);
        marking = marked == NULL ? -1 : 0;
        Py_XDECREF(marked);
    }
    if (marking < 0 || set(self->owned[ERRORS], &n_last, prepared) < 0) return -1;
    long long entered;
    if (number_of(self->owned[FABRIC], &n_entered, &entered) < 0) return -1;
    PyObject* more = PyLong_FromLongLong(entered + 1);
    int written = more == NULL ? -1 : set(self->owned[FABRIC], &n_entered, more);
    Py_XDECREF(more);
    return written;
}

/* Call a method while an exception may be raised, which stays, unless the method raises another:
 * that one has come in its handling. */
static void call_aside(PyObject* object, Name* name, bool with_error) {
    PyObject *type, *error, *trace, *done, *newer;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL) PyException_SetTraceback(error, trace);
    done = with_error ? PyObject_CallMethodOneArg(object, name->text, error)
                      : PyObject_CallMethodNoArgs(object, name->text);
    if (done != NULL) {
        Py_DECREF(done);
        PyErr_Restore(type, error, trace);
        return;
    }
    Py_XDECREF(type), Py_XDECREF(trace);
    if (error == NULL) return;
    PyErr_Fetch(&type, &newer, &trace);
    PyErr_NormalizeException(&type, &newer, &trace);
    if (newer == error)
        Py_DECREF(error);
    else
        PyException_SetContext(newer, error); /* which takes the reference */
    PyErr_Restore(type, newer, trace);
}

/* Write the addresses of a launch into the parameter of an entry. Python knows those that it wrote
 * itself: none after this. */
static int fill_words(Entry* entry, const uintptr_t* addresses) {
    for (int k = 0; k < entry->nfills; k++) {
        const Fill* fill = &entry->fills[k];
        entry->words[fill->word] = addresses[fill->number] + fill->offset;
    }
    PyObject* filled = get(entry->parameter, &n_filled);
    if (filled == NULL) return -1;
    int none = PyTuple_CheckExact(filled) && PyTuple_GET_SIZE(filled) == 0;
    Py_DECREF(filled);
    if (none) return 0;
    PyObject* nothing = PyTuple_New(0);
    int written = nothing == NULL ? -1 : set(entry->parameter, &n_filled, nothing);
    Py_XDECREF(nothing);
    return written;
}

/* The same for a kernel that Python has: unless they are those of the last launch. */
static int fill_parameter(PyObject* launchable, PyObject* addresses) {
    PyObject* parameter = get(launchable, &n_parameter);
    PyObject* filled = parameter == NULL ? NULL : get(parameter, &n_filled);
    int same = filled == NULL ? -1 : PyObject_RichCompareBool(addresses, filled, Py_EQ);
    if (same == 0) {
        PyObject* done = PyObject_CallMethodOneArg(parameter, n_fill.text, addresses);
        same = done == NULL ? -1 : 1;
        Py_XDECREF(done);
    }
    Py_XDECREF(filled);
    Py_XDECREF(parameter);
    return same < 0 ? -1 : 0;
}

/* Let a stream wait for what another has been given: (record, wait, event, the other). */
static int follow(PyObject* behind, PyObject* stream) {
    PyObject *record, *wait, *event, *other, *waited = NULL;
    if (!PyArg_ParseTuple(behind, "OOOO", &record, &wait, &event, &other)) return -1;
    PyObject* flags = PyLong_FromLong(0);
    PyObject* recorded =
        flags == NULL ? NULL : PyObject_CallFunctionObjArgs(record, event, other, NULL);
    if (recorded != NULL) waited = PyObject_CallFunctionObjArgs(wait, stream, event, flags, NULL);
    Py_XDECREF(recorded);
    Py_XDECREF(flags);
    Py_XDECREF(waited);
    return waited == NULL ? -1 : 0;
}

/* What is launched: an entry on addresses, or a call of a new count, or where there is neither, a
 * kernel that Python has. */
typedef struct {
    PyObject *prepared, *launchable, *stream;
    Entry* entry;
    Placed* placed;
    uintptr_t starts[GIVEN];
    PyObject *addresses, *behind; /* behind: NULL, or what it follows */
} Call;

/* Write the words of a call of a new count, and take its grid. */
static Kernel placed_kernel(const Call* call) {
    const Placed* placed = call->placed;
    Kernel kernel = placed->like->kernel;
    kernel.blocks = placed->blocks, kernel.threads = placed->threads;
    write_words(placed, call->starts);
    return kernel;
}

/* Enqueue a call whose lock is held, if that is all: 1, 0 or -1. */
static int launch_locked(Launches* self, const Call* call) {
    int plain = is_plain(self, call->prepared, call->stream);
    if (plain != 1) return plain;
    if (call->behind != NULL && follow(call->behind, call->stream) < 0) return -1;
    Kernel kernel;
    if (call->entry != NULL) {
        kernel = call->entry->kernel;
        if (fill_words(call->entry, call->starts) < 0) return -1;
    } else if (call->placed != NULL) {
        kernel = placed_kernel(call);
    } else if (read_kernel(self, call->launchable, &kernel) < 0 ||
               fill_parameter(call->launchable, call->addresses) < 0) {
        return -1;
    }
    if (enqueue(self, call->launchable, &kernel, call->stream, call->placed != NULL) < 0) return -1;
    return note(self, call->prepared, call->stream) < 0 ? -1 : 1;
}

/* Enqueue a call under the lock of the rank: 1, 0 where nothing was done, or -1. */
static int launch(Launches* self, const Call* call) {
    PyObject* lock = get(self->owned[RANK], &n_lock); /* in a fork it is another */
    if (lock == NULL) return -1;
    PyObject* taken = PyObject_CallMethodNoArgs(lock, n_acquire.text);
    if (taken == NULL) {
        Py_DECREF(lock);
        return -1;
    }
    Py_DECREF(taken);
    int made = launch_locked(self, call);
    if (made < 0) call_aside(self->owned[RANK], &n_fail, true);
    call_aside(lock, &n_release, false);
    Py_DECREF(lock);
    return PyErr_Occurred() ? -1 : made;
}
