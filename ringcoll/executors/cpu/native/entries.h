/* The calls that Python gives, read into plain memory; what each part is, says small_calls.py. */

#pragma once

#include "types.h"

static void free_half(Half* half) {
    for (int at = 0; at < half->nrows; at++) {
        PyMem_Free(half->rows[at].waits);
        PyMem_Free(half->rows[at].signals);
        PyMem_Free(half->rows[at].places);
    }
    PyMem_Free(half->rows);
    Py_CLEAR(half->active);
}

static void free_shape(Shape* shape) {
    Py_CLEAR(shape->name);
    Py_CLEAR(shape->op);
    Py_CLEAR(shape->how);
    for (int k = 0; k < 2; k++) Py_CLEAR(shape->kinds[k]);
}

static void drop(Entry* entry) {
    if (--entry->refs > 0) return;
    free_shape(&entry->shape);
    Py_CLEAR(entry->timeout);
    for (int k = 0; k < 2; k++) free_half(&entry->halves[k]);
    PyMem_Free(entry);
}

static void drop_exchange(Exchange* exchange) {
    if (--exchange->refs > 0) return;
    free_shape(&exchange->shape);
    Py_CLEAR(exchange->kept);
    for (int k = 0; k < exchange->nmessages; k++) {
        Message* message = &exchange->messages[k];
        Py_CLEAR(message->pair);
        for (int parity = 0; parity < 2; parity++) {
            PyMem_Free(message->landings[parity].waits);
            PyMem_Free(message->landings[parity].signals);
        }
    }
    PyMem_Free(exchange->messages);
    PyMem_Free(exchange->copies);
    PyMem_Free(exchange);
}

/* Read a sequence of flags, each (rank, index, count). */
static int read_flags(const Calls* self, PyObject* given, Flag** flags, int* number) {
    Py_ssize_t size = PyTuple_Check(given) ? PyTuple_GET_SIZE(given) : -1;
    *flags = size < 0 ? NULL : PyMem_Calloc((size_t)size + 1, sizeof **flags);
    if (*flags == NULL) {
        PyErr_SetString(PyExc_TypeError, "wanted a tuple of flags");
        return -1;
    }
    for (Py_ssize_t k = 0; k < size; k++) {
        int rank;
        Py_ssize_t index;
        unsigned long long count;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(given, k), "inK", &rank, &index, &count)) return -1;
        if (rank < 0 || rank >= self->nranks || index < 0 || index >= words_in(self, rank)) {
            PyErr_SetString(PyExc_IndexError, "no such word");
            return -1;
        }
        (*flags)[k] = (Flag){words_of(self, rank) + index, count};
    }
    *number = (int)size;
    return 0;
}

/* Numpy's loop of an operator on arrays of one type. */
static int read_loop(PyObject* given, int type, Row* row) {
    if (given == Py_None) return 0;
    if (!PyObject_TypeCheck(given, &PyUFunc_Type)) {
        PyErr_SetString(PyExc_TypeError, "wanted a numpy.ufunc");
        return -1;
    }
    PyUFuncObject* ufunc = (PyUFuncObject*)given;
    for (int k = 0; k < ufunc->ntypes && ufunc->nargs == 3; k++) {
        const char* types = ufunc->types + 3 * k;
        if (types[0] == type && types[1] == type && types[2] == type) {
            row->loop = ufunc->functions[k];
            row->data = ufunc->data == NULL ? NULL : (void*)ufunc->data[k];
        }
    }
    if (row->loop == NULL)
        PyErr_SetString(PyExc_ValueError, "the operator has no loop for this type");
    return row->loop == NULL ? -1 : 0;
}

/* Read a place: base, offset, slots and stride. */
static int read_place(PyObject* given, Place* place) {
    if (!PyArg_ParseTuple(given, "innn", &place->base, &place->offset, &place->slots,
                          &place->stride))
        return -1;
    if (place->base >= FIRST && place->base <= ABSOLUTE) return 0;
    PyErr_SetString(PyExc_ValueError, "no such base");
    return -1;
}

