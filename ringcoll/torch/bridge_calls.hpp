// Calls that are like an earlier one: C++ looks, calls what enqueues them, and runs no Python of
// ours but for a new address.
#pragma once

#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <chrono>
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
    RANK,
    ORDER,
    TIMER,
    REPORT,
    RECORDS,
    GET_DEVICE,
    ORDINAL,
    THREAD,
    ERRORS,
    FABRIC,
    BATCH,
    CURRENT,
    OWN_STREAMS,
    RECORD,
    WAIT,
    EVENT,
    STREAM,
    STREAM_ID,
    LAUNCH,
    DEVICE_OF_CONTEXT,
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

// Whether the group's device is this thread's, which has been bound to it.
inline bool is_here(const Parts& parts) {
    static const Name bound("bound");
    if (!is_true(bound.of(parts[THREAD]))) return false;
    const auto driver = reinterpret_cast<int (*)(int*)>(integer(parts[DEVICE_OF_CONTEXT]));
    if (driver != nullptr) {
        int device = -1;
        return driver(&device) == 0 && device == integer(parts[ORDINAL]);
    }
    return are_equal(call(parts[GET_DEVICE]), parts[ORDINAL]);
}

// cuLaunchKernel: a kernel, its grid and block, shared memory, a stream, its parameters, no extra.
using Launch = int (*)(uintptr_t, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       unsigned, uintptr_t, uintptr_t, uintptr_t);

// As Launchable.enqueue, without what Python takes to pass eleven numbers on. Where the driver
// refuses, Python asks it again and words the error: that of the second time.
inline void enqueue(const Parts& parts, const py::handle& kernel, const py::handle& stream) {
    static const Name enqueue("enqueue"), function("function"), blocks("blocks"), locals("locals"),
        threads("threads"), pointers("pointers");
    const auto driver = reinterpret_cast<Launch>(integer(parts[LAUNCH]));
    if (driver != nullptr) {
        const auto number = [&kernel](const Name& name) { return integer(name.of(kernel)); };
        const Py_ssize_t of = number(function), wide = number(blocks), ranks = number(locals),
                         block = number(threads), at = number(pointers), on = integer(stream);
        const Unlocked unlocked;
        if (driver(of, wide, ranks, 1, block, 1, 1, 0, on, at, 0) == 0) return;
    }
    static const py::handle zero = PyLong_FromLong(0);
    call(enqueue.of(kernel), stream, pointers.of(kernel), zero);
}

// As FastPath.launch, which says why: enqueue a call, or return false where nothing was done. What
// `before` enqueues comes before it.
template <class Before>
bool launch(const Parts& parts, const py::handle& prepared, const py::handle& stream,
            uintptr_t address, const Before& before) {
    static const Name kernel_of("kernel"), settled("settled"), marking("marking"), mark("mark"),
        alarm("alarm"), due("due"), parameter_of("parameter"), filled("filled"), fill("fill"),
        last("last"), entered("entered"), fail("fail"), lock_of("lock");
    const py::object kernel = kernel_of.of(prepared);
    if (kernel.is_none()) return false;
    const Held lock(lock_of.of(parts[RANK]));  // in a fork it is another
    const py::handle order = parts[ORDER], timer = parts[TIMER], fabric = parts[FABRIC];
    try {
        const std::chrono::duration<double> now =
            std::chrono::steady_clock::now().time_since_epoch();  // Python's time.monotonic()
        if (!are_equal(stream, settled.of(order)) || is_true(item(alarm.of(timer), 0)) ||
            now.count() >= real(due.of(timer)) || is_true(item(parts[REPORT], 0)) ||
            !is_recorded(parts, prepared) || !is_here(parts))
            return false;
        before();
        const py::object parameter = parameter_of.of(kernel), at = py::int_(address);
        static PyObject* const zero = PyLong_FromLong(0);
        const py::object given = checked(PyTuple_Pack(4, at.ptr(), at.ptr(), zero, zero));
        if (!are_equal(given, filled.of(parameter))) call(fill.of(parameter), given);
        enqueue(parts, kernel, stream);
        if (is_true(marking.of(order))) call(mark.of(order), stream);
        last.set(parts[ERRORS], prepared);
        static PyObject* const one = PyLong_FromLong(1);
        entered.set(fabric, checked(PyNumber_Add(entered.of(fabric).ptr(), one)));
    } catch (const py::error_already_set& error) {
        call(fail.of(parts[RANK]), error.value());
        throw;
    }
    return true;
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
            done = launch(parts, prepared, parts[STREAM], address, [&] {
                call(parts[RECORD], parts[EVENT], caller);
                call(parts[WAIT], parts[STREAM], parts[EVENT], py::int_(0));
            });
        else if (checked(PySet_Contains(parts[OWN_STREAMS].ptr(), caller.ptr())))
            done = launch(parts, prepared, caller, address, [] {});
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
