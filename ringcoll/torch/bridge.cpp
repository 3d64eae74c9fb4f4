// The bridge from torch's C++ to a group written in Python: see bridge.py.
//
// torch holds such a group as a PyProcessGroup. Each call from C++, as DDP makes for a bucket,
// converts tensors and options, calls the Python method, and asks the Work that this returns for
// its future by another. A Group does the same but for a sum of one tensor: there one method of
// Python starts the call, and the Work and the future are made here.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/PyProcessGroup.hpp>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace {

// Whether a tensor's elements lie one after the other as they are.
bool is_plain(const at::Tensor& tensor) {
    return tensor.layout() == c10::kStrided && tensor.is_contiguous() && !tensor.is_neg() &&
           !tensor.is_conj();
}

class Group : public c10d::PyProcessGroup {
public:
    using PyProcessGroup::PyProcessGroup;
    using StreamId = std::tuple<int64_t, int64_t, int64_t>;  // as torch.Stream has it

    c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                             const c10d::AllreduceOptions& options) override;

    // Raise the error that a kernel has reported, if any.
    void check() const {
        const py::gil_scoped_acquire lock;
        if (const py::function check = method("check_started")) check();
    }

private:
    py::function method(const char* name) const {
        return py::get_override(static_cast<const c10d::ProcessGroup*>(this), name);
    }
};

// A call that Python has started on a stream of the group's, or, without one, has made. Its wait
// orders streams, not the host.
class Started : public c10d::Work {
public:
    Started(c10::intrusive_ptr<Group> group, at::Tensor tensor, std::optional<c10::Stream> stream)
        : group_(std::move(group)), tensor_(std::move(tensor)), stream_(stream) {
        const auto type = c10::ListType::create(c10::TensorType::get());
        std::vector<c10::Device> devices;
        if (stream_) {
            caller_ = current();
            devices.push_back(stream_->device());
        }
        future_ = c10::make_intrusive<c10::ivalue::Future>(type, std::move(devices));
        const c10::OptionalStreamGuard on(stream_);  // the future's event is of the current stream
        future_->markCompleted(c10::IValue(std::vector<at::Tensor>{tensor_}));
    }

    // What frees the tensor must come behind the call, or its memory is kept until the call ends.
    ~Started() override {
        if (caller_) tensor_.record_stream(*stream_);
    }

    bool wait(std::chrono::milliseconds /*timeout*/) override {
        future_->wait();
        group_->check();
        if (caller_ && *caller_ == current()) caller_.reset();
        return true;
    }

    bool isCompleted() override { return !stream_ || stream_->query(); }
    std::vector<at::Tensor> result() override { return {tensor_}; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

private:
    c10::Stream current() const {
        return c10::impl::VirtualGuardImpl(stream_->device_type()).getStream(stream_->device());
    }

    c10::intrusive_ptr<Group> group_;
    at::Tensor tensor_;
    std::optional<c10::Stream> stream_, caller_;  // caller_: until its stream has waited
    c10::intrusive_ptr<c10::ivalue::Future> future_;
};

c10::intrusive_ptr<c10d::Work> Group::allreduce(std::vector<at::Tensor>& tensors,
                                                const c10d::AllreduceOptions& options) {
    if (options.asyncOp && options.reduceOp == c10d::ReduceOp::SUM && tensors.size() == 1 &&
        is_plain(tensors[0])) {
        const py::gil_scoped_acquire lock;
        // Of a Python half that has ended there is no method, and the call below is refused.
        if (const py::function start = method("start_sum")) {
            const py::object stream = start(tensors[0]);
            if (!stream.is_none()) {
                std::optional<c10::Stream> found;
                if (py::len(stream) != 0) {
                    const auto [id, index, type] = stream.cast<StreamId>();
                    found = c10::Stream::unpack3(id, static_cast<c10::DeviceIndex>(index),
                                                 static_cast<c10::DeviceType>(type));
                }
                auto group = c10::intrusive_ptr<Group>::reclaim_copy(this);
                return c10::make_intrusive<Started>(std::move(group), tensors[0], found);
            }
        }
    }
    return PyProcessGroup::allreduce(tensors, options);
}

// ProcessGroup.__init__ of pybind11, which makes a PyProcessGroup of an instance of a subclass.
void init(const py::handle& self, int rank, int size) {
    const auto* type = py::detail::get_type_info(typeid(c10d::ProcessGroup), true);
    auto* instance = reinterpret_cast<py::detail::instance*>(self.ptr());
    c10d::ProcessGroup* group = new Group(rank, size);  // which the instance's holder takes
    instance->get_value_and_holder(type).value_ptr() = group;
    type->init_instance(instance, nullptr);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("init", &init); }