/* Read what a row moves: (ufunc or None, type, elements, elements of each unit, bytes of one,
 * sources, and destinations). */
static int read_step(PyObject* given, const Entry* entry, Row* row) {
    PyObject *ufunc, *places[2];
    int type;
    if (given == Py_None) return 0;
    if (!PyArg_ParseTuple(given, "OinnnO!O!", &ufunc, &type, &row->fixed, &row->each, &row->item,
                          &PyTuple_Type, &places[0], &PyTuple_Type, &places[1]))
        return -1;
    row->nsrcs = (int)PyTuple_GET_SIZE(places[0]);
    row->ndsts = (int)PyTuple_GET_SIZE(places[1]);
    npy_intp most = (row->fixed + row->each * (npy_intp)(entry->last - 1)) * row->item;
    if (row->nsrcs < 1 || row->ndsts < 1 || row->item < 1 || most < 1 || most > SMALL ||
        (ufunc == Py_None) != (row->nsrcs == 1)) {
        PyErr_SetString(PyExc_ValueError, "no such step");
        return -1;
    }
    row->places = PyMem_Calloc((size_t)(row->nsrcs + row->ndsts), sizeof *row->places);
    if (row->places == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int k = 0; k < row->nsrcs + row->ndsts; k++) {
        PyObject* place = k < row->nsrcs ? PyTuple_GET_ITEM(places[0], k)
                                         : PyTuple_GET_ITEM(places[1], k - row->nsrcs);
        if (read_place(place, &row->places[k]) < 0) return -1;
    }
    return read_loop(ufunc, type, row);
}

/* Read a half: its ActiveCall, and rows of waits, step and signals; or None. */
static int read_half(const Calls* self, PyObject* given, const Entry* entry, Half* half) {
    PyObject *active, *rows, *waits, *step, *signals;
    if (given == Py_None) return 0;
    if (!PyArg_ParseTuple(given, "OO!", &active, &PyTuple_Type, &rows)) return -1;
    half->active = Py_NewRef(active);
    half->rows = PyMem_Calloc((size_t)PyTuple_GET_SIZE(rows) + 1, sizeof *half->rows);
    if (half->rows == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; half->nrows < PyTuple_GET_SIZE(rows);) {
        Row* row = &half->rows[half->nrows];
        PyObject* parts = PyTuple_GET_ITEM(rows, half->nrows++);
        if (!PyArg_ParseTuple(parts, "OOO", &waits, &step, &signals) ||
            read_flags(self, waits, &row->waits, &row->nwaits) < 0 ||
            read_flags(self, signals, &row->signals, &row->nsignals) < 0 ||
            read_step(step, entry, row) < 0)
            return -1;
    }
    return 0;
}

/* Read an array's type and size, or None. */
static int read_array(PyObject* given, Shape* shape, int at) {
    PyObject* kind;
    int writeable;
    if (given == Py_None) return 0;
    if (!PyArg_ParseTuple(given, "O!np", &PyArrayDescr_Type, &kind, &shape->sizes[at], &writeable))
        return -1;
    if (shape->sizes[at] < 1) {
        PyErr_SetString(PyExc_ValueError, "an array has elements");
        return -1;
    }
    shape->kinds[at] = (PyArray_Descr*)Py_NewRef(kind);
    shape->flags[at] = FLAGS & (writeable ? ~0 : ~NPY_ARRAY_WRITEABLE);
    return 0;
}

static void name_shape(Shape* shape, PyObject* name, PyObject* op, PyObject* how) {
    shape->name = Py_NewRef(name), shape->op = Py_NewRef(op), shape->how = Py_NewRef(how);
}

/* Read what is known of an entry but its name, operator and options; -1: something is wrong. */
static int read_entry(const Calls* self, Entry* entry, PyObject* const* parts) {
    for (int k = 0; k < 2; k++)
        if (read_array(parts[k], &entry->shape, k) < 0 ||
            read_place(parts[2 + k], &entry->places[k]) < 0 ||
            read_half(self, parts[4 + k], entry, &entry->halves[k]) < 0)
            return -1;
    return 0;
}

