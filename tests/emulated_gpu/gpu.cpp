// A GPU for a torch that has none: memory of the host that claims to be on "cuda", under the dispatch key of CUDA, whose
// kernels are those of the CPU and run at once. What a real device does later is kept as vector clocks: every kernel,
// copy, event and wait moves them, and memory remembers who read and wrote it last. An access that no event, wait or
// block of the host orders after another one is a race, although the numbers are right here.
#include "gpu.h"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <functional>
#include <set>
#include <thread>
#include <unordered_map>

namespace py = pybind11;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

namespace emulated {
namespace {

struct Use {
  int64_t tick;
  std::string kernel;
};

// An allocation. The caching allocator gives its memory to the next kernel of the stream it was made on.
struct Block {
  StreamId owner = 0;
  StreamId writer = -1;
  Use write{0, ""};
  std::map<StreamId, Use> reads; // since that write
  std::set<StreamId> recorded;   // record_stream: the allocator itself waits for these
  size_t bytes = 0;
  bool is_pinned = false;
  int64_t pool = -1; // of graphs: its memory is never given back to the device
};

// A graph: what to run, in order. Nothing in it keeps memory: it has addresses, as on a device.
struct Graph {
  explicit Graph(int64_t pool);
  ~Graph();
  int64_t pool;
  std::vector<std::function<void(StreamId)>> nodes;
};

// The capture under way. Kernels run at once, for the sizes of their results; at the end that is undone: memory outside
// of the pool is as before, and the pool's is NaN. So nothing that a capture computes can be read.
struct Capture {
  std::shared_ptr<Graph> graph;
  std::thread::id thread;
  std::set<StreamId> streams; // the first one, and those that wait for an event of the capture
  StreamId first;
  bool is_global; // other threads may not wait either
  std::map<void*, std::vector<char>> before; // memory outside of the pool that kernels wrote
  std::map<void*, size_t> made;              // the pool's, used in this capture
};

// A copy between pinned memory and the device, of which the host does not know that it has finished.
struct HostCopy {
  Tensor host;   // the pinned memory
  Tensor values; // what is copied
  bool to_host;
  StreamId stream;
  int64_t tick;
};

std::recursive_mutex mutex;
thread_local int depth = 0;
thread_local std::vector<std::pair<bool, std::string>> untold; // (is a race, text)
thread_local DeviceIndex device = 0;
thread_local std::map<DeviceIndex, StreamId> streams;
thread_local bool inside = false;

DeviceIndex num_devices = 8;
StreamId last_stream = 0;
std::map<StreamId, Clock> clocks;
Clock host_clock;
std::unordered_map<const void*, Block> blocks;
std::vector<HostCopy> host_copies;
std::vector<std::shared_ptr<Pending>> pending;
std::map<std::string, int64_t> launches;
std::set<std::string> races;
int64_t live_bytes = 0, peak_bytes = 0;
std::optional<Capture> capture;
std::map<int64_t, std::multimap<size_t, void*>> free_memory; // of pools: bytes -> memory
std::map<int64_t, int64_t> graphs_of; // pool -> the number of its graphs; CUDA drops a pool with the last one
int64_t last_pool = 0;
// The pseudo stream that clocks of events have which were recorded in a capture.
constexpr StreamId IN_CAPTURE = -7;
std::string last_error; // of a call of CUDA's runtime, which the next kernel reports unless somebody takes it
// Called with (is a race, text). Never freed: the interpreter may be gone before this library.
py::object* listener = nullptr;

void merge(Clock& into, const Clock& other) {
  for (const auto& [stream, tick] : other) into[stream] = std::max(into[stream], tick);
}

bool happened(const Clock& until, StreamId stream, int64_t tick) {
  auto found = until.find(stream);
  return found != until.end() && found->second >= tick;
}

void race(const std::string& text) {
  if (races.insert(text).second) untold.emplace_back(true, text);
}

std::string on(StreamId stream) { return " on stream " + std::to_string(stream); }

const void* memory_of(const Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().data() : nullptr;
}

bool is_captured(StreamId stream) { return capture && capture->streams.count(stream); }

void refuse_in_capture(const std::string& what) {
  const bool asks = capture && (capture->is_global || capture->thread == std::this_thread::get_id());
  TORCH_CHECK(!asks, "CUDA error: operation not permitted when stream is capturing (", what, ")");
}

// Keep what memory outside of the pool holds before the first kernel of the capture writes to it.
void keep_before(const Tensor& tensor) {
  if (!capture || !tensor.defined() || !tensor.has_storage()) return;
  void* memory = tensor.storage().mutable_data();
  if (capture->made.count(memory) || capture->before.count(memory)) return;
  auto* first = static_cast<char*>(memory);
  capture->before[memory] = std::vector<char>(first, first + tensor.storage().nbytes());
}

// The same memory, on the device, without keeping it.
Tensor at_address(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor.defined() ? tensor.clone() : tensor;
  const auto& storage = tensor.storage();
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                   c10::DataPtr(storage.mutable_data(), storage.device()), nullptr, false),
      c10::DispatchKeySet(c10::DispatchKey::CUDA), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  return result;
}

void use(StreamId stream, const void* memory, bool writes, const std::string& kernel) {
  auto found = blocks.find(memory);
  if (inside || is_captured(stream) || found == blocks.end()) return; // a capture reads and writes nothing
  Block& block = found->second;
  const Clock& now = clocks[stream];
  const std::string what = kernel + on(stream) + (writes ? " writes" : " reads");
  if (block.writer >= 0 && block.writer != stream && !happened(now, block.writer, block.write.tick))
    race(what + " what " + block.write.kernel + on(block.writer) + " wrote, without waiting for it");
  if (!writes) {
    block.reads[stream] = {now.count(stream) ? now.at(stream) : 0, kernel};
    return;
  }
  for (const auto& [reader, read] : block.reads)
    if (reader != stream && !happened(now, reader, read.tick))
      race(what + " what " + read.kernel + on(reader) + " reads, without waiting for it");
  block.writer = stream;
  block.write = {now.count(stream) ? now.at(stream) : 0, kernel};
  block.reads.clear();
}

void release(void* memory) {
  bool is_pooled = false;
  {
    Lock lock;
    auto found = blocks.find(memory);
    if (found != blocks.end()) {
      Block& block = found->second;
      Clock now = clocks[block.owner];
      merge(now, host_clock);
      const std::string where = ", allocated" + on(block.owner) + ", is freed while ";
      auto in_use = [&](StreamId stream, int64_t tick) {
        return stream >= 0 && stream != block.owner && !block.recorded.count(stream) && !happened(now, stream, tick);
      };
      is_pooled = block.pool >= 0;
      if (is_pooled) {
        const size_t bytes = block.bytes;
        free_memory[block.pool].emplace(bytes, memory);
        // Who reads it from now on, or at this place of the graph, sees NaN.
        if (capture && capture->graph->pool == block.pool)
          capture->graph->nodes.emplace_back([memory, bytes](StreamId) { memset(memory, 0xff, bytes); });
        else
          memset(memory, 0xff, bytes);
      }
      if (!block.is_pinned && !is_pooled) { // torch frees pinned memory once the copies have finished
        live_bytes -= block.bytes;
        if (in_use(block.writer, block.write.tick))
          race("memory" + where + block.write.kernel + on(block.writer) + " may still write it");
        for (const auto& [reader, read] : block.reads)
          if (in_use(reader, read.tick)) race("memory" + where + read.kernel + on(reader) + " may still read it");
      }
      blocks.erase(found);
    }
  }
  if (!is_pooled) free(memory);
}

struct Memory final : c10::Allocator {
  explicit Memory(bool is_pinned) : is_pinned(is_pinned) {}
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    Lock lock;
    const int64_t pool = !is_pinned && is_captured(current_stream()) ? capture->graph->pool : -1;
    if (pool >= 0) {
      auto& of_pool = free_memory[pool];
      if (auto found = of_pool.find(bytes); found != of_pool.end()) {
        memory = found->second;
        of_pool.erase(found);
      }
    }
    const bool is_new = !memory;
    if (is_new) TORCH_CHECK(posix_memalign(&memory, 512, std::max<size_t>(bytes, 1)) == 0, "CUDA out of memory");
    memset(memory, 0xff, bytes); // NaN: who reads what nothing wrote sees it
    Block& block = blocks[memory] = Block{};
    block.owner = current_stream();
    block.bytes = bytes;
    block.is_pinned = is_pinned;
    block.pool = pool;
    if (pool >= 0) capture->made[memory] = bytes;
    if (!is_pinned && is_new) peak_bytes = std::max(peak_bytes, live_bytes += bytes);
    return {memory, memory, &release, is_pinned ? Device(DeviceType::CPU) : Device(DeviceType::CUDA, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
  bool is_pinned;
};

Memory device_memory(false);
Memory pinned_memory(true);
REGISTER_ALLOCATOR(DeviceType::CUDA, &device_memory);

bool is_pinned(const void* memory) {
  auto found = blocks.find(memory);
  return found != blocks.end() && found->second.is_pinned;
}

// Finish the host copies that the host now knows to be done.
void land_host_copies(const Clock& until) {
  std::vector<HostCopy> left;
  bool before = std::exchange(inside, true);
  at::NoGradGuard no_grad;
  for (auto& copy : host_copies) {
    if (!happened(until, copy.stream, copy.tick)) {
      left.push_back(copy);
    } else if (copy.to_host) {
      copy.host.copy_(copy.values);
    } else if (memcmp(copy.host.data_ptr(), copy.values.data_ptr(), copy.values.nbytes()) != 0) {
      race("the host wrote pinned memory that a copy to the device" + on(copy.stream) + " may still read");
    }
  }
  inside = before;
  host_copies = std::move(left);
}

struct Event {
  Clock clock;
};

bool is_done(const Clock& until, bool tells_host = true);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  static DeviceIndex index(Device of) { return of.index() < 0 ? device : of.index(); }
  static StreamId id(DeviceIndex of) {
    auto found = streams.find(of);
    return found == streams.end() ? 0 : found->second;
  }
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return {DeviceType::CUDA, device}; }
  void setDevice(Device to) const override { device = index(to); }
  void uncheckedSetDevice(Device to) const noexcept override { device = index(to); }
  Device exchangeDevice(Device to) const override { return {DeviceType::CUDA, std::exchange(device, index(to))}; }
  c10::Stream getStream(Device of) const override {
    return c10::Stream(c10::Stream::UNSAFE, of, id(index(of)));
  }
  c10::Stream getDefaultStream(Device of) const override { return c10::Stream(c10::Stream::UNSAFE, of, 0); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = getStream(to.device());
    streams[to.device_index()] = to.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag) const override {
    Lock lock;
    if (!*event) *event = new Event;
    tick(stream.id());
    static_cast<Event*>(*event)->clock = clock_of(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    Lock lock;
    if (event) wait(stream.id(), static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryEvent(void* event) const override { return !event || is_done(static_cast<Event*>(event)->clock); }
  bool queryStream(const c10::Stream& stream) const override { return is_done(clock_of(stream.id())); }
  void synchronizeEvent(void* event) const override {
    if (event) block_host(static_cast<Event*>(event)->clock, "event");
  }
  void synchronizeStream(const c10::Stream& stream) const override { block_host(clock_of(stream.id()), "stream"); }
  void synchronizeDevice(DeviceIndex) const override;
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    Lock lock;
    auto found = blocks.find(memory.get());
    if (found != blocks.end()) found->second.recorded.insert(stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// Whether `until` has happened; if so, and if it is told, the host knows it from now on.
bool is_done(const Clock& until, bool tells_host) {
  std::vector<std::shared_ptr<Pending>> awaited;
  {
    Lock lock;
    refuse_in_capture("a query of an event");
    for (const auto& work : pending)
      if (happened(until, work->stream, work->tick)) awaited.push_back(work);
  }
  for (const auto& work : awaited)
    if (!work->arrive(0)) return false;
  if (!tells_host) return true;
  Lock lock;
  merge(host_clock, until);
  land_host_copies(host_clock);
  return true;
}

Clock all_clocks() {
  Lock lock;
  Clock all;
  for (const auto& [stream, clock] : clocks) merge(all, clock);
  return all;
}

void Guard::synchronizeDevice(DeviceIndex) const { block_host(all_clocks(), "device"); }

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices; }
  int getNumGPUs() const override { return num_devices; }
  DeviceIndex current_device() const override { return device; }
  DeviceIndex getCurrentDevice() const override { return device; }
  void setCurrentDevice(DeviceIndex to) const override { device = to; }
  DeviceIndex exchangeDevice(DeviceIndex to) const override { return std::exchange(device, to); }
  DeviceIndex maybeExchangeDevice(DeviceIndex to) const override { return std::exchange(device, to); }
  Device getDeviceFromPtr(void*) const override { return {DeviceType::CUDA, device}; }
  bool isPinnedPtr(const void* memory) const override {
    Lock lock;
    return is_pinned(memory);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void deviceSynchronize(DeviceIndex) const override { block_host(all_clocks(), "device"); }
};

// ---------------------------------------------------------------------------------------- making and copying tensors

class OnDevice {
 public:
  explicit OnDevice(std::optional<Device> to) : before(device) {
    if (to.has_value() && to->index() >= 0) device = to->index();
  }
  ~OnDevice() { device = before; }

 private:
  DeviceIndex before;
};

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> to, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice guard(to);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory,
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> to, std::optional<bool>) {
  OnDevice guard(to);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

// The waits of the host are those of cudaMemcpyAsync: none between a device and pinned memory if nobody asks for one.
Tensor copy_values(const Tensor& from, const Tensor& to, bool non_blocking) {
  at::NoGradGuard no_grad;
  const auto stream = current_stream();
  const std::string name =
      std::string("copy ") + (from.is_cuda() ? "device" : "host") + " to " + (to.is_cuda() ? "device" : "host");
  const bool crosses = from.is_cuda() != to.is_cuda();
  const Tensor& host = from.is_cuda() ? to : from;
  bool pinned = false;
  {
    Lock lock;
    tick(stream);
    if (!inside) launched(name);
    pinned = crosses && is_pinned(memory_of(host));
    if (!inside && is_captured(stream)) {
      TORCH_CHECK(!crosses, "the emulated GPU captures no copies between the host and the device");
      keep_before(to);
      const Tensor source = at_address(from), target = at_address(to);
      capture->graph->nodes.emplace_back([=](StreamId on_stream) {
        access(on_stream, source, false, name);
        access(on_stream, target, true, name);
        Inside guard;
        on_host(target).copy_(on_host(source).expand(target.sizes()));
      });
    }
    use(stream, memory_of(from), false, name);
    use(stream, memory_of(to), true, name);
  }
  Tensor values = on_host(from), target = on_host(to);
  if (values.sizes() != target.sizes()) values = values.expand(target.sizes());
  if (inside || !crosses || !pinned || !non_blocking) {
    if (crosses && !inside) {
      Lock lock;
      land_host_copies(clocks[stream]); // the device reads what its own stream has copied to the host
    }
    target.copy_(values);
    if (crosses && !inside) {
      const std::string how = pinned ? " (pinned, blocking)" : " (pageable)";
      block_host(clock_of(stream), name + how);
    }
    return to;
  }
  Lock lock;
  land_host_copies(clocks[stream]);
  bool before = std::exchange(inside, true);
  const int64_t now = clocks[stream][stream];
  Tensor kept = values.to(target.scalar_type(), /*non_blocking=*/false, /*copy=*/true).contiguous();
  if (to.is_cuda()) {
    target.copy_(values);
    if (host.is_contiguous() && host.scalar_type() == kept.scalar_type() && host.sizes() == kept.sizes())
      host_copies.push_back({host, kept, false, stream, now});
  } else {
    // The values arrive when the host knows that they have: until then it reads NaN.
    if (target.is_contiguous()) memset(target.data_ptr(), 0xff, target.nbytes());
    host_copies.push_back({target, kept, true, stream, now});
  }
  inside = before;
  return to;
}

Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  if (!self.is_meta() && !from.is_meta()) copy_values(from, self, non_blocking);
  return self;
}

Tensor copy_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  at::NoGradGuard no_grad;
  on_host(to).copy_(on_host(from));
  return to;
}

at::Scalar read_number(const Tensor& self) {
  if (!inside) {
    {
      Lock lock;
      tick(current_stream());
      use(current_stream(), memory_of(self), false, "item");
    }
    block_host(clock_of(current_stream()), "item");
  }
  return on_host(self).item();
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const size_t bytes = (c10::multiply_integers(sizes) + self.storage_offset()) * self.element_size();
  const auto& storage = self.storage();
  if (bytes > storage.nbytes()) {
    auto memory = device_memory.allocate(bytes);
    if (storage.nbytes()) memcpy(memory.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

Tensor& set_storage_(Tensor& self, at::Storage from, c10::SymInt offset, c10::SymIntArrayRef size,
                     c10::SymIntArrayRef stride) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = stride.empty() ? at::detail::defaultStrides(sizes) : C10_AS_INTARRAYREF_SLOW(stride).vec();
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(from));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset.expect_int());
  return self;
}

Tensor& set_tensor_(Tensor& self, const Tensor& from) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(from.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  return self;
}

Tensor& set_whole_storage_(Tensor& self, at::Storage from) {
  const int64_t length = from.nbytes() / self.element_size();
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(from));
  self.unsafeGetTensorImpl()->set_sizes_contiguous({length});
  return self;
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset.has_value() ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

// --------------------------------------------------------------------------------------------------------- kernels

// These take indices on the host, which they copy to the device.
const std::set<std::string> TAKE_HOST_INDICES{"aten::index.Tensor",      "aten::index_put_",
                                              "aten::index_put",         "aten::_index_put_impl_",
                                              "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put"};
// Kernels whose results' sizes the host reads back.
const std::set<std::string> READ_BACK{"aten::nonzero",        "aten::masked_select", "aten::_unique2",
                                      "aten::unique_dim",     "aten::bincount",      "aten::unique_consecutive",
                                      "aten::repeat_interleave.Tensor", "aten::equal"};

struct Operand {
  Tensor tensor;
  bool is_written;
};

std::vector<Tensor> tensors_of(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  return {};
}

c10::IValue value_at_address(const c10::IValue& value) {
  if (value.isTensor()) return at_address(value.toTensor());
  if (value.isTensorList()) {
    std::vector<Tensor> tensors;
    for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(at_address(tensor));
    return tensors;
  }
  if (value.isList()) { // of optional tensors, such as indices
    auto list = c10::impl::GenericList(value.toList().elementType());
    for (const c10::IValue& item : value.toListRef()) list.push_back(item.isTensor() ? at_address(item.toTensor()) : item);
    return list;
  }
  return value;
}

// Add a kernel to the graph: it runs with the same arguments again, and what it returns goes to the same addresses.
void record_kernel(const c10::OperatorHandle& op, const std::string& name, const torch::jit::Stack& arguments,
                   const std::vector<Operand>& operands, const torch::jit::Stack& returned) {
  std::vector<std::pair<Tensor, bool>> used;
  for (const auto& operand : operands) used.emplace_back(at_address(operand.tensor), operand.is_written);
  const size_t count = op.schema().returns().size();
  std::vector<std::vector<Tensor>> results;
  for (size_t i = returned.size() - count; i < returned.size(); i++) {
    results.emplace_back();
    for (const Tensor& tensor : tensors_of(returned[i])) results.back().push_back(at_address(tensor));
  }
  capture->graph->nodes.emplace_back([=](StreamId stream) {
    for (const auto& [tensor, is_written] : used) access(stream, tensor, is_written, name);
    for (const auto& tensors : results)
      for (const Tensor& tensor : tensors)
        if (tensor.defined()) access(stream, tensor, true, name);
    torch::jit::Stack stack = arguments;
    Inside guard;
    const int64_t before = peak_bytes; // the results exist twice here alone
    at::native::cpu_fallback(op, &stack);
    peak_bytes = before;
    for (size_t i = 0; i < count; i++) {
      const auto again = tensors_of(stack[stack.size() - count + i]);
      for (size_t j = 0; j < results[i].size(); j++)
        if (again[j].defined() && memory_of(again[j]) != memory_of(results[i][j]))
          on_host(results[i][j]).copy_(on_host(again[j]));
    }
  });
}

Graph::Graph(int64_t pool) : pool(pool) { graphs_of[pool]++; }

Graph::~Graph() { graphs_of[pool]--; }

void begin_capture(int64_t pool, const std::string& mode) {
  Lock lock;
  TORCH_CHECK(!capture, "a capture is under way");
  TORCH_CHECK(!graphs_of.count(pool) || graphs_of[pool] > 0, "it->second->use_count > 0 INTERNAL ASSERT FAILED");
  const StreamId stream = current_stream();
  TORCH_CHECK(stream != 0, "CUDA graphs must be captured on a non-default stream");
  capture = Capture{std::make_shared<Graph>(pool), std::this_thread::get_id(), {stream}, stream,
                    mode == "global", {}, {}};
  clocks[stream][IN_CAPTURE] = 1;
}

std::shared_ptr<Graph> end_capture() {
  Lock lock;
  TORCH_CHECK(capture, "no capture is under way");
  std::string unjoined;
  for (StreamId stream : capture->streams)
    if (!happened(clocks[capture->first], stream, clocks[stream][stream])) unjoined = std::to_string(stream);
  for (const auto& [memory, bytes] : capture->before) memcpy(memory, bytes.data(), bytes.size());
  for (const auto& [memory, bytes] : capture->made) memset(memory, 0xff, bytes);
  for (auto& [stream, clock] : clocks) clock.erase(IN_CAPTURE);
  auto graph = capture->graph;
  capture.reset();
  TORCH_CHECK(unjoined.empty(), "CUDA error: capture contains unjoined work (of stream ", unjoined, ")");
  return graph;
}

void replay(const Graph& graph) {
  const StreamId stream = current_stream();
  {
    Lock lock;
    TORCH_CHECK(!is_captured(stream), "CUDA error: a graph is replayed in a capture");
    TORCH_CHECK(last_error.empty(), "CUDA error: ", std::exchange(last_error, ""));
    tick(stream);
    launched("graph");
  }
  at::NoGradGuard no_grad;
  for (const auto& node : graph.nodes) node(stream);
}

void run_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name =
      schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  const size_t begin = stack->size() - schema.arguments().size();
  std::vector<Operand> operands;
  std::set<DeviceIndex> devices;
  std::string on_the_host; // an argument
  auto look = [&](const Tensor& tensor, const c10::Argument& argument) {
    if (!tensor.defined()) return;
    if (tensor.is_cuda()) {
      devices.insert(tensor.device().index());
      operands.push_back({tensor, argument.alias_info() && argument.alias_info()->isWrite()});
    } else if (tensor.is_cpu() && tensor.dim() > 0) {
      on_the_host = argument.name();
    }
  };
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto& value = (*stack)[begin + i];
    const auto& argument = schema.arguments()[i];
    if (value.isTensor())
      look(value.toTensor(), argument);
    else if (value.isList())
      for (const c10::IValue& item : value.toListRef())
        if (item.isTensor()) look(item.toTensor(), argument);
  }
  const bool mixed = !devices.empty() && !on_the_host.empty();
  TORCH_CHECK(!mixed || TAKE_HOST_INDICES.count(name),
              "Expected all tensors to be on the same device, but found at least two devices, cuda and cpu! (", name,
              ", argument ", on_the_host, ")");
  TORCH_CHECK(devices.size() < 2, "Expected all tensors to be on the same device, but found two GPUs! (", name, ")");
  const auto stream = current_stream();
  if (!inside) TORCH_CHECK(last_error.empty(), "CUDA error: ", std::exchange(last_error, ""));
  {
    Lock lock;
    tick(stream);
    if (!inside) launched(name);
    for (const auto& operand : operands) use(stream, memory_of(operand.tensor), operand.is_written, name);
  }
  if (!inside && mixed) block_host(clock_of(stream), name + " (copies an index)");
  if (!inside && READ_BACK.count(name)) block_host(clock_of(stream), name);
  const bool records = !inside && is_captured(stream);
  torch::jit::Stack arguments;
  if (records) {
    Lock lock;
    for (const auto& operand : operands)
      if (operand.is_written) keep_before(operand.tensor);
    for (size_t i = begin; i < stack->size(); i++) arguments.push_back(value_at_address((*stack)[i]));
  }
  {
    Inside guard;
    at::native::cpu_fallback(op, stack);
  }
  Lock lock;
  if (records) record_kernel(op, name, arguments, operands, *stack);
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    const auto& value = (*stack)[i];
    std::vector<Tensor> made;
    if (value.isTensor()) made = {value.toTensor()};
    if (value.isTensorList()) made = value.toTensorVector();
    for (const Tensor& tensor : made) {
      auto is_it = [&](const Operand& operand) { return memory_of(operand.tensor) == memory_of(tensor); };
      if (tensor.defined() && tensor.is_cuda() && std::none_of(operands.begin(), operands.end(), is_it))
        use(stream, memory_of(tensor), true, name);
    }
  }
}

