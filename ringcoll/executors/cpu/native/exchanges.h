/* Sends and receives of one call or group, from the look whether they may be made here to their
 * end, or to what goes on with the rest. */

#pragma once

#include "pending.h"

/* Whether no message is under way that comes before these: 1, 0, or -1 with an exception. */
static int is_free(const Calls* self, const Exchange* exchange) {
    int free = is(self->contexts[exchange->context].pairs, s_trace, Py_None);
    if (free != 1 || exchange->context == VECTOR) return free;
    free = is(self->owned[PROGRESS], s__closing, Py_False);
    if (free != 1) return free;
    PyObject* held = PyObject_GetAttr(self->owned[PROGRESS], s__held);
    PyObject* queues = PyObject_GetAttr(self->owned[PROGRESS], s__queues);
    free = held == NULL || queues == NULL ? -1 : PyObject_Not(held);
    for (int k = 0; free == 1 && k < exchange->nmessages; k++) {
        int queued = PyDict_Contains(queues, exchange->messages[k].pair);
        free = queued < 0 ? -1 : !queued && !is_pending(self, &exchange->messages[k]);
    }
    Py_XDECREF(held), Py_XDECREF(queues);
    return free;
}

/* Go on with messages that have been entered: what is given for those that nobody waits for, or
 * what Python has made of the others. NULL: peers have seen them, and they are lost. */
static PyObject* rest_of(Calls* self, const Sending* sending, PyObject* timeout, PyObject* work) {
    PyObject* rest = NULL;
    if (work == NULL)
        rest = go_on(self, sending, timeout);
    else if (pend(self, sending, timeout, work) == 0)
        rest = Py_NewRef(Py_True);
    if (rest == NULL) self->lost = 1; /* a signal's exception may come before go_on begins */
    return rest;
}

/* Make the messages while this thread has their lock: True, False where Python is to make them,
 * what Python has made of the rest of them, or NULL. With a work nobody waits for them, and it is
 * True where they have been entered. */
static PyObject* make_messages(Calls* self, Sending* sending, PyObject* timeout, PyObject* work) {
    PyObject* numbers[MOST] = {NULL};
    const Exchange* first = sending->parts[0].exchange;
    /* Python looks at who has died before a call that waits. */
    if (first->later != (work != NULL) || (work == NULL && is_due(self))) Py_RETURN_FALSE;
    int ready = first->context == MESSAGES && move_pending(self) < 0 ? -1 : is_ready(self);
    for (int at = 0; ready == 1 && at < sending->nparts; at++) {
        ready = is_free(self, sending->parts[at].exchange);
        if (ready == 1) ready = count_on(self, &sending->parts[at], sending, numbers);
    }
    int made = ready == 1 ? run_messages(self, sending, numbers) : 0;
    for (int k = 0; k < sending->nmessages; k++) Py_XDECREF(numbers[k]);
    if (ready < 0) return NULL;
    if (ready == 0) Py_RETURN_FALSE;
    if (made == 1 && work != NULL) made = end_work(work, first) < 0 ? -1 : 1;
    if (made == 1) Py_RETURN_TRUE;
    if (made == 0) return rest_of(self, sending, timeout, work);
    self->lost = 1;
    return NULL;
}
