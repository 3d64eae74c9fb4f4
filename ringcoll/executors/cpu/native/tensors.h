/* Arrays around the memory of torch's tensors, as `_torch_reader` of arguments/host_arrays.py makes
 * them, which says what is looked at and why: in C that takes a quarter of the time, and less of
 * the caches. What is not taken here is read there. */

#pragma once

#include "../../native/dlpack.h"
#include "types.h"

/* clang-format off */
#define TENSOR_NAMES(X) X(requires_grad) X(is_neg) X(untyped_storage) X(nbytes) X(storage_offset)
/* clang-format on */

#define DECLARE_TENSOR_NAME(name) static PyObject* t_##name;
TENSOR_NAMES(DECLARE_TENSOR_NAME)

enum { KINDS = 16 };

typedef struct {
    uint8_t code, bits; /* as DLPack names it */
    PyArray_Descr* descr;
} Kind;

typedef struct {
    PyObject ob_base;
    vectorcallfunc vectorcall;
    const DLExchange* exchange; /* torch's, which is there for ever */
    PyObject* otherwise;        /* reads what is not taken here */
    int nkinds;
    Kind kinds[KINDS];
} TensorReader;

/* Whether an attribute is False: 1, 0 or -1. */
static int is_false(PyObject* object, PyObject* name) {
    PyObject* found = PyObject_GetAttr(object, name);
    Py_XDECREF(found);
    return found == NULL ? -1 : found == Py_False;
}

/* Whether the elements are those in memory, which a call may write: 1, 0 or -1. What has no memory,
 * as a nested or a functional tensor, DLPack has refused. */
static int is_plain(PyObject* tensor) {
    int plain = is_false(tensor, t_requires_grad);
    if (plain != 1) return plain;
    PyObject* negative = PyObject_CallMethodNoArgs(tensor, t_is_neg);
    Py_XDECREF(negative);
    return negative == NULL ? -1 : negative == Py_False;
}

/* A number that a method gives, or -1 with an exception. */
static long long number_from(PyObject* object, PyObject* method) {
    PyObject* found = PyObject_CallMethodNoArgs(object, method);
    long long number = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return number;
}

/* The storage of a tensor, if that holds all of so many bytes; else NULL, with an exception or
 * without. */
static PyObject* storage_of(PyObject* tensor, int item, long long nbytes) {
    PyObject* storage = PyObject_CallMethodNoArgs(tensor, t_untyped_storage);
    long long whole = storage == NULL ? -1 : number_from(storage, t_nbytes);
    long long offset = whole < 0 ? -1 : number_from(tensor, t_storage_offset);
    if (offset < 0 || offset * item + nbytes > whole) Py_CLEAR(storage);
    return storage;
}

/* A flat array of a tensor's memory, which keeps that alive; else NULL, with an exception or
 * without. */
static PyObject* array_of(const TensorReader* self, PyObject* tensor) {
    DLTensor read;
    npy_intp size;
    long long elements;
    if (self->exchange->tensor_of(tensor, &read) != 0 || read.device_type != DL_CPU ||
        read.lanes != 1 || read.data == NULL || !is_contiguous(&read, &elements))
        return NULL;
    const Kind* kind = self->kinds;
    while (kind < self->kinds + self->nkinds &&
           (kind->code != read.code || kind->bits != read.bits))
        kind++;
    if (kind == self->kinds + self->nkinds || is_plain(tensor) != 1) return NULL;
    int item = read.bits / 8;
    PyObject* storage = storage_of(tensor, item, elements * item);
    if (storage == NULL) return NULL;
    size = (npy_intp)elements;
    PyArray_Descr* descr = (PyArray_Descr*)Py_NewRef((PyObject*)kind->descr);
    PyObject* array = PyArray_NewFromDescr(&PyArray_Type, descr, 1, &size, NULL,
                                           (char*)read.data + read.byte_offset, NPY_ARRAY_CARRAY,
                                           NULL); /* which takes the type */
    if (array == NULL)
        Py_DECREF(storage);
    else if (PyArray_SetBaseObject((PyArrayObject*)array, storage) < 0) /* takes the storage */
        Py_CLEAR(array);
    return array;
}

/* tensor -> its array, or what Python's reader gives. */
static PyObject* reader_call(PyObject* self, PyObject* const* given, size_t nargsf,
                             PyObject* keywords) {
    if (PyVectorcall_NARGS(nargsf) != 1 || keywords != NULL) {
        PyErr_SetString(PyExc_TypeError, "wanted a tensor");
        return NULL;
    }
    PyObject* array = array_of((const TensorReader*)self, given[0]);
    if (array != NULL) return array;
    /* Of a tensor without memory; an interrupt is not lost. */
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
    PyErr_Clear();
    return PyObject_CallOneArg(((const TensorReader*)self)->otherwise, given[0]);
}

static void reader_dealloc(TensorReader* self) {
    PyTypeObject* type = Py_TYPE(self);
    Py_XDECREF(self->otherwise);
    for (int k = 0; k < self->nkinds; k++) Py_XDECREF((PyObject*)self->kinds[k].descr);
    type->tp_free((PyObject*)self);
    Py_DECREF(type);
}

/* (torch's capsule, of each type DLPack's code, bits and numpy's type,
 * Python's reader) -> a reader. */
static PyObject* reader_new(PyTypeObject* type, PyObject* given, PyObject* Py_UNUSED(keywords)) {
    PyObject *capsule, *kinds, *otherwise;
    if (!PyArg_ParseTuple(given, "OO!O", &capsule, &PyTuple_Type, &kinds, &otherwise)) return NULL;
    const DLExchange* exchange = exchange_in(capsule);
    if (exchange == NULL || exchange->tensor_of == NULL || PyTuple_GET_SIZE(kinds) > KINDS) {
        PyErr_SetString(PyExc_ValueError, "no table that is known, or too many types");
        return NULL;
    }
    TensorReader* self = (TensorReader*)type->tp_alloc(type, 0); /* all zero */
    if (self == NULL) return NULL;
    self->vectorcall = reader_call, self->exchange = exchange;
    self->otherwise = Py_NewRef(otherwise);
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(kinds); k++) {
        Kind* kind = &self->kinds[k];
        PyObject* descr;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(kinds, k), "bbO!", &kind->code, &kind->bits,
                              &PyArrayDescr_Type, &descr)) {
            Py_DECREF(self);
            return NULL;
        }
        kind->descr = (PyArray_Descr*)Py_NewRef(descr);
        self->nkinds++;
    }
    return (PyObject*)self;
}

static PyMemberDef reader_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(TensorReader, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot reader_slots[] = {
    {Py_tp_doc, "Reads torch's tensors of the CPU."},
    {Py_tp_new, reader_new},
    {Py_tp_dealloc, reader_dealloc},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, reader_members},
    {0, NULL},
};

static PyType_Spec reader_spec = {
    "ringcoll.executors.cpu._small_calls.TensorReader", sizeof(TensorReader), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,    reader_slots,
};
