// The bridge from torch's C++ to a group written in Python: see bridge.py.
//
// torch holds such a group as a PyProcessGroup. Each call from C++, as DDP makes for a bucket,
// converts tensors and options, calls the Python method, and asks the Work that this returns for
// its future by another. A Group does the same but for a sum of one tensor: there one method of
// Python, which is told where the tensor lies, starts the call, and the Work and the future are
// made here.
#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/PyProcessGroup.hpp>

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace {

// Whether a tensor has elements that lie one after the other as they are, in its storage.
bool is_plain(const at::Tensor& tensor) {
    if (at::isTensorSubclassLike(tensor) || tensor.layout() != c10::kStrided ||
        !tensor.is_contiguous() || tensor.is_neg() || tensor.is_conj() || tensor.numel() == 0)
        return false;
    const int64_t end = tensor.storage_offset() + tensor.numel();
    return static_cast<uint64_t>(end) * tensor.itemsize() <= tensor.storage().nbytes();
}

// A name whose string Python makes once.
class Name {
public:
    explicit Name(const char* text) : text_(PyUnicode_InternFromString(text)) {}
    py::object of(const py::handle& object) const {
        PyObject* found = PyObject_GetAttr(object.ptr(), text_);
        if (found == nullptr) throw py::error_already_set();
        return py::reinterpret_steal<py::object>(found);
    }

private:
    PyObject* text_;  // for ever
};

class Group : public c10d::PyProcessGroup {
public:
    using PyProcessGroup::PyProcessGroup;
    using StreamId = std::tuple<int64_t, int64_t, int64_t>;  // as torch.Stream has it

    c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                             const c10d::AllreduceOptions& options) override;

    // Raise the error that a kernel has reported, if any; with Python's lock.
    void check() const {
        static const Name name("check_started");
        if (const py::object self = python()) name.of(self)();
    }

private:
    // Start a sum; None if nothing was done.
    py::object start(const at::Tensor& tensor) const;

    // The Python half; null once it has ended, or while Python takes it apart.
    py::object python() const {
        const auto* base = static_cast<const c10d::ProcessGroup*>(this);
        static const auto* type = py::detail::get_type_info(typeid(c10d::ProcessGroup));
        const py::handle self = py::detail::get_object_handle(base, type);
        return self && self.ref_count() != 0 ? py::reinterpret_borrow<py::object>(self)
                                             : py::object();
    }
};

// A call that Python has started on a stream of the group's, or, without one, has made: start_sum
// returns the stream's id, or (). Its wait orders streams, not the host.
class Started : public c10d::Work {
public:
    Started(c10::intrusive_ptr<Group> group, at::Tensor tensor, std::optional<c10::Stream> stream)
        : group_(std::move(group)), tensor_(std::move(tensor)), stream_(stream) {}

    // What frees the tensor must come behind the call, or its memory is kept until the call ends.
    // As the future does it: torch's operator may call Python, and raise.
    ~Started() override {
        if (!stream_ || waited_) return;
        const c10::impl::VirtualGuardImpl impl(stream_->device_type());
        impl.recordDataPtrOnStream(tensor_.storage().data_ptr(), *stream_);
    }

    // Make the future; not in the constructor, so that the tensor is kept if this fails.
    void begin() {
        std::vector<c10::Device> devices;
        if (stream_) {
            caller_ = current();
            devices.push_back(stream_->device());
        }
        const auto type = c10::ListType::create(c10::TensorType::get());
        future_ = c10::make_intrusive<c10::ivalue::Future>(type, std::move(devices));
        const c10::OptionalStreamGuard on(stream_);  // the future's event is of the current stream
        future_->markCompleted(c10::IValue(std::vector<at::Tensor>{tensor_}));
    }

    bool wait(std::chrono::milliseconds /*timeout*/) override {
        future_->waitAndThrow();
        const py::gil_scoped_acquire lock;
        group_->check();
        waited_ = waited_ || (caller_ && *caller_ == current());
        return true;
    }

    void synchronize() override { wait(kNoTimeout); }
    // Of all that the stream has been given: rather late than early.
    bool isCompleted() override { return !stream_ || stream_->query(); }
    std::vector<at::Tensor> result() override { return {tensor_}; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

private:
    c10::Stream current() const {
        return c10::impl::VirtualGuardImpl(stream_->device_type()).getStream(stream_->device());
    }

    c10::intrusive_ptr<Group> group_;
    at::Tensor tensor_;
    std::optional<c10::Stream> stream_, caller_;
    bool waited_ = false;  // the caller's stream has; read and written with Python's lock
    c10::intrusive_ptr<c10::ivalue::Future> future_;
};

py::object Group::start(const at::Tensor& tensor) const {
    static const Name start("start_sum"), keep("keep_started");
    const py::object self = python();
    if (!self) return py::none();
    try {
        // What Python would ask the tensor for, its caches cold, takes it as long as a launch.
        return start.of(self)(reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr()),
                              tensor.numel(), tensor.scalar_type(), tensor.get_device());
    } catch (const py::error_already_set&) {
        keep.of(self)(tensor);  // an interrupt may have come behind the launch
        throw;
    }
}

c10::intrusive_ptr<c10d::Work> Group::allreduce(std::vector<at::Tensor>& tensors,
                                                const c10d::AllreduceOptions& options) {
    if (options.asyncOp && options.reduceOp == c10d::ReduceOp::SUM && tensors.size() == 1 &&
        is_plain(tensors[0])) {
        const py::gil_scoped_acquire lock;
        const py::object stream = start(tensors[0]);
        if (!stream.is_none()) {
            std::optional<c10::Stream> found;
            if (py::len(stream) != 0) {
                const auto [id, index, type] = stream.cast<StreamId>();
                found = c10::Stream::unpack3(id, static_cast<c10::DeviceIndex>(index),
                                             static_cast<c10::DeviceType>(type));
            }
            auto work = c10::make_intrusive<Started>(c10::intrusive_ptr<Group>::reclaim_copy(this),
                                                     tensors[0], found);
            work->begin();
            return work;
        }
    }
    return PyProcessGroup::allreduce(tensors, options);
}

// ProcessGroup.__init__ of pybind11, which makes a PyProcessGroup of an instance of a subclass.
void init(const py::handle& self, int rank, int size) {
    const auto* type = py::detail::get_type_info(typeid(c10d::ProcessGroup), true);
    auto* instance = reinterpret_cast<py::detail::instance*>(self.ptr());
    if (instance->get_value_and_holder(type).instance_registered()) return;  // by an earlier call
    c10d::ProcessGroup* group = new Group(rank, size);  // which the instance's holder takes
    instance->get_value_and_holder(type).value_ptr() = group;
    type->init_instance(instance, nullptr);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    if (py::detail::get_type_info(typeid(c10d::ProcessGroup)) == nullptr)
        throw py::import_error("torch was built with another pybind11 or compiler");
    module.def("init", &init);
}
