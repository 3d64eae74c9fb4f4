/* One small call of a rank, from the look whether it may be made to its end. */

#pragma once

#include "types.h"

/* -- what Python says of the rank -------------------------------------------------------------- */

/* Whether an attribute is this object: 1, 0, or -1 with an exception. */
static int is(PyObject* owner, PyObject* name, PyObject* wanted) {
    PyObject* found = PyObject_GetAttr(owner, name);
    if (found == NULL) return -1;
    Py_DECREF(found);
    return found == wanted;
}

/* A count that is an attribute; -1 with an exception. */
static long long count_of(PyObject* owner, PyObject* name) {
    PyObject* found = PyObject_GetAttr(owner, name);
    if (found == NULL) return -1;
    long long count = PyLong_AsLongLong(found);
    Py_DECREF(found);
    return count;
}

/* Whether no asynchronous call is left to run, and none has failed: as CpuEngine.collective. */
static int is_idle(const Calls* self) {
    PyObject* worker = PyObject_GetAttr(self->owned[STATE], s__worker);
    if (worker == NULL) return -1;
    int idle = 1;
    if (worker != Py_None) {
        PyObject *last = PyObject_GetAttr(worker, s__last), *failed = NULL;
        idle = last == NULL ? -1 : is(last, s_ended, Py_True);
        if (idle == 1) {
            failed = PyObject_GetAttr(worker, s__failed);
            idle = failed == NULL ? -1 : PyObject_Not(failed);
        }
        Py_XDECREF(last);
        Py_XDECREF(failed);
    }
    Py_DECREF(worker);
    if (idle != 1) return idle;
    PyObject* progress = PyObject_GetAttr(self->owned[STATE], s_progress);
    if (progress == NULL) return -1;
    idle = progress == Py_None ? 0 : is(progress, s__failed, Py_None);
    Py_DECREF(progress);
    return idle;
}

/* Whether the rank may make a call now: 1, 0, or -1 with an exception. */
static int is_ready(const Calls* self) {
    const struct {
        PyObject *owner, *name;
    } empty[] = {
        {self->owned[STATE], s_closed}, {self->owned[STATE], s_inherited},
        {self->owned[STATE], s_broken}, {self->owned[HOST], s_left},
        {self->owned[HOST], s_running}, {self->owned[FABRIC], s__ended},
    };
    for (size_t k = 0; k < sizeof empty / sizeof *empty; k++) {
        PyObject* found = PyObject_GetAttr(empty[k].owner, empty[k].name);
        int no = found == NULL ? -1 : PyObject_Not(found);
        Py_XDECREF(found);
        if (no != 1) return no;
    }
    int untraced = is(self->owned[HOST], s_trace, Py_None);
    if (untraced != 1) return untraced;
    return is_idle(self);
}

/* Whether Python is to look at who has died: every 20 ms, and where the alarm is up. */
static bool is_due(Calls* self) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    double now = (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
    if (now < self->due && load(self->alarm.buf) == 0) return false;
    self->due = now + INTERVAL;
    return true;
}

/* -- a call ------------------------------------------------------------------------------------ */

