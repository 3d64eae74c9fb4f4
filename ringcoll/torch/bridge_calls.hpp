// Calls that are like an earlier one: C++ finds them, and calls what enqueues them.
#pragma once

#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>
#include <utility>

#include "bridge_python.hpp"

namespace ringcoll {

// Whether a tensor has elements that lie one after the other as they are, in its storage.
inline bool is_plain(const at::Tensor& tensor) {
    if (at::isTensorSubclassLike(tensor) || tensor.layout() != c10::kStrided ||
        !tensor.is_contiguous() || tensor.is_neg() || tensor.is_conj() || tensor._is_zerotensor() ||
        tensor.numel() == 0)
        return false;
    const int64_t end = tensor.storage_offset() + tensor.numel();
    return static_cast<uint64_t>(end) * tensor.itemsize() <= tensor.storage().nbytes();
}

// The fields of bridge.py's Bridged, in their order.
enum Part {
    REPORT,
    RECORDS,
    ERRORS,
    ORDINAL,
    BATCH,
    CURRENT,
    OWN_STREAMS,
    RECORD,
    WAIT,
    EVENT,
    STREAM,
    STREAM_ID,
    LAUNCH,
    KEPT,
    PARTS
};

class Parts {
public:
    explicit Parts(py::object parts) : parts_(std::move(parts)) {
        if (!PyTuple_Check(parts_.ptr()) || PyTuple_GET_SIZE(parts_.ptr()) != PARTS)
            throw py::type_error("ringcoll.torch.bridge: not the parts of a device");
    }
    py::handle operator[](Part part) const { return PyTuple_GET_ITEM(parts_.ptr(), part); }

private:
    py::object parts_;
};

// Whether the record of a call is not another's by now.
inline bool is_recorded(const Parts& parts, const py::handle& prepared) {
    static const Name slot("slot"), number("number");
    const py::object record = item(parts[RECORDS], integer(slot.of(prepared)));
    return are_equal(record, number.of(prepared));
}

// Enqueue a call on a tensor that lies there, behind `caller` if that is a stream, or return false
// where more is to be done: FastPath.launch.
inline bool launch(const Parts& parts, const py::handle& prepared, const py::handle& stream,
                   uintptr_t address, const py::handle& caller) {
    static PyObject* const zero = PyLong_FromLong(0);
    const py::object at = py::int_(address);
    const py::object given = checked(PyTuple_Pack(4, at.ptr(), at.ptr(), zero, zero));
    if (!caller) return is_true(call(parts[LAUNCH], prepared, stream, given));
    const py::object behind = checked(
        PyTuple_Pack(4, parts[RECORD].ptr(), parts[WAIT].ptr(), parts[EVENT].ptr(), caller.ptr()));
    return is_true(call(parts[LAUNCH], prepared, stream, given, behind));
}

// What all calls that one kept call serves have in common, in a number; None: it cannot be told.
inline py::object key_of(const at::Tensor& tensor, uintptr_t address,
                         const c10d::AllreduceOptions& options) {
    const auto type = static_cast<uint64_t>(tensor.scalar_type());
    const auto op = static_cast<uint64_t>(options.reduceOp.op_);
    const uint64_t count = tensor.numel();
    if (count >> 44 != 0 || op > 15 || address == 0) return py::none();
    return py::int_(count << 20 | type << 8 | op << 4 | (address & 7));
}

// The kept call of a key, or None.
inline py::object kept_call(const Parts& parts, const py::handle& device, const py::object& key,
                            const at::Tensor& tensor, uintptr_t address,
                            const c10d::AllreduceOptions& options) {
    static const Name keep("keep_call");
    if (key.is_none()) return py::none();
    PyObject* const found = PyDict_GetItemWithError(parts[KEPT].ptr(), key.ptr());
    if (found != nullptr) return py::reinterpret_borrow<py::object>(found);
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return keep.of(device)(key, address, tensor.numel(), tensor.scalar_type(),
                           static_cast<int>(options.reduceOp.op_));
}

// Whether torch's profiler may be on: Python tells it what is called.
inline bool is_profiled() {
    static const py::handle name = PyUnicode_InternFromString("_is_profiler_enabled");
    static PyObject* const profiler = PyImport_GetModule(py::str("torch.autograd.profiler").ptr());
    if (profiler == nullptr) return true;
    PyObject* const found = PyDict_GetItemWithError(PyModule_GetDict(profiler), name.ptr());
    return found == nullptr || is_true(found);
}

// Enqueue the all_reduce of a tensor in place, if it is like an earlier one: on the caller's
// stream, or `aside` on the group's own. Returns what start_sum does: the id of that stream, or ()
// for the caller's; None if nothing was done.
inline py::object start_kept(const py::handle& group, const at::Tensor& tensor,
                             const c10d::AllreduceOptions& options, bool aside) {
    static const Name failure("_failure"), pairs("_pairs"), device_of("_device"),
        parts_of("bridged"), posts("posts"), keep("keep"), raise("raise_failure");
    const py::object device = device_of.of(group);
    if (device.is_none() || !failure.of(group).is_none() || !pairs.of(group).is_none())
        return py::none();
    py::object found = parts_of.of(device);
    if (found.is_none() || is_profiled()) return py::none();
    const Parts parts(std::move(found));
    if (is_true(posts.of(parts[BATCH])) || integer(parts[ORDINAL]) != tensor.get_device())
        return py::none();
    const auto address = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
    const py::object key = key_of(tensor, address, options);
    const py::object prepared = kept_call(parts, device, key, tensor, address, options);
    if (prepared.is_none()) return py::none();
    bool done = false;
    try {
        const py::object caller = call(parts[CURRENT]);
        if (aside)
            done = launch(parts, prepared, parts[STREAM], address, caller);
        else if (checked(PySet_Contains(parts[OWN_STREAMS].ptr(), caller.ptr())))
            done = launch(parts, prepared, caller, address, py::handle());
    } catch (const py::error_already_set& error) {
        if (aside) keep.of(device)(tensor);  // an interrupt may have come behind the launch
        raise.of(device)(error.value());
        throw;
    }
    if (!done) {
        // Python may have prepared another in its place: it is asked again.
        if (!is_recorded(parts, prepared) && checked(PyDict_Contains(parts[KEPT].ptr(), key.ptr())))
            checked(PyDict_DelItem(parts[KEPT].ptr(), key.ptr()));
        return py::none();
    }
    return aside ? py::reinterpret_borrow<py::object>(parts[STREAM_ID]) : py::object(py::tuple());
}

}  // namespace ringcoll
