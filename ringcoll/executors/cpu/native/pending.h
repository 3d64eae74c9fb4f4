/* Asynchronous messages under way: entered, and not yet moved. They are kept in a list that Python
 * sees, until a thread that waits for one moves them here, or Python takes them over. */

#pragma once

#include "messages.h"

/* What one call has left under way. */
typedef struct {
    PyObject ob_base;
    PyObject *work, *timeout;
    PyObject* given[3]; /* name, sendbuf and recvbuf */
    bool ended;
    Sending sending; /* of one part */
} Pending;

static PyTypeObject* pending_type;

static void pending_dealloc(Pending* self) {
    PyTypeObject* type = Py_TYPE(self);
    drop_exchange(self->sending.parts[0].exchange);
    for (int k = 0; k < 3; k++) Py_XDECREF(self->given[k]);
    Py_XDECREF(self->work), Py_XDECREF(self->timeout);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* Keep messages that have been entered: 0 or -1. */
static int pend(const Calls* self, const Sending* sending, PyObject* timeout, PyObject* work) {
    Pending* pending = PyObject_New(Pending, pending_type);
    if (pending == NULL) return -1;
    const Part* part = &sending->parts[0];
    pending->sending = *sending;
    pending->sending.parts[0].given = pending->given;
    part->exchange->refs++;
    for (int k = 0; k < 3; k++) pending->given[k] = Py_NewRef(part->given[k]);
    pending->work = Py_NewRef(work), pending->timeout = Py_NewRef(timeout);
    pending->ended = false;
    int failed = PyList_Append(self->owned[ENTERED], (PyObject*)pending);
    Py_DECREF(pending);
    return failed;
}

/* Say in a MessageWork what a receive has taken: 0 or -1. */
static int say_taken(PyObject* work, const Message* message) {
    PyObject* source = PyLong_FromLong(message->peer);
    PyObject* count = PyLong_FromUnsignedLongLong(message->count);
    int failed = source == NULL || count == NULL || PyObject_SetAttr(work, s__source, source) < 0 ||
                 PyObject_SetAttr(work, s__count, count) < 0;
    Py_XDECREF(source), Py_XDECREF(count);
    return failed ? -1 : 0;
}

/* Say in a MessageWork that its messages have ended: 0 or -1. No signal's handler can come in
 * between, since no Python runs. */
static int end_work(PyObject* work, const Exchange* exchange) {
    for (int k = 0; k < exchange->nmessages; k++)
        if (!exchange->messages[k].sends && say_taken(work, &exchange->messages[k]) < 0) return -1;
    PyObject* finished = PyObject_GetAttr(work, s__finished);
    if (finished == NULL) return -1;
    int failed = PyObject_SetAttr(work, s__state, Py_None) < 0 ||
                 PyObject_SetAttr(work, s__finish, Py_None) < 0 ||
                 PyObject_SetAttr(finished, s_ended, Py_True) < 0;
    Py_DECREF(finished);
    return failed ? -1 : 0;
}

/* Move what can be moved of all that is under way: 0 or -1. What has ended is forgotten, which may
 * run Python, where an array ends with it. */
static int move_pending(const Calls* self) {
    PyObject* entered = self->owned[ENTERED];
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(entered);) {
        Pending* pending = (Pending*)PyList_GET_ITEM(entered, at);
        if (!move_all(self, &pending->sending) || sends_differ(self, &pending->sending)) {
            at++;
            continue;
        }
        if (end_work(pending->work, pending->sending.parts[0].exchange) < 0) return -1;
        pending->ended = true;
        if (PyList_SetSlice(entered, at, at + 1, NULL) < 0) return -1;
    }
    return 0;
}

/* What is under way for a work; NULL: nothing, or Python has taken it over. */
static Pending* pending_of(const Calls* self, PyObject* work) {
    PyObject* entered = self->owned[ENTERED];
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(entered); at++) {
        Pending* pending = (Pending*)PyList_GET_ITEM(entered, at);
        if (pending->work == work) return pending;
    }
    return NULL;
}

