/* Whether arguments are those of a known call. */

#pragma once

#include "types.h"

/* Whether an operator is that of an entry, or are the counts of a call that has some: the same
 * objects, or equal ones of types whose comparison runs no Python. */
static bool is_same(PyObject* known, PyObject* given) {
    if (known == given) return true;
    if (Py_TYPE(known) != Py_TYPE(given)) return false;
    if (PyTuple_CheckExact(known)) {
        Py_ssize_t size = PyTuple_GET_SIZE(known);
        bool same = size == PyTuple_GET_SIZE(given);
        for (Py_ssize_t k = 0; same && k < size; k++)
            same = is_same(PyTuple_GET_ITEM(known, k), PyTuple_GET_ITEM(given, k));
        return same;
    }
    bool plain =
        PyLong_CheckExact(known) || PyUnicode_CheckExact(known) || PyBytes_CheckExact(known);
    return plain && PyObject_RichCompareBool(known, given, Py_EQ) == 1;
}

/* Whether options are the very objects of those of an entry: 1 is not True. */
static bool has_options(const Shape* shape, PyObject* how) {
    if (PyDict_GET_SIZE(how) != PyDict_GET_SIZE(shape->how)) return false;
    PyObject *option, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(how, &at, &option, &value)) /* other kinds of str may run Python */
        if (!PyUnicode_CheckExact(option) || PyDict_GetItemWithError(shape->how, option) != value)
            return false;
    return true;
}

/* Whether an argument is what an entry takes there, for so many units; its address and bytes. */
static bool fits(const Shape* shape, int at, PyObject* buffer, long long units, intptr_t* start,
                 npy_intp* nbytes) {
    *start = *nbytes = 0;
    if (shape->kinds[at] == NULL) return buffer == Py_None;
    if (!PyArray_CheckExact(buffer)) return false;
    PyArrayObject* array = (PyArrayObject*)buffer;
    npy_intp size = PyArray_SIZE(array);
    if (PyArray_DESCR(array) != shape->kinds[at] || size != shape->sizes[at] * units ||
        (PyArray_FLAGS(array) & FLAGS) != shape->flags[at])
        return false;
    *start = (intptr_t)PyArray_DATA(array);
    *nbytes = size * PyArray_ITEMSIZE(array);
    return true;
}
