/* Whether arguments are those of a known call. */

#pragma once

#include "../../native/same.h"
#include "types.h"

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
