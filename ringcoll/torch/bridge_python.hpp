// Python's objects in C++, with Python's lock held: errors are exceptions, references are owned.
#pragma once

#include <torch/csrc/utils/pybind.h>

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

inline double real(const py::handle& value) {
    const double found = PyFloat_AsDouble(value.ptr());
    if (found == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return found;
}

template <class... Arguments>
py::object call(const py::handle& function, const Arguments&... arguments) {
    PyObject* const given[] = {nullptr, arguments.ptr()...};
    return checked(PyObject_Vectorcall(
        function.ptr(), given + 1, sizeof...(arguments) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

// The name of an attribute, whose string Python makes once: a Name is there for ever.
class Name {
public:
    explicit Name(const char* text) : text_(PyUnicode_InternFromString(text)) {}
    py::object of(const py::handle& object) const {
        return checked(PyObject_GetAttr(object.ptr(), text_));
    }
    py::object call(const py::handle& object) const {
        return checked(PyObject_CallMethodNoArgs(object.ptr(), text_));
    }
    void set(const py::handle& object, const py::handle& value) const {
        checked(PyObject_SetAttr(object.ptr(), text_, value.ptr()));
    }

private:
    PyObject* text_;
};

// A threading.RLock, held.
class Held {
public:
    explicit Held(py::object lock) : lock_(std::move(lock)) {
        static const Name acquire("acquire");
        acquire.call(lock_);
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    ~Held() {
        static const Name release("release");
        try {
            release.call(lock_);
        } catch (py::error_already_set& error) {
            error.discard_as_unraisable("the lock of a rank");
        }
    }

private:
    py::object lock_;
};

}  // namespace ringcoll