// The kernel that attention takes on a Hopper GPU.
int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                         double, bool, std::optional<double>, bool shares_heads) {
  using sdp::SDPBackend;
  const auto& context = at::globalContext();
  const bool is_half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  const bool has_mask = mask.has_value() && mask->defined();
  const bool is_plain = query.dim() == 4 && key.dim() == 4 && query.numel() > 0 && key.numel() > 0;
  if (!is_plain) return static_cast<int64_t>(SDPBackend::math);
  if (is_half && !has_mask && context.userEnabledFlashSDP() && query.size(-1) <= 256 &&
      query.size(-1) == value.size(-1))
    return static_cast<int64_t>(SDPBackend::flash_attention);
  if (context.userEnabledMemEfficientSDP() && (is_half || query.scalar_type() == at::kFloat) &&
      !(shares_heads && query.size(-3) != key.size(-3)) && !(has_mask && mask->requires_grad()))
    return static_cast<int64_t>(SDPBackend::efficient_attention);
  return static_cast<int64_t>(SDPBackend::math);
}

} // namespace

// ---------------------------------------------------------------------------------------------- what others may use

Lock::Lock() {
  mutex.lock();
  depth++;
}

Lock::~Lock() {
  mutex.unlock();
  if (--depth > 0 || untold.empty() || !listener) return;
  auto texts = std::exchange(untold, {});
  py::gil_scoped_acquire gil;
  for (const auto& [is_race, text] : texts) (*listener)(is_race, text);
}

