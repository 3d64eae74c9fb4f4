// The Work of an enqueued call: its wait orders streams, and its future is made here.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "bridge_calls.hpp"

namespace ringcoll {

// The Python half of a group; null once it has ended, or while Python takes it apart.
inline py::object python(const c10d::ProcessGroup* group) {
    static const auto* type = py::detail::get_type_info(typeid(c10d::ProcessGroup));
    const py::handle self = py::detail::get_object_handle(group, type);
    return self && self.ref_count() != 0 ? py::reinterpret_borrow<py::object>(self) : py::object();
}

// Raise the error that a kernel of a group has reported, if any; with Python's lock.
inline void check(const c10d::ProcessGroup* group) {
    static const Name device_of("_device"), parts_of("bridged"), found("_found"),
        check("check_started");
    const py::object self = python(group);
    if (!self) return;
    const py::object device = device_of.of(self);
    py::object held = device.is_none() ? py::none() : parts_of.of(device);
    if (!held.is_none()) {  // as AsyncErrors.failure, at a tenth of its price
        const Parts parts(std::move(held));
        if (!is_true(item(parts[REPORT], 0)) && found.of(parts[ERRORS]).is_none()) return;
    }
    call(check.of(self));
}

// An event of a device, which goes back to those that are free.
class Event {
public:
    explicit Event(const c10::Stream& stream) : device_(stream.device()) {
        if (device_.is_cpu()) return;
        {
            const std::lock_guard<std::mutex> lock(mutex());
            auto& unused = free_of(device_);
            if (!unused.empty()) {
                event_ = unused.back();
                unused.pop_back();
            }
        }
        const Unlocked unlocked;
        impl().record(&event_, stream, device_.index(), c10::EventFlag::PYTORCH_DEFAULT);
    }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    // A wait that is enqueued is not affected by the next record.
    ~Event() {
        if (event_ == nullptr) return;
        const std::lock_guard<std::mutex> lock(mutex());
        free_of(device_).push_back(event_);
    }
    void block(const c10::Stream& stream) const {
        if (event_ != nullptr) impl().block(event_, stream);
    }
    bool reached() const { return event_ == nullptr || impl().queryEvent(event_); }

private:
    c10::impl::VirtualGuardImpl impl() const { return c10::impl::VirtualGuardImpl(device_.type()); }
    // Both for ever: works may end with the process.
    static std::mutex& mutex() {
        static auto* const found = new std::mutex;
        return *found;
    }
    static std::vector<void*>& free_of(const c10::Device& device) {
        static auto* const found =
            new std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, std::vector<void*>>;
        return (*found)[{device.type(), device.index()}];
    }

    c10::Device device_;
    void* event_ = nullptr;
};

// A call that is enqueued: on the group's own stream, if it has one, else on the caller's. Its wait
// orders streams, not the host, and raises what kernels of the group have reported; without a group
// it is a blocking call's, which does nothing.
class Started : public c10d::Work {
public:
    Started(c10::intrusive_ptr<c10d::ProcessGroup> group, at::Tensor tensor,
            std::optional<c10::Stream> stream)
        : group_(std::move(group)), tensor_(std::move(tensor)), stream_(stream) {}

    // What frees the tensor must come behind the call, or its memory is kept until the call ends.
    // As the future does it: torch's operator may call Python, and raise.
    ~Started() override {
        if (!stream_ || waited_) return;
        try {
            const c10::impl::VirtualGuardImpl impl(stream_->device_type());
            impl.recordDataPtrOnStream(tensor_.storage().data_ptr(), *stream_);
        } catch (const std::exception& error) {  // its allocator does not know the memory
            TORCH_WARN("ringcoll: memory of an all_reduce that nobody has waited for: ",
                       error.what());
        }
    }

    // Mark where the call ends on the group's stream: by a future, if one will be asked for, or by
    // an event, for less. Not in the constructor: the tensor is kept if this fails.
    void begin(bool with_future) {
        caller_ = current();
        if (with_future)
            future_ = future();
        else
            event_.emplace(*stream_);
    }

    bool wait(std::chrono::milliseconds /*timeout*/) override {
        if (!group_) return true;
        if (event_)
            event_->block(current());
        else if (future_)
            future_->waitAndThrow();
        const py::gil_scoped_acquire lock;
        check(group_.get());
        waited_ = waited_ || (caller_ && *caller_ == current());
        return true;
    }

    void synchronize() override { wait(kNoTimeout); }
    bool isCompleted() override { return has_ended(); }
    bool isSuccess() const override { return has_ended() && exception() == nullptr; }
    std::exception_ptr exception() const override {
        const py::gil_scoped_acquire lock;
        try {
            if (group_) check(group_.get());
        } catch (...) {
            return std::current_exception();
        }
        return nullptr;
    }
    std::vector<at::Tensor> result() override { return {tensor_}; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
        return future_ ? future_ : future();
    }

private:
    // By a future, with all that the stream has been given: rather late than early.
    bool has_ended() const { return !stream_ || (event_ ? event_->reached() : stream_->query()); }

    c10::Stream current() const {
        return c10::impl::VirtualGuardImpl(stream_->device_type()).getStream(stream_->device());
    }

    // A future of the tensor, behind what the stream of the call has been given.
    c10::intrusive_ptr<c10::ivalue::Future> future() const {
        std::vector<c10::Device> devices;
        if (!tensor_.is_cpu()) devices.push_back(tensor_.device());
        auto made = c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()), std::move(devices));
        const Unlocked unlocked;
        const c10::OptionalStreamGuard on(stream_);  // its event is of the current stream
        // It would look for tensors in the value, by a hash table of it.
        std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> memory{
            tensor_.storage().getWeakStorageImpl()};
        made->markCompleted(c10::IValue(std::vector<at::Tensor>{tensor_}), std::move(memory));
        return made;
    }

    c10::intrusive_ptr<c10d::ProcessGroup> group_;
    at::Tensor tensor_;
    std::optional<c10::Stream> stream_, caller_;
    bool waited_ = false;  // the caller's stream has; written with Python's lock
    std::optional<Event> event_;
    c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace ringcoll
