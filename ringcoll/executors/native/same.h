/* Whether an argument of a call is that of one that is known. */

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

/* Whether two operators, or two tuples of counts, are the same objects, or equal ones of types
 * whose comparison runs no Python. */
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