/* Between two polls. */
static inline void pause_polling(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void yield_core(void) {
    PyThreadState* thread = PyEval_SaveThread();
    sched_yield();
    PyEval_RestoreThread(thread);
}

/* Whether a flag has come after some polls and some yields of the core, as many as are given. */
static bool awaited(const Calls* self, const Flag* flag, uint64_t base, int yields) {
    uint64_t wanted = base + flag->count;
    for (int k = 0; k <= self->spins; k++) {
        if (load(flag->word) >= wanted) return true;
        pause_polling();
    }
    for (int k = 0; k < yields; k++) {
        yield_core();
        if (load(flag->word) >= wanted) return true;
    }
    return false;
}

static inline char* address(const Place* place, const Call* call) {
    intptr_t start = call->bases[place->base] + place->offset;
    return (char*)(start + place->slots * call->slot + place->stride * call->units);
}

/* Copy, or combine the sources as a left fold in the order written. */
static void move(const Row* row, const Call* call) {
    const Place* dsts = row->places + row->nsrcs;
    npy_intp count = row->fixed + row->each * call->units;
    size_t nbytes = (size_t)(count * row->item);
    char *first = address(&dsts[0], call), *left = address(&row->places[0], call);
    if (row->loop == NULL) {
        for (int k = 0; k < row->ndsts; k++) {
            char* dst = address(&dsts[k], call);
            if (dst != left) memmove(dst, left, nbytes);
        }
        return;
    }
    _Alignas(64) char between[SMALL]; /* the destination may be a source that is still to come */
    npy_intp steps[3] = {row->item, row->item, row->item};
    for (int k = 1; k < row->nsrcs; k++) {
        char* to = k == row->nsrcs - 1 ? first : between;
        char* arrays[3] = {left, address(&row->places[k], call), to};
        row->loop(arrays, &count, steps, row->data);
        left = to;
    }
    for (int k = 1; k < row->ndsts; k++) memmove(address(&dsts[k], call), first, nbytes);
}

/* Whether a rank that has entered an epoch has made another call there. */
static bool is_mismatch(const Calls* self, uint64_t epoch, uint64_t signature) {
    for (int rank = 0; rank < self->nranks; rank++) {
        const uint64_t* words = words_of(self, rank);
        /* In this order: the slot holds an older signature until the rank has entered. */
        if (load(words + self->entered) >= epoch << 32 &&
            load(words + self->signatures[epoch % SLOTS]) != signature)
            return true;
    }
    return false;
}

/* Compare the call before, which may have ended before all had entered it; 0: Python waits. */
static int close_last(const Calls* self, uint64_t last) {
    long long known = count_of(self->owned[HOST], s_known);
    if (known < 0) return -1;
    if ((uint64_t)known >= last) return 1;
    for (int rank = 0; rank < self->nranks; rank++) {
        Flag entered = {words_of(self, rank) + self->entered, 0};
        if (!awaited(self, &entered, last << 32, self->yields)) return 0;
    }
    PyObject* uncompared = PyObject_GetAttr(self->owned[HOST], s_uncompared);
    if (uncompared == NULL) return -1;
    int alike = 0;
    if (uncompared != Py_None) {
        PyObject* signature = PyObject_GetAttr(uncompared, s_signature);
        uint64_t own = signature == NULL ? 0 : PyLong_AsUnsignedLongLong(signature);
        Py_XDECREF(signature);
        alike = PyErr_Occurred() ? -1 : !is_mismatch(self, last, own);
    }
    Py_DECREF(uncompared);
    if (alike != 1) return alike;
    PyObject* number = PyLong_FromUnsignedLongLong(last);
    if (number == NULL) return -1;
    int failed = PyObject_SetAttr(self->owned[HOST], s_known, number) < 0 ||
                 PyObject_SetAttr(self->owned[HOST], s_uncompared, Py_None) < 0;
    Py_DECREF(number);
    return failed ? -1 : 1;
}

/* Let Python go on with a call at a row, to its end; or later, when somebody waits for it. */
static int hand_over(const Calls* self, Call* call, PyObject* active, int row) {
    PyObject* rest = PyObject_CallFunction(self->owned[call->later ? REST : RESUME], "O(nniiL)i",
                                           active, (Py_ssize_t)call->bases[FIRST],
                                           (Py_ssize_t)call->bases[SECOND], 0, 0, call->count, row);
    if (rest == NULL) return -1;
    if (call->later)
        call->rest = rest;
    else
        Py_DECREF(rest);
    return 1;
}

/* Publish the hello, the entered word last, as SharedState.enter does. */
static int enter(const Calls* self, const Call* call, PyObject* active, uint64_t epoch,
                 PyObject* number) {
    PyObject* signature = PyLong_FromUnsignedLongLong(call->signature);
    if (signature == NULL) return -1;
    int failed = PyObject_SetAttr(active, s_signature, signature) < 0 ||
                 PyObject_SetAttr(active, s_timeout, call->timeout) < 0 ||
                 PyObject_SetAttr(active, s_epoch, number) < 0 ||
                 PyObject_SetAttr(self->owned[HOST], s_running, active) < 0;
    Py_DECREF(signature);
    if (failed) return -1;
    const Entry* entry = call->entry;
    uint64_t* words = words_of(self, self->rank);
    uint64_t* hello = words + self->signatures[epoch % SLOTS];
    hello[0] = call->signature;
    hello[1] = entry->record;
    hello[2] = hello[3] = 0; /* peers reach no buffer of a small call */
    hello[4] = (uint64_t)(entry->counted ? call->count : 0) << 1 | entry->in_place;
    store(words + self->entered, epoch << 32);
    if (PyObject_SetAttr(self->owned[HOST], s_epoch, number) < 0) return -1;
    return PyObject_SetAttr(self->owned[FABRIC], s_entered, number);
}

/* Run the rows of a call from its hello to its end. */
static int run_rows(const Calls* self, Call* call, uint64_t epoch, PyObject* number) {
    const Half* half = &call->entry->halves[epoch & 1];
    uint64_t base = epoch << 32;
    call->active = half->active;
    if (enter(self, call, half->active, epoch, number) < 0) return -1;
    for (int at = 0; at < half->nrows; at++) {
        const Row* row = &half->rows[at];
        for (int k = 0; k < row->nwaits; k++)
            if (!awaited(self, &row->waits[k], base, call->later ? 0 : self->yields))
                return hand_over(self, call, half->active, at);
        if (row->nsrcs) move(row, call);
        for (int k = 0; k < row->nsignals; k++)
            store(row->signals[k].word, base + row->signals[k].count);
    }
    if (is_mismatch(self, epoch, call->signature))
        return hand_over(self, call, half->active, half->nrows);
    int failed = call->entry->total
                     ? PyObject_SetAttr(self->owned[HOST], s_known, number)
                     : PyObject_SetAttr(self->owned[HOST], s_uncompared, half->active);
    return failed < 0 || PyObject_SetAttr(self->owned[HOST], s_running, Py_None) < 0 ? -1 : 1;
}

/* Run a call while this thread has the rank's lock: 1, 0 where Python is to make it, or -1. */
static int run(Calls* self, Call* call) {
    long long last = count_of(self->owned[HOST], s_epoch);
    if (last < 0) return -1;
    const Entry* entry = call->entry;
    uint64_t epoch = (uint64_t)last + 1;
    if (entry->halves[epoch & 1].active == NULL || is_due(self)) return 0;
    int closed = close_last(self, (uint64_t)last);
    if (closed != 1) return closed;
    int ready = is_ready(self); /* behind the wait, in which another thread may have closed */
    if (ready != 1) return ready;
    Py_ssize_t slots = PyList_GET_SIZE(self->owned[NUMBERS]);
    PyObject* recorded =
        PyList_GET_ITEM(self->owned[NUMBERS], (Py_ssize_t)(entry->record % (uint64_t)slots));
    if (PyLong_AsUnsignedLongLong(recorded) != entry->record)
        return PyErr_Occurred() ? -1 : 0; /* another call's text has taken the place of its own */
    PyObject* number = PyLong_FromUnsignedLongLong(epoch); /* before a peer sees anything */
    if (number == NULL) return -1;
    int made = run_rows(self, call, epoch, number);
    Py_DECREF(number);
    return made;
}