/* Whether a message of the pair and direction of another is under way. */
static bool is_pending(const Calls* self, const Message* message) {
    PyObject* entered = self->owned[ENTERED];
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(entered); at++)
        if (shares_pair(&((Pending*)PyList_GET_ITEM(entered, at))->sending, message)) return true;
    return false;
}

/* Poll for the end of what is under way for a work, as all_moved unless the caller only looks: 1, 0
 * where Python is to wait for it, which then looks at who has died, or -1. */
static int await_pending(Calls* self, PyObject* work, bool patient) {
    Pending* pending = pending_of(self, work);
    if (pending == NULL || self->closed) return 0;
    int free = is(self->owned[STATE], s_inherited, Py_False);
    if (free == 1) free = is(self->contexts[MESSAGES].pairs, s_trace, Py_None);
    if (free != 1) return free;
    Py_INCREF(pending);
    int moved = move_pending(self);
    patient = patient && !pending->ended && !is_due(self);
    for (int k = 0; patient && moved == 0 && !pending->ended && k < self->spins; k++) {
        pause_polling();
        moved = move_pending(self);
    }
    for (int k = 0; patient && moved == 0 && !pending->ended && k < self->yields; k++) {
        yield_core();
        moved = move_pending(self);
    }
    int ended = moved < 0 ? -1 : pending->ended;
    Py_DECREF(pending);
    return ended;
}

/* -- what Python does with them ---------------------------------------------------------------- */

/* () -> what go_on is given of the messages, their timeout or None, and how many have not ended. */
static PyObject* pending_left(Pending* self, PyObject* Py_UNUSED(none)) {
    PyObject* left = left_of(&self->sending, &self->sending.parts[0]);
    if (left == NULL) return NULL;
    return Py_BuildValue("NOi", left, self->timeout, self->sending.left);
}

/* (list, queues, more queues, number) -> whether it has been in the list, and with as many messages
 * left as `left` has said. Then it leaves the list as the others are added to the queues, and no
 * signal's handler can come in between. */
static PyObject* pending_queue(Pending* self, PyObject* given) {
    PyObject *entered, *queues, *more;
    int left;
    if (!PyArg_ParseTuple(given, "O!O!O!i", &PyList_Type, &entered, &PyDict_Type, &queues,
                          &PyDict_Type, &more, &left))
        return NULL;
    Py_ssize_t at = 0, size = PyList_GET_SIZE(entered);
    while (at < size && PyList_GET_ITEM(entered, at) != (PyObject*)self) at++;
    if (at == size || self->sending.left != left) Py_RETURN_FALSE;
    const Exchange* exchange = self->sending.parts[0].exchange;
    for (int k = 0; k < exchange->nmessages; k++)
        if (self->sending.done[k] && !exchange->messages[k].sends &&
            say_taken(self->work, &exchange->messages[k]) < 0)
            return NULL;
    PyObject* messages = PyLong_FromSsize_t(PyDict_GET_SIZE(more));
    int failed = messages == NULL || PyObject_SetAttr(self->work, s__messages, messages) < 0 ||
                 PyDict_Update(queues, more) < 0 || PyList_SetSlice(entered, at, at + 1, NULL) < 0;
    Py_XDECREF(messages);
    return failed ? NULL : Py_NewRef(Py_True);
}

static PyMethodDef pending_methods[] = {
    {"left", (PyCFunction)pending_left, METH_NOARGS, "What Python has to know of them."},
    {"queue", (PyCFunction)pending_queue, METH_VARARGS, "Let Python move them from now on."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef pending_members[] = {
    {"work", T_OBJECT_EX, offsetof(Pending, work), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot pending_slots[] = {
    {Py_tp_doc, "Messages that have been entered and have not ended."},
    {Py_tp_dealloc, pending_dealloc},
    {Py_tp_methods, pending_methods},
    {Py_tp_members, pending_members},
    {0, NULL},
};

static PyType_Spec pending_spec = {
    "ringcoll.executors.cpu._small_calls.Pending",          sizeof(Pending), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, pending_slots,
};