Inside::Inside() : before(std::exchange(inside, true)) {}
Inside::~Inside() { inside = before; }

bool is_capturing() {
  Lock lock;
  return is_captured(current_stream());
}

StreamId current_stream() { return Guard::id(device); }

int64_t tick(StreamId stream) {
  Lock lock;
  if (is_captured(stream)) clocks[stream][IN_CAPTURE] = 1;
  merge(clocks[stream], host_clock); // what the host knows has happened before what it starts
  return ++clocks[stream][stream];
}

Clock clock_of(StreamId stream) {
  Lock lock;
  return clocks[stream];
}

void wait(StreamId stream, const Clock& until) {
  Lock lock;
  if (capture && until.count(IN_CAPTURE)) {
    capture->streams.insert(stream);
  } else if (is_captured(stream)) {
    TORCH_CHECK(until.empty(), "CUDA error: dependency created on uncaptured work in another stream");
  }
  merge(clocks[stream], until);
}

void access(StreamId stream, const Tensor& tensor, bool writes, const std::string& kernel) {
  Lock lock;
  use(stream, memory_of(tensor), writes, kernel);
}

void launched(const std::string& kernel) {
  Lock lock;
  if (is_captured(current_stream())) return;
  launches[kernel]++;
}

void add_pending(const std::shared_ptr<Pending>& work) {
  Lock lock;
  pending.push_back(work);
}

