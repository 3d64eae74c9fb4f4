// The bridge from torch to a group written in Python: see bridge.py.
//
// torch holds such a group as a PyProcessGroup. Each call from C++, as DDP makes for a bucket,
// converts tensors and options, calls the Python method, and asks the Work that this returns for
// its future by another. A Group does the same, but for what needs less of Python:
//
// - An all_reduce in place that is like an earlier one is found here and enqueued at once, if the
//   fast path takes it (executors/cuda/fast_path.py). The Python method tries this first too.
// - Another sum of one tensor, asynchronous, is started by one method of Python, which is told
//   where the tensor lies.
//
// The Work and the future of both are made here. Between calls nothing of a group is kept here:
// Python's garbage collector would not find what keeps it alive.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/distributed/c10d/PyProcessGroup.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bridge_calls.hpp"
#include "bridge_work.hpp"

namespace ringcoll {
namespace {

using c10d::AllreduceOptions;
using StreamId = std::tuple<int64_t, int64_t, int64_t>;  // as torch.Stream has it
using GroupPointer = c10::intrusive_ptr<c10d::ProcessGroup>;

// The Work of a call that has been started on such a stream; of a blocking call without a group.
// Nobody refers to it yet.
std::unique_ptr<c10d::Work> work_of(const py::handle& self, GroupPointer group,
                                    const at::Tensor& tensor, const py::object& stream,
                                    bool with_future) {
    static const Name device_of("_device"), raise("raise_failure");
    std::optional<c10::Stream> found;
    if (py::len(stream) != 0) {
        const auto [id, index, type] = stream.cast<StreamId>();
        found = c10::Stream::unpack3(id, static_cast<c10::DeviceIndex>(index),
                                     static_cast<c10::DeviceType>(type));
    }
    auto work = std::make_unique<Started>(std::move(group), tensor, found);
    try {
        if (found) work->begin(with_future);
    } catch (const c10::Error& error) {
        const py::handle kind(PyExc_RuntimeError);
        raise.of(device_of.of(self))(kind(error.what_without_backtrace()));
        throw;
    }
    return work;
}

// What an object holds whose class is pybind11's own for AllreduceOptions; null before __init__.
const AllreduceOptions* held_options(PyObject* object) {
    auto* const instance = reinterpret_cast<py::detail::instance*>(object);
    return static_cast<const AllreduceOptions*>(instance->get_value_and_holder().value_ptr());
}

// A new Work in Python, without pybind11's search for its class and for itself.
PyObject* in_python(std::unique_ptr<c10d::Work> work) {
    static auto* const type = py::detail::get_type_info(typeid(c10d::Work), true);
    auto made = py::reinterpret_steal<py::object>(py::detail::make_new_instance(type->type));
    auto* const instance = reinterpret_cast<py::detail::instance*>(made.ptr());
    instance->get_value_and_holder().value_ptr() = work.release();  // which the holder takes
    type->init_instance(instance, nullptr);
    return made.release().ptr();
}

class Group : public c10d::PyProcessGroup {
public:
    using PyProcessGroup::PyProcessGroup;

    c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                             const AllreduceOptions& options) override {
        if (tensors.size() == 1 && is_plain(tensors[0])) {
            const py::gil_scoped_acquire lock;
            if (const py::object self = python(this)) {
                const bool aside = options.asyncOp;
                py::object stream = start_kept(self, tensors[0], options, aside);
                if (stream.is_none() && aside && options.reduceOp == c10d::ReduceOp::SUM)
                    stream = start_sum(self, tensors[0]);
                if (!stream.is_none())
                    return c10::intrusive_ptr<c10d::Work>::unsafe_steal_from_new(
                        work_of(self, aside ? GroupPointer::reclaim_copy(this) : nullptr,
                                tensors[0], stream, true)
                            .release());
            }
        }
        return PyProcessGroup::allreduce(tensors, options);
    }

private:
    static py::object start_sum(const py::object& self, const at::Tensor& tensor) {
        static const Name start("start_sum"), keep("keep_started");
        try {
            // What Python would ask the tensor for, its caches cold, takes it as long as a launch.
            return start.of(self)(reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr()),
                                  tensor.numel(), tensor.scalar_type(), tensor.get_device());
        } catch (const py::error_already_set&) {
            keep.of(self)(tensor);  // an interrupt may have come behind the launch
            throw;
        }
    }
};

// -- the module --------------------------------------------------------------------------------

// ProcessGroup.__init__ of pybind11, which makes a PyProcessGroup of an instance of a subclass.
void init(const py::handle& self, int rank, int size) {
    const auto* type = py::detail::get_type_info(typeid(c10d::ProcessGroup), true);
    auto* instance = reinterpret_cast<py::detail::instance*>(self.ptr());
    if (instance->get_value_and_holder(type).instance_registered()) return;  // by an earlier call
    c10d::ProcessGroup* group = new Group(rank, size);  // which the instance's holder takes
    instance->get_value_and_holder(type).value_ptr() = group;
    type->init_instance(instance, nullptr);
}

// all_reduce(group, tensors, options): what a group's Python method tries first. The Work of a call
// that is like an earlier one; None if nothing was done, whatever the tensors and options are.
PyObject* all_reduce(PyObject* /*module*/, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    static PyObject* const options_type = py::type::of<AllreduceOptions>().release().ptr();
    if (count == 3 && PyList_CheckExact(given[1]) && PyList_GET_SIZE(given[1]) == 1 &&
        reinterpret_cast<PyObject*>(Py_TYPE(given[2])) == options_type &&
        held_options(given[2]) != nullptr && THPVariable_Check(PyList_GET_ITEM(given[1], 0))) {
        // Other threads may change the list and the options while this one launches.
        const at::Tensor tensor = THPVariable_Unpack(PyList_GET_ITEM(given[1], 0));
        const AllreduceOptions& options = *held_options(given[2]);
        const bool aside = options.asyncOp;
        const py::handle group(given[0]);
        const py::object stream =
            is_plain(tensor) ? start_kept(group, tensor, options, aside) : py::none();
        if (!stream.is_none())
            return in_python(work_of(group, aside ? group.cast<GroupPointer>() : nullptr, tensor,
                                     stream, false));
    }
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"all_reduce", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(all_reduce)),
     METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    if (py::detail::get_type_info(typeid(c10d::ProcessGroup)) == nullptr)
        throw py::import_error("torch was built with another pybind11 or compiler");
    module.def("init", &init);
    checked(PyModule_AddFunctions(module.ptr(), methods));
}

}  // namespace ringcoll
