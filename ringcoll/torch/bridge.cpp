// The bridge from torch's C++ to a group written in Python: see bridge.py.
//
// torch holds such a group as a PyProcessGroup. Each call from C++, as DDP makes for a bucket,
// turns tensors and options into Python's, calls the Python method, and asks the Work that this
// returns for its future by another. A Group does the same but for an all_reduce that Python can
// start by one function: it calls that and makes the future here.
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/PyProcessGroup.hpp>

#include <optional>
#include <tuple>
#include <vector>

namespace {

using StreamId = std::tuple<int64_t, int64_t, int64_t>;  // as torch.Stream has it

class Group : public c10d::PyProcessGroup {
public:
    using PyProcessGroup::PyProcessGroup;

    // torch may drop a group without Python's lock, and after Python has ended.
    ~Group() override {
        if (!Py_IsInitialized()) {
            start_.release();
        } else if (start_) {
            const py::gil_scoped_acquire lock;
            start_ = py::object();
        }
    }

    // `start(tensor)` returns True once it has enqueued an all_reduce, a sum, on `stream`, which
    // waits for the caller's by then; without a stream, once that has ended.
    void take(const py::function& start, c10::Device device, std::optional<c10::Stream> stream) {
        start_ = py::weakref(py::handle(start));  // it refers to this group
        device_ = device;
        stream_ = stream;
        if (stream) before_.emplace(device.type());
    }

    void drop() { start_ = py::object(); }

    c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                             const c10d::AllreduceOptions& options) override {
        if (options.asyncOp && options.reduceOp == c10d::ReduceOp::SUM && tensors.size() == 1) {
            const py::gil_scoped_acquire lock;
            if (start_ && tensors[0].device() == device_ && starts(tensors[0]))
                return ended(tensors);
        }
        return PyProcessGroup::allreduce(tensors, options);
    }

private:
    bool starts(const at::Tensor& tensor) {
        const py::object start = start_();
        if (start.is_none()) return false;
        if (stream_) {
            before_->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
            before_->block(*stream_);
        }
        return start(tensor).is(py::handle(Py_True));
    }

    // A Work whose future is behind all that the stream has been given.
    c10::intrusive_ptr<c10d::Work> ended(const std::vector<at::Tensor>& tensors) const {
        std::vector<c10::Device> devices;
        if (stream_) devices.push_back(device_);
        const auto type = c10::ListType::create(c10::TensorType::get());
        const auto future = c10::make_intrusive<c10::ivalue::Future>(type, std::move(devices));
        if (stream_) {
            tensors[0].record_stream(*stream_);  // the future may be dropped without a wait
            const c10::StreamGuard current(*stream_);
            future->markCompleted(c10::IValue(tensors));
        } else {
            future->markCompleted(c10::IValue(tensors));
        }
        return c10d::Work::create_from_future(future);
    }

    py::object start_;  // a weak reference; null: no calls are started here
    c10::Device device_{c10::kCPU};
    std::optional<c10::Stream> stream_;
    std::optional<c10::Event> before_;
};

// ProcessGroup.__init__ of pybind11, which makes a PyProcessGroup of an instance of a subclass.
void init(const py::handle& self, int rank, int size) {
    const auto* type = py::detail::get_type_info(typeid(c10d::ProcessGroup));
    auto* instance = reinterpret_cast<py::detail::instance*>(self.ptr());
    const c10::intrusive_ptr<c10d::ProcessGroup> group = c10::make_intrusive<Group>(rank, size);
    instance->get_value_and_holder(type).value_ptr() = group.get();
    type->init_instance(instance, &group);
}

Group& group_of(const py::handle& self) {
    return dynamic_cast<Group&>(self.cast<c10d::ProcessGroup&>());
}

void take(const py::handle& self, const py::function& start, const c10::Device& device,
          const std::optional<StreamId>& stream) {
    std::optional<c10::Stream> found;
    if (stream) {
        const auto [id, index, type] = *stream;
        found = c10::Stream::unpack3(id, static_cast<c10::DeviceIndex>(index),
                                     static_cast<c10::DeviceType>(type));
    }
    group_of(self).take(start, device, found);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.def("init", &init);
    module.def("take", &take);
    module.def("drop", [](const py::handle& self) { group_of(self).drop(); });
}