void remove_pending(const Pending* work) {
  Lock lock;
  std::erase_if(pending, [&](const auto& other) { return other.get() == work; });
}

void block_host(const Clock& until, const std::string& why, bool is_main) {
  std::vector<std::shared_ptr<Pending>> awaited;
  {
    Lock lock;
    if (inside) return;
    refuse_in_capture(why);
    if (is_main) untold.emplace_back(false, why);
    for (const auto& work : pending)
      if (happened(until, work->stream, work->tick)) awaited.push_back(work);
  }
  if (!awaited.empty()) {
    std::optional<py::gil_scoped_release> released;
    if (PyGILState_Check()) released.emplace();
    for (const auto& work : awaited) work->arrive(WITHOUT_END);
  }
  Lock lock;
  if (is_main) merge(host_clock, until);
  land_host_copies(is_main ? host_clock : until);
}

Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto storage = std::make_unique<c10::Storage>(tensor.storage());
  void* memory = storage->mutable_data();
  const auto bytes = storage->nbytes();
  c10::DataPtr alias(memory, storage.release(), [](void* held) { delete static_cast<c10::Storage*>(held); },
                     Device(DeviceType::CPU));
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(alias), nullptr, false),
      c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  return result;
}

void bind_nccl(py::module_& module);

} // namespace emulated

