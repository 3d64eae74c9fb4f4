/* Arrays of the libraries that are known: where they lie, and what of their shape a call depends
 * on.
 *
 * As readers.py, which says why, in a fraction of the time. What is not taken here is read there.
 */

#pragma once

#include "../../native/dlpack.h"
#include "names.h"
#include "types.h"

/* -- tensors, by DLPack's table of functions -- */

#define NO_MEMORY ((uintptr_t)1 << 40) /* as in readers.py */

/* 1, 0 where it is not taken, or -1. */
static int read_dlpack(const Launches* self, PyObject* array, Reading* reading) {
    DLTensor tensor;
    if (reading->library->exchange->tensor_of(array, &tensor) != 0) {
        PyErr_Clear(); /* it has no such memory, which the other reader says */
        return 0;
    }
    if (tensor.device_type != self->device_type || tensor.device_id != self->device ||
        (uintptr_t)tensor.data < NO_MEMORY || tensor.lanes != 1 || tensor.code == DL_COMPLEX ||
        !is_contiguous(&tensor, &reading->size))
        return 0;
    PyObject* negative = PyObject_CallMethodNoArgs(array, n_is_neg.text); /* not seen by DLPack */
    if (negative == NULL) return -1;
    Py_DECREF(negative);
    reading->start = (uintptr_t)tensor.data + tensor.byte_offset;
    reading->kind = (uintptr_t)tensor.code << 8 | tensor.bits;
    return negative == Py_False;
}

/* -- CuPy's arrays, and those around a pointer, by their attributes -- */

static int read_dtype(PyObject* array, Reading* reading) {
    PyObject* dtype = get(array, &n_dtype);
    if (dtype == NULL || number_of(array, &n_size, &reading->size) < 0) {
        Py_XDECREF(dtype);
        return -1;
    }
    reading->kind = (uintptr_t)dtype; /* an entry holds its own, which alone is compared with */
    Py_DECREF(dtype);
    return reading->size > 0 && reading->start != 0;
}

static int read_cupy(const Launches* self, PyObject* array, Reading* reading) {
    int contiguous = is_true(array, &n__c_contiguous);
    if (contiguous != 1) return contiguous;
    PyObject* data = get(array, &n_data);
    long long device = -1, start = 0;
    int read = data == NULL ? -1 : number_of(data, &n_device_id, &device);
    if (read == 0) read = number_of(data, &n_ptr, &start);
    Py_XDECREF(data);
    reading->start = (uintptr_t)start;
    if (read < 0) return -1;
    return device == self->device ? read_dtype(array, reading) : 0;
}

static int read_raw(const Launches* self, PyObject* array, Reading* reading) {
    long long device, start;
    if (number_of(array, &n_device, &device) < 0 || number_of(array, &n_pointer, &start) < 0)
        return -1;
    reading->start = (uintptr_t)start;
    return device == self->device ? read_dtype(array, reading) : 0;
}

/* Read an argument: 1, 0 where it is for Python, or -1. */
static int read_array(const Launches* self, PyObject* array, Reading* reading) {
    *reading = (Reading){NULL};
    if (array == Py_None) return 1;
    for (int k = 0; k < self->nlibraries; k++)
        if (Py_TYPE(array) == self->libraries[k].type) reading->library = &self->libraries[k];
    if (reading->library == NULL) return 0;
    switch (reading->library->reader) {
        case CUPY: return read_cupy(self, array, reading);
        case RAW: return read_raw(self, array, reading);
        default: return read_dlpack(self, array, reading);
    }
}

/* Whether an argument is a root that is known here. */
static bool read_root(PyObject* given, long* root) {
    int overflow = 1;
    if (PyLong_CheckExact(given)) *root = PyLong_AsLongAndOverflow(given, &overflow);
    return !overflow;
}

static unsigned alignment_of(const Reading* arguments) {
    return (unsigned)(arguments[0].start & 7) | (unsigned)(arguments[1].start & 7) << 3;
}

/* Whether arguments of so many bytes share memory; how far they are apart. */
static bool is_shared(const Reading* arguments, const Py_ssize_t* nbytes, intptr_t* distance) {
    *distance = (intptr_t)(arguments[1].start - arguments[0].start);
    bool both = arguments[0].start != 0 && arguments[1].start != 0;
    return both && -nbytes[1] < *distance && *distance < nbytes[0];
}

/* Read both buffers: 1, 0 where they are for Python, or -1. */
static int read_both(const Launches* self, PyObject* const* buffers, Reading* arguments) {
    int taken = read_array(self, buffers[0], &arguments[0]);
    return taken == 1 ? read_array(self, buffers[1], &arguments[1]) : taken;
}

/* The handle of the stream that is current for arrays of a library, and what keeps it alive, both
 * owned; NULL where an exception is raised. */
static PyObject* stream_of(const Launches* self, const Library* library, PyObject** owner) {
    if (library != NULL && library->reader == DLPACK) {
        void* stream;
        *owner = Py_NewRef(library->owner);
        if (library->exchange->current_stream(self->device_type, self->device, &stream) == 0)
            return PyLong_FromVoidPtr(stream);
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "there is no current stream");
        return NULL;
    }
    *owner = PyObject_CallOneArg(self->owned[CURRENT], self->owned[ORDINAL]);
    return *owner == NULL ? NULL : get(*owner, &n_ptr);
}
