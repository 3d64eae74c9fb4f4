// Python's objects in C++, with Python's lock held: errors are exceptions, references are owned.
#pragma once

#include <torch/csrc/utils/pybind.h>
// After Python.h.
#include <structmember.h>

#include <optional>
#include <utility>

namespace ringcoll {

// What Python answered; throws what it raised.
inline py::object checked(PyObject* answer) {
    if (answer == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(answer);
}

inline bool checked(int answer) {
    if (answer < 0) throw py::error_already_set();
    return answer != 0;
}

inline bool is_true(const py::handle& value) { return checked(PyObject_IsTrue(value.ptr())); }

inline bool are_equal(const py::handle& one, const py::handle& other) {
    return checked(PyObject_RichCompareBool(one.ptr(), other.ptr(), Py_EQ));
}

inline py::object item(const py::handle& sequence, Py_ssize_t index) {
    return checked(PySequence_GetItem(sequence.ptr(), index));
}

inline Py_ssize_t integer(const py::handle& value) {
    const Py_ssize_t found = PyLong_AsSsize_t(value.ptr());
    if (found == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return found;
}

template <class... Arguments>
py::object call(const py::handle& function, const Arguments&... arguments) {
    PyObject* const given[] = {nullptr, arguments.ptr()...};
    return checked(PyObject_Vectorcall(
        function.ptr(), given + 1, sizeof...(arguments) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

// The name of an attribute, whose string Python makes once: a Name is there for ever. Where the
// last object's class has a slot for it, the next object's is read there, without a lookup.
class Name {
public:
    explicit Name(const char* text) : text_(PyUnicode_InternFromString(text)) {}
    py::object of(const py::handle& object) const {
        PyObject** const slot = slot_of(object.ptr());
        if (slot != nullptr && *slot != nullptr) return py::reinterpret_borrow<py::object>(*slot);
        return checked(PyObject_GetAttr(object.ptr(), text_));
    }

private:
    PyObject** slot_of(PyObject* object) const {
#if PY_VERSION_HEX < 0x030b0000 || defined(Py_GIL_DISABLED)
        return nullptr;  // versions are used again, or threads would look at once
#else
        PyTypeObject* const type = Py_TYPE(object);
        if (type != type_ || type->tp_version_tag != version_) find_slot(type);
        if (offset_ == 0) return nullptr;
        return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
#endif
    }

    // A change of the class gives it another version, and 0 none, for which nothing is believed.
    void find_slot(PyTypeObject* type) const {
        offset_ = 0;
        PyObject* const found = _PyType_Lookup(type, text_);
        if (found != nullptr && Py_TYPE(found) == &PyMemberDescr_Type &&
            type->tp_getattro == PyObject_GenericGetAttr &&
            type->tp_setattro == PyObject_GenericSetAttr && type->tp_version_tag != 0) {
            const auto* descriptor = reinterpret_cast<PyMemberDescrObject*>(found);
            const auto* member = descriptor->d_member;
            if (member->type == T_OBJECT_EX && member->flags == 0 &&
                PyType_IsSubtype(type, PyDescr_TYPE(descriptor)) != 0)
                offset_ = member->offset;
        }
        type_ = type;
        version_ = type->tp_version_tag;
    }

    PyObject* text_;
    mutable PyTypeObject* type_ = nullptr;
    mutable unsigned int version_ = 0;
    mutable Py_ssize_t offset_ = 0;  // 0: there is no slot
};

// Without Python's lock, if this thread has it: CUDA may wait here for a queue that is full, behind
// a kernel that waits for a peer, and other threads of Python are to find out what holds it up.
class Unlocked {
public:
    Unlocked() {
        if (PyGILState_Check() != 0) released_.emplace();
    }

private:
    std::optional<py::gil_scoped_release> released_;
};

}  // namespace ringcoll