using namespace emulated;

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_kernel>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("_copy_from", TORCH_FN(copy_values));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_and_resize));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_local_scalar_dense", TORCH_FN(read_number));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor_));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage_));
  m.impl("view", [](const Tensor& self, c10::SymIntArrayRef size) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
  });
  m.impl("_reshape_alias", [](const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  // These have kernels for every device, which a fallback does not replace.
  for (auto name : {"random_", "random_.from", "random_.to", "normal_", "uniform_", "bernoulli_.float",
                    "bernoulli_.Tensor", "fill_.Scalar", "fill_.Tensor", "zero_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  // torch made its hooks, for a build without CUDA, when it first asked for them: these take their place in memory.
  auto& hooks = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (static_cast<void*>(&hooks)) Hooks();
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);

  m.def("listen", [](py::object to) { listener = to.is_none() ? nullptr : new py::object(to); });
  m.def("set_device_count", [](int count) { num_devices = count; });
  m.def("set_device", [](int index) { device = index; });
  m.def("current_device", [] { return static_cast<int>(device); });
  m.def("new_stream", [] {
    Lock lock;
    return ++last_stream;
  });
  m.def("current_stream", [] { return current_stream(); });
  m.def("exchange_stream", [](StreamId to) { return std::exchange(streams[device], to); });
  m.def("record", [](StreamId stream) {
    Lock lock;
    tick(stream);
    return clocks[stream];
  });
  m.def("wait", [](StreamId stream, const Clock& until) { wait(stream, until); });
  m.def("block_host", &block_host, py::arg("until"), py::arg("why"), py::arg("is_main") = true);
  m.def("set_last_error", [](const std::string& error) { last_error = error; });
  m.def("all_clocks", &all_clocks);
  m.def("is_done", &is_done, py::call_guard<py::gil_scoped_release>());
  m.def("tick", [](StreamId stream) { return tick(stream); });
  m.def("access", [](StreamId stream, const Tensor& tensor, bool writes, const std::string& kernel) {
    access(stream, tensor, writes, kernel);
  });
  m.def("exchange_inside", [](bool value) { return std::exchange(inside, value); });
  m.def("on_host", &on_host);
  m.def("record_stream", [](const Tensor& tensor, StreamId stream) {
    Lock lock;
    auto found = blocks.find(memory_of(tensor));
    if (found != blocks.end()) found->second.recorded.insert(stream);
  });
  m.def("launches", [] { return launches; });
  m.def("forget", [] {
    Lock lock;
    races.clear();
    launches.clear();
  });
  // The host's own memory, between cudaHostRegister and cudaHostUnregister.
  m.def("register_host", [](uintptr_t address, size_t bytes) {
    Lock lock;
    Block& block = blocks[reinterpret_cast<void*>(address)] = Block{};
    block.bytes = bytes;
    block.is_pinned = true;
  });
  m.def("unregister_host", [](uintptr_t address) {
    Lock lock;
    blocks.erase(reinterpret_cast<void*>(address));
  });
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph").def("replay", &replay);
  m.def("new_pool", [] { return ++last_pool; });
  m.def("add_node", [](py::function run) { // of a kernel in Python
    Lock lock;
    auto* kept = new py::function(std::move(run)); // never freed, as the listener
    capture->graph->nodes.emplace_back([kept](StreamId) { (*kept)(); });
  });
  m.def("at_address", &at_address);
  m.def("begin_capture", &begin_capture);
  m.def("end_capture", &end_capture);
  m.def("is_capturing", &is_capturing);
  m.def("live_bytes", [] { return live_bytes; });
  m.def("peak_bytes", [] { return peak_bytes; });
  m.def("reset_peak", [] { peak_bytes = live_bytes; });
  bind_nccl(m);
}