/* A call that may run here; what each argument is, says small_calls.py, which alone makes them. */
static PyObject* calls_add(Calls* self, PyObject* given) {
    if (self->closed) Py_RETURN_NONE;
    Entry* entry = PyMem_Calloc(1, sizeof *entry);
    if (entry == NULL) return PyErr_NoMemory();
    PyObject *name, *op, *how, *timeout, *parts[6];
    unsigned long long digest, record;
    int total, in_place, counted, one;
    entry->refs = 1;
    if (!PyArg_ParseTuple(given, "OOlO!OOOOOppppKKLLLLL(OO)", &name, &op, &entry->root,
                          &PyDict_Type, &how, &timeout, &parts[0], &parts[1], &parts[2], &parts[3],
                          &total, &in_place, &counted, &one, &digest, &record, &entry->first,
                          &entry->last, &entry->count, &entry->align, &entry->widest, &parts[4],
                          &parts[5])) {
        drop(entry);
        return NULL;
    }
    name_shape(&entry->shape, name, op, how);
    entry->timeout = Py_NewRef(timeout);
    entry->total = total, entry->in_place = in_place, entry->counted = counted, entry->one = one;
    entry->digest = digest, entry->record = record;
    bool sound = entry->first > 0 && entry->align > 0 && entry->widest >= 0;
    if (!sound) PyErr_SetString(PyExc_ValueError, "no such call");
    if (!sound || read_entry(self, entry, parts) < 0) {
        drop(entry);
        return NULL;
    }
    Entry** bucket = &self->table[bucket_of(name, entry->shape.kinds[0])];
    entry->next = *bucket;
    *bucket = entry;
    Py_RETURN_NONE;
}

/* Read a landing: waits, signals and the address of its zone. */
static int read_landing(const Calls* self, PyObject* given, Landing* landing) {
    PyObject *waits, *signals;
    Py_ssize_t zone;
    if (!PyArg_ParseTuple(given, "OOn", &waits, &signals, &zone)) return -1;
    landing->zone = (char*)zone;
    if (read_flags(self, waits, &landing->waits, &landing->nwaits) < 0) return -1;
    return read_flags(self, signals, &landing->signals, &landing->nsignals);
}

/* Read a message: its pair, the indices of the pair's words here and there, the hello, where its
 * elements lie in an argument, and what it waits for by both parities. */
static int read_message(const Calls* self, PyObject* given, Message* message) {
    PyObject *pair, *landings[2];
    if (!PyArg_ParseTuple(given, "O!nn(KKKK)inn(OO)", &PyTuple_Type, &pair, &message->own,
                          &message->other, &message->signature, &message->record, &message->count,
                          &message->label, &message->base, &message->offset, &message->nbytes,
                          &landings[0], &landings[1]) ||
        !PyArg_ParseTuple(pair, "ip", &message->peer, &message->sends))
        return -1;
    message->pair = Py_NewRef(pair);
    Py_ssize_t hellos = self->signatures[SLOTS - 1] + 8; /* words of a pair before its flags */
    if (message->peer < 0 || message->peer >= self->nranks || message->own < 0 ||
        message->other < 0 || message->own > words_in(self, self->rank) - hellos ||
        message->other > words_in(self, message->peer) - hellos || message->base < FIRST ||
        message->base > SECOND || message->nbytes < 0 || message->nbytes > SMALL) {
        PyErr_SetString(PyExc_ValueError, "no such message");
        return -1;
    }
    for (int parity = 0; parity < 2; parity++)
        if (read_landing(self, landings[parity], &message->landings[parity]) < 0) return -1;
    return 0;
}

