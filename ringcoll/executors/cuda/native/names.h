/* Attributes of Python's objects, by their names. */

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdbool.h>

/* A name, whose string Python makes once. Where the class of the last object has a slot for it, or
 * a function in C, the next object's is read by that: a call makes twenty lookups. */
typedef struct {
    PyObject* text;
    PyTypeObject* type;
    unsigned version;
    Py_ssize_t offset;         /* 0: there is no slot */
    const PyGetSetDef* getter; /* NULL: there is no function */
} Name;

/* clang-format off */
#define NAMES(X)                                                                                  \
    X(acquire) X(address) X(alarm) X(blocks) X(bound) X(_c_contiguous) X(data) X(device)          \
    X(device_id) X(dtype) X(due) X(enqueue) X(entered) X(fail) X(fill) X(filled) X(flat)          \
    X(function) X(is_neg) X(kernel) X(last) X(lock) X(locals) X(mark) X(marking) X(now) X(number) \
    X(parameter) X(pointer) X(pointers) X(ptr) X(release) X(settled) X(signature) X(size) X(slot) \
    X(threads) X(words)
/* clang-format on */

#define DECLARE(name) static Name n_##name;
NAMES(DECLARE)

#if PY_VERSION_HEX >= 0x030b0000 && !defined(Py_GIL_DISABLED)

/* A change of a class gives it another version, and 0 none, for which nothing is believed. */
static void look_up(Name* name, PyTypeObject* type) {
    PyObject* found = _PyType_Lookup(type, name->text); /* which may give the class a version */
    *name = (Name){name->text, type, type->tp_version_tag, 0, NULL};
    bool plain = type->tp_getattro == PyObject_GenericGetAttr &&
                 type->tp_setattro == PyObject_GenericSetAttr && type->tp_version_tag != 0;
    if (!plain || found == NULL) return;
    if (Py_TYPE(found) == &PyMemberDescr_Type) {
        const PyMemberDef* member = ((PyMemberDescrObject*)found)->d_member;
        if (member->type == T_OBJECT_EX && member->flags == 0 &&
            PyType_IsSubtype(type, PyDescr_TYPE(found)))
            name->offset = member->offset;
    } else if (Py_TYPE(found) == &PyGetSetDescr_Type) {
        const PyGetSetDef* getter = ((PyGetSetDescrObject*)found)->d_getset;
        if (getter->get != NULL && PyType_IsSubtype(type, PyDescr_TYPE(found)))
            name->getter = getter;
    }
}

/* See how the objects of a class have the attribute of a name. */
static void know(Name* name, PyTypeObject* type) {
    if (type != name->type || type->tp_version_tag != name->version) look_up(name, type);
}

#else /* versions are used again, or threads would look at once */

static void know(Name* name, PyTypeObject* type) { (void)name, (void)type; }

#endif

/* Where an object has the slot of a name; NULL: it has none. */
static PyObject** slot_of(PyObject* object, Name* name) {
    know(name, Py_TYPE(object));
    return name->offset == 0 ? NULL : (PyObject**)((char*)object + name->offset);
}

/* An attribute, owned; NULL where an exception is raised. */
static PyObject* get(PyObject* object, Name* name) {
    PyObject** slot = slot_of(object, name);
    if (slot != NULL && *slot != NULL) return Py_NewRef(*slot);
    if (name->getter != NULL) return name->getter->get(object, name->getter->closure);
    return PyObject_GetAttr(object, name->text);
}

/* Set an attribute: 0, or -1 where an exception is raised. */
static int set(PyObject* object, Name* name, PyObject* value) {
    PyObject** slot = slot_of(object, name);
    if (slot == NULL) return PyObject_SetAttr(object, name->text, value);
    PyObject* before = *slot;
    *slot = Py_NewRef(value);
    Py_XDECREF(before); /* last: it may run Python */
    return 0;
}

/* An attribute that is a number: 0, or -1 where an exception is raised. */
static int number_of(PyObject* object, Name* name, long long* found) {
    PyObject* value = get(object, name);
    if (value == NULL) return -1;
    *found = (long long)PyLong_AsUnsignedLongLongMask(value);
    Py_DECREF(value);
    return *found == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Whether an attribute is true, or the first item of a sequence; -1 where an exception is raised.
 */
static int is_true(PyObject* object, Name* name) {
    PyObject* value = get(object, name);
    int found = value == NULL ? -1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    return found;
}

static int is_first_true(PyObject* sequence) {
    PyObject* value = PySequence_GetItem(sequence, 0);
    int found = value == NULL ? -1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    return found;
}
