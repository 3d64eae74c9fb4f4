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

static void drop(Entry* entry) {
    if (--entry->refs > 0) return;
    Py_CLEAR(entry->name);
    Py_CLEAR(entry->op);
    Py_CLEAR(entry->how);
    Py_CLEAR(entry->timeout);
    for (int k = 0; k < 2; k++) {
        Py_CLEAR(entry->kinds[k]);
        free_half(&entry->halves[k]);
    }
    PyMem_Free(entry);
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
        if (rank < 0 || rank >= self->nranks || index < 0 ||
            index >= self->views[rank].len / (Py_ssize_t)sizeof(uint64_t)) {
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
static int read_array(PyObject* given, Entry* entry, int at) {
    PyObject* kind;
    int writeable;
    if (given == Py_None) return 0;
    if (!PyArg_ParseTuple(given, "O!np", &PyArrayDescr_Type, &kind, &entry->sizes[at], &writeable))
        return -1;
    if (entry->sizes[at] < 1) {
        PyErr_SetString(PyExc_ValueError, "an array has elements");
        return -1;
    }
    entry->kinds[at] = (PyArray_Descr*)Py_NewRef(kind);
    entry->flags[at] = FLAGS & (writeable ? ~0 : ~NPY_ARRAY_WRITEABLE);
    return 0;
}

/* Read what is known of an entry but its name, operator and options; -1: something is wrong. */
static int read_entry(const Calls* self, Entry* entry, PyObject* const* parts) {
    for (int k = 0; k < 2; k++)
        if (read_array(parts[k], entry, k) < 0 || read_place(parts[2 + k], &entry->places[k]) < 0 ||
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
    entry->name = Py_NewRef(name), entry->op = Py_NewRef(op), entry->how = Py_NewRef(how);
    entry->timeout = Py_NewRef(timeout);
    entry->total = total, entry->in_place = in_place, entry->counted = counted, entry->one = one;
    entry->digest = digest, entry->record = record;
    bool sound = entry->first > 0 && entry->align > 0 && entry->widest >= 0;
    if (!sound) PyErr_SetString(PyExc_ValueError, "no such call");
    if (!sound || read_entry(self, entry, parts) < 0) {
        drop(entry);
        return NULL;
    }
    Entry** bucket = &self->table[bucket_of(name, entry->kinds[0])];
    entry->next = *bucket;
    *bucket = entry;
    Py_RETURN_NONE;
}

static PyObject* calls_clear(Calls* self, PyObject* Py_UNUSED(none)) {
    for (int k = 0; k < BUCKETS; k++)
        while (self->table[k] != NULL) {
            Entry* entry = self->table[k];
            self->table[k] = entry->next;
            drop(entry);
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