/* Read the messages of an exchange, and what the rank sends to itself. */
static int read_parts(const Calls* self, Exchange* exchange, PyObject* messages, PyObject* copies) {
    Py_ssize_t size = PyTuple_GET_SIZE(messages), own = PyTuple_GET_SIZE(copies);
    if (size < 1 || size > MOST || own > MOST) {
        PyErr_SetString(PyExc_ValueError, "too few messages, or too many");
        return -1;
    }
    exchange->messages = PyMem_Calloc((size_t)size, sizeof *exchange->messages);
    exchange->copies = PyMem_Calloc((size_t)own + 1, sizeof *exchange->copies);
    if (exchange->messages == NULL || exchange->copies == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    while (exchange->nmessages < size) {
        Message* message = &exchange->messages[exchange->nmessages];
        PyObject* given = PyTuple_GET_ITEM(messages, exchange->nmessages++);
        if (read_message(self, given, message) < 0) return -1;
    }
    for (; exchange->ncopies < own; exchange->ncopies++) {
        Copy* copy = &exchange->copies[exchange->ncopies];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(copies, exchange->ncopies), "ininn", &copy->from,
                              &copy->source, &copy->to, &copy->destination, &copy->nbytes))
            return -1;
        if (copy->from < FIRST || copy->from > SECOND || copy->to < FIRST || copy->to > SECOND ||
            copy->nbytes < 0 || copy->nbytes > SMALL) {
            PyErr_SetString(PyExc_ValueError, "no such copy");
            return -1;
        }
    }
    return 0;
}

/* Sends and receives that may be made here; what each argument is, says small_messages.py. */
static PyObject* calls_add_exchange(Calls* self, PyObject* given) {
    if (self->closed) Py_RETURN_NONE;
    Exchange* exchange = PyMem_Calloc(1, sizeof *exchange);
    if (exchange == NULL) return PyErr_NoMemory();
    PyObject *name, *ends, *how, *kept, *buffers[2], *messages, *copies;
    exchange->refs = 1;
    if (!PyArg_ParseTuple(given, "ipOOO!OOOO!O!", &exchange->context, &exchange->later, &name,
                          &ends, &PyDict_Type, &how, &kept, &buffers[0], &buffers[1], &PyTuple_Type,
                          &messages, &PyTuple_Type, &copies)) {
        drop_exchange(exchange);
        return NULL;
    }
    name_shape(&exchange->shape, name, ends, how);
    exchange->kept = Py_NewRef(kept);
    if (exchange->context != MESSAGES && exchange->context != VECTOR)
        PyErr_SetString(PyExc_ValueError, "no such context");
    if (PyErr_Occurred() || read_array(buffers[0], &exchange->shape, 0) < 0 ||
        read_array(buffers[1], &exchange->shape, 1) < 0 ||
        read_parts(self, exchange, messages, copies) < 0) {
        drop_exchange(exchange);
        return NULL;
    }
    Exchange** bucket = &self->exchanges[bucket_of(name, exchange->shape.kinds[0])];
    exchange->next = *bucket;
    *bucket = exchange;
    Py_RETURN_NONE;
}

static PyObject* calls_clear(Calls* self, PyObject* Py_UNUSED(none)) {
    for (int k = 0; k < BUCKETS; k++)
        while (self->table[k] != NULL) {
            Entry* entry = self->table[k];
            self->table[k] = entry->next;
            drop(entry);
        }
    for (int k = 0; k < BUCKETS; k++)
        while (self->exchanges[k] != NULL) {
            Exchange* exchange = self->exchanges[k];
            self->exchanges[k] = exchange->next;
            drop_exchange(exchange);
        }
    Py_RETURN_NONE;
}

/* Let go of the memory of a communicator that is closed, unless a call still runs on it. */
static void let_go(Calls* self) {
    if (!self->closed || self->running) return;
    for (int rank = 0; rank < self->nranks; rank++) PyBuffer_Release(&self->views[rank]);
    PyBuffer_Release(&self->alarm);
}

static PyObject* calls_close(Calls* self, PyObject* none) {
    Py_DECREF(calls_clear(self, none));
    self->closed = true; /* no call is found any more */
    let_go(self);
    Py_RETURN_NONE;
}
