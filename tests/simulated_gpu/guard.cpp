// What torch's C++ asks of a device: the current device and stream of each thread, and events.
//
// torch's futures, autograd's threads and torch.Stream reach a device through this interface. Currents are kept
// here, a stream is its number, and all else is asked of stream.py by function pointers.

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr int kMaxDevices = 16;

struct Calls {
  int64_t (*new_stream)(int device);
  void* (*record)(void* event, int device, int64_t stream);
  void (*block)(void* event, int device, int64_t stream);
  int (*query_event)(void* event);
  void (*destroy_event)(void* event);
  void (*synchronize_event)(void* event);
  int (*query_stream)(int device, int64_t stream);
  void (*synchronize_stream)(int device, int64_t stream);
  void (*synchronize_device)(int device);
  void (*record_memory)(void* data, int device, int64_t stream);
  void* (*allocate)(int64_t num_bytes, int device);
  void (*free)(void* data);
};

int num_devices = 1;
Calls calls{};
thread_local c10::DeviceIndex current_device = 0;
thread_local int64_t current_streams[kMaxDevices] = {};

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto kType = c10::DeviceType::PrivateUse1;

DeviceIndex number_of(Device device) {
  return device.has_index() ? device.index() : current_device;
}

struct SimulatedGuard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  Device getDevice() const override { return Device(kType, current_device); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    current_device = number_of(device);
    return before;
  }
  void setDevice(Device device) const override { current_device = number_of(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = number_of(device); }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(num_devices); }

  Stream stream_of(DeviceIndex device, int64_t id) const {
    return Stream(Stream::UNSAFE, Device(kType, device), id);
  }
  Stream getStream(Device device) const override {
    return stream_of(number_of(device), current_streams[number_of(device)]);
  }
  Stream getDefaultStream(Device device) const override { return stream_of(number_of(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device); }
  Stream getNewStream(Device device, int = 0) const override {
    return stream_of(number_of(device), calls.new_stream(number_of(device)));
  }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    *event = calls.record(*event, stream.device_index(), stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    if (event) calls.block(event, stream.device_index(), stream.id());
  }
  bool queryEvent(void* event) const override { return !event || calls.query_event(event); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    if (event) calls.destroy_event(event);
  }
  void synchronizeEvent(void* event) const override {
    if (event) calls.synchronize_event(event);
  }
  bool queryStream(const Stream& stream) const override {
    return calls.query_stream(stream.device_index(), stream.id());
  }
  void synchronizeStream(const Stream& stream) const override {
    calls.synchronize_stream(stream.device_index(), stream.id());
  }
  void synchronizeDevice(const DeviceIndex device) const override { calls.synchronize_device(device); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    calls.record_memory(data.get(), stream.device_index(), stream.id());
  }
};

// What `torch.UntypedStorage(n, device="simgpu")` asks; tensors come from `empty` in kernels.py.
struct SimulatedAllocator final : public c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* data = calls.allocate(static_cast<int64_t>(num_bytes), current_device);
    return {data, data, calls.free, Device(kType, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return calls.free; }
  void copy_data(void* out, const void* source, std::size_t count) const override {
    default_copy_data(out, source, count);
  }
};

SimulatedAllocator allocator;

} // namespace

extern "C" {

// Of Python, which the process has loaded.
int PyGILState_Ensure();
void PyGILState_Release(int);
void PyErr_Fetch(void**, void**, void**);
void PyErr_Restore(void*, void*, void*);

// Frees the memory of a tensor. While an exception is raised, too: Python must not see it meanwhile.
void (*delete_in_python)(void*) = nullptr;
void delete_tensor(void* managed) {
  const int state = PyGILState_Ensure();
  void *kind, *value, *trace;
  PyErr_Fetch(&kind, &value, &trace);
  delete_in_python(managed);
  PyErr_Restore(kind, value, trace);
  PyGILState_Release(state);
}
void use_deleter(void (*given)(void*)) { delete_in_python = given; }

void register_guard(int devices, const Calls* given) {
  num_devices = devices;
  calls = *given;
  static c10::impl::DeviceGuardImplRegistrar registrar(kType, new SimulatedGuard());
  c10::SetAllocator(kType, &allocator);
}
int get_device() { return current_device; }
void set_device(int device) { current_device = static_cast<DeviceIndex>(device); }
int64_t get_stream(int device) { return current_streams[device]; }
void set_stream(int device, int64_t stream) { current_streams[device] = stream; }
}
